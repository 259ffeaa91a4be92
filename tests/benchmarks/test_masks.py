"""The benchmark of block masks: what its masks show, what it says of whom, on a CPU at small shapes."""

import json

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import mask_attentions
from benchmarks import mask_cases as cases
from benchmarks import masks as bench
from sagebwd import sage_attention
from tests.commands import runner
from tests.scaled import scaled

pytestmark = pytest.mark.rounding


@pytest.fixture(autouse=True)
def few_heads(monkeypatch):
    forms = {kind: form._replace(heads=4, kv_heads=2) for kind, form in cases.FORMS.items()}
    monkeypatch.setattr(cases, "FORMS", forms)
    for name, size in {"SPAN": 30, "IMAGE": 30, "IMAGE_EVERY": 100}.items():
        monkeypatch.setattr(cases, name, size)


def case_of(kind, tokens=256):
    return cases.Case.of(kind, 16, tokens)


def shown(case):
    return case.dense(case.mask_mod("cpu"), "cpu")[0, 0]


@pytest.mark.parametrize("kind", ["documents", "chunks"])
def test_what_can_be_packed_is_causal_within_each_sequence(kind):
    case = case_of(kind, 300)
    lengths = torch.tensor(case.bounds()).diff()
    assert len(lengths) == 8
    assert lengths.min() > 0
    assert torch.equal(shown(case), torch.block_diag(*(torch.ones(n, n).tril() for n in lengths.tolist())).bool())


def test_masks_that_cannot_be_packed():
    causal = torch.ones(256, 256).tril().bool()
    prefix, window = causal.clone(), causal & ~causal.tril(-16)
    prefix[:, :64] = True
    window[:, :4] = causal[:, :4]
    assert torch.equal(shown(case_of("prefix")), prefix)
    assert torch.equal(shown(case_of("window")), window)
    blocks = shown(case_of("random", 2048)).unflatten(0, (16, 128)).unflatten(2, (16, 128)).transpose(1, 2)
    assert torch.equal(blocks.any(-1).any(-1), blocks.all(-1).all(-1))
    seen = blocks[:, :, 0, 0]
    assert seen.diagonal().all()
    assert 0.4 < seen.float().mean() < 0.65
    assert all(case_of(kind).bounds() is None for kind in ("prefix", "window", "random"))


@pytest.mark.parametrize("kind", [kind for kind in cases.KINDS if case_of(kind).named("cpu") is not None])
def test_a_mask_by_name_is_the_rules(kind):
    case = case_of(kind, 500)
    named, expected = case.named("cpu"), case.block_mask(case.mask_mod("cpu"), "cpu")
    assert torch.equal(case.dense(named.mask_mod, "cpu")[0, 0], shown(case))
    assert torch.equal(named.to_dense(), expected.to_dense())


def test_rows_of_one_mask():
    names = ["token", "read mixed", "packed token", "flex", "flex-flash", "sdpa"]
    rows = bench.measure_case(case_of("documents"), names, "cpu", rounds=1)
    found = {(row.attention, row.direction): row for row in rows}
    assert list(found) == [(name, way) for way in ("fwd", "fwd+bwd") for name in names]
    for (name, way), row in found.items():
        assert min(row.block_mask_ms, row.named_ms) > 0
        if name == "flex-flash" or (name, way) == ("flex", "fwd+bwd"):  # of which a CPU has none
            assert row.gate.startswith("does not run: NotImplementedError: ")
            assert (row.ms, row.host_ms, row.tflops, row.read_ms, row.over) == (None, None, None, None, {})
            continue
        assert row.gate == "ok"
        assert min(row.ms, row.tflops) > 0
        assert row.host_ms is None or row.host_ms > 0  # None of one that was timed once
        assert (row.read_ms is None) == (name != "read mixed")
        assert row.shown == pytest.approx(shown(case_of("documents")).float().mean().item())
        assert row.impl == (None if name in mask_attentions.PEERS else "reference/reference")
        expected = {"flex", "sdpa"} | ({"packed token"} if "token" in name else set())
        there = {peer for peer in expected - {name} if (peer, way) in found and found[peer, way].ms is not None}
        assert set(row.over) == there
        for peer, ratio in row.over.items():
            assert ratio == pytest.approx(found[peer, way].ms / row.ms)


@pytest.mark.parametrize("kind", cases.BANDS)
def test_layers_with_sinks(kind):
    assert shown(case_of(kind)).sum(-1).max() == (30 if kind == "gpt-oss-window" else 256)
    names = ["token", "band token", "read token", "flex", "flex-flash", "packed token", "packed fa4"]
    rows = bench.measure_case(case_of(kind), names, "cpu", rounds=1)
    gates = {(row.attention, row.direction): row.gate for row in rows}
    assert {name for name, _ in gates} == {"token", "band token", "read token", "flex"}  # the others take no sinks
    assert {gates[name, way] for name in names[:3] for way in ("fwd", "fwd+bwd")} == {"ok"} == {gates["flex", "fwd"]}
    assert {row.attention: row.over.keys() for row in rows if row.direction == "fwd"}["token"] == {"flex"}


@pytest.mark.parametrize("name", ["sinks", "window"])
def test_a_layer_whose_sinks_or_window_are_forgotten_fails_the_gate(name, monkeypatch):
    real, forgotten = sage_attention, {"sinks": None} if name == "sinks" else {"window": (-1, -1)}
    monkeypatch.setattr(mask_attentions, "sage_attention", lambda *x, **options: real(*x, **options | forgotten))
    (row, *_) = bench.measure_case(case_of("gpt-oss-window"), ["band token"], "cpu", rounds=1)
    assert row.gate == "FAILED"


def with_dense(monkeypatch, **factors):
    """SDPA alone, wrong by factors."""
    real = bench.attentions

    def attentions(given, names, impl):
        found = real(given, names, impl)
        return found | {"sdpa": scaled(found["sdpa"], **factors)}

    monkeypatch.setattr(bench, "attentions", attentions)


@pytest.mark.parametrize(("factors", "ways"), [({"dk": 1.5}, ["fwd+bwd"]), ({"o": 1.5}, ["fwd", "fwd+bwd"])])
def test_nothing_is_compared_with_a_peer_that_is_wrong(monkeypatch, factors, ways):
    with_dense(monkeypatch, **factors)
    rows = bench.measure_case(case_of("prefix"), ["token", "sdpa"], "cpu", rounds=1)
    for row in rows:
        assert row.ms is not None  # timed all the same
        if row.direction not in ways:
            assert row.gate == "ok"
            assert row.over.keys() == ({"sdpa"} if row.attention == "token" else set())
            continue
        assert row.over == {}
        assert row.gate.startswith(f"wrong: {'dk' if 'dk' in factors else 'o'} 0.5") == (row.attention == "sdpa")


def test_the_command(monkeypatch, capsys, tmp_path):
    run = runner(cli.main, monkeypatch, capsys)
    options = "--device", "cpu", "--impl", "reference", "--tokens", 128, "--head-dim", 16, "--rounds", 1
    chosen = "--mask", "chunks", "--attention", "token", "--attention", "packed token", "--attention", "fa4"
    named = "--output", tmp_path, "--commit", "abc", "--kernels-hash", "123"
    code, out, err = run("masks", *options, *chosen, *named)
    assert code == 0
    assert "chunks D16 H4/2 B1 N128, 6.6% of pairs" in out
    assert "over the best other" in out
    assert "fa4: does not run: " in out
    assert "1 of 1: chunks D16 H4/2 B1 N128" in err
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("masks_cpu_")
    assert path.stem.endswith("_abc")
    content = json.loads(path.read_text())
    assert (content["commit"], content["kernels"], content["gpu"]) == ("abc", "123", "cpu")
    assert len(content["rows"]) == 6

    # a run that is split over calls writes one file, in which a case that is measured again is there once
    for mask, chunks in (("random", 6), ("chunks", 2)):
        code, _, _ = run("masks", *options, "--mask", mask, "--attention", "token", *named)
        assert code == 0
        assert [row["mask"] for row in json.loads(path.read_text())["rows"]].count("chunks") == chunks
    code, _, _ = run("masks", *options, *chosen[:4], *named[:-1], "124")  # of other kernels
    assert {row["mask"] for row in json.loads(path.read_text())["rows"]} == {"chunks"}

    real = sage_attention
    monkeypatch.setattr(mask_attentions, "sage_attention", lambda *x, **options: 1.2 * real(*x, **options))
    code, _, err = run("masks", *options, *chosen[:4], *named)
    assert code == 2
    assert "some masks FAILED the correctness gate" in err
    (row, _) = json.loads(path.read_text())["rows"]
    assert (row["gate"], row["ms"]) == ("FAILED", None)


@pytest.mark.parametrize("kind", cases.DEFAULT)
def test_what_is_measured_by_default_runs(kind):
    """Every form of ours is the recipe, or not of this mask; a peer that runs on a CPU is right."""
    rows = bench.measure_case(case_of(kind, 128), mask_attentions.DEFAULT, "cpu", rounds=1)
    gates = {row.attention: row.gate for row in rows if row.direction == "fwd"}
    assert {gates[name] for name in ("mixed", "read mixed", "flex")} == {"ok"}
    assert gates.get("sdpa", "ok") == gates.get("band mixed", "ok") == gates.get("packed mixed", "ok") == "ok"
    assert ("band mixed" in gates, "packed mixed" in gates) == (kind == "gpt-oss-window", kind == "documents")


def test_each_attention_of_each_case_is_compiled_once(monkeypatch):
    work = []
    monkeypatch.setattr(bench, "run_in_processes", lambda call, given, count: work.extend(given) or [(0, None)])
    chosen, names = [case_of("documents"), case_of("gpt-oss-window")], ("mixed", "read mixed", "flex", "fa4")
    bench._compile(chosen, names, "cpu", None, 3, lambda *_: None)
    assert sorted((str(case), name) for case, some, *_ in work for name in some) == sorted(
        (str(case), name) for case in chosen for name in names
    )
    assert len(work) == len({(str(case), some) for case, some, *_ in work}) == 6
