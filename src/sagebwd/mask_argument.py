"""What ``attn_mask`` and ``block_mask`` of a call mean: checked, and read once a mask."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from sagebwd import ops
from sagebwd.masks.held import made_of
from sagebwd.masks.mask import Mask
from sagebwd.masks.remember import Memory
from sagebwd.masks.tiles import tiles_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

T = TypeVar("T")
_memory = Memory()
_SHAPES = "(batch or 1, heads or 1, tokens or 1, kv_tokens or 1)"


def read_block_mask(block_mask: BlockMask) -> Mask:
    """What a BlockMask of ``torch.nn.attention.flex_attention`` shows, for ``sage_attention(..., block_mask=)``.

    `sage_attention` reads a BlockMask itself, once. Under torch.compile, which cannot call its mask_mod, read it
    outside and pass the result. Only tiles of 128 x 128 that it shows in part are stored, a byte an element.

    Raises TypeError for anything else.
    """
    if not _is_block_mask(block_mask):
        raise TypeError(f"block_mask: expected a BlockMask, got {type(block_mask).__name__}")
    return _memory.get(made_of(None, block_mask), "tiles", lambda: tiles_of(block_mask))


def read(
    attn_mask: Tensor | None, elements: Tensor | None, block_mask: BlockMask | Mask | None, query: Tensor, key: Tensor
) -> tuple[Tensor | None, Mask | None]:
    """The keys that count, (batch, kv_tokens) bool, and the mask where there is more to it than keys; None for all.

    Args: query and key in four dimensions; elements, `elements_of` attn_mask.

    Raises TypeError, ValueError and NotImplementedError, each naming the argument.
    """
    shape = *query.shape[:3], key.shape[2]
    if attn_mask is None and block_mask is None:
        return None, None
    if 0 in shape:
        return None, None
    padding = elements is not None and is_key_padding(elements)
    if block_mask is None:
        if padding:
            return elements[:, 0, 0].expand(shape[0], shape[3]), None
        blocks, keys = _once((attn_mask,), shape, lambda: _of_tensor(elements, shape))
        return keys, Mask(elements, None, blocks, keys)
    if elements is not None and not padding:
        raise NotImplementedError(
            f"attn_mask: {attn_mask.dtype} of shape {tuple(attn_mask.shape)} beside a block_mask is not supported; "
            "accepted there: boolean key padding (batch or 1, 1, 1, kv_tokens). Put the rest into the BlockMask's "
            "mask_mod, or give attn_mask alone"
        )
    mask = _checked_block_mask(block_mask, shape, key.device)
    made_of = (mask.blocks,) if elements is None else (mask.blocks, attn_mask)
    keys = _once(made_of, shape, lambda: _keys(mask.keys, shape, None if elements is None else elements[:, 0, 0]))
    return keys, mask


def is_key_padding(mask: Tensor) -> bool:
    """Whether a mask in four dimensions is boolean and the same for all heads and queries, by its strides."""
    return mask.dtype == torch.bool and all(mask.shape[dim] == 1 or mask.stride(dim) == 0 for dim in (1, 2))


def in_four_dimensions(mask: Tensor, query: Tensor, enable_gqa: bool) -> Tensor:
    """A mask that broadcasts to (..., tokens, kv_tokens) for the four dimensions that `sage_attention` makes of query.

    Raises ValueError where it has more dimensions than query or does not broadcast to what is before tokens.
    """
    if not 2 <= mask.dim() <= query.dim():
        raise ValueError(
            f"attn_mask: shape {tuple(mask.shape)} has no dimensions that broadcast to query's {tuple(query.shape)}"
        )
    mask = mask[(None,) * (query.dim() - mask.dim())]
    if not _broadcast(mask.shape[:-2], query.shape[:-2]):
        raise ValueError(f"attn_mask: shape {tuple(mask.shape)} does not broadcast to query's {tuple(query.shape)}")
    if query.dim() > 4:
        before = mask.shape[:-3]
        before = (1,) * len(before) if all(n == 1 for n in before) else query.shape[:-3]
        return mask.expand(*before, *mask.shape[-3:]).flatten(0, -4)
    if query.dim() == 3 and not enable_gqa:
        return mask.unsqueeze(1)
    return mask[(None,) * (4 - query.dim())]


def _once(objects: tuple, shape: tuple[int, ...], make: Callable[[], T]) -> T:
    """`Memory.get` where there are objects: a trace has none."""
    return make() if torch.compiler.is_compiling() else _memory.get(objects, shape, make)


def _of_tensor(elements: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    blocks, keys = ops.mask_blocks(elements)
    return blocks, _keys(keys, shape)


def _keys(keys: Tensor, shape: tuple[int, ...], padding: Tensor | None = None) -> Tensor:
    keys = keys if padding is None else keys & padding
    return keys.expand(shape[0], shape[3]).contiguous()


def elements_of(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """An attn_mask in four dimensions, with one of what is expanded. Raises TypeError and ValueError."""
    if mask is None:
        return None
    shape, device = (*query.shape[:3], key.shape[2]), key.device
    if _is_block_mask(mask) or isinstance(mask, Mask):
        raise TypeError("attn_mask: expected a tensor or None, got a BlockMask; pass it as block_mask=")
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask: expected a tensor or None, got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"attn_mask: dtype {mask.dtype} is not supported; accepted: bool, True where a query sees a key, or a "
            "floating-point dtype, which is added to the scores"
        )
    if not (2 <= mask.dim() <= 4 and _broadcast(mask.shape[::-1], shape[::-1])):
        raise ValueError(
            f"attn_mask: shape {tuple(mask.shape)} does not broadcast to {tuple(shape)}; accepted: {_SHAPES}, or its "
            "last two or three dimensions"
        )
    if mask.device != device:
        raise ValueError(f"attn_mask: device {mask.device} differs from key's {device}")
    mask = mask[(None,) * (4 - mask.dim())]
    expanded = tuple(slice(1) if stride == 0 else slice(None) for stride in mask.stride())
    return mask[expanded]


def _checked_block_mask(block_mask: BlockMask | Mask, shape: tuple[int, ...], device: torch.device) -> Mask:
    if not isinstance(block_mask, Mask):
        if not _is_block_mask(block_mask):
            raise TypeError(f"block_mask: expected a BlockMask or None, got {type(block_mask).__name__}")
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "block_mask: a BlockMask cannot be read under torch.compile; pass "
                "sagebwd.read_block_mask(block_mask), made outside of what is compiled"
            )
        tokens = tuple(block_mask.seq_lengths)
        if tokens != tuple(shape[2:]):
            raise ValueError(f"block_mask: made for {tokens} queries and keys, called with {tuple(shape[2:])}")
        block_mask = read_block_mask(block_mask)
    sizes = *block_mask.tiles.shape[:2], block_mask.keys.shape[1]
    if not _broadcast(sizes[:2], shape[:2]) or sizes[2] != shape[3]:
        raise ValueError(
            f"block_mask: of batch {sizes[0]}, {sizes[1]} heads and {sizes[2]} keys does not fit a call of batch "
            f"{shape[0]}, {shape[1]} heads and {shape[3]} keys; batch and heads may be 1"
        )
    if block_mask.elements.device != device:
        raise ValueError(f"block_mask: device {block_mask.elements.device} differs from key's {device}")
    return block_mask


def _broadcast(sizes: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether each size is 1 or the other's; by ``==``, since dynamo does not find a symbolic size by ``in``."""
    return all(n == 1 or n == full for n, full in zip(sizes, to))


def _is_block_mask(x: object) -> bool:
    """Whether x is torch's BlockMask; its module takes long to import, and whoever has one has imported it."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(x, module.BlockMask)
