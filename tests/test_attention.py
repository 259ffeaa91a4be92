"""The public functions: what they accept, what they refuse and how they say so, and what they promise of results."""

import math
import re
from contextlib import nullcontext
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from sagebwd import Recipe, explain, qk_norm_rope, read_mask, sage_attention, sage_attention_varlen, switches
from sagebwd.reference.metrics import relative_l2
from sagebwd.switches import current as current_switches
from tests.attention_case import leaves, outcome
from tests.inputs import draw

pytestmark = pytest.mark.rounding

FULL = {"recipe": "full", "impl": "reference"}


def call(*inputs, do, recipe="token", **arguments):
    """Output and gradients."""
    return outcome(sage_attention, inputs, do, recipe=recipe, **arguments)


@pytest.mark.parametrize("recipe", ["full", "token", "paper"])
@pytest.mark.parametrize("tokens", [(1, 1), (17, 17), (63, 65), (65, 63)])
@pytest.mark.parametrize("head_dim", [8, 80])
def test_gradients_against_sdpa(recipe, tokens, head_dim):
    q, k, v, do = draw(batch=2, heads=4, kv_heads=2, tokens=tokens[0], kv_tokens=tokens[1], head_dim=head_dim)
    actual = call(q, k, v, do=do, is_causal=True, enable_gqa=True, recipe=recipe)
    expected = outcome(F.scaled_dot_product_attention, (q, k, v), do, is_causal=True, enable_gqa=True)
    limit = {"full": 1e-5, "token": 0.04, "paper": 0.12}[recipe]
    for a, e in zip(actual, expected):
        assert a.shape == e.shape
        if e.norm() < 1e-5 * do.norm():  # of one key, nothing but rounding
            assert a.norm() < limit * do.norm()
        else:
            assert relative_l2(a, e) < limit


def test_gradcheck_of_full_precision_in_fp64():
    q, k, v, _ = draw(heads=2, kv_heads=1, tokens=5, kv_tokens=7, head_dim=4, dtype=torch.float64)

    def attention(q, k, v):
        return sage_attention(q, k, v, enable_gqa=True, window=(3, 2), return_lse=True, **FULL)

    assert torch.autograd.gradcheck(attention, leaves(q, k, v))


def test_gradcheck_packed_with_lse():
    q, k, v, _ = (x[0].transpose(0, 1) for x in draw(heads=2, tokens=9, head_dim=3, dtype=torch.float64))
    offsets = torch.tensor([0, 4, 4, 9], dtype=torch.int32)

    def attention(q, k, v):
        o, lse = sage_attention_varlen(
            q, k, v, offsets, offsets, 5, 5, is_causal=True, return_lse=True, recipe="full(smooth_k=True)"
        )
        return o, lse

    assert torch.autograd.gradcheck(attention, leaves(q, k, v))


@pytest.mark.parametrize("recipe", ["full", "token", "paper"])
def test_lse_is_the_true_one(recipe):
    q, k, v, _ = draw("mean-and-outliers", heads=4, kv_heads=2, tokens=70)
    _, lse = sage_attention(q, k, v, enable_gqa=True, recipe=recipe, return_lse=True)
    exact = (q.double() @ k.double().repeat_interleave(2, 1).mT / 8).logsumexp(-1)
    assert lse.dtype == torch.float32
    # FP32 adds 64 products, each rounded to 2^-24 of sums that may be larger than what is left of them
    assert relative_l2(lse, exact) < (1e-5 if recipe == "full" else 1e-2)


@pytest.mark.parametrize("recipe", ["full", "token", "paper"])
def test_key_padding_is_as_if_the_keys_were_not_there(recipe):
    # FP64: in FP32 sums of another order put codes at ties on their other side
    q, k, v, do = draw(batch=2, tokens=70, dtype=torch.float64)
    lengths = (70, 41)
    mask = torch.arange(70) < torch.tensor(lengths)[:, None]
    poisoned_k, poisoned_v = (torch.where(mask[:, None, :, None], x, math.nan) for x in (k, v))
    actual = call(q, poisoned_k, poisoned_v, do=do, attn_mask=mask[:, None, None], recipe=recipe)
    for index, length in enumerate(lengths):
        row = slice(index, index + 1)
        expected = call(q[row], k[row, :, :length], v[row, :, :length], do=do[row], recipe=recipe)
        for a, e in zip(actual[:2], expected[:2]):
            assert relative_l2(a[row], e) < 1e-12
        for a, e in zip(actual[2:], expected[2:]):
            assert relative_l2(a[row, :, :length], e) < 1e-12
            assert a[row, :, length:].abs().max() == 0 if length < 70 else True


@pytest.mark.parametrize("recipe", ["full", "token", "paper", "mixed", "token(dp=int8)"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_are_separate_calls(recipe, is_causal):
    lengths_q, lengths_k = (5, 0, 70, 33), (5, 3, 64, 50)
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths_q), 4, 16), *[(sum(lengths_k), 2, 16)] * 2, (sum(lengths_q), 4, 16)]
    # FP64, where no order of adding reaches a code at a tie
    *pack, do = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    offsets_q, offsets_k = (
        torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (lengths_q, lengths_k)
    )
    inputs = leaves(*pack)
    out, lse = sage_attention_varlen(
        *inputs, offsets_q, offsets_k, 70, 64, is_causal=is_causal, recipe=recipe, return_lse=True
    )
    dq, dk, dv = torch.autograd.grad(out, inputs, do)
    for a, b, c, d in zip(offsets_q, offsets_q[1:], offsets_k, offsets_k[1:]):
        one = leaves(*(x[s].transpose(0, 1)[None] for x, s in zip(pack, (slice(a, b), slice(c, d), slice(c, d)))))
        # bottom right aligned: a dense causal call with the missing queries put in front
        missing = int((d - c) - (b - a)) if is_causal else 0
        window = (-1, missing) if is_causal else None
        expected, expected_lse = (
            sage_attention(*one, enable_gqa=True, window=window, recipe=recipe, return_lse=True)
            if missing >= 0
            else (None, None)
        )
        if expected is None:
            visible = torch.ones(int(b - a), int(d - c), dtype=torch.bool).tril(int((d - c) - (b - a)))
            assert out[a:b][~visible.any(-1)].abs().max() == 0
            assert torch.isinf(lse[:, a:b][:, ~visible.any(-1)]).all()
            continue
        gradients = torch.autograd.grad(expected, one, do[a:b].transpose(0, 1)[None])
        assert_close(out[a:b], expected[0].transpose(0, 1))
        assert_close(lse[:, a:b], expected_lse[0])
        for actual, gradient, s in zip((dq, dk, dv), gradients, (slice(a, b), slice(c, d), slice(c, d))):
            assert_close(actual[s], gradient[0].transpose(0, 1))


def test_rows_that_see_nothing_are_zero():
    q, k, v, do = draw(tokens=20, kv_tokens=10)
    for arguments in ({"window": (2, 0)}, {"attn_mask": torch.zeros(1, 1, 1, 10, dtype=torch.bool)}):
        out, lse, dq, dk, dv = outcome(sage_attention, (q, k, v), do, return_lse=True, **arguments)
        empty = slice(12, None) if "window" in arguments else slice(None)
        assert out[:, :, empty].abs().max() == 0
        assert (lse[:, :, empty] == -math.inf).all()
        assert dq[:, :, empty].abs().max() == 0
        assert all(torch.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize(("tokens_q", "tokens_k"), [(0, 5), (5, 0), (0, 0)])
def test_no_tokens(tokens_q, tokens_k):
    q, k, v = (torch.randn(2, 2, n, 8, requires_grad=True) for n in (tokens_q, tokens_k, tokens_k))
    out, lse = sage_attention(q, k, v, return_lse=True)
    assert out.shape == (2, 2, tokens_q, 8)
    assert out.abs().sum() == 0
    assert (lse == -math.inf).all()
    out.sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() == 0 for x in (q, k, v))


def test_any_strides_give_the_same_bits():
    fused = torch.randn(2, 33, 3, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    views = [fused[:, :, i].transpose(1, 2) for i in range(3)]
    do = torch.randn(2, 4, 33, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = fused.clone()
    for a, e in zip(
        call(*views, do=do, is_causal=True), call(*(x.contiguous() for x in views), do=do, is_causal=True)
    ):
        assert torch.equal(a, e)
        assert a.dtype == torch.bfloat16
    assert torch.equal(fused, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_what_norms_and_rotary_leave_in_fp32(dtype):
    q, k, v, do = draw(tokens=40)
    with torch.autocast("cpu", dtype):
        out = sage_attention(q, k, v.to(dtype), recipe="token")
    assert out.dtype == dtype
    assert torch.equal(out, sage_attention(*(x.to(dtype) for x in (q, k, v)), recipe="token"))
    inputs = leaves(q, k, v)
    with torch.autocast("cpu", dtype):
        out = sage_attention(*inputs, recipe="token")
    out.backward(do.to(dtype))
    assert all(x.grad.dtype == torch.float32 for x in inputs)


def test_switches_change_the_recipe_and_nothing_else():
    q, k, v, do = draw(tokens=64)
    token, full = (call(q, k, v, do=do, recipe=recipe) for recipe in ("token", "full"))
    for recipe in ("token", "auto"):
        with switches(disabled=True):
            for a, e in zip(call(q, k, v, do=do, recipe=recipe), full):
                assert torch.equal(a, e)
        with switches(backward_16bit=True):
            mixed = call(q, k, v, do=do, recipe=recipe)
    assert torch.equal(mixed[0], token[0])
    expected = call(q, k, v, do=do, recipe="token(dv=16bit, dq=16bit, dk=16bit)")
    assert all(torch.equal(a, e) for a, e in zip(mixed, expected))
    assert all(torch.equal(a, e) for a, e in zip(call(q, k, v, do=do, recipe="token"), token))


@pytest.mark.parametrize("name", ["disabled", "backward_16bit", "deterministic"])
@pytest.mark.parametrize("value", ["yes", 1, 0])
def test_a_switch_is_true_or_false(name, value):
    with pytest.raises(TypeError, match=f"{name}={value!r} must be True, False or None"), switches(**{name: value}):
        pass
    assert not getattr(current_switches, name)


# What is refused: (change to a good call, error, text in the message)
Q, K, V = (torch.zeros(2, 4, 6, 8) for _ in range(3))
OFFSETS = torch.tensor([0, 2, 6], dtype=torch.int32)
REFUSED = [
    ({"query": [1, 2]}, TypeError, "query: expected a tensor, got list"),
    ({"key": None}, TypeError, "key: expected a tensor, got NoneType"),
    ({"value": None}, TypeError, "value: expected a tensor, got NoneType"),
    ({"query": Q[0], "enable_gqa": True}, ValueError, "query: expected 4 dimensions"),
    ({"value": V[0, 0, 0]}, ValueError, "value: expected 4 dimensions"),
    ({"query": Q[0, :3]}, ValueError, "shapes (3, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8) do not broadcast"),
    ({"key": K.half()}, TypeError, "key: dtype torch.float16 differs"),
    ({"query": Q.int(), "key": K.int(), "value": V.int()}, TypeError, "dtype torch.int32 is not supported"),
    ({"key": K.to("meta")}, ValueError, "key: device meta differs"),
    ({"key": torch.zeros(2, 4, 6, 16)}, ValueError, "key: head_dim 16 differs from query's 8"),
    ({"query": torch.zeros(2, 4, 6, 520), "key": torch.zeros(2, 4, 6, 520), "value": torch.zeros(2, 4, 6, 520),
      "recipe": "token"}, ValueError, "head_dim 520 is not supported; accepted: 1 to 512"),
    ({"value": torch.zeros(2, 4, 6, 520), "impl": "reference"}, ValueError, "value: head_dim 520 is not supported"),
    ({"query": torch.zeros(2, 4, 6, 0), "key": torch.zeros(2, 4, 6, 0)}, ValueError, "query: head_dim 0 is not"),
    ({"value": torch.zeros(2, 4, 5, 8)}, ValueError, "value: shape (2, 4, 5, 8) differs from key's"),
    ({"query": torch.zeros(1, 4, 6, 8)}, ValueError, "key: batch 2 differs from query's 1"),
    ({"query": torch.zeros(2, 8, 6, 8)}, ValueError, "pass enable_gqa=True"),
    ({"query": torch.zeros(2, 6, 6, 8), "enable_gqa": True}, ValueError, "4 heads do not divide query's 6"),
    ({"dropout_p": 0.1, "recipe": "token"}, NotImplementedError, "dropout_p=0.1 is not supported"),
    ({"dropout_p": 0.1, "return_lse": True}, NotImplementedError, "return_lse: not supported beside dropout_p"),
    ({"dropout_p": 0.1, "return_max_logits": True}, NotImplementedError, "return_max_logits: not supported beside"),
    ({"dropout_p": 0.1, "block_mask": "any"}, NotImplementedError, "block_mask: not supported beside dropout_p"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p=1.5 must be at least 0 and at most 1"),
    ({"dropout_p": "a"}, TypeError, "dropout_p='a' must be a number"),
    ({"attn_mask": torch.ones(6, 5, dtype=torch.bool)}, ValueError, "attn_mask: shape (6, 5) does not broadcast to"),
    ({"attn_mask": torch.ones(2, 6, dtype=torch.bool)}, ValueError, "padding pass attn_mask[:, None, None, :]"),
    ({"attn_mask": torch.ones(2, 6, 6)}, ValueError, "its last two or three dimensions; pass attn_mask[:, None]"),
    ({"attn_mask": torch.zeros(6, 6, dtype=torch.int8)}, TypeError, "attn_mask: dtype torch.int8 is not supported"),
    ({"attn_mask": torch.ones(2, 6, dtype=torch.int64)}, TypeError, "as attn_mask.bool() of ones and zeros"),
    ({"query": Q[0], "key": K[0], "value": V[0], "attn_mask": torch.ones(5)}, ValueError, "(5,) has no dimensions"),
    (
        {"query": Q[0], "key": K[0], "value": V[0], "attn_mask": torch.ones(3, 6, 5)}, ValueError,
        "attn_mask: shape (3, 6, 5) does not broadcast to query's (4, 6, 8)",
    ),
    ({"attn_mask": "causal"}, TypeError, "attn_mask: expected a tensor or None, got str"),
    ({"is_causal": 1}, TypeError, "is_causal=1 must be True or False"),
    ({"scale": "auto"}, TypeError, "scale='auto' must be a number"),
    ({"scale": math.nan}, ValueError, "scale=nan must be finite"),
    ({"scale": 10**400}, ValueError, "0 must be finite"),
    ({"recipe": "token(dq=16bit, dq=int8)"}, ValueError, "'token(dq=16bit, dq=int8)' has dq twice"),
    ({"recipe": "token(block_k=\u00b2)"}, ValueError, "block_k='\u00b2' is not supported; accepted: 16"),
    ({"window": 5}, ValueError, "window=5 must be None or (left, right)"),
    ({"window": 5}, ValueError, "a query's last 5 tokens, its own among them, are (4, 0)"),
    ({"window": (5, -2)}, ValueError, "window=(5, -2) must hold two integers"),
    ({"window": (5, 1.5)}, ValueError, "window=(5, 1.5) must hold two integers"),
    ({"recipe": "fp8"}, ValueError, "none called 'fp8'; named recipes: token, paper, mixed, full"),
    ({"recipe": None}, TypeError, "recipe: expected a name or a Recipe, got NoneType"),
    ({"impl": "fastest"}, ValueError, "impl='fastest' is not known"),  # a word of the operators
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=[case[2][:40] for case in REFUSED])
def test_refused(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        sage_attention(**{"query": Q, "key": K, "value": V} | change)


@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy_are_numbers():
    """Regression: those that are no float of Python's were refused; torch's own attention takes them."""
    numpy = pytest.importorskip("numpy")
    expected = sage_attention(Q, K, V, scale=0.5)
    given = {"scale": numpy.float32(0.5), "dropout_p": numpy.float16(0)}
    assert torch.equal(sage_attention(Q, K, V, **given), expected)
    assert torch.equal(sage_attention(Q, K, V, scale=numpy.int64(1)), sage_attention(Q, K, V, scale=1.0))
    assert not sage_attention(Q, K, V, dropout_p=Fraction(1)).count_nonzero(), "which torch takes for no number"


REFUSED_PACKED = [
    ({"query": Q}, ValueError, "query: expected 3 dimensions"),
    ({"value": None}, TypeError, "value: expected a tensor, got NoneType"),
    ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q: expected an int32 tensor, got NoneType"),
    ({"cu_seqlens_q": [0, 6]}, TypeError, "cu_seqlens_q: expected an int32 tensor, got list"),
    ({"cu_seqlens_k": OFFSETS.long()}, ValueError, "cu_seqlens_k: expected int32 of shape (sequences + 1,)"),
    ({"cu_seqlens_k": OFFSETS.long()}, ValueError, "of shape (3,); pass cu_seqlens_k.int()"),
    ({"max_seqlen_q": torch.tensor(4)}, ValueError, "pass max_seqlen_q.item()"),
    ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q=-1 must be an integer, at least 0"),
    ({"cu_seqlens_q": OFFSETS[:1]}, ValueError, "int32 of shape (sequences + 1,), one sequence at least, got"),
    ({"cu_seqlens_q": OFFSETS.to("meta")}, ValueError, "cu_seqlens_q: device meta differs"),
    ({"cu_seqlens_q": OFFSETS.repeat_interleave(2)[::2]}, ValueError, "expected offsets side by side, got stride 2"),
    ({"cu_seqlens_q": OFFSETS[[0, 2]]}, ValueError, "name 1 and 2 sequences"),
    ({"cu_seqlens_q": OFFSETS + 1}, ValueError, "cu_seqlens_q must rise from 0 to the number of packed tokens (6)"),
    ({"cu_seqlens_k": OFFSETS.clone().index_fill_(0, torch.tensor(2), 5)}, ValueError, "it runs from 0 to 5"),
    ({"cu_seqlens_q": torch.tensor([0, 7, 6], dtype=torch.int32)}, ValueError, "falls in between"),
    ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q=3 is less than the longest sequence, 4"),
    ({"max_seqlen_k": 2.0}, ValueError, "max_seqlen_k=2.0 must be an integer"),
    ({"key": torch.zeros(6, 3, 8), "value": torch.zeros(6, 3, 8)}, ValueError, "3 heads do not divide query's 4"),
    ({"value": torch.zeros(6, 4, 520)}, ValueError, "1 to 512; use torch.nn.functional.scaled_dot_product_attention"),
    ({"value": torch.zeros(6, 4, 520), "recipe": "token"}, ValueError, "1 to 512; use torch.nn.functional.scaled"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED_PACKED, ids=[case[2][:40] for case in REFUSED_PACKED])
def test_refused_packed(change, error, message):
    packed = torch.zeros(6, 4, 8)
    good = {
        "query": packed, "key": packed, "value": packed, "cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS,
        "max_seqlen_q": 4, "max_seqlen_k": 4,
    }  # fmt: skip
    sage_attention_varlen(**good)
    with pytest.raises(error, match=re.escape(message)):
        sage_attention_varlen(**good | change)


def test_heads_that_no_kernel_takes_run_by_auto_where_torch_runs_them():
    q = torch.zeros(1, 2, 6, 520)
    sage_attention(q, q, q)
    for more in ({"sinks": torch.zeros(2)}, {"return_lse": True}, {"return_max_logits": True}):
        with pytest.raises(NotImplementedError, match="head_dim 520, over 512"):
            sage_attention(q, q, q, **more)
        sage_attention(q[..., :512], q[..., :512], q[..., :512], **more)


def test_integers_of_numpy_are_integers():
    """Regression: longest lengths and windows are often sums or maxima of arrays."""
    packed, longest, window = torch.randn(6, 4, 8), np.int64(4), (np.int32(2), np.int64(-1))
    found, expected = (
        sage_attention_varlen(packed, packed, packed, OFFSETS, OFFSETS, x, x, window=y, recipe="token")
        for x, y in ((longest, window), (4, (2, -1)))
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("recipe", ["full", "token"])
def test_lse_of_no_heads(recipe):
    """Regression: ZeroDivisionError."""
    x = torch.zeros(6, 0, 8, requires_grad=True)
    _, lse = sage_attention_varlen(x, x, x, OFFSETS, OFFSETS, 4, 4, recipe=recipe, return_lse=True)
    _, dense = sage_attention(*[x.transpose(0, 1)[None]] * 3, recipe=recipe, return_lse=True)
    assert (lse.shape, dense.shape) == ((0, 6), (1, 0, 6))
    (lse.sum() + dense.sum()).backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("by_vmap", [False, True])
@pytest.mark.parametrize("in_a_mode", [False, True])
def test_gradients_at_once_are_refused(in_a_mode, by_vmap):
    """Regression: torch's errors of a batching rule and of a pointer."""
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    with FlopCounterMode(display=False) if in_a_mode else nullcontext():
        o = sage_attention(q, q, q, recipe="token")
    do = torch.ones(2, *o.shape)
    by_grad = partial(torch.autograd.grad, o, q, is_grads_batched=True)
    differentiated = torch.vmap(partial(torch.autograd.grad, o, q)) if by_vmap else by_grad
    with pytest.raises(NotImplementedError, match="several gradients at once"):
        differentiated(do)


def test_padding_of_no_heads():
    """Regression: IndexError, of a mask that holds for all heads, of which there are none."""
    q, k = torch.zeros(2, 0, 5, 8), torch.zeros(2, 0, 0, 8)
    padding = torch.ones(2, 1, 1, 0, dtype=torch.bool).expand(2, 0, 5, 0)
    assert sage_attention(q, k, k, padding, recipe="full").shape == q.shape


def test_recipe_object_name_and_text_are_one():
    q, k, v, _ = draw(tokens=70)
    expected = sage_attention(q, k, v, recipe="paper")
    assert torch.equal(expected, sage_attention(q, k, v, recipe=Recipe.named("paper")))
    assert torch.equal(expected, sage_attention(q, k, v, recipe="paper(smooth_v=False)"))
    assert not torch.equal(expected, sage_attention(q, k, v, recipe="token"))


@pytest.mark.parametrize("recipe", ["full", "token", "paper", "mixed"])
@pytest.mark.parametrize("shape", [(6, 8), (3, 6, 8), (2, 3, 6, 8), (2, 1, 3, 6, 8), (2, 2, 1, 3, 6, 8)], ids=len)
def test_any_number_of_dimensions(shape, recipe):
    q, k, v, do = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(4))
    four = [x.reshape(-1, 3, 6, 8) if len(shape) > 3 else x.reshape(-1, 1, 6, 8) for x in (q, k, v, do)]
    mask = torch.ones(*shape[: -3 if len(shape) > 3 else -2], *((1,) if len(shape) > 3 else ()), 1, 6).bool()
    mask[..., 4:] = False
    for options in ({"is_causal": True}, {"attn_mask": mask}):
        actual = call(q, k, v, do=do, recipe=recipe, **options)
        if "attn_mask" in options:
            options = {"attn_mask": mask.reshape(-1, 1, 1, 6)}
        for a, e in zip(actual, call(*four[:3], do=four[3], recipe=recipe, **options)):
            assert torch.equal(a, e.reshape(shape))
    assert sage_attention(q, k, v, return_lse=True)[1].shape == shape[:-1]


@pytest.mark.parametrize("recipe", ["full", "token", "paper", "mixed"])
@pytest.mark.parametrize("dims", [(24, 16), (16, 24)])
def test_values_of_another_head_dim(recipe, dims):
    """As in multi-head latent attention: as near to SDPA as with one head_dim, and the same packed."""
    q, k, _, _ = draw(batch=1, heads=4, kv_heads=2, tokens=70, head_dim=dims[0])
    _, _, v, do = draw(batch=1, heads=4, kv_heads=2, tokens=70, head_dim=dims[1])
    actual = call(q, k, v, do=do, is_causal=True, enable_gqa=True, recipe=recipe)
    expected = outcome(F.scaled_dot_product_attention, (q, k, v), do, is_causal=True, enable_gqa=True)
    for a, e in zip(actual, expected):
        assert a.shape == e.shape
        assert relative_l2(a, e) < {"full": 1e-5, "paper": 0.12}.get(recipe, 0.06)
    offsets = torch.tensor([0, 70], dtype=torch.int32)
    packed = sage_attention_varlen(
        *(x[0].transpose(0, 1) for x in (q, k, v)), offsets, offsets, 70, 70, is_causal=True, recipe=recipe
    )
    assert_close(packed, actual[0][0].transpose(0, 1))


@pytest.mark.parametrize("of_gradients", [lambda o: o.sum(), lambda o: (o**2).sum()])
@pytest.mark.parametrize("recipe", ["full", "token"])
def test_second_derivatives_are_refused(recipe, of_gradients):
    """Regression: where the output's gradient is a constant they were zero without a word."""
    q, k, v = leaves(*draw(tokens=6, head_dim=8)[:3])
    o = sage_attention(q, k, v, recipe=recipe)
    (first,) = torch.autograd.grad(of_gradients(o), q, create_graph=True)
    loss = o.sum() + 100 * (first**2).sum()
    with pytest.raises(NotImplementedError, match=r"second derivatives .*create_graph=True.*SDPBackend\.MATH"):
        torch.autograd.grad(loss, q)


@pytest.mark.parametrize("operators", [False, True])
def test_second_derivatives_by_what_is_behind_attention_are_refused(operators):
    """Regression: gradients depend on dO and dlse too, and the part of a head's parameters was missing unsaid."""
    q, k, v, weight = leaves(*draw(tokens=6, head_dim=8)[:3], torch.randn(8))
    with FlopCounterMode(display=False) if operators else nullcontext():
        o, lse = sage_attention(q, k, v, recipe="token", return_lse=True)
    for loss in ((o * weight).square().sum(), (lse * weight[0]).sum()):
        (first,) = torch.autograd.grad(loss, q, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            torch.autograd.grad(first.square().sum(), weight)


@pytest.mark.parametrize(("recipe", "operators"), [("auto", False), ("token", False), ("token", True)])
@pytest.mark.parametrize("what", ["boolean", "padding", "bias", "offsets", "sinks", "key and value", "tables"])
def test_tensors_of_inference_mode_train(what, recipe, operators):
    """Regression: autograd saves none, and torch's error named no argument; evaluation comes before training."""
    q, k, v, _ = draw(tokens=9, head_dim=8)

    def made():
        """Of the case, the arguments that inference mode made, and the call."""
        one, options = torch.ones(9, 9).tril(), {"recipe": recipe}
        if what == "offsets":
            offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
            return [offsets], lambda q, k, v, x: sage_attention_varlen(
                *(y[0].transpose(0, 1) for y in (q, k, v)), x, x, 5, 5, **options
            )
        if what == "tables":
            cos, sin = one[:, :8] + 1, one[:, :8]
            return [cos, sin], lambda q, k, v, cos, sin: sage_attention(
                *qk_norm_rope(q, k, eps=1e-6, cos=cos, sin=sin), v, **options
            )
        if what == "sinks":
            return [one[0, : q.shape[1]] + 0], lambda q, k, v, x: sage_attention(q, k, v, sinks=x, **options)
        if what == "key and value":
            return [k + 0, v + 0], lambda q, _, __, k, v: sage_attention(q, k, v, **options)
        mask = {"boolean": one > 0, "padding": one[5:6] > 0, "bias": one}[what]
        return [mask], lambda q, k, v, x: sage_attention(q, k, v, x, **options)

    with torch.inference_mode():
        of_inference, call = made()
        call(q, k, v, *of_inference)
    found = []
    for given in (of_inference, made()[0]):
        (leaf,) = leaves(q)
        with FlopCounterMode(display=False) if operators else nullcontext():
            found += torch.autograd.grad(call(leaf, k, v, *given).square().sum(), leaf)
    assert torch.equal(*found)


def test_a_graph_of_the_gradients_alone_is_fine():
    q, k, v = leaves(*draw(tokens=6, head_dim=8)[:3])
    o = sage_attention(q, k, v, recipe="token")
    plain = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(o.sum(), (q, k, v), create_graph=True), plain))


def test_meta_tensors_have_shapes():
    q, k, v = (x.to("meta").requires_grad_() for x in draw(batch=2, heads=4, kv_heads=2, tokens=70)[:3])
    o, lse = sage_attention(q, k, v, is_causal=True, enable_gqa=True, return_lse=True)
    assert (o.shape, lse.shape, o.device.type) == (q.shape, q.shape[:-1], "meta")
    o.sum().backward()
    assert (q.grad.shape, k.grad.shape, k.grad.device.type) == (q.shape, k.shape, "meta")


def test_what_the_operator_has_no_rules_for_is_refused_by_name():
    q, k, v = leaves(*draw(tokens=6, head_dim=8)[:3])
    with pytest.raises(NotImplementedError, match=r"gradients of torch\.func"):
        torch.func.grad(lambda x: sage_attention(x, k, v, recipe="token").sum())(q.detach())
    with pytest.raises(NotImplementedError, match="under vmap"):
        torch.vmap(lambda x: sage_attention(x, k, v, recipe="token"))(q[None])
    with torch.no_grad():
        alone = torch.vmap(lambda x: sage_attention(x, k, v, recipe="token"))(q[None])
        assert torch.equal(alone[0], sage_attention(q, k, v, recipe="token"))
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.randn(6, 8), torch.randn(5, 8)], layout=layout)
        with pytest.raises(NotImplementedError, match=r"query: nested tensors .*sage_attention_varlen"):
            sage_attention(nested, nested, nested)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace is not supported; use torch\.compile"):
        torch.jit.trace(lambda x: sage_attention(x, x, x, recipe="token"), q.detach())


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "sinks"])
def test_sparse_tensors_are_refused_by_name(name, dims):
    """Regression: RuntimeError of a tensor without a data pointer or storage."""
    x = torch.randn(1, 2, 4, 8)[0 if dims == 3 else slice(None)]
    given = {"query": x, "key": x, "value": x, "attn_mask": torch.ones(4, 4), "sinks": torch.zeros(x.shape[1])}
    given[name] = given[name].to_sparse()
    message = rf"{name}: layout torch\.sparse_coo is not supported; accepted: torch\.strided, as {name}\.to_dense\(\)"
    for function in (sage_attention, explain):
        with pytest.raises(NotImplementedError, match=message):
            function(**given)
    if name == "attn_mask":
        with pytest.raises(NotImplementedError, match=message):
            read_mask(given[name])


@pytest.mark.parametrize("name", ["attn_mask", "sinks"])
def test_nested_tensors_are_refused_by_name(name):
    """Regression: RuntimeError "Internal error: NestedTensorImpl doesn't support sizes"."""
    x, nested = torch.randn(1, 2, 4, 8), torch.nested.nested_tensor([torch.ones(4, 4), torch.ones(2, 4)])
    for function in (sage_attention, explain):
        with pytest.raises(NotImplementedError, match=f"{name}: nested tensors are not supported"):
            function(x, x, x, **{name: nested})


@pytest.mark.parametrize("name", ["query", "cu_seqlens_k"])
def test_sparse_tensors_of_packed_sequences_are_refused_by_name(name):
    x, offsets = torch.randn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    given = {"query": x, "key": x, "value": x, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    given[name] = given[name].to_sparse()
    with pytest.raises(NotImplementedError, match=rf"{name}: layout torch\.sparse_coo is not supported"):
        sage_attention_varlen(**given, max_seqlen_q=4, max_seqlen_k=4)


@pytest.mark.parametrize("impl", [None, "triton"])
def test_forward_mode_is_refused_in_a_trace(impl):
    """Regression: its tangent was 0 without a word."""
    x = torch.randn(1, 1, 4, 8)
    if impl is None:
        attend = lambda k: sage_attention(x, k, x, recipe="token")  # noqa: E731
    else:
        pytest.importorskip("triton")
        attend = lambda k: qk_norm_rope(x, k, eps=1e-6, impl=impl)[1]  # noqa: E731
    torch._dynamo.reset()
    with pytest.raises(Exception, match="k: forward-mode differentiation"):
        torch.compile(lambda k: torch.func.jvp(attend, (k,), (k,)), fullgraph=True, backend="eager")(x)


def test_forward_mode_is_refused():
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(NotImplementedError, match="key: forward-mode differentiation"):
        torch.func.jvp(lambda k: sage_attention(x, k, x, recipe="token"), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        sage_attention(x, x, x, recipe="token")
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="query: forward-mode differentiation"):
            sage_attention(dual, x, x, recipe="token")
