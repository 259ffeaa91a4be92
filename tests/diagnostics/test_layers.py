"""What traces of a model's layers come to: by layer, by the weight of the first key, over all."""

import dataclasses
import math

import pytest

from sagebwd.diagnostics import layers, summary
from sagebwd.diagnostics import trace as study
from tests.diagnostics.test_trace import random_call


def test_a_layer_is_its_heads_together():
    whole = random_call()
    whole.do[0, 1] *= 100  # a head that others are nothing beside
    rows = study.measure([whole], ["paper", "token"], attribute=True)
    paper, token = layers.means(rows)
    own = [row for row in rows if row.recipe == "token"]
    assert (paper.recipe, token.recipe, token.layer, token.head) == ("paper", "token", 0, None)
    for name in ("dq", "o"):
        errors = math.hypot(*(row.relative_l2[name] * row.norm[name] for row in own))
        assert token.relative_l2[name] == pytest.approx(errors / math.hypot(*(row.norm[name] for row in own)))
    heaviest = max(own, key=lambda row: row.norm["dq"])
    assert token.relative_l2["dq"] == pytest.approx(heaviest.relative_l2["dq"], rel=0.01)
    assert token.largest_logit == max(row.largest_logit for row in own)
    part = token.attribution["o"]["dq"]
    assert part.share == pytest.approx((part.alone / token.relative_l2["dq"]) ** 2)
    assert part.alone == pytest.approx(heaviest.attribution["o"]["dq"].alone, rel=0.01)


def moved(rows, **changes):
    """The rows as of another window, each relative error and norm times a factor."""
    scaled = {name: changes.pop(name, 1.0) for name in ("errors", "norms")}
    return [
        dataclasses.replace(
            row,
            relative_l2={name: scaled["errors"] * x for name, x in row.relative_l2.items()},
            norm={name: scaled["norms"] * x for name, x in row.norm.items()},
            **changes,
        )
        for row in rows
    ]


def test_windows_count_alike():
    """Whatever their norms: by the root mean square of their errors."""
    rows = study.measure([random_call()], ["token"])
    both = rows + moved(rows, window=1, errors=3.0, norms=1000.0)
    (one,), (two,) = layers.means(rows), layers.means(both)
    assert (two.head, two.window) == (None, None)
    assert two.relative_l2["dq"] == pytest.approx(math.sqrt(5) * one.relative_l2["dq"])
    first, second = layers.by_window(both)
    assert (first.window, second.window) == (0, 1)
    assert second.relative_l2["dq"] == pytest.approx(3 * first.relative_l2["dq"])
    heads = layers.over_windows(both)
    assert [row.head for row in heads] == [0, 1, 2, 3]
    assert heads[1].relative_l2["dk"] == pytest.approx(math.sqrt(5) * rows[1].relative_l2["dk"])


def test_idle_heads_are_told_apart():
    whole = random_call()
    assert layers.idle(study.measure([whole], ["token"])) == {}
    whole.do[0, 1] *= 1e-4  # of both sequences
    whole.do[1, 1] *= 1e-4
    rows = study.measure([whole], ["paper", "token"])
    ((place, share),) = layers.idle(rows).items()
    assert place == (0, 1)
    own, others = rows[2].norm["dq"], [row.norm["dq"] for row in rows[::2]]
    assert share == pytest.approx(own / math.hypot(*others))


@pytest.fixture(scope="module")
def rows():
    """Two layers of two windows; head 1 of layer 1 does next to nothing."""
    found = []
    for window in range(2):
        whole = random_call()
        for layer in range(2):
            if layer == 1:
                whole.do[:, 1] *= 1e-4
            call = dataclasses.replace(whole, layer=layer)
            found += study.measure([call], ["paper", "token"], window=window)
    return found


def test_over_layers_and_windows(rows):
    every = [row for row in layers.by_window(rows) if row.recipe == "token"]
    assert len(every) == 4
    errors = [row.relative_l2["dk"] for row in every]
    mean, worst = summary.overall(rows)["token"]["dk"]
    assert mean == pytest.approx(math.hypot(*errors) / 2)
    assert worst == max(errors)


def test_heads_by_the_weight_of_the_first_key(rows):
    weights = (0.05, 0.1, 0.95, 1.0)
    changed = [dataclasses.replace(row, first_weight=weights[row.head]) for row in rows]
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
