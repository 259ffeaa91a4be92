"""The Gluon kernels against the recipe emulator, on a GPU of compute capability 9.0; what they refuse, anywhere."""

import dataclasses

import pytest
import torch

from sagebwd import ops, sage_attention
from sagebwd.recipe import Recipe
from tests.kernels.calls import KernelCall
from tests.kernels.test_triton import CALLS

hopper = pytest.importorskip("sagebwd.kernels.hopper")
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")]


VARIED = (
    "gqa-ragged", "one-token", "63-more-keys-causal", "fewer-keys-causal", "window-left-causal", "window-beyond-keys",
    "key-mask", "packed", "packed-causal-window", "fp16",
)  # fmt: skip
# what these kernels have beside the recipes of the portable ones
CHANGES = {
    "fp8": {"recipe": "token_fp8"},
    "fp8-deterministic": {"recipe": "token_fp8", "deterministic": True},
    "16bit-o": {"recipe": "token(o=16bit)"},
    "fp8-16bit-o": {"recipe": "token_fp8(o=16bit)"},
    "paper-16bit-o": {"recipe": "paper(o=16bit)"},
}
CALLS = CALLS | {
    f"{change}-{name}": dataclasses.replace(CALLS[name], **CHANGES[change]) for change in CHANGES for name in VARIED
}
SUPPORTED = [
    (name, head_dim)
    for name, call in CALLS.items()
    for head_dim in (64, 128)
    if hopper.unsupported(Recipe.parse(call.recipe), head_dim, call.dtype) is None
]


@pytest.mark.parametrize(("name", "head_dim"), SUPPORTED)
class TestIsTheRecipe:
    pytestmark = on_hopper

    def test_is_the_recipe(self, name, head_dim):
        dataclasses.replace(CALLS[name], head_dim=head_dim, device="cuda").check(hopper)


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("tokens", [1, 63, 65, 1000])
    @pytest.mark.parametrize("scale", [-0.1, 0.0])
    def test_scales_that_are_not_positive(self, tokens, scale):
        inputs = [x.cuda() for x in KernelCall(tokens_q=tokens, tokens_k=tokens).inputs()[:3]]
        outs = [
            sage_attention(*inputs, enable_gqa=True, scale=scale, impl=impl, is_causal=True)
            for impl in ("hopper", "reference")
        ]
        torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)

    def test_one_key_gives_its_value_exactly(self):
        """P is 1 and V less its mean 0: nothing may be added to the mean, or dQ is noise."""
        q, k, v, *_ = KernelCall(tokens_q=1, tokens_k=1, head_dim=128, device="cuda").inputs()
        assert torch.equal(sage_attention(q, k, v, enable_gqa=True, impl="hopper"), v.expand_as(q))

    @pytest.mark.parametrize("recipe", ["token", "paper"])
    def test_rows_far_from_all_keys_are_zero(self, recipe):
        call = KernelCall(recipe=recipe, tokens_q=700, tokens_k=5, window=(7, -1), device="cuda")
        actual = call.check(hopper)
        assert (actual["o"][:, :, 12:] == 0).all()

    @pytest.mark.parametrize("recipe", ["token", "token(o=16bit)", "token_fp8", "token_fp8(o=16bit)"])
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_a_nan_stays_in_its_sequence(self, recipe, head_dim):
        """Kernels read whole blocks, past the end of one head or sequence into the next."""
        shape = (2, 2, 201, head_dim)
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        for x in inputs:
            x[0, 1] = x[1] = float("nan")
        *inputs, do = (x.requires_grad_() for x in inputs)
        o = sage_attention(*inputs, recipe=recipe, impl="hopper")
        for x in (o, *torch.autograd.grad(o, inputs, do)):
            assert x[0, 0].isfinite().all()
            assert x[0, 1].isnan().all()

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_repeats_bit_for_bit(self, head_dim):
        """Large enough for a race: a stage that was released too early spoilt one row in a thousand."""
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (1, 2048 // head_dim, 8192, head_dim)
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)]
        for recipe in ("token", "token(o=16bit)"):
            first, *others = [sage_attention(*inputs, recipe=recipe, impl="hopper", return_lse=True) for _ in range(5)]
            for other in others:
                assert all(torch.equal(a, b) for a, b in zip(first, other))

    def test_is_what_none_takes(self):
        token = Recipe.named("token")
        assert ops.fastest(token, 128, torch.bfloat16, torch.device("cuda")) == "hopper"
        assert ops.fastest(token, 96, torch.bfloat16, torch.device("cuda")) == "triton"


def test_unsupported_says_why():
    token = Recipe.named("token")
    assert hopper.unsupported(token, 64, torch.bfloat16) is None
    assert hopper.unsupported(Recipe.named("paper"), 128, torch.float16) is None
    assert "96" in hopper.unsupported(token, 96, torch.bfloat16)
    assert "float32" in hopper.unsupported(token, 64, torch.float32)
    assert "smooth_q" in hopper.unsupported(token.replace(smooth_q=True), 64, torch.bfloat16)
    assert hopper.unsupported(token.replace(o="16bit"), 64, torch.bfloat16) is None
    assert "s=" in hopper.unsupported(token.replace(s="16bit"), 64, torch.bfloat16)
    assert "block_k" in hopper.unsupported(token.replace(block_k=32), 64, torch.bfloat16)
    assert "v_scale" in hopper.unsupported(token.replace(v_scale="channel"), 64, torch.bfloat16)


def test_a_cpu_is_refused():
    x = torch.randn(1, 1, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"impl='hopper' needs a GPU of compute capability 9\.0"):
        sage_attention(x, x, x, impl="hopper")


def test_elsewhere_triton_is_the_fastest():
    assert ops.fastest(Recipe.named("token"), 128, torch.bfloat16, torch.device("cpu")) == "triton"
