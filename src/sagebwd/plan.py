"""Plans: all that follows from a call's specification, computed once.

A specification has shapes, strides, dtypes, devices, alignment and settings (`spec_of`); never a value, never the
identity of a user's tensor. A plan says who runs the call, where in its workspace forward leaves what backward reads,
and has the program of each direction (`sagebwd.kernels.runtime.program`). It keeps no tensor. Calls outside of
torch.compile and the operators of `sagebwd.ops` run the same plans.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagebwd import checks, dispatch, switches
from sagebwd.auto import agreement, flops
from sagebwd.auto.counts import answer, handed_over
from sagebwd.cache import TAKEN, Cache, layout_of, rounded
from sagebwd.call import Call, Prologue, Saved, blocks_of_maxima, empty_gradients, empty_like_rows, keeps_inputs
from sagebwd.dispatch import Choice
from sagebwd.kernels.capabilities import BACKWARD, FORWARD
from sagebwd.masks import argument as mask_argument
from sagebwd.masks.elements import Elements, Left, are_first_keys_apart, restored
from sagebwd.masks.mask import Mask
from sagebwd.masks.parts import tensors_in
from sagebwd.masks.traced_block_mask import ELEMENTS, WORDS, WORDS_BY_KEY, TracedBlockMask
from sagebwd.recipe import AUTO, FP8, INT8, Recipe
from sagebwd.reference import sinks as epilogue

PLAIN = (Tensor, torch.nn.Parameter)
# What every call asks torch, without the way there.
STRIDED = torch.strided
_is_traced, _is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_is_deterministic = torch._C._get_deterministic_algorithms
_count_of_modes, _tracing_state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_transforms = torch._C._functorch.peek_interpreter_stack
# Programs of a plan's backward: kinds of dO, and masks whose lists differ in shape.
MOST_PROGRAMS = 32


def kind_of(
    tensors: tuple[Tensor | None, ...], mask: Mask | TracedBlockMask | None, recipe: str | Recipe,
    window: tuple[int, int] | None, settings: tuple[Hashable, ...],
) -> Hashable | None:  # fmt: skip
    """A call's specification but for how q, k and v lie in memory, of which torch's own attention knows.

    None where it must take the operators: modes, subclasses, transforms, tracing; and for q, k and v that do not go
    together, which those refuse. Every call pays for it: what most calls lack is looked for by one comparison.

    Args: tensors, q, k, v, attn_mask, cu_seqlens_q, cu_seqlens_k and sinks, then any others; mask, of a block_mask;
    settings, all else that a call is given.
    """
    if _is_traced():
        return None
    if _count_of_modes():
        flops.register()  # for a mode that counts them
        return None
    q, k, v, attn_mask, cu_seqlens_q, _, sinks = tensors[:7]
    if (
        _tracing_state() is not None
        or _transforms() is not None
        or forward_ad._current_level >= 0
        or checks.is_divided()
        or not (q.__class__ in PLAIN and k.__class__ in PLAIN and v.__class__ in PLAIN)
        or not (q.layout is k.layout is v.layout is STRIDED)
        or (recipe.__class__ is not str and recipe.__class__ is not Recipe)
        or (window is not None and window.__class__ is not tuple)
    ):
        return None
    dtype, device, grad = q.dtype, q.device, _is_grad_enabled()
    if not (k.dtype is v.dtype is dtype and k.device == v.device == device):
        return None
    rest = [grad and (q.is_inference() or k.is_inference() or v.is_inference())]  # of which copies are saved
    if not (attn_mask is cu_seqlens_q is sinks is None and len(tensors) == 7):
        for x in tensors[3:]:
            if x is None:
                rest.append(None)
            elif (
                x.__class__ not in PLAIN or x.layout is not STRIDED or x.is_nested or x.is_neg()
                or x._is_zerotensor()
            ):  # fmt: skip
                return None
            else:
                rest += x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % TAKEN, grad and x.is_inference()
        rest.append(grad and attn_mask is not None and attn_mask.requires_grad)  # which kernels have no place for
    if window is not None:
        rest += map(type, window)
    if mask.__class__ is TracedBlockMask:
        rest += TracedBlockMask, mask.shape, mask.lists.indices.device
    elif mask is not None:
        elements, tiles, blocks, keys = mask.tensors
        first = elements if tiles is None else tiles
        rest += tiles is None, mask.queries, first.shape, first.stride(), elements.dtype, blocks.shape, keys.shape
        rest += elements.device, first.device, blocks.device, keys.device
    if recipe.__class__ is str and recipe == AUTO:  # who runs a call depends on whether it trains
        trains = grad and (
            q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
        )
        rest += trains, _is_deterministic()
        if q.is_cuda and agreement.due() is not None:
            dispatch.check_agreement(device)
    on = switches.current
    try:
        return (
            recipe, window, settings, *map(type, settings), on.disabled, on.backward_16bit, on.deterministic, q.shape,
            k.shape, v.shape, dtype, device, *rest,
        )  # fmt: skip
    except RuntimeError:  # a nested tensor has no shape
        return None


def laid_out(kind: Hashable | None, tensors: tuple[Tensor | None, ...]) -> Hashable | None:
    """A kind of call with how q, k and v lie: its specification; None where it must take the operators.

    Those know the shapes of tensors on the device meta, and what signs and zeros that torch keeps apart stand for.
    """
    q, k, v = tensors[:3]
    if kind is None or q.is_meta:
        return None
    spec = [kind]
    for x in (q, k, v):
        if x.is_neg() or x._is_zerotensor():
            return None
        spec += x.stride(), x.data_ptr() % TAKEN
    return tuple(spec)


def spec_of(
    tensors: tuple[Tensor | None, ...], mask: Mask | TracedBlockMask | None, recipe: str | Recipe,
    window: tuple[int, int] | None, *settings: Hashable,
) -> Hashable | None:  # fmt: skip
    """A call's specification, or None, by one function; arguments as of `kind_of`."""
    return laid_out(kind_of(tensors, mask, recipe, window, settings), tensors)


class Piece(NamedTuple):
    """A tensor of a workspace: where it begins, its bytes there, its dtype and shape."""

    offset: int
    room: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, workspace: Tensor) -> Tensor:
        """The tensor."""
        size = self.dtype.itemsize
        for n in self.shape:
            size = size * n
        return workspace[self.offset : self.offset + size].view(self.dtype).view(self.shape)


def pieces_of(
    choice: Choice, dims: tuple[int, int], q: Tensor, k: Tensor, sequences: int | None, sinks: bool,
    norm: bool = False, max_logits: bool = False,
) -> tuple[dict[str, Piece], int]:  # fmt: skip
    """What a workspace holds of `sagebwd.call.Saved`, and its bytes.

    Args: q and k, or tensors that lie like them but for their last dimension; sequences, where they are packed; norm,
    whether the call has one of its own (`sagebwd.call.Prologue`).
    """
    recipe, kernels = choice.recipe, choice.forward.impl != "reference"
    rows_q, rows_k = tuple(q.shape[:-1]), tuple(k.shape[:-1])
    packed = sequences is not None
    tokens_q, tokens_k = (rows[::-1] if packed else rows for rows in (rows_q, rows_k))
    (width, _), _ = choice.forms(*dims)
    accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
    wanted: list[tuple[str, torch.dtype, tuple[int, ...], int]] = []
    if kernels and INT8 in (recipe.s, recipe.dk):
        wanted += ("q_int8", torch.int8, (*rows_q, width), 1), ("q_scale", torch.float32, tokens_q, 1)
    if kernels and INT8 in (recipe.s, recipe.dq):
        wanted += ("k_int8", torch.int8, (*rows_k, width), 1), ("k_scale", torch.float32, tokens_k, 1)
    if kernels and recipe.dv == FP8:
        wanted.append(("row_max", torch.float32, tokens_q, 1))
    # `launch_statistics` writes V's mean behind K's
    means = 2 if choice.forward.impl in ("triton", "mma_sync") else 1
    batch = sequences if packed else k.shape[0]
    wanted.append(("k_mean", accumulator, (batch, k.shape[1], dims[0]), means))
    if norm:
        for name, tokens in (("q_inverse_rms", tokens_q), ("k_inverse_rms", tokens_k)):
            wanted.append((name, torch.float32, tokens, 1))
    if sinks:
        wanted.append(("weight", accumulator, tokens_q, 1))
    if max_logits:  # at the end, of which backward, which reads none, need not know
        blocks = blocks_of_maxima(tokens_q[-1], 1 if sequences is None else sequences) if kernels else 1
        wanted.append(("max_logits", accumulator, (*tokens_q[:-1], blocks), 1))
    pieces, end = {}, 0
    for name, dtype, shape, times in wanted:
        size = dtype.itemsize * times
        for n in shape:
            size = size * n
        pieces[name] = Piece(end, size, dtype, shape)
        end = end + rounded(size)
    return pieces, end


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
        self.run = (lambda *given: run(*map(savable, given))) if saves_copies else run


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
        self.keeps = (True, True) if norm else keeps_inputs(call.recipe, choice.backward.impl)
        sequences = queries.batch if call.packed else None
        dims = call.head_dim, call.value_dim
        self.pieces, self.bytes = pieces_of(choice, dims, q, k, sequences, sinks, norm, call.max_logits)
        self.is_empty = q.numel() == 0 or k.numel() == 0
        by_kernels = "reference" not in (choice.forward.impl, choice.backward.impl)
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
        if self.is_empty or self.choice.forward.impl == "reference":
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
        o, lse, *rest = program.run(tensors, workspace)
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
        if self.is_empty or self.choice.backward.impl == "reference":
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
        *gradients, by_block = program.run(tensors)
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
        row = self.choice.forward if direction == FORWARD else self.choice.backward
        return ELEMENTS if row.impl != "hopper" else WORDS if direction == FORWARD else WORDS_BY_KEY

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
            saved = dispatch.forward(self.choice, call, q, k, v)
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
            gradients = (x.zero_() for x in empty_gradients(call.recipe, call.head_dim, o, v))
            return *gradients, None if saved.weight is None else saved.weight.new_zeros(call.queries.heads)
        with _without_autocast(v.device):
            dq, dk, dv = dispatch.backward(self.choice, call, saved, do, dlse, q, k, v)
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


_AS_IT_IS = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager:
    """Where kernels launch: on x's GPU, whichever is the current one."""
    if not x.is_cuda or x.get_device() == torch._C._cuda_getDevice():
        return _AS_IT_IS
    return torch.cuda.device(x.device)


def savable(x: Tensor | None) -> Tensor | None:
    """x, or a copy where it was made in inference mode: autograd saves no such tensor."""
    return x.clone() if x is not None and x.is_inference() else x


class SageAttention(torch.autograd.Function):
    """A plan and its derivative, by whose name profilers call them; prologue: the fields of a `Prologue`, or none."""

    @staticmethod
    def forward(ctx, plan, mask, with_lse, q, k, v, sinks, key_mask, cu_seqlens_q, cu_seqlens_k, *prologue):
        """`Plan.forward`; o alone but ``with_lse``: autograd wraps every output, and again when it is unpacked."""
        masks, before = (key_mask, mask, cu_seqlens_q, cu_seqlens_k), Prologue(*prologue) if prologue else None
        with device_of(q):
            o, lse, workspace = plan.forward(q, k, v, sinks, *masks, before, True)
        keep_q, keep_k = plan.keeps
        ctx.plan, ctx.settings, ctx.sinks_dtype = plan, prologue[:2], None if sinks is None else sinks.dtype
        ctx.weights = len(prologue[2:])
        # a mask that the user has read stays as it is; of others autograd watches what backward reads for writes
        ctx.mask, watched = (mask, [None]) if mask is None or mask.is_kept else mask.without_watched()
        ctx.set_materialize_grads(False)
        inputs = q if keep_q else None, k if keep_k else None, v
        rest = key_mask, cu_seqlens_q, cu_seqlens_k, *prologue[2:], *watched
        ctx.save_for_backward(*map(savable, inputs), o, lse, workspace, *map(savable, rest))
        if not with_lse:
            return o
        ctx.mark_non_differentiable(workspace)
        return o, lse, workspace

    @staticmethod
    def backward(ctx, do, dlse=None, _=None):
        """`Plan.backward`."""
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, o, lse, workspace, key_mask, cu_seqlens_q, cu_seqlens_k, *tensors = ctx.saved_tensors
        tensors, watched = tensors[: ctx.weights], tensors[ctx.weights :]
        mask = ctx.mask if watched[0] is None else ctx.mask.with_watched(watched)
        do = torch.zeros_like(o) if do is None else do
        prologue = Prologue(*ctx.settings, *tensors) if ctx.settings else None
        create_graph = torch.is_grad_enabled()
        with torch.no_grad() if create_graph else _AS_IT_IS, device_of(v):
            masks = key_mask, mask, cu_seqlens_q, cu_seqlens_k
            dq, dk, dv, *weights, dsinks = ctx.plan.backward(do, dlse, q, k, v, o, lse, workspace, *masks, prologue)
        weights = [None if x is None else dx.to(x.dtype) for x, dx in zip(tensors, weights)]
        gradients = [dq, dk, dv, dsinks.to(ctx.sinks_dtype) if ctx.needs_input_grad[6] else None, *weights]
        if create_graph:
            gradients = once_differentiable((o, do, dlse), gradients)
        rest = (None, None, *gradients[4:], *(None,) * 4) if ctx.settings else ()
        return None, None, None, *gradients[:4], None, None, None, *rest


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients as they are; who differentiates them again is told."""

    @staticmethod
    def forward(ctx, gradients, *causes):
        return tuple(gradient.clone() for gradient in gradients)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "second derivatives of sagebwd's attention (create_graph=True, a gradient penalty) are not supported; use "
            "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def once_differentiable(
    causes: Iterable[Tensor | None], gradients: Iterable[Tensor | None]
) -> list[Tensor | None]:  # fmt: skip
    """Gradients that raise NotImplementedError where they are differentiated again.

    causes: all that they depend on, or what depends on that itself: autograd asks no node which leads only elsewhere.
    The output stands for every input of a call, but not for what came to its backward: dO depends on what is behind.
    """
    gradients = list(gradients)
    found = iter(_OnceDifferentiable.apply([x for x in gradients if x is not None], *causes))
    return [None if x is None else next(found) for x in gradients]
