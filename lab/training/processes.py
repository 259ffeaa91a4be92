"""Several processes of one run, as ``torchrun`` and ``accelerate launch`` start them: gloo on CPUs, NCCL on GPUs.

The first one alone decides, writes and prints; what it decides holds for all.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import PartialState

Decision = TypeVar("Decision")
TIMEOUT = timedelta(hours=2)
"""How long a process waits for another: the first may be making token files."""
LAUNCHERS_OWN = {
    "ACCELERATE_MIXED_PRECISION": "optimisation.precision",
    "ACCELERATE_DYNAMO_BACKEND": "optimisation.compile",
    "ACCELERATE_USE_FSDP": "optimisation.sharding",
}
"""What Accelerate would follow in place of the config, and the key that says it: its launcher sets them from its own
options or its user's file, a Trainer sets them for the next one."""


def count() -> int:
    """How many there are; 1 where nothing launched them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which one this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def is_first() -> bool:
    """Whether this one decides, writes and prints."""
    return rank() == 0


def join() -> None:
    """Connect the processes, unless they are or there is one alone. What a launcher says beyond that is set aside."""
    for name, value in set_aside().items():
        if value.lower() not in ("no", "false") and is_first():
            print(f"{name}={value} is set aside: the config says it, by {LAUNCHERS_OWN[name]}", file=sys.stderr)
    if count() > 1:
        PartialState(cpu=not torch.cuda.is_available(), timeout=TIMEOUT)


def set_aside() -> dict[str, str]:
    """Take `LAUNCHERS_OWN` out of the environment; what it held of them."""
    return {name: os.environ.pop(name) for name in LAUNCHERS_OWN if name in os.environ}


def leave() -> None:
    """End together: a process that exits while others still hold its connections can take them down."""
    if count() > 1:
        torch.distributed.barrier()
        PartialState().destroy_process_group()
        gc.collect()  # of cycles that hold the group: a thread of it that outlives the interpreter aborts the process


def agreed(decide: Callable[[], Decision]) -> Decision:
    """What ``decide`` returns in the first process, in every process.

    Raises in every process the ValueError or OSError that it raises there.
    """
    if count() == 1:
        return decide()
    outcome: list = [None, None]
    if is_first():
        try:
            outcome[0] = decide()
        except (ValueError, OSError) as error:
            outcome[1] = error
    torch.distributed.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def first_of_host() -> AbstractContextManager[None]:
    """One process of each host goes through alone, then the host's others: they find what it has made."""
    return PartialState(cpu=not torch.cuda.is_available()).local_main_process_first()
