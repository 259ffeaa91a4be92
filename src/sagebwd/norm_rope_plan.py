"""QK-norm, rotary embedding and attention by one plan, where a family's passes take the projections' outputs.

Hopper's do: codes of Q and K are made of them at once, and the rows between are not written
(`sagebwd.kernels.sm90.operands.norm_rope_codes`). Every other call is composed of `sagebwd.norm_rope_ops` and
`sagebwd.attention`: of other kernels and widths, with a mask or learned sinks, whose lse is asked for.

Under torch.compile and under modes of torch, which see operators alone, that of `sagebwd.norm_rope_attention_ops` runs
such a plan. A trace decides by what it knows of a call: shapes, dtypes, the device and settings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagebwd import checks, dispatch, norm_rope_attention_ops, switches
from sagebwd.arguments import Arguments, arguments_of, autocast_dtype, packed_arguments_of
from sagebwd.auto import choice as auto_choice
from sagebwd.cache import PLANS
from sagebwd.call import Ask, Prologue, keeps_inputs
from sagebwd.counts import answer, counts
from sagebwd.kernels.capabilities import KERNEL_DTYPES
from sagebwd.kernels.runtime.device import device_of
from sagebwd.planning import flops
from sagebwd.planning.autograd import SageAttention
from sagebwd.planning.plan import Plan
from sagebwd.planning.specification import spec_of
from sagebwd.recipe import AUTO, Recipe
from sagebwd.tracing import assume_constant

LENGTHS = "max_seqlen_q", "max_seqlen_k"
OFFSETS = "cu_seqlens_q", "cu_seqlens_k"
# Of `sage_attention` and `sage_attention_varlen`, and what of each has to be left out.
TAKES = {"is_causal", "scale", "window", "recipe", "impl"}
TAKES_DENSE, TAKES_PACKED = TAKES | {"enable_gqa"}, TAKES | {*OFFSETS, *LENGTHS}
LEFT_OUT_PACKED = {"sinks", "return_lse"}
LEFT_OUT_DENSE = LEFT_OUT_PACKED | {"attn_mask", "block_mask", "dropout_p"}
DEFAULTS = {"is_causal": False, "scale": None, "window": None, "recipe": AUTO, "impl": None, "enable_gqa": False}
SETTINGS = tuple(sorted((TAKES_DENSE | TAKES_PACKED) - {"recipe", "window", *OFFSETS}))
# Widths that Hopper's passes take whole.
HEAD_DIMS = (64, 128)
_COMPOSED = "composed"


def attend(q: Tensor, k: Tensor, v: Tensor, prologue: Prologue, attention: dict[str, Any]) -> Tensor | None:
    """The output, or None where the call is to be composed; attention: other arguments of `sage_attention`.

    q, k and ``prologue`` were checked, the others were not: who composes raises what is to be raised.
    """
    if not _may_take(q, k, v, prologue, attention):
        return None
    given = DEFAULTS | attention
    cu_seqlens_q, cu_seqlens_k = (given.get(name) for name in OFFSETS)
    tensors = q, k, v, prologue.q_weight, prologue.k_weight
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if torch.compiler.is_compiling() or _is_watched():
        return _by_operator(q, k, v, prologue, given, trains)
    # who runs a call of "auto" depends on whether it trains, be it the weights alone
    settings = *(given.get(name) for name in SETTINGS), *prologue[:2], trains and given["recipe"] == AUTO, _COMPOSED
    tensors = q, k, v, None, cu_seqlens_q, cu_seqlens_k, None, *prologue[2:]
    spec = spec_of(tensors, None, given["recipe"], given["window"], *settings)
    if spec is None:
        return None
    plan = PLANS.get(spec)
    if plan is None:
        plan = _plan_of(q, k, v, prologue, given, trains)
        PLANS.put(spec, plan)
    if plan is _COMPOSED:
        return None
    counts[plan.answer] += 1
    masks = None, cu_seqlens_q, cu_seqlens_k
    if trains:
        return SageAttention.apply(plan, None, False, q, k, v, None, *masks, *prologue)
    with device_of(q):
        return plan.forward(q, k, v, None, None, *masks, prologue)[0]


def _may_take(q: Tensor, k: Tensor, v: Tensor, prologue: Prologue, attention: dict[str, Any]) -> bool:
    """Whether a family may have the call for all that is known before one is chosen; cheap, as most calls do not."""
    if q.dim() != v.dim():
        return False
    if autocast_dtype(q.device) not in (None, q.dtype) or not q.dtype == k.dtype == v.dtype:
        return False
    if str(q.dtype).removeprefix("torch.") not in KERNEL_DTYPES or q.shape[-1] not in HEAD_DIMS:
        return False
    if prologue.q_cos is not None and prologue.q_cos.shape[-1] != q.shape[-1]:
        return False
    packed = OFFSETS[0] in attention
    takes, left_out = (TAKES_PACKED, LEFT_OUT_PACKED) if packed else (TAKES_DENSE, LEFT_OUT_DENSE)
    for name, given in attention.items():
        absent = given is None or (isinstance(given, (bool, int, float)) and given == 0)
        if name not in takes and not (name in left_out and absent):
            return False
    if packed and any(attention.get(name) is None for name in (*OFFSETS, *LENGTHS)):
        return False
    return v.shape[-1] == q.shape[-1] and min(q.numel(), k.numel()) > 0


def _checked(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], trains: bool) -> Arguments:
    """The call, as it is composed, where rows of trained weights need gradients. Raises as `sage_attention`."""
    causal, scale, window, recipe, impl = (given[x] for x in ("is_causal", "scale", "window", "recipe", "impl"))
    offsets, lengths = tuple(given.get(x) for x in OFFSETS), tuple(given.get(x) for x in LENGTHS)
    if offsets[0] is not None:
        checked = packed_arguments_of(q, k, v, offsets, lengths, causal, scale, window, None, recipe, impl, False)
    else:
        grouped = given["enable_gqa"]
        checked = arguments_of(q, k, v, None, 0, causal, scale, grouped, None, window, None, recipe, impl, False)
    return checked._replace(ask=checked.ask._replace(training=trains))


def _plan_of(
    q: Tensor, k: Tensor, v: Tensor, prologue: Prologue, given: dict[str, Any], trains: bool
) -> Plan | str:  # fmt: skip
    """The plan, or `_COMPOSED` where no family takes the prologue. Raises as `sage_attention`."""
    checked = _checked(q, k, v, given, trains)
    choice = checked.choice()
    if choice.contender is not None or not takes_prologue(choice, q.shape[-1], v.shape[-1]):
        return _COMPOSED
    return Plan(choice, checked.call(choice.recipe)._replace(prologue=prologue), q, k, sinks=False)


def _is_watched() -> bool:
    """Whether a mode of torch looks on, such as checkpointing that keeps attention, and no transform of torch.func."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
        and not checks.is_divided()
    )


def _by_operator(
    q: Tensor, k: Tensor, v: Tensor, prologue: Prologue, given: dict[str, Any], trains: bool
) -> Tensor | None:
    """The output by the operator, or None where the call is to be composed. Raises as `sage_attention`."""
    if _is_exported():  # a program that other GPUs may run, where attention's operator chooses
        return None
    checked = _checked(q, k, v, given, trains)
    if auto_choice.contender_of(checked.ask, checked.size, None, False) is not None:
        return None
    recipe, *asked = checked.ask
    chosen = _fused(str(recipe), *asked)
    if chosen is None:
        return None
    if not torch.compiler.is_compiling():
        flops.register()  # for a mode that counts them
        counts[answer(*chosen)] += 1
    eps, interleaved, *tensors = prologue
    numbers = *checked.lengths, checked.is_causal, *checked.window, checked.scale
    settings = *numbers, eps, interleaved, *chosen, switches.current.deterministic
    return norm_rope_attention_ops.qk_norm_rope_attention(q, k, v, *tensors, *checked.offsets, *settings)[0]


@assume_constant
def _is_exported() -> bool:
    """Whether torch.export traces the call. Asked in a trace itself, torch 2.11 says yes of torch.compile's too."""
    return torch.compiler.is_exporting()


@assume_constant
def _fused(recipe: str, *asked: object) -> tuple[str, str] | None:
    """The recipe and the choice's name of a call whose passes take the prologue, or None; of an `Ask` by its parts."""
    ask = Ask(recipe if recipe == AUTO else Recipe.parse(recipe), *asked)
    try:
        choice = dispatch.choose(ask)
    except (NotImplementedError, TypeError, ValueError):  # which it raises where it is composed
        return None
    return (str(choice.recipe), choice.name) if takes_prologue(choice, ask.head_dim, ask.value_dim) else None


def takes_prologue(choice: dispatch.Choice, head_dim: int, value_dim: int) -> bool:
    """Whether both directions' passes take the prologue too, and can be compiled, and backward reads codes alone."""
    from sagebwd.kernels.runtime import nvrtc  # which other calls do not need

    dims = head_dim, value_dim
    return (
        nvrtc.unavailable() is None
        and choice.forward.takes_prologue
        and choice.backward.takes_prologue
        and choice.forms(*dims) == (dims, dims)
        and keeps_inputs(choice.recipe, choice.backward) == (False, False)
    )
