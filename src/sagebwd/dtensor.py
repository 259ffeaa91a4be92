"""Calls on DTensors whose batch or heads are divided: each process attends by itself, and nothing is sent.

Means, scales and softmax are of one sequence and head, so that the numbers are those of the undivided call. Tokens are
another matter: `sagebwd.integrations.context_parallel`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

BATCH, HEADS = 0, 1


class Shares(NamedTuple):
    """A call's tensors as this process has them, and how they lie on the mesh."""

    tensors: tuple[Tensor | None, ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    packed: bool

    def whole(self, outcome: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Each of a call's outputs as a DTensor: of packed sequences all but O have heads first."""
        if isinstance(outcome, Tensor):
            return self._whole(outcome, self.placements)
        o, *more = outcome
        rest = _of_heads(self.placements) if self.packed else self.placements
        return self._whole(o, self.placements), *(self._whole(x, rest) for x in more)

    def _whole(self, x: Tensor, placements: tuple[Placement, ...]) -> Tensor:
        return _module().DTensor.from_local(x, self.mesh, placements, run_check=False)


def shares_of(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, sinks: Tensor | None, *, packed: bool
) -> Shares | None:
    """This process's share of a call; None where tensors are none of DTensor's, or lie in a way that is not covered.

    Covered are query, key and value with equal placements on one mesh, of batch or heads in equal parts, or
    replicated; an attn_mask of size 1 where they are divided, or whose batch is divided like theirs; sinks with their
    heads.
    """
    module = _module()
    if module is None or torch.compiler.is_compiling():
        return None
    rows = query, key, value
    if not all(isinstance(x, module.DTensor) for x in rows):
        return None
    mesh, placements = query.device_mesh, query.placements
    dims = (HEADS,) if packed else (BATCH, HEADS)
    for x in rows:
        if x.dim() != (3 if packed else 4) or x.device_mesh != mesh or x.placements != placements:
            return None
        for dim, parts in _parts(mesh, placements).items():
            if dim not in dims or x.shape[dim] % parts:
                return None
    mask, of_sinks = _mask(attn_mask, mesh, placements), _sinks(sinks, mesh, placements)
    if (mask is None) != (attn_mask is None) or (of_sinks is None) != (sinks is None):
        return None
    return Shares((*(x.to_local() for x in rows), mask, of_sinks), mesh, placements, packed)


def _module() -> object | None:
    """``torch.distributed.tensor``, which takes long to import; who has a DTensor has done so."""
    return sys.modules.get("torch.distributed.tensor")


def _parts(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> dict[int | None, int]:
    """Into how many parts dimensions are divided; None for one whose parts are no slices, such as sums to be made."""
    found: dict[int | None, int] = {}
    for size, placement in zip(mesh.shape, placements):
        if not placement.is_replicate():
            dim = placement.dim if type(placement) is _module().Shard else None
            found[dim] = found.get(dim, 1) * size
    return found


def _of_heads(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Where a tensor with heads first lies."""
    module = _module()
    return tuple(module.Shard(0) if x.is_shard(HEADS) else module.Replicate() for x in placements)


def _mask(mask: Tensor | None, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor | None:
    """Not one of divided heads: which keys count, in K's mean and V's scales, depends on what all heads see."""
    if not isinstance(mask, Tensor) or mask.requires_grad:
        return None
    parts = _parts(mesh, placements)
    if isinstance(mask, _module().DTensor):
        divided = _parts(mask.device_mesh, mask.placements)
        if divided and (mask.dim() != 4 or (mask.device_mesh, mask.placements) != (mesh, placements)):
            return None
        if divided:
            return mask.to_local() if parts.keys() == {BATCH} and mask.shape[BATCH] % parts[BATCH] == 0 else None
        mask = mask.to_local()
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    return mask if all(sizes[dim] == 1 for dim in parts) else None


def _sinks(sinks: Tensor | None, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor | None:
    """Their gradient is a sum over what the batch is divided among."""
    module = _module()
    if not isinstance(sinks, module.DTensor) or sinks.device_mesh != mesh or sinks.placements != _of_heads(placements):
        return None
    summed = [module.Partial() if x.is_shard(BATCH) else y for x, y in zip(placements, sinks.placements)]
    return sinks.to_local(grad_placements=summed)
