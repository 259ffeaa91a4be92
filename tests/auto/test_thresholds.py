"""Where recipe "auto" hands a call to torch's own attention: what decides it, and what it is decided by."""

from __future__ import annotations

import json
import logging

import pytest
import torch

import sagebwd
from sagebwd import dispatch
from sagebwd.auto import thresholds
from sagebwd.auto.thresholds import FORWARD, FULL, KINDS, MASK, PACKED, TRAINING, WINDOW, Threshold
from sagebwd.call import Size
from tests.auto.calls import ASK, LARGE, threshold
from tools.thresholds import ROOT, TABLE, of_file, text_of

CPU = torch.device("cpu")


def size(tokens, keys=None, elements=LARGE):
    return Size(tokens, tokens if keys is None else keys, elements)


def runs(ask=ASK, of=None):
    return dispatch.choose(ask, of or size(2048)).name


def test_calls_shorter_than_the_threshold_are_torchs(measured):
    measured += [threshold(2048), threshold(1024, direction=TRAINING)]
    assert [runs(of=size(n)) for n in (2047, 2048)] == ["torch/torch", "hopper/hopper"]
    assert [runs(ASK._replace(training=True), size(n)) for n in (1023, 1024)] == ["torch/torch", "hopper/hopper"]
    assert dispatch.choose(ASK, size(1)) is dispatch.IN_TORCH
    assert str(dispatch.IN_TORCH.recipe) == "full"
    assert dispatch.IN_TORCH.impl == "torch"


def test_sequences_that_differ_in_length_count_as_their_harmonic_mean(measured):
    measured.append(threshold(1000))
    assert [runs(of=size(32760, keys)) for keys in (507, 508)] == ["torch/torch", "hopper/hopper"]
    assert runs(of=size(1, 10**6)) == "torch/torch"


def test_small_calls_cross_where_small_ones_were_timed(measured):
    measured += [threshold(1024), threshold(4096, elements=LARGE // 8)]
    assert runs(of=size(2048)) == "hopper/hopper"
    assert runs(of=size(2048, elements=LARGE - 1)) == "torch/torch"
    assert runs(of=size(4096, elements=LARGE - 1)) == "hopper/hopper"
    assert runs(of=size(8192, elements=LARGE // 8 - 1)) == "torch/torch"  # smaller than any that was timed


def test_what_was_never_faster_and_what_was_not_timed_is_torchs(measured):
    assert runs(of=size(1 << 20)) == "torch/torch"
    measured += [threshold(None), threshold(256, kind=WINDOW), threshold(256, dims=(256, 256))]
    assert runs(of=size(1 << 20)) == "torch/torch"
    assert runs(ASK._replace(kind=FULL)) == "torch/torch"
    assert runs(ASK._replace(kind=WINDOW)) == "hopper/hopper"


def test_a_width_counts_as_the_next_smaller_of_the_same_kernels(measured):
    measured += [threshold(2048, dims=(80, 80)), threshold(512, dims=(96, 96)), threshold(256, dims=(64, 64))]
    found = {d: runs(ASK._replace(head_dim=d, value_dim=d), size(1024)) for d in (64, 72, 80, 88, 96)}
    assert found == {
        64: "hopper/hopper", 72: "torch/torch", 80: "torch/torch", 88: "torch/torch", 96: "hopper/hopper",
    }  # fmt: skip
    assert runs(ASK._replace(head_dim=88, value_dim=88), size(2048)) == "hopper/hopper"
    assert runs(ASK._replace(head_dim=72, value_dim=72), size(1 << 20)) == "torch/torch"


def test_what_was_timed_on_other_kernels_does_not_count(measured, monkeypatch):
    measured += [threshold(256), threshold(512, kind=MASK)]
    assert runs(ASK._replace(kind=MASK)) == "hopper/hopper"
    monkeypatch.setattr(dispatch, "_missing", lambda: "nvidia-cutlass-dsl is not installed")
    dispatch._choose.cache_clear()
    dispatch.thresholds_of.cache_clear()
    assert runs() == "torch/torch"


def test_what_was_named_is_never_handed_over(measured):
    for change in ({"recipe": sagebwd.Recipe.named("mixed")}, {"impl": "hopper"}, {"impl": dispatch.FASTEST}):
        assert runs(ASK._replace(**change), size(16)) == "hopper/hopper"
    assert dispatch.choose(ASK, None).name == "hopper/hopper"
    with pytest.raises(TypeError, match="dtype float32"):
        runs(ASK._replace(dtype=torch.float32), size(16))
    assert runs(ASK._replace(device=CPU), size(16)) == "reference/reference"
    assert runs(ASK._replace(only_torch="dropout_p", device=CPU), size(16)) == "torch/torch"


def test_the_table_of_this_project():
    table = thresholds._of_this_project()
    assert {"NVIDIA H200", "NVIDIA H100 80GB HBM3"} <= set(table)
    for rows in table.values():
        for row in (Threshold(**row) for row in rows):
            assert row.kind in KINDS
            assert row.direction in (FORWARD, TRAINING)
    assert thresholds.of_card("NVIDIA A100-SXM4-80GB", "0") == ()
    assert len(thresholds.of_card("NVIDIA H200", "0")) == len(table["NVIDIA H200"])


def test_packed_calls_are_as_long_as_their_mean(measured):
    measured.append(threshold(1000, kind=PACKED))
    ask = ASK._replace(kind=PACKED)
    assert [runs(ask, size(n)) for n in (999, 1000)] == ["torch/torch", "hopper/hopper"]


def place_of(row):
    """What the rows of a later file replace."""
    return row["kind"], row["head_dim"], row["value_dim"]


def test_the_table_is_what_its_files_say():
    table, text = {}, TABLE.read_text(encoding="utf-8")
    for rows in json.loads(text).values():
        for source in {row["source"] for row in rows}:
            taken = {place_of(row) for row in rows if row["source"] == source}
            card, found = of_file(ROOT / source)
            all_rows = (row._asdict() for row in found)
            table.setdefault(card, []).extend(row for row in all_rows if place_of(row) in taken)
    assert text == text_of(table)


CARD = "NVIDIA H200"
ROW = {
    "kind": FULL, "head_dim": 64, "value_dim": 64, "direction": FORWARD, "size": LARGE, "elements": LARGE,
    "tokens": 256, "recipe": "mixed", "impl": "hopper/hopper", "ms": 1.0, "torch_ms": 2.0,
}  # fmt: skip


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The file of what was measured on this machine."""
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    path = thresholds.kept_at(CARD, "0")
    path.parent.mkdir()
    thresholds.of_card.cache_clear()
    yield path
    thresholds.of_card.cache_clear()


def test_what_was_measured_here_comes_first(kept, caplog):
    kept.write_text(json.dumps({"rows": [ROW, {**ROW, "tokens": 512, "torch_ms": None, "size": 1 << 24}]}))
    assert [x.tokens for x in thresholds.of_card(CARD, "0")] == [256, 512]
    kept.write_text(json.dumps({"rows": [{name: value for name, value in ROW.items() if name != "size"}]}))
    thresholds.of_card.cache_clear()
    assert [x.source for x in thresholds.of_card(CARD, "0")] == [str(kept)]
    assert not caplog.messages


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSONDecodeError: Expecting value"),
        (json.dumps({"rows": [ROW]})[:-40], "JSONDecodeError: "),
        (b"\xff\xfe", "UnicodeDecodeError: "),
        ("[" * 100_000, "RecursionError: "),
        ("{}", 'expected an object with a list "rows"'),
        ("[]", 'expected an object with a list "rows"'),
        ('{"rows": {}}', 'expected an object with a list "rows"'),
        ('{"rows": [3]}', "rows[0]: expected an object, got 3"),
        (json.dumps({"rows": [ROW, {}]}), "rows[1]: head_dim is missing; expected an integer, at least 1"),
        (json.dumps({"rows": [{**ROW, "tokens": "256"}]}), "rows[0]: tokens='256': expected an integer, at least 1"),
        (json.dumps({"rows": [{**ROW, "elements": 0}]}), "rows[0]: elements=0: expected an integer"),
        (json.dumps({"rows": [{**ROW, "size": -1}]}), "rows[0]: size=-1: expected an integer"),
        (json.dumps({"rows": [{**ROW, "kind": []}]}), "rows[0]: kind=[]: expected one of full, causal"),
        (json.dumps({"rows": [{**ROW, "direction": "back"}]}), "direction='back': expected one of forward, training"),
        (json.dumps({"rows": [{**ROW, "ms": "fast"}]}), "rows[0]: ms='fast': expected a number or null"),
        (json.dumps({"rows": [{**ROW, "impl": None}]}), "rows[0]: impl=None: expected a text"),
        (None, "IsADirectoryError: "),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_told_and_left_out(text, reason, kept, caplog):
    """Regression: KeyError 'rows', of a call of auto, without the file's name."""
    if text is None:
        kept.mkdir()
    else:
        kept.write_bytes(text if isinstance(text, bytes) else text.encode())
    with caplog.at_level(logging.WARNING, "sagebwd"):
        for _ in range(2):
            found = thresholds.of_card(CARD, "0")
    assert found == tuple(Threshold(**row) for row in thresholds._of_this_project()[CARD])
    (said,) = caplog.messages
    for part in (str(kept), reason, "Delete it, or measure anew with `sagebwd doctor --measure`"):
        assert part in said


def test_a_cache_folder_that_is_a_file_has_nothing_measured(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path / "file"))
    assert thresholds.of_card.__wrapped__("NVIDIA A100-SXM4-80GB", "0") == ()
    assert not caplog.messages
