"""The assay of gradients: errors of a model's weights, and faults that it tells apart."""

import json
import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from lab import __main__ as cli
from lab.studies import assay, planted_faults
from sagebwd.diagnostics.models import load_model, text_windows
from tests.commands import runner


@pytest.fixture
def command(monkeypatch, capsys):
    return runner(cli.main, monkeypatch, capsys)


def given(folder, *more):
    return ["assay", "--model", str(folder / "model"), "--text", str(folder / "text.txt"), "--tokens", "96",
            "--windows", "2", "--output", str(folder / "found.json"), *more]  # fmt: skip


def drawn(table):
    console = Console(record=True, width=200)
    console.print(table)
    return console.export_text()


def test_the_command(folder, command):
    recipes = [text for recipe in ("bf16", "full", "token") for text in ("--recipe", recipe)]
    code, printed, _ = command(*given(folder, "--no-faults", *recipes))
    assert code == 0
    found = json.loads((folder / "found.json").read_text())
    rows, layers = found["rows"], found["layers"]
    assert [row["window"] for row in rows] == [0, 1]
    assert set(layers) == {"bf16", "full", "token"}
    assert set(layers["token"]["0"]) == set(assay.GROUPS)
    assert 0 < layers["token"]["0"]["all"]["error"] < 0.2
    for row in rows:
        rounded, full, token = (row["recipes"][name] for name in ("bf16", "full", "token"))
        assert 0 < rounded["all"]["error"] < 0.01
        assert 0 < full["all"]["error"] < 0.02
        assert rounded["all"]["error"] < token["all"]["error"] < 0.2
        assert abs(token["all"]["slope"]) <= token["all"]["error"]
        assert 0 < token["all"]["angle"] <= token["all"]["error"] ** 2
        assert set(token) == {"loss", *assay.GROUPS}
    errors = [row["recipes"]["token"]["all"]["error"] for row in rows]
    assert f"{statistics.mean(errors):.4f} ± {statistics.stdev(errors) / math.sqrt(2):.4f}" in drawn(assay.table(rows))
    assert "2 windows" in printed


@pytest.fixture
def call():
    generator = torch.Generator().manual_seed(0)
    q, do = (torch.randn(1, 4, 32, 8, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, 2, 32, 8, generator=generator) for _ in range(2))
    return planted_faults.Call(q, k, v, 0.3, do)


def attended(q, k, v, scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def outcomes(call, fault=None):
    """O and gradients, of attention itself or with a fault."""
    leaves = [x.clone().requires_grad_() for x in call[:3]]
    own = lambda *x: attended(*x, call.scale)  # noqa: E731
    o = own(*leaves) if fault is None else planted_faults.planted(fault, own, *leaves, call.scale)
    return [o.detach(), *torch.autograd.grad(o, leaves, call.do)]


def test_planted_faults_are_what_they_say(call):
    o, dq, dk, dv = outcomes(call)
    names = list(planted_faults.FAULTS)
    lost, small, delta, mean = (outcomes(call, name) for name in names)
    # dK of the queries that are left is that of a call in which no gradient comes in at the last 2
    do = call.do.clone()
    do[:, :, -2:] = 0
    torch.testing.assert_close(lost[2], outcomes(call._replace(do=do))[2])
    torch.testing.assert_close(small[3], 0.92 * dv)
    # delta enters dS alone, so sums of dS over keys are what it lacks: P^T's rows sum to 1
    p, dp = call.parts()
    ds = p * (dp - 1.05 * (p * dp).sum(-1, keepdim=True)) * call.scale
    torch.testing.assert_close(delta[1], ds @ call.spread(call.k))
    torch.testing.assert_close(delta[2], call.shared(ds.mT @ call.q))
    torch.testing.assert_close(mean[0], o - call.spread(call.v[:, :, -1:]) / 32)
    for index, found in enumerate((lost, small, delta, mean)):
        changed = [not torch.equal(a, b) for a, b in zip(found, (o, dq, dk, dv))]
        assert changed == [[0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0]][index]


def test_full_precision_is_the_models_own(folder):
    model = load_model(folder / "model")
    (ids,) = text_windows(model, folder / "model", folder / "text.txt", 64)
    loss, expected = assay.gradients(model, ids)
    expected = {name: x.clone() for name, x in expected.items()}
    assay.Probe()
    model.set_attn_implementation(assay.NAME)
    again, found = assay.gradients(model, ids)
    assert again == pytest.approx(loss, rel=1e-5)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-3, atol=1e-5)


@pytest.fixture
def run(tmp_path):
    corpus = tmp_path / "corpus.txt"
    sentences = (f"In {n} the {n % 7}th of them went {'up' if n % 3 else 'down'} the hill. " for n in range(4000))
    corpus.write_text("\n<|endoftext|>\n".join("".join(next(sentences) for _ in range(8)) for _ in range(500)))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""
name: tiny
model: {{layers: 1, width: 64, heads: 2, mlp_width: 64}}
data: {{source: {corpus}, context: 128, cache: {tmp_path / "cache"}}}
optimisation: {{tokens_per_step: 1024, micro_batch: 8, steps: 24, warmup_steps: 4, learning_rate: 5.0e-3}}
logging: {{every: 24, evaluate_every: 24, evaluate_sequences: 4, checkpoint_every: 24}}
""",
        encoding="utf-8",
    )
    return path


@pytest.mark.rounding
def test_planted_faults_are_told_apart_in_a_model_that_the_command_trains(run, tmp_path, command):
    output = tmp_path / "found.json"
    words = ["assay", "--config", str(run), "--run", str(tmp_path / "trained"), "--recipe", "mixed", "--tokens", "64",
             "--windows", "24", "--output", str(output)]  # fmt: skip
    code, _, _ = command(*words)
    content = json.loads(output.read_text())
    found = {one["arm"]: one for one in content["apart"]}
    assert set(found) == {f"mixed, {name}" for name in ("moved", *planted_faults.FAULTS)}
    for name in planted_faults.FAULTS:
        assert found[f"mixed, {name}"]["apart"], found[f"mixed, {name}"]
    assert found["mixed, dV 8% small"]["group"] == "v_proj"
    slopes = {
        name: statistics.mean(row["recipes"][name]["v_proj"]["slope"] for row in content["rows"])
        for name in ("mixed", "mixed, dV 8% small")
    }
    assert slopes["mixed, dV 8% small"] - slopes["mixed"] == pytest.approx(-0.08, abs=0.01)
    assert found["mixed, moved"]["p"] > 1e-4, "moved by less than BF16 tells"
    assert code == int(found["mixed, moved"]["apart"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_are_not_told_from_their_emulator_and_faults_are(run, tmp_path, command):
    output = tmp_path / "found.json"
    words = ["assay", "--config", str(run), "--run", str(tmp_path / "trained"), "--recipe", "mixed", "--recipe",
             "token", "--tokens", "128", "--windows", "24", "--output", str(output), "--device", "cuda"]  # fmt: skip
    command(*words)
    for one in json.loads(output.read_text())["apart"]:
        faulty = one["arm"].partition(", ")[2] in planted_faults.FAULTS
        assert one["apart"] if faulty else one["p"] > 1e-4, one
