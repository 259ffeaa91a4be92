"""Groups of rows in processes beside each other: one that dies or hangs loses the row it was at, and no other.

With ``device="cuda"`` they are spread over all GPUs of the machine.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import torch

from lab.training.gpus import visible_gpus
from tools.matrix import check, large
from tools.matrix.forms import Cell

# After so long without a row, compiling included, a process hangs.
HANGS = 300
# What rows that are begun have left when the time is over; then they are left for another run.
GRACE = 20
# What leaves a process's GPU context unusable.
BROKEN = ("CUDA error", "illegal memory access", "unspecified launch failure", "device-side assert", "misaligned")

Row = dict[str, object]


def _work(connection: Connection, impl: str | None, device: str, gpu: str | None) -> None:
    """In a process: the row of each cell that is sent, until there is none. gpu: the one that it sees, of several."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # read when CUDA starts, which nothing has done here
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    check.reserve(device)
    while (cell := connection.recv()) is not None:
        began = time.monotonic()
        try:
            row = (large.check if cell.form in large.FORMS else check.check)(cell, impl, device)
        except Exception as error:  # a crash is a finding
            row = {"status": "crashed", "message": f"{type(error).__name__}: {error}"[:400]}
        row = {**cell.key(), **row, "seconds": round(time.monotonic() - began, 1)}
        connection.send(row)
        if any(text in str(row.get("message")) for text in BROKEN):
            return


@dataclass
class _Worker:
    """A process, and what it has to do."""

    process: multiprocessing.Process
    connection: Connection
    group: list[Cell] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)

    def send(self) -> None:
        """The next row of the group."""
        self.connection.send(self.group[0])
        self.since = time.monotonic()


def run(groups: list[list[Cell]], processes: int, impl: str | None, device: str, until: float) -> Iterator[list[Row]]:
    """Rows as they come, an empty list each second without one; after ``until`` no row is begun any more.

    Groups are taken in their order. until: by `time.monotonic`.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(groups))
    workers: list[_Worker] = []
    gpus = itertools.cycle((visible_gpus() if device == "cuda" else []) or [None])

    def start(group: list[Cell]) -> None:
        mine, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, impl, device, next(gpus)), daemon=True)
        process.start()
        theirs.close()
        workers.append(_Worker(process, mine, group))
        workers[-1].send()

    for _ in range(min(processes, len(waiting))):
        start(waiting.pop())
    try:
        while workers:
            ready = wait([worker.connection for worker in workers], timeout=1)
            found, over = [], time.monotonic() > until
            if time.monotonic() > until + GRACE:
                return
            for worker in list(workers):
                if worker.connection in ready:
                    try:
                        row = worker.connection.recv()
                    except (EOFError, ConnectionError):
                        worker.process.join(5)
                        row = _lost(worker, f"the process ended with status {worker.process.exitcode}")
                elif time.monotonic() - worker.since > HANGS:
                    row = _lost(worker, f"no result after {HANGS} s")
                else:
                    continue
                found.append(row)
                left = worker.group[1:] or (waiting.pop() if waiting else [])
                broken = row["status"] == "crashed" and (
                    "seconds" not in row or any(text in str(row["message"]) for text in BROKEN)
                )
                if broken or over or not left:
                    workers.remove(worker)
                    _end(worker, kill=broken)
                    if left and not over:
                        start(left)
                else:
                    worker.group = left
                    worker.send()
            yield found
    finally:
        for worker in workers:
            _end(worker, kill=True)


def _lost(worker: _Worker, message: str) -> Row:
    return {**worker.group[0].key(), "status": "crashed", "message": message}


def _end(worker: _Worker, *, kill: bool) -> None:
    if kill:
        worker.process.kill()
    else:
        worker.connection.send(None)
    worker.connection.close()
