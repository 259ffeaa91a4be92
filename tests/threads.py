"""Threads of a test."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor


def at_once(work: Callable[..., object], each: Iterable[object]) -> list[object]:
    """What ``work`` returns of each value, a thread a value; what one raises is raised."""
    values = list(each)
    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(work, values))
