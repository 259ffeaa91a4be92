"""Bytes of a forward and backward at their peak, counted from what hosts make: no kernel runs."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from sagebwd import dispatch, sage_attention
from sagebwd.cache import PLANS, rounded
from sagebwd.call import Call, Packing, Saved, empty_like_rows
from sagebwd.kernels.portable import launch as portable
from sagebwd.kernels.runtime import device, driver, program
from sagebwd.kernels.runtime.parts import parts_of
from sagebwd.kernels.sm90.backward.launch import backward as sm90
from sagebwd.planning.workspace import pieces_of
from sagebwd.recipe import Recipe
from tests.gpus import HAS_GPU

META = torch.device("meta")


def peak(
    heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    layout: str,
) -> int:
    """Bytes beyond the inputs while the kernels of a backward run; packed: eight sequences."""

    def rows(heads: int) -> Tensor:
        shape = {"heads": (1, heads, tokens), "tokens": (1, tokens, heads), "packed": (tokens, heads)}[layout]
        x = torch.empty(*shape, head_dim, dtype=torch.bfloat16, device=META)
        return x.transpose(1, 2) if layout == "tokens" else x

    q, k = rows(heads), rows(kv_heads)
    offsets = torch.empty(9, dtype=torch.int32, device=META) if layout == "packed" else None
    longest = tokens // 8 if layout == "packed" else tokens
    call = Call.of(
        q, k, (head_dim, head_dim), None, offsets, offsets, longest, longest, False, -1, -1, 1.0, Recipe.named("mixed")
    )
    codes = [torch.empty(x.shape, dtype=torch.int8, device=META) for x in (q, k)]
    lse, q_scale, row_max = (call.queries.per_token(META) for _ in range(3))
    k_mean = torch.empty(call.keys.batch, kv_heads, head_dim, device=META)
    saved = Saved(empty_like_rows(q), lse, codes[0], q_scale, codes[1], call.keys.per_token(META), row_max, k_mean)
    made = program.Program.of(sm90, (call, saved, q, None, None, None, k))
    outputs = sum(math.prod(shape) * dtype.itemsize for shape, _, dtype in made.memory)
    return sum(x.nbytes for x in saved if x is not None) + outputs + made.scratch_bytes


def flash_attention_4(heads: int, kv_heads: int, head_dim: int, tokens: int) -> int:
    """The same of FlashAttention-4: O, lse, gradients, and in FP32 dQ's sums and two values a query."""
    of_query = 2 * head_dim + 4 + 2 * head_dim + 4 * head_dim + 8
    return tokens * (heads * of_query + kv_heads * 4 * head_dim)


@pytest.mark.parametrize("layout", ["heads", "tokens", "packed"])
@pytest.mark.parametrize(
    "shape", [(16, 16, 128, 16384), (16, 4, 128, 16384), (32, 32, 64, 16384), (32, 8, 64, 16384), (32, 32, 64, 16001)]
)
def test_peak_is_within_a_quarter_of_flash_attention_4_s(shape, layout, monkeypatch):
    monkeypatch.setattr(device, "num_sms", lambda device: 132)
    monkeypatch.setattr(program, "compiled", lambda *_: None)
    assert peak(*shape, layout) <= 1.25 * flash_attention_4(*shape)


def peak_of_a_plan(batch: int, heads: int, kv_heads: int, tokens: int, layout: str, recipe: str = "token") -> int:
    """Bytes beyond the inputs while a backward of 512 channels runs, what its forward keeps among them."""

    def rows(heads: int) -> Tensor:
        lies = {"heads": (batch, heads, tokens), "tokens": (batch, tokens, heads), "packed": (batch * tokens, heads)}
        x = torch.empty(*lies[layout], 512, dtype=torch.bfloat16, device=META)
        return x.transpose(1, 2) if layout == "tokens" else x

    q, k = rows(heads), rows(kv_heads)
    offsets = torch.empty(batch + 1, dtype=torch.int32, device=META) if layout == "packed" else None
    parsed = Recipe.named(recipe)
    call = Call.of(q, k, (512, 512), None, offsets, offsets, tokens, tokens, True, -1, -1, 1.0, parsed)
    choice = dispatch.named(parsed, "triton/triton")
    pieces, kept = pieces_of(choice, (512, 512), q, k, batch if layout == "packed" else None, False)
    there = {name: torch.empty(piece.shape, dtype=piece.dtype, device=META) for name, piece in pieces.items()}
    saved = Saved(empty_like_rows(q), call.queries.per_token(META), *map(there.get, Saved._fields[2:]))
    made = program.Program.of(driver.backward, (portable, (512, 512), call, saved, q, None, q, k, k))
    outputs = sum(math.prod(shape) * dtype.itemsize for shape, _, dtype in made.memory)
    return saved.o.nbytes + saved.lse.nbytes + kept + outputs + made.scratch_bytes


def flex_attention(batch: int, heads: int, kv_heads: int, tokens: int) -> int:
    """The same of FlexAttention: O, gradients, and two values a query."""
    return batch * tokens * (heads * (4 * 512 + 8) + kv_heads * 4 * 512)


@pytest.mark.parametrize("layout", ["heads", "tokens", "packed"])
@pytest.mark.parametrize(
    "shape", [(1, 8, 8, 16384), (2, 8, 8, 8192), (4, 8, 8, 4096), (2, 8, 8, 8190), (2, 8, 2, 8192), (1, 16, 4, 16384)]
)
def test_peak_of_heads_of_512_is_within_a_fifth_of_flex_attention_s(shape, layout, monkeypatch):
    """Regression: with codes that forward kept and copies of all heads at a time it was 1.5 times that."""
    monkeypatch.setattr(device, "capability", lambda device: 90)
    monkeypatch.setattr(program, "compiled", lambda *_: None)
    assert peak_of_a_plan(*shape, layout) <= 1.2 * flex_attention(*shape)


@pytest.mark.parametrize("shape", [(2, 4, 20000, 64), (20000, 4, 64)], ids=["dense", "packed"])
def test_a_workspace_has_the_bytes_of_what_it_keeps(shape):
    choice, q = dispatch.named(Recipe.named("mixed"), "triton/triton"), torch.empty(shape, device=META)
    pieces, kept = pieces_of(choice, (64, 64), q, q, 2 if q.dim() == 3 else None, True, True, True)
    assert len(pieces) == 10
    end = 0
    for name, piece in pieces.items():
        assert piece.offset == end
        times = choice.forward.means if name == "k_mean" else 1
        end += rounded(math.prod(piece.shape) * piece.dtype.itemsize * times)
    assert kept == end


def test_a_head_of_2_31_numbers_is_refused():
    packing = Packing(1, 1, 1 << 24, 1 << 24, None)
    packing.padded(64, 64 * 127, dtype=torch.int8, device=META)
    with pytest.raises(NotImplementedError, match="16777216 tokens of 128 channels"):
        packing.padded(64, 64 * 128, dtype=torch.int8, device=META)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("shape", [(2, 8, 8, 8192), (4, 8, 8, 4096), (2, 8, 2, 8192)])
def test_peak_of_heads_of_512_on_a_gpu(shape, monkeypatch):
    """What is allocated is within a fifth of FlexAttention's too, and the bits are those of all heads at a time."""
    batch, heads, kv_heads, tokens = shape
    q, k, v, do = (
        torch.randn(batch, n, tokens, 512, dtype=torch.bfloat16, device="cuda")
        for n in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run() -> tuple[Tensor, ...]:
        o = sage_attention(*leaves, recipe="token", impl="triton", is_causal=True, enable_gqa=True)
        return torch.autograd.grad(o, leaves, do)

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    by_parts = run()
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * flex_attention(*shape)
    PLANS.clear()
    monkeypatch.setattr(portable, "parts_of", lambda call, most: parts_of(call, call.keys.heads_in_all))
    assert all(torch.equal(x, y) for x, y in zip(by_parts, run()))
