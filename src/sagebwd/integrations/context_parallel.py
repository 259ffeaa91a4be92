"""One sequence over several processes: keys and values travel round a ring of them, and parts are merged by their lse.

Of 2W chunks of a sequence process r of W holds the r-th from either end, so that under a causal mask all have the same
work in every step. Outputs of the steps are averaged with the weights exp(lse). Gradients travel the ring back
(docs/integrations/context_parallel.md).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sagebwd.integrations.ring import checked_ring_attention, place
from sagebwd.recipe import AUTO, Recipe


def shard(x: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """This process's tokens of a whole sequence: inputs, labels and positions go through it.

    Args: x, whose dimension ``dim`` is tokens, the same on all processes; group, all processes by default.

    Returns: x with 1/W of the tokens, in two chunks, the r-th from either end; a copy, and x itself on one process.

    Raises ValueError where the tokens do not split into two chunks a process.
    """
    rank, count = place(group)
    if count == 1:
        return x
    if x.shape[dim] % (2 * count):
        raise ValueError(
            f"x: {x.shape[dim]} tokens in dimension {dim} must be a multiple of {2 * count}, two chunks for each of "
            f"{count} processes; pad the sequence"
        )
    chunks = x.chunk(2 * count, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


@torch.compiler.disable
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: str | Recipe = AUTO,
    impl: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Attention of this process's queries to the keys of all processes; differentiable.

    All processes of the group call it, with tensors of the same shapes and alike in what needs a gradient, and all run
    backward. Calls are compared before anything is sent, for which the host waits. On one process, or without a
    process group, it is `sage_attention`. torch.compile breaks the graph here.

    Args:
        query: (batch, heads, tokens, head_dim), what `shard` gave this process of the sequence.
        key, value: (batch, kv_heads, tokens, head_dim), likewise; without ``is_causal`` of any length. head_dims up
            to 256.
        is_causal: of the whole sequence, in the order from before `shard`.
        scale, enable_gqa, recipe, impl: as in `sage_attention`. Under recipes that quantise, scales and means are
            those of a step's keys, and so not quite those of one process.
        group: all processes by default; of a DeviceMesh, ``mesh.get_group("cp")``.

    Returns:
        (batch, heads, tokens, value's head_dim) in query's dtype (autocast's under autocast).

    Raises:
        ValueError: under ``is_causal``, lengths that differ or do not split into two chunks; where another process
            makes another call or refuses its own; as `sage_attention`.
        TypeError, NotImplementedError: as `sage_attention`.
    """
    options = {"scale": scale, "enable_gqa": enable_gqa, "recipe": recipe, "impl": impl}
    return checked_ring_attention(query, key, value, is_causal, options, group, lambda: None)
