"""Whether a job's processes choose alike under "auto": a measured table or an extra may be there on one host alone.

The first process that asks leaves what its choices follow from in the store of the default process group, and every
other compares its own with that: one atomic exchange, which waits for no other process, since processes may call
attention unequal times, as under pipeline parallelism. A process asks at its first call of "auto" on a GPU in each
process group, in a trace too. A difference is a warning; an error of the store is logged and changes nothing.
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

KEY = "sagebwd/auto/{}"
"""Where the first process's facts are, by how many groups this process has asked: a store may outlive its group."""

_AVAILABLE = dist.is_available()
_lock = threading.Lock()
_asked: weakref.ref[object] | None = None  # the group that was asked last
_count = 0


def due() -> dist.ProcessGroup | None:
    """The default group, if there is one and this process has not asked in it."""
    group = dist.group.WORLD if _AVAILABLE else None
    return None if group is None or (_asked is not None and group is _asked()) else group


def check(facts_of: Callable[[torch.device], dict[str, str]], device: torch.device) -> None:
    """Warn where "auto" may choose otherwise here than in another process of the default group; asked once a group.

    Args: facts_of, what its choices on a device follow from, by name.
    """
    global _asked, _count
    if due() is None:
        return
    with _lock:
        group = due()
        if group is None:
            return
        _asked, _count, number = weakref.ref(group), _count + 1, _count
    try:
        own = {"rank": str(dist.get_rank()), "host": socket.gethostname(), "facts": facts_of(device)}
        first = _exchanged(KEY.format(number), own)
        difference = _difference(own, first)
    except Exception as error:  # a store of another kind, or one whose host is gone: the run is not to end for that
        logging.getLogger("sagebwd").info(f"sagebwd: processes were not compared: {type(error).__name__}: {error}")
        return
    if difference is not None:
        warnings.warn(difference, stacklevel=4)


def digest(facts: dict[str, str]) -> str:
    """Twelve hexadecimal digits, which are the same where all facts are."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def _exchanged(key: str, own: dict) -> dict:
    """What the first process left under a key; its own where that is this one."""
    store = dist.distributed_c10d._get_default_store()
    # a connection of its own: another thread may wait in the group's for a process that waits for this one
    store = store.clone() if hasattr(store, "clone") else store
    return json.loads(store.compare_set(key, "", json.dumps(own)))


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
