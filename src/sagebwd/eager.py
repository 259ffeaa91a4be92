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
from sagebwd.kernels.table import BACKWARD, FORWARD
from sagebwd.masks.held import Addresses, Held, callers_of, made_of, tensors_in
from sagebwd.masks.mask import Mask
from sagebwd.masks.remember import Memory
from sagebwd.ops import once_differentiable
from sagebwd.recipe import AUTO, Recipe
from sagebwd.sinks import epilogue

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from sagebwd.kernels.host.replay import Recording

CONTIGUOUS = torch.contiguous_format

# As `replay.MOST_CALLS`.
MOST_KINDS = 1024
PLAIN = (Tensor, torch.nn.Parameter)
# Addresses that kernels take as they are (`sagebwd.kernels.host.alignment`), and where pieces of the buffer begin.
TAKEN, ALIGNMENT = 16, 512
# None after a kind's first call.
_plans: dict[Hashable, Plan | Handed | None] = {}
# Of masks: by the kind of call what was made of one.
_masks = Memory()


def kind_of(
    tensors: tuple[Tensor | None, ...], recipe: str | Recipe, window: tuple[int, int] | None, *settings: Hashable
) -> Hashable | None:
    """What a call's checks and launches follow from; None where it must take the operators.

    Args: tensors, q, k, v, key_mask, cu_seqlens_q, cu_seqlens_k, and sinks if there may be any; settings, all that a
    call was given beside.
    """
    if torch.compiler.is_compiling():
        return None
    q, k, v, mask, cu_seqlens_q, cu_seqlens_k, *sinks = tensors
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or checks.is_divided()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or (recipe.__class__ is not str and recipe.__class__ is not Recipe)
        or (window is not None and window.__class__ is not tuple)
        or q.__class__ not in PLAIN
        or (q.is_cuda and q.get_device() != torch._C._cuda_getDevice())
    ):
        return None
    switched, grad = switches.current, torch.is_grad_enabled()
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
    if recipe.__class__ is str and recipe == AUTO:  # who runs a call depends on whether it trains
        kind.append(grad and any(map(_trains, (q, k, v, *sinks))))
    kind.append(grad and mask is not None and mask.requires_grad)  # which kernels have no place for
    kind += q is k, k is v, q is v, cu_seqlens_q is cu_seqlens_k, _casts(q)
    return tuple(kind)


def _trains(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad


def _casts(q: Tensor) -> bool:
    """Whether autocast is on and casts to another dtype."""
    if not torch._C._is_any_autocast_enabled():
        return False
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


def held_of(kind: Hashable, attn_mask: Tensor | None, block_mask: BlockMask | Mask | None) -> Held | None:
    """How to do a call of this kind again under a mask, if it was seen and not written to since."""
    if kind is None:
        return None
    try:
        return _masks.known(made_of(attn_mask, block_mask), kind)
    except TypeError:  # of what cannot be hashed or is no mask, which checks will refuse
        return None


def remember_masked(
    kind: Hashable, given: tuple, arguments: tuple, mask: Mask, block_mask: BlockMask | Mask | None, *, with_lse: bool
) -> None:
    """`remember` for calls under a mask that is more than key padding: a plan serves all masks that are alike.

    Args: given, arguments as of `remember`; mask, as it was read.
    """
    q, k, v, key_mask, *rest, recipe, impl, deterministic = arguments
    attn_mask, sinks = given[3], given[6]
    if any(a is not b for a, b in zip(given, arguments[:3])):
        return  # cast
    choice = dispatch.named(Recipe.parse(recipe), impl)
    mask = mask._replace(keys=key_mask)  # as the operator has it
    call = Call.of(q, k, (q.shape[-1], v.shape[-1]), key_mask, *rest, choice.recipe, deterministic, mask)
    forward = dispatch.recorded_forward(choice, call, q, k, v)
    if forward is None or any(make is torch.zeros for make, *_ in forward.memory):
        return
    read = list(tensors_in(dispatch.prepared(FORWARD, choice, call)))
    alone = {id(x): x for x in (q, k, v, sinks) if x is not None}.values()
    addresses = {x.data_ptr() for x in alone}
    if len(addresses) < len(alone) or addresses & {x.data_ptr() for x in read}:
        return  # two begin at one address, and need not the next time
    alike = kind, id(forward)  # which the plan keeps
    if alike not in _plans:
        if len(_plans) >= MOST_KINDS:
            _plans.clear()
        _plans[alike] = Plan(choice, call, forward, with_lse)
    held = Held(_plans[alike], key_mask, mask, read, callers_of(attn_mask, block_mask))
    _masks.keep(made_of(attn_mask, block_mask), kind, held)


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
    tensors = {id(x): x for x in (*arguments[:6], *given[6:]) if x is not None}
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
        # no tensor is kept
        self.choice = choice
        self.call = call._replace(queries=queries, keys=keys, key_mask=None, mask=None, lists=None)
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

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None, sinks: Tensor | None, held: Held | None = None, callers: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """o, and with lse also lse and k_mean; held and callers, of a mask in place of a key_mask."""
        given = q, k, v, sinks, key_mask, cu_seqlens_q, cu_seqlens_k, *callers
        trains = q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
        if trains and torch.is_grad_enabled():
            return _Replayed.apply(self, held, *given)
        return self.run(held, *given)[0]

    def run(
        self, held: Held | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, key_mask: Tensor | None,
        cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, *callers: Tensor,
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:  # fmt: skip
        """The outputs, the buffer, and the weights of sinks."""
        device = self.forward.device
        if held is None:
            addresses = [x.data_ptr() for x in (cu_seqlens_q, cu_seqlens_k, key_mask) if x is not None]
        else:
            addresses = held.forward.at(callers)
        addresses += [q.data_ptr(), k.data_ptr(), v.data_ptr()]
        buffer = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        start, own = buffer.data_ptr(), {}
        for number, (make, shape, dtype) in enumerate(self.forward.memory):
            if number in self.offsets:
                addresses.append(start + self.offsets[number])
            else:
                own[number] = made = make(shape, dtype=dtype, device=device)
                addresses.append(made.data_ptr())
        self.forward.launch(addresses)
        outputs = tuple(own[n] if view is None else own[n].as_strided(*view) for n, view in self.outputs)
        return outputs, buffer, None if sinks is None else self._weigh(q, sinks, cu_seqlens_q, buffer, outputs)

    def _weigh(
        self, q: Tensor, sinks: Tensor, offsets: Tensor | None, buffer: Tensor, outputs: tuple[Tensor, ...]
    ) -> Tensor:
        """The weights of sinks, which are taken into o and lse."""
        k_mean = self._of("k_mean", buffer, outputs) if self.call.recipe.smooth_k else None
        settings = self.call.scale, offsets, self.call.queries.tokens
        with torch.no_grad():
            return epilogue.weigh(outputs[0], self._of("lse", buffer, outputs), q, k_mean, sinks, *settings)

    def gradients(
        self, do: Tensor, dlse: Tensor | None, buffer: Tensor, outputs: tuple[Tensor, ...], inputs: tuple,
        held: Held | None, weight: Tensor | None, sinks_dtype: torch.dtype | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`backward` and, where there are sinks, their gradient, whether or not they need one: it adds to dq."""
        found = self.backward(do, dlse, buffer, outputs, inputs, held)
        if weight is None:
            return found
        k_mean = self._of("k_mean", buffer, outputs) if self.call.recipe.smooth_k else None
        settings = self.call.scale, inputs[4], self.call.queries.tokens
        dsinks = epilogue.gradient(do, dlse, outputs[0], weight, found[0], k_mean, *settings)
        return *found, dsinks.to(sinks_dtype)

    def _of(self, name: str, buffer: Tensor, outputs: tuple[Tensor, ...]) -> Tensor:
        """A tensor that forward saved."""
        return self.saved[Saved._fields.index(name)].of(buffer, outputs)

    def backward(
        self, do: Tensor, dlse: Tensor | None, buffer: Tensor, outputs: tuple[Tensor, ...], inputs: tuple,
        held: Held | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """dq, dk, dv; inputs: q and k where they are kept, v, key_mask, cu_seqlens_q, cu_seqlens_k, and a mask's."""
        q, k, v, key_mask, cu_seqlens_q, cu_seqlens_k, *callers = inputs
        do = do if do.stride(-1) == 1 and do.data_ptr() % TAKEN == 0 else do.clone(memory_format=CONTIGUOUS)
        dlse = None if dlse is None else dlse.clone(memory_format=CONTIGUOUS)  # which has an address of its own
        kind = do.stride(), dlse is None, torch.are_deterministic_algorithms_enabled()
        recording = self.backwards.get(kind)
        if recording is None:
            return self._first_backward(kind, do, dlse, buffer, outputs, inputs, held)
        start = buffer.data_ptr()
        if held is None:
            addresses = [x.data_ptr() for x in (cu_seqlens_q, cu_seqlens_k, key_mask) if x is not None]
        else:
            addresses = self._read_backward(held, callers).at(callers)
        for piece in self.saved:
            if piece is not None:
                addresses.append(start + piece.offset if piece.output is None else outputs[piece.output].data_ptr())
        addresses += [x.data_ptr() for x in (do, dlse, q, k, v) if x is not None]
        return recording.again_at(addresses)

    def _read_backward(self, held: Held, callers: list[Tensor]) -> Addresses:
        """What launches read of a mask."""
        if held.backward is not None:
            return held.backward
        key_mask, mask = held.restored(callers)
        call = dispatch.prepared(BACKWARD, self.choice, self.call._replace(key_mask=key_mask, mask=mask))
        found = Addresses(list(tensors_in(call)), callers)
        if not (key_mask.is_cuda and torch.cuda.is_current_stream_capturing()):  # what is made then is the graph's
            held.backward = found
        return found

    def _first_backward(
        self, kind: Hashable, do: Tensor, dlse: Tensor | None, buffer: Tensor, outputs: tuple, inputs: tuple,
        held: Held | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`backward` until its launches are recorded."""
        q, k, v, key_mask, cu_seqlens_q, cu_seqlens_k, *callers = inputs
        mask = None
        if held is not None:
            key_mask, mask = held.restored(callers)
        queries = self.call.queries._replace(cu_seqlens=cu_seqlens_q)
        keys = self.call.keys._replace(cu_seqlens=cu_seqlens_k)
        deterministic = self.call.deterministic or kind[-1]
        call = self.call._replace(
            queries=queries, keys=keys, key_mask=key_mask, deterministic=deterministic, mask=mask
        )
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
    def forward(ctx, plan, held, q, k, v, sinks, *masks):
        outputs, buffer, weight = plan.run(held, q, k, v, sinks, *masks)
        keep_q, keep_k = plan.keeps
        ctx.plan, ctx.held, ctx.sinks_dtype = plan, held, None if sinks is None else sinks.dtype
        ctx.set_materialize_grads(False)
        kept = q if keep_q else None, k if keep_k else None, v, *masks
        ctx.save_for_backward(buffer, weight, *kept, *outputs)
        ctx.inputs = len(kept)
        if len(outputs) > 1:
            ctx.mark_non_differentiable(outputs[-1])
        return outputs

    @staticmethod
    def backward(ctx, do, dlse=None, _=None):
        count = ctx.inputs + 3
        if do is None and dlse is None:
            return (None,) * count
        buffer, weight, *inputs = ctx.saved_tensors
        inputs, outputs = inputs[: ctx.inputs], inputs[ctx.inputs :]
        do = torch.zeros_like(outputs[0]) if do is None else do
        if not torch.is_grad_enabled():
            gradients = ctx.plan.gradients(do, dlse, buffer, outputs, inputs, ctx.held, weight, ctx.sinks_dtype)
        else:
            with torch.no_grad():
                gradients = ctx.plan.gradients(do, dlse, buffer, outputs, inputs, ctx.held, weight, ctx.sinks_dtype)
            gradients = once_differentiable(outputs[0], *gradients)
        return None, None, *gradients, *(None,) * (count - 2 - len(gradients))
