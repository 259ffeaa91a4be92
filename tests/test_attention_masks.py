"""`sage_attention` under masks of any shape, against torch's own attention in full precision."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from sagebwd import read_block_mask, sage_attention, sage_attention_varlen
from sagebwd.masks.mask import shown
from tests.attention_case import outcome, softmax_attention
from tests.inputs import draw
from tests.masks import KINDS, MODS
from tests.masks import dense as dense_of
from tests.masks import draw as draw_mask

SHAPE = 2, 4, 70, 90


def inputs(shape=SHAPE, kv_heads=2, dtype=torch.float64):
    q, k, v, do = draw("normal", shape[0], shape[1], kv_heads, shape[2], shape[3], 16, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v)], do


def arguments_of(mask):
    return {"attn_mask": mask} if isinstance(mask, torch.Tensor) else {"block_mask": mask}


@pytest.mark.parametrize("band", [{}, {"is_causal": True}, {"window": (20, 9)}], ids=["", "causal", "window"])
@pytest.mark.parametrize("kind", KINDS)
def test_full_precision_is_torchs(kind, band):
    leaves, do = inputs()
    mask = draw_mask(kind, SHAPE, torch.float64, 3)
    tensor = mask if isinstance(mask, torch.Tensor) else dense_of(kind, SHAPE)
    dlse = softmax_attention(*leaves, tensor, **band)[1].isfinite().to(do.dtype)
    expected = outcome(softmax_attention, leaves, do, dlse, mask=tensor, **band)
    options = {"enable_gqa": True, "recipe": "full", "return_lse": True}
    found = outcome(sage_attention, leaves, do, dlse, **arguments_of(mask), **band, **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("before", "mask_before"), [
    ((), ()), ((3,), ()), ((3,), (3,)), ((3,), (1,)), ((2, 3), (3,)), ((2, 3), ()), ((2, 2, 3), (2, 1)),
    ((2, 2, 3), (3,)), ((2, 2, 3), (2, 2, 3)),
])  # fmt: skip
def test_any_number_of_dimensions(before, mask_before):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*before, n, 16, generator=generator, dtype=torch.float64) for n in (20, 30, 30))
    mask = torch.rand(*mask_before, 20, 30, generator=generator) < 0.5
    found = sage_attention(q, k, v, mask, recipe="full")
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, mask))


@pytest.mark.parametrize("recipe", ["token", "paper", "mixed"])
@pytest.mark.parametrize("kind", MODS)
def test_a_block_mask_is_its_dense_mask(kind, recipe):
    leaves, do = inputs(dtype=torch.float32)
    block_mask, dense = draw_mask(kind, SHAPE, torch.float32, 0), dense_of(kind, SHAPE)
    found, expected = (
        outcome(sage_attention, leaves, do, **mask, enable_gqa=True, recipe=recipe)
        for mask in ({"block_mask": block_mask}, {"attn_mask": dense})
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("recipe", ["token", "paper", "full"])
@pytest.mark.parametrize("kind", ["bool-batch", "bias-all", "chunked"])
def test_hidden_queries_and_keys(kind, recipe, impl):
    """A query that sees nothing gives zeros; a key that none sees may hold NaN, which no result sees."""
    if impl == "triton" and (torch.cuda.is_available() or kind == "bool-batch"):
        pytest.skip("tests/kernels/test_masks.py has it")
    shape = 1, 2, 60, 60
    (q, k, v), do = inputs(shape, 2, torch.bfloat16)
    mask = draw_mask(kind, shape, torch.bfloat16, 1)
    tensor = mask if isinstance(mask, torch.Tensor) else dense_of(kind, shape)
    visible = shown(tensor).expand(shape).clone()
    if kind == "chunked":
        visible[..., 10, :] = visible[..., 7] = False
        visible &= torch.ones(60, 60, dtype=torch.bool)
        mask = create_block_mask(lambda b, h, i, j: visible[0, 0][i, j], None, None, 60, 60, device="cpu")
    spoilt = [x.detach().masked_fill(~visible.any(2).any(1)[:, None, :, None], torch.nan) for x in (k, v)]
    options = arguments_of(mask) | {"recipe": recipe, "impl": impl, "return_lse": True}
    found, of_spoilt = (outcome(sage_attention, (q, *keys), do, **options) for keys in ((k, v), spoilt))
    assert all(map(torch.equal, found, of_spoilt))
    o, lse, dq, dk, dv = found
    blind, unseen = ~visible.any(3), ~visible.any(2)
    assert blind.any()
    assert unseen.any()
    assert (o[blind] == 0).all()
    assert (lse[blind] == -torch.inf).all()
    assert (dq[blind] == 0).all()
    assert (dk[unseen] == 0).all()
    assert (dv[unseen] == 0).all()


@pytest.mark.parametrize("recipe", ["token", "paper", "mixed", "mixed(dp=int8)"])
def test_gradients_of_outputs_of_queries_that_see_nothing_set_no_scale(recipe):
    """Regression: they stood in the scale of their block's dO, and dV of the other queries lost its digits."""
    (q, k, v), do = inputs((1, 2, 60, 60), 2, torch.bfloat16)
    mask = torch.ones(60, 60, dtype=torch.bool).tril()
    mask[[3, 50]] = False
    louder = do.clone()
    louder[:, :, [3, 50]] *= 1000
    options = {"attn_mask": mask, "recipe": recipe, "impl": "reference"}
    found, expected = (outcome(sage_attention, (q, k, v), x, **options) for x in (louder, do))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("position", [{"is_causal": True}, {"window": (9, 0)}], ids=["causal", "window"])
@pytest.mark.parametrize("recipe", ["token", "mixed", "full"])
def test_keys_that_no_query_sees_by_its_position_count_nowhere(recipe, position, masked):
    """As of a cache that is longer than the prompt, whatever lies there: NaN, and numbers that would set scales."""
    (q, k, v), do = inputs(dtype=torch.float32)
    options = {"enable_gqa": True, "recipe": recipe, "return_lse": True, **position}
    mask = torch.rand(1, 1, 70, 90) > 0.3 if masked else None
    cut = [x.detach()[:, :, :70].requires_grad_() for x in (q, k, v)]
    expected = outcome(sage_attention, cut, do, attn_mask=None if mask is None else mask[..., :70], **options)
    for beyond in (float("nan"), 3e4):
        whole = [q, *(F.pad(x.detach(), (0, 0, 0, 20), value=beyond).requires_grad_() for x in cut[1:])]
        o, lse, dq, dk, dv = outcome(sage_attention, whole, do, attn_mask=mask, **options)
        torch.testing.assert_close((o, lse, dq, dk[:, :, :70], dv[:, :, :70]), tuple(expected), rtol=0, atol=0)
        assert not torch.cat((dk, dv), -1)[:, :, 70:].count_nonzero()


def test_large_biases_are_numbers():
    """-1e9 hides beside other keys; where all keys have it, the output is that of none, and gradients are finite."""
    (q, k, v), do = inputs((1, 1, 20, 20), 1, torch.float32)
    mask = torch.full((20, 20), -1e9).triu(1)
    mask[3] = -1e9
    o = sage_attention(q, k, v, mask, recipe="full")
    expected = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), mask.double())
    torch.testing.assert_close(o[:, :, 4:].double(), expected[:, :, 4:], rtol=1e-4, atol=1e-4)
    assert all(x.isfinite().all() for x in torch.autograd.grad(o, (q, k, v), do))


def test_nan_in_a_bias_shows():
    (q, k, v), _ = inputs((1, 1, 20, 20), 1, torch.float32)
    mask = torch.zeros(20, 20)
    mask[4, 5] = torch.nan
    o = sage_attention(q, k, v, mask, recipe="token")
    assert o[0, 0, 4].isnan().all()
    assert o[0, 0, 5].isfinite().all()


BLOCK_MASK = create_block_mask(lambda b, h, i, j: j <= i, None, None, 70, 90, device="cpu")
REFUSED = {
    "block-mask-as-attn-mask": (TypeError, "block_mask=", {"attn_mask": BLOCK_MASK}),
    "one-dimension": (ValueError, "does not broadcast", {"attn_mask": torch.ones(90, dtype=torch.bool)}),
    "heads": (ValueError, "does not broadcast", {"attn_mask": torch.ones(2, 2, 70, 90, dtype=torch.bool)}),
    "device": (ValueError, "device meta", {"attn_mask": torch.ones(70, 90, dtype=torch.bool, device="meta")}),
    "gradient": (NotImplementedError, "detach", {
        "attn_mask": torch.zeros(70, 90, requires_grad=True), "recipe": "token",
    }),
    "block-mask-type": (TypeError, "block_mask: .* got Tensor", {"block_mask": torch.ones(70, 90)}),
    "block-mask-tokens": (ValueError, r"made for \(40, 40\)", {
        "block_mask": create_block_mask(lambda b, h, i, j: j <= i, None, None, 40, 40, device="cpu")
    }),
    "block-mask-heads": (ValueError, "3 heads", {
        "block_mask": create_block_mask(lambda b, h, i, j: j <= i + h, None, 3, 70, 90, device="cpu")
    }),
    "mask-object-heads": (ValueError, "3 heads", {
        "block_mask": read_block_mask(create_block_mask(lambda b, h, i, j: j <= i + h, None, 3, 70, 90, device="cpu"))
    }),
    "both": (NotImplementedError, "beside a block_mask", {
        "attn_mask": torch.ones(70, 90, dtype=torch.bool), "block_mask": BLOCK_MASK
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    kind, message, arguments = REFUSED[name]
    leaves, _ = inputs(dtype=torch.float32)
    with pytest.raises(kind, match=message):
        sage_attention(*leaves, **arguments, enable_gqa=True)


@pytest.mark.parametrize("recipe", ["auto", "full", "token"])
@pytest.mark.parametrize("far", [2**31 - 1, 2**31, 2**40, 2**70])
def test_a_side_of_a_window_beyond_every_token_is_open(far, recipe):
    """Dense, under a mask, packed, and as an operator, whose integers have 64 bits."""
    q, k, v = (torch.randn(1, 2, 70, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    shown = torch.rand(70, 70, generator=torch.Generator().manual_seed(4)) > 0.3
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    for window, same in (((far, 5), (-1, 5)), ((5, far), (5, -1)), ((far, far), None)):
        for mask in (None, shown):
            found, expected = (sage_attention(q, k, v, mask, window=x, recipe=recipe) for x in (window, same))
            assert torch.equal(found, expected)
        found, expected = (
            sage_attention_varlen(*packed, offsets, offsets, 40, 40, window=x, recipe=recipe) for x in (window, same)
        )
        assert torch.equal(found, expected)
        torch._dynamo.reset()  # what other tests compiled of it counts toward torch's limit
        compiled = torch.compile(sage_attention, backend="eager", fullgraph=True)
        assert torch.equal(
            compiled(q, k, v, window=window, recipe=recipe), sage_attention(q, k, v, window=same, recipe=recipe)
        )
