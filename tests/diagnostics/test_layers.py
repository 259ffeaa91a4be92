"""What traces of a model's layers come to: by layer, over all."""

import dataclasses
import math
from functools import cache

import pytest

from sagebwd.diagnostics import layers
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


@cache
def two_windows():
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


def test_over_layers_and_windows():
    rows = two_windows()
    every = [row for row in layers.by_window(rows) if row.recipe == "token"]
    assert len(every) == 4
    errors = [row.relative_l2["dk"] for row in every]
    mean, worst = layers.overall(rows)["token"]["dk"]
    assert mean == pytest.approx(math.hypot(*errors) / 2)
    assert worst == max(errors)
