"""`tools.trained_gradients` on a model of random weights."""

import json
import math
import statistics

import pytest
import torch

from sagebwd.analysis.models import load_model, text_windows
from tools import trained_gradients


def test_the_command(folder, capsys):
    output = folder / "found.json"
    command = [str(folder / "model"), str(folder / "text.txt"), "--tokens", "96", "--windows", "2"]
    recipes = [text for recipe in ("bf16", "full", "token") for text in ("--recipe", recipe)]
    assert trained_gradients.main([*command, *recipes, "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["window"] for row in rows] == [0, 1]
    for row in rows:
        rounded, full, token = (row["recipes"][name] for name in ("bf16", "full", "token"))
        assert 0 < rounded["all"]["error"] < 0.01
        assert 0 < full["all"]["error"] < 0.02
        assert rounded["all"]["error"] < token["all"]["error"] < 0.2
        assert abs(token["all"]["slope"]) <= token["all"]["error"]
        assert set(token) == {"loss", *trained_gradients.GROUPS}
    printed = capsys.readouterr().out
    errors = [row["recipes"]["token"]["all"]["error"] for row in rows]
    assert f"{statistics.mean(errors):.4f} ± {statistics.stdev(errors) / math.sqrt(2):.4f}" in printed


def test_full_precision_is_the_models_own(folder):
    model = load_model(folder / "model")
    (ids,) = text_windows(model, folder / "model", folder / "text.txt", 64)
    loss, expected = trained_gradients.gradients(model, ids)
    expected = {name: x.clone() for name, x in expected.items()}
    trained_gradients.Probe()
    model.set_attn_implementation(trained_gradients.NAME)
    again, found = trained_gradients.gradients(model, ids)
    assert again == pytest.approx(loss, rel=1e-5)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-3, atol=1e-5)


def test_error_and_slope():
    exact = {"a.q_proj": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    found = trained_gradients.compared({"a.q_proj": torch.tensor([1.5, 1.0]), "b": torch.tensor([4.0])}, exact)
    assert found["all"] == {"error": pytest.approx(math.sqrt(3.25) / 5), "slope": pytest.approx(-4.5 / 25)}
    assert found["q_proj"] == {"error": pytest.approx(math.sqrt(3.25) / 3), "slope": pytest.approx(-0.5)}
    assert "k_proj" not in found
