"""What ``attn_mask`` and ``block_mask`` of a call mean: checked and read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sagebwd import checks
from sagebwd.kernels.masks import sm90_block_lists
from sagebwd.kernels.masks.blocks import of_tensor
from sagebwd.kernels.masks.traced_block_mask import TracedBlockMask, refuse_in_capture
from sagebwd.masks.kinds import WORDS, WORDS_BY_KEY
from sagebwd.masks.mask import Mask
from sagebwd.masks.parts import PartsOfCall
from sagebwd.masks.tiles import elements_of_block_mask, tiles_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from sagebwd.dispatch import Choice

_SHAPES = "(batch or 1, heads or 1, tokens or 1, kv_tokens or 1)"


def read_block_mask(block_mask: BlockMask) -> Mask:
    """What a BlockMask of ``torch.nn.attention.flex_attention`` shows, for ``sage_attention(..., block_mask=)``.

    `sage_attention` reads a BlockMask itself, in every call: read it here once for all layers and steps that share it.
    Reading waits for the device. What the BlockMask and its mask_mod show later is not seen. A CUDA graph needs the
    result as long as it is replayed.

    Args: block_mask, of blocks of any size, batch or 1 and heads or 1.

    Returns: an object that can be sliced along the batch, moved by ``to``, copied and pickled. It shows the same, and
    stores tiles of 128 x 128 that are shown in part, a byte an element.

    Raises TypeError for anything else, ValueError for lists of fewer rows than there are blocks of queries.
    """
    if not is_block_mask(block_mask):
        raise TypeError(f"block_mask: expected a BlockMask, got {type(block_mask).__name__}")
    _check_rows(block_mask)
    return _read_block_mask(block_mask).kept()


def _check_rows(block_mask: BlockMask) -> None:
    """Raises ValueError where lists have fewer rows than the queries need."""
    rows, size, queries = block_mask.kv_indices.shape[2], block_mask.BLOCK_SIZE[0], block_mask.seq_lengths[0]
    if rows * size < queries:
        raise ValueError(
            f"block_mask: {rows} rows of blocks of {size} queries for {queries} queries; give all of them"
        )


def read_mask(attn_mask: Tensor) -> Mask:
    """A mask of elements, for ``sage_attention(..., block_mask=)``: read once for all calls that share it.

    Args: attn_mask, (batch or 1, heads or 1, tokens, kv_tokens), or the last two or three of these: boolean, True
    where a query sees a key, or floating point, added to the scaled scores.

    Returns: an object as of `read_block_mask`, with a copy: what is written to attn_mask later is not seen.

    Raises TypeError and ValueError for anything else.
    """
    _check_elements(attn_mask, "a tensor")
    if not 2 <= attn_mask.dim() <= 4:
        raise ValueError(
            f"attn_mask: shape {tuple(attn_mask.shape)} has {attn_mask.dim()} dimensions; accepted: 2 to 4"
        )
    with torch.inference_mode(False), torch.no_grad():  # it may be saved for a backward
        elements = _once_where_expanded(attn_mask[(None,) * (4 - attn_mask.dim())]).clone()
        return of_tensor(elements).kept()


def _read_block_mask(block_mask: BlockMask) -> Mask:
    with torch.inference_mode(False), torch.no_grad():
        traced = TracedBlockMask.of(block_mask, block_mask.kv_indices.device)
        return tiles_of(block_mask) if traced is None else traced.counted()


def read(
    attn_mask: Tensor | None, elements: Tensor | None, mask: Mask | TracedBlockMask | None, query: Tensor,
    key: Tensor, *, by_key: bool = False, choice: Choice | None = None,
) -> tuple[Tensor | None, Mask | None]:  # fmt: skip
    """The keys that count, (batch, kv_tokens) bool, and the mask where there is more to it than keys; None for all.

    Args: query and key in four dimensions; elements, `elements_of` attn_mask; mask, `given` block_mask; by_key,
    whether a backward will read it; choice, who runs the call, where that is known.

    Raises NotImplementedError, naming the argument.
    """
    shape = *query.shape[:3], key.shape[2]
    if (attn_mask is None and mask is None) or 0 in shape:
        return None, None
    padding = elements is not None and is_key_padding(elements)
    if mask is None:
        if padding:
            return elements[:, 0, 0].expand(shape[0], shape[3]), None
        words = (None, None) if choice is None else (choice.forward.mask_form, choice.backward.mask_form)
        by_query, reads_by_key = words[0] == WORDS, words[1] == WORDS_BY_KEY
        if by_query or reads_by_key:
            by_key = by_key and reads_by_key
            mask = sm90_block_lists.read(elements, shape[0], shape[2:], by_query=by_query, by_key=by_key)
            return _keys(mask.keys, shape), mask
        blocks, keys = torch.ops.sagebwd.mask_blocks(elements)
        parts = None if torch.compiler.is_compiling() else PartsOfCall()
        return _keys(keys, shape), Mask(elements, None, blocks, keys, parts)
    if elements is not None and not padding:
        raise NotImplementedError(
            f"attn_mask: {attn_mask.dtype} of shape {tuple(attn_mask.shape)} beside a block_mask is not supported; "
            "accepted there: boolean key padding (batch or 1, 1, 1, kv_tokens). Put the rest into the BlockMask's "
            "mask_mod, or give attn_mask alone"
        )
    if mask.__class__ is TracedBlockMask:
        mask = mask.counted().with_parts(PartsOfCall())
    elif torch.compiler.is_compiling():
        mask = mask.with_parts(None)
    else:
        mask.arrive()
    if elements is not None:  # whose values belong to this call
        parts = None if mask.parts is None else PartsOfCall()
        return _keys(mask.keys, shape, elements[:, 0, 0]), mask.with_parts(parts)
    return keys_of(mask, shape[0], shape[3]), mask


def keys_of(mask: Mask, batch: int, tokens_k: int) -> Tensor:
    """Which keys any query sees, (batch, kv_tokens) bool."""
    return mask.made(("keys", batch, tokens_k), lambda: mask.keys.expand(batch, tokens_k).contiguous())


def is_key_padding(mask: Tensor) -> bool:
    """Whether a mask in four dimensions is boolean and the same for all heads and queries, by its strides."""
    return mask.dtype == torch.bool and all(mask.shape[dim] == 1 or mask.stride(dim) == 0 for dim in (1, 2))


def in_four_dimensions(mask: Tensor, query: Tensor, enable_gqa: bool) -> Tensor:
    """A mask that broadcasts to (..., tokens, kv_tokens) for the four dimensions that `sage_attention` makes of query.

    Raises ValueError where it has more dimensions than query or does not broadcast to what is before tokens.
    """
    checks.strided("attn_mask", mask)
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


def _keys(keys: Tensor, shape: tuple[int, ...], padding: Tensor | None = None) -> Tensor:
    keys = keys if padding is None else keys & padding
    return keys.expand(shape[0], shape[3]).contiguous()


def elements_of(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """An attn_mask in four dimensions, with one of what is expanded. Raises TypeError and ValueError."""
    if mask is None:
        return None
    shape, device = (*query.shape[:3], key.shape[2]), key.device
    if is_block_mask(mask) or isinstance(mask, Mask):
        raise TypeError("attn_mask: expected a tensor or None, got a BlockMask; pass it as block_mask=")
    _check_elements(mask, "a tensor or None")
    if not (2 <= mask.dim() <= 4 and _broadcast(mask.shape[::-1], shape[::-1])):
        raise ValueError(
            f"attn_mask: shape {tuple(mask.shape)} does not broadcast to {tuple(shape)}; accepted: {_SHAPES}, or its "
            f"last two or three dimensions{_with_dimensions(mask, shape)}"
        )
    checks.same_device("attn_mask", mask, device, "key's")
    return _once_where_expanded(mask[(None,) * (4 - mask.dim())])


def _with_dimensions(mask: Tensor, shape: tuple[int, ...]) -> str:
    """What to write for a mask that lacks dimensions within: of (batch, keys), or of (batch, queries, keys)."""
    batch, _, queries, keys = shape
    if tuple(mask.shape) == (batch, keys):
        return "; of key padding pass attn_mask[:, None, None, :]"
    return "; pass attn_mask[:, None]" if tuple(mask.shape) == (batch, queries, keys) else ""


def _check_elements(mask: object, expected: str) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask: expected {expected}, got {type(mask).__name__}")
    checks.strided("attn_mask", mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"attn_mask: dtype {mask.dtype} is not supported; accepted: bool, True where a query sees a key, as "
            "attn_mask.bool() of ones and zeros, or a floating-point dtype, which is added to the scores"
        )


def _once_where_expanded(mask: Tensor) -> Tensor:
    return mask[tuple(slice(1) if stride == 0 else slice(None) for stride in mask.stride())]


def given(block_mask: object, query: Tensor) -> Mask | TracedBlockMask | None:
    """A block_mask as plans take it, unchecked; None for a BlockMask that has to be read now and for anything else."""
    if block_mask.__class__ is Mask:
        return block_mask if isinstance(block_mask.keys, Tensor) else None  # as `check` says
    if torch.compiler.is_compiling() or not (is_block_mask(block_mask) and isinstance(query, Tensor)):
        return None
    return TracedBlockMask.of(block_mask, query.device)


def check(block_mask: object, query: Tensor, key: Tensor) -> None:
    """Raises TypeError and ValueError, each naming the argument, unless a block_mask is one of a call, or None; query
    and key in four dimensions."""
    if block_mask is None:
        return
    shape = *query.shape[:3], key.shape[2]
    if isinstance(block_mask, Mask):
        _check_fits(block_mask, shape, key.device)
        return
    if not is_block_mask(block_mask):
        raise TypeError(f"block_mask: expected a BlockMask or None, got {type(block_mask).__name__}")
    tokens = tuple(block_mask.seq_lengths)
    if tokens != tuple(shape[2:]):
        raise ValueError(f"block_mask: made for {tokens} queries and keys, called with {tuple(shape[2:])}")
    _check_rows(block_mask)
    sizes = block_mask.kv_num_blocks.shape
    if not _broadcast(sizes[:2], shape[:2]):
        raise ValueError(
            f"block_mask: made for batch {sizes[0]} and {sizes[1]} heads, called with batch {shape[0]} and "
            f"{shape[1]} heads; either may be 1"
        )
    _check_device(block_mask.kv_num_blocks, key.device)


def read_now(block_mask: BlockMask) -> Mask:
    """A BlockMask as it is read now, for one call; in a graph of torch.compile its elements, a byte each.

    Raises NotImplementedError while a CUDA graph is captured.
    """
    if block_mask.__class__ is Mask:
        return block_mask
    if torch.compiler.is_compiling():
        elements = elements_of_block_mask(block_mask)
        blocks, keys = torch.ops.sagebwd.mask_blocks(elements)
        return Mask(elements, None, blocks, keys)
    if block_mask.kv_num_blocks.is_cuda and torch.cuda.is_current_stream_capturing():
        name = getattr(block_mask.mask_mod, "__qualname__", None) or type(block_mask.mask_mod).__name__
        refuse_in_capture(f"whose mask_mod, {name}, kernels do not compute,")
    return _read_block_mask(block_mask).with_parts(PartsOfCall())


def _check_fits(mask: Mask, shape: tuple[int, ...], device: torch.device) -> None:
    """Raises ValueError unless a mask is one of a call: batch, heads, queries and keys, on a device."""
    lists = mask.elements if mask.tiles is None else mask.tiles
    for x in (lists, mask.blocks, mask.keys):
        if not isinstance(x, Tensor):
            raise TypeError(f"block_mask: pytree code put {type(x).__name__} in place of its tensors")
    mask.check_dtypes()
    batch, heads, queries, keys = mask.shape
    if mask.tiles is None:
        fits = _broadcast(mask.elements.shape, shape)
    else:
        fits = _broadcast((batch, heads), shape[:2]) and (queries, keys) == shape[2:]
    if not fits:
        raise ValueError(
            f"block_mask: of batch {batch}, {heads} heads, {queries} queries and {keys} keys does not fit a call of "
            f"batch {shape[0]}, {shape[1]} heads, {shape[2]} queries and {shape[3]} keys; batch and heads may be 1. "
            "Of some elements of the batch it is block_mask[begin:end]"
        )
    found = (lists.shape[:2], (mask.keys.shape[0],)), (mask.blocks.shape[:2], (lists.shape[0],))
    if found[0] != found[1]:
        raise ValueError(
            f"block_mask: its tensors are of batches {lists.shape[0]}, {mask.blocks.shape[0]} and "
            f"{mask.keys.shape[0]}; cut all of them alike, as block_mask[begin:end] does"
        )
    for x in mask.tensors:
        if x is not None:
            _check_device(x, device)


def _check_device(x: Tensor, device: torch.device) -> None:
    checks.same_device("block_mask", x, device, "key's", f"; move it by block_mask.to({str(device)!r})")


def _broadcast(sizes: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether each size is 1 or the other's; by ``==``, since dynamo does not find a symbolic size by ``in``."""
    return all(n == 1 or n == full for n, full in zip(sizes, to))


def is_block_mask(x: object) -> bool:
    """Whether x is torch's BlockMask; its module takes long to import, and whoever has one has imported it."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(x, module.BlockMask)
