"""Evaluate a mask_mod at many (query, key) pairs at once: as ``torch.vmap`` would, without vmap where possible.

A mask_mod is a function of four scalars. vmap hands it these at about 2 ms of host time for each tensor that it
indexes. Indices that broadcast give the same wherever all that is done with them is done element by element; whether
it is, `_Elementwise` sees, operator by operator. Whatever else a mask_mod does, it does under vmap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
aten = torch.ops.aten
# Element by element, though torch has not tagged them so.
UNTAGGED = (
    aten.floor_divide.default, aten.floor_divide.Scalar, aten.rsub.Tensor, aten._to_copy.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
)  # fmt: skip
# Of a tensor they read no more than dtype and device: `or_masks` and `and_masks` of torch begin so.
NEW = aten.new_zeros.default, aten.new_ones.default, aten.new_full.default


def at_pairs(mask_mod: MaskMod, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """mask_mod of every query with every key of as many squares as there are.

    Args: int64; batch and head (count, 1, 1), q (count, queries, 1), k (count, 1, keys), each a token more than before
    until the last, which may be there several times.

    Returns: (count, queries, keys), of mask_mod's dtype.
    """
    found = _broadcast(mask_mod, batch, head, q, k)
    return _vmapped(mask_mod, batch, head, q, k) if found is None else found


def _broadcast(mask_mod: MaskMod, *indices: Tensor) -> Tensor | None:
    """By one call of mask_mod; None if it does more than what goes element by element."""
    watched = _Elementwise(indices)
    try:
        with watched:
            found = mask_mod(*indices)
    except Exception:  # the mode's, or of a mask_mod that does not broadcast: vmap gives its result, or raises
        return None
    if not isinstance(found, Tensor) or not (watched.follows(found) or found.dim() == 0):
        return None
    return found.expand(torch.broadcast_shapes(*(x.shape for x in indices)))


def _vmapped(mask_mod: MaskMod, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask

    # one tensor a square, since indexing is what takes long: its first and last query and key
    squares = torch.stack([x[:, 0, 0] for x in (batch, head, q, q[:, -1:], k, k[:, :, -1:])], 1)

    def of_square(number: Tensor, _: Tensor, row: Tensor, column: Tensor) -> Tensor:
        batch, head, first_q, last_q, first_k, last_k = squares[number].unbind(0)
        return mask_mod(batch, head, torch.minimum(first_q + row, last_q), torch.minimum(first_k + column, last_k))

    return create_mask(of_square, len(q), 1, q.shape[1], k.shape[2], q.device)[:, 0]


class _Elementwise(TorchDispatchMode):
    """Raises NotImplementedError at an operator that may give for indices of three dimensions what scalars do not.

    What follows from no index is let through.
    """

    def __init__(self, indices: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._followers = list(indices)  # kept, so that no other tensor takes their memory
        self._storages = {_storage(x) for x in indices}

    def follows(self, x: Tensor) -> bool:
        """Whether it was made of the indices; by its memory, which views share."""
        return _storage(x) in self._storages

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The operator's result."""
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func in NEW or not any(map(self.follows, given)):
            return func(*args, **kwargs)
        if not (_reads_a_table(func, args, self.follows) or self._is_of_elements(func, given)):
            raise NotImplementedError
        found = func(*args, **kwargs)
        self._followers.append(found)
        self._storages.add(_storage(found))
        return found

    def _is_of_elements(self, func: Any, given: list[Tensor]) -> bool:
        if not (torch.Tag.pointwise in func.tags or func in UNTAGGED):
            return False
        drawn_or_written = torch.Tag.nondeterministic_seeded in func.tags or func._schema.is_mutable
        return not drawn_or_written and all(self.follows(x) or self._may_stand_beside(x, given) for x in given)

    def _may_stand_beside(self, x: Tensor, given: list[Tensor]) -> bool:
        """Whether a tensor that follows from no index is a scalar, and types are promoted as among scalars."""
        beside = [y for y in given if self.follows(y)]
        return x.dim() == 0 and all(torch.result_type(x, y) == torch.promote_types(x.dtype, y.dtype) for y in beside)


def _reads_a_table(func: Any, args: tuple, follows: Callable[[Tensor], bool]) -> bool:
    """Whether single elements are read of a tensor that follows from no index."""
    if func is not aten.index.Tensor:
        return False
    table, places = args
    if follows(table) or len(places) != table.dim():
        return False
    return all(x is not None and x.dtype in (torch.int32, torch.int64) and x.dim() in (0, 3) for x in places)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
