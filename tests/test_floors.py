"""Is the recipe good enough? Floors of the error against FP64 attention, by recipe, kind of data and tensor.

Each is the value measured on 2026-11-22, of `token` and `mixed` on 2026-11-24, with the emulator in FP32 (256 tokens,
head_dim 64, 2 heads, causal, seed 0) and a margin of a tenth, and at least .0001. Raise them freely; lowering one
needs a reason in the commit message.
dK of "flat-and-sink" is one key's gradient and swings with the seed: over 12 seeds .005 to .027 (mean .011).

`python -m tests.test_floors` prints the floors.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from sagebwd import sage_attention
from sagebwd.reference.metrics import cosine, relative_l2
from tests.attention_case import outcome
from tests.gpus import HAS_HOPPER
from tests.inputs import KINDS, draw

pytestmark = pytest.mark.rounding
TENSORS = ("o", "dq", "dk", "dv")

large_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and 40 GB of its memory")

# (largest relative L2, least cosine) of o, dq, dk, dv
FLOORS: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {
    "token": {
        "normal": ((0.0112, 0.99993), (0.0175, 0.99984), (0.0175, 0.99984), (0.0165, 0.99986)),
        "mean-and-outliers": ((0.0011, 0.99999), (0.0288, 0.99958), (0.0191, 0.99982), (0.0180, 0.99983)),
        "near-one-hot": ((0.0741, 0.99727), (0.5820, 0.90958), (0.5529, 0.90978), (0.0710, 0.99749)),
        "flat-and-sink": ((0.0015, 0.99999), (0.0251, 0.99968), (0.0225, 0.99975), (0.0093, 0.99995)),
        "sink": ((0.0036, 0.99999), (0.0292, 0.99958), (0.0228, 0.99975), (0.0098, 0.99995)),
        "sinks": ((0.0052, 0.99998), (0.0393, 0.99926), (0.0285, 0.99970), (0.0122, 0.99992)),
        "zero-block": ((0.0404, 0.99919), (0.0267, 0.99964), (0.0168, 0.99985), (0.0168, 0.99985)),
        "huge": ((0.0109, 0.99994), (0.0171, 0.99985), (0.0172, 0.99985), (0.0168, 0.99985)),
        "tiny": ((0.0061, 0.99998), (0.0091, 0.99995), (0.0133, 0.99991), (0.0137, 0.99990)),
        "coherent": ((0.0015, 0.99999), (0.0199, 0.99980), (0.0072, 0.99997), (0.0064, 0.99997)),
    },
    "paper": {
        "normal": ((0.0170, 0.99986), (0.0493, 0.99880), (0.0493, 0.99880), (0.0624, 0.99807)),
        "mean-and-outliers": ((0.0101, 0.99995), (0.2255, 0.97479), (0.1036, 0.99468), (0.0803, 0.99685)),
        "near-one-hot": ((0.0861, 0.99633), (0.7831, 0.65588), (0.7715, 0.67135), (0.0909, 0.99591)),
        "flat-and-sink": ((0.0195, 0.99982), (0.0687, 0.99766), (0.1656, 0.98669), (0.0288, 0.99959)),
        "sink": ((0.0835, 0.99653), (0.5970, 0.84873), (0.3709, 0.93482), (0.0110, 0.99994)),
        "sinks": ((0.0934, 0.99601), (0.9396, 0.57998), (0.5131, 0.88841), (0.0124, 0.99992)),
        "zero-block": ((0.0190, 0.99982), (0.0417, 0.99914), (0.0414, 0.99915), (0.0874, 0.99625)),
        "huge": ((0.0167, 0.99986), (0.0491, 0.99881), (0.0492, 0.99881), (0.0618, 0.99811)),
        "tiny": ((0.0089, 0.99996), (0.0516, 0.99868), (0.0512, 0.99870), (0.0834, 0.99655)),
        "coherent": ((0.0040, 0.99999), (0.0403, 0.99919), (0.0116, 0.99993), (0.0192, 0.99981)),
    },
    "mixed": {
        "normal": ((0.0099, 0.99995), (0.0438, 0.99905), (0.0427, 0.99909), (0.0405, 0.99919)),
        "mean-and-outliers": ((0.0010, 0.99999), (0.0578, 0.99834), (0.0451, 0.99899), (0.0415, 0.99914)),
        "near-one-hot": ((0.0830, 0.99658), (0.5492, 0.86041), (0.5590, 0.86520), (0.0905, 0.99594)),
        "flat-and-sink": ((0.0015, 0.99999), (0.0440, 0.99904), (0.0978, 0.99595), (0.0376, 0.99931)),
        "sink": ((0.0031, 0.99999), (0.0504, 0.99889), (0.0436, 0.99910), (0.0344, 0.99942)),
        "sinks": ((0.0037, 0.99999), (0.0507, 0.99882), (0.0283, 0.99961), (0.0328, 0.99946)),
        "zero-block": ((0.0106, 0.99994), (0.0432, 0.99907), (0.0421, 0.99911), (0.0426, 0.99909)),
        "huge": ((0.0099, 0.99995), (0.0427, 0.99909), (0.0420, 0.99912), (0.0409, 0.99918)),
        "tiny": ((0.0001, 0.99999), (0.0416, 0.99914), (0.0406, 0.99919), (0.0380, 0.99930)),
        "coherent": ((0.0012, 0.99999), (0.0430, 0.99908), (0.0092, 0.99995), (0.0083, 0.99996)),
    },
}

# of the recipe of mma.sync's kernels, measured on 2026-11-28 with the emulator
EMULATED: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {
    "token(dp=int8)": {
        "normal": ((0.0112, 0.99993), (0.0202, 0.99979), (0.0211, 0.99978), (0.0165, 0.99986)),
        "mean-and-outliers": ((0.0011, 0.99999), (0.0310, 0.99952), (0.0217, 0.99976), (0.0180, 0.99983)),
        "near-one-hot": ((0.0741, 0.99727), (0.5965, 0.90679), (0.5679, 0.90644), (0.0710, 0.99749)),
        "flat-and-sink": ((0.0015, 0.99999), (0.0271, 0.99963), (0.0370, 0.99936), (0.0093, 0.99995)),
        "sink": ((0.0036, 0.99999), (0.0314, 0.99952), (0.0238, 0.99972), (0.0098, 0.99995)),
        "sinks": ((0.0052, 0.99998), (0.0404, 0.99923), (0.0304, 0.99966), (0.0122, 0.99992)),
        "zero-block": ((0.0404, 0.99919), (0.0283, 0.99960), (0.0194, 0.99981), (0.0168, 0.99985)),
        "huge": ((0.0109, 0.99994), (0.0204, 0.99979), (0.0207, 0.99978), (0.0168, 0.99985)),
        "tiny": ((0.0061, 0.99998), (0.0132, 0.99991), (0.0162, 0.99987), (0.0137, 0.99990)),
        "coherent": ((0.0015, 0.99999), (0.0235, 0.99973), (0.0112, 0.99993), (0.0064, 0.99997)),
    },
}


def errors(kind, recipe):
    """(cosine, relative L2) of each tensor against FP64 attention on the same inputs."""
    *tensors, do = draw(kind, tokens=256, head_dim=64, seed=0, dtype=torch.float32)
    found = outcome(sage_attention, tensors, do, is_causal=True, recipe=recipe, impl="reference")
    pairs = zip(TENSORS, found, exact_outcome(*tensors, do, is_causal=True))
    return {name: (cosine(a, e), relative_l2(a, e)) for name, a, e in pairs}


def exact_outcome(q, k, v, do, is_causal):
    """Of attention in FP64."""
    tensors = [x.double() for x in (q, k, v)]
    return outcome(F.scaled_dot_product_attention, tensors, do.double(), is_causal=is_causal)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", FLOORS | EMULATED)
def test_error_against_full_precision(recipe, kind):
    check(errors(kind, recipe), (FLOORS | EMULATED)[recipe][kind])


def check(measured, floors):
    """Hold errors to floors."""
    for name, (largest_error, least_cosine) in zip(TENSORS, floors):
        similarity, error = measured[name]
        assert error <= largest_error, f"{name}: relative L2 {error:.4f}, allowed {largest_error}"
        assert similarity >= least_cosine, f"{name}: cosine {similarity:.6f}, allowed {least_cosine}"


# Of these kinds, dK is the gradient of a few keys: its error is one draw of few numbers. In the emulator (2048 tokens,
# head_dim 64, no mask, seeds 0 to 2) q times 1 + 2**-20 moves it by 1 to 5%, BF16 for FP32 by 3 to 13%. The weight of
# their largest key is 1 in the emulator's P; a kernel without maxima rounds it to 16 bit, an eighth of O's error.
FEW_KEYS = ("flat-and-sink", "sink", "sinks")


@pytest.mark.gpu
@large_gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_at_16k_tokens(head_dim, is_causal):
    """No further from full precision than the recipe in BF16 on the same data at that length.

    In BF16, since O so rounded is what delta is made of: with a mean in K that is half of dQ's error at this length.
    """
    recipes = FLOORS if HAS_HOPPER else ("token", "paper")
    failures = []
    for kind in KINDS:
        inputs = [x.cuda() for x in draw(kind, tokens=16384, head_dim=head_dim, seed=0, dtype=torch.bfloat16)]
        exact = exact_outcome(*inputs, is_causal)
        for recipe in recipes:
            emulated, actual = (
                outcome(partial(sage_attention, is_causal=is_causal, recipe=recipe, impl=impl), inputs[:3], inputs[3])
                for impl in ("reference", None)
            )
            for name, *of_tensor in zip(TENSORS, emulated, actual, exact):
                allowed, error = (relative_l2(x, of_tensor[2]) for x in of_tensor[:2])
                margin = 1.3 if name in ("o", "dk") and kind in FEW_KEYS else 1.1
                if not error <= margin * allowed:
                    failures.append(f"{recipe}, {kind}, {name}: {error:.4f}, the emulator has {allowed:.4f}")
    assert not failures, "\n".join(failures)


def slopes(recipe, impl, tokens, head_dim, is_causal, device="cpu", dtype=torch.float32):
    """By gradient, <actual, exact> / <exact, exact> of kind "coherent": under 1 where sums lose what they add."""
    inputs = [x.to(device) for x in draw("coherent", tokens=tokens, head_dim=head_dim, dtype=dtype)]
    attention = partial(sage_attention, is_causal=is_causal, recipe=recipe, impl=impl)
    pairs = zip(TENSORS, outcome(attention, inputs[:3], inputs[3]), exact_outcome(*inputs, is_causal))
    return {
        name: ((actual.double() * exact).sum() / exact.square().sum()).item()
        for name, actual, exact in pairs
        if name != "o"
    }


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("recipe", FLOORS | EMULATED)
def test_recipes_keep_the_size_of_gradients(recipe, is_causal):
    measured = slopes(recipe, "reference", tokens=1024, head_dim=64, is_causal=is_causal)
    assert all(0.99 < slope < 1.01 for slope in measured.values()), measured


@pytest.mark.gpu
@large_gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [4096, 16384])
def test_kernels_keep_the_size_of_gradients(tokens, head_dim, is_causal):
    """A key's dV and dK are sums over all queries; Hopper's e4m3 products alone lose percents of them."""
    for recipe in ("token", "mixed") if HAS_HOPPER else ("token",):
        measured = slopes(recipe, None, tokens, head_dim, is_causal, "cuda", torch.bfloat16)
        assert all(0.99 < measured[name] < 1.01 for name in ("dk", "dv")), f"{recipe}: {measured}"


def print_floors():
    for name in FLOORS | EMULATED:
        print(f'    "{name}": {{')
        for data in KINDS:
            print(f'        "{data}": ({floors(errors(data, name))}),')
        print("    },")


def floors(measured):
    """What was measured with a margin, as the tables above have it."""
    pairs = (measured[name] for name in TENSORS)
    return ", ".join(
        f"({max(1.1 * error, 1e-4):.4f}, {math.floor(1e5 - 1.2e5 * (1 - cosine)) / 1e5:.5f})"
        for cosine, error in pairs
    )


if __name__ == "__main__":
    print_floors()
