"""What those who run a call in full precision are given: operands where their kernels read them right, a scale over 0.

On a GPU torch's cuDNN gives NaN or numbers of 1e17 where q, k or v has rows that begin at no multiple of 16 bytes, and
its FlashAttention-2 raises (torch 2.11, H200); a peer may refuse them. So they are copied, and so is dO on its way
back, which gets O's strides: gradients by cuDNN were wrong where dO had other strides than in the first call of its
kind, as if its plan were kept for the strides of q, k and v alone. In a trace too: AOTAutograd makes dO contiguous
where O is a graph's output.

Kernels that take the maximum of scores before they scale them overflow under a scale below 0, and under a mask 0 times
-inf is NaN, on a CPU too. So Q takes the sign: -Q and a scale of 1 are Q and a scale of -1, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from sagebwd.cache import TAKEN
from sagebwd.call import empty_like_rows

# Devices on which torch reads tensors wherever they lie.
ANYWHERE = ("cpu", "meta")
_PLAIN = (Tensor, torch.nn.Parameter)
_OF_A_TRACE = (FakeTensor, FunctionalTensor)
_LIBRARY = torch.library.Library("sagebwd", "FRAGMENT")


def over_zero(scale: float) -> tuple[float | None, float]:
    """A factor of Q, None for 1, and a scale over 0, which together stand for a scale."""
    least = 2.0**-126  # less is 0 in FP32; as a global, a symbol in a trace with dynamic=True, which is made twice
    if scale >= least:
        return None, scale
    return (-1.0, -scale) if scale <= -least else (0.0, 1.0)


def is_looked_at(x: Tensor) -> bool:
    """Whether it matters where a tensor's rows begin: torch fills up those of other widths, which copies them."""
    return x.device.type not in ANYWHERE and x.shape[-1] * x.itemsize % TAKEN == 0


def is_in_place(x: Tensor, begin: int, *, rows: bool = True) -> bool:
    """Whether a tensor is dense along its last dimension from multiples of 16 bytes on; begin: its first byte.

    rows: whether all of its rows have to begin there.
    """
    *outer, last = x.stride()
    return last == 1 and begin % TAKEN == 0 and not (rows and any(s * x.itemsize % TAKEN for s in outer))


def _are_in_place(*tensors: Tensor) -> bool:
    """`is_in_place` of tensors of one dtype, of which every call asks."""
    begins = strides = 0
    for x in tensors:
        *outer, last = x.stride()
        if last != 1:
            return False
        begins |= x.data_ptr()
        for stride in outer:
            strides |= stride
    return not (begins | strides * tensors[0].itemsize) % TAKEN


def moved(x: Tensor) -> Tensor:
    """A copy in place."""
    return empty_like_rows(x).copy_(x)


def placed(run: Callable[..., Tensor], query: Tensor, value: Tensor, factor: float | None) -> Callable[..., Tensor]:
    """``run`` of (query, key, value, ...) that lie in any way, of a query times a factor.

    query, value: of the dtypes, widths and device of all calls. Each call looks where its own lie.
    """
    looks = is_looked_at(query) or is_looked_at(value)
    if factor is None and not looks:
        return run

    def given(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor | None) -> Tensor:
        if factor is not None:
            query = query * factor
        if not looks:
            return run(query, key, value, *rest)
        if not _are_in_place(query, key, value):
            query, key, value = (in_place(x) if is_looked_at(x) else x for x in (query, key, value))
        out = run(query, key, value, *rest)
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(partial(_all_as_output, out.stride()))  # dO
        return out

    return given


def _all_as_output(strides: tuple[int, ...], gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(x if x is None or not is_looked_at(x) else as_output(x, strides) for x in gradients)


def as_output(do: Tensor, strides: Sequence[int]) -> Tensor:
    """dO in place, with the strides of O, which was allocated for it alone."""
    return torch.ops.sagebwd.as_output(do, strides) if torch.compiler.is_compiling() else _as_output(do, strides)


def _as_output(do: Tensor, strides: Sequence[int]) -> Tensor:
    if do.stride() == tuple(strides):
        return _in_place(do)
    if _is_plain(do):
        return _strided(do, strides)
    return torch.ops.sagebwd.strided(do, strides) if isinstance(do, _OF_A_TRACE) else _in_place(do)


def _strided(x: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy with these strides."""
    return _empty_strided(x, strides).copy_(x)


def _empty_strided(x: Tensor, strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


def traced(
    run: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *rest: Tensor | None, factor: float | None
) -> Tensor:
    """``run(query, key, value, ...)`` as `placed`, once and for tensors of any kind, which a trace may hold."""
    if factor is not None:
        query = query * factor
    query, key, value = (in_place(x) if is_looked_at(x) else x for x in (query, key, value))
    out = run(query, key, value, *rest)
    return _GradientInPlace.apply(out) if is_looked_at(value) and out.requires_grad else out


class _GradientInPlace(torch.autograd.Function):
    """An output as it is, whose gradient gets its strides; a trace knows no hooks."""

    @staticmethod
    def forward(ctx, out):
        ctx.strides = out.stride()
        return out.view_as(out)

    @staticmethod
    def backward(ctx, do):
        return as_output(do, ctx.strides)


def mask_in_place(mask: Tensor, keys: int) -> Tensor:
    """A mask that torch reads as it lies, whose rows may have any stride.

    Of each of the keys it has an element of its own: torch's memory-efficient kernel raises at others.
    """
    if mask.device.type in ANYWHERE:
        return mask
    mask = mask.expand(*mask.shape[:-1], keys)
    *outer, _ = mask.stride()
    if 0 in outer:  # of what is there again and again one is enough
        mask = mask[tuple(slice(0, 1 if s == 0 else None) for s in outer)]
    return in_place(mask, rows=False)


def in_place(x: Tensor, *, rows: bool = True) -> Tensor:
    """x where `is_in_place`, else a copy."""
    return torch.ops.sagebwd.in_place(x, rows) if torch.compiler.is_compiling() else _in_place(x, rows)


def _in_place(x: Tensor, rows: bool = True) -> Tensor:
    """In a trace by where a tensor begins in its storage, and copied by an operator.

    torch.compile drops a clone that differs in its first byte alone.
    """
    is_plain = _is_plain(x)
    begin = x.data_ptr() if is_plain else x.storage_offset() * x.itemsize
    if is_in_place(x, begin, rows=rows):
        return x
    if is_plain:
        return moved(x)
    if isinstance(x, _OF_A_TRACE):
        return torch.ops.sagebwd.moved(x)
    return x.clone(memory_format=torch.contiguous_format)  # of another subclass, as DTensor, which lacks the operator


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor has memory of its own."""
    return x.__class__ in _PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(x)


# As torch's own ``contiguous``: a trace has what it calls in its place, which is nothing where x is in place.
_LIBRARY.define("in_place(Tensor(a) x, bool rows=True) -> Tensor(a)")
_LIBRARY.impl("in_place", _in_place, "CompositeImplicitAutograd")
_LIBRARY.impl("in_place", _in_place, "FuncTorchBatchedDecomposition")  # vmap in a graph
_LIBRARY.define("as_output(Tensor(a) do, SymInt[] strides) -> Tensor(a)")
_LIBRARY.impl("as_output", _as_output, "CompositeImplicitAutograd")


@torch.library.custom_op("sagebwd::moved", mutates_args=())
def _moved(x: Tensor) -> Tensor:
    return moved(x)


_moved.register_fake(empty_like_rows)
_moved.register_autograd(lambda ctx, do: do)

torch.library.custom_op("sagebwd::strided", _strided, mutates_args=(), schema="(Tensor x, SymInt[] strides) -> Tensor")
torch.library.register_fake("sagebwd::strided", _empty_strided)
torch.library.register_autograd("sagebwd::strided", lambda ctx, do: (do, None))
