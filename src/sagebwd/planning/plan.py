"""A plan: who runs the calls of one specification, where forward leaves what backward reads, the programs of both.

A specification is of `sagebwd.planning.specification`, where what forward leaves lies of `sagebwd.planning.workspace`,
a program of `sagebwd.kernels.runtime.program`. A plan keeps no tensor. Calls outside of torch.compile and the
operators of `sagebwd.ops` run the same plans.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd import checks, dispatch
from sagebwd import sinks as epilogue
from sagebwd.auto.contenders import handed_over
from sagebwd.cache import TAKEN, Cache, layout_of
from sagebwd.call import Call, Prologue, Saved, empty_gradients, empty_like_rows, keeps_inputs
from sagebwd.counts import answer
from sagebwd.derivatives import savable
from sagebwd.dispatch import Choice
from sagebwd.kernels.capabilities import BACKWARD, FORWARD
from sagebwd.kernels.masks.traced_block_mask import TracedBlockMask
from sagebwd.masks.mask import Mask
from sagebwd.masks.parts import tensors_in
from sagebwd.planning import mask_argument
from sagebwd.planning.mask_elements import Elements, Left, are_first_keys_apart, restored
from sagebwd.planning.workspace import pieces_of

# Programs of a plan's backward: kinds of dO, and masks whose lists differ in shape.
MOST_PROGRAMS = 32


class _Read(NamedTuple):
    """What kernels read of a mask: fields of a `Call`, their tensors in order, and how these lie where that varies."""

    fields: dict[str, object]
    tensors: tuple[Tensor, ...]
    layouts: Hashable


_NOTHING = _Read({}, (), None)
# By which a mask that forward's program read keeps what is left of it.
_LEFT = "left"


class SdpaCall:
    """The plan of a call in full precision: a function of q, k, v, the mask, cu_seqlens_q and cu_seqlens_k."""

    def __init__(self, contender: str, run: Callable[..., Tensor], *, saves_copies: bool = False) -> None:
        """contender: of `sagebwd.auto.contenders`, who runs it. saves_copies: of tensors of inference mode."""
        self.answer = handed_over(contender)
        self.run = (lambda *given: run(*savable(*given))) if saves_copies else run


class Plan:
    """The plan of a call that kernels, or the reference, run."""

    def __init__(
        self, choice: Choice, call: Call, q: Tensor, k: Tensor, *, sinks: bool, padding: Tensor | None = None,
        elements: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Of q and k, or of tensors that lie like them; call, of which no tensor is kept; padding, the keys' view.

        elements: an attn_mask in four dimensions that is no padding.
        """
        self.choice, self.packed = choice, call.packed
        self.answer = answer(str(choice.recipe), choice.name)
        queries, keys = (x._replace(cu_seqlens=None) for x in (call.queries, call.keys))
        self.call = call._replace(queries=queries, keys=keys, key_mask=None, mask=None, lists=None, prologue=None)
        norm = call.prologue is not None and call.prologue.eps is not None
        dims = call.head_dim, call.value_dim
        self.keeps = (True, True) if norm else keeps_inputs(call.recipe, choice.backward, dims)
        sequences = queries.batch if call.packed else None
        self.pieces, self.bytes = pieces_of(choice, dims, q, k, sequences, sinks, norm, call.max_logits)
        self.is_empty = q.numel() == 0 or k.numel() == 0
        by_kernels = not (choice.forward.in_torch or choice.backward.in_torch)
        self.describes_masks = by_kernels and not are_first_keys_apart(choice, call)
        self.padding = None if padding is None else (padding.shape, padding.stride())
        self.elements = None if elements is None or self.is_empty else Elements.of(elements, choice, call)
        self.programs = Cache(MOST_PROGRAMS)

    def masks_of(
        self, attn_mask: Tensor | None, mask: Mask | TracedBlockMask | None, q: Tensor, k: Tensor, *, trains: bool
    ) -> tuple[Tensor | None, Mask | TracedBlockMask | None]:
        """The keys that count, or None for the mask's own, and the mask where there is more to it, as they are now."""
        if attn_mask is None:
            return None, mask
        if self.padding is not None and mask is None:
            return attn_mask.as_strided(*self.padding), None
        if self.elements is not None and mask is None:  # which the programs read
            return None, self.elements.unread(attn_mask)
        elements = mask_argument.elements_of(attn_mask, q, k)
        return mask_argument.read(attn_mask, elements, mask, q, k, by_key=trains, choice=self.choice)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, key_mask: Tensor | None, mask: Mask | None,
        cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, prologue: Prologue | None = None,
        trains: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """O, lse of the smoothed scores, and the workspace; prologue: what the plan's call had, of other values.

        trains: whether a backward will read what is left of a mask's elements.
        """
        if cu_seqlens_q is not None and not cu_seqlens_q.is_cuda:
            checks.packing_values(cu_seqlens_q, "cu_seqlens_q", q.shape[0], self.call.queries.tokens)
            checks.packing_values(cu_seqlens_k, "cu_seqlens_k", k.shape[0], self.call.keys.tokens)
        traced = None
        if mask.__class__ is TracedBlockMask:
            traced, mask = self._as_read(FORWARD, mask)
        workspace = torch.empty(self.bytes, dtype=torch.uint8, device=q.device)
        if self.is_empty or self.choice.forward.in_torch:
            call = self._call(key_mask, mask, cu_seqlens_q, cu_seqlens_k)
            return *self._forward_in_torch(call, q, k, v, sinks, workspace), workspace
        unread = mask is not None and mask.is_unread
        if unread:
            read = _Read({}, (mask.elements,), ("elements", trains))
        elif traced is not None:
            read = _Read({}, traced.tensors, traced.kind)
        else:
            read = _NOTHING if mask is key_mask is None else self._read(FORWARD, mask, key_mask, False)
        given = cu_seqlens_q, cu_seqlens_k, *read.tensors, *(prologue[2:] if prologue else ()), q, k, v, sinks
        tensors = [x for x in given if x is not None]
        program = self.programs.get(read.layouts)
        if program is None:
            call = self._call(None, None, cu_seqlens_q, cu_seqlens_k)._replace(**read.fields, prologue=prologue)
            program = self._forward_program(mask.elements if unread else None, traced, trains, call, q, k, v, sinks)
            self.programs.put(read.layouts, program)
        o, lse, *rest = program.run(tensors, workspace, () if traced is None else traced.numbers)
        if unread and trains:
            mask.parts.keep(_LEFT, Left(*rest[-len(Left._fields) :]))
        return o, lse, workspace

    def backward(
        self, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor, o: Tensor, lse: Tensor,
        workspace: Tensor, key_mask: Tensor | None, mask: Mask | None, cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None, prologue: Prologue | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """dq, dk, dv, and where there are sinks their gradient in lse's dtype; q and k where they are kept.

        With a prologue those of its weights stand between, FP32, None where it has none; q and k where it has a norm.
        """
        deterministic = self.call.deterministic or torch.are_deterministic_algorithms_enabled()
        do, dlse = _in_memory(do, o), _in_memory(dlse, lse)
        traced = None
        if mask.__class__ is TracedBlockMask:
            traced, mask = self._as_read(BACKWARD, mask)
        if self.is_empty or self.choice.backward.in_torch:
            call = self._call(key_mask, mask, cu_seqlens_q, cu_seqlens_k)
            return self._backward_in_torch(call, do, dlse, q, k, v, o, lse, workspace)
        unread = mask is not None and mask.is_unread
        if unread:
            elements, left = self.elements.given_back(mask.elements), mask.parts.known(_LEFT)
            read = _Read({}, (elements, *left), "elements")
        elif traced is not None:
            read = _Read({}, traced.tensors, traced.kind)
        else:
            read = _NOTHING if mask is key_mask is None else self._read(BACKWARD, mask, key_mask, deterministic)
        given = cu_seqlens_q, cu_seqlens_k, *read.tensors, *(prologue[2:] if prologue else ())
        tensors, key = [], [deterministic, dlse is None, read.layouts]
        # all of them: hooks of saved tensors, as those that offload, may give back what forward had in other strides
        for x in (*given, workspace, o, lse, do, dlse, q, k, v):
            if x is not None:
                tensors.append(x)
                key += x.stride(), x.data_ptr() % TAKEN
        key = tuple(key)
        program = self.programs.get(key)
        if program is None:
            call = self._call(None, None, cu_seqlens_q, cu_seqlens_k)
            call = call._replace(deterministic=deterministic, **read.fields, prologue=prologue)
            of_mask = (elements, left, None) if unread else (None, None, traced)
            program = self._backward_program(*of_mask, call, workspace, o, lse, do, dlse, q, k, v)
            self.programs.put(key, program)
        *gradients, by_block = program.run(tensors, None, () if traced is None else traced.numbers)
        if by_block is not None:
            by_block = dispatch.runtime().sinks.sum_of_blocks(by_block, self.call.queries.heads)
        return *gradients, by_block

    def _as_read(self, direction: str, mask: TracedBlockMask) -> tuple[TracedBlockMask | None, Mask | None]:
        """A BlockMask that the program of a direction reads, or else its mask, read now; neither of no tokens."""
        if self.is_empty:
            return None, None
        form = self._form(direction)
        if self.describes_masks and mask.has_room(form):
            return mask, None
        return None, mask.read(self.call.queries.batch, form)

    def _form(self, direction: str) -> str:
        """How the kernels of a direction read tiles of a BlockMask."""
        return (self.choice.forward if direction == FORWARD else self.choice.backward).mask_form

    def _with_mask(self, direction: str, traced: TracedBlockMask, call: Call) -> Call:
        """The call with what its kernels read of a BlockMask; in a description."""
        mask = traced.read(call.queries.batch, self._form(direction))
        return dispatch.prepared(direction, self.choice, call._replace(key_mask=mask.keys, mask=mask))

    def _read(self, direction: str, mask: Mask | None, key_mask: Tensor | None, deterministic: bool) -> _Read:
        """What the kernels of a direction read of a mask: kept with the mask where that is an object of the user's."""
        if mask is None:
            return _Read({"key_mask": key_mask}, (key_mask,), None)

        def make() -> _Read:
            call = self._call(key_mask, mask, None, None)._replace(deterministic=deterministic)
            call = dispatch.prepared(direction, self.choice, call)
            tensors = (call.key_mask, *tensors_in(call.lists))
            layouts = tuple(map(layout_of, tensors))
            return _Read({"key_mask": call.key_mask, "lists": call.lists}, tensors, layouts)

        found = mask.taken if direction == FORWARD else mask.made  # which no backward reads
        return found((self, direction, deterministic), make)

    def _call(
        self, key_mask: Tensor | None, mask: Mask | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
    ) -> Call:
        """The call with its tensors."""
        call = self.call
        if mask is not None:
            mask.arrive()
            if key_mask is None:
                key_mask = mask_argument.keys_of(mask, call.queries.batch, call.keys.tokens)
        queries, keys = call.queries, call.keys
        if self.packed:
            queries, keys = queries._replace(cu_seqlens=cu_seqlens_q), keys._replace(cu_seqlens=cu_seqlens_k)
        return call._replace(queries=queries, keys=keys, key_mask=key_mask, mask=mask)

    def _forward_program(
        self, elements: Tensor | None, traced: TracedBlockMask | None, trains: bool, call: Call,
        *tensors: Tensor | None,
    ) -> object:  # fmt: skip
        """elements: of a mask that is read in it, and if it trains left for backward (`_LEFT`). traced: a BlockMask
        that it reads."""
        family, runtime = dispatch.family(FORWARD, self.choice, call), dispatch.runtime()
        rooms = {Saved._fields.index(name): (piece.offset, piece.room) for name, piece in self.pieces.items()}

        def described(
            elements: Tensor | None, traced: TracedBlockMask | None, call: Call, *tensors: Tensor | None
        ) -> tuple[Tensor | None, ...]:
            if traced is not None:
                return runtime.driver.forward(*family, self._with_mask(FORWARD, traced, call), *tensors)
            if elements is None:
                return runtime.driver.forward(*family, call, *tensors)
            call, left = self.elements.read(elements, call, trains)
            saved = runtime.driver.forward(*family, dispatch.prepared(FORWARD, self.choice, call), *tensors)
            return *saved, *(left if trains else ())

        return runtime.program.Program.of(described, (elements, traced, call, *tensors), rooms)

    def _backward_program(
        self, elements: Tensor | None, left: Left | None, traced: TracedBlockMask | None, call: Call,
        workspace: Tensor, *tensors: Tensor | None,
    ) -> object:  # fmt: skip
        """elements: of a mask of which ``left`` is left. traced: a BlockMask that it reads."""
        family, runtime = dispatch.family(BACKWARD, self.choice, call), dispatch.runtime()

        def described(
            elements: Tensor | None, left: Left | None, traced: TracedBlockMask | None, call: Call, workspace: Tensor,
            o: Tensor, lse: Tensor, *rest: Tensor | None,
        ) -> tuple[Tensor | None, ...]:  # fmt: skip
            if traced is not None:
                call = self._with_mask(BACKWARD, traced, call)
            if elements is not None:
                call = dispatch.prepared(BACKWARD, self.choice, restored(elements, left, call))
            saved = self._saved(o, lse, runtime.driver.contiguous(workspace))
            return runtime.driver.backward(*family, call, saved, *rest)

        return runtime.program.Program.of(described, (elements, left, traced, call, workspace, *tensors))

    def _saved(self, o: Tensor, lse: Tensor, workspace: Tensor) -> Saved:
        """What forward left."""
        there = {name: piece.of(workspace) for name, piece in self.pieces.items()}
        return Saved(o, lse, *(there.get(name) for name in Saved._fields[2:]))

    def k_mean(self, workspace: Tensor) -> Tensor:
        """K's mean, (B, Hkv, D) or (sequences, Hkv, D)."""
        return self.pieces["k_mean"].of(workspace)

    def max_logits(self, workspace: Tensor) -> Tensor:
        """The largest logit of each head, (B, Hq) or (Hq,), of a call that asked for it."""
        return self.pieces["max_logits"].of(workspace).amax(-1)

    def _forward_in_torch(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, workspace: Tensor
    ) -> tuple[Tensor, Tensor]:
        """O and lse by the reference, or of no tokens."""
        if self.is_empty:
            tokens = q.shape[:-1][::-1] if self.packed else q.shape[:-1]
            dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
            workspace.zero_()
            if sinks is not None:
                self.pieces["weight"].of(workspace).fill_(1)
            if self.call.max_logits:
                self.pieces["max_logits"].of(workspace).fill_(float("-inf"))
            o = empty_like_rows(q, v.shape[-1]).zero_()
            return o, torch.full(tokens, float("-inf"), dtype=dtype, device=q.device)
        with _without_autocast(q.device):
            saved = dispatch.module_of(self.choice.forward.module).forward(call, q, k, v)
        mean = saved.k_mean if self.call.recipe.smooth_k else None
        self.k_mean(workspace).copy_(saved.k_mean)
        if self.call.max_logits:
            self.pieces["max_logits"].of(workspace).copy_(saved.max_logits)
        if sinks is not None:
            weight = epilogue.weigh(saved.o, saved.lse, q, mean, sinks, self.call.scale, call.queries.cu_seqlens)
            self.pieces["weight"].of(workspace).copy_(weight)
        return saved.o, saved.lse

    def _backward_in_torch(
        self, call: Call, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor, o: Tensor,
        lse: Tensor, workspace: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """The gradients by the reference, or of no tokens."""
        if workspace.data_ptr() % TAKEN or not workspace.is_contiguous():  # as a hook of saved tensors gives it back
            workspace = workspace.clone(memory_format=torch.contiguous_format)
        saved = self._saved(o, lse, workspace)
        if self.is_empty:
            gradients = (x.zero_() for x in empty_gradients(call.head_dim, o, v))
            return *gradients, None if saved.weight is None else saved.weight.new_zeros(call.queries.heads)
        with _without_autocast(v.device):
            dq, dk, dv = dispatch.module_of(self.choice.backward.module).backward(call, saved, do, dlse, q, k, v)
        if saved.weight is None:
            return dq, dk, dv, None
        mean = saved.k_mean if call.recipe.smooth_k else None
        dsinks = epilogue.gradient(do, dlse, o, saved.weight, dq, mean, call.scale, call.queries.cu_seqlens)
        return dq, dk, dv, dsinks


def _in_memory(x: Tensor | None, like: Tensor) -> Tensor | None:
    """A tensor's gradient with memory of its own, which torch's zeros lack, and with the sign that stands there."""
    return torch.empty_like(like).copy_(x) if x is not None and (x._is_zerotensor() or x.is_neg()) else x


def _without_autocast(device: torch.device) -> AbstractContextManager:
    """Where torch's products are computed as they are asked for."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()
