"""Each case in a process of its own: what it raises, and that it dies, are rows."""

import os

from tools.forked import rows_of


def run(name):
    if name == "raises":
        raise KeyError("why")
    if name == "dies":
        os._exit(1)
    return "same", name


def test_an_error_and_a_death_are_rows():
    rows = rows_of(["well", "raises", "dies"], run, jobs=2)
    assert rows["well"] == ("same", "well")
    assert rows["raises"] == ("crash", "KeyError: 'why'")
    assert rows["dies"][0] == "not built"
    assert list(rows) == ["dies", "raises", "well"]
