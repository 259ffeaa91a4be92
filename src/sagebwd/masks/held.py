"""A mask as calls that are made again read it: the addresses of what was made of it, and of what its caller holds.

Nothing here refers to what a caller gives: a mask is freed when its caller lets go of it, and all this with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sagebwd.masks.mask import Mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def made_of(attn_mask: Tensor | None, block_mask: BlockMask | Mask | None) -> tuple[Any, ...]:
    """The objects whose identity and versions say which mask a call has; raises TypeError for what is no mask."""
    found = ()
    if block_mask.__class__ is Mask:
        found = tuple(x for x in block_mask if x is not None)
    elif block_mask is not None:
        found = block_mask, *tensors_of_block_mask(block_mask)
    return found if attn_mask is None else (*found, attn_mask)


def tensors_of_block_mask(block_mask: BlockMask) -> tuple[Tensor, ...]:
    """Which blocks it lists; raises TypeError for what is no BlockMask."""
    try:
        found = (
            block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices,
        )  # fmt: skip
    except AttributeError:
        raise TypeError(f"block_mask: expected a BlockMask, got {type(block_mask).__name__}") from None
    return tuple(x for x in found if x is not None)


def callers_of(attn_mask: Tensor | None, block_mask: BlockMask | Mask | None) -> tuple[Tensor, ...]:
    """The tensors of a call's mask that kernels read as they are given."""
    if block_mask is None:
        return (attn_mask,)
    return tuple(x for x in block_mask if x is not None) if block_mask.__class__ is Mask else ()


class _Part(NamedTuple):
    """A caller's tensor, viewed."""

    caller: int
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, callers: tuple[Tensor, ...]) -> Tensor:
        """The tensor; the caller's own where it is viewed as it lies, which may be remembered."""
        given = callers[self.caller]
        same = (given.shape, given.stride()) == (self.shape, self.stride)
        return given if same else given.as_strided(self.shape, self.stride)


class Addresses:
    """Where tensors lie, of which some are the caller's: these are asked for their address in each call."""

    def __init__(self, tensors: list[Tensor], callers: tuple[Tensor, ...]) -> None:
        self._fixed, self._places, self._kept = [x.data_ptr() for x in tensors], [], []
        given = [x.data_ptr() for x in callers]
        for place, (x, address) in enumerate(zip(tensors, self._fixed)):
            if address in given:
                self._places.append((place, given.index(address)))
            else:
                self._kept.append(x)

    def at(self, callers: tuple[Tensor, ...]) -> list[int]:
        """For these tensors of the caller's."""
        found = self._fixed.copy()
        for place, caller in self._places:
            found[place] = callers[caller].data_ptr()
        return found


class Held:
    """What was made of a mask for a kind of call.

    plan: how to do such a call again. forward, backward: what their launches read of the mask; backward is made when
    it is first wanted.
    """

    def __init__(
        self, plan: Any, key_mask: Tensor, mask: Mask, forward: list[Tensor], callers: tuple[Tensor, ...]
    ) -> None:
        self.plan, self._parts = plan, [_part(x, callers) for x in (key_mask, *mask)]
        self.forward, self.backward = Addresses(forward, callers), None

    def restored(self, callers: tuple[Tensor, ...]) -> tuple[Tensor, Mask]:
        """The keys that count, and the mask."""
        key_mask, *mask = (x.of(callers) if isinstance(x, _Part) else x for x in self._parts)
        return key_mask, Mask(*mask)


def tensors_in(x: Any) -> Iterator[Tensor]:
    """The tensors of named tuples in named tuples, in their order."""
    if isinstance(x, Tensor):
        yield x
    elif hasattr(x, "_fields"):
        for field in x:
            yield from tensors_in(field)


def _part(x: Tensor | None, callers: tuple[Tensor, ...]) -> Tensor | _Part | None:
    for number, caller in enumerate(callers):
        if x is not None and x.data_ptr() == caller.data_ptr():
            return _Part(number, x.shape, x.stride())
    return x
