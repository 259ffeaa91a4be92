"""What `sagebwd doctor --measure` times, and what becomes of it, by a clock that makes times up."""

import json
import os
import threading
from dataclasses import asdict

import pytest
import torch

from sagebwd.auto import thresholds
from sagebwd.auto.thresholds import CAUSAL, FORWARD, FULL, KINDS, PACKED, TRAINING
from sagebwd.cli import measure as bench
from sagebwd.cli import thresholds as command
from sagebwd.reference.metrics import relative_l2

SMALL = bench.Case(CAUSAL, 16, 16, 1 << 17)


def clock(ours, torch_ms=lambda tokens: 1.0):
    """A timer by which low precision takes ``ours(tokens, direction)`` ms."""

    def timer(runs, device):
        assert device == "cpu"
        tokens = timer.tokens
        timer.calls.append((tokens, set(runs)))
        direction = (FORWARD, TRAINING)[len([t for t, _ in timer.calls if t == tokens]) - 1]
        times = {"ours": ours(tokens, direction), "torch": torch_ms(tokens)}
        return {name: (times[name], 0.1) for name in runs}

    timer.calls = []
    return timer


@pytest.fixture
def measured(monkeypatch):
    """`measure_case` without the attentions themselves."""
    monkeypatch.setattr(bench, "takes", lambda name, run: True)

    def run(timer, case=SMALL):
        real = bench.measure_length

        def noted(case, tokens, device, timer):
            timer.tokens = tokens
            return real(case, tokens, device, timer)

        monkeypatch.setattr(bench, "measure_length", noted)
        rows = bench.measure_case(case, "cpu", timer)
        monkeypatch.setattr(bench, "measure_length", real)
        return rows

    return run


def test_lengths_fall_until_both_directions_have_lost_and_then_meet_the_threshold(measured):
    rows = measured(clock(lambda tokens, direction: 0.9 if tokens >= (3000, 1100)[direction == TRAINING] else 1.1))
    assert [row.tokens for row in rows[::2]] == [8192, 4096, 2048, 1024, 512, 1536, 3072]
    found = {x.direction: x for x in thresholds.of_rows(map(asdict, rows), "here")}
    assert (found[FORWARD].tokens, found[TRAINING].tokens) == (3072, 1536)
    who, elements = ("token", "reference/reference"), min(row.elements for row in rows)
    assert found[FORWARD] == (16, 16, FORWARD, CAUSAL, elements, 3072, *who, "here")


def test_what_never_wins_and_what_always_does(measured):
    lost = measured(clock(lambda tokens, direction: 2.0))
    assert [row.tokens for row in lost[::2]] == [8192, 4096]
    assert {x.tokens for x in thresholds.of_rows(map(asdict, lost), "")} == {None}
    won = measured(clock(lambda tokens, direction: 0.5))
    assert {x.tokens for x in thresholds.of_rows(map(asdict, won), "")} == {256}


def test_a_gain_below_a_loss_does_not_count(measured):
    rows = measured(clock(lambda tokens, direction: 1.1 if tokens == 2048 else 0.9))
    assert {x.tokens for x in thresholds.of_rows(map(asdict, rows), "")} == {3072}


def test_what_does_not_run_loses_and_wins_where_torch_has_nothing():
    assert not thresholds.wins(None, 1.0)
    assert not thresholds.wins(None, None)
    assert thresholds.wins(1.0, None)


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_compute_the_same(kind):
    case = bench.Case(kind, 16, 16, 1 << 13)
    tensors = case.inputs(64, "cpu")[:3]
    found = bench.attentions_of(case, 64, tensors)
    if kind == PACKED:
        assert set(found) == {"ours"}
        tensors = [x.unflatten(0, (-1, 64)).transpose(1, 2) for x in tensors]
        expected = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True).transpose(1, 2)
        assert (
            relative_l2(found["ours"](*(x.transpose(1, 2).flatten(0, 1) for x in tensors)), expected.flatten(0, 1))
            < 0.03
        )
        return
    assert relative_l2(found["ours"](*tensors), found["torch"](*tensors)) < 0.03


def test_every_kind_has_its_cases():
    found = bench.cases()
    assert {case.kind for case in found} == set(KINDS)
    assert len(set(found)) == len(found)
    for case in found:
        for tokens in bench.LENGTHS:
            batch, heads = case.batch_and_heads(tokens)
            assert case.size / 2 <= batch * heads * tokens * case.value_dim <= case.size


def test_cases_of_kinds_and_widths():
    found = bench.cases([CAUSAL], ["72", "192/128"])
    assert {(case.kind, case.head_dim, case.value_dim) for case in found} == {(CAUSAL, 72, 72), (CAUSAL, 192, 128)}
    with pytest.raises(ValueError, match="head_dim='65' is not known; accepted: 128, "):
        bench.cases(widths=["65"])
    with pytest.raises(ValueError, match="kind='triangle' is not known; accepted: "):
        bench.cases(["triangle"])
    with pytest.raises(ValueError, match="kind=packed is not measured at head_dim=72"):
        bench.cases([PACKED], ["72"])


def test_the_command_keeps_what_it_measures(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    case = bench.Case(CAUSAL, 16, 16, 1 << 11)
    monkeypatch.setattr(bench, "LENGTHS", (64, 32))
    command.measure("cpu", [case], tmp_path / "results", "abc")
    kept = json.loads(thresholds.kept_at("cpu", torch.__version__).read_text())
    (path,) = (tmp_path / "results").glob("thresholds_cpu_*_abc.json")
    assert json.loads(path.read_text())["rows"] == kept["rows"]
    thresholds.of_card.cache_clear()
    found = thresholds.of_card("cpu", torch.__version__)
    thresholds.of_card.cache_clear()
    assert {(x.kind, x.head_dim, x.direction) for x in found} == {(CAUSAL, 16, FORWARD), (CAUSAL, 16, TRAINING)}
    assert found[0].source == str(thresholds.kept_at("cpu", torch.__version__))
    printed = " ".join(capsys.readouterr().out.split())
    assert "causal 16/16 2048 forward, token over torch: 32 " in printed
    assert "wrote" in printed


def test_the_command_keeps_what_others_it_had_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(bench, "LENGTHS", (64, 32))
    for kind, width in ((CAUSAL, 16), (CAUSAL, 8), (FULL, 16), (CAUSAL, 16)):
        command.measure("cpu", [bench.Case(kind, width, width, 1 << 11)], None, "abc")
    rows = json.loads(thresholds.kept_at("cpu", torch.__version__).read_text())["rows"]
    assert {(row["kind"], row["head_dim"]) for row in rows} == {(CAUSAL, 16), (CAUSAL, 8), (FULL, 16)}
    places = [(row["kind"], row["head_dim"], row["direction"], row["tokens"]) for row in rows]
    assert len(places) == len(set(places)), "measured again, not twice"


def test_the_command_writes_a_malformed_file_anew(monkeypatch, tmp_path, caplog):
    """As `sagebwd.auto.thresholds` advises where it finds one."""
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(bench, "LENGTHS", (64, 32))
    path = thresholds.kept_at("cpu", torch.__version__)
    path.parent.mkdir()
    path.write_text('{"rows": [{"kind"')
    command.measure("cpu", [bench.Case(CAUSAL, 16, 16, 1 << 11)], None, "abc")
    (said,) = caplog.messages
    assert str(path) in said
    assert {row["kind"] for row in thresholds.rows_kept(path)} == {CAUSAL}


def test_where_nothing_can_be_kept_nothing_is_timed(monkeypatch, tmp_path):
    """Regression: NotADirectoryError, once the first case had been timed."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(bench, "measure", lambda *given, **options: pytest.fail("timed"))
    with pytest.raises(ValueError, match=r"file.thresholds cannot be written \(NotADirectoryError: .*SAGEBWD_CACHE"):
        command.measure("cpu", [], None, "abc")


def test_two_commands_at_once_do_not_collide(monkeypatch, tmp_path):
    """Regression: both wrote one temporary file, and the second one found it gone."""
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    row = bench.Timing(CAUSAL, 16, 16, 1, 1, 1, 64, 1024, FORWARD, "token", "x", 1.0, 1.0, 1.0, 1.0, "MATH", {})
    monkeypatch.setattr(bench, "measure", lambda *given, **options: [[row]])
    both, replace = threading.Barrier(2), os.replace  # neither is moved before both are written
    monkeypatch.setattr(os, "replace", lambda *given: both.wait(60) is None or replace(*given))
    failed = []

    def measure():
        try:
            command.measure("cpu", [], None, "abc")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=measure) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    path = thresholds.kept_at("cpu", torch.__version__)
    assert thresholds.rows_kept(path)
    assert [x.name for x in path.parent.iterdir()] == [path.name]
