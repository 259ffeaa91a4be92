"""Calls outside torch.compile, equal to earlier ones in all but addresses: replayed without asking anything again.

Checks, operators and views take longer than many a call runs (docs/log/2026-11-23-host.md). What they decide follows
from a call's `kind_of`. Once `sagebwd.kernels.host.replay` has recorded a forward of a kind, its later calls allocate
the output and one buffer for all that backward reads, and launch; so does their backward, once its launches are
recorded.
Whatever is not plain takes the operators: modes and subclasses of tensors, transforms, tracing, and hooks of saved
tensors, as non-reentrant checkpointing has, which wants the same ones saved in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagebwd import checks, dispatch, switches
from sagebwd.auto import torch_attention
from sagebwd.auto.counts import TORCH, answer
from sagebwd.auto.torch_attention import Way
from sagebwd.call import Call, Saved, keeps_inputs
from sagebwd.dispatch import Choice
from sagebwd.ops import once_differentiable
from sagebwd.recipe import AUTO, Recipe

if TYPE_CHECKING:
    from sagebwd.kernels.host.replay import Recording

CONTIGUOUS = torch.contiguous_format

# As `replay.MOST_CALLS`.
MOST_KINDS = 1024
PLAIN = (Tensor, torch.nn.Parameter)
# Addresses that kernels take as they are (`sagebwd.kernels.host.alignment`), and where pieces of the buffer begin.
TAKEN, ALIGNMENT = 16, 512
# None after a kind's first call.
_plans: dict[Hashable, Plan | Handed | None] = {}


def kind_of(
    tensors: tuple[Tensor | None, ...], recipe: str | Recipe, window: tuple[int, int] | None, *settings: Hashable
) -> Hashable | None:
    """What a call's checks and launches follow from; None where it must take the operators.

    Args: tensors, q, k, v, key_mask, cu_seqlens_q, cu_seqlens_k; settings, all that a call was given beside.
    """
    if torch.compiler.is_compiling():
        return None
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or checks.is_divided()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or (recipe.__class__ is not str and recipe.__class__ is not Recipe)
        or (window is not None and window.__class__ is not tuple)
        or tensors[0].__class__ not in PLAIN
        or (tensors[0].is_cuda and tensors[0].get_device() != torch.cuda.current_device())
    ):
        return None
    switched = switches.current
    kind = [recipe, window, settings, *map(type, settings), switched.disabled, switched.backward_16bit]
    kind.append(switched.deterministic)
    if window is not None:
        kind += map(type, window)
    for x in tensors:
        if x is None:
            kind.append(None)
        elif x.__class__ not in PLAIN or x.is_nested or x.data_ptr() % TAKEN:
            return None
        else:
            kind += x.shape, x.stride(), x.dtype, x.device
    q, k, v, mask, cu_seqlens_q, cu_seqlens_k = tensors
    if recipe.__class__ is str and recipe == AUTO:  # who runs a call depends on whether it trains
        trains = torch.is_grad_enabled()
        kind.append(trains and (q.requires_grad or k.requires_grad or v.requires_grad))
        kind.append(trains and mask is not None and mask.requires_grad)
    kind += q is k, k is v, q is v, cu_seqlens_q is cu_seqlens_k, _casts(q)
    return tuple(kind)


def _casts(q: Tensor) -> bool:
    """Whether autocast is on and casts to another dtype."""
    device = q.device.type
    return device != "meta" and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != q.dtype


def plan_of(kind: Hashable) -> Plan | Handed | None:
    """How to do a call of this kind again, if that is known."""
    if kind is None:  # traced calls must not look at the plans: dynamo would compile anew whenever there is one more
        return None
    try:
        return _plans.get(kind)
    except TypeError:  # of a setting that cannot be hashed, which checks will refuse
        return None


def remember(kind: Hashable, given: tuple, arguments: tuple, *, with_lse: bool) -> None:
    """After a call of a kind by the operators: do its later ones without, if its forward is recorded.

    Args: given, the tensors that `kind_of` was; arguments, those of ``ops.attention``.
    """
    if kind not in _plans:
        if len(_plans) >= MOST_KINDS:
            _plans.clear()
        _plans[kind] = None
        return
    q, k, v, *rest, recipe, impl, deterministic = arguments
    tensors = {id(x): x for x in arguments[:6] if x is not None}
    if any(a is not b for a, b in zip(given, arguments[:3])):
        return  # cast
    if len({x.data_ptr() for x in tensors.values()}) < len(tensors):
        return  # two begin at one address, and need not the next time
    choice = dispatch.named(Recipe.parse(recipe), impl)
    call = Call.of(q, k, (q.shape[-1], v.shape[-1]), *rest, choice.recipe, deterministic)
    forward = dispatch.recorded_forward(choice, call, q, k, v)
    if forward is not None and all(make is not torch.zeros for make, *_ in forward.memory):
        _plans[kind] = Plan(choice, call, forward, with_lse)


class Handed:
    """A kind of call that torch's own attention runs."""

    answer = TORCH

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self.run = run

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *_: None) -> Tensor:
        """o; mask as the call was given it."""
        return self.run(q, k, v, mask)


def hand_over(kind: Hashable, way: Way, q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> None:
    """Do later calls of a kind by torch's own attention without asking; arguments as of `torch_attention.settled`."""
    if len(_plans) >= MOST_KINDS:
        _plans.clear()
    if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        _plans[kind] = Handed(torch_attention.settled(way, q, k, mask, scale))


class _Piece(NamedTuple):
    """What forward saved, as a part of a tensor of bytes or, with the number of an output, as that."""

    output: int | None
    offset: int
    view: tuple[torch.dtype, torch.Size, tuple[int, ...]]

    def of(self, buffer: Tensor, outputs: tuple[Tensor, ...]) -> Tensor:
        """The tensor."""
        if self.output is not None:
            return outputs[self.output]
        dtype, shape, stride = self.view
        return buffer.view(dtype).as_strided(shape, stride, self.offset // dtype.itemsize)


class Plan:
    """A kind of call: what its forward launches on which memory, and by the kind of dO its backward.

    What is given back lies in tensors of its own: o, and ``with_lse`` lse and k_mean too. What else forward saves lies
    in one buffer, and tensors are made of its pieces only for a backward that is not recorded yet.
    """

    def __init__(self, choice: Choice, call: Call, forward: Recording, with_lse: bool) -> None:
        queries, keys = (x._replace(cu_seqlens=None) for x in (call.queries, call.keys))
        self.answer = answer(str(choice.recipe), choice.name)
        self.choice, self.call = choice, call._replace(queries=queries, keys=keys, key_mask=None)  # no tensor is kept
        self.forward, self.keeps = forward, keeps_inputs(call.recipe, choice.backward.impl)
        self.backwards: dict[Hashable, Recording] = {}
        saved = dict(zip(Saved._fields, forward.outputs))
        names = ("o", "lse", "k_mean") if with_lse else ("o",)
        # of outputs: the number of their memory, and their view of it
        self.outputs = [saved[name] for name in names]
        own = {number for number, _ in self.outputs}
        self.bytes, self.offsets = 0, {}  # of pieces of memory in the buffer
        for number, (_, shape, dtype) in enumerate(forward.memory):
            if number not in own:
                self.offsets[number] = self.bytes
                self.bytes += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.saved: list[_Piece | None] = []
        for name, (number, view) in saved.items():
            if number is None:
                self.saved.append(None)
            elif name in names:
                self.saved.append(_Piece(names.index(name), 0, ()))
            else:
                make, shape, dtype = forward.memory[number]
                shape, stride, start = view or (shape, make(shape, dtype=dtype, device="meta").stride(), 0)
                self.saved.append(_Piece(None, self.offsets[number] + start * dtype.itemsize, (dtype, shape, stride)))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor | None) -> tuple[Tensor, ...]:
        """o, and with lse also lse and k_mean; masks: key_mask, cu_seqlens_q, cu_seqlens_k."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _Replayed.apply(self, q, k, v, *masks)
        return self.run(q, k, v, *masks)[0]

    def run(self, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
        """The outputs, and the buffer."""
        key_mask, cu_seqlens_q, cu_seqlens_k = masks
        device = self.forward.device
        addresses = [x.data_ptr() for x in (cu_seqlens_q, cu_seqlens_k, key_mask, q, k, v) if x is not None]
        buffer = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        start, own = buffer.data_ptr(), {}
        for number, (make, shape, dtype) in enumerate(self.forward.memory):
            if number in self.offsets:
                addresses.append(start + self.offsets[number])
            else:
                own[number] = made = make(shape, dtype=dtype, device=device)
                addresses.append(made.data_ptr())
        self.forward.launch(addresses)
        outputs = (own[n] if view is None else own[n].as_strided(*view) for n, view in self.outputs)
        return tuple(outputs), buffer

    def backward(
        self, do: Tensor, dlse: Tensor | None, buffer: Tensor, outputs: tuple[Tensor, ...], inputs: tuple
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv; inputs: q and k where they are kept, v, key_mask, cu_seqlens_q, cu_seqlens_k."""
        q, k, v, key_mask, cu_seqlens_q, cu_seqlens_k = inputs
        do = do if do.stride(-1) == 1 and do.data_ptr() % TAKEN == 0 else do.clone(memory_format=CONTIGUOUS)
        dlse = None if dlse is None else dlse.clone(memory_format=CONTIGUOUS)  # which has an address of its own
        kind = do.stride(), dlse is None, torch.are_deterministic_algorithms_enabled()
        recording = self.backwards.get(kind)
        if recording is None:
            return self._first_backward(kind, do, dlse, buffer, outputs, inputs)
        start = buffer.data_ptr()
        addresses = [x.data_ptr() for x in (cu_seqlens_q, cu_seqlens_k, key_mask) if x is not None]
        for piece in self.saved:
            if piece is not None:
                addresses.append(start + piece.offset if piece.output is None else outputs[piece.output].data_ptr())
        addresses += [x.data_ptr() for x in (do, dlse, q, k, v) if x is not None]
        return recording.again_at(addresses)

    def _first_backward(
        self, kind: Hashable, do: Tensor, dlse: Tensor | None, buffer: Tensor, outputs: tuple, inputs: tuple
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`backward` until its launches are recorded."""
        q, k, v, key_mask, cu_seqlens_q, cu_seqlens_k = inputs
        queries = self.call.queries._replace(cu_seqlens=cu_seqlens_q)
        keys = self.call.keys._replace(cu_seqlens=cu_seqlens_k)
        deterministic = self.call.deterministic or kind[-1]
        call = self.call._replace(queries=queries, keys=keys, key_mask=key_mask, deterministic=deterministic)
        saved = Saved(*(None if piece is None else piece.of(buffer, outputs) for piece in self.saved))
        given = self.choice, call, saved, do, dlse, q, k, v
        with torch.no_grad():
            gradients = dispatch.backward(*given)
        recording = dispatch.recorded_backward(*given)
        others = (x for x in (*outputs, *inputs) if x is not None)
        if recording is not None and do.data_ptr() not in {x.data_ptr() for x in others}:
            self.backwards[kind] = recording
        return gradients


class _Replayed(torch.autograd.Function):
    """A plan and its derivative."""

    @staticmethod
    def forward(ctx, plan, q, k, v, *masks):
        outputs, buffer = plan.run(q, k, v, *masks)
        keep_q, keep_k = plan.keeps
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(buffer, q if keep_q else None, k if keep_k else None, v, *masks, *outputs)
        if len(outputs) > 1:
            ctx.mark_non_differentiable(outputs[-1])
        return outputs

    @staticmethod
    def backward(ctx, do, dlse=None, _=None):
        if do is None and dlse is None:
            return (None,) * 7
        buffer, *inputs = ctx.saved_tensors
        inputs, outputs = inputs[:6], inputs[6:]
        if torch.is_grad_enabled():
            with torch.no_grad():
                gradients = ctx.plan.backward(_zeros(do, outputs[0]), dlse, buffer, outputs, inputs)
            gradients = once_differentiable(outputs[0], *gradients)
        else:
            gradients = ctx.plan.backward(_zeros(do, outputs[0]), dlse, buffer, outputs, inputs)
        return None, *gradients, None, None, None


def _zeros(do: Tensor | None, o: Tensor) -> Tensor:
    return torch.zeros_like(o) if do is None else do
