"""What `sagebwd doctor --measure` times, and what becomes of it, by a clock that makes times up."""

import json
import os
import sys
import threading
import types
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
import typer

from sagebwd import dispatch
from sagebwd.auto import model, peers, timings
from sagebwd.auto.model import FORWARD, TRAINING
from sagebwd.cli import measure as bench
from sagebwd.cli import timings as command
from sagebwd.masks.kinds import CAUSAL, FULL, KINDS, MASK, PACKED, PADDING, WINDOW
from sagebwd.reference.metrics import relative_l2
from tests.threads import at_once

SMALL = 11
SMALL_POINTS = tuple(bench.Point(SMALL, tokens, left=tokens // 4) for tokens in (64, 32))
SHORT = SMALL_POINTS[1]


@pytest.fixture
def of_few_points(monkeypatch, tmp_path):
    """The cache folder of a machine on which calls are timed at two lengths."""
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(bench, "POINTS", SMALL_POINTS)
    return tmp_path


def test_each_point_has_a_row_of_each_direction(monkeypatch):
    monkeypatch.setattr(bench, "POINTS", SMALL_POINTS)
    timer = lambda runs, device: {name: (2.0 if name == "ours" else 3.0, 0.1) for name in runs}  # noqa: E731
    (rows,) = bench.measure("cpu", [bench.Case(CAUSAL, 16, 16)], timer, lambda text, done=None: None)
    assert [(row.tokens, row.direction) for row in rows] == [
        (64, FORWARD), (64, TRAINING), (32, FORWARD), (32, TRAINING),
    ]  # fmt: skip
    assert {(row.ms, row.host_ms, row.torch_ms, row.torch_host_ms) for row in rows} == {(2.0, 0.1, 3.0, 0.1)}
    assert {row.batch * row.heads * row.tokens * row.value_dim for row in rows} == {1 << SMALL}


def test_what_does_not_run_has_no_time(monkeypatch):
    monkeypatch.setattr(bench, "takes", lambda name, run: name != "ours")
    timer = lambda runs, device: dict.fromkeys(runs, (1.0, 0.1))  # noqa: E731
    row, _ = bench.measure_point(bench.Case(FULL, 16, 16), SHORT, "cpu", timer)
    assert (row.ms, row.host_ms, row.torch_ms) == (None, None, 1.0)


def test_on_a_card_of_mma_sync_each_width_is_timed_by_its_recipe(monkeypatch):
    monkeypatch.setattr(dispatch, "arch_of", lambda device: 80)
    monkeypatch.setattr(dispatch, "missing", lambda row: None)
    of = bench.Ask.of
    monkeypatch.setattr(bench.Ask, "of", lambda *call: of(*call)._replace(device=torch.device("cuda", 0)))
    dispatch._choose.cache_clear()
    timer = lambda runs, device: dict.fromkeys(runs, (1.0, 0.1))  # noqa: E731
    monkeypatch.setattr(bench, "takes", lambda name, run: True)
    for width, ran in ((64, ("token", "mma_sync/triton")), (96, ("token(dp=int8)", "mma_sync/mma_sync"))):
        rows = bench.measure_point(bench.Case(CAUSAL, width, width), SHORT, "cpu", timer)
        assert {(row.recipe, row.impl) for row in rows} == {ran}
    dispatch._choose.cache_clear()


def test_what_is_timed_is_what_the_row_says():
    ran = []

    def timer(runs, device):
        ran.append(runs["ours"]())
        return dict.fromkeys(runs, (1.0, 0.1))

    rows = bench.measure_point(bench.Case(WINDOW, 16, 16), bench.Point(13, 64, left=16), "cpu", timer)
    o, gradients = ran
    assert [(row.direction, row.width) for row in rows] == [(FORWARD, 17), (TRAINING, 17)]
    assert [x.shape for x in gradients] == [o.shape] * 3


@pytest.fixture
def peer(monkeypatch):
    """FlashAttention-4 by torch's function."""
    module = types.ModuleType("flash_attn.cute")

    def flash_attn_func(q, k, v, softmax_scale, causal, window_size):
        assert window_size == (None, None)
        tensors = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*tensors, scale=softmax_scale, is_causal=causal).transpose(1, 2), None

    def flash_attn_varlen_func(*tensors, **options):
        raise AssertionError("does not run here")

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    peers.module_of.cache_clear()
    yield
    peers.module_of.cache_clear()


def test_peers_are_timed_where_they_take_the_call(peer):
    timer = lambda runs, device: dict.fromkeys(runs, (1.0, 0.1))  # noqa: E731
    forward, training = bench.measure_point(bench.Case(CAUSAL, 16, 16), SHORT, "cpu", timer)
    assert forward.others == {"fa4": (1.0, 0.1)}
    assert training.others == {}, "whose gradients are wrong at such widths"
    _, training = bench.measure_point(bench.Case(FULL, 32, 32), SHORT, "cpu", timer)
    assert training.others == {"fa4": (1.0, 0.1)}
    for kind in (PACKED, MASK):
        row, _ = bench.measure_point(bench.Case(kind, 32, 32), SHORT, "cpu", timer)
        assert row.others == {}
    case = bench.Case(CAUSAL, 32, 32)
    point = bench.Point(13, 64)
    tensors = case.inputs(point, "cpu")[:3]
    found = bench.attentions_of(case, point, tensors, FORWARD)
    assert relative_l2(found["fa4"](*tensors), found["torch"](*tensors)) < 0.01


def test_what_peers_take_is_kept_and_fitted(of_few_points, peer):
    command.measure("cpu", [bench.Case(CAUSAL, 32, 32)], None, "abc")
    timings.of_card.cache_clear()
    found = timings.of_card("cpu", torch.__version__)
    timings.of_card.cache_clear()
    assert len(found) == 2
    assert all("fa4" in one.full for one in found)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_compute_the_same(kind, group):
    case = bench.Case(kind, 16, 16)
    point = bench.Point(13, 64, group, kv_tokens=48 if kind == FULL else 0, left=16)
    tensors = case.inputs(point, "cpu")[:3]
    found = bench.attentions_of(case, point, tensors, FORWARD)
    if kind == PACKED:
        assert set(found) == {"ours"}
        tensors = [x.unflatten(0, (-1, 64)).transpose(1, 2) for x in tensors]
        options = {"is_causal": True, "enable_gqa": group > 1}
        expected = torch.nn.functional.scaled_dot_product_attention(*tensors, **options).transpose(1, 2)
        assert (
            relative_l2(found["ours"](*(x.transpose(1, 2).flatten(0, 1) for x in tensors)), expected.flatten(0, 1))
            < 0.03
        )
        return
    assert relative_l2(found["ours"](*tensors), found["torch"](*tensors)) < 0.03


def test_every_kind_has_its_cases():
    found = bench.cases()
    assert {case.kind for case in found} == set(KINDS)
    assert len(set(found)) == len(found) == len(KINDS) * len(bench.MEASURED_WIDTHS)
    for case in found:
        assert case.points
        for point in case.points:
            batch, heads, kv_heads, tokens, kv_tokens = case.shape(point)
            assert 1 / 2 <= batch * heads * tokens * case.value_dim / (1 << point.power) <= 1
            assert (heads / kv_heads, tokens, kv_tokens) == (point.group, point.tokens, point.kv_tokens or tokens)
            assert (point.left > 0) == (case.kind == WINDOW)
            assert case.kind != MASK or tokens * kv_tokens <= 1 << 28
            assert case.kind == FULL or tokens == kv_tokens


def test_cases_of_kinds_and_widths():
    found = bench.cases([CAUSAL], ["72", "192/128"])
    assert {(case.kind, case.head_dim, case.value_dim) for case in found} == {(CAUSAL, 72, 72), (CAUSAL, 192, 128)}
    with pytest.raises(ValueError, match="head_dim='65' is not known; accepted: 128, "):
        bench.cases(widths=["65"])
    with pytest.raises(ValueError, match="kind='triangle' is not known; accepted: "):
        bench.cases(["triangle"])


def test_the_command_keeps_what_it_measures(of_few_points, capsys):
    command.measure("cpu", [bench.Case(CAUSAL, 16, 16)], of_few_points / "results", "abc")
    path = timings.kept_at("cpu", torch.__version__)
    kept = json.loads(path.read_text())
    (written,) = (of_few_points / "results").glob("timings_cpu_*_abc.json")
    assert json.loads(written.read_text())["rows"] == kept["rows"]
    timings.of_card.cache_clear()
    found = timings.of_card("cpu", torch.__version__)
    timings.of_card.cache_clear()
    assert {(x.kind, x.head_dim, x.direction) for x in found} == {(CAUSAL, 16, FORWARD), (CAUSAL, 16, TRAINING)}
    assert {x.source for x in found} == {f"timings in {path}"}
    printed = " ".join(capsys.readouterr().out.split())
    assert "Times as fast as the fastest in full precision" in printed
    assert "wrote" in printed


def test_a_report_has_self_tests_and_the_same_rows(of_few_points, monkeypatch):
    from sagebwd.cli import report

    monkeypatch.setattr(report, "TESTED", (("token", "64"), ("token", "600")))
    path = of_few_points / "report.json"
    command.measure("cpu", [bench.Case(CAUSAL, 16, 16)], None, "abc", path)
    found = json.loads(path.read_text())
    assert found["rows"] == json.loads(timings.kept_at("cpu", torch.__version__).read_text())["rows"]
    passed, refused = found["self_tests"]
    assert (passed["impl"], passed["error"], passed["refused"]) == ("reference", 0.0, None)
    assert refused["error"] is None
    assert "head_dim 600 is not supported" in refused["refused"]
    with pytest.raises(ValueError, match=r"--report .* is a folder; give a file"):
        command.measure("cpu", [], None, "abc", of_few_points)


def test_the_command_keeps_what_others_it_had_measured(of_few_points):
    for kind, width in ((CAUSAL, 16), (CAUSAL, 8), (FULL, 16), (CAUSAL, 16)):
        command.measure("cpu", [bench.Case(kind, width, width)], None, "abc")
    rows = json.loads(timings.kept_at("cpu", torch.__version__).read_text())["rows"]
    assert {(row["kind"], row["head_dim"]) for row in rows} == {(CAUSAL, 16), (CAUSAL, 8), (FULL, 16)}
    places = [(row["kind"], row["head_dim"], row["direction"], row["tokens"]) for row in rows]
    assert len(places) == len(set(places)), "measured again, not twice"


@pytest.mark.parametrize("how", ["cut off", "two at once"])
def test_the_command_keeps_what_it_did_not_measure_anew(of_few_points, how, monkeypatch):
    """Regression: what it was to come to was gone with its first case; what another had measured since, with each."""
    measure, cases = bench.measure, [bench.Case(kind, 16, 16) for kind in (CAUSAL, FULL, PADDING)]
    command.measure("cpu", cases[:2], None, "abc")

    def first_alone(device, chosen, **options):
        yield from measure(device, chosen[:1])
        if how == "cut off":
            raise KeyboardInterrupt
        monkeypatch.setattr(bench, "measure", measure)
        command.measure(device, cases[2:], None, "abc")
        yield from measure(device, chosen[1:])

    monkeypatch.setattr(bench, "measure", first_alone)
    with pytest.raises(typer.Exit) if how == "cut off" else nullcontext():
        command.measure("cpu", cases[:2], None, "abc")
    rows = json.loads(timings.kept_at("cpu", torch.__version__).read_text())["rows"]
    assert {row["kind"] for row in rows} == {CAUSAL, FULL} | ({PADDING} if how == "two at once" else set())


def test_of_what_a_machine_did_not_measure_the_packages_times_count(of_few_points, monkeypatch):
    """Regression: a mask of elements went to torch, 5.5 times as slow, once other kinds of call had been measured."""
    packaged = model.of_this_project()["NVIDIA H200"]
    monkeypatch.setattr(model, "of_this_project", lambda: {"cpu": packaged})
    command.measure("cpu", [bench.Case(CAUSAL, 128, 128)], None, "abc")
    timings.of_card.cache_clear()
    found = timings.of_card("cpu", torch.__version__)
    timings.of_card.cache_clear()
    places = [times[:4] for times in found]
    assert len(places) == len(set(places))
    assert set(places) == {times[:4] for times in packaged}
    of_machine = {times[:4] for times in found if "this project" not in times.source}
    assert of_machine == {(CAUSAL, 128, 128, FORWARD), (CAUSAL, 128, 128, TRAINING)}


def test_the_command_writes_a_malformed_file_anew(of_few_points, caplog):
    """As `sagebwd.auto.model` advises where it finds one."""
    path = timings.kept_at("cpu", torch.__version__)
    path.parent.mkdir()
    path.write_text('{"rows": [{"kind"')
    command.measure("cpu", [bench.Case(CAUSAL, 16, 16)], None, "abc")
    (said,) = caplog.messages
    assert str(path) in said
    assert {row["kind"] for row in timings.read(path, torch.__version__)[0]} == {CAUSAL}


def test_where_nothing_can_be_kept_nothing_is_timed(monkeypatch, tmp_path):
    """Regression: NotADirectoryError, once the first case had been timed."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(bench, "measure", lambda *given, **options: pytest.fail("timed"))
    with pytest.raises(ValueError, match=r"file.timings cannot be written \(NotADirectoryError: .*SAGEBWD_CACHE"):
        command.measure("cpu", [], None, "abc")
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"--output: .*file is no folder; give another"):
        command.measure("cpu", [], tmp_path / "file", "abc")


def test_two_commands_at_once_do_not_collide(monkeypatch, tmp_path):
    """Regression: both wrote one temporary file, and the second one found it gone."""
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    row = bench.Timing(CAUSAL, 16, 16, 1, 1, 1, 64, 64, 0, FORWARD, "token", "x", 1.0, 1.0, 1.0, 1.0, "MATH")
    monkeypatch.setattr(bench, "measure", lambda *given, **options: [[row]])
    both, replace = threading.Barrier(2), os.replace  # neither is moved before both are written
    monkeypatch.setattr(os, "replace", lambda *given: both.wait(60) is None or replace(*given))
    at_once(lambda _: command.measure("cpu", [], None, "abc"), range(2))
    path = timings.kept_at("cpu", torch.__version__)
    assert timings.read(path, torch.__version__)[0]
    assert [x.name for x in path.parent.iterdir()] == [path.name]
