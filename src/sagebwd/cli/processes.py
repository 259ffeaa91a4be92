"""Processes that a command starts: Ctrl-C in the terminal reaches the command alone, which ends them."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager


@contextmanager
def without_sigint() -> Iterator[None]:
    """Processes that are started meanwhile ignore SIGINT. Only in the main thread."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_in_processes(
    call: Callable[..., object], arguments: Sequence[tuple], count: int
) -> Iterator[tuple[int, BaseException | None]]:
    """Call a function with each tuple of arguments, in ``count`` processes.

    The index of each as it ends, and what it raised. Where the loop over them is left early, the processes are
    terminated.
    """
    ended = 0
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        with without_sigint():
            futures = {pool.submit(call, *one): index for index, one in enumerate(arguments)}
        try:
            for future in as_completed(futures):
                ended += 1
                yield futures[future], future.exception()
        finally:
            if ended < len(futures):
                for process in multiprocessing.active_children():
                    process.terminate()
                pool.shutdown(cancel_futures=True)  # waits: threads that outlive it print at exit
