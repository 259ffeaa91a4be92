"""Masks of video, packed documents and images by name, as torch's BlockMask, made of sizes alone.

``create_block_mask`` evaluates a mask for every query and key. Here each query sees a few ranges of keys, and which
blocks these touch and cover is counted by their bounds: memory and time grow with queries, and with the map of blocks
of 128 x 128. The lists are the same, bit for bit. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import index, or_
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

if TYPE_CHECKING:
    from torch.types import Device

BLOCK = 128
UNLIMITED = -1


def causal_frames(
    frames: int, tokens: int, *, chunk: int = 1, first_alone: bool = False, device: Device = None
) -> BlockMask:
    """A causal video: each frame sees itself and the frames before it, each in whole.

    Args:
        frames: of the video; tokens: of a frame.
        chunk: frames that are generated together, and see each other: 3 in CausVid and Self-Forcing.
        first_alone: the first frame is a chunk of its own, as where a video continues an image.
        device: an accelerator, or the CPU without one, unless given.
    """
    return sliding_frames(frames, tokens, (UNLIMITED, 0), chunk=chunk, first_alone=first_alone, device=device)


def diffusion_forcing(
    frames: int, tokens: int, *, chunk: int = 1, first_alone: bool = False, device: Device = None
) -> BlockMask:
    """Frames that have noise levels of their own: each sees itself and the noisy frames before it.

    That is the mask of `causal_frames`, with the same arguments: what sets diffusion forcing apart is the noise. In
    the code of CausVid and Self-Forcing it is ``_prepare_blockwise_causal_attn_mask``.
    """
    return causal_frames(frames, tokens, chunk=chunk, first_alone=first_alone, device=device)


def sliding_frames(
    frames: int, tokens: int, window: tuple[int, int], *, sink: int = 0, chunk: int = 1, first_alone: bool = False,
    device: Device = None,
) -> BlockMask:  # fmt: skip
    """A window over frames: each frame sees those around it in whole, and the first ones of the video.

    Args:
        frames, tokens, chunk, first_alone, device: as in `causal_frames`.
        window: how many frames before and after it a frame sees, -1 for all. All frames of a chunk see what its last
            one sees: Self-Forcing's ``local_attn_size=n`` is ``(n - 1, 0)``.
        sink: that many first frames are seen by all, but not before their own turn.
    """
    _check_at_least(1, frames=frames, tokens=tokens, chunk=chunk)
    _check_at_least(0, sink=sink)
    if not isinstance(window, Sequence) or len(window) != 2:
        raise TypeError(f"window: expected (left, right), frames before and after, got {window!r}")
    left, right = window
    _check_at_least(UNLIMITED, **{"window[0]": left, "window[1]": right})
    _, stop = _chunks(frames, chunk, first_alone, device)
    start = torch.zeros_like(stop) if left == UNLIMITED else (stop - 1 - left).clamp(min=0)
    end = torch.full_like(stop, frames) if right == UNLIMITED else (stop + right).clamp(max=frames)
    starts, ends = [start], [end]
    if sink:
        starts.append(torch.zeros_like(start))
        ends.append(end.clamp(max=sink))
    return _of_frames(starts, ends, tokens, frames)


def teacher_forcing(
    frames: int, tokens: int, *, chunk: int = 1, first_alone: bool = False, device: Device = None
) -> BlockMask:
    """A video twice, clean and then noisy, 2 x frames x tokens: each noisy frame is denoised after clean ones.

    A clean frame sees the clean frames up to its own. A noisy frame sees the clean frames before it, and itself.

    Args:
        frames: of one half; tokens: of a frame.
        chunk, first_alone, device: as in `causal_frames`; a noisy chunk sees itself and the clean chunks before it.
    """
    _check_at_least(1, frames=frames, tokens=tokens, chunk=chunk)
    first, stop = _chunks(frames, chunk, first_alone, device)
    zero = torch.zeros_like(first)
    context = torch.cat([zero, zero]), torch.cat([stop, first])
    own = torch.cat([zero, first + frames]), torch.cat([zero, stop + frames])
    starts, ends = zip(context, own)
    return _of_frames(starts, ends, tokens, 2 * frames)


def prefix_documents(
    lengths: Sequence[int] | Sequence[Sequence[int]], prefixes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    *, device: Device = None,
) -> BlockMask:  # fmt: skip
    """Documents one after another, each causal behind a prefix that all of its queries see.

    Args:
        lengths: tokens of each document; or a list of these for each sequence of a batch, of as many tokens in all.
        prefixes: tokens of each document's prefix, in the same form; none unless given. Documents without a prefix
            cost least by `sagebwd.sage_attention_varlen`, which shares no scale between them.
        device: as in `causal_frames`.
    """
    rows, batched = _rows("lengths", lengths)
    kept = [[0] * len(row) for row in rows] if prefixes is None else _rows("prefixes", prefixes)[0]
    if [len(row) for row in kept] != [len(row) for row in rows]:
        raise ValueError(f"prefixes: {prefixes} are not one for each of the lengths {lengths}")
    if len({sum(row) for row in rows}) != 1:
        raise ValueError(f"lengths: sequences of {[sum(row) for row in rows]} tokens; expected as many in each")
    total = sum(rows[0])
    _check_at_least(1, **{"lengths, the sum": total})
    starts, ends = [], []
    for sizes, seen in zip(rows, kept):
        _check_at_least(0, lengths=min(sizes), prefixes=min(seen))
        if any(prefix > size for prefix, size in zip(seen, sizes)):
            raise ValueError(f"prefixes: {seen} are longer than their documents of {sizes}")
        sizes, seen = (torch.tensor(x).to(_device(device), non_blocking=True) for x in (sizes, seen))
        first = sizes.cumsum(0) - sizes
        first, prefix = (x.repeat_interleave(sizes, output_size=total) for x in (first, first + seen))
        starts.append(first)
        ends.append(torch.maximum(prefix, torch.arange(1, total + 1, device=first.device)))
    starts, ends = (torch.stack(x)[:, None] if batched else x[0] for x in (starts, ends))
    return from_key_ranges(starts, ends, total)


def image_blocks(images: Tensor, *, window: int | None = None) -> BlockMask:
    """Text and images, as in Gemma 3: causal, but the tokens of an image see each other.

    Args:
        images: (tokens,) or (batch, tokens), boolean or integer: 0 of text; each run of another number is an image.
            Gemma's ``token_type_ids`` are of this form.
        window: of its local layers: a query sees its image and the last ``window`` tokens, its own counted.
    """
    if not isinstance(images, Tensor) or images.is_floating_point() or not 1 <= images.dim() <= 2:
        raise TypeError(
            f"images: expected a boolean or integer tensor (tokens,) or (batch, tokens), got {_described(images)}"
        )
    tokens = images.shape[-1]
    _check_at_least(1, tokens=tokens, **({} if window is None else {"window": window}))
    place = torch.arange(tokens, device=images.device).expand_as(images)
    begins = torch.ones_like(images, dtype=torch.bool)
    begins[..., 1:] = images[..., 1:] != images[..., :-1]
    ends = begins.roll(-1, -1)  # the first token begins a run, so the last one ends one
    first = torch.where(begins, place, 0).cummax(-1).values
    last = torch.where(ends, place, tokens).flip(-1).cummin(-1).values.flip(-1)
    shown = images != 0
    start = torch.zeros_like(place) if window is None else place + 1 - window
    start = torch.where(shown, torch.minimum(first, start), start)
    end = torch.where(shown, last, place) + 1
    return from_key_ranges(*(x[:, None] if images.dim() == 2 else x for x in (start, end)), tokens)


def from_key_ranges(starts: Tensor, ends: Tensor, kv_tokens: int) -> BlockMask:
    """The mask under which each query sees the keys from a start up to, without it, an end; or several such ranges.

    Args:
        starts, ends: integer, (queries,), (ranges, queries) or (batch, ranges, queries), on the device of the call.
            What is below 0 or beyond kv_tokens counts as these; a range that ends before it starts is empty.
        kv_tokens: keys.

    Returns:
        A BlockMask of all heads, and of batch 1 unless a batch was given. It holds the ranges as they were, in
        tensors of its own.
    """
    for name, x in (("starts", starts), ("ends", ends)):
        if not isinstance(x, Tensor) or x.is_floating_point() or x.dtype == torch.bool or not 1 <= x.dim() <= 3:
            raise TypeError(f"{name}: expected a tensor of integers in 1 to 3 dimensions, got {_described(x)}")
    if starts.shape != ends.shape or starts.device != ends.device or 0 in starts.shape:
        raise ValueError(
            f"starts, ends: shapes {tuple(starts.shape)} on {starts.device} and {tuple(ends.shape)} on {ends.device}; "
            "expected the same, and at least one query"
        )
    _check_at_least(1, kv_tokens=kv_tokens)
    tokens = starts.shape[-1]
    starts, ends = (x.long().reshape(-1, *x[(None,) * (2 - x.dim())].shape[-2:]) for x in (starts, ends))
    ranges = _apart(starts.clamp(0, kv_tokens), ends.clamp(0, kv_tokens))
    seen, whole = _blocks(ranges, kv_tokens)
    full = whole == BLOCK
    part = (seen > 0) & ~full
    # not from_kv_blocks, which takes longer to make the lists of keys than all else here
    return BlockMask(
        (tokens, kv_tokens), *_listed(part), *_listed(full), *_listed(part.mT.contiguous()),
        *_listed(full.mT.contiguous()), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=_mask_mod(ranges),
    )  # fmt: skip


def _apart(starts: Tensor, ends: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The ranges of each query, (batch, queries) int32 each, of which no two touch; empty ones are 0 to 0."""
    empty = starts >= ends
    starts, order = starts.masked_fill(empty, 0).sort(1)
    ends = ends.masked_fill(empty, 0).gather(1, order)
    found = []
    start, end = starts[:, 0], ends[:, 0]
    for following, its_end in zip(starts[:, 1:].unbind(1), ends[:, 1:].unbind(1)):
        touch = following <= end
        found.append((start.masked_fill(touch, 0), end.masked_fill(touch, 0)))
        start, end = torch.where(touch, start, following), torch.where(touch, torch.maximum(end, its_end), its_end)
    return [tuple(x.int().contiguous() for x in pair) for pair in (*found, (start, end))]


def _mask_mod(ranges: list[tuple[Tensor, Tensor]]) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    is_shared = len(ranges[0][0]) == 1  # by a batch of any size
    if is_shared:
        ranges = [(start[0], end[0]) for start, end in ranges]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        place = (q,) if is_shared else (b, q)
        return reduce(or_, [(start[place] <= k) & (k < end[place]) for start, end in ranges])

    return mask_mod


def _blocks(ranges: list[tuple[Tensor, Tensor]], kv_tokens: int) -> tuple[Tensor, Tensor]:
    """How many queries of a block see any key of a block, those with two ranges there twice; and how many see all."""
    batch, tokens = ranges[0][0].shape
    rows, columns = -(-tokens // BLOCK), -(-kv_tokens // BLOCK)
    # steps up where a range begins and down behind its end: the sum along a row is how many are open
    seen, whole = (ranges[0][0].new_zeros(batch * rows * (columns + 1)) for _ in range(2))
    row = torch.arange(batch, device=seen.device)[:, None] * rows + torch.arange(tokens, device=seen.device) // BLOCK
    for start, end in ranges:
        touched = start // BLOCK, torch.where(start < end, (end - 1) // BLOCK + 1, start // BLOCK)
        covered = (start + BLOCK - 1) // BLOCK, end // BLOCK
        for steps, (first, stop) in ((seen, touched), (whole, covered)):
            for place, step in ((first, 1), (torch.maximum(first, stop), -1)):
                # of one dimension, which torch's deterministic mode accepts
                at = (row * (columns + 1) + place).flatten()
                steps.scatter_add_(0, at, torch.full_like(at, step, dtype=steps.dtype))
    return tuple(x.view(batch, 1, rows, columns + 1).cumsum(-1)[..., :columns] for x in (seen, whole))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of a row are there, and which, before all others."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()


def _chunks(frames: int, chunk: int, first_alone: bool, device: Device) -> tuple[Tensor, Tensor]:
    """The first frame of each frame's chunk, and the first behind it."""
    missing = chunk - 1 if first_alone else 0  # frames of the first chunk that are not there
    first = (torch.arange(frames, device=_device(device)) + missing) // chunk * chunk - missing
    return first.clamp(min=0), (first + chunk).clamp(max=frames)


def _of_frames(starts: Sequence[Tensor], ends: Sequence[Tensor], tokens: int, frames: int) -> BlockMask:
    """Ranges of frames, for each frame, in tokens."""
    starts, ends = (torch.stack(list(x)).repeat_interleave(tokens, 1) * tokens for x in (starts, ends))
    return from_key_ranges(starts, ends, frames * tokens)


def _rows(name: str, sizes: Sequence[int] | Sequence[Sequence[int]]) -> tuple[list[list[int]], bool]:
    """Integers of each sequence of a batch, and whether there is a batch."""
    batched = len(sizes) > 0 and not _is_integer(sizes[0])
    rows = [list(row) for row in sizes] if batched else [list(sizes)]
    if not all(rows) or not all(_is_integer(size) for row in rows for size in row):
        raise TypeError(f"{name}: expected integers, or a list of integers for each sequence of a batch, got {sizes}")
    return [[index(size) for size in row] for row in rows], batched


def _is_integer(x: object) -> bool:
    """Of Python, of NumPy, or a tensor of one."""
    if isinstance(x, Tensor):
        return x.dim() == 0 and not x.is_floating_point()
    return hasattr(x, "__index__") and not getattr(x, "ndim", 0)


def _described(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _device(device: Device) -> Device:
    return (torch.accelerator.current_accelerator() or "cpu") if device is None else device


def _check_at_least(least: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if not _is_integer(size) or size < least:
            raise ValueError(f"{name}: expected an integer, at least {least}, got {size!r}")
