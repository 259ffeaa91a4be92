"""Calls whose norm and rotary embedding are a part of attention's own plan: where a family's passes do them too.

Hopper's do: codes of Q and K are made of the projections' outputs at once, and the rows between are not written
(`sagebwd.kernels.sm90.operands.norm_rope_codes`). Every other call is composed of `sagebwd.norm_rope.ops` and
`sagebwd.attention`: of other kernels and widths, with a mask or learned sinks, of keys that no query sees by its
position, whose lse or largest logits are asked for, of DTensors.

A trace decides by what it knows of a call: shapes, dtypes, the device and settings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from sagebwd import attention, dispatch
from sagebwd.arguments import Arguments, arguments_of, autocast_dtype, packed_arguments_of, within_reach
from sagebwd.auto import choice as auto_choice
from sagebwd.call import Ask, Prologue, keeps_inputs
from sagebwd.counts import answer, counts
from sagebwd.dtensor import shares_of
from sagebwd.planning import specification
from sagebwd.planning.plan import Plan
from sagebwd.recipe import AUTO, Recipe
from sagebwd.tracing import assume_constant, is_exported

# In a plan's place.
COMPOSED = "composed"
_ABSENT = inspect.Parameter.empty


def _defaults(function: Callable) -> dict[str, Any]:
    """Of what is given behind query, key and value."""
    return {name: x.default for name, x in list(inspect.signature(function).parameters.items())[3:]}


_DENSE, _PACKED = _defaults(attention.sage_attention), _defaults(attention.sage_attention_varlen)


def spec_of(query: Tensor, key: Tensor, value: Tensor, given: tuple, options: dict[str, Any]) -> Hashable | None:
    """A call's specification (`sagebwd.planning.specification`), None where it has none or a BlockMask is read.

    given: as of `sagebwd.norm_rope.arguments.prologue_of`, not yet checked; options: other arguments of attention.
    """
    *weights, eps, cos, sin, rope, ids = given
    if options.get("block_mask") is not None:
        return None
    masks = (options.get(name) for name in ("attn_mask", "cu_seqlens_q", "cu_seqlens_k", "sinks"))
    tensors = query, key, value, *masks, *weights, cos, sin, *(ids if isinstance(ids, tuple) else (ids, ids))
    cast = autocast_dtype(query.device) if torch._C._is_any_autocast_enabled() and isinstance(query, Tensor) else None
    rest = [x for x in options.values() if not isinstance(x, Tensor)]
    of_attention = options.get("recipe", _DENSE["recipe"]), options.get("window")
    settings = tuple(options), eps, rope, cast, *rest
    return specification.laid_out(specification.kind_of(tensors, None, *of_attention, settings), tensors)


def plan_of(q: Tensor, k: Tensor, v: Tensor, prologue: Prologue, options: dict[str, Any]) -> Plan | str:
    """The plan, or `COMPOSED` where no family's passes take the prologue. Raises as `sage_attention`."""
    checked = _checked(q, k, v, prologue, options)
    choice = None if checked is None else checked.choice()
    if choice is None or choice.contender is not None or not takes_prologue(choice, q.shape[-1]):
        return COMPOSED
    return Plan(choice, checked.call(choice.recipe)._replace(prologue=prologue), q, k, sinks=False)


def by_operator(q: Tensor, k: Tensor, v: Tensor, prologue: Prologue, options: dict[str, Any]) -> Tensor | None:
    """The output by attention's operator, or None where the call is composed. Raises as `sage_attention`."""
    if is_exported():  # a program that other GPUs may run, where attention's operator chooses
        return None
    if shares_of(q, k, v, None, None, packed=q.dim() == 3) is not None:  # of DTensors
        return None
    checked = _checked(q, k, v, prologue, options)
    if checked is None or auto_choice.contender_of(checked.ask, checked.size, None, False) is not None:
        return None
    recipe, *asked = checked.ask
    chosen = _chosen(str(recipe), *asked)
    if chosen is None:
        return None
    if not torch.compiler.is_compiling():
        counts[answer(*chosen)] += 1
    return attention.by_operator(checked, chosen, prologue=prologue)[0]


def _checked(q: Tensor, k: Tensor, v: Tensor, prologue: Prologue, options: dict[str, Any]) -> Arguments | None:
    """The call, of training for weights alone too; None where it is composed. Raises as `sage_attention`."""
    packed = "cu_seqlens_q" in options
    known = _PACKED if packed else _DENSE
    given = known | options
    if (
        len(given) > len(known) or any(x is _ABSENT for x in given.values())  # who is called says so
        or any(given.get(name) is not None for name in ("attn_mask", "block_mask", "sinks"))
        or given["return_lse"] or given["return_max_logits"] or given.get("dropout_p", 0) != 0
        or q.dim() != v.dim() or v.shape[-1] != q.shape[-1] or min(q.numel(), k.numel()) == 0
        or (prologue.q_cos is not None and prologue.q_cos.shape[-1] != q.shape[-1])
        or autocast_dtype(q.device) not in (None, q.dtype) or not q.dtype == k.dtype == v.dtype
    ):  # fmt: skip
        return None
    checked = (packed_arguments_of if packed else arguments_of)(q, k, v, **given)
    if not packed and within_reach(checked, k, v, None, None) is not None:  # of fewer keys than have rows
        return None
    trains = any(x is not None and x.requires_grad for x in (q, k, v, prologue.q_weight, prologue.k_weight))
    return checked._replace(ask=checked.ask._replace(training=torch.is_grad_enabled() and trains))


@assume_constant
def _chosen(recipe: str, *asked: object) -> tuple[str, str] | None:
    """The recipe and the choice's name of a call whose passes take the prologue, or None; of an `Ask` by its parts."""
    ask = Ask(recipe if recipe == AUTO else Recipe.parse(recipe), *asked)
    try:
        choice = auto_choice.choose(ask)
    except (NotImplementedError, TypeError, ValueError):  # which it raises where it is composed
        return None
    return (str(choice.recipe), choice.name) if takes_prologue(choice, ask.head_dim) else None


def takes_prologue(choice: dispatch.Choice, head_dim: int) -> bool:
    """Whether both directions' passes take the prologue too, and can be compiled, and backward reads codes alone."""
    from sagebwd.kernels.runtime import nvrtc  # which other calls do not need

    return (
        head_dim in choice.forward.prologue
        and head_dim in choice.backward.prologue
        and nvrtc.unavailable() is None
        and keeps_inputs(choice.recipe, choice.backward, (head_dim, head_dim)) == (False, False)
    )
