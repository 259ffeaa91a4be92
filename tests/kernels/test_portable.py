"""The Triton kernels against the recipe emulator: interpreted on a CPU, compiled where there is a GPU."""

import dataclasses
import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from sagebwd import qk_norm_rope, sage_attention, sage_attention_varlen
from sagebwd.recipe import Recipe
from sagebwd.reference.quantize import quantize_tokens, smooth
from sagebwd.reference.rotation import rotated
from tests.attention_case import TENSORS, AttentionCase

pytest.importorskip("triton")
from sagebwd.cache import PLANS
from sagebwd.call import Call, Packing
from sagebwd.kernels.common.means import launch_statistics
from sagebwd.kernels.portable import launch, tune
from sagebwd.kernels.portable.config import choose
from sagebwd.kernels.runtime import device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []

PACKED = {"lengths_q": [1, 17, 0, 70], "lengths_k": [40, 17, 5, 65]}
CALLS = {
    "gqa-ragged": AttentionCase(batch=2, heads=4, kv_heads=2),
    "one-token": AttentionCase(tokens_q=1, tokens_k=1),
    "17-causal": AttentionCase(tokens_q=17, tokens_k=17, is_causal=True),
    "63-more-keys-causal": AttentionCase(tokens_q=63, tokens_k=129, is_causal=True),
    "fewer-keys-causal": AttentionCase(tokens_q=130, tokens_k=65, is_causal=True),
    "window": AttentionCase(tokens_q=150, tokens_k=150, window=(30, 5)),
    "window-left-causal": AttentionCase(tokens_q=150, tokens_k=150, window=(7, -1), is_causal=True),
    "window-beyond-keys": AttentionCase(tokens_q=200, tokens_k=40, window=(10, 0)),
    "key-mask": AttentionCase(batch=2, masked=True, with_dlse=True),
    "key-mask-causal": AttentionCase(batch=2, masked=True, is_causal=True, recipe="paper"),
    "packed": AttentionCase(**PACKED),
    "packed-causal-window": AttentionCase(**PACKED, is_causal=True, window=(33, -1), with_dlse=True),
    "packed-without-keys": AttentionCase(lengths_q=[5, 20], lengths_k=[0, 20]),
    "packed-paper": AttentionCase(**PACKED, is_causal=True, recipe="paper"),
    "paper": AttentionCase(recipe="paper", tokens_q=200, kv_heads=2),
    "paper-causal": AttentionCase(recipe="paper", tokens_q=130, is_causal=True),
    "paper-window": AttentionCase(recipe="paper", batch=2, heads=1, tokens_q=300, tokens_k=300, window=(70, 5)),
    "paper-window-fewer-keys": AttentionCase(recipe="paper", tokens_q=300, tokens_k=70, window=(90, 30)),
    "paper-packed-window": AttentionCase(
        recipe="paper", lengths_q=[150, 0, 300], lengths_k=[210, 9, 170], window=(40, 0)
    ),
    "paper-128-keys": AttentionCase(recipe="paper(block_k=128)", heads=4, tokens_q=200, is_causal=True),
    "paper-32-keys": AttentionCase(recipe="paper(block_k=32)", tokens_q=200),
    "sink": AttentionCase(sink=12, tokens_q=200, tokens_k=200, heads=4, kv_heads=2, is_causal=True),
    "sink-mask": AttentionCase(sink=12, masked=True),
    "sink-packed": AttentionCase(sink=12, **PACKED, is_causal=True),
    "sink-window": AttentionCase(sink=12, place=40, tokens_q=150, tokens_k=150, window=(60, 5)),
    "sink-head-dim-256": AttentionCase(sink=12, head_dim=256, is_causal=True),
    "no-first-keys": AttentionCase(recipe="token(first_keys=0)", tokens_q=130, is_causal=True),
    "full": AttentionCase(recipe="full", window=(30, 5)),
    "full-mask": AttentionCase(recipe="full", masked=True),
    "fp16": AttentionCase(dtype=torch.float16, is_causal=True),
    "head-dim-32": AttentionCase(head_dim=32),
    "head-dim-96": AttentionCase(head_dim=96, is_causal=True),
    "head-dim-72-packed": AttentionCase(head_dim=72, **PACKED),
    "head-dim-128": AttentionCase(head_dim=128),
    "head-dim-256": AttentionCase(head_dim=256, tokens_k=70),
    "paper-head-dim-256": AttentionCase(recipe="paper", head_dim=256, tokens_q=140, heads=1),
    "full-128-keys-head-dim-256": AttentionCase(recipe="full(block_k=128)", head_dim=256, heads=1),
    "token-128-keys-head-dim-256": AttentionCase(recipe="token(block_k=128)", head_dim=256, heads=1),
    **{f"{p}-16bit": AttentionCase(recipe=f"token({p}=16bit)", masked=True) for p in ("s", "o", "dv", "dq", "dk")},
    "smooth-full-packed": AttentionCase(recipe="full(smooth_k=True, smooth_v=True)", **PACKED),
    "no-smoothing": AttentionCase(recipe="token(smooth_k=False, smooth_v=False)", masked=True),
    "sampled-mean": AttentionCase(recipe="token(k_mean=sample)", tokens_q=130, tokens_k=700),
    "sampled-packed": AttentionCase(recipe="token(k_mean=sample)", lengths_q=[3, 70, 65], lengths_k=[3, 600, 511]),
    "block-scale-of-v": AttentionCase(recipe="token(v_scale=block)", masked=True),
    "sequence-scale-of-v": AttentionCase(recipe="token(v_scale=sequence)", masked=True),
    "block-scales": AttentionCase(recipe="token(q_scale=block, k_scale=block)"),
    "tile-scales": AttentionCase(recipe="token(p_scale_dv=tile, ds_scale_dq=tile, ds_scale_dk=tile)"),
    "blocks-32-128": AttentionCase(recipe="token(block_q=32, block_k=128)"),
    "blocks-128-32": AttentionCase(recipe="token(block_q=128, block_k=32)", is_causal=True),
    "fp16-head-dim-96": AttentionCase(head_dim=96, dtype=torch.float16),
    "head-dim-20-causal": AttentionCase(head_dim=20, is_causal=True),
    "head-dim-128-causal": AttentionCase(head_dim=128, is_causal=True),
    "plain": AttentionCase(recipe="token(rotate=False)", tokens_q=130, kv_heads=2, is_causal=True),
    "plain-mask": AttentionCase(recipe="token(rotate=False)", batch=2, masked=True),
    "plain-packed-head-dim-72": AttentionCase(recipe="token(rotate=False)", head_dim=72, **PACKED, is_causal=True),
    "plain-head-dim-128": AttentionCase(recipe="token(rotate=False)", head_dim=128, is_causal=True),
    "plain-no-smoothing": AttentionCase(recipe="token(rotate=False, smooth_k=False, smooth_v=False)", masked=True),
    **{f"plain-{p}-16bit": AttentionCase(recipe=f"token(rotate=False, {p}=16bit)") for p in ("s", "o", "dq", "dk")},
    "rotate-paper": AttentionCase(recipe="paper(rotate=True)", tokens_q=130, is_causal=True),
    "rotate-paper-mask": AttentionCase(recipe="paper(rotate=True)", tokens_q=130, masked=True),
    "rotate-full": AttentionCase(recipe="full(rotate=True)"),
    "first-16-window": AttentionCase(sink=12, place=9, tokens_q=150, tokens_k=150, window=(60, 5)),
    "first-16-of-7-keys": AttentionCase(tokens_k=7),
    "first-16-packed": AttentionCase(sink=12, place=3, **PACKED, is_causal=True),
    "first-16-packed-window": AttentionCase(**PACKED, window=(33, 5), with_dlse=True),
    "first-16-mask": AttentionCase(sink=12, place=5, batch=2, masked=True, kv_heads=2),
    "first-16-mask-of-few-keys": AttentionCase(batch=2, masked=True, tokens_k=20),
    "first-16-mask-far-apart": AttentionCase(
        recipe="token(block_k=32)", batch=2, masked=True, every=9, tokens_k=300, is_causal=True
    ),
    "first-16-paper-mask-far-apart": AttentionCase(
        recipe="paper(first_keys=16)", masked=True, every=9, sink=12, place=12, tokens_q=130, tokens_k=300
    ),
    "first-16-fp16": AttentionCase(dtype=torch.float16, sink=12, place=15, tokens_q=130, is_causal=True),
    "first-16-16bit-s-mask": AttentionCase(recipe="token(s=16bit)", batch=2, masked=True, is_causal=True),
    "first-16-sequence-scale-packed": AttentionCase(recipe="token(v_scale=sequence)", **PACKED, is_causal=True),
    "first-16-no-smoothing": AttentionCase(recipe="token(smooth_k=False, smooth_v=False, p_levels=127)", masked=True),
}
WIDE = {
    "head-dim-512-causal": AttentionCase(head_dim=512, tokens_q=20, tokens_k=40, kv_heads=1, is_causal=True),
    "head-dim-300-packed-causal": AttentionCase(
        head_dim=300, lengths_q=[1, 0, 20], lengths_k=[9, 5, 33], heads=1, is_causal=True, with_dlse=True
    ),
    "paper-head-dim-288-mask": AttentionCase(
        recipe="paper", head_dim=288, tokens_q=20, tokens_k=70, heads=1, masked=True
    ),
    "full-head-dim-320-window": AttentionCase(
        recipe="full", head_dim=320, tokens_q=40, tokens_k=40, heads=1, window=(10, 5)
    ),
    "head-dim-512-bias": AttentionCase(head_dim=512, tokens_q=20, tokens_k=40, heads=1, mask="bias-matrix"),
    "value-dim-512": AttentionCase(head_dim=64, value_dim=512, tokens_q=20, tokens_k=40, heads=1),
    "value-dim-64-of-512": AttentionCase(head_dim=512, value_dim=64, tokens_q=20, tokens_k=40, heads=1),
    "16bit-head-dim-320": AttentionCase(
        recipe="token(s=16bit, o=16bit, dv=16bit)", head_dim=320, tokens_q=20, tokens_k=40, heads=1
    ),
    "sequence-scale-head-dim-512": AttentionCase(
        recipe="token(v_scale=sequence, dq=16bit)", head_dim=512, tokens_q=20, tokens_k=40, heads=1, masked=True
    ),
    "sink-head-dim-512-long": AttentionCase(
        sink=12, head_dim=512, tokens_q=600, tokens_k=600, heads=4, kv_heads=2, is_causal=True
    ),
    "fp16-head-dim-384-long": AttentionCase(
        head_dim=384, dtype=torch.float16, tokens_q=300, tokens_k=500, masked=True
    ),
}
# In slices of channels; a CPU has a few that stand for all.
CALLS |= WIDE if DEVICE == "cuda" else {name: WIDE[name] for name in list(WIDE)[:4]}
# Of what a recipe, a width or a dtype changes, one head shows to the interpreter as much as two: those that share keys
# are above. A GPU runs them with all heads.
ONE_HEAD = {
    "key-mask-causal", "window", "window-beyond-keys", "full", "full-mask", "fp16",
    "sink-head-dim-256", "no-first-keys", "head-dim-32", "head-dim-96", "head-dim-128", "head-dim-256",
    "s-16bit", "o-16bit", "dv-16bit", "dq-16bit", "dk-16bit", "no-smoothing", "sampled-mean", "block-scale-of-v",
    "sequence-scale-of-v", "block-scales", "tile-scales", "blocks-32-128", "blocks-128-32", "fp16-head-dim-96",
    "head-dim-20-causal", "head-dim-128-causal", "plain-head-dim-128", "plain-no-smoothing", "plain-s-16bit",
    "plain-o-16bit", "plain-dq-16bit", "plain-dk-16bit", "rotate-paper", "rotate-paper-mask", "rotate-full",
    "first-16-fp16", "first-16-16bit-s-mask", "first-16-no-smoothing",
}  # fmt: skip
if DEVICE == "cpu":
    CALLS |= {name: dataclasses.replace(CALLS[name], heads=1) for name in ONE_HEAD}

# each tensor that a call with a mask and a packed one have, alone, and all of them
UNALIGNED = [
    (name, names)
    for name, lacks in (("key-mask", ("cu_seqlens_q", "cu_seqlens_k")), ("packed-causal-window", ("key_mask",)))
    for names in (*((x,) for x in TENSORS if x not in lacks), TENSORS)
]
# Without a GPU the other calls are made again by `make test-all`: in `make test` test_hosts.py compares the launches
# of every call's plan with the family's, and those of tensors that begin at an odd element with aligned ones'.
QUICK = {
    "gqa-ragged", "key-mask-causal", "packed-causal-window", "packed-paper", "sink-mask", "first-16-window",
    "full-mask", "head-dim-72-packed", "sampled-packed", "plain-mask",
}  # fmt: skip
QUICK_UNALIGNED = [(name, TENSORS) for name in ("key-mask", "packed-causal-window")]


def unless_quick(quick, *values):
    """A row, slow without a GPU where it is not among the quick ones."""
    is_quick = DEVICE == "cuda" or (values if len(values) > 1 else values[0]) in quick
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("name", CALLS)
def test_is_the_recipe(name):
    dataclasses.replace(CALLS[name], device=DEVICE).check("triton")


@pytest.mark.parametrize("call", [
    AttentionCase(recipe="full", head_dim=256, is_causal=True, with_dlse=True),
    AttentionCase(recipe="full", head_dim=192, window=(40, 9), mask="bias-matrix", masked=True),
    AttentionCase(recipe="full", head_dim=200, mask="document"),
    AttentionCase(recipe="full", head_dim=256, lengths_q=[33, 1, 60], lengths_k=[70, 5, 90]),
], ids=["causal", "bias-and-window", "tiles", "packed"])  # fmt: skip
def test_is_the_recipe_in_the_steps_of_small_cards(call, monkeypatch):
    """Cards of 99 KB of shared memory take fewer keys at a time than the recipe's block."""
    monkeypatch.setattr(device, "capability", lambda device: 89)
    dataclasses.replace(call, device=DEVICE).check("triton")


# one token's gradients are zeros but for rounding, and of that `check` knows seed 0's
@pytest.mark.parametrize("name", [unless_quick(QUICK, name) for name in CALLS if name != "one-token"])
def test_calls_made_again(name):
    call = dataclasses.replace(CALLS[name], device=DEVICE)
    changed = dataclasses.replace(call, seed=2)
    changed.run("triton", changed.inputs())
    made = len(PLANS)
    dataclasses.replace(call, seed=4).check("triton")
    assert len(PLANS) == made >= 2


@pytest.mark.parametrize(("recipe", "head_dim", "dtype"), [
    ("token(rotate=False)", 128, torch.bfloat16),
    ("paper", 128, torch.bfloat16),
    ("token", 128, torch.bfloat16),
    ("token", 128, torch.float16),
    ("token", 72, torch.bfloat16),
    ("paper(rotate=True)", 64, torch.bfloat16),
])  # fmt: skip
def test_codes_and_scales(recipe, head_dim, dtype):
    call = AttentionCase(
        recipe=recipe, batch=2, heads=2, kv_heads=1, head_dim=head_dim, dtype=dtype, is_causal=True, device=DEVICE
    )
    inputs, parsed = call.inputs(), call.settings()[-1]
    actual = call.run("triton", inputs)
    q, k = inputs[0].float(), smooth(inputs[1].float())[0]
    if parsed.rotate:
        q, k = rotated(q), rotated(k)
    for name, x, group, block in (("q", q, parsed.q_scale, parsed.block_q), ("k", k, parsed.k_scale, parsed.block_k)):
        codes, scale = quantize_tokens(x, group, block)
        off = (actual[f"{name}_int8"] - codes).abs()
        assert off.max() <= 1, "a code is more than a tie away"
        assert (off > 0).float().mean() < 1e-3, "more codes differ than ties explain"
        torch.testing.assert_close(actual[f"{name}_scale"], scale[..., 0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_keys_that_are_all_alike_are_zeros(tokens):
    """The products of rotated keys and of their mean are rounded apart."""
    call = AttentionCase(tokens_k=tokens, device=DEVICE)
    q, k, *rest = call.inputs()
    actual = call.run("triton", (q, (k[:, :, :1] + 100).expand_as(k).contiguous(), *rest))
    assert not actual["k_int8"].any()
    assert (actual["k_scale"] == 1).all()


def test_first_keys_that_a_mask_leaves():
    """Several blocks of the mask, one batch element with fewer keys and one with none; then the number of keys."""
    tokens = 2500
    x = torch.randn(4, 1, tokens, 32, dtype=torch.bfloat16, device=DEVICE)
    mask = torch.zeros(4, tokens, dtype=torch.bool, device=DEVICE)
    mask[0] = True
    mask[1, 5::200] = True
    mask[2, 1020:1050:2] = True
    *_, found = launch_statistics(Recipe.named("token"), x, x, Packing.of(x, None, 0), mask)
    expected = [(keep.nonzero().flatten().tolist() + 16 * [tokens])[:16] for keep in mask]
    assert found.tolist() == expected


@pytest.mark.parametrize("layout", ["transposed", "slice", "step"])
def test_strides(layout):
    call = AttentionCase(device=DEVICE, tokens_k=65)
    inputs = call.inputs()
    expected = call.run("triton", inputs)

    def strided(x):
        if layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "slice":
            return torch.cat([x, x], -1)[..., : x.shape[-1]]
        return torch.stack([x, x], -1)[..., 0]  # head_dim itself is strided

    actual = call.run("triton", (*(strided(x) for x in inputs[:4]), None))
    for name, tensor in expected.items():
        assert tensor is None or torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("name", ["key-mask", "packed-causal-window"])
def test_tensors_that_begin_at_an_odd_element(name):
    dataclasses.replace(CALLS[name], device=DEVICE, unaligned=TENSORS).check("triton")


@pytest.mark.parametrize(("name", "names"), [unless_quick(QUICK_UNALIGNED, *row) for row in UNALIGNED])
def test_calls_made_again_from_an_odd_element(name, names):
    call = dataclasses.replace(CALLS[name], device=DEVICE)
    (dataclasses.replace(call, heads=1) if DEVICE == "cpu" else call).check_addresses("triton", names)


@pytest.mark.parametrize("recipe", ["token", "paper", "token(dp=int8)"])
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_are_never_silent(where, bad, recipe):
    call = AttentionCase(device=DEVICE, heads=1, tokens_q=130, recipe=recipe)
    inputs = call.inputs()
    inputs["qkv".find(where) if where != "do" else 3][0, 0, 3, 5] = bad
    actual = call.run("triton", inputs)
    row = (0, 0, 3)
    spoilt = {
        "q": [actual["o"][row], actual["dq"][row], actual["dk"][0, 0, 3], actual["dv"][0, 0, 3]],
        "k": [actual["o"], actual["dq"], actual["dk"], actual["dv"]],
        "v": [actual["o"][..., 5:6], actual["dq"], actual["dk"]],  # scales are per channel
        "do": [actual["dq"][row], actual["dk"], actual["dv"]],
    }[where]
    for tensor in spoilt:
        assert not torch.isfinite(tensor).any(dim=-1).all(), "a bad input came out finite"


def test_nan_in_a_query_is_in_its_keys_gradient_where_a_tile_has_one_scale():
    # of P each key has its own, and the keys behind the query do not see it
    call = AttentionCase(
        device=DEVICE, heads=1, tokens_q=64, tokens_k=64, recipe="token(ds_scale_dk=tile)", is_causal=True
    )
    inputs = call.inputs()
    inputs[0][0, 0, 3, 5] = math.nan
    assert call.run("triton", inputs)["dk"][0, 0, :4].isnan().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_query_is_no_row_that_sees_nothing(sign):
    # all scores of one sign, whatever codes it has: of -inf alone a row would be one without keys
    call = AttentionCase(device=DEVICE, recipe="token(smooth_k=False)")
    q, k, *rest = call.inputs()
    q[0, 0, 3, 5] = math.inf
    actual = call.run("triton", [q, sign * k.abs(), *rest])
    assert not torch.isfinite(actual["o"][0, 0, 3]).any()


@pytest.mark.parametrize(
    "call",
    [
        AttentionCase(heads=4, kv_heads=2, tokens_q=170, tokens_k=140, is_causal=True, head_dim=128),
        AttentionCase(batch=2, heads=1, tokens_q=200, tokens_k=230, window=(70, 20), masked=True, with_dlse=True),
        AttentionCase(lengths_q=[1, 150, 0, 140], lengths_k=[70, 17, 5, 150], is_causal=True),
    ],
    ids=["causal-gqa", "window-mask", "packed"],
)
@pytest.mark.parametrize(
    ("bad", "recipe"),
    [(None, "paper"), (math.nan, "paper"), (None, "paper(dp=int8)")],
    ids=["finite", "nan", "int8-dp"],
)
def test_maxima_found_by_dq_are_those_dkdv_would_find(call, bad, recipe, monkeypatch):
    """Memory that sagebwd allocates is poisoned, so a tile that dQ skips and dK reads would show."""
    call = dataclasses.replace(call, recipe=recipe, device=DEVICE)
    q, k, v, do, dlse = call.inputs()
    # sums of such products are exact, so that a CPU's order of adding them does not show
    v, do = ((8 * x).round() / 8 for x in (v, do))
    inputs = q, k, v, do, dlse
    if bad is not None:
        do.view(-1)[5] = bad
    # parts of a tile add up in FP32 in another order
    monkeypatch.setattr(
        tune, "choose", lambda *args, **options: dataclasses.replace(choose(*args, **options), step=None)
    )
    shared = call.run("triton", inputs)
    monkeypatch.setattr(launch, "_tile_maxima", lambda *args: None)
    own = call.run("triton", inputs)
    assert (bad is None) == all(own[name].isfinite().all() for name in ("dq", "dk", "dv"))
    for name in ("dq", "dk", "dv"):
        if DEVICE == "cpu":
            torch.testing.assert_close(shared[name], own[name], rtol=0, atol=0, equal_nan=True)
            continue
        # tensor cores add a b^T and b a^T up in another order: a maximum's last bit, and here and there a code
        assert torch.equal(shared[name].isnan(), own[name].isnan())
        difference = (shared[name].double() - own[name].double()).nan_to_num()
        assert difference.norm() <= 2e-3 * own[name].double().nan_to_num().norm(), name


@pytest.mark.parametrize(("recipe", "tokens", "shared"), [
    ("paper", 32768, True),
    ("paper", 1 << 20, False),
    ("paper(k_scale=token)", 1024, False),
    ("token", 1024, False),
])  # fmt: skip
def test_maxima_are_shared_while_they_are_smaller_than_dq(recipe, tokens, shared):
    packing = Packing(1, 16, tokens, tokens, None)
    call = Call(Recipe.parse(recipe), 1.0, torch.bfloat16, torch.device("meta"), 128, 128, packing, packing)
    gradient = torch.empty(1, 16, tokens, 128, dtype=torch.bfloat16, device="meta")
    maxima = launch._tile_maxima(call, gradient)
    assert (maxima is not None) == shared
    assert maxima is None or maxima.nbytes <= gradient.nbytes


@pytest.mark.parametrize("recipe", ["token(o=16bit)", "full", "token(dp=int8)", "full(dp=int8)"])
def test_garbage_behind_the_mask_is_not_seen(recipe):
    call = AttentionCase(masked=True, device=DEVICE, recipe=recipe)
    inputs = call.inputs()
    expected = call.run("triton", inputs)
    hidden = ~call.settings()[0][:, None, :, None]
    spoilt = (inputs[0], *(x.masked_fill(hidden, math.nan) for x in inputs[1:3]), *inputs[3:])
    actual = call.run("triton", spoilt)
    for name in ("o", "lse", "dq", "dk", "dv"):
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("recipe", ["token", "token(dp=int8)"])
def test_repeats_bit_for_bit(recipe):
    call = AttentionCase(recipe, heads=4, kv_heads=1, tokens_q=150, tokens_k=150, is_causal=True, device=DEVICE)
    inputs = call.inputs()
    first, second = (call.run("triton", inputs) for _ in range(2))
    for name, tensor in first.items():
        assert tensor is None or torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("recipe", ["token", "paper", "token(dp=int8)"])
def test_gradients_of_outputs_of_queries_that_see_nothing_set_no_scale(recipe):
    """Those from 50 on, of the block that the others are in."""
    case = AttentionCase(recipe=recipe, tokens_q=64, tokens_k=40, heads=1, window=(10, 0), device=DEVICE)
    q, k, v, do, _ = case.inputs()
    louder = do.clone()
    louder[:, :, 50:] *= 1000
    found, expected = (case.run("triton", (q, k, v, x, None)) for x in (louder, do))
    for name in ("dq", "dk", "dv"):
        assert torch.equal(found[name], expected[name]), name


def apart(x):
    """The same numbers, each with another beside it."""
    return torch.stack([x, x], -1)[..., 0]


def at_an_odd_address(x):
    room = x.new_empty(x.numel() + 1)
    return room[1:].copy_(x.flatten()).view(x.shape)


def block_mask_and_sinks(q, k, v):
    mask = create_block_mask(lambda b, h, i, j: i // 15 == j // 15, None, None, 40, 40, device=DEVICE)
    return sage_attention(q, k, v, block_mask=mask, sinks=torch.zeros(2, device=DEVICE), recipe="token", impl="triton")


def packed_and_rotated(q, k, v):
    offsets = torch.tensor([0, 15, 40], dtype=torch.int32, device=DEVICE)
    cos, weight = torch.ones(40, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    q, k = qk_norm_rope(q, k, q_weight=weight, k_weight=weight, eps=1e-6, cos=cos, sin=cos, impl="triton")
    return sage_attention_varlen(q, k, v, offsets, offsets, 25, 25, recipe="token", impl="triton")


@pytest.mark.parametrize("unpack", [apart, at_an_odd_address])
@pytest.mark.parametrize("attend", [block_mask_and_sinks, packed_and_rotated])
def test_what_a_hook_gives_back_elsewhere(attend, unpack):
    """Regression: kernels took rows for neighbours: of lse, O, 1 / rms, offsets and a BlockMask's tiles."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for given_back in (lambda x: x, unpack):
        q, k, v, do = (torch.randn(1, 2, 40, 16, generator=generator.manual_seed(n)) for n in range(4))
        leaves = [x.to(DEVICE, torch.bfloat16).requires_grad_() for x in (q, k, v)]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), given_back):
            o = attend(*leaves)
        found.append(torch.autograd.grad(o, leaves, do.to(o).reshape(o.shape)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
