"""Errors of the gradients of a trained model's weights."""

import json
import math
import statistics

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sagebwd.diagnostics.models import load_model, text_windows
from tools import trained_gradients


def test_the_command(folder, capsys):
    output = folder / "found.json"
    command = [str(folder / "model"), str(folder / "text.txt"), "--tokens", "96", "--windows", "2"]
    recipes = [text for recipe in ("bf16", "full", "token") for text in ("--recipe", recipe)]
    assert trained_gradients.main([*command, *recipes, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    rows, layers = found["rows"], found["layers"]
    assert [row["window"] for row in rows] == [0, 1]
    assert set(layers) == {"bf16", "full", "token"}
    assert set(layers["token"]["0"]) == set(trained_gradients.GROUPS)
    assert 0 < layers["token"]["0"]["all"]["error"] < 0.2
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_are_as_right_as_their_emulator(folder):
    command = [
        str(folder / "model"),
        str(folder / "text.txt"),
        "--tokens",
        "96",
        "--windows",
        "2",
        "--recipe",
        "token",
    ]
    rows = []
    for which in ((), ("--emulated",)):
        output = folder / "found.json"
        assert trained_gradients.main([*command, "--device", "cuda", *which, "--output", str(output)]) == 0
        rows.append(json.loads(output.read_text())["rows"])
    for kernels, emulator in zip(*rows, strict=True):
        kernels, emulator = (row["recipes"]["token"]["all"]["error"] for row in (kernels, emulator))
        assert 0 < kernels < 1.5 * emulator


def test_weights_and_tokens_of_continued_training(folder, capsys):
    model = load_model(folder / "model")
    weights = {name: x.detach().clone() for name, x in model.named_parameters()}
    command = ["--tokens", "96", "--windows", "1", "--recipe", "full", "--output", str(folder / "found.json")]
    losses = []
    for text, factor in (("text.txt", 0), ("ids.npy", 0), ("ids.npy", 1), ("ids.npy", 2)):
        if text == "ids.npy":
            np.save(folder / text, np.array([i * i % 64 for i in range(300)], np.uint16))
        given = [str(folder / "model"), str(folder / text), *command]
        if factor:
            save_file({name: factor * x for name, x in weights.items()}, folder / "weights.safetensors")
            given += ["--weights", str(folder / "weights.safetensors")]
        assert trained_gradients.main(given) == 0
        kept = json.loads((folder / "found.json").read_text())
        assert (kept["impl"], kept["weights"]) == ("reference", given[-1] if factor else None)
        (row,) = kept["rows"]
        losses.append(row["loss"])
    assert losses[0] == pytest.approx(losses[1]) == pytest.approx(losses[2])
    assert losses[3] != pytest.approx(losses[0], rel=1e-3)
    save_file({"lm_head.weight": weights["lm_head.weight"]}, folder / "weights.safetensors")
    with pytest.raises(ValueError, match=f"of {len(weights)} of the model it has 1"):
        trained_gradients.main(given)


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


def test_error_and_slope_of_each_layer():
    exact = {
        "model.layers.0.self_attn.q_proj.weight": torch.tensor([2.0, 0.0]),
        "model.layers.10.self_attn.q_proj.weight": torch.tensor([0.0, 4.0]),
        "model.layers.10.mlp.weight": torch.tensor([3.0]),
        "model.embed_tokens.weight": torch.tensor([1.0]),
    }
    found = {name: x.clone() for name, x in exact.items()}
    found["model.layers.10.self_attn.q_proj.weight"] = torch.tensor([0.0, 3.0])
    of = trained_gradients.compared(found, exact)
    none = {"error": 0.0, "slope": 0.0}
    assert of["layers"] == {
        "0": {"all": none, "q_proj": none},
        "10": {
            "all": {"error": pytest.approx(1 / 5), "slope": pytest.approx(-4 / 25)},
            "q_proj": {"error": pytest.approx(1 / 4), "slope": pytest.approx(-1 / 4)},
        },
    }
    assert of["q_proj"] == {"error": pytest.approx((1 / 20) ** 0.5), "slope": pytest.approx(-4 / 20)}
    assert of["all"]["slope"] == pytest.approx(-4 / 30)


def test_means_over_windows_are_those_of_all():
    slopes, errors, found = [0.25, -0.5, 1.0, 0.125], [0.1, 0.3, 0.2, 0.5], None
    for count, (slope, error) in enumerate(zip(slopes, errors), 1):
        found = trained_gradients.average(found, count, {"slope": slope, "error": error})
        seen = slopes[:count]
        assert found["slope"] == pytest.approx(statistics.mean(seen))
        assert found["slope_error"] == pytest.approx(statistics.stdev(seen) / math.sqrt(count) if count > 1 else 0)
    assert found["error"] == pytest.approx(statistics.mean(errors))
