"""A mask as the portable kernels read it: the lists that their tiles want, and a kernel's one argument."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from sagebwd.cache import TAKEN
from sagebwd.call import Call
from sagebwd.kernels.common.strided import ANY, ONE, counted_as_any
from sagebwd.kernels.masks.lists import Listed, Lists, listed
from sagebwd.kernels.portable.config import list_tile, shares_maxima
from sagebwd.kernels.runtime import device
from sagebwd.masks.band import Band
from sagebwd.masks.mask import TILE
from sagebwd.recipe import INT8


def of_forward(call: Call) -> Lists:
    """For the forward of a call with a mask."""
    return Lists(_listed(call, "forward", call.recipe.first_keys if call.recipe.o == INT8 else 0))


def of_backward(call: Call) -> Lists:
    """For the backward of a call with a mask."""
    return Lists(_listed(call, "dq"), _listed(call, "dkdv_given" if shares_maxima(call) else "dkdv"))


def _listed(call: Call, kernel: str, first_keys: int = 0) -> Listed:
    tokens = call.queries.tokens, call.keys.tokens
    tile, by_key = list_tile(kernel, call.head_dim, call.recipe, device.capability(call.device))
    band = Band.of(call.is_causal, call.window_left, call.window_right)
    found = listed(call.mask, call.key_mask, tokens, band, tile, by_key, first_keys)
    if not found.is_tiled:
        return found
    elements = found.elements
    if elements.data_ptr() % TAKEN or not elements.is_contiguous():  # as a hook of saved tensors gives them back
        elements = elements.clone(memory_format=torch.contiguous_format)
    # kernels go by the tile's number: how many there are is no part of a call's specification
    return found._replace(elements=elements[:1])


class Masked(NamedTuple):
    """A mask as a kernel's one argument: elements, lists, and what the kernel is compiled for.

    Strides follow the lengths, of which kernels of their own would follow: those of lists, and of elements but in an
    EVEN mask, are `counted_as_any`.
    """

    at: Tensor  # elements
    lists: Tensor
    batch: int  # strides of elements: 0 where there is one for all, and of tiles
    head: int
    query: int
    key: int
    list_batch: int
    list_head: int
    list_row: int  # of lists; says how long one is
    BIAS: tl.constexpr  # elements are added to scores
    TILE: tl.constexpr  # queries and keys of a stored tile, 0 without
    EVEN: tl.constexpr
    LIST_ROWS: tl.constexpr
    unit: tl.constexpr  # of strides of elements but the last (`elements`)

    @classmethod
    def of(cls, listed: Listed | None, at_other_lengths: bool = False) -> Masked | None:
        """None without a mask; at_other_lengths: EVEN where it is not and the other way round, to be compiled for."""
        if listed is None:
            return None
        *of_elements, of_key = (0,) * 4 if listed.is_tiled else strides(listed.elements)
        is_even = listed.is_even != at_other_lengths
        if not is_even:
            of_elements = counted_as_any(*of_elements)
        elif at_other_lengths and listed.elements.is_contiguous():  # multiples, as strides of whole tiles are
            of_elements = [-(-x // TAKEN) * TAKEN for x in of_elements]
        of_lists = counted_as_any(*strides(listed.lists)[:2], listed.lists.stride(2))
        compiled_for = listed.elements.is_floating_point(), TILE * listed.is_tiled, is_even, listed.rows
        unit = ONE if is_even else ANY
        return cls(
            listed.elements, listed.lists, *of_elements, of_key, *of_lists, *map(tl.constexpr, compiled_for), unit
        )


def masks_of(call: Call, by_key: bool = False) -> tuple[Tensor | None, Tensor | None, Tensor | None, Masked | None]:
    """What kernels take of masks: of keys, where sequences begin, and elements with lists by query or by key."""
    return call.key_mask, call.queries.cu_seqlens, call.keys.cu_seqlens, Masked.of(_listed_by(call, by_key))


def by_length(call: Call, by_key: bool = False) -> tuple[tuple[int, int] | None, dict[str, Masked]]:
    """What `launch_by_length` takes first; kernels without a mask have one form."""
    listed = _listed_by(call, by_key)
    if listed is None:
        return None, {}
    return (call.queries.tokens, call.keys.tokens), {"mask": Masked.of(listed, at_other_lengths=True)}


def _listed_by(call: Call, by_key: bool) -> Listed | None:
    return None if call.lists is None else call.lists.by_key if by_key else call.lists.by_query


def strides(x: Tensor) -> tuple[int, ...]:
    """Strides, 0 where there is one for all."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride()))
