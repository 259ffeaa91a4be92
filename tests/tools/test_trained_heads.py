"""`tools.trained_heads` on a model of random weights."""

import json
import math

import pytest
import torch

from sagebwd.analysis.capture import capture
from sagebwd.analysis.models import load_model, text_windows
from sagebwd.masks.band import Band
from tools import trained_heads


def test_the_command(folder, capsys):
    output = folder / "found.json"
    command = [str(folder / "model"), str(folder / "text.txt"), "--tokens", "96", "--windows", "2", "--layer", "1"]
    assert trained_heads.main([*command, "--recipe", "full", "--recipe", "token", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["window"], row["layer"]) for row in rows] == [(0, 1), (1, 1)]
    for row in rows:
        for name in trained_heads.OUTPUTS:
            assert 0 < row["errors"]["full"][name] < 0.02
            assert 0 < row["errors"]["token"][name] < 0.2
    printed = capsys.readouterr().out
    columns = [row["errors"]["token"]["o"] for row in rows]
    assert f"{math.sqrt(sum(x * x for x in columns) / 2):.4f}" in printed


def test_a_layer_is_that_of_autograd(folder):
    model = load_model(folder / "model")
    (ids,) = text_windows(model, folder / "model", folder / "text.txt", 64)
    (call,) = capture(model, ids, layers=[0])
    tensors = trained_heads.in_bf16(call)
    exact, weights = trained_heads.exact_layer(call, tensors, Band.of(True, -1, -1))
    q, k, v, do = (x.double().requires_grad_() for x in tensors)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale, enable_gqa=True)
    for name, expected in zip(trained_heads.OUTPUTS, (o, *torch.autograd.grad(o, (q, k, v), do))):
        torch.testing.assert_close(exact[name], expected.detach())
    assert weights.sum().item() == pytest.approx(1)


def test_what_makes_scales_coarse():
    x = torch.ones(1, 2, 5, 8)
    x[..., 3] = 10
    channel, row = trained_heads.coarseness(x)
    assert channel == pytest.approx(10)
    assert row == pytest.approx(10 / math.sqrt(107 / 8))
