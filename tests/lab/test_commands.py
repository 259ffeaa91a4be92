"""`python -m lab` as a person runs it: what it prints, and one line and an exit code where something is wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from lab import __main__ as cli
from sagebwd.cli import main as library
from sagebwd.diagnostics import models
from tests.commands import ROOT, runner, without


@pytest.fixture
def command(monkeypatch, capsys):
    return runner(cli.main, monkeypatch, capsys)


@pytest.fixture
def sagebwd(monkeypatch, capsys):
    return runner(library.main, monkeypatch, capsys)


@pytest.fixture
def config(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("Some words to learn from.\n<|endoftext|>\n" * 500, encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""
model: {{layers: 1, width: 32, heads: 2, mlp_width: 32}}
data: {{source: {corpus}, held_out: {corpus}, context: 32, cache: {tmp_path / "cache"}}}
optimisation: {{tokens_per_step: 128, micro_batch: 4, steps: 4, warmup_steps: 1}}
logging: {{every: 1, evaluate_every: 2, evaluate_sequences: 4, checkpoint_every: 2}}
variants:
  full precision: {{attention.recipe: sdpa}}
  token: {{attention.recipe: token}}
""",
        encoding="utf-8",
    )
    return path


def test_compare_writes_its_report(command, config, tmp_path):
    code, out, _ = command("compare", "--config", config, "--output", tmp_path / "both")
    assert code == 0
    assert "full precision" in out
    assert (tmp_path / "both" / "report.html").stat().st_size > 1000
    code, out, _ = command("gaps", tmp_path / "both", "--noise-of", tmp_path / "both")
    assert code == 0
    assert "held-out loss minus the baseline's" in out
    code, _, err = command("gaps", tmp_path)
    assert code == 2
    assert "holds no comparison.json" in err


def test_ctrl_c_is_exit_code_130(config, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "lab", "pretrain", "--config", str(config), "--set",
         "optimisation.steps=100000", "--output", str(tmp_path / "run")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list((tmp_path / "run").glob("checkpoint-*/complete")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert re.search(r"stopped: \S+/checkpoint-\d+ is whole, go on with --resume", stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pretrain", "--config", "missing.yaml"), "there is no such file"),
        (("pretrain", "--config", "CONFIG", "--set", "model.widht=3"), "did you mean model.width"),
        (("pretrain", "--config", "CONFIG", "--resume"), "no whole checkpoint to resume from"),
        (("compare", "--config", "CONFIG", "--only", "nothing"), "there is no variant 'nothing'"),
        (("continue", "--config", "missing.yaml"), "there is no such file"),
        (
            ("continue", "--config", "CONFIG"),
            "run.yaml: a config of `python -m lab` pretrain, compare, seeds and tokenize; expected one of continue",
        ),
        (
            ("pretrain", "--config", ROOT / "configs" / "continued" / "smollm2.yaml"),
            "smollm2.yaml: a config of `python -m lab` continue; expected one of pretrain, compare, seeds",
        ),
        (("seeds", "--config", "CONFIG", "--seeds", "5-3"), "seeds='5-3': 5-3 is empty"),
        (("bench-training", "--device", "tpu"), "device='tpu' is not known"),
        (
            ("bench-training", "--device", "cpu", "--by-layer", "--reduce-overhead"),
            "expected one of --no-compile, --by-layer and --reduce-overhead",
        ),
        (("pretrain", "--config", "CONFIG", "--set", "attention.impl=fast"), "impl='fast' is not known"),
        (("token-file", ROOT, "CONFIG", "CONFIG"), "would be written over TEXT"),
        (("figure", "layers", "CONFIG", "--output", "CONFIG"), "would be written over FILE 1"),
        (("gaussian", "--output", ROOT / "README.md" / "x"), "README.md is no folder; give another"),
        (("bench-training", "--device", "cpu", "--output", ROOT / "README.md"), "README.md is no folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, config, tmp_path, arguments, message):
    arguments = [config if argument == "CONFIG" else argument for argument in arguments]
    if arguments[0] in ("pretrain", "compare", "continue"):
        arguments += ["--output", tmp_path / "out"]
    code, _, err = command(*arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("pretrain", "--config", "configs/demo.yaml", "--set", "model.widht=3"),
        ("compare", "--config", "configs/demo.yaml", "--set", "variants.token={'model.widht': 3}"),
        ("continue", "--config", "configs/continued/smollm2.yaml", "--set", "data.trian=x"),
        ("continue", "--config", "configs/demo.yaml"),
        ("bench-training", "--config", "configs/demo.yaml", "--set", "model.width=wide"),
    ],
)
def test_a_mistake_in_a_config_is_found_before_torch_is_imported(arguments):
    outcome = without("torch", "from lab.__main__ import main; main()", *arguments)
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("lab: config")
    assert len(outcome.stderr.splitlines()) == 1


def test_one_run_and_a_comparison_have_folders_of_their_own(command, config, tmp_path):
    """Regression: pretrain after compare, by default in one folder, mixed their runs."""
    (tmp_path / "both" / "token").mkdir(parents=True)
    (tmp_path / "both" / "token" / "config.yaml").write_text("digest: x\n", encoding="utf-8")
    code, _, err = command("pretrain", "--config", config, "--output", tmp_path / "both")
    assert (code, "both holds several runs, of a comparison; choose another --output" in err) == (2, True)
    assert not (tmp_path / "both" / "config.yaml").exists()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.yaml").write_text("digest: x\n", encoding="utf-8")
    for arguments in (("compare",), ("seeds", "--seeds", "0")):
        code, _, err = command(*arguments, "--config", config, "--output", tmp_path / "one")
        assert (code, "one holds a run of `python -m lab pretrain`" in err) == (2, True)


@pytest.mark.parametrize("left", [[], ["seed-1/mixed"]])
def test_no_gap_is_looked_at_before_all_runs_have_ended(left, command, config, tmp_path, monkeypatch):
    """Regression: a comparison registered for one look printed the gaps of the first six of forty runs."""
    from lab.training import gaps, seeds

    (tmp_path / "comparison.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(seeds, "train", lambda *_: left)
    monkeypatch.setattr(gaps, "gaps", lambda *_, **__: [])
    monkeypatch.setattr(gaps, "table", lambda *_: "the gaps")
    code, out, err = command("seeds", "--config", config, "--seeds", "0-1", "--output", tmp_path)
    assert (code, "the gaps" in out, "seed-1/mixed" in err) == (0, not left, bool(left))


def test_trace_reads_texts_by_the_tokeniser_of_a_run(command, sagebwd, config, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "ENCODERS", [])
    settings = ("--set", "data.tokenizer=bytes", "--set", "model.qk_norm=true")
    assert command("pretrain", "--config", config, *settings, "--output", tmp_path / "run")[0] == 0
    trace = ("trace", "--model", tmp_path / "run" / "model", "--tokens", 16, "--output", tmp_path / "trace.json")
    code, out, _ = command(*trace)
    assert code == 0
    assert "one window of 16 tokens" in out
    assert json.loads((tmp_path / "trace.json").read_text())["tokens"] == 16
    assert models.encode(tmp_path / "run" / "model", "ab").tolist() == [[97, 98, 256]]
    assert models.encode(tmp_path / "run", "ab").tolist() == [[97, 98, 256]]
    models.ENCODERS.clear()
    code, _, err = sagebwd(*trace)
    assert (code, "runs of the laboratory need `python -m lab trace`" in err) == (2, True)


def test_a_missing_extra_is_named():
    outcome = without("typer", "import lab.__main__")
    assert outcome.returncode == 1
    assert "pip install '.[lab]'" in outcome.stderr
