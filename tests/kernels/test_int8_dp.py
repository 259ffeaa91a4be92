"""dP in INT8 on Hopper: its passes against the emulator, interpreted on a CPU; gradients against it, on a GPU."""

import dataclasses

import pytest
import torch
from torch import Tensor

from sagebwd.call import Call, Saved
from sagebwd.masks.band import Band
from sagebwd.numerics import RESTORED
from sagebwd.reference.emulator import Emulator, _sequences
from sagebwd.reference.metrics import relative_l2
from sagebwd.reference.quantize import pad_tokens
from tests.attention_case import AttentionCase
from tests.gpus import needs_hopper

pytest.importorskip("triton")
from sagebwd.kernels.runtime.driver import _at_widths, _filled
from sagebwd.kernels.sm90 import widths
from sagebwd.kernels.sm90.backward import launch
from sagebwd.kernels.sm90.operands.int8_dp import PLANES, launch_int8_operands
from tests.kernels import test_sm90_backward, test_sm90_masks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPE = "mixed(dp=int8)"
LOG2_E = 1.4426950408889634


class WithoutLast(AttentionCase):
    """The last query has no gradient, as a sequence's last token, which predicts nothing."""

    def inputs(self) -> tuple[Tensor, ...]:
        q, k, v, do, dlse = super().inputs()
        do[..., -1, :] = 0
        return q, k, v, do, dlse


class WithoutFirst(AttentionCase):
    """The first queries have no gradient, as those of a prompt that no loss is of; V is large."""

    def inputs(self) -> tuple[Tensor, ...]:
        q, k, v, do, dlse = super().inputs()
        do[..., :130, :] = 0
        return q, k, v * 2000, do, dlse


PASSES = {
    "128": AttentionCase(head_dim=128),
    "64, grouped, dlse": AttentionCase(heads=6, kv_heads=2, batch=2, tokens_q=150, with_dlse=True, is_causal=True),
    "96, FP16": AttentionCase(head_dim=96, dtype=torch.float16),
    "192/128": AttentionCase(head_dim=192, value_dim=128, tokens_q=30, tokens_k=30),
    "192": AttentionCase(head_dim=192, tokens_q=30, tokens_k=30),
    "256": AttentionCase(head_dim=256, tokens_q=30, tokens_k=30),
    "80/40, filled up": AttentionCase(head_dim=80, value_dim=40),
    "queries without a key": AttentionCase(tokens_q=200, tokens_k=70, window=(60, 0)),
    "hidden keys": AttentionCase(batch=2, masked=True, tokens_k=300),
    "sink": AttentionCase(tokens_q=300, tokens_k=300, sink=12.0, is_causal=True),
    "packed": AttentionCase(
        lengths_q=[5, 0, 150, 64], lengths_k=[5, 7, 100, 129], heads=4, kv_heads=2, with_dlse=True
    ),
    "not rotated": AttentionCase(recipe="mixed(dp=int8, rotate=False)"),
    "no gradient of the last": WithoutLast(tokens_k=65, is_causal=True, do_size=1e-5),
    "no gradient of a block": WithoutFirst(tokens_q=200, tokens_k=200, is_causal=True),
}


class Passes:
    """A call's passes, and the emulator of each sequence, dense calls being one of all."""

    def __init__(self, kernel_call: AttentionCase) -> None:
        if "dp=" not in kernel_call.recipe:
            kernel_call = dataclasses.replace(kernel_call, recipe=RECIPE)
        kernel_call = dataclasses.replace(kernel_call, device=DEVICE)
        q, k, v, do, dlse = kernel_call.inputs()
        self.call = call = kernel_call.call(q, k)
        form = widths.of_call(*kernel_call.dims)
        self.wide, self.tile = _at_widths(launch, form, call), widths.width(*form).backward
        values = self.wide.columns[1]
        o, lse = torch.zeros_like(do), torch.zeros(do.shape[:-1] if do.dim() == 4 else do.shape[1::-1], device=DEVICE)
        saved = [x.new_zeros(*x.shape[:-1], width) for x, width in ((q, form[0]), (k, form[0]))]
        q_int8, k_int8 = (x.to(torch.int8) for x in saved)
        q_scale, k_scale, row_max = (torch.zeros(self.per_token(x), device=DEVICE) for x in (q, k, q))
        self.sequences = []
        for rows, keys, band in self.parts(call):
            one = [self.part(x, at) for x, at in ((q, rows), (k, keys), (v, keys), (do, rows))]
            emulated = Emulator(*one[:3], call.recipe, call.scale, band, call.key_mask)
            o_rows, lse_rows, _ = emulated.forward()
            self.part(o, rows).copy_(o_rows)
            of_rows, of_keys = (self.part_of_tokens(x, at) for x, at in ((lse, rows), (k_scale, keys)))
            of_rows.copy_(lse_rows)
            x, count, there = emulated.operands, one[0].shape[2], one[1].shape[2]
            self.part(q_int8, rows)[..., : call.head_dim] = x.q_codes.flatten(1, 2)[:, :, :count].to(torch.int8)
            self.part(k_int8, keys)[..., : call.head_dim] = x.k_codes.flatten(1, 2)[:, :, :there].to(torch.int8)
            self.part_of_tokens(q_scale, rows).copy_(x.q_scale.flatten(1, 2)[:, :, :count, 0])
            of_keys.copy_(x.k_scale.flatten(1, 2)[:, :, :there, 0])
            maxima = torch.full_like(lse_rows, -torch.inf)
            for chunk, seen in emulated._chunks():
                if seen.start < seen.stop:
                    stop = min(chunk.stop, count) - chunk.start
                    found = emulated._scores(chunk, seen).amax(-1).flatten(1, 2)[..., :stop]
                    maxima[..., chunk.start : chunk.start + stop] = found
            self.part_of_tokens(row_max, rows).copy_(maxima * LOG2_E)
            dlse_rows = None if dlse is None else self.part_of_tokens(dlse, rows)
            self.sequences.append((rows, keys, emulated, one[3], o_rows, lse_rows, dlse_rows))
        heads = self.wide.keys.batch * self.wide.keys.heads
        self.maxima = torch.zeros(heads, values, dtype=torch.int32, device=DEVICE)
        self.largest = torch.zeros(heads, dtype=torch.int32, device=DEVICE)
        saved = Saved(_filled(o, values), lse, q_int8, q_scale, k_int8, k_scale, row_max, None)
        self.found = launch_int8_operands(
            self.wide, saved, _filled(v, values), _filled(do, values), dlse, self.maxima, self.largest, self.tile
        )

    def parts(self, call: Call) -> list:
        if call.packed:
            return list(_sequences(call))
        band = Band.of(call.is_causal, call.window_left, call.window_right)
        return [(slice(None), slice(None), band)]

    def per_token(self, x: Tensor) -> tuple[int, ...]:
        return x.shape[:-1] if x.dim() == 4 else (x.shape[1], x.shape[0])

    def part(self, x: Tensor, tokens: slice) -> Tensor:
        """(B, heads, tokens, D) of a sequence."""
        return x if x.dim() == 4 else x[tokens].transpose(0, 1)[None]

    def part_of_tokens(self, x: Tensor, tokens: slice) -> Tensor:
        """(B, heads, tokens) of a sequence."""
        return x if x.dim() == 3 else x[None, :, tokens]

    def planes(self, rows: slice, number: int) -> Tensor:
        """(B, heads, blocks, BLOCK) of a sequence's row values."""
        block, planes = self.tile.queries, self.found.values.planes
        batch = 1 if self.call.packed else self.call.queries.batch
        x = planes.view(batch, -1, planes.shape[1], PLANES.value, block)[..., number, :]
        if not self.call.packed:
            return x
        first = rows.start // block + self.index(rows)
        return x[:, :, first : first + -(-(rows.stop - rows.start) // block)]

    def index(self, rows: slice) -> int:
        """Number of a packed sequence; of several of no tokens, which begin alike, the last."""
        return max(n for n, one in enumerate(self.sequences) if one[0] == rows)

    def emulated(self, number: int):
        """DpOperands and Float8Operands of a sequence."""
        _, _, e, do, o, lse, dlse = self.sequences[number]
        column = None if dlse is None else dlse.unflatten(1, (e.heads_k, -1)).unsqueeze(-1)
        dp = e._dp_operands(do, o, lse, column)
        delta = dp.delta if column is None else dp.delta - column
        pad = lambda x: None if x is None else pad_tokens(x, e.recipe.block_q)  # noqa: E731
        finite = torch.where(lse == -torch.inf, 0, lse).unflatten(1, (e.heads_k, -1)).unsqueeze(-1)
        return dp, e._float8(pad(e._group_heads(do)), pad(finite), pad(column), dp.do_scale), delta


@pytest.fixture(scope="module", params=PASSES)
def passes(request):
    return Passes(PASSES[request.param])


def codes_agree(found: Tensor, wanted: Tensor) -> None:
    """Codes of FP32 numbers that fall on either side of a tie may differ by one."""
    difference = (found.double() - wanted.double()).abs()
    assert difference.max() <= 1
    assert difference.mean() < 2e-3


def test_codes_and_scales_are_the_emulators(passes):
    found, width = passes.found, passes.call.value_dim
    for number, (rows, keys, e, *_) in enumerate(passes.sequences):
        if e.tokens_q == 0 or e.tokens_k == 0:
            continue
        dp, _, _ = passes.emulated(number)
        v_codes, v_scale = passes.part(found.v_int8, keys), passes.part_of_tokens(found.v_scale, keys)
        do_codes = passes.part(found.do_int8, rows)
        assert (v_codes[..., width:] == 0).all()
        assert (do_codes[..., width:] == 0).all()
        codes_agree(v_codes[..., :width], dp.v_codes.flatten(1, 2)[:, :, : e.tokens_k])
        codes_agree(do_codes[..., :width], dp.do_codes.flatten(1, 2)[:, :, : e.tokens_q])
        torch.testing.assert_close(v_scale, dp.v_scale.flatten(1, 2)[:, :, : e.tokens_k, 0], rtol=1e-4, atol=1e-7)


def test_row_values_are_the_emulators(passes):
    for number, (rows, keys, e, _, _, lse, _) in enumerate(passes.sequences):
        if e.tokens_q == 0 or e.tokens_k == 0:
            continue
        dp, fp8, delta = passes.emulated(number)
        flat = lambda x: x.flatten(1, 2)[:, :, : e.tokens_q, 0]  # noqa: E731, B023
        tokens = lambda plane: passes.planes(rows, plane).flatten(2)[..., : e.tokens_q]  # noqa: E731, B023
        seen = lse != -torch.inf
        found = tokens(0)
        assert (found[~seen] == torch.inf).all()
        assert (passes.planes(rows, 0).flatten(2)[..., e.tokens_q :] == torch.inf).all()
        torch.testing.assert_close(found[seen], (lse * LOG2_E - flat(fp8.shift) * LOG2_E)[seen], rtol=1e-5, atol=1e-4)
        inverse = passes.planes(rows, 3)[..., :1].expand(-1, -1, -1, passes.tile.queries).flatten(2)[..., : e.tokens_q]
        unit = torch.where(flat(dp.do_scale) == 0, 1, flat(dp.do_scale))
        torch.testing.assert_close(inverse, flat(fp8.inverse_bound) * unit, rtol=1e-5, atol=0)
        largest_v = passes.part_of_tokens(passes.found.v_scale, keys).amax()
        assert (passes.planes(rows, 3)[..., 0] * largest_v).isfinite().all(), "what codes are multiplied by"
        wanted = -flat(delta) * flat(fp8.inverse_bound)
        assert relative_l2(tokens(2), wanted) < 2e-3
        spread = passes.part_of_tokens(passes.found.values.spread, rows)
        largest = passes.largest.view(torch.float32).view(-1, passes.wide.keys.heads)
        largest = largest[passes.index(rows) if passes.call.packed else slice(None)].view(-1, passes.wide.keys.heads)
        mantissa, exponent = torch.frexp(largest)
        k_unit = torch.ldexp(torch.ones_like(mantissa), exponent - torch.where(mantissa <= 0.875, 9, 8))
        k_unit = k_unit.repeat_interleave(passes.call.group, 1)[..., None]
        torch.testing.assert_close(spread * k_unit * RESTORED, flat(fp8.dq_scale), rtol=1e-5, atol=0)


def test_largest_values_are_exact(passes):
    for number, (_, _, e, *_) in enumerate(passes.sequences):
        if e.tokens_q == 0 or e.tokens_k == 0:
            continue
        index = slice(number * e.heads_k, (number + 1) * e.heads_k) if passes.call.packed else slice(None)
        found = passes.maxima.view(torch.float32)[index, : passes.call.value_dim]
        assert torch.equal(found, e.v.abs().amax((2, 3)).flatten(0, 1))


# Of `test_sm90_backward` and `test_sm90_masks`.
FORMS = (
    "gqa-ragged", "one-token", "63-more-keys-causal", "window-left-causal", "window-beyond-keys", "key-mask", "packed",
    "packed-causal-window", "fp16", "whole", "sink", "padded", "packed-ungrouped-causal",
)  # fmt: skip
MASKS = ("bool-all-gqa", "document", "bias-matrix-causal-key-mask")
CALLS = {name: test_sm90_backward.CALLS[name] for name in FORMS}
CALLS |= {name: test_sm90_masks.CALLS[name] for name in MASKS}
CALLS |= {
    "dlse": AttentionCase(tokens_q=333, tokens_k=400, heads=4, kv_heads=2, is_causal=True, with_dlse=True),
    "long": AttentionCase(tokens_q=1500, tokens_k=1500, is_causal=True),
    "tiny": AttentionCase(tokens_q=70, tokens_k=70, is_causal=True, do_size=2.0**-100),
    "no gradient of the last": WithoutLast(tokens_q=200, tokens_k=200, is_causal=True, do_size=1e-5),
    "no gradient of a block": WithoutFirst(tokens_q=200, tokens_k=200, is_causal=True),
}
CHANGES = {"": {}, "deterministic-": {"deterministic": True}, "plain-": {"recipe": "mixed(dp=int8, rotate=False)"}}


# Every call at 128, some at every width, and some of these changed
CASES = [
    *(("", name, (128, 128)) for name in CALLS),
    *(
        ("", name, dims)
        for name in ("gqa-ragged", "packed-causal-window", "padded", "sink")
        for dims in [*widths.FORMS, (80, 40)]
        if dims != (128, 128)
    ),
    *(
        (change, name, dims)
        for change in ("deterministic-", "plain-")
        for name in ("gqa-ragged", "packed-ungrouped-causal")
        for dims in widths.FORMS
    ),
]


class TestIsTheRecipe:
    pytestmark = needs_hopper

    @pytest.mark.parametrize(("change", "name", "dims"), CASES)
    def test_is_the_recipe(self, change, name, dims):
        head_dim, value_dim = dims
        shape = {"head_dim": head_dim, "value_dim": value_dim, "device": "cuda", "recipe": RECIPE}
        dataclasses.replace(CALLS[name], **(shape | CHANGES[change])).check("hopper")


class TestOnHopper:
    pytestmark = needs_hopper

    @pytest.mark.parametrize(("head_dim", "value_dim"), widths.FORMS)
    def test_deterministic_gradients_are_the_same_bits(self, head_dim, value_dim):
        call = dataclasses.replace(
            CALLS["long"], head_dim=head_dim, value_dim=value_dim, device="cuda", recipe=RECIPE, deterministic=True
        )
        first, second = (call.run("hopper", call.inputs()) for _ in range(2))
        for name in ("dq", "dk", "dv"):
            assert torch.equal(first[name], second[name]), name

    def test_nan_of_a_hidden_value_is_not_read(self):
        call = dataclasses.replace(CALLS["padded"], head_dim=128, device="cuda", recipe=RECIPE)
        q, k, v, do, dlse = call.inputs()
        mask = call.settings()[0]
        clean = call.run("hopper", (q, k, v.masked_fill(~mask[:, None, :, None], 0), do, dlse))
        found = call.run("hopper", (q, k, v.masked_fill(~mask[:, None, :, None], torch.nan), do, dlse))
        for name in ("dq", "dk"):
            assert found[name].isfinite().all()
            assert relative_l2(found[name], clean[name]) < 1e-3

    def test_nan_of_a_gradient_is_a_nan(self):
        call = dataclasses.replace(CALLS["long"], head_dim=64, device="cuda", recipe=RECIPE)
        q, k, v, do, dlse = call.inputs()
        do[0, 0, 700, 3] = torch.nan
        found = call.run("hopper", (q, k, v, do, dlse))
        assert found["dq"][0, 0, 700].isnan().all()
        assert found["dq"][0, 1].isfinite().all()
