"""Bursts: runs behind a pause, which take turns."""

import time

from benchmarks import timer


def test_a_burst_is_timed_behind_a_pause_from_rest_to_rest(monkeypatch):
    """The host's share counts, the pause does not, and the median is of all rounds."""
    clock, did = [0.0], []

    def run(name, takes):
        did.append(name)
        clock[0] += takes

    def sleep(seconds):
        did.append("pause")
        clock[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    slow = iter(
        [0.5, *[0.002] * timer.BURSTS, *[0.004] * timer.BURSTS, *[0.003] * timer.BURSTS]
    )  # the first is untimed
    runs = {"a": lambda: run("a", 0.001), "b": lambda: run("b", next(slow))}
    shares = []
    times = timer.time_bursts(runs, "cpu", 3, tell=shares.append)
    assert {name: tuple(round(x, 6) for x in own) for name, own in times.items()} == {"a": (1.0, 1.0), "b": (3.0, 3.0)}
    assert did[:2] == ["a", "b"]
    assert did[2::2] == ["pause"] * len(did[3::2])
    assert {name: did.count(name) for name in "ab"} == dict.fromkeys("ab", 1 + 3 * timer.BURSTS)
    assert shares == sorted(shares)
    assert shares[-1] < 1
