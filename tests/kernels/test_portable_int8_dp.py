"""dP in INT8 of the portable kernels against the emulator: interpreted on a CPU, compiled where there is a GPU."""

import dataclasses

import pytest
import torch
from torch import Tensor

from sagebwd.masks.band import Band
from sagebwd.reference.emulator import Emulator
from sagebwd.reference.metrics import relative_l2
from tests.attention_case import TENSORS, AttentionCase

pytest.importorskip("triton")
from sagebwd.kernels.common.centered_values import launch_centered_values
from sagebwd.kernels.common.preprocess_do import launch_preprocess_do, row_values_of
from sagebwd.kernels.portable import launch
from sagebwd.kernels.runtime.driver import _at_widths, _filled
from tests.kernels import test_masks, test_portable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []
RECIPE = "token(dp=int8)"
LOG2_E = 1.4426950408889634


def codes_agree(found: Tensor, wanted: Tensor) -> None:
    """Codes of FP32 numbers that fall on either side of a tie may differ by one."""
    difference = (found.double() - wanted.double()).abs()
    assert difference.max() <= 1
    assert difference.mean() < 2e-3


def with_int8_dp(call: AttentionCase) -> AttentionCase:
    name, opened, rest = call.recipe.partition("(")
    return dataclasses.replace(call, recipe=f"{name}(dp=int8{', ' + rest if opened else ')'}", device=DEVICE)


# One token has dQ and dK of rounding alone: `test_of_one_token_rounding_is_left`. Wide heads have no INT8 dP.
_ELSEWHERE = {"one-token", *test_portable.WIDE}
CALLS = {name: with_int8_dp(call) for name, call in test_portable.CALLS.items() if name not in _ELSEWHERE}
CALLS |= {f"mask-{name}": with_int8_dp(call) for name, call in test_masks.CALLS.items() if name != "one-token"}
CALLS |= {
    "192/128": AttentionCase(recipe=RECIPE, head_dim=192, value_dim=128, is_causal=True),
    "40/72-packed": AttentionCase(
        recipe=RECIPE, head_dim=40, value_dim=72, **test_portable.PACKED, with_dlse=True, kv_heads=2, heads=4
    ),
    "200-dlse-mask": AttentionCase(recipe=RECIPE, head_dim=200, batch=2, masked=True, with_dlse=True),
    "200-fp16-causal": AttentionCase(recipe=RECIPE, head_dim=200, dtype=torch.float16, is_causal=True),
    "deterministic": AttentionCase(recipe=RECIPE, tokens_q=150, is_causal=True, deterministic=True),
    "all-products-int8-paper-dlse": AttentionCase(recipe="paper(dp=int8, rotate=True)", tokens_q=200, with_dlse=True),
    "16bit-dq-of-codes": AttentionCase(recipe="full(dp=int8, rotate=True, dk=int8)", tokens_q=130, masked=True),
    "16bit-dv-packed": AttentionCase(recipe="token(dp=int8, dv=16bit)", **test_portable.PACKED),
    "odd-addresses": AttentionCase(recipe=RECIPE, batch=2, masked=True, with_dlse=True, unaligned=TENSORS),
}
CALLS |= {
    f"tiny-{head_dim}": AttentionCase(
        recipe=RECIPE, head_dim=head_dim, tokens_q=70, tokens_k=70, is_causal=True, do_size=2.0**-100
    )
    for head_dim in (72, 128)
}
# A call of every kind; without a GPU others are slow.
QUICK = {
    "17-causal", "window-beyond-keys", "packed-causal-window", "paper-window", "sink-packed", "full-mask",
    "fp16-head-dim-96", "head-dim-20-causal", "head-dim-256", "plain-packed-head-dim-72", "block-scales", "s-16bit",
    "blocks-128-32", "mask-bool-all-gqa", "mask-bias-matrix-key-mask", "mask-paper-document", "192/128",
    "40/72-packed", "deterministic", "16bit-dq-of-codes", "16bit-dv-packed", "odd-addresses", "tiny-72",
}  # fmt: skip


@pytest.mark.parametrize("name", [test_portable.unless_quick(QUICK, name) for name in CALLS])
def test_is_the_recipe(name):
    dataclasses.replace(CALLS[name], device=DEVICE).check("triton")


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("dims", [(20, 20), (64, 64), (72, 40), (128, 128), (200, 200), (256, 192)], ids=str)
def test_codes_scales_and_row_values(dims, rotate):
    """Of grouped heads, hidden keys, queries that see no key, dlse; channels that are filled up have code 0."""
    case = AttentionCase(
        recipe=f"token(dp=int8, rotate={rotate})", batch=2, heads=4, kv_heads=2, tokens_q=90, tokens_k=70,
        head_dim=dims[0], value_dim=dims[1], window=(15, 9), masked=True, with_dlse=True, device=DEVICE,
    )  # fmt: skip
    q, k, v, do, dlse = inputs = case.inputs()
    call, width = case.call(q, k), max(dims)
    saved = case.forward("reference", call, inputs)
    o, lse = saved.o, saved.lse
    wide = _at_widths(launch, (width, width), call)
    filled = saved._replace(o=_filled(o, width), q_int8=_filled(saved.q_int8, width))
    values = launch_centered_values(wide, filled, _filled(v, width))
    found = launch_preprocess_do(wide, filled, _filled(do, width), dlse, row_values_of(wide, do.device), values)

    emulator = Emulator(q, k, v, call.recipe, call.scale, Band.of(False, 15, 9), call.key_mask)
    wanted = emulator._dp_operands(do, o, lse)
    flat = lambda x, tokens: x.flatten(1, 2)[:, :, :tokens]  # noqa: E731
    assert not found.codes[..., dims[1] :].any()
    assert not values.v_int8[..., dims[1] :].any()
    codes_agree(found.codes[..., : dims[1]], flat(wanted.do_codes, 90))
    codes_agree(values.v_int8[..., : dims[1]], flat(wanted.v_codes, 70))
    torch.testing.assert_close(values.v_scale, flat(wanted.v_scale, 70)[..., 0], rtol=1e-4, atol=1e-7)
    row_lse, delta, _, scale = found.row_values.view(2, 4, -1, 4)[:, :, :90].unbind(-1)
    torch.testing.assert_close(scale, flat(wanted.do_scale, 90)[..., 0], rtol=1e-5, atol=0)
    assert relative_l2(delta * scale, flat(wanted.delta, 90)[..., 0] - dlse) < 2e-3
    seen = lse != -torch.inf
    assert not seen.all()
    assert (row_lse[~seen] == torch.inf).all()
    torch.testing.assert_close(row_lse[seen], lse[seen] * LOG2_E, rtol=1e-6, atol=1e-5)


def test_a_gradient_of_lse_beside_a_tiny_one_of_the_output():
    """Over dO's scale dlse would be infinite."""
    case = AttentionCase(recipe=RECIPE, tokens_q=40, tokens_k=40, with_dlse=True, do_size=2.0**-115, device=DEVICE)
    q, k, v, do, dlse = case.inputs()
    inputs = q, k, v, do, 1e4 * dlse
    case.check_outputs(inputs, case.run("triton", inputs), ("o", "lse", "dq", "dk"))


def test_of_one_token_rounding_is_left():
    """P is 1, so dQ and dK are 0: delta is the row's dP, of which sums in another order differ in their last bits."""
    case = dataclasses.replace(test_portable.CALLS["one-token"], recipe=RECIPE, device=DEVICE)
    inputs = case.inputs()
    found = case.run("triton", inputs)
    assert max(found[x].abs().max().item() for x in ("dq", "dk")) < 1e-5
    case.check_outputs(inputs, found, ("o", "lse", "dv"))


def test_nan_of_a_head_is_in_no_other():
    case = AttentionCase(recipe=RECIPE, batch=2, heads=4, kv_heads=2, tokens_q=70, is_causal=True, device=DEVICE)
    for which in range(4):
        inputs = list(case.inputs())
        inputs[which][0, 0, 3, 5] = torch.nan
        found = case.run("triton", inputs)
        assert found["dq"][0, 0, 3].isnan().any()
        for name in ("dq", "dk", "dv"):
            x: Tensor = found[name]
            assert x[0, x.shape[1] // 2 :].isfinite().all()
            assert x[1].isfinite().all()
