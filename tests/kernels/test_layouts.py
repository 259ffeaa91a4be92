"""(B, H, N, D) views of (B, N, H, D) tensors, as models hand them over: the same numbers, written as they are read."""

import pytest
import torch

from sagebwd import sage_attention
from sagebwd.switches import switches
from tests.attention_case import outcome
from tests.gpus import DEVICE, HAS_HOPPER, on_gpu

pytest.importorskip("triton")
pytestmark = on_gpu
BATCH, TOKENS, HEADS, KV_HEADS = 2, 80, 4, 2


def project(
    head_dim: int, tokens: int = TOKENS, value_dim: int | None = None, apart: int = 0
) -> list[torch.Tensor]:  # fmt: skip
    """q, k, v and do with the heads of a token side by side, or so many channels apart."""
    generator = torch.Generator().manual_seed(0)
    values = value_dim or head_dim

    def drawn(heads: int, width: int) -> torch.Tensor:
        x = torch.randn(BATCH, tokens, heads, width, generator=generator).bfloat16().to(DEVICE)
        return torch.nn.functional.pad(x, (0, apart))[..., :width].transpose(1, 2)

    return [
        drawn(heads, width)
        for heads, width in ((HEADS, head_dim), (KV_HEADS, head_dim), (KV_HEADS, values), (HEADS, values))
    ]


def results(tensors, attend=sage_attention, **settings):
    *inputs, do = tensors
    return outcome(attend, inputs, do, is_causal=True, enable_gqa=True, **settings)


def by_token(x: torch.Tensor) -> bool:
    return x.transpose(1, 2).is_contiguous() and not x.is_contiguous()


def check(recipe: str, impl: str, head_dim: int, *rest: int) -> None:
    tensors = project(head_dim, *rest)
    expected = results([x.contiguous() for x in tensors], recipe=recipe, impl=impl)
    for _ in range(2 if DEVICE == "cuda" else 1):  # there the second launches what the first has compiled
        found = results(tensors, recipe=recipe, impl=impl)
        for name, x, e in zip(("o", "dq", "dk", "dv"), found, expected):
            assert e.is_contiguous(), name
            assert by_token(x), name
            assert torch.equal(x, e), name


@pytest.mark.parametrize("recipe", ["token", "paper", "full", "token(o=16bit)"])
def test_portable_kernels(recipe):
    check(recipe, "triton", 32)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 32), (20, 24), (32, 24), (20, 20)])
def test_rows_that_are_filled_up(head_dim, value_dim):
    """Regression: O of a query narrower than value lay by head, as the copy of query that had been filled up did."""
    check("token", "triton", head_dim, 5, value_dim)


@pytest.mark.parametrize("recipe", ["token", "mixed"])
def test_the_reference(recipe):
    check(recipe, "reference", 16)


@pytest.mark.parametrize("apart", [1, 4])
def test_heads_apart(apart):
    check("token", "triton", 32, 5, 32, apart)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (100, 104), (64, 128), (100, 100)])
@pytest.mark.parametrize("tokens", [TOKENS, 512])  # 512: whole blocks, which leave by TMA
@pytest.mark.parametrize("apart", [0, 4])
def test_hopper(apart, tokens, head_dim, value_dim):
    """Regression: heads apart that begin at no multiple of 16 bytes, where tokens do, were an illegal instruction."""
    with switches(deterministic=True):  # or e4m3's dQ is summed in any order
        check("mixed", "hopper", head_dim, tokens, value_dim, apart)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_compiled_calls_write_the_same_way(impl):
    tensors = project(32)
    torch._dynamo.reset()
    compiled = torch.compile(sage_attention, fullgraph=True, backend="aot_eager")
    for x, e in zip(results(tensors, compiled, impl=impl), results(tensors, impl=impl)):
        assert torch.equal(x, e)
        assert x.stride() == e.stride()


def test_a_slice_that_tma_cannot_read_is_copied_as_it_lies():
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(BATCH * TOKENS * HEADS * 32 + 1, generator=generator).to(DEVICE, torch.bfloat16)
    unaligned = flat[1:].view(BATCH, TOKENS, HEADS, 32).transpose(1, 2)
    torch._dynamo.reset()
    compiled = torch.compile(sage_attention, fullgraph=True, backend="aot_eager")
    o = compiled(unaligned, unaligned, unaligned, impl="triton")
    assert by_token(o)
    assert torch.equal(o, sage_attention(*[unaligned.contiguous()] * 3, impl="triton"))
