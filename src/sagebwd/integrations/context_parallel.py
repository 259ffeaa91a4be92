"""One sequence over several processes: keys and values travel round a ring of them, and parts are merged by their lse.

Of 2W chunks of a sequence process r of W holds the r-th from either end, so that under a causal mask all have the same
work in every step. Outputs of the steps are averaged with the weights exp(lse). Gradients travel the ring back
(docs/integrations/context_parallel.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sagebwd import checks
from sagebwd.arguments import autocast, choice_of
from sagebwd.attention import sage_attention
from sagebwd.integrations.ring_agreement import agree
from sagebwd.recipe import AUTO, Recipe
from sagebwd.switches import current

_NO_RING = (
    "torch's own attention, which alone takes such heads, gives no lse to merge parts by: divide heads in place of "
    "tokens, or gather the whole sequence for this layer"
)


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
            to 512.
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


def checked_ring_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, options: dict[str, Any],
    group: dist.ProcessGroup | None, check: Callable[[], None],
) -> Tensor:  # fmt: skip
    """`ring_attention` of a caller that may refuse calls: where ``check`` raises on one process, all raise."""
    if place(group)[1] == 1:
        check()
        return sage_attention(query, key, value, is_causal=is_causal, **options)
    if not checks.are_tensors(query, key, value):
        choice_of(sage_attention, query, key, value)  # which says so
    query, *held = autocast(query, key, value)
    options = options | {"return_lse": True}

    def check_all() -> None:
        check()
        checks.refuse_only_torch(query, held[1], None, 0, _NO_RING)
        choice_of(sage_attention, query, *held, is_causal=is_causal, **options)
        tokens, kv_tokens = query.shape[-2], held[0].shape[-2]
        if is_causal and (tokens % 2 or kv_tokens != tokens):
            raise ValueError(
                f"query, key: {tokens} and {kv_tokens} tokens; under is_causal as many, and an even number: two chunks"
            )

    with checks.in_ring():
        agree(group, query, _facts(query, *held, is_causal, options), check_all)
        return _ring(query, held, is_causal, options, group)


def _facts(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, options: dict[str, Any]) -> dict[str, str]:
    """What has to be the same in the call of each process, by name."""
    given = {"query": query, "key": key, "value": value}
    facts = {name: f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in given.items()}
    trained = [name for name, x in given.items() if x.requires_grad and torch.is_grad_enabled()]
    facts["gradients"] = f"of {', '.join(trained)}" if trained else "none"
    facts["switches"] = ", ".join(name for name, is_on in asdict(current).items() if is_on) or "none"
    return facts | {"is_causal": str(is_causal)} | {name: str(option) for name, option in options.items()}


def _ring(
    query: Tensor, held: list[Tensor], is_causal: bool, options: dict[str, Any], group: dist.ProcessGroup | None
) -> Tensor:
    rank, count = place(group)
    tokens = query.shape[-2]
    o = lse = None
    for step in range(count):
        requests: list[Any] = []
        try:
            coming = held if step == count - 1 else _Rotate.apply(group, requests, *held)
            if step == 0:
                part, lse = sage_attention(query, *held, is_causal=is_causal, **options)
                o, dtype = part.to(lse.dtype), part.dtype
            elif not is_causal:
                o, lse = _merged(o, lse, *sage_attention(query, *held, **options))
            elif step <= rank:  # of an earlier process: all queries see its first chunk, and none its second
                first = (x[..., : tokens // 2, :] for x in held)
                o, lse = _merged(o, lse, *sage_attention(query, *first, **options))
            else:  # of a later one: the second chunk of queries sees all
                early, late = o.chunk(2, -2), lse.chunk(2, -1)
                seen = sage_attention(query[..., tokens // 2 :, :], *held, **options)
                late_o, late_lse = _merged(early[1], late[1], *seen)
                o, lse = torch.cat((early[0], late_o), -2), torch.cat((late[0], late_lse), -1)
        finally:  # an exchange that is left under way would meet the next one
            for request in requests:
                request.wait()
        held = coming
    return o.to(dtype)


class _Rotate(torch.autograd.Function):
    """What the process before this one holds, once ``requests`` have been waited for; gradients go back to it."""

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup | None, requests: list[Any], *held: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        received, started = _exchanged(held, 1, group)
        requests += started
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        received, requests = _exchanged(gradients, -1, ctx.group)
        for request in requests:
            request.wait()
        return None, None, *received


def _exchanged(
    tensors: tuple[Tensor, ...], step: int, group: dist.ProcessGroup | None
) -> tuple[tuple[Tensor, ...], list[Any]]:
    """Tensors of the process ``step`` before this one, which sends its own as far on, and what to wait for."""
    rank, count = place(group)
    sent = [x.contiguous() for x in tensors]
    received = tuple(torch.empty_like(x) for x in sent)
    operations = [
        dist.P2POp(operation, x, group=group, group_peer=(rank + distance) % count)
        for operation, distance, part in ((dist.isend, step, sent), (dist.irecv, -step, received))
        for x in part
    ]
    return received, dist.batch_isend_irecv(operations)


def _merged(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of both, from attention to each."""
    both = torch.logaddexp(lse, other_lse)
    weight, other_weight = (x.sub(both).exp().unsqueeze(-1) for x in (lse, other_lse))
    return o * weight + other.to(o.dtype) * other_weight, both


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in a group, and how many there are.

    Raises TypeError for what is no group, and ValueError where the process is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    if not (group is None or isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER):
        raise TypeError(
            f"group: expected a process group or None, got {type(group).__name__}; a DeviceMesh has one, as "
            'mesh.get_group("cp")'
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"group: process {dist.get_rank()} is not in it; give the group of which it is a part")
    return rank, dist.get_world_size(group)
