"""Cases that run in processes of their own, forked from one where the imports are done: a crash is a row."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection

Row = tuple[str, str]  # a status and words
SECONDS = 150


def _work(run: Callable[[str], Row], name: str, pipe: Connection) -> None:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor: others may be at work
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        pipe.send(run(name))
    except BaseException as error:  # the parent reports it
        pipe.send(("crash", f"{type(error).__name__}: {str(error)[:120]}"))


def rows_of(names: Iterable[str], run: Callable[[str], Row], jobs: int) -> dict[str, Row]:
    """``run`` of every name, ``jobs`` at a time, printed as they come; "not built" for one that takes too long."""
    context, rows, waiting, running = multiprocessing.get_context("fork"), {}, list(names), {}
    total = len(waiting)
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(run, name, theirs))
            process.start()
            theirs.close()
            running[name] = (process, ours)
        for name, (process, pipe) in list(running.items()):
            if pipe.poll(0.05):
                try:
                    rows[name] = pipe.recv()
                except EOFError:
                    rows[name] = ("not built", f"took more than {SECONDS} s of the processor, or died")
                process.join()
                del running[name]
                words = " ".join(rows[name][1].split())[:150]
                print(f"[{len(rows)}/{total}] {name}: {rows[name][0]}  {words}", flush=True)
        time.sleep(0.02)
    return dict(sorted(rows.items()))
