"""What a trace says of a whole model: over layers and windows, by the first key's weight, and what is idle."""

import dataclasses
import json
import lzma
import math

import pytest

from sagebwd.analysis import layers, summary
from sagebwd.analysis import trace as study
from tests.analysis.test_trace import random_call


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


@pytest.mark.parametrize("name", ["rows.json", "rows.json.xz"])
def test_a_file_is_read_again_and_printed(rows, tmp_path, capsys, name):
    text = json.dumps({"rows": [row.as_dict() for row in rows]}).encode()
    (tmp_path / name).write_bytes(lzma.compress(text) if name.endswith("xz") else text)
    assert summary.read(tmp_path / name) == rows
    summary.main([str(tmp_path / name)])
    out = capsys.readouterr().out
    assert f"{summary.overall(rows)['paper']['dq'][0]:.4f}" in out
    assert "idle heads" in out
    assert "1 head 1" in out
    with pytest.raises(SystemExit, match="python -m sagebwd"):
        summary.main([])


def test_attribution_is_read_again(tmp_path):
    rows = study.measure([random_call(tokens=64, heads=2)], ["token"], attribute=True)
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [row.as_dict() for row in rows]}))
    assert summary.read(tmp_path / "rows.json") == rows
    more = [dataclasses.replace(row, layer=layer) for layer in range(3) for row in rows]
    (layer,) = layers.means(rows)
    found = summary.shares(more)
    assert found["token", "dv"]["dv"] == pytest.approx(layer.attribution["dv"]["dv"].share)
    assert found["token", "dv"]["o"] == pytest.approx(0, abs=1e-4)
    assert [source for _, source in found] == ["s", "o", "dv", "dq", "dk"]
