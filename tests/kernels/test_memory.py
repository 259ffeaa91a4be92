"""Bytes of a forward and backward at their peak, counted from what hosts make: no kernel runs."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from sagebwd.call import Call, Saved, empty_like_rows
from sagebwd.kernels.portable.launch import backward as portable
from sagebwd.kernels.runtime import device, program
from sagebwd.kernels.sm90.backward.launch import backward as sm90
from sagebwd.recipe import Recipe

META = torch.device("meta")


def peak(
    heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    layout: str,
    recipe: str = "mixed",
    backward: Callable = sm90,
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
        q, k, (head_dim, head_dim), None, offsets, offsets, longest, longest, False, -1, -1, 1.0, Recipe.named(recipe)
    )
    codes = [torch.empty(x.shape, dtype=torch.int8, device=META) for x in (q, k)]
    lse, q_scale, row_max = (call.queries.per_token(META) for _ in range(3))
    k_mean = torch.empty(call.keys.batch, kv_heads, head_dim, device=META)
    saved = Saved(empty_like_rows(q), lse, codes[0], q_scale, codes[1], call.keys.per_token(META), row_max, k_mean)
    made = program.Program.of(backward, (call, saved, q, None, None, None, k))
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


def test_peak_of_heads_of_512_is_that_of_codes_and_two_transposed_copies(monkeypatch):
    """K's transposed copy lies in dK: o and gradients take 8 bytes a channel, codes 2, Q's and dO's copies 2."""
    monkeypatch.setattr(device, "capability", lambda device: 90)
    monkeypatch.setattr(program, "compiled", lambda *_: None)
    heads, head_dim, tokens = 8, 512, 16384
    found = peak(heads, heads, head_dim, tokens, "heads", "token", portable)
    assert found <= 1.01 * 12 * heads * head_dim * tokens
