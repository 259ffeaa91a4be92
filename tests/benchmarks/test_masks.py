"""The benchmark of block masks: what its masks show, what it says of whom, on a CPU at small shapes."""

import json
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from benchmarks import __main__ as cli
from benchmarks import mask_cases as cases
from benchmarks import masks as bench
from sagebwd import sage_attention
from tests.commands import runner
from tests.scaled import scaled

pytestmark = pytest.mark.rounding


@pytest.fixture(autouse=True)
def few_heads(monkeypatch):
    monkeypatch.setattr(cases, "HEADS", 4)
    monkeypatch.setattr(cases, "KV_HEADS", 2)


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


def with_flash_attention_4(monkeypatch, calls):
    """Modules in place of FlashAttention-4's, which compute with integers that are tensors of one."""

    def flash_attn_func(q, k, v, mask_mod, aux_tensors, block_sparse_tensors, block_sparse_tensors_bwd):
        calls.append((block_sparse_tensors, block_sparse_tensors_bwd))
        places = [torch.tensor([i]) for i in range(q.shape[1])]
        mask = torch.tensor([[bool(mask_mod(0, 0, i, j, None, aux_tensors)) for j in places] for i in places])
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True).transpose(1, 2), None

    def lists(*tensors, block_size):
        return (*tensors, block_size)

    contents = {
        "flash_attn": {},
        "flash_attn.cute": {"flash_attn_func": flash_attn_func},
        "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": lists},
        "flash_attn.cute.utils": {"scalar_to_ssa": lambda value, dtype: value},
        "cutlass": {"Int32": int},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("kind", cases.MASKS)
def test_flash_attention_4_is_given_the_same_mask(kind, monkeypatch):
    calls = []
    with_flash_attention_4(monkeypatch, calls)
    monkeypatch.setattr(cases, "BLOCK", 16)
    case = case_of(kind, 64)
    mask = case.block_mask(case.mask_mod("cpu"), "cpu")
    found = cases.attentions(case, ["fa4", "sdpa"], "cpu")
    outputs = [attention(*case.shape.inputs("cpu", torch.float32)[:3], mask) for attention in found.values()]
    torch.testing.assert_close(*outputs)
    ((forward, backward),) = calls
    assert forward == (
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, (16, 16)
    )  # fmt: skip
    assert backward == (mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices, (16, 16))


@pytest.mark.parametrize(("kind", "window"), [("gpt-oss", (None, None)), ("gpt-oss-window", (127, None))])
def test_flash_attention_4_is_given_the_same_layer_with_sinks(kind, window, monkeypatch):
    given = {}

    def flash_attn_func(q, k, v, **settings):
        given.update(settings)
        return q, None

    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flash_attn.cute"].flash_attn_func = flash_attn_func
    case = case_of(kind, 64)
    sinks = case.sinks("cpu")
    (attention,) = cases.attentions(case, ["fa4", "sdpa"], "cpu", sinks=sinks).values()
    q, *rest, _ = case.shape.inputs("cpu", torch.bfloat16)
    assert torch.equal(attention(q, *rest, None), q)
    assert given == {"causal": True, "window_size": window, "learnable_sink": sinks}


def test_rows_of_one_mask():
    names = ["token", "mixed", "packed token", "flex", "flex-flash", "sdpa"]
    rows = bench.measure_case(case_of("documents"), names, "cpu", rounds=1)
    found = {(row.attention, row.direction): row for row in rows}
    assert list(found) == [(name, way) for way in ("fwd", "fwd+bwd") for name in names]
    for (name, way), row in found.items():
        if name == "flex-flash" or (name, way) == ("flex", "fwd+bwd"):  # of which a CPU has none
            assert row.gate.startswith("does not run: NotImplementedError: ")
            assert (row.ms, row.host_ms, row.tflops, row.mask_ms, row.over) == (None, None, None, None, {})
            continue
        assert row.gate == "ok"
        assert min(row.ms, row.host_ms, row.tflops) > 0
        assert (row.mask_ms is None) == (name in ("packed token", "sdpa"))  # which read no BlockMask
        assert (row.mask_ms or 0) >= 0
        assert row.shown == pytest.approx(shown(case_of("documents")).float().mean().item())
        assert row.impl == (None if name in cases.PEERS else "reference/reference")
        expected = {"flex", "sdpa", f"packed {name}"} - {name}
        assert set(row.over) == {peer for peer in expected if (peer, way) in found and found[peer, way].ms is not None}
        for peer, ratio in row.over.items():
            assert ratio == pytest.approx(found[peer, way].ms / row.ms)


@pytest.mark.parametrize("kind", cases.BANDS)
def test_layers_with_sinks(kind, monkeypatch):
    monkeypatch.setattr(cases, "GPT_OSS_HEADS", 4)
    monkeypatch.setattr(cases, "GPT_OSS_KV_HEADS", 2)
    monkeypatch.setattr(cases, "SPAN", 30)
    assert shown(case_of(kind)).sum(-1).max() == (30 if kind == "gpt-oss-window" else 256)
    rows = bench.measure_case(case_of(kind), ["token", "flex", "flex-flash", "packed token"], "cpu", rounds=1)
    gates = {(row.attention, row.direction): row.gate for row in rows}
    assert {name for name, _ in gates} == {"token", "flex"}  # the others take no sinks
    assert gates["token", "fwd"] == gates["token", "fwd+bwd"] == gates["flex", "fwd"] == "ok"
    assert {row.attention: row.over.keys() for row in rows if row.direction == "fwd"}["token"] == {"flex"}
    assert all(row.mask_ms is None for row in rows)


@pytest.mark.parametrize("name", ["sinks", "window"])
def test_a_layer_whose_sinks_or_window_are_forgotten_fails_the_gate(name, monkeypatch):
    real, forgotten = sage_attention, {"sinks": None} if name == "sinks" else {"window": (-1, -1)}
    monkeypatch.setattr(cases, "sage_attention", lambda *x, **options: real(*x, **options | forgotten))
    monkeypatch.setattr(cases, "SPAN", 30)
    (row, *_) = bench.measure_case(case_of("gpt-oss-window"), ["token"], "cpu", rounds=1)
    assert row.gate == "FAILED"


def with_dense(monkeypatch, **factors):
    """SDPA alone, wrong by factors."""
    real = cases.attentions

    def attentions(case, names, device, impl, sinks):
        found = real(case, names, device, impl, sinks)
        dense = found["sdpa"]
        found["sdpa"] = lambda q, k, v, mask: scaled(lambda *x: dense(*x, mask), **factors)(q, k, v)
        return found

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


def test_a_recipe_that_is_refused_under_a_mask_is_a_row_that_says_so(monkeypatch):
    def refuses(*tensors, recipe, **options):
        if recipe == "mixed":
            raise NotImplementedError("no FP8 under a mask\nand more")
        return sage_attention(*tensors, recipe=recipe, **options)

    monkeypatch.setattr(cases, "sage_attention", refuses)
    rows = bench.measure_case(case_of("window"), ["mixed", "packed mixed", "token"], "cpu", rounds=1)
    gates = {row.attention: row.gate for row in rows}
    assert gates == {"mixed": "does not run: NotImplementedError: no FP8 under a mask", "token": "ok"}


def test_the_command(monkeypatch, capsys, tmp_path):
    run = runner(cli.main, monkeypatch, capsys)
    options = "--device", "cpu", "--impl", "reference", "--tokens", 128, "--head-dim", 16, "--rounds", 1
    chosen = "--mask", "chunks", "--attention", "token", "--attention", "packed token", "--attention", "fa4"
    named = "--output", tmp_path, "--commit", "abc", "--kernels-hash", "123"
    code, out, err = run("masks", *options, *chosen, *named)
    assert code == 0
    assert "chunks D16 H4/2 B1 N128, 6.6% of pairs" in out
    assert "fa4: does not run: " in out
    assert "1 of 1: chunks D16 H4/2 B1 N128" in err
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("masks_cpu_")
    assert path.stem.endswith("_abc")
    content = json.loads(path.read_text())
    assert (content["commit"], content["kernels"], content["gpu"]) == ("abc", "123", "cpu")
    assert len(content["rows"]) == 6

    real = sage_attention
    monkeypatch.setattr(cases, "sage_attention", lambda *x, **options: 1.2 * real(*x, **options))
    code, _, err = run("masks", *options, *chosen[:4], *named)
    assert code == 2
    assert "some masks FAILED the correctness gate" in err
    (row, _) = json.loads(path.read_text())["rows"]
    assert (row["gate"], row["ms"]) == ("FAILED", None)
