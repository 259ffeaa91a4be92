"""Whether all processes of a ring make the same call: compared before anything is sent, told to each of them.

A process that alone refuses its call, or makes another one, would leave the others waiting for tensors that never
come, or come in another size. Each call compares one number a process, for which the host waits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from sagebwd.auto.agreement import digest
from sagebwd.kernels.runtime.device import device_of

# In place of a digest, of 48 bits, of a call that is refused.
_REFUSED = -1


def agree(
    group: dist.ProcessGroup | None, tensor: torch.Tensor, facts: dict[str, str], check: Callable[[], object]
) -> None:
    """Return where the call of every process has the same facts and passes its check; raise on every process else.

    Args: tensor, on a device that the group exchanges tensors of; facts, of the call, by name; check, which raises
    what the process refuses its call by.

    Raises what check raises, and on the other processes then ValueError; ValueError where facts differ.
    """
    refusal = None
    try:
        check()
    except Exception as error:
        refusal = error
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph: its calls before were compared
        if refusal is not None:
            raise refusal
        return
    own = torch.tensor([_REFUSED if refusal is not None else int(digest(facts), 16)], device=tensor.device)
    numbers = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(numbers, own, group)
    if len(set(torch.cat(numbers).tolist())) > 1:
        calls: list[dict[str, str] | str] = [""] * len(numbers)
        with device_of(tensor):
            call = facts if refusal is None else f"{type(refusal).__name__}: {refusal}"
            dist.all_gather_object(calls, call, group)
        if refusal is None:
            raise ValueError(_told(calls))
    if refusal is not None:
        raise refusal


def _told(calls: list[dict[str, str] | str]) -> str:
    """What a process hears whose own call is fine; calls, by rank, their facts or why they are refused."""
    refused = [f"rank {rank} refuses it: {call}" for rank, call in enumerate(calls) if isinstance(call, str)]
    if refused:
        return f"ring_attention: no process of the group runs this call, since {'; '.join(refused)}"
    parts = []
    for name in calls[0]:
        ranks: dict[str, list[str]] = {}
        for rank, call in enumerate(calls):
            ranks.setdefault(call[name], []).append(str(rank))
        if len(ranks) > 1:
            parts.append(f"{name}: " + ", ".join(f"{value} on rank {', '.join(of)}" for value, of in ranks.items()))
    return (
        f"ring_attention: calls of the group's processes differ ({'; '.join(parts)}); accepted: tensors of the same "
        "shapes and dtypes, alike in what needs a gradient, and the same options and switches, on all"
    )
