"""The passes of QK-norm and rotary embedding: interpreted on a CPU, compiled where there is a GPU."""

import pytest
import torch

from sagebwd import qk_norm_rope, qk_norm_rope_attention, sage_attention
from tests import programs
from tests.gpus import DEVICE, HAS_HOPPER, on_gpu
from tests.norm_rope.test_functions import by_hand, drawn, table

pytest.importorskip("triton")
from sagebwd.kernels import norm_rope as kernels
from sagebwd.norm_rope import ops as norm_rope_ops

pytestmark = on_gpu
EPS = 1e-5
NAMES = "q", "k", "dq", "dk", "dq_weight", "dk_weight"


def rows(layout, heads, tokens, head_dim, dtype, seed):
    """(batch, heads, tokens, head_dim), with tokens or heads side by side, or in a wider tensor."""
    if layout == "heads":
        x = drawn(2, heads, tokens, head_dim, seed=seed)
    elif layout == "tokens":
        x = drawn(2, tokens, heads, head_dim, seed=seed).transpose(1, 2)
    else:  # of one projection of all, which begins at no multiple of 16 bytes
        x = drawn(2, tokens, 3 * heads * head_dim + 3, seed=seed).to(dtype).to(DEVICE)
        return x[..., 3 : 3 + heads * head_dim].unflatten(-1, (heads, head_dim)).transpose(1, 2)
    return x.to(dtype).to(DEVICE)


def results(impl, leaves, given, do):
    """Outputs and gradients, FP64, by name."""
    q, k, *weights = leaves
    names = "q_weight", "k_weight"
    found = qk_norm_rope(q, k, **dict(zip(names, weights)), **given, impl=impl)
    gradients = torch.autograd.grad(found, leaves, do)
    return {name: x.double().cpu() for name, x in zip(NAMES, (*found, *gradients))}


def check(head_dim, channels, rope, layout, dtype, *, normed=True, tokens=21, heads=(9, 3), of_batch=False):
    """Errors beside FP64, of outputs and gradients alike, are at most the rounding of the results."""
    q, k = (rows(layout, n, tokens, head_dim, dtype, seed).requires_grad_() for seed, n in enumerate(heads))
    weights = [(1 + 0.3 * drawn(head_dim, seed=seed)).to(dtype).to(DEVICE).requires_grad_() for seed in (2, 3)]
    weights = weights if normed else []
    given = {"eps": EPS if normed else None, "rope": rope}
    if channels:
        tables = [x.to(dtype).to(DEVICE) for x in table(tokens + 4, channels, rope)]
        if of_batch:
            ids = torch.stack((torch.arange(tokens), torch.arange(tokens) + 4)).to(DEVICE)
            tables = [x[ids] for x in tables]
        else:
            tables = [x[:tokens] for x in tables]
        given |= dict(zip(("cos", "sin"), tables))
    do = [drawn(*x.shape, seed=5).to(dtype).to(DEVICE) for x in (q, k)]
    found = results("triton", [q, k, *weights], given, do)
    exact = [x.detach().double().requires_grad_() for x in (q, k, *weights)]
    given |= {name: given[name].double() for name in ("cos", "sin") if name in given}
    wanted = results("reference", exact, given, [x.double() for x in do])
    eps = {torch.float32: 2.0**-20, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for name, a in found.items():
        e = wanted[name]
        # FP32 sums of a row or of all rows, then one rounding
        bound = 1.01 * eps * e.abs() + 2.0**-18 * e.abs().max()
        assert a.shape == e.shape
        assert ((a - e).abs() <= bound).all(), (name, (a - e).abs().max())


@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize(("head_dim", "channels"), [(64, 64), (96, 96), (128, 128), (80, 80), (128, 32), (96, 44)])
def test_the_passes_are_the_reference(head_dim, channels, rope):
    check(head_dim, channels, rope, "tokens", torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["heads", "tokens", "sliced"])
def test_of_any_strides_and_dtype(layout, dtype):
    check(48, 48, "half", layout, dtype, of_batch=True)


@pytest.mark.parametrize("rope", ["half", "interleaved"])
def test_rotary_embedding_alone_reads_no_input_again(rope):
    check(64, 32, rope, "tokens", torch.bfloat16, normed=False)


@pytest.mark.parametrize("head_dim", [64, 45, 1])
def test_the_norm_alone(head_dim):
    check(head_dim, 0, "half", "heads", torch.float32)


@pytest.mark.parametrize("tokens", [1, 15, 16, 33])
def test_odd_lengths(tokens):
    check(32, 16, "half", "tokens", torch.float32, tokens=tokens, heads=(1, 1))


def test_no_tokens():
    x = torch.zeros(1, 2, 0, 16, device=DEVICE).requires_grad_()
    q, k = qk_norm_rope(x, x[:, :1], eps=EPS, impl="triton")
    assert (q.shape, k.shape) == ((1, 2, 0, 16), (1, 1, 0, 16))
    for dq, dk in ((torch.zeros_like(q), torch.zeros_like(k)), (x.new_zeros(()).expand_as(y) for y in (q, k))):
        (gradient,) = torch.autograd.grad((q, k), x, (dq, dk), retain_graph=True)
        assert gradient.shape == x.shape


def arguments(requires_grad=True):
    """Of the operator."""
    q, k = (drawn(2, n, 19, 16, seed=n).float().to(DEVICE).requires_grad_(requires_grad) for n in (3, 2))
    weights = [(1 + drawn(16, seed=n)).float().to(DEVICE).requires_grad_(requires_grad) for n in range(2)]
    tables = [x[None].float().to(DEVICE) for x in table(19, 8)]
    return q, k, *weights, *tables, *tables, EPS, False, None


def test_the_operator_is_one_of_torchs():
    torch.library.opcheck(torch.ops.sagebwd.qk_norm_rope.default, arguments(), test_utils="test_schema")
    torch.library.opcheck(torch.ops.sagebwd.qk_norm_rope.default, arguments(), test_utils="test_faketensor")
    torch.library.opcheck(torch.ops.sagebwd.qk_norm_rope.default, arguments(), test_utils="test_autograd_registration")


def test_gradients_of_weights_are_the_same_in_every_run():
    given = arguments()
    first, second = (
        torch.autograd.grad(norm_rope_ops.qk_norm_rope(*given)[:2], given[:4], [torch.ones_like(x) for x in given[:2]])
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_what_backward_keeps():
    """Of a norm the inputs themselves and 4 bytes a row; of rotary embedding alone nothing but cos and sin."""
    kept = []
    q, k, *weights, cos, sin, _, _, eps, _, _ = arguments()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        norm_rope_ops.qk_norm_rope(q, k, None, None, cos, sin, cos, sin, None, False, None)
        assert {x.data_ptr() for x in kept if x.numel()} == {cos.data_ptr(), sin.data_ptr()}
        kept.clear()
        norm_rope_ops.qk_norm_rope(q, k, *weights, cos, sin, cos, sin, eps, False, None)
    new = [x for x in kept if x.data_ptr() not in {y.data_ptr() for y in (q, k, *weights, cos, sin)}]
    assert sum(x.nbytes for x in new) == 4 * (q.numel() + k.numel()) // 16


def test_second_derivatives_are_refused():
    given = arguments()
    weight = torch.ones((), requires_grad=True)  # of what is behind
    rotated = norm_rope_ops.qk_norm_rope(*given)[0]
    (dq,) = torch.autograd.grad((rotated * weight).sum(), given[0], create_graph=True)
    for x in (given[0], given[2], weight):
        with pytest.raises(NotImplementedError, match="second derivatives"):
            torch.autograd.grad(dq.square().sum(), x, retain_graph=True)


def test_gradients_at_once_are_refused():
    given = arguments()
    rotated = norm_rope_ops.qk_norm_rope(*given)[0]
    with pytest.raises(NotImplementedError, match="several gradients at once"):
        torch.autograd.grad(rotated, given[0], rotated.new_ones(2, *rotated.shape), is_grads_batched=True)


def attend(q, k, v, q_weight, k_weight, cos, sin, **settings):
    return qk_norm_rope_attention(
        q, k, v, q_weight=q_weight, k_weight=k_weight, eps=EPS, cos=cos, sin=sin, is_causal=True, enable_gqa=True,
        **settings,
    )  # fmt: skip


def attention_inputs(dtype=torch.bfloat16, tokens=40, head_dim=64):
    shapes = [(2, n, tokens, head_dim) for n in (4, 2, 2)]
    rows = [drawn(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    weights = [1 + 0.3 * drawn(head_dim, seed=3 + seed) for seed in range(2)]
    leaves = [x.to(dtype).to(DEVICE).requires_grad_() for x in (*rows, *weights)]
    return leaves, [x.to(dtype).to(DEVICE) for x in table(tokens, head_dim)]


CASES = [("token", "triton"), ("full", "triton"), *([("mixed", "hopper")] if HAS_HOPPER else [])]


@pytest.mark.parametrize(("recipe", "impl"), CASES)
def test_attention_is_the_composition(recipe, impl):
    leaves, tables = attention_inputs()
    found = attend(*leaves, *tables, recipe=recipe, impl=impl)
    q, k, v, *weights = leaves
    wanted_rows = [
        by_hand(x.double(), w.double(), EPS, *(y.double() for y in tables), "half") for x, w in zip((q, k), weights)
    ]
    wanted = sage_attention(
        *(x.bfloat16() for x in wanted_rows), v, is_causal=True, enable_gqa=True, recipe=recipe, impl=impl
    )
    do = drawn(*found.shape, seed=9).bfloat16().to(DEVICE)
    pairs = zip(torch.autograd.grad(found, leaves, do), torch.autograd.grad(wanted, leaves, do))
    for a, e in [(found, wanted), *pairs]:
        error = (a.double() - e.double()).norm() / e.double().norm()
        assert error < 2e-2, error


def test_compiled_and_checkpointed_it_is_the_same():
    leaves, tables = attention_inputs(tokens=20, head_dim=16)
    settings = {"recipe": "token", "impl": "triton"}
    wanted = attend(*leaves, *tables, **settings)
    do = torch.ones_like(wanted)
    gradients = torch.autograd.grad(wanted, leaves, do)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")

    def checkpointed(*given, **options):
        return torch.utils.checkpoint.checkpoint(attend, *given, use_reentrant=False, **options)

    for call in (compiled, checkpointed):
        found = call(*leaves, *tables, **settings)
        assert torch.equal(found, wanted)
        assert all(torch.equal(a, e) for a, e in zip(torch.autograd.grad(found, leaves, do), gradients))


@pytest.mark.parametrize(
    "call",
    [
        (90, 128, 128, "half"),
        pytest.param((80, 80, 64, "interleaved"), marks=pytest.mark.slow),
        pytest.param((90, 256, 256, "half"), marks=pytest.mark.slow),
        pytest.param((120, 64, 64, "half"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_the_kernels_spill_no_register(call):
    rows = programs.compiled("tests.kernels.norm_rope_compilations", *map(str, call))
    assert [row["kernel"] for row in rows] == ["forward_kernel", "backward_kernel"]
    assert all(row["spills"] == 0 and row["shared_bytes"] <= 32 << 10 for row in rows), rows


def test_rows_behind_the_last_offset_are_in_no_gradient():
    """Regression: of packed sequences in fixed shapes, whose rows there hold anything, NaN too."""
    tokens, behind = 21, 9
    offsets = torch.tensor([0, 4, tokens], dtype=torch.int32, device=DEVICE)
    tables = [x.to(DEVICE) for x in table(tokens + behind, 16, "half")]
    found = []
    for rows in (tokens, tokens + behind):
        q, k, dq, dk = (drawn(1, n, tokens + behind, 16, seed=n).to(DEVICE) for n in (2, 1, 2, 1))
        for x in (q, k, dq, dk):
            x[:, :, tokens:] = torch.nan
        weights = [(1 + 0.3 * drawn(16, seed=seed)).to(DEVICE).requires_grad_() for seed in (2, 3)]
        q, k = (x[:, :, :rows].clone().requires_grad_() for x in (q, k))
        given = q, k, *weights, *(x[None, :rows] for x in tables * 2), EPS, False, None, offsets, offsets
        outputs = norm_rope_ops.qk_norm_rope(*given)[:2]
        found.append(torch.autograd.grad(outputs, (q, k, *weights), [x[:, :, :rows] for x in (dq, dk)]))
    for name, first, second in zip(NAMES[2:], *found):
        second = second if "weight" in name else second[:, :, :tokens]
        assert torch.equal(first, second), name


def test_heads_and_tokens_fill_programs():
    q = torch.zeros(3, 2 * kernels.HEADS + 1, kernels.BLOCK + 1, 4)
    assert kernels.programs(q) == 3 * 3 * 2
