"""`qk_norm_rope` and `qk_norm_rope_attention` are what PyTorch's norm, rotary embedding and attention compose."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from sagebwd import qk_norm_rope, qk_norm_rope_attention, sage_attention, sage_attention_varlen
from sagebwd.norm_rope.composed import norm_rope

EPS = 1e-6


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def table(tokens, channels, rope="half", dtype=torch.float64):
    """cos and sin of (tokens, channels), as models make them."""
    frequencies = 100.0 ** -(torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    angles = torch.arange(tokens)[:, None] * frequencies
    angles = torch.cat((angles, angles), -1) if rope == "half" else angles.repeat_interleave(2, -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def by_hand(x, weight, eps, cos, sin, rope):
    """Of (batch, heads, tokens, head_dim): rotation as products of complex numbers."""
    if eps is not None:
        x = F.rms_norm(x, x.shape[-1:], weight, eps)
    if cos is None:
        return x
    count = cos.shape[-1]
    z, rest = x[..., :count], x[..., count:]
    z = torch.stack(z.chunk(2, -1), -1) if rope == "half" else z.unflatten(-1, (-1, 2))
    first = slice(0, count // 2) if rope == "half" else slice(0, count, 2)
    turn = torch.complex(cos[..., first], sin[..., first])
    z = torch.view_as_real(torch.view_as_complex(z.contiguous()) * (turn if turn.dim() == 2 else turn[:, None]))
    z = torch.cat(z.unbind(-1), -1) if rope == "half" else z.flatten(-2)
    return torch.cat((z, rest), -1)


def inputs(dtype=torch.float64, heads=4, kv_heads=2, tokens=13, head_dim=16, value_dim=16):
    shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)
    q, k, v = (drawn(2, tokens, n, d, seed=i, dtype=dtype).transpose(1, 2) for i, (n, d) in enumerate(shapes))
    weights = (1 + 0.3 * drawn(head_dim, seed=3 + i) for i in range(2))
    return [x.detach().requires_grad_() for x in (q, k, v, *(weight.to(dtype) for weight in weights))]


def gradients(out, leaves):
    return torch.autograd.grad(out, leaves, drawn(*out.shape, seed=9, dtype=out.dtype), allow_unused=True)


@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize("channels", [16, 6, None])
@pytest.mark.parametrize("normed", ["weights", "one weight", "plain", None])
def test_it_is_what_a_hand_composes(normed, channels, rope):
    q, k, _, q_weight, k_weight = inputs()
    cos, sin = (None, None) if channels is None else table(13, channels, rope)
    eps = None if normed is None else EPS
    weights = (q_weight if normed == "weights" else None, k_weight if normed in ("weights", "one weight") else None)
    found = qk_norm_rope(q, k, q_weight=weights[0], k_weight=weights[1], eps=eps, cos=cos, sin=sin, rope=rope)
    wanted = [by_hand(x, weight, eps, cos, sin, rope) for x, weight in zip((q, k), weights)]
    used = [q, k, *(x for x in weights if x is not None)]
    for a, e in zip(found, wanted):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-12)
        for da, de in zip(gradients(a, used), gradients(e, used)):
            assert (da is None) == (de is None)
            if da is not None:
                torch.testing.assert_close(da, de, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rope", ["half", "interleaved"])
def test_gradients_of_the_reference(rope):
    x, weight = drawn(1, 2, 3, 6).requires_grad_(), drawn(6, seed=1).requires_grad_()
    cos, sin = (y[None] for y in table(3, 4, rope))
    assert torch.autograd.gradcheck(lambda x, w: norm_rope(x, w, EPS, cos, sin, rope), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: norm_rope(x, w, EPS, cos, sin, rope), (x, weight))


FORMS = {
    "grouped": {"is_causal": True, "enable_gqa": True},
    "window": {"window": (3, 1), "enable_gqa": True},
    "mask": {"attn_mask": torch.arange(13)[:, None] % 3 >= torch.arange(13) % 4, "enable_gqa": True},
    "sinks": {"sinks": torch.tensor([0.5, 0, -1, 2.0]), "is_causal": True, "enable_gqa": True},
    "scale": {"scale": 0.4, "enable_gqa": True, "return_lse": True},
}


@pytest.mark.parametrize("recipe", ["full", "token"])
@pytest.mark.parametrize("form", FORMS)
def test_attention_of_a_form_is_the_composition(form, recipe):
    q, k, v, q_weight, k_weight = leaves = inputs(torch.float32)
    cos, sin = table(13, 8)
    settings = {"recipe": recipe, **FORMS[form]}
    norm = {"eps": EPS, "cos": cos, "sin": sin}
    found = qk_norm_rope_attention(q, k, v, q_weight=q_weight, k_weight=k_weight, **norm, **settings)
    rows = [by_hand(x, w, EPS, cos.float(), sin.float(), "half") for x, w in ((q, q_weight), (k, k_weight))]
    wanted = sage_attention(*rows, v, **settings)
    if form == "scale":
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-4)
        found, wanted = found[0], wanted[0]
    # of codes a difference in rounding may be a code
    near = {"rtol": 1e-4, "atol": 1e-5} if recipe == "full" else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(found, wanted, **near)
    for a, e in zip(gradients(found, leaves), gradients(wanted, leaves)):
        torch.testing.assert_close(a, e, **near if recipe == "full" else {"rtol": 0.2, "atol": 0.5})


def test_packed_sequences_have_positions_of_their_own():
    """Each is what it is alone, with its first token at position 0."""
    lengths, heads, groups = (5, 1, 7), 4, 2
    offsets = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    q, k, v = (drawn(13, n, 16, seed=i).requires_grad_() for i, n in enumerate((heads, groups, groups)))
    weights = {name: 1 + 0.3 * drawn(16, seed=i) for i, name in enumerate(("q_weight", "k_weight"))}
    cos, sin = table(7, 16)
    ids = torch.cat([torch.arange(n) for n in lengths])
    packing = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 7, "max_seqlen_k": 7}
    settings = {"is_causal": True, "recipe": "full", "eps": EPS, **weights}
    found = qk_norm_rope_attention(q, k, v, cos=cos, sin=sin, position_ids=ids, **packing, **settings)
    again = qk_norm_rope_attention(q, k, v, cos=cos[ids], sin=sin[ids], **packing, **settings)
    assert torch.equal(found, again)
    alone = []
    for begin, length in zip((0, 5, 6), lengths):
        one = (x[begin : begin + length].transpose(0, 1)[None] for x in (q, k, v))
        out = qk_norm_rope_attention(*one, cos=cos[:length], sin=sin[:length], enable_gqa=True, **settings)
        alone.append(out[0].transpose(0, 1))
    torch.testing.assert_close(found, torch.cat(alone))
    for a, e in zip(gradients(found, (q, k, v)), gradients(torch.cat(alone), (q, k, v))):
        torch.testing.assert_close(a, e)


def test_offsets_move_positions():
    """Of scores only distances count; queries and keys may have positions apart."""
    q, k, v, *_ = inputs(torch.float64)
    cos, sin = table(40, 16)
    ids = torch.arange(13)
    attend = partial(qk_norm_rope_attention, q, k, v)
    settings = {"cos": cos, "sin": sin, "enable_gqa": True, "is_causal": True, "recipe": "full"}
    first = attend(position_ids=ids, **settings)
    torch.testing.assert_close(attend(position_ids=ids + 20, **settings), first)
    torch.testing.assert_close(attend(position_ids=torch.stack((ids, ids + 5)), **settings), first)
    rows = qk_norm_rope(q[:, :, 10:], k, cos=cos, sin=sin, position_ids=(ids[10:], ids))
    wanted = qk_norm_rope(q, k, cos=cos[:13], sin=sin[:13])
    assert torch.equal(rows[0], wanted[0][:, :, 10:])
    assert torch.equal(rows[1], wanted[1])


def test_it_is_rounded_once():
    """Of BF16 inputs the FP64 result's nearest, within what FP32 leaves."""
    q, k, _, q_weight, k_weight = (x.detach() for x in inputs(torch.bfloat16))
    tables = table(13, 16, dtype=torch.float32)
    found = qk_norm_rope(q, k, q_weight=q_weight, k_weight=k_weight, eps=EPS, cos=tables[0], sin=tables[1])
    exact = [x.double() for x in (q, k, q_weight, k_weight, *tables)]
    for x, weight, y in zip(exact[:2], exact[2:4], found):
        wanted = by_hand(x, weight, EPS, *exact[4:], "half")
        assert y.dtype == torch.bfloat16
        assert ((y.double() - wanted).abs() <= 2.0**-8 * wanted.abs() * 1.001 + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_its_dtype(dtype):
    q, k, v, q_weight, k_weight = inputs(torch.float32)
    cos, sin = table(13, 16, dtype=torch.float32)
    given = {"q_weight": q_weight, "k_weight": k_weight, "eps": EPS, "cos": cos, "sin": sin}
    with torch.autocast("cpu", dtype):
        rows = qk_norm_rope(q, k, **given)
        out = qk_norm_rope_attention(q, k, v, enable_gqa=True, recipe="token", **given)
    assert [x.dtype for x in (*rows, out)] == [dtype] * 3
    wanted = qk_norm_rope(q, k, **given)
    assert all(torch.equal(a, e.to(dtype)) for a, e in zip(rows, wanted))


def test_transforms_of_torch_func_compose():
    q, k, *_ = (x.detach() for x in inputs())
    found = torch.func.grad(lambda x: qk_norm_rope(x, k, eps=EPS)[0].pow(3).sum())(q)
    leaf = q.clone().requires_grad_()
    wanted = torch.autograd.grad(qk_norm_rope(leaf, k, eps=EPS)[0].pow(3).sum(), leaf)[0]
    torch.testing.assert_close(found, wanted)


X, W, T = torch.zeros(2, 4, 13, 16), torch.ones(16), torch.zeros(13, 16)
WRONG = {
    "query: expected a tensor, got list": (TypeError, {"query": [1]}),
    "query: dtype torch.int64 is not supported; accepted: ": (TypeError, {"query": X.long()}),
    r"query: expected \(batch, heads, tokens, head_dim\), or packed": (ValueError, {"query": X[0, 0]}),
    "key: expected .*, the same of query and key, got shape": (ValueError, {"key": X[0]}),
    "key: head_dim 8 is not supported beside query's 16": (ValueError, {"key": X[..., :8]}),
    "key: batch 1 differs from query's 2": (ValueError, {"key": X[:1]}),
    "key: device meta differs": (ValueError, {"key": X.to("meta")}),
    "query: layout torch.sparse_coo is not supported": (NotImplementedError, {"query": X.to_sparse()}),
    r"query: nested tensors are not supported; give values\(\), packed": (
        NotImplementedError,
        {"query": torch.nested.nested_tensor([X[0]])},
    ),
    "eps=True must be a number": (TypeError, {"eps": True}),
    "eps=-1 must be finite and not negative": (ValueError, {"eps": -1}),
    "eps=nan must be finite": (ValueError, {"eps": float("nan")}),
    "q_weight: a norm's weight needs eps": (ValueError, {"q_weight": W}),
    r"k_weight: expected shape \(16,\), got \(8,\)": (ValueError, {"k_weight": W[:8], "eps": 1e-6}),
    "k_weight: dtype torch.int64": (TypeError, {"k_weight": W.long(), "eps": 1e-6}),
    "rope='neox' is not known; accepted: 'half', 'interleaved'": (ValueError, {"rope": "neox"}),
    "cos: rotary embedding needs sin too": (ValueError, {"cos": T}),
    "sin: rotary embedding needs cos too": (ValueError, {"sin": T}),
    "position_ids: rotary embedding needs cos and sin too": (ValueError, {"position_ids": torch.arange(13)}),
    "cos: expected .*, got shape \\(16,\\)": (ValueError, {"cos": W, "sin": W}),
    "sin: expected .*, the same of cos and sin": (ValueError, {"cos": T, "sin": T[:, :8]}),
    "cos: 3 channels are not supported; accepted: an even number from 2 to head_dim 16": (
        ValueError,
        {"cos": T[:, :3], "sin": T[:, :3]},
    ),
    "cos: 1 x 9 positions do not fit query's 2 x 13": (ValueError, {"cos": T[:9], "sin": T[:9]}),
    "cos: 1 x 13 positions do not fit key's 2 x 5": (ValueError, {"cos": T, "sin": T, "key": X[:, :, :5]}),
    "cos: its gradient is not computed": (NotImplementedError, {"cos": T.clone().requires_grad_(), "sin": T}),
    "position_ids: expected a tensor of int64 or int32": (TypeError, {"cos": T, "sin": T, "position_ids": 3}),
    "position_ids: a tuple of 3": (ValueError, {"cos": T, "sin": T, "position_ids": (torch.arange(13),) * 3}),
    r"position_ids: expected \(tokens,\) or \(batch or 1, tokens\), got shape \(1, 1, 13\)": (
        ValueError,
        {"cos": T, "sin": T, "position_ids": torch.arange(13)[None, None]},
    ),
    "position_ids: 1 x 5 positions do not fit": (ValueError, {"cos": T, "sin": T, "position_ids": torch.arange(5)}),
    "cos: expected \\(positions, R\\) beside position_ids": (
        ValueError,
        {"cos": T[None], "sin": T[None], "position_ids": torch.arange(13)},
    ),
    "impl='fast' is not known": (ValueError, {"impl": "fast"}),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_the_argument(message):
    error, wrong = WRONG[message]
    given = {"query": X, "key": X} | wrong
    with pytest.raises(error, match=message):
        qk_norm_rope(given.pop("query"), given.pop("key"), **given)


def test_errors_of_the_attention():
    with pytest.raises(ValueError, match="query: expected 4 dimensions without cu_seqlens_q"):
        qk_norm_rope_attention(X[0], X[0], X[0])
    with pytest.raises(ValueError, match=r"query: expected 3 dimensions, \(total_tokens, heads, head_dim\)"):
        qk_norm_rope_attention(X, X, X, cu_seqlens_q=torch.tensor([0, 13]))
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        qk_norm_rope_attention(X, X, X, causal=True)
    with pytest.raises(ValueError, match="recipe"):
        qk_norm_rope_attention(X, X, X, recipe="int3")


def test_without_norm_and_rotary_embedding_it_is_attention():
    q, k, v, *_ = inputs(torch.float32)
    assert torch.equal(
        qk_norm_rope_attention(q, k, v, enable_gqa=True, recipe="token"),
        sage_attention(q, k, v, enable_gqa=True, recipe="token"),
    )
    offsets = torch.tensor([0, 13], dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    ends = (offsets, offsets, 13, 13)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    assert torch.equal(
        qk_norm_rope_attention(*packed, **dict(zip(names, ends)), recipe="token"),
        sage_attention_varlen(*packed, *ends, recipe="token"),
    )
