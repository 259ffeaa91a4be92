"""Commands as a person runs them: what they print, and one line and an exit code where something is wrong."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from sagebwd.benchmarks import attention, low_bit, peers
from sagebwd.benchmarks.shapes import Shape
from sagebwd.commands import doctor
from sagebwd.commands import main as cli
from tests.scaled import scaled

ROOT = Path(__file__).parent.parent


def sagebwd(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "sagebwd.commands.main", *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        | environment,
    )  # fmt: skip


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command in this process: exit code, stdout and stderr on one line each."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sagebwd", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code, " ".join(out.split()), " ".join(err.split())

    return run


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


def test_help_lists_the_commands_quickly():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome = sagebwd("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert outcome.returncode == 0
    names = ("pretrain", "compare", "seeds", "gaps", "tokenize", "finetune", "task", "gaussian", "bench", "doctor")
    assert all(name in outcome.stdout for name in names)
    # seconds of processor, not of a clock: CI's two cores are busy with other tests
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20


def test_gaussian_prints_and_saves(command, tmp_path):
    code, out, _ = command(
        "gaussian",
        "--recipe",
        "token",
        "--sigma",
        5,
        "--tokens",
        128,
        "--head-dim",
        16,
        "--output",
        tmp_path / "t.json",
    )
    assert code == 0
    assert "0.2014" in out  # the paper's dQ
    rows = json.loads((tmp_path / "t.json").read_text())
    assert [row["tensor"] for row in rows] == ["o", "dq", "dk", "dv"]
    assert f"{rows[1]['relative_l2']:.4f}" in out


@pytest.mark.parametrize("name", ["trace", "gaussian", "finetune", "bench-training"])
def test_help_has_the_defaults_that_its_texts_name(name, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = command(name, "--help")
    named = [option.help for option in typer.main.get_command(cli.app).commands[name].params if "[" in option.help]
    assert named
    words = "".join(out.replace("│", "").split())
    assert not [text for text in named if "".join(text.split()) not in words]


def test_doctor_prints_what_to_install_as_it_is_typed(command, monkeypatch):
    advice = (
        "forward on the portable kernels: nvidia-cutlass-dsl is not installed (in a clone: pip install '.[hopper]')"
    )
    refused = doctor.Answer("hopper", False, False, "block_mask: expected [a, b]")
    monkeypatch.setattr(doctor, "facts", lambda: {"mixed on Hopper": advice})
    monkeypatch.setattr(doctor, "answers", lambda *call: [refused])
    code, out, _ = command("doctor", "--device", "cpu")
    assert code == 1
    assert advice in out
    assert refused.reason in out


def test_doctor_on_a_cpu_says_why_there_is_no_kernel(command, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, out, _ = command("doctor", "--device", "cpu")
    assert code == 1
    assert "needs a CUDA device" in out
    assert "self-test PASS" in out


def test_bench_on_a_cpu(command, tmp_path, monkeypatch):
    monkeypatch.setattr("sagebwd.benchmarks.shapes.TOTAL_TOKENS", 32)
    code, out, _ = command(
        "bench", "--device", "cpu", "--impl", "reference", "--head-dim", 64, "--tokens", 32, "--recipe", "token",
        "--recipe", "mixed", "--deterministic", "--no-special", "--rounds", 1, "--output", tmp_path,
        "--commit", "abc",
    )  # fmt: skip
    assert code == 0
    assert "reference token" in out
    assert "over the best baseline" in out
    assert "mixed (reference), time of the deterministic mode: fwd" in out
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv", ".png"}


def test_bench_says_which_peer_is_wrong_and_what_it_does_not_claim(command, tmp_path, monkeypatch):
    (sdpa,) = peers.baselines(Shape(64, 1, 1, 1, 32, False), "cpu").values()
    found = {"cudnn": scaled(sdpa, dq=2.06), "fa2": sdpa}
    monkeypatch.setattr(attention, "candidates", lambda shape, device: found)
    monkeypatch.setattr(peers, "is_hopper", lambda device: True)
    monkeypatch.setattr("sagebwd.benchmarks.shapes.TOTAL_TOKENS", 32)
    code, out, _ = command(
        "bench", "--device", "cpu", "--head-dim", "192/128", "--tokens", 32, "--recipe", "token", "--no-special",
        "--rounds", 1, "--output", tmp_path, "--commit", "abc",
    )  # fmt: skip
    assert code == 0
    assert "D192/128 H16 B1 N32 causal" in out
    assert "cudnn does not count here, wrong: dq 1.0" in out
    assert "no claim over the best baseline: FlashAttention-4 is not installed" in out
    assert "over the best baseline: fwd" not in out
    assert "token (reference) over FlashAttention-2: fwd" in out
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv", ".png"}


def test_bench_beside_a_low_bit_peer(command, tmp_path, monkeypatch):
    def attention(*x, is_causal, gradients):
        sdpa = peers.candidates(Shape(128, 1, 1, 1, 32, is_causal), "cpu")["sdpa"]
        return scaled(sdpa, o=1.03)(*x)

    package = SimpleNamespace(backend_version_string=lambda: "9.99.0", __version__="1.0")
    monkeypatch.setattr(low_bit.cudnn_fp8, "frontend", lambda: package)
    monkeypatch.setattr(low_bit.cudnn_fp8, "attention", attention)
    monkeypatch.setattr("sagebwd.benchmarks.shapes.TOTAL_TOKENS", 32)
    code, out, _ = command(
        "bench", "--device", "cpu", "--head-dim", 128, "--tokens", 32, "--recipe", "mixed", "--no-special",
        "--peer", "cudnn-fp8", "--rounds", 1, "--output", tmp_path, "--commit", "abc",
    )  # fmt: skip
    assert code == 0
    assert "cudnn-fp8 fp8" in out
    assert "mixed (reference) over cudnn-fp8: fwd" in out
    assert "cudnn-fp8's: o 0.0" in out
    assert "all shapes: mixed (reference) over cudnn-fp8" in out
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert (found["cudnn"], found["cudnn_frontend"]) == ("9.99.0", "1.0")
    assert {row["peer"] for row in found["rows"]} == {"sdpa"}
    assert {bool(row["errors"]) for row in found["rows"] if row["recipe"] == "fp8"} == {True}


def test_bench_of_packed_documents(command, tmp_path, monkeypatch):
    monkeypatch.setattr("sagebwd.benchmarks.packed.EQUAL", ((8, 8), (8,)))
    monkeypatch.setattr("sagebwd.benchmarks.packed.MIXED", (13, 5))
    code, out, _ = command(
        "bench", "--packed", "--device", "cpu", "--impl", "reference", "--head-dim", 128, "--recipe", "token",
        "--rounds", 1, "--output", tmp_path, "--commit", "abc",
    )  # fmt: skip
    assert code == 0
    assert "D128 H16/4 packed 2 of 5 to 13 causal" in out
    assert "token (reference) over the best baseline: fwd" in out
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv"}  # no grid, no plot
    (path,) = tmp_path.glob("packed_cpu_*_abc.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["lengths"] for row in rows[::6]] == [[8, 8], [8], [13, 5], [13, 5]]
    assert [row["kv_heads"] for row in rows[::6]] == [16, 16, 16, 4]


def test_a_bench_that_is_cut_off_has_what_it_measured(command, tmp_path, monkeypatch):
    measure, shapes = attention.measure_shape, []

    def cut_off(shape, *arguments, **options):
        shapes.append(shape)
        if len(shapes) == 2:
            raise ValueError("no more time")
        return measure(shape, *arguments, **options)

    monkeypatch.setattr("sagebwd.benchmarks.shapes.TOTAL_TOKENS", 32)
    monkeypatch.setattr(attention, "measure_shape", cut_off)
    code, _, err = command(
        "bench", "--device", "cpu", "--impl", "reference", "--head-dim", 64, "--tokens", 32, "--no-special",
        "--rounds", 1, "--output", tmp_path, "--commit", "abc",
    )  # fmt: skip
    assert (code, "no more time" in err) == (2, True)
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())["rows"]
    assert {row["causal"] for row in rows} == {shapes[0].is_causal}


def test_tokenize_makes_the_files_that_a_run_takes(command, config, tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path / "cache"))
    code, out, _ = command("tokenize", "--config", config, "--set", "data.cache=null")
    assert code == 0
    (folder,) = (tmp_path / "cache").iterdir()
    assert str(folder) in out
    made = (folder / "train.bin").stat()
    tokens = made.st_size // 2
    assert f"{tokens:,} training and" in out
    assert command("pretrain", "--config", config, "--set", "data.cache=null", "--output", tmp_path / "run")[0] == 0
    assert (folder / "train.bin").stat().st_mtime_ns == made.st_mtime_ns
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_pretrain_and_its_second_run(command, config, tmp_path):
    assert command("pretrain", "--config", config, "--output", tmp_path / "run")[0] == 0
    assert (tmp_path / "run" / "result.json").exists()
    code, _, err = command("pretrain", "--config", config, "--output", tmp_path / "run")
    assert code == 2
    assert "holds this run, finished" in err


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


def test_a_task_is_made_and_fine_tuned_on(command, tmp_path):
    paragraphs = [" ".join(f"w{place}x{word}" for word in range(25)) for place in range(200)]
    documents = ["\n\n".join(paragraphs[start : start + 4]) for start in range(0, 200, 4)]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{text}\n<|endoftext|>\n" for text in documents), encoding="utf-8")
    code, out, _ = command(
        "task", "order", "--source", corpus, "--output", tmp_path, "--examples", 16, "--held-out-examples", 4,
        "--held-out-share", 0.3,
    )  # fmt: skip
    assert code == 0
    assert "train.jsonl: 16 examples" in out
    config = tmp_path / "order.yaml"
    config.write_text(
        f"""
model: {{layers: 1, width: 32, heads: 2, mlp_width: 32}}
data: {{train: {tmp_path}/train.jsonl, held_out: {tmp_path}/held_out.jsonl, tokenizer: bytes, max_tokens: 64}}
variants:
  full precision: {{attention.recipe: sdpa}}
  token: {{attention.recipe: token}}
""",
        encoding="utf-8",
    )
    arguments = ("finetune", "--config", config, "--output", tmp_path / "out", "--set", "logging.keep_model=false")
    code, out, _ = command(*arguments)
    assert code == 0
    assert "accuracy on held-out examples" in out
    code, _, err = command(*arguments)
    assert code == 2
    assert "holds 2 of these 2 runs; go on with --resume" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pretrain", "--config", "missing.yaml"), "there is no such file"),
        (("pretrain", "--config", "CONFIG", "--set", "model.widht=3"), "did you mean model.width"),
        (("pretrain", "--config", "CONFIG", "--set", "data.source=none.txt"), "there is no such file"),
        (("pretrain", "--config", "CONFIG", "--resume"), "no whole checkpoint to resume from"),
        (("pretrain", "--config", "CONFIG", "--set", "optimisation.micro_batch=3"), "is not a multiple of"),
        (("compare", "--config", "CONFIG", "--only", "nothing"), "there is no variant 'nothing'"),
        (("finetune", "--config", "missing.yaml"), "there is no such file"),
        (("finetune", "--config", "CONFIG"), "config: there is no key"),
        (
            ("task", "sorting", "--source", "x.txt"),
            "task='sorting' is not known; accepted: continuation, subject, order, neighbours",
        ),
        (("gaussian", "--recipe", "fp4"), "none called 'fp4'"),
        (("gaussian", "--kind", "uniform"), "kind='uniform' is not known"),
        (("doctor", "--dtype", "int8"), "accepted: bfloat16"),
        (("doctor", "--device", "tpu"), "device='tpu' is not known; accepted: cpu, cuda, cuda:N"),
        (("gaussian", "--device", "tpu"), "device='tpu' is not known"),
        (("trace", "--model", "missing", "--device", "tpu"), "device='tpu' is not known"),
        (("bench-training", "--device", "tpu"), "device='tpu' is not known"),
        (("bench", "--device", "tpu"), "device='tpu' is not known"),
        (("bench", "--device", "cpu", "--packed", "--tokens", 32), "none of --tokens, --special and --peer"),
        (("bench", "--device", "cpu", "--packed", "--special"), "none of --tokens, --special and --peer"),
        (
            ("bench", "--device", "cpu", "--peer", "fa5"),
            "peer='fa5' is not known; accepted: cudnn-fp8, cudnn-fp8-e4m3",
        ),
        (("bench", "--device", "cpu", "--impl", "fast"), "impl='fast' is not known; accepted: None, 'reference'"),
        (
            ("bench", "--device", "cpu", "--head-dim", "100"),
            "head_dim=100 is not of the grid; accepted: 64, 72, 80, 96, 112, 128, 192, 192/128, 256",
        ),
        (("gaussian", "--impl", "fast"), "impl='fast' is not known"),
        (("pretrain", "--config", "CONFIG", "--set", "attention.impl=fast"), "impl='fast' is not known"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, config, tmp_path, arguments, message):
    arguments = [config if argument == "CONFIG" else argument for argument in arguments]
    if arguments[0] in ("pretrain", "compare", "finetune", "task"):
        arguments += ["--output", tmp_path / "out"]
    code, _, err = command(*arguments)
    assert code == 2
    assert message in err


def test_a_mistake_shows_no_traceback():
    outcome = sagebwd("bench")
    assert outcome.returncode == 2
    assert "torch sees no GPU" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_ctrl_c_is_exit_code_130(config, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "sagebwd.commands.main", "pretrain", "--config", str(config), "--set",
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
    assert "stopped; checkpoints written so far are whole, go on with --resume" in " ".join(stderr.split())


def test_a_missing_extra_is_named():
    program = "import sys; sys.modules['typer'] = None; import sagebwd.commands.main"
    outcome = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert outcome.returncode == 1
    assert "pip install '.[train]'" in outcome.stderr
