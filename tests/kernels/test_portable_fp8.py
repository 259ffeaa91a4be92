"""The portable forward of recipes with FP8 gradients, whose backward other kernels run: what it hands on to them."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from sagebwd.recipe import Recipe
from tests.attention_case import AttentionCase
from tests.gpus import DEVICE, on_gpu

pytest.importorskip("triton")
from sagebwd.call import Call, Saved
from sagebwd.kernels.portable import launch
from sagebwd.kernels.runtime import driver
from sagebwd.masks.band import Band
from sagebwd.reference.quantize import quantize_tokens, smooth
from sagebwd.reference.rotation import rotated

pytestmark = on_gpu

PACKED = {"lengths_q": [1, 17, 0, 70, 5], "lengths_k": [40, 17, 5, 265, 0]}
CALLS = {
    "causal": AttentionCase(tokens_q=200, tokens_k=200, heads=4, kv_heads=2, is_causal=True),
    "ragged": AttentionCase(batch=2, tokens_q=65, tokens_k=330, heads=4, kv_heads=2),
    "window-beyond-keys": AttentionCase(tokens_q=200, tokens_k=40, window=(10, 0)),
    "packed": AttentionCase(**PACKED),
    "packed-causal": AttentionCase(**PACKED, is_causal=True, heads=4, kv_heads=2),
    "key-mask": AttentionCase(batch=2, tokens_q=130, tokens_k=200, masked=True, is_causal=True),
    "sampled-mean": AttentionCase(tokens_q=130, tokens_k=700),
    "head-dim-40": AttentionCase(head_dim=40, tokens_q=130, tokens_k=200, is_causal=True),
    "head-dim-40-packed": AttentionCase(head_dim=40, **PACKED),
    "head-dim-128-fp16": AttentionCase(head_dim=128, dtype=torch.float16),
}


def forward(call: AttentionCase) -> tuple[tuple[Tensor | None, ...], Call, Saved]:
    inputs = call.inputs()
    asked = call.call(*inputs[:2])
    *saved, _ = driver.forward(launch, (call.head_dim,) * 2, asked, *inputs[:3])
    return inputs, asked, Saved(*saved)


def largest_scores(call: Call, saved: Saved) -> Tensor:
    """Of each query, times log2(e), shaped as lse, of the codes and scales that backward reads."""
    ends = (call.queries.cu_seqlens, call.keys.cu_seqlens)
    q, k = saved.q_int8.double(), saved.k_int8.double()
    if not call.packed:
        return _largest(call, q * saved.q_scale[..., None], k * saved.k_scale[..., None], call.key_mask, 0)
    q = q.transpose(0, 1) * saved.q_scale[..., None]
    k = k.transpose(0, 1) * saved.k_scale[..., None]
    sequences = zip(*(x.split(end.diff().tolist(), 1) for x, end in zip((q, k), ends)))
    return torch.cat([_largest(call, q[None], k[None], None, k.shape[1] - q.shape[1])[0] for q, k in sequences], -1)


def _largest(call: Call, q: Tensor, k: Tensor, key_mask: Tensor | None, offset: int) -> Tensor:
    s = q @ k.repeat_interleave(call.group, 1).mT * (call.scale * math.log2(math.e))
    rows, columns = (torch.arange(n, device=q.device) for n in s.shape[-2:])
    seen = Band.of(call.is_causal, call.window_left, call.window_right, offset).mask(rows, columns)
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    if key_mask is not None:
        s = s.masked_fill(~key_mask[:, None, None], -math.inf)
    return s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)


@pytest.mark.parametrize("name", CALLS)
def test_is_the_recipe(name):
    call = dataclasses.replace(CALLS[name], recipe="mixed", device=DEVICE)
    inputs, asked, saved = forward(call)
    expected = largest_scores(asked, saved)
    assert torch.equal(saved.row_max == -math.inf, expected == -math.inf)
    torch.testing.assert_close(saved.row_max.double(), expected, rtol=1e-5, atol=1e-4)
    call.check_outputs(inputs, saved._asdict(), ("o", "lse", "k_mean"))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rotate", [False, True])
def test_a_scale_for_the_keys_of_a_lane(rotate, masked):
    call = AttentionCase(
        recipe=f"mixed(rotate={rotate})", batch=2, tokens_k=330, head_dim=40, masked=masked, device=DEVICE
    )
    inputs, asked, saved = forward(call)
    valid = asked.key_mask[:, None, :, None] if masked else None
    k = smooth(inputs[1].float(), valid)[0]
    k = rotated(k) if rotate else k
    codes, scale = quantize_tokens(k, "lane", Recipe.named("mixed").block_k)
    assert (saved.k_int8 - codes).abs().max() <= 1, "a code is more than a tie away"
    torch.testing.assert_close(saved.k_scale, scale[..., 0], rtol=1e-5, atol=0)


def test_other_recipes_have_no_row_maxima():
    _, _, saved = forward(AttentionCase(device=DEVICE))
    assert saved.row_max is None
