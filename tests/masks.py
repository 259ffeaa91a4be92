"""Masks of every kind and shape that a call may have, drawn from a seed."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from sagebwd.kernels.masks.blocks import of_tensor
from sagebwd.masks.mask import Mask
from sagebwd.masks.tiles import tiles_of

Shape = tuple[int, int, int, int]

# Which of (batch, heads, queries, keys) a tensor has; the others are 1.
AXES = {"all": "bhqk", "rows": "bhk", "columns": "bq", "heads": "hqk", "batch": "bqk", "matrix": "qk", "none": ""}


def _axes(shape: Shape, name: str) -> list[int]:
    return [size if axis in AXES[name] else 1 for axis, size in zip("bhqk", shape)]


def boolean(shape: Shape, axes: str, generator: torch.Generator) -> Tensor:
    """Half of all, with rows that see nothing, keys that none sees, and blocks that are skipped or whole."""
    mask = torch.rand(_axes(shape, axes), generator=generator) < 0.5
    q, k = mask.shape[2:]
    if axes != "none":
        mask[:, :, q // 2 :, k // 2 :] = True
        mask[..., : q // 3, k // 2 :] = False
        mask[..., min(3, q - 1), :] &= q == 1
        mask[..., min(5, k - 1)] &= k == 1
    else:
        mask[:] = True
    return mask


def bias(shape: Shape, axes: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Numbers, zeros in whole blocks, and the two ways of hiding."""
    shown = boolean(shape, axes, generator)
    numbers = 2 * torch.randn(shown.shape, generator=generator)
    q, k = shown.shape[2:]
    numbers[:, :, q // 2 :, k // 2 :] *= 0 if q > 1 and k > 1 else 1
    numbers = numbers.to(dtype)
    hidden = torch.full_like(numbers, -float("inf"))
    hidden[..., : k // 4] = torch.finfo(dtype).min
    return torch.where(shown, numbers, hidden)


def _documents(tokens: int, count: int = 4) -> Tensor:
    return torch.arange(tokens) * count // tokens


def document(b, h, q, k, shape):
    """Documents that a query does not leave, causal within."""
    numbers = _documents(max(shape[2:]))
    return (numbers[q] == numbers[k]) & (k <= q)


def prefix(b, h, q, k, shape):
    """A prefix that all see, other in each row of the batch, and a causal rest."""
    return (k < shape[3] // 3 + 9 * b) | (k <= q)


def chunked(b, h, q, k, shape):
    """Chunks of 50 tokens, causal within; Llama 4."""
    return (q // 50 == k // 50) & (k <= q)


def sinks(b, h, q, k, shape):
    """A causal window of a length of each head's own, beside the first 4 keys."""
    return (k <= q) & ((q - k < 40 + 30 * h) | (k < 4))


MODS = {"document": document, "prefix": prefix, "chunked": chunked, "sinks": sinks}
BATCHED, HEADED = ("prefix",), ("sinks",)
KINDS = (*(f"bool-{axes}" for axes in AXES), *(f"bias-{axes}" for axes in AXES), "bias-float32", *MODS)


def mod(kind: str, shape: Shape):
    """The mask_mod of a kind, and the batch and heads that it looks at."""
    fn = MODS[kind]

    def mask_mod(b, h, q, k):
        return fn(b, h, q, k, shape)

    return mask_mod, shape[0] if kind in BATCHED else None, shape[1] if kind in HEADED else None


def draw(kind: str, shape: Shape, dtype: torch.dtype, seed: int, block: int = 128) -> Tensor | BlockMask:
    """A mask of (batch, heads, queries, keys)."""
    generator = torch.Generator().manual_seed(seed)
    if kind in MODS:
        mask_mod, batch, heads = mod(kind, shape)
        return create_block_mask(mask_mod, batch, heads, *shape[2:], device="cpu", BLOCK_SIZE=block)
    form, axes = kind.split("-")
    if form == "bool":
        return boolean(shape, axes, generator)
    if axes == "float32":
        return bias(shape, "heads", torch.float32, generator)
    return bias(shape, axes, dtype, generator)


def dense(kind: str, shape: Shape) -> Tensor:
    """What a BlockMask of `draw` shows, (B or 1, H or 1, N, M)."""
    mask_mod, batch, heads = mod(kind, shape)
    return create_mask(mask_mod, batch, heads, *shape[2:], device="cpu")


def read(mask: Tensor | BlockMask) -> Mask:
    """As the kernels and the reference take it."""
    return of_tensor(mask) if isinstance(mask, Tensor) else tiles_of(mask)


@lru_cache(maxsize=4)
def drawn(kind: str, shape: Shape, dtype: torch.dtype, seed: int, device: str) -> Mask:
    """`draw` and `read`, once for the calls of a test."""
    return read(draw(kind, shape, dtype, seed)).to(device)
