"""Hopper's kernels against the recipe emulator, on a GPU of compute capability 9.0; how programs share blocks."""

import dataclasses
import math

import pytest
import torch

from sagebwd import sage_attention
from sagebwd.recipe import Recipe
from sagebwd.reference.metrics import relative_l2
from sagebwd.switches import switches
from tests.attention_case import TENSORS, AttentionCase, outcome
from tests.gpus import needs_hopper
from tests.kernels.test_portable import CALLS, UNALIGNED

pytest.importorskip("triton")
from sagebwd.cache import PLANS
from sagebwd.call import Call, Packing
from sagebwd.kernels.sm90.backward import launch
from sagebwd.kernels.sm90.backward.tiles_per_cta import backward_tiles_per_cta
from sagebwd.kernels.sm90.widths import FORMS

VARIED = (
    "gqa-ragged", "one-token", "63-more-keys-causal", "fewer-keys-causal", "window-left-causal", "window-beyond-keys",
    "key-mask", "packed", "packed-causal-window", "fp16", "whole", "whole-by-token", "sink", "padded",
    "packed-ungrouped", "packed-ungrouped-causal",
)  # fmt: skip
CHANGES = {
    "": {"recipe": "mixed"},
    "deterministic-": {"recipe": "mixed", "deterministic": True},
    "plain-": {"recipe": "mixed(rotate=False)"},
    # whose backward is the portable one
    "16bit-": {"recipe": "mixed(dv=16bit, dq=16bit, dk=16bit)"},
}
# nothing but whole blocks: dK and dV leave by TMA
WHOLE = AttentionCase(tokens_q=384, tokens_k=640, batch=2, heads=4, kv_heads=2, is_causal=True)
CALLS = CALLS | {"whole": WHOLE, "whole-by-token": dataclasses.replace(WHOLE, by_token=True)}
# blocks of keys that are whole, that an end cuts, and that a mask hides, where heads are not grouped
ALONE = {"heads": 2, "kv_heads": 2}
LENGTHS = {"lengths_q": [5, 700, 256, 64], "lengths_k": [5, 640, 256, 129], **ALONE}
CALLS |= {
    "padded": AttentionCase(tokens_q=700, tokens_k=700, batch=3, **ALONE, masked=True, padding=True, is_causal=True),
    "packed-ungrouped": AttentionCase(**LENGTHS),
    "packed-ungrouped-causal": AttentionCase(**LENGTHS, is_causal=True),
}
CALLS = {change + name: dataclasses.replace(CALLS[name], **CHANGES[change]) for change in CHANGES for name in VARIED}
# several blocks of 128 keys a head, the last of them not whole
TURNS = {
    "whole": AttentionCase(tokens_q=640, tokens_k=640),
    "causal": AttentionCase(tokens_q=700, tokens_k=700, heads=3, kv_heads=3, is_causal=True),
    "gqa-causal": AttentionCase(tokens_q=1100, tokens_k=1100, heads=4, kv_heads=2, is_causal=True),
    "more-keys": AttentionCase(tokens_q=70, tokens_k=900, is_causal=True),
    "window": AttentionCase(tokens_q=900, tokens_k=900, window=(100, 0)),
    "key-mask": AttentionCase(tokens_q=300, tokens_k=600, batch=2, masked=True),
    "padded": AttentionCase(tokens_q=900, tokens_k=900, batch=2, heads=3, kv_heads=3, masked=True, padding=True),
    "packed-ungrouped": AttentionCase(**LENGTHS, is_causal=True),
    "packed": AttentionCase(lengths_q=[5, 300, 700, 64], lengths_k=[5, 640, 129, 700], is_causal=True),
}


@pytest.mark.parametrize(("head_dim", "value_dim"), FORMS)
@pytest.mark.parametrize("name", CALLS)
class TestIsTheRecipe:
    pytestmark = needs_hopper

    def test_is_the_recipe(self, name, head_dim, value_dim):
        dataclasses.replace(CALLS[name], head_dim=head_dim, value_dim=value_dim, device="cuda").check("hopper")


def drawn(shape, dims):
    """N(0, 1) of a shape, with each of these last dimensions."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(*shape, dim, device="cuda", dtype=torch.bfloat16, generator=generator) for dim in dims]


class TestOnHopper:
    pytestmark = needs_hopper

    @pytest.mark.parametrize(("head_dim", "value_dim"), FORMS)
    def test_rotated_queries_with_outlier_channels(self, head_dim, value_dim):
        """Of trained models: a rotation leaves O of less error."""
        q, k, v = drawn((1, 4, 1000), (head_dim, head_dim, value_dim))
        q[..., 5], q[..., 40] = 16, 12
        exact = sage_attention(*(x.double() for x in (q, k, v)), recipe="full", impl="reference")
        plain, turned = (
            relative_l2(sage_attention(q, k, v, recipe=recipe, impl="hopper"), exact)
            for recipe in ("mixed(rotate=False)", "mixed")
        )
        assert turned < 0.75 * plain

    @pytest.mark.parametrize(("head_dim", "value_dim"), FORMS)
    @pytest.mark.parametrize("size", [3e3, 2e4])
    def test_large_values_in_fp16(self, size, head_dim, value_dim):
        """Regression: the scaled dO had no digits left, and dQ and dK were .2 off."""
        q, k, v, do = (x.half() for x in drawn((1, 2, 200), (head_dim, head_dim, value_dim, value_dim)))
        inputs = q, k, (v.float() * size).clamp(-6e4, 6e4).half()
        found, expected = (
            outcome(sage_attention, inputs, 1e-3 * do, is_causal=True, recipe="mixed", impl=impl)
            for impl in ("hopper", "reference")
        )
        for x, wanted in zip(found, expected):
            assert relative_l2(x, wanted) < 0.03

    @pytest.mark.parametrize("tokens", [1, 63, 65, 1000])
    @pytest.mark.parametrize("scale", [-0.1, 0.0])
    def test_scales_that_are_not_positive(self, tokens, scale):
        inputs = [x.cuda() for x in AttentionCase(tokens_q=tokens, tokens_k=tokens).inputs()[:3]]
        outs = [
            sage_attention(*inputs, enable_gqa=True, scale=scale, impl=impl, is_causal=True, recipe="mixed")
            for impl in ("hopper", "reference")
        ]
        torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)

    def test_rows_far_from_all_keys_are_zero(self):
        call = AttentionCase(recipe="mixed", tokens_q=700, tokens_k=5, window=(7, -1), device="cuda")
        actual = call.check("hopper")
        assert (actual["o"][:, :, 12:] == 0).all()

    @pytest.mark.parametrize("recipe", ["mixed", "mixed(rotate=False)"])
    @pytest.mark.parametrize(("head_dim", "value_dim"), [*FORMS, (112, 112)])
    def test_a_nan_stays_in_its_sequence(self, head_dim, value_dim, recipe):
        """Kernels read whole blocks, past the end of one head or sequence into the next."""
        inputs = drawn((2, 2, 201), (head_dim, head_dim, value_dim, value_dim))
        for x in inputs:
            x[0, 1] = x[1] = float("nan")
        *inputs, do = (x.requires_grad_() for x in inputs)
        o = sage_attention(*inputs, recipe=recipe, impl="hopper")
        for x in (o, *torch.autograd.grad(o, inputs, do)):
            assert x[0, 0].isfinite().all()
            assert x[0, 1].isnan().all()

    @pytest.mark.parametrize(("head_dim", "value_dim"), FORMS)
    def test_repeats_bit_for_bit(self, head_dim, value_dim):
        """Large enough for a race: a stage that was released too early spoilt one row in a thousand."""
        inputs = drawn((1, 2048 // head_dim, 8192), (head_dim, head_dim, value_dim))
        first, *others = [sage_attention(*inputs, recipe="mixed", impl="hopper", return_lse=True) for _ in range(5)]
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other))

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize(("head_dim", "value_dim"), FORMS)
    def test_gradients_repeat_bit_for_bit(self, head_dim, value_dim, is_causal):
        """Blocks of keys add to dQ in order, though far more of them than the GPU has processors."""
        *inputs, do = drawn((2, 1024 // head_dim, 8192), (head_dim, head_dim, value_dim, value_dim))
        inputs = [x.requires_grad_() for x in inputs]
        with switches(deterministic=True):
            o = sage_attention(*inputs, recipe="mixed", impl="hopper", is_causal=is_causal)
        first, *others = [torch.autograd.grad(o, inputs, do, retain_graph=True) for _ in range(5)]
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other))

    @pytest.mark.parametrize("turns", [2, 4])
    @pytest.mark.parametrize("name", TURNS)
    def test_blocks_in_turn_are_the_same_blocks(self, name, turns, monkeypatch):
        """A program that takes several blocks of keys, where one alone is chosen for so few."""
        call = dataclasses.replace(TURNS[name], recipe="mixed", head_dim=64, device="cuda")
        alone = call.run("hopper", call.inputs())
        monkeypatch.setattr(launch, "backward_tiles_per_cta", lambda *_: turns)
        actual = call.check("hopper")
        assert torch.equal(actual["dk"], alone["dk"])
        assert torch.equal(actual["dv"], alone["dv"])
        assert relative_l2(actual["dq"], alone["dq"]) < 2e-3, "FP16 sums in another order"

    # one token's gradients are zeros but for rounding, and of that `check` knows seed 0's
    @pytest.mark.parametrize(("kind", "head_dim"), [("", 64), ("plain-", 64), ("16bit-", 64), ("", 192), ("", 256)])
    @pytest.mark.parametrize("name", [name for name in VARIED if name != "one-token"])
    def test_calls_made_again(self, name, kind, head_dim):
        """With other tensors, and beside calls of other shapes."""
        call = dataclasses.replace(CALLS[kind + name], head_dim=head_dim, device="cuda")
        for seed in (2, 3):
            changed = dataclasses.replace(call, seed=seed)
            changed.run("hopper", changed.inputs())
        assert len(PLANS) == 2
        dataclasses.replace(call, seed=4).check("hopper")

    @pytest.mark.parametrize(("name", "names"), UNALIGNED)
    @pytest.mark.parametrize("kind", ["deterministic-", "16bit-"])
    def test_tensors_that_begin_at_an_odd_element(self, name, kind, names):
        """Issue 22: TMA takes no address that is no multiple of 16 bytes."""
        dataclasses.replace(CALLS[kind + name], device="cuda").check_addresses("hopper", names)

    @pytest.mark.parametrize("heads", [1, 2])
    @pytest.mark.parametrize("name", ["packed", "gqa-ragged", "16bit-packed", "whole", "key-mask"])
    def test_contiguous_tensors_that_begin_at_an_odd_element(self, name, heads):
        """What `contiguous` would hand back as it is: of one head packed tokens too."""
        call = dataclasses.replace(CALLS[name], heads=heads, kv_heads=1, device="cuda", unaligned=TENSORS)
        call.check("hopper")

    @pytest.mark.parametrize("recipe", ["mixed", "token", "paper"])
    @pytest.mark.parametrize("offset", [1, 2, 4, 7])
    def test_slices_of_a_flat_buffer(self, offset, recipe):
        """As users give them; the buffer's gradient comes back where its slices lie."""
        shape = (2, 4, 300, 64)
        size = math.prod(shape)
        flat = torch.randn(3 * size + offset, device="cuda", dtype=torch.bfloat16)
        do = torch.randn(size + offset, device="cuda", dtype=torch.bfloat16)[offset:].view(shape)
        results = []
        for start in (0, offset):
            buffer = flat[offset:].clone() if start == 0 else flat.clone()
            buffer.requires_grad_()
            q, k, v = (x.view(shape) for x in buffer[start:].split(size))
            with switches(deterministic=True):
                o = sage_attention(q, k, v, recipe=recipe, is_causal=True)
                o.backward(do if start else do.clone())
            results.append((o, buffer.grad[start:]))
        assert all(torch.equal(a, b) for a, b in zip(*results))


def _call(batch: int, heads: int, tokens: int, is_causal: bool) -> Call:
    packing = Packing(batch, heads, tokens, tokens, None)
    recipe = Recipe.named("mixed")
    return Call(recipe, 0.1, torch.bfloat16, torch.device("cpu"), 128, 128, packing, packing, None, is_causal)


@pytest.mark.parametrize(
    ("call", "turns"),
    [
        (_call(8, 16, 2048, True), 4),  # 2048 blocks of few steps
        (_call(1, 16, 2048, False), 2),  # 256 blocks on 132 processors
        (_call(1, 1, 4096, False), 1),  # 32 blocks: each has a processor
        (_call(1, 9, 4096, False), 1),  # 288 blocks: 3 rounds, in pairs 2 of twice the length
        (_call(1, 1, 64, False), 1),
    ],
)
def test_blocks_in_turn_where_they_fill_the_gpu(call, turns):
    assert backward_tiles_per_cta(call, 128, 64, 132) == turns


def _packed(heads: int, lengths: list[int], bound: int | None = None) -> Call:
    offsets = torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta")
    packing = Packing(len(lengths), heads, bound or max(lengths), sum(lengths), offsets)
    return _call(1, heads, 1, True)._replace(queries=packing, keys=packing)


@pytest.mark.parametrize(
    ("call", "turns"),
    [
        (_packed(32, [433] * 512), 4),  # four blocks of a document, each seen by few blocks of queries
        (_packed(32, [433] * 512, 1932), 4),
        (_packed(32, [2048] * 16), 4),
        (_packed(8, [2048] + [60] * 30), 1),  # one document's 16 blocks are the last to end
        (_packed(4, [16084, 200, 100] + [0] * 509, 16384), 1),
        (_packed(4, [0, 0], 5), 1),
    ],
)
def test_blocks_of_packed_sequences_in_turn(call, turns):
    """Regression: the longest sequence, or what was told to be, stood for all, and empty programs for full ones."""
    assert backward_tiles_per_cta(call, 128, 128, 132) == turns
