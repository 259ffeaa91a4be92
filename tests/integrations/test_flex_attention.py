"""FlexAttention's signature beside torch's own, of which a CPU runs the forward, and beside a plain softmax."""

import inspect
import math
import re

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, create_mask

from sagebwd import read_block_mask, sage_attention
from sagebwd.integrations.flex_attention import OPTIONS, flex_attention
from sagebwd.reference.metrics import relative_l2
from tests.attention_case import softmax_attention
from tests.inputs import draw

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
DOCUMENT = torch.tensor([0] * 60 + [1] * 3 + [2] * 400)

MODS = {
    "causal": lambda b, h, q, k: q >= k,
    "document": lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k),
    "prefix": lambda b, h, q, k: (k < 30 + 20 * b) | (q >= k),
    "sliding-with-sinks": lambda b, h, q, k: (q >= k) & ((q - k < 25) | (k < 4)),
    "by-head": lambda b, h, q, k: (q - k).abs() < 10 + 20 * h,
    "blind": lambda b, h, q, k: (q > 6) & (k < 80),
}
BATCHED, HEADED = ("prefix",), ("by-head",)
# no multiples of a block; queries fewer and more than keys
LENGTHS = [(150, 150), (77, 190), (200, 91)]


def mask_of(name: str, tokens: tuple[int, int], make=create_block_mask, **options):
    sizes = 2 if name in BATCHED else None, HEADS if name in HEADED else None
    return make(MODS[name], *sizes, *tokens, device="cpu", **options)


def inputs(tokens: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(
        draw(
            batch=2, heads=HEADS, kv_heads=KV_HEADS, tokens=tokens[0], kv_tokens=tokens[1], head_dim=HEAD_DIM,
            dtype=dtype,
        )
    )  # fmt: skip


def torchs_own(*arguments, **options):
    """A CPU runs it on tensors that need no gradient."""
    return torchs.flex_attention(*(x.detach() for x in arguments), **options)


def test_the_signature_is_torchs():
    ours, theirs = (inspect.signature(x).parameters for x in (flex_attention, torchs.flex_attention))
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name
    assert set(list(ours)[len(theirs) :]) == {"recipe", "impl"}


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")
@pytest.mark.parametrize("tokens", LENGTHS, ids=str)
@pytest.mark.parametrize("name", MODS)
def test_is_torchs_own(name, tokens):
    q, k, v, _ = inputs(tokens)
    mask = mask_of(name, tokens)
    options = {"block_mask": mask, "scale": 0.3, "enable_gqa": True, "return_lse": True}
    for a, e in zip(flex_attention(q, k, v, **options, recipe="full"), torchs_own(q, k, v, **options)):
        torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", LENGTHS, ids=str)
@pytest.mark.parametrize("name", MODS)
def test_gradients_are_those_of_a_softmax(name, tokens):
    *leaves, do = inputs(tokens, torch.float64)
    leaves = [x.requires_grad_() for x in leaves]
    o, aux = flex_attention(
        *leaves, None, mask_of(name, tokens), None, True, recipe="full", return_aux=AuxRequest(lse=True)
    )
    wanted, lse = softmax_attention(*leaves, mask_of(name, tokens, create_mask))
    seen = lse != -math.inf
    assert aux.max_scores is None
    torch.testing.assert_close(aux.lse, lse)
    found, expected = (
        torch.autograd.grad((o * do).sum() + lse[seen].sin().sum(), leaves) for o, lse in ((o, aux.lse), (wanted, lse))
    )
    for a, e in zip((o, *found), (wanted, *expected)):
        torch.testing.assert_close(a, e, atol=1e-9, rtol=1e-7)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("size", [32, 64, (128, 64), 256])
def test_blocks_of_other_sizes(size):
    q, k, v, _ = inputs((150, 150))
    mask = mask_of("sliding-with-sinks", (150, 150), BLOCK_SIZE=size)
    found = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, recipe="full")
    torch.testing.assert_close(found, torchs_own(q, k, v, block_mask=mask, enable_gqa=True), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_keys_of_one_batch_serve_all():
    q, k, v, do = inputs((70, 70), torch.float64)
    k, v, mask = k[:1].requires_grad_(), v[:1].requires_grad_(), mask_of("prefix", (70, 70))
    found = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, recipe="full")
    wanted = softmax_attention(q, k, v, mask_of("prefix", (70, 70), create_mask))[0]
    torch.testing.assert_close(found, torchs_own(q, k, v, block_mask=mask, enable_gqa=True))
    for a, e in zip(torch.autograd.grad(found, (k, v), do), torch.autograd.grad(wanted, (k, v), do)):
        torch.testing.assert_close(a, e)
    with pytest.raises(ValueError, match="key: batch 1 differs"):
        flex_attention(q, k, v, enable_gqa=True)


def test_without_a_mask():
    q, k, v, _ = inputs((40, 50))
    options = {"enable_gqa": True, "recipe": "token"}
    assert torch.equal(flex_attention(q, k, v, **options), sage_attention(q, k, v, **options))
    o, aux = flex_attention(q, k, v, enable_gqa=True, recipe="full", return_aux=AuxRequest())
    assert aux == (None, None)
    torch.testing.assert_close(o, softmax_attention(q, k, v, None)[0])


def test_recipes_are_taken():
    q, k, v, _ = inputs((150, 150))
    mask = mask_of("causal", (150, 150))
    full, token = (
        flex_attention(q, k, v, block_mask=mask, enable_gqa=True, recipe=recipe) for recipe in ("full", "token")
    )
    assert 0 < relative_l2(token, full) < 0.05


@pytest.mark.parametrize("read", [False, True])
def test_under_torch_compile(read):
    """Without a break of the graph, and a BlockMask is read anew where it is another."""
    torch._dynamo.reset()
    q, k, v, _ = inputs((150, 150))
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    for name in ("causal", "document"):
        mask = mask_of(name, (150, 150))
        wanted = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        found = compiled(q, k, v, block_mask=read_block_mask(mask) if read else mask, enable_gqa=True)
        assert torch.equal(found, wanted)


def softcap(score, b, h, q, k):
    return 20 * torch.tanh(score / 20)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"score_mod": softcap},
            NotImplementedError,
            "score_mod: softcap is not supported.*create_block_mask.*softcap",
        ),
        ({"score_mod": lambda score, *_: score}, NotImplementedError, "score_mod: .*<lambda> is not supported"),
        ({"kernel_options": {"FAST": 1}}, NotImplementedError, "kernel_options: 'FAST' may change numbers"),
        ({"return_aux": AuxRequest(max_scores=True)}, NotImplementedError, "return_aux: max_scores"),
        ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, ValueError, "return_lse=True beside return_aux"),
        ({"block_mask": torch.ones(1)}, TypeError, "block_mask: expected a BlockMask or None, got Tensor"),
        ({"enable_gqa": False}, ValueError, "pass enable_gqa=True"),
    ],
)
def test_refused(options, error, message):
    q, k, v, _ = inputs((40, 40))
    with pytest.raises(error, match=message):
        flex_attention(q, k, v, **({"enable_gqa": True} | options))


def test_masks_that_do_not_fit_are_refused():
    q, k, v, _ = inputs((150, 150))
    with pytest.raises(ValueError, match=re.escape("block_mask: made for (140, 150)")):
        flex_attention(q, k, v, block_mask=mask_of("causal", (140, 150)), enable_gqa=True)
    sliced = mask_of("causal", (300, 150))[:, :, :2]
    with pytest.raises((RuntimeError, ValueError)):
        flex_attention(q, k, v, block_mask=sliced, enable_gqa=True)


def test_kernel_options_have_no_effect():
    q, k, v, _ = inputs((40, 40))
    options = dict.fromkeys(OPTIONS, 32) | {"fwd_BLOCK_M": 64, "bwd_num_warps": 4}
    assert torch.equal(
        *(flex_attention(q, k, v, enable_gqa=True, recipe="token", kernel_options=given) for given in (options, None))
    )
    assert set(torchs.FlexKernelOptions.__annotations__) >= OPTIONS - {"USE_TMA", "BACKEND"}
