"""Masks of any shape, as the reference and the kernels read them: a tensor's elements, or a BlockMask's tiles.

A tensor is taken as it lies, boolean (True where a query sees a key) or additive, (B or 1, H or 1, N or 1, M or 1).
An additive one hides where it is -inf, or so low that it stands for that (`HIDDEN`), as Transformers' masks are.

Of torch's BlockMask only the tiles that it shows in part are stored, so that memory does not grow with queries x keys.

Beside the elements goes a map of blocks of `BLOCK` queries and keys: what hides all is skipped, what shows all (a
bias of zeros) needs no elements.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from sagebwd.masks.parts import Parts

T = TypeVar("T")
# Queries and keys of a block of the map: what every tile of the kernels is a multiple of.
BLOCK = 32
# Queries and keys of a stored tile: a multiple of every tile of the kernels.
TILE = 128
SKIP, MASKED, WHOLE = range(3)
# Tiles that are not stored for one place alone.
SHOWS_ALL, HIDES_ALL = range(2)
# A bias of at most this hides: half of the least number, or of bfloat16's for all that have its exponents.
HIDDEN = {torch.float16: -32752.0}
HIDDEN_ELSE = -1.6e38
# Rows of queries that are looked at together.
ROWS = 4096


class Mask:
    """A mask of one call.

    elements: the tensor in four dimensions; or, where there are ``tiles``, (count, TILE, TILE) bool.
    tiles: (B or 1, H or 1, N / TILE, M / TILE) int32, which of the elements' tiles is there; None without a BlockMask.
    blocks: (B or 1, H or 1, N / BLOCK or 1, M / BLOCK or 1) uint8: SKIP, MASKED or WHOLE.
    keys: (B or 1, M or 1) bool, which keys any query of any head sees. blocks and keys are None where a plan's
    programs will read the elements.
    parts: what kernels read, made of these and kept with them; None: made in each call.
    queries: N of a mask of tiles that a user holds.

    To pytree code, as pipelines and replicas have it, a mask of several batch elements is the tensors that begin with
    them; stored tiles belong to all. A mask that stands for the whole batch is one leaf and no tensor, and goes to
    each part as it is. What is rebuilt of other tensors has parts of its own.
    """

    def __init__(
        self, elements: Tensor, tiles: Tensor | None, blocks: Tensor | None, keys: Tensor | None,
        parts: Parts | None = None, queries: int | None = None,
    ) -> None:  # fmt: skip
        self.elements, self.tiles, self.blocks, self.keys = elements, tiles, blocks, keys
        self.parts, self.queries = parts, queries
        self.tree: tuple[list[Any], Mask] | None = None  # as pytree code has it

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """All but the parts."""
        return self.elements, self.tiles, self.blocks, self.keys

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch or 1, heads or 1, queries (or 1, of elements that are all queries'), keys."""
        lists = self.elements if self.tiles is None else self.tiles
        queries = lists.shape[2] if self.tiles is None else self.queries
        return lists.shape[0], lists.shape[1], queries, self.keys.shape[1]

    def with_tensors(
        self, elements: Tensor | None, tiles: Tensor | None, blocks: Tensor | None, keys: Tensor | None,
        parts: Parts | None = None,
    ) -> Mask:  # fmt: skip
        """A mask of other tensors, and so of other parts, for as many queries."""
        return Mask(elements, tiles, blocks, keys, parts, self.queries)

    def with_parts(self, parts: Parts | None) -> Mask:
        """The same tensors with other parts."""
        return self.with_tensors(*self.tensors, parts)

    def without_watched(self) -> tuple[Mask, list[Tensor]]:
        """The same without what backward reads of the user's memory, and that."""
        return self.with_tensors(None, *self.tensors[1:], self.parts), [self.elements]

    def with_watched(self, watched: list[Tensor]) -> Mask:
        """The mask of which this is left."""
        return self.with_tensors(*watched, *self.tensors[1:], self.parts)

    def keys_beside(self, key_mask: Tensor) -> Tensor | None:
        """Keys that count, or None for the mask's own, of which blocks tell all: SKIP has none, MASKED has some, and
        all below the last token are in WHOLE."""
        return None if key_mask is self.keys else key_mask

    def made(self, settings: Hashable, make: Callable[[], T]) -> T:
        """The part of the mask that ``make()`` gives for some settings."""
        return make() if self.parts is None else self.parts.get(settings, make)

    def taken(self, settings: Hashable, make: Callable[[], T]) -> T:
        """`made`, of what one direction of a call reads once."""
        return make() if self.parts is None else self.parts.take(settings, make)

    @property
    def is_kept(self) -> bool:
        """Whether it is an object of the user's, whose tensors nobody writes to."""
        return type(self.parts) is Parts

    @property
    def is_unread(self) -> bool:
        """Whether a call's programs read it (`sagebwd.planning.mask_elements`)."""
        return self.blocks is None

    @property
    def is_bias(self) -> bool:
        """Whether it is added to the scores."""
        return self.elements.is_floating_point()

    def check_dtypes(self) -> None:
        """Raises TypeError where all tensors were cast, which but for a bias hold no numbers to round."""
        expected = {"tiles": torch.int32, "blocks": torch.uint8, "keys": torch.bool}
        for name, dtype in expected.items():
            x = getattr(self, name)
            if x is not None and x.dtype != dtype:
                raise TypeError(f"block_mask: its {name} were cast from {dtype} to {x.dtype}; leave them as they are")

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Mask:
        """The same on another device. Raises TypeError for a dtype."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"block_mask.to({device}): expected a device; a mask has no dtype of its own")
        moved = (None if x is None else x.to(device, non_blocking=non_blocking) for x in self.tensors)
        moved = self.with_tensors(*moved)
        return moved if self.parts is None else moved.kept()

    def __getitem__(self, rows: slice) -> Mask:
        """The mask of some elements of the batch; one that stands for the whole batch is theirs too.

        Raises TypeError for anything but a slice, whose step is 1.
        """
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError(f"block_mask[{rows!r}]: expected a slice of the batch, as block_mask[2:4]")
        if self.shape[0] == 1:
            return self
        leaves, mask = _flattened(self)
        return _rebuilt([x[rows] for x in leaves], mask)

    def kept(self) -> Mask:
        """The same with parts, for tensors that nobody writes to."""
        parts = Parts()
        parts.keep("mask", self.tensors)
        return self.with_parts(parts)

    def arrive(self) -> None:
        """Order the current stream behind the making of a mask that was `kept`."""
        if self.parts is not None:
            self.parts.arrive()

    def __reduce__(self) -> tuple:
        self.arrive()
        return _loaded, (*self.tensors, self.queries)

    def part(self, rows: slice, keys: slice) -> Tensor:
        """The elements of some queries and keys, (B or 1, H or 1, rows or 1, keys or 1); any beyond the last."""
        if self.tiles is None:
            part = self.elements
            for dim, tokens in ((2, rows), (3, keys)):
                if part.shape[dim] > 1 or tokens.stop == 1:
                    missing = max(0, tokens.stop - part.shape[dim])
                    part = part.narrow(dim, tokens.start, tokens.stop - missing - tokens.start)
                    part = F.pad(part, (0, missing) if dim == 3 else (0, 0, 0, missing))
            return part
        device = self.elements.device
        q = torch.arange(rows.start, rows.stop, device=device).clamp(max=self.tiles.shape[2] * TILE - 1)[:, None]
        k = torch.arange(keys.start, keys.stop, device=device).clamp(max=self.tiles.shape[3] * TILE - 1)
        return self.elements[self.tiles[:, :, q // TILE, k // TILE].long(), q % TILE, k % TILE]


def _loaded(elements: Tensor, tiles: Tensor | None, blocks: Tensor, keys: Tensor, queries: int | None) -> Mask:
    """A mask of tensors that were pickled."""
    return Mask(elements, tiles, blocks, keys, queries=queries).kept()


torch.serialization.add_safe_globals([_loaded])  # it makes a mask of tensors and nothing else


def _leaves(mask: Mask) -> list[Any]:
    """The tensors that begin with batch elements; where there is one for all, its parts: a leaf that is no tensor."""
    lists = mask.elements if mask.tiles is None else mask.tiles
    return [lists, mask.blocks, mask.keys] if lists.shape[0] > 1 else [mask.parts]


def _flattened(mask: Mask) -> tuple[list[Any], Mask]:
    """Its leaves, and the mask that pytree code took apart first: of which parts have stored tiles and queries."""
    return (_leaves(mask), mask) if mask.tree is None else mask.tree


def _rebuilt(leaves: Iterable[Any], mask: Mask) -> Mask:
    """The mask of other leaves, which need be no tensors: a tree of settings has the form of the tree that it is for.
    Of the same leaves it is the mask itself."""
    leaves = list(leaves)
    if all(x is y for x, y in zip(leaves, _leaves(mask), strict=True)):
        return mask
    mask.arrive()  # leaves that are parts of its tensors are behind their making
    lists, blocks, keys = leaves if len(leaves) == 3 else (None,) * 3
    places = (lists, None) if mask.tiles is None else (mask.elements, lists)
    rebuilt = mask.with_tensors(*places, blocks, keys, Parts())
    rebuilt.tree = leaves, mask
    return rebuilt


def _refuse_keys(mask: Mask) -> NoReturn:
    """What torch.export asks of its inputs: a program of one mask's leaves would take no other mask."""
    raise NotImplementedError(
        "block_mask: torch.export takes no mask that was read as an input; hold it in the module, whose program then "
        "has it, or give attn_mask, a tensor"
    )


register_pytree_node(
    Mask, _flattened, _rebuilt, serialized_type_name="sagebwd.masks.mask.Mask", flatten_with_keys_fn=_refuse_keys
)


def shown(elements: Tensor) -> Tensor:
    """Where a mask's elements let a key be seen; NaN does, and shows in the output."""
    if elements.dtype == torch.bool:
        return elements
    return ~(elements <= hidden(elements.dtype))


def hidden(dtype: torch.dtype) -> float:
    """What hides a key if no more than that is added to its score."""
    return HIDDEN.get(dtype, HIDDEN_ELSE)


def blocks_of(elements: Tensor) -> tuple[Tensor, Tensor]:
    """`Mask.blocks` of a tensor in four dimensions, and which keys any query of any head sees, (B or 1, M or 1)."""
    blocks, keys = [], None
    for rows in elements.split(ROWS, 2):
        visible = shown(rows)
        whole = visible if rows.dtype == torch.bool else rows == 0
        blocks.append(_states(_reduced(visible, False).any(-1).any(-1), _reduced(whole, True).all(-1).all(-1)))
        seen = visible.any(2).any(1)
        keys = seen if keys is None else keys | seen
    return torch.cat(blocks, 2), keys


def _states(any_shown: Tensor, all_shown: Tensor) -> Tensor:
    return (any_shown * MASKED + (any_shown & all_shown) * (WHOLE - MASKED)).to(torch.uint8)


def _reduced(x: Tensor, padding: bool) -> Tensor:
    """(B, H, n, m, BLOCK, BLOCK) of (B, H, N, M); a dimension of one token stays one."""
    for dim in (2, 3):
        missing = -x.shape[dim] % BLOCK if x.shape[dim] > 1 else 0
        if missing:
            x = F.pad(x, (0, missing) if dim == 3 else (0, 0, 0, missing), value=padding)
    q, k = (min(BLOCK, max(1, x.shape[dim])) for dim in (2, 3))  # of no tokens there is no block
    return x.unflatten(3, (-1, k)).unflatten(2, (-1, q)).transpose(3, 4)
