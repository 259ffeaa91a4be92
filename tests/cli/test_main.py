"""`sagebwd` as a person runs it: what it prints, and one line and an exit code where something is wrong."""

import json

import pytest
import torch

from sagebwd.auto.model import DIRECTIONS
from sagebwd.cli import hardware, measure, timings
from sagebwd.cli import main as cli
from sagebwd.kernels.families import FAMILIES
from sagebwd.version import __version__
from tests import programs
from tests.commands import ROOT, runner


@pytest.fixture
def command(monkeypatch, capsys):
    return runner(cli.main, monkeypatch, capsys)


def test_version_is_the_packages(command):
    assert command("--version") == (0, __version__, "")


def test_doctor_on_a_cpu_says_why_there_is_no_kernel(command, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, out, _ = command("doctor", "--device", "cpu")
    assert code == 1
    assert "needs a GPU of compute capability 8.0 or more" in out
    assert "self-test PASS" in out
    assert out.count("runs it") == out.count("torch runs it") == 1
    assert "No kernel runs here: recipe auto runs torch's own attention, and a named one the reference" in out
    assert "right and slow" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it measures")
def test_without_a_gpu_nothing_is_measured(command):
    for options in ((), ("--device", "cpu", "--kind", "causal")):
        code, out, err = command("doctor", "--measure", *options)
        assert (code, out) == (2, "")
        assert "--measure times a GPU, got device cpu; without a GPU recipe 'auto' runs torch's attention" in err


@pytest.mark.parametrize(
    ("recipe", "expected", "said"),
    [
        ("auto", 0, "Recipe auto runs torch's own attention at this head_dim"),
        ("token", 1, "No implementation takes this call: it is refused"),
    ],
)
def test_doctor_says_who_runs_a_wide_head(recipe, expected, said, command):
    """Regression: exit code 1 for what runs, and before, that the reference runs it."""
    code, out, _ = command("doctor", "--device", "cpu", "--head-dim", 520, "--recipe", recipe)
    assert code == expected
    assert "runs it:" not in out
    assert out.count("head_dim 520 is not supported; accepted: 1 to 512") == (0 if recipe == "auto" else len(FAMILIES))
    assert said in out
    code, out, _ = command("doctor", "--device", "cpu", "--head-dim", 300, "--recipe", recipe)
    assert code == 1, "as of any head_dim without a GPU"
    assert ("torch runs it" in out) == (recipe == "auto")
    assert "self-test PASS" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("doctor", "--head-dim", "0"), "head_dim='0': expected a number from 1 to 65536, or two as"),
        (("doctor", "--head-dim", "128/x"), "head_dim='128/x': expected a number from 1"),
        (("doctor", "--head-dim", "64", "--head-dim", "128"), "several --head-dim belong to --measure"),
        (("doctor", "--kind", "causal"), "--kind, --output, --report, --commit and several --head-dim belong to"),
        (("doctor", "--measure", "--head-dim", "65", "--device", "cpu"), "head_dim='65' is not known; accepted: 128"),
        (("doctor", "--measure", "--kind", "triangle", "--device", "cpu"), "kind='triangle' is not known"),
        (("doctor", "--dtype", "int8"), "accepted: bfloat16"),
        (("doctor", "--device", "tpu"), "device='tpu' is not known; accepted: cpu, cuda, cuda:N"),
        (("trace", "--load", ROOT), "a folder; accepted: a file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, arguments, message):
    code, _, err = command(*arguments)
    assert code == 2
    assert message in err


def test_a_missing_extra_is_named():
    outcome = programs.run("import sys; sys.modules['typer'] = None; import sagebwd.cli.main", ROOT)
    assert outcome.returncode == 1
    assert "pip install '.[cli]'" in outcome.stderr


def test_ctrl_c_says_where_the_measured_is_kept(command, monkeypatch, tmp_path):
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(hardware, "check_device", lambda device: None)
    monkeypatch.setattr(timings, "environment", lambda device, commit: {"gpu": "a card"})
    monkeypatch.setattr(measure, "_compile", lambda device, chosen, tell: None)
    cases = []

    def measured(case, point, device, timer):
        cases.append(case)
        if case is not cases[0]:
            raise KeyboardInterrupt
        shape = case.kind, case.head_dim, case.value_dim, *case.shape(point), 0
        times = (1.0, 0.1, 2.0, 0.1, "MATH")
        return [measure.Timing(*shape, direction, "token", "triton/triton", *times) for direction in DIRECTIONS]

    monkeypatch.setattr(measure, "measure_point", measured)
    options = "--device", "cuda", "--kind", "causal", "--kind", "full", "--head-dim", "128"
    code, _, err = command("doctor", "--measure", *options)
    (kept,) = tmp_path.rglob("*.json")
    assert code == 130
    assert f"stopped: what was measured is kept in {kept}" in err
    assert len(json.loads(kept.read_text())["rows"]) == 2 * len(cases[0].points)
