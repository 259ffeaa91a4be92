"""Costs that are fitted from timings."""

from __future__ import annotations

import itertools

import pytest

from sagebwd.auto.fit import ENOUGH, fitted, size_of
from sagebwd.auto.model import FORWARD, TRAINING, Cost
from sagebwd.masks.kinds import CAUSAL, FULL, MASK, PADDING, WINDOW

LOW, TORCH = Cost.of(50, 20, 0.3, 0.6), Cost.of(20, 0, 0.1, 0.9)
SHAPES = [(b, h, n) for b, h, n in itertools.product((1, 4), (8, 16), (256, 1024, 8192))]


def work_of(row, name):
    """A contender's work in the call of a row."""
    return size_of(row).work(name, row["kind"], row["direction"] == TRAINING)


def rows_of(kind=CAUSAL, low=LOW, torch=TORCH, shapes=SHAPES, **more):
    """What calls take by these costs."""
    found = []
    for batch, heads, tokens in shapes:
        row = {
            "kind": kind, "head_dim": 64, "value_dim": 64, "direction": FORWARD, "recipe": "mixed", "impl": "here",
            "batch": batch, "heads": heads, "tokens": tokens,
        } | more  # fmt: skip
        for prefix, cost, name in (("", low, "low"), ("torch_", torch, "torch")):
            row |= {f"{prefix}ms": cost.ms(work_of(row, name)), f"{prefix}host_ms": cost.host / 1e12}
        found.append(row)
    return found


@pytest.mark.parametrize("kind", [FULL, CAUSAL, WINDOW])
def test_costs_are_found_again(kind):
    (found,) = fitted(rows_of(kind), "here", "2.0")
    assert found[:6] == (kind, 64, 64, FORWARD, "mixed", "here")
    assert (found.source, found.torch) == ("here", "2.0")
    assert found.low == pytest.approx(LOW, rel=1e-6)
    assert found.full["torch"] == pytest.approx(TORCH, rel=1e-6, abs=1e3)


def test_a_host_that_was_busy_in_most_calls_is_not_counted_slow():
    rows = rows_of()
    for number, row in enumerate(rows):
        if number % 10:
            row["host_ms"] *= 5
            row["ms"] = max(row["ms"], row["host_ms"])
    (found,) = fitted(rows, "", "")
    assert found.low == pytest.approx(LOW, rel=1e-6)


def test_of_one_call_on_the_gpu_those_that_wait_for_the_host_say_the_rest():
    """Regression: 3.2 ms of the longest of six calls under a mask counted for all, of which five took a third."""
    rows = rows_of(MASK, Cost.of(1100, 0, 0, 1.4), shapes=[(2, 16, 8192), (8, 16, 2048), (16, 16, 1024)])
    (found,) = fitted(rows, "", "")
    assert [row["ms"] > row["host_ms"] for row in rows] == [True, False, False]
    assert found.low == pytest.approx(Cost.of(1100, 0, 0, 1.4), rel=1e-6)


def test_no_fit_says_much_more_than_a_call_took_that_waited_for_its_host():
    """Calls of the same rows say nothing of what launches take: of the two least squares have it all in launches."""
    one_size = [(b, 16, 8192 // b) for b in (1, 2, 4, 8, 16)]
    low = Cost.of(50, 0, 2, 1)
    rows = rows_of(FULL, low, shapes=one_size)
    short = rows_of(FULL, low, shapes=[(1, 4, 256)])
    (without,), (found,) = (fitted(of, "", "") for of in (rows, rows + short))
    assert short[0]["ms"] == short[0]["host_ms"]
    assert without.low.fixed > 2e12 * short[0]["ms"]
    assert found.low == pytest.approx(low, rel=1e-6)


def test_a_kind_with_few_timings_is_a_multiple_of_calls_without_a_mask():
    few = rows_of(PADDING, Cost.of(50, 40, 0.6, 1.2), shapes=SHAPES[-ENOUGH + 1 :])
    full, padding = fitted(few + rows_of(FULL), "", "")
    assert (full.kind, padding.kind) == (FULL, PADDING)
    assert padding.low == pytest.approx(Cost.of(50, 40, 0.6, 1.2), rel=1e-6)
    waiting = rows_of(MASK, Cost.of(1000, 0, 0, 0.001))
    _, mask = fitted(waiting + rows_of(FULL), "", "")
    assert mask.low == pytest.approx(Cost.of(1000, 20, 0.3, 0.6), rel=1e-6), "of calls that wait for the host"


def test_of_calls_that_wait_for_the_host_there_is_no_multiple():
    """Regression: a division by zero, which every call of "auto" on that card raised."""
    waiting, few = Cost.of(1000, 0, 0, 0.001), SHAPES[-ENOUGH + 1 :]
    _, padding = fitted(rows_of(FULL, waiting, waiting) + rows_of(PADDING, shapes=few), "", "")
    for row in rows_of(PADDING, shapes=few):
        assert padding.low.ms(work_of(row, "low")) == pytest.approx(row["ms"], rel=0.2)


def test_what_does_not_run_has_no_costs():
    assert not fitted(rows_of(ms=None)[:0], "", "")
    none = [row | {"ms": None, "host_ms": None} for row in rows_of()]
    assert not fitted(none, "", "")
    (found,) = fitted([row | {"torch_ms": None, "torch_host_ms": None} for row in rows_of()], "", "")
    assert found.full == {}


PEER = Cost.of(10, 15, 0.2, 0.7)


def with_others(rows, **costs):
    """Rows with times of other contenders."""
    for row in rows:
        row["others"] = {name: (cost.ms(work_of(row, name)), cost.host / 1e12) for name, cost in costs.items()}
    return rows


@pytest.mark.parametrize("kind", [CAUSAL, WINDOW])
def test_costs_of_others_are_found_again(kind):
    """Of a window a peer multiplies what it shows."""
    (found,) = fitted(with_others(rows_of(kind, picked="CUDNN_ATTENTION"), fa4=PEER, flash=TORCH), "", "")
    assert list(found.full) == ["cudnn", "fa4", "flash"]
    assert found.full["fa4"] == pytest.approx(PEER, rel=1e-6)
    assert found.full["cudnn"] == pytest.approx(found.full["flash"], rel=1e-6, abs=1e3)


def test_another_with_few_timings_or_of_one_size_is_a_multiple_of_torchs_pick():
    one_size = [(b, 16, 32768 // b) for b in (1, 2, 4, 8, 16, 32)]
    for shapes in (SHAPES[-ENOUGH + 1 :], one_size):
        rows = rows_of(picked="CUDNN_ATTENTION") + with_others(
            rows_of(shapes=shapes, picked="CUDNN_ATTENTION"), fa4=Cost.of(90, 0, 0.2, 1.8)
        )
        (found,) = fitted(rows, "", "")
        assert found.full["fa4"] == pytest.approx(Cost.of(90, 0, 0.2, 1.8), rel=1e-3, abs=1e4)
    for row in rows:
        row["others"] = {name: ms for name, (ms, _) in row.get("others", {}).items()}
    (found,) = fitted(rows, "", "")
    assert list(found.full) == ["cudnn"], "a peer whose host nobody timed"
    for row in rows:
        row["others"] = {"FLASH_ATTENTION": row["torch_ms"]}
    (found,) = fitted(rows, "", "")
    assert found.full["flash"].host == found.full["cudnn"].host, "another backend of the same function"
