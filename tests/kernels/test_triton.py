"""The Triton kernels against the recipe emulator: interpreted on a CPU, compiled where there is a GPU."""

import dataclasses
import math

import pytest
import torch

from sagebwd.quantize import quantize_tokens, smooth
from tests.kernels.calls import KernelCall

triton_kernels = pytest.importorskip("sagebwd.kernels.triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []

PACKED = {"lengths_q": [1, 17, 0, 70], "lengths_k": [40, 17, 5, 65]}
CALLS = {
    "gqa-ragged": KernelCall(batch=2, heads=4, kv_heads=2),
    "one-token": KernelCall(tokens_q=1, tokens_k=1),
    "17-causal": KernelCall(tokens_q=17, tokens_k=17, is_causal=True),
    "63-more-keys-causal": KernelCall(tokens_q=63, tokens_k=129, is_causal=True),
    "fewer-keys-causal": KernelCall(tokens_q=130, tokens_k=65, is_causal=True),
    "window": KernelCall(tokens_q=150, tokens_k=150, window=(30, 5)),
    "window-left-causal": KernelCall(tokens_q=150, tokens_k=150, window=(7, -1), is_causal=True),
    "window-beyond-keys": KernelCall(tokens_q=200, tokens_k=40, window=(10, 0)),
    "key-mask": KernelCall(batch=2, masked=True, with_dlse=True),
    "key-mask-causal": KernelCall(batch=2, masked=True, is_causal=True, recipe="paper"),
    "packed": KernelCall(**PACKED),
    "packed-causal-window": KernelCall(**PACKED, is_causal=True, window=(33, -1), with_dlse=True),
    "packed-paper": KernelCall(**PACKED, is_causal=True, recipe="paper"),
    "paper": KernelCall(recipe="paper", tokens_q=200, kv_heads=2),
    "paper-causal": KernelCall(recipe="paper", tokens_q=130, is_causal=True),
    "full": KernelCall(recipe="full", window=(30, 5)),
    "full-mask": KernelCall(recipe="full", masked=True),
    "fp16": KernelCall(dtype=torch.float16, is_causal=True),
    "head-dim-32": KernelCall(head_dim=32),
    "head-dim-96": KernelCall(head_dim=96, is_causal=True),
    "head-dim-72-packed": KernelCall(head_dim=72, **PACKED),
    "head-dim-128": KernelCall(head_dim=128),
    "head-dim-256": KernelCall(head_dim=256, tokens_k=70),
    **{f"{p}-16bit": KernelCall(recipe=f"token({p}=16bit)", masked=True) for p in ("s", "o", "dv", "dq", "dk")},
    "smooth-q": KernelCall(recipe="token(smooth_q=True)", is_causal=True),
    "smooth-q-paper-mask": KernelCall(recipe="paper(smooth_q=True)", tokens_q=130, masked=True),
    "smooth-q-full-packed": KernelCall(recipe="full(smooth_q=True, smooth_k=True, smooth_v=True)", **PACKED),
    "no-smoothing": KernelCall(recipe="token(smooth_k=False, smooth_v=False)", masked=True),
    "channel-scales": KernelCall(recipe="token(v_scale=channel, do_scale=channel)"),
    "block-scale-of-v": KernelCall(recipe="token(v_scale=block)", masked=True),
    "block-scales": KernelCall(recipe="token(q_scale=block, k_scale=block)"),
    "tile-scales": KernelCall(recipe="token(p_scale_dv=tile, ds_scale_dq=tile, ds_scale_dk=tile)"),
    "blocks-32-128": KernelCall(recipe="token(block_q=32, block_k=128)"),
    "blocks-128-32": KernelCall(recipe="token(block_q=128, block_k=32)", is_causal=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_is_the_recipe(name):
    dataclasses.replace(CALLS[name], device=DEVICE).check(triton_kernels)


@pytest.mark.parametrize("recipe", ["token", "paper"])
def test_codes_and_scales(recipe):
    call = KernelCall(recipe=recipe, batch=2, heads=4, kv_heads=2, head_dim=128, device=DEVICE)
    inputs, parsed = call.inputs(), call.settings()[-1]
    actual = call.run(triton_kernels, inputs)
    q, k = inputs[0].float(), smooth(inputs[1].float())[0]
    for name, x, group, block in (("q", q, parsed.q_scale, parsed.block_q), ("k", k, parsed.k_scale, parsed.block_k)):
        codes, scale = quantize_tokens(x, group, block)
        off = (actual[f"{name}_int8"] - codes).abs()
        assert off.max() <= 1, "a code is more than a tie away"
        assert (off > 0).float().mean() < 1e-3, "more codes differ than ties explain"
        torch.testing.assert_close(actual[f"{name}_scale"], scale[..., 0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("layout", ["transposed", "slice", "step"])
def test_strides(layout):
    call = KernelCall(device=DEVICE, tokens_k=65)
    inputs = call.inputs()
    expected = call.run(triton_kernels, inputs)

    def strided(x):
        if layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "slice":
            return torch.cat([x, x], -1)[..., : x.shape[-1]]
        return torch.stack([x, x], -1)[..., 0]  # head_dim itself is strided

    actual = call.run(triton_kernels, (*(strided(x) for x in inputs[:4]), None))
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_are_never_silent(where, bad):
    call = KernelCall(device=DEVICE, tokens_q=130)
    inputs = call.inputs()
    inputs["qkv".find(where) if where != "do" else 3][0, 0, 3, 5] = bad
    actual = call.run(triton_kernels, inputs)
    row = (0, 0, 3)
    spoilt = {
        "q": [actual["o"][row], actual["dq"][row], actual["dk"][0, 0, 3], actual["dv"][0, 0, 3]],
        "k": [actual["o"], actual["dq"], actual["dk"], actual["dv"]],
        "v": [actual["o"][..., 5:6], actual["dq"], actual["dk"]],  # scales are per channel
        "do": [actual["dq"][row], actual["dk"], actual["dv"]],
    }[where]
    for tensor in spoilt:
        assert not torch.isfinite(tensor).any(dim=-1).all(), "a bad input came out finite"


def test_garbage_behind_the_mask_is_not_seen():
    call = KernelCall(masked=True, device=DEVICE, recipe="token(o=16bit)")
    inputs = call.inputs()
    expected = call.run(triton_kernels, inputs)
    hidden = ~call.settings()[0][:, None, :, None]
    spoilt = (inputs[0], *(x.masked_fill(hidden, math.nan) for x in inputs[1:3]), *inputs[3:])
    actual = call.run(triton_kernels, spoilt)
    for name in ("o", "lse", "dq", "dk", "dv"):
        assert torch.equal(actual[name], expected[name]), name


def test_nothing_visible_gives_zeros():
    call = KernelCall(lengths_q=[5, 20], lengths_k=[0, 20], device=DEVICE)
    actual = call.run(triton_kernels, call.inputs())
    assert (actual["o"][:5] == 0).all()
    assert (actual["dq"][:5] == 0).all()
    assert (actual["lse"][:, :5] == -math.inf).all()


def test_repeats_bit_for_bit():
    call = KernelCall(heads=4, kv_heads=1, tokens_q=150, tokens_k=150, is_causal=True, device=DEVICE)
    inputs = call.inputs()
    first, second = (call.run(triton_kernels, inputs) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_unsupported_says_why():
    from sagebwd.recipe import Recipe

    token = Recipe.named("token")
    assert triton_kernels.unsupported(token, 64, torch.bfloat16) is None
    assert "dp" in triton_kernels.unsupported(token.replace(dp="int8"), 64, torch.bfloat16)
    assert "256" in triton_kernels.unsupported(token, 512, torch.bfloat16)
    assert "float32" in triton_kernels.unsupported(token, 64, torch.float32)
    assert "block_k" in triton_kernels.unsupported(token.replace(block_k=16), 64, torch.bfloat16)
