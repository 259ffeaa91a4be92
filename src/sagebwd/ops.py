"""The torch.library operators: schema, shapes under tracing, autograd.

``sagebwd::attention`` and ``sagebwd::attention_backward`` are opaque to torch.compile and run what `sagebwd.dispatch`
chose: ``impl`` is a choice's name, or in traced calls, where nobody could ask, what is chosen by here. Autocast is off
inside. What forward leaves beside O and lse lies in one tensor of bytes, the workspace of the call's plan. mask,
mask_tiles and mask_blocks are elements, tiles and blocks of `sagebwd.masks.mask.Mask`; key_mask beside them says which
keys any query sees. The last arguments are fields of `sagebwd.call.Prologue`, of which a call without one has none.

They are defined by ``torch.library.Library`` and not by ``custom_op``, whose autograd reads the schema's arguments 30
times a call, and copies them each time: 0.1 ms of host time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from sagebwd import checks, dispatch
from sagebwd.cache import PLANS, layout_of
from sagebwd.call import Ask, Call, Prologue, empty_gradients, empty_like_rows, keeps_inputs
from sagebwd.derivatives import once_differentiable, refuse_batched, savable
from sagebwd.dispatch import Choice
from sagebwd.kernels.families import REFERENCE
from sagebwd.kernels.masks.blocks import blocks_of
from sagebwd.kernels.runtime.device import device_of
from sagebwd.masks.kinds import FULL, MASK
from sagebwd.masks.mask import BLOCK, Mask
from sagebwd.masks.parts import PartsOfCall
from sagebwd.planning.plan import Plan
from sagebwd.planning.workspace import pieces_of
from sagebwd.recipe import AUTO, Recipe

LIBRARY = torch.library.Library("sagebwd", "DEF")


def operator(fn: Callable) -> torch._ops.OpOverload:
    """The operator of a function's name and signature, which runs it on any device and hides it from torch.compile."""
    schema = torch.library.infer_schema(fn, mutates_args=())
    LIBRARY.define(fn.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(fn.__name__, torch._disable_dynamo(fn), "CompositeExplicitAutograd")
    return getattr(torch.ops.sagebwd, fn.__name__).default


@cache
def parsed(recipe: str) -> Recipe:
    """The recipe of a text, as operators take it."""
    return Recipe.parse(recipe)


def _chosen(recipe: str, impl: str, dims: tuple[int, int], x: Tensor, mask: Tensor | None) -> Choice:
    """What was chosen for a call, or is now; dims: head_dim and value's; x: of query's dtype and device."""
    if dispatch.SEPARATOR in impl:
        return dispatch.named(parsed(recipe), impl)
    wanted = recipe if recipe == AUTO else parsed(recipe)
    return dispatch.choose(Ask(wanted, *map(int, dims), x.dtype, x.device, FULL if mask is None else MASK, impl))


def _chosen_in_a_trace(recipe: str, impl: str, dims: tuple[int, int], x: Tensor, mask: Tensor | None) -> Choice:
    """The same for the sake of shapes: what is refused is refused when it runs, by its own error."""
    try:
        return _chosen(recipe, impl, dims, x, mask)
    except NotImplementedError:
        reference = dispatch.SEPARATOR.join([REFERENCE.name] * 2)
        return dispatch.named(parsed("token" if recipe == AUTO else recipe), reference)


@operator
def mask_blocks(mask: Tensor) -> tuple[Tensor, Tensor]:
    """`sagebwd.masks.mask.blocks_of` a mask in four dimensions."""
    return blocks_of(mask)


@torch.library.register_fake("sagebwd::mask_blocks", lib=LIBRARY)
def _(mask):
    batch, heads, tokens_q, tokens_k = mask.shape
    blocks = mask.new_empty((batch, heads, -(-tokens_q // BLOCK), -(-tokens_k // BLOCK)), dtype=torch.uint8)
    return blocks, mask.new_empty((batch, tokens_k), dtype=torch.bool)


@operator
def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, key_mask: Tensor | None, mask: Tensor | None,
    mask_tiles: Tensor | None, mask_blocks: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, is_causal: bool, window_left: int, window_right: int, scale: float,
    recipe: str, impl: str, deterministic: bool, max_logits: bool = False, eps: float | None = None,
    interleaved: bool | None = None, q_weight: Tensor | None = None, k_weight: Tensor | None = None,
    q_cos: Tensor | None = None, q_sin: Tensor | None = None, k_cos: Tensor | None = None,
    k_sin: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """O, lse of the smoothed scores, and the workspace; max_logits: with the largest logits of each head."""
    checks.refuse_divided()  # what was compiled may run where the sequence is divided among processes
    of_prologue = q_weight, k_weight, q_cos, q_sin, k_cos, k_sin
    prologue = None if interleaved is None else Prologue(eps, interleaved, *of_prologue)
    tensors = q, k, v, sinks, key_mask, mask, mask_tiles, mask_blocks, cu_seqlens_q, cu_seqlens_k, *of_prologue
    settings = max_seqlen_q, max_seqlen_k, is_causal, window_left, window_right, scale, recipe, impl, deterministic
    key = "forward", *map(layout_of, tensors), *settings, max_logits, eps, interleaved
    plan = PLANS.get(key)
    if plan is None:
        of = mask, cu_seqlens_q, cu_seqlens_k, settings, sinks, prologue
        plan = _plan_of(q, k, (q.shape[-1], v.shape[-1]), q, *of, max_logits)
        PLANS.put(key, plan)
    of_mask = _mask(mask, mask_tiles, mask_blocks, key_mask)
    with torch.autocast(q.device.type, enabled=False), device_of(q):
        return plan.forward(q, k, v, sinks, key_mask, of_mask, cu_seqlens_q, cu_seqlens_k, prologue)


def _plan_of(
    q: Tensor, k: Tensor, dims: tuple[int, int], x: Tensor, mask: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, settings: tuple, sinks: Tensor | None, prologue: Prologue | None,
    max_logits: bool = False,
) -> Plan:  # fmt: skip
    """The plan of q and k, or of tensors that lie like them but for head_dim; x: of query's dtype and device."""
    *rest, scale, recipe, impl, deterministic = settings
    choice = _chosen(recipe, impl, dims, x, mask)
    offsets = cu_seqlens_q, cu_seqlens_k
    call = Call.of(q, k, dims, None, *offsets, *rest, scale, choice.recipe, deterministic)
    call = call._replace(prologue=prologue, max_logits=max_logits)
    return Plan(choice, call, q, k, sinks=sinks is not None)


def _mask(mask: Tensor | None, tiles: Tensor | None, blocks: Tensor | None, keys: Tensor | None) -> Mask | None:
    return None if mask is None else Mask(mask, tiles, blocks, keys, PartsOfCall())


@operator
def attention_pieces(
    workspace: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor | None, sinks: bool, max_logits: bool,
    recipe: str, impl: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of the workspace that ``attention`` returned K's mean, and the largest logit of each head, empty if not asked.

    An operator: where they lie follows from what is chosen when it runs, on another GPU than an export's too.
    """
    dims = q.shape[-1], v.shape[-1]
    sequences = None if cu_seqlens_k is None else cu_seqlens_k.shape[0] - 1
    choice = _chosen(recipe, impl, dims, q, None)
    pieces, _ = pieces_of(choice, dims, q, k, sequences, sinks, max_logits=max_logits)
    k_mean = pieces["k_mean"].of(workspace)
    largest = pieces["max_logits"].of(workspace).amax(-1) if max_logits else k_mean.new_empty(0)
    return k_mean.clone(), largest


@torch.library.register_fake("sagebwd::attention_pieces", lib=LIBRARY)
def _(workspace, q, k, v, cu_seqlens_k, sinks, max_logits, recipe, impl):
    packed = cu_seqlens_k is not None
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    k_mean = q.new_empty((cu_seqlens_k.shape[0] - 1 if packed else k.shape[0], k.shape[1], q.shape[-1]), dtype=dtype)
    heads = (q.shape[1],) if packed else q.shape[:2]
    return k_mean, q.new_empty(heads if max_logits else (0,), dtype=dtype)


@torch.library.register_fake("sagebwd::attention", lib=LIBRARY)
def _(
    q, k, v, sinks, key_mask, mask, mask_tiles, mask_blocks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    is_causal, window_left, window_right, scale, recipe, impl, deterministic, max_logits=False, eps=None, *prologue,
):  # fmt: skip
    dims, packed = (q.shape[-1], v.shape[-1]), cu_seqlens_k is not None
    choice = _chosen_in_a_trace(recipe, impl, dims, q, mask)
    sequences = cu_seqlens_k.shape[0] - 1 if packed else None
    _, size = pieces_of(choice, dims, q, k, sequences, sinks is not None, eps is not None, max_logits)
    tokens = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_like_rows(q, v.shape[-1]), q.new_empty(tokens, dtype=dtype), q.new_empty((size,), dtype=torch.uint8)


@operator
def attention_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor, o: Tensor, lse: Tensor,
    workspace: Tensor, sinks: Tensor | None, key_mask: Tensor | None, mask: Tensor | None, mask_tiles: Tensor | None,
    mask_blocks: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, head_dim: int,
    max_seqlen_q: int, max_seqlen_k: int, is_causal: bool, window_left: int, window_right: int, scale: float,
    recipe: str, impl: str, deterministic: bool, eps: float | None = None, interleaved: bool | None = None,
    q_weight: Tensor | None = None, k_weight: Tensor | None = None, q_cos: Tensor | None = None,
    q_sin: Tensor | None = None, k_cos: Tensor | None = None, k_sin: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Gradients dq, dk, dv in the shapes and dtypes of q, k, v, and those of sinks, in lse's dtype, and of the
    weights, FP32, as far as there are any.

    q and k are given where `keeps_inputs` says so, or there is a norm; of sinks none is read.
    """
    of_prologue = q_weight, k_weight, q_cos, q_sin, k_cos, k_sin
    prologue = None if interleaved is None else Prologue(eps, interleaved, *of_prologue)
    tensors = v, o, mask, cu_seqlens_q, cu_seqlens_k, *of_prologue
    settings = max_seqlen_q, max_seqlen_k, is_causal, window_left, window_right, scale, recipe, impl, deterministic
    key = "backward", *map(layout_of, tensors), head_dim, sinks is None, *settings, eps, interleaved
    plan = PLANS.get(key)
    if plan is None:
        of = mask, cu_seqlens_q, cu_seqlens_k, settings, sinks, prologue
        plan = _plan_of(o, v, (head_dim, v.shape[-1]), v, *of)
        PLANS.put(key, plan)
    masks = key_mask, _mask(mask, mask_tiles, mask_blocks, key_mask), cu_seqlens_q, cu_seqlens_k
    with torch.autocast(v.device.type, enabled=False), device_of(v):
        dq, dk, dv, *weights, dsinks = plan.backward(do, dlse, q, k, v, o, lse, workspace, *masks, prologue)
        return dq, dk, dv, [x for x in (dsinks, *weights) if x is not None]


@torch.library.register_fake("sagebwd::attention_backward", lib=LIBRARY)
def _(
    do, dlse, q, k, v, o, lse, workspace, sinks, key_mask, mask, mask_tiles, mask_blocks, cu_seqlens_q, cu_seqlens_k,
    head_dim, max_seqlen_q, max_seqlen_k, is_causal, window_left, window_right, scale, recipe, impl, deterministic,
    eps=None, interleaved=None, q_weight=None, k_weight=None, *tables,
):  # fmt: skip
    dq, dk, dv = empty_gradients(head_dim, o, v)
    if interleaved is not None:
        dk = empty_like_rows(dk if k is None else k)
    return dq, dk, dv, [lse.new_empty(x.shape) for x in (sinks, q_weight, k_weight) if x is not None]


def differentiable(
    derivative: type[torch.autograd.Function], operator: torch._ops.OpOverload, inputs: tuple[str, ...]
) -> None:  # fmt: skip
    """Register a derivative of an operator, for calls in which one of the ``inputs`` needs a gradient.

    Its forward is given the operator below autograd, a function, and the arguments. Tangents, and other arguments that
    need a gradient, are refused here, where a trace has them too, and vmap, whose own tensors need none.
    """
    names = [argument.name for argument in operator._schema.arguments]

    def dispatched(keyset: torch._C.DispatchKeySet, *arguments: object) -> object:
        given = dict(zip(names, arguments))  # torch leaves out what ends in defaults
        checks.refuse_forward_mode((name, given.get(name)) for name in inputs)

        def below(*arguments: object) -> object:
            with torch._C._AutoDispatchBelowAutograd():
                return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

        if not torch.is_grad_enabled():
            return below(*arguments)
        needing = [name for name, x in given.items() if isinstance(x, Tensor) and x.requires_grad]
        for name in needing:
            if name not in inputs:
                name = {"mask": "attn_mask"}.get(name, name)
                raise NotImplementedError(
                    f"{name}: its gradient is not supported; pass {name}.detach() if it needs none"
                )
        if not needing:
            return below(*arguments)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            checks.refuse_transforms()  # in a trace, where `checks.kind` could not ask
        return derivative.apply(below, *arguments)

    LIBRARY.impl(operator.name().removeprefix("sagebwd::"), dispatched, "Autograd", with_keyset=True)


_FORWARD, _BACKWARD = ([x.name for x in of._schema.arguments] for of in (attention, attention_backward))


class _Attention(torch.autograd.Function):
    """The derivative of ``sagebwd::attention``; below: the operator's kernels below autograd."""

    @staticmethod
    def forward(ctx, below, *arguments):
        given = dict(zip(_FORWARD, arguments))
        o, lse, workspace = below(*arguments)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(workspace)
        q, v = given["q"], given["v"]
        dims = q.shape[-1], v.shape[-1]
        choice = _chosen_in_a_trace(given["recipe"], given["impl"], dims, q, given["mask"])
        if given.get("eps") is None:
            for name, keep in zip("qk", keeps_inputs(choice.recipe, choice.backward, dims)):
                given[name] = given[name] if keep else None
        given |= {"o": o, "lse": lse, "workspace": workspace, "head_dim": q.shape[-1]}
        ctx.saved = [name for name in _BACKWARD if isinstance(given.get(name), Tensor)]
        ctx.settings = {name: given.get(name) for name in _BACKWARD[2:] if name not in ctx.saved}
        ctx.save_for_backward(*savable(*map(given.get, ctx.saved)))
        return o, lse, workspace

    @staticmethod
    def backward(ctx, do, dlse, _):
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        refuse_batched(do, dlse)
        saved = dict(zip(ctx.saved, ctx.saved_tensors))
        do = torch.zeros_like(saved["o"]) if do is None else do
        with torch.no_grad():
            *gradients, rest = attention_backward(do, dlse, **saved, **ctx.settings)
        of_others = [name for name in ("sinks", "q_weight", "k_weight") if name in saved]
        found = dict(zip("qkv", gradients)) | {name: x.to(saved[name].dtype) for name, x in zip(of_others, rest)}
        if torch.is_grad_enabled():  # create_graph=True
            found = dict(zip(found, once_differentiable((saved["o"], do, dlse), found.values())))
        return None, *map(found.get, _FORWARD[: len(ctx.needs_input_grad) - 1])


differentiable(_Attention, attention, ("q", "k", "v", "sinks", "q_weight", "k_weight"))
