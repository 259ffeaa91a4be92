"""The benchmark of whole training steps, on a CPU at small sizes."""

import json

import pytest
import torch
import torch.nn.functional as F

from benchmarks import __main__ as cli
from benchmarks import baselines
from benchmarks import step as bench
from benchmarks.step_attentions import FLASH_4, FUSED, OURS, SDPA, Attentions, names_of
from benchmarks.step_models import MODELS
from sagebwd.auto import operands
from sagebwd.integrations import transformers as integration
from tests.commands import runner

pytestmark = pytest.mark.rounding
LLAMA = bench.Case("llama-1b-128", 16, False)
ONE = {"layers": 1, "total": 32, "rounds": 1, "steps": 1}


@pytest.mark.parametrize("name", [name for name in MODELS if not name.endswith("float8")])
def test_a_model_computes_with_ours_what_it_does_with_others(name):
    model = MODELS[name]
    trained = model.build(3 if name == "flux" else 1, 32, 32, "cpu", False, "chunked")
    routers = [part for part in trained.model.modules() if hasattr(part, "top_k")]
    assert bool(routers) == (name == "gpt-oss-20b")
    # or rounding would choose a token's experts, and exact attentions have gradients of a cosine of .86
    assert all(part.top_k == part.num_experts for part in routers)
    losses = []
    for attention in (names_of(model, False)[0], OURS):
        with Attentions(model, trained).applied(attention):
            losses.append(trained.loss(0))
    assert losses[0].requires_grad
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)


def test_attentions_of_a_case_are_timed_and_errors_are_recorded():
    names = SDPA, FLASH_4, OURS, FUSED
    rows = {row.attention: row for row in bench.measure(LLAMA, names, "cpu", **ONE)}
    assert tuple(rows) == names
    absent = rows.pop(FLASH_4)
    assert absent.gate.startswith("does not run: ImportError")
    assert (absent.ms, absent.over_best, absent.best) == (None, None, SDPA)
    for row in rows.values():
        assert row.gate == "ok"
        assert row.gradient_cosine > 0.99
        assert len(row.all_ms) == 1
        assert row.over_best == rows[SDPA].ms / row.ms
        assert row.parts["other"] > 0
    assert rows[SDPA].attention_share > 0


def test_an_attention_that_is_wrong_is_marked_and_not_compared(monkeypatch):
    right = integration.sage_attention
    monkeypatch.setattr(integration, "sage_attention", lambda q, k, v, **given: -right(q, k, v, **given))
    theirs, ours = bench.measure(LLAMA, (SDPA, OURS), "cpu", **ONE)
    assert theirs.gate == "ok"
    assert ours.gate.startswith("wrong: ")
    assert ours.ms > 0
    assert (ours.best, ours.over_best) == (SDPA, None)


def test_gradients_of_outputs_have_one_layout_in_flux(monkeypatch):
    """Regression: cuDNN read dO of a block of two streams by the strides of a block of one, beyond its memory."""
    model = MODELS["flux"]
    trained = model.build(3, 32, 32, "cpu", False, "chunked")
    monkeypatch.setattr(operands, "ANYWHERE", ())  # on a CPU as on a GPU
    sdpa, strides = F.scaled_dot_product_attention, []

    def noted(*given, **options):
        out = sdpa(*given, **options)
        out.grad_fn.register_prehook(lambda gradients: strides.append((gradients[0].stride(), out.stride())))
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    with Attentions(model, trained).applied(SDPA):
        trained.loss(0).backward()
    assert len(strides) == 3
    assert all(of_do == of_o for of_do, of_o in strides)


@pytest.fixture
def broken(monkeypatch):
    """Our attention leaves the device as an access to memory that is not there does."""
    fails = []

    def breaks(*given, **settings):
        fails.append(RuntimeError("CUDA error: an illegal memory access was encountered"))
        raise fails[-1]

    def wait(device):
        if fails:
            raise fails[-1]

    monkeypatch.setattr(integration, "sage_attention", breaks)
    monkeypatch.setattr(baselines, "wait", wait)


def test_an_attention_that_breaks_the_device_ends_the_run_and_is_named(broken, monkeypatch, capsys, tmp_path):
    """Regression: every other attention was said not to run, and the next model ended in a traceback."""
    options = "--device", "cpu", "--model", "llama-1b-64", "--tokens", 16, "--layers", 1, "--output", tmp_path
    names = [text for name in (SDPA, OURS, FUSED) for text in ("--attention", name)]
    code, _, err = runner(cli.main, monkeypatch, capsys)("step", *options, *names, "--commit", "abc")
    assert code == 2
    assert (
        "llama-1b-64, 16 tokens, eager: sagebwd: cpu does nothing more in this process: RuntimeError: CUDA error: an "
        "illegal memory access was encountered; give the others by --attention"
    ) in " ".join(err.split())
    assert not list(tmp_path.iterdir())


def test_what_compiles_as_it_is_timed_has_no_time(monkeypatch):
    step = bench._step

    def compiling(*given):
        torch._dynamo.utils.counters["stats"]["unique_graphs"] += 1
        step(*given)

    monkeypatch.setattr(bench, "_step", compiling)
    (row,) = bench.measure(LLAMA, (SDPA,), "cpu", **ONE)
    assert (row.gate, row.ms) == ("does not run: RuntimeError: compiled as it was timed", None)


def test_the_command_prints_and_writes_and_keeps_other_models(monkeypatch, capsys, tmp_path):
    run = runner(cli.main, monkeypatch, capsys)
    options = "--device", "cpu", "--eager", "--rounds", 1, "--steps", 1, "--layers", 1, "--attention", "sdpa"
    options += "--output", tmp_path, "--commit", "abc", "--kernels-hash", "def"
    for name in ("llama-1b-64", "llama-1b-128"):
        code, out, err = run("step", *options, "--model", name, "--tokens", 16)
        assert code == 0, err
        assert f"{name}, 16 tokens, eager, batch 8, 1 of 16 layers" in out
    (path,) = tmp_path.glob("step_cpu_*_abc.json")
    content = json.loads(path.read_text())
    assert content["kernels"] == "def"
    assert [row["model"] for row in content["rows"]] == ["llama-1b-64", "llama-1b-128"]
    code, out, err = run("step", *options, "--model", "llama-1b-64", "--seconds", 0)
    assert code != 0
    assert "--seconds" in err


def test_the_command_leaves_out_cases_that_lack_an_attention(monkeypatch, capsys, tmp_path):
    """Regression: the first of them, uncompiled, ended the run by an IndexError."""
    options = "--device", "cpu", "--eager", "--model", "llama-1b-64", "--output", tmp_path, "--commit", "abc"
    code, out, err = runner(cli.main, monkeypatch, capsys)("step", *options, "--attention", "sdpa-unmasked")
    assert code == 2
    assert "llama-1b-64, 64 tokens, eager has none of these attentions: sdpa-unmasked" in " ".join(out.split())
    assert "no model was timed" in err
