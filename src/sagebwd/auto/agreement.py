"""Whether a job's processes choose alike under "auto": a measured table or an extra may be there on one host alone.

The first process that asks leaves what its choices follow from in the store of the default process group, and every
other compares its own with that: one atomic exchange, which waits for no other process, since processes may call
attention unequal times, and for the store `PATIENCE` at most. A process asks at its first call of "auto" on a GPU in
each process group, in a trace too. An error of the store is logged, and changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import threading
import warnings
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

KEY, ASKED = "sagebwd/auto/{}", "sagebwd/auto/asked/{}"
"""Where the first process's facts are, by how often this process has asked in this store, which may outlive its group;
and where that is counted, by rank: in the store, since a process may have asked in another one too."""
PATIENCE = 5.0
"""Seconds that a call of attention waits for the store: one whose host is gone answers after minutes."""

_log = logging.getLogger("sagebwd")
_AVAILABLE = dist.is_available()
_lock = threading.Lock()
_asked: weakref.ref[object] | None = None  # the group that was asked last


def due() -> dist.ProcessGroup | None:
    """The default group, if there is one and this process has not asked in it."""
    group = dist.group.WORLD if _AVAILABLE else None
    return None if group is None or (_asked is not None and group is _asked()) else group


def check(facts_of: Callable[[torch.device], dict[str, str]], device: torch.device) -> None:
    """Warn where "auto" may choose otherwise here than in another process of the default group; asked once a group.

    Args: facts_of, what its choices on a device follow from, by name.
    """
    global _asked
    if due() is None:
        return
    with _lock:
        group = due()
        if group is None:
            return
        _asked = weakref.ref(group)
    try:
        own = {"rank": str(dist.get_rank()), "host": socket.gethostname(), "facts": facts_of(device)}
        first = _exchanged(own)
        difference = _difference(own, first)
    except Exception as error:  # a store of another kind, or one whose host is gone: the run is not to end for that
        _log.info(f"sagebwd: processes were not compared: {type(error).__name__}: {error}")
        return
    if difference is not None:
        warnings.warn(difference, stacklevel=4)
    elif first["rank"] != own["rank"]:
        _log.info(
            f"sagebwd: recipe='auto' chooses on rank {own['rank']} ({own['host']}) as on rank {first['rank']} "
            f"({first['host']}): compared were {', '.join(own['facts'])}"
        )


def digest(facts: dict[str, str]) -> str:
    """Twelve hexadecimal digits, which are the same where all facts are."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def _exchanged(own: dict) -> dict:
    """What the first process left; its own where that is this one. Raises TimeoutError after `PATIENCE`."""
    store, answer = dist.distributed_c10d._get_default_store(), []
    patience = min(PATIENCE, store.timeout.total_seconds())

    def exchange() -> None:
        try:
            # a connection of its own: another thread may wait in the group's for a process that waits for this one
            own_store = store.clone() if hasattr(store, "clone") else store
            number = own_store.add(ASKED.format(own["rank"]), 1)
            answer.append(own_store.compare_set(KEY.format(number), "", json.dumps(own)))
        except Exception as error:
            answer.append(error)

    # to connect takes the store's own time limit, which is the group's for every other use too
    thread = threading.Thread(target=exchange, name="sagebwd agreement", daemon=True)
    thread.start()
    thread.join(patience)
    if not answer:
        raise TimeoutError(f"the store of the process group gave no answer within {patience:g} s")
    if isinstance(answer[0], Exception):
        raise answer[0]
    return json.loads(answer[0])


def _difference(own: dict, first: dict) -> str | None:
    names = [name for name in first["facts"] | own["facts"] if first["facts"].get(name) != own["facts"].get(name)]
    if not names:
        return None
    parts = "; ".join(
        f"{name}: {own['facts'].get(name, 'none')} here, {first['facts'].get(name, 'none')} there" for name in names
    )
    return (
        f"sagebwd: recipe='auto' may choose otherwise on rank {own['rank']} ({own['host']}) than on rank "
        f"{first['rank']} ({first['host']}): {parts}. Ranks that choose differently train in different precision; "
        "make them equal, or name a recipe (docs/auto.md#several-processes)"
    )
