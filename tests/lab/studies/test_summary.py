"""What a trace says of a whole model: heads by the weight of the first key, idle heads, shares."""

import dataclasses
import math

import pytest

from lab.studies import summary
from sagebwd.diagnostics import layers
from sagebwd.diagnostics import trace as study
from tests.diagnostics.test_layers import two_windows
from tests.diagnostics.test_trace import random_call


def test_idle_heads_are_told_apart():
    whole = random_call()
    assert summary.idle(study.measure([whole], ["token"])) == {}
    whole.do[0, 1] *= 1e-4  # of both sequences
    whole.do[1, 1] *= 1e-4
    rows = study.measure([whole], ["paper", "token"])
    ((place, share),) = summary.idle(rows).items()
    assert place == (0, 1)
    own, others = rows[2].norm["dq"], [row.norm["dq"] for row in rows[::2]]
    assert share == pytest.approx(own / math.hypot(*others))


def test_heads_by_the_weight_of_the_first_key():
    weights = (0.05, 0.1, 0.95, 1.0)
    changed = [dataclasses.replace(row, first_weight=weights[row.head]) for row in two_windows()]
    found = summary.by_weight(changed, {(1, 1): 0.001})
    heads = {most: [(row.layer, row.head) for row in found["token", most]] for most in summary.WEIGHTS[1:]}
    assert heads == {
        0.1: [(0, 0), (1, 0)] * 2,
        0.3: [(0, 1)] * 2,
        **{bound: [] for bound in (0.5, 0.7, 0.9)},
        1.0: [(0, 2), (0, 3), (1, 2), (1, 3)] * 2,
    }


def test_shares_are_of_the_median_layer():
    rows = study.measure([random_call(tokens=64, heads=2)], ["token"], attribute=True)
    # three layers, of which the first's and the last's errors are half and twice as large: the median is the second's
    more = [
        dataclasses.replace(
            row, layer=layer, relative_l2={name: 2.0 ** (layer - 1) * x for name, x in row.relative_l2.items()}
        )
        for layer in range(3)
        for row in rows
    ]
    (layer,) = layers.means(rows)
    found = summary.shares(more)
    assert found["token", "dv"]["dv"] == pytest.approx(layer.attribution["dv"]["dv"].share)
    assert found["token", "dv"]["o"] == pytest.approx(0, abs=1e-4)
    assert [source for _, source in found] == ["s", "o", "dv", "dq", "dk"]
