"""Stories 6 and 10: the command line."""

import csv
import json
import statistics
from pathlib import Path

import pytest
import torch

from tests import programs

ROOT = Path(__file__).parents[2]


DOCTOR = "from sagebwd.cli import main as cli; cli.main()"
LAB = "from lab import __main__ as cli; cli.main()"


def run(*arguments, code, program=LAB, **environment):
    """What the command prints, and what it warns of; the exit code is as given, and no traceback is shown."""
    outcome = programs.run(program, ROOT, *map(str, arguments), **environment)
    assert outcome.returncode == code, outcome.stderr
    assert "Traceback" not in outcome.stderr
    return " ".join(outcome.stdout.split()), " ".join(outcome.stderr.split())


@pytest.mark.rounding
def test_story_6_pretrain_parity(tmp_path):
    """“same data order; final val loss differs by <= 1%; [no QK-norm] warns. Files: metrics.jsonl, curves.png for
    both; a third run with [no K-smoothing] shown”. Here a tiny model for 40 steps; the story's 1000 steps are
    configs/parity.yaml, whose outcome is in dev/log/2026-11-22-small-runs.md. At three times this learning rate
    another order of adding moves an end by .7%."""
    corpus = tmp_path / "corpus.txt"
    sentence = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.\n"
    corpus.write_text("<|endoftext|>\n".join(f"Document {n}. {sentence * 3}" for n in range(300)), encoding="utf-8")
    config = tmp_path / "parity.yaml"
    config.write_text(
        f"""
model: {{layers: 2, width: 32, heads: 2, mlp_width: 48}}
data: {{source: {corpus}, context: 64, cache: {tmp_path / "cache"}}}
optimisation: {{tokens_per_step: 256, micro_batch: 4, steps: 40, warmup_steps: 4, learning_rate: 3.0e-3}}
logging: {{every: 1, evaluate_every: 20, evaluate_sequences: 8, checkpoint_every: 40}}
variants:
  sdpa: {{attention.recipe: sdpa}}
  token: {{attention.recipe: token}}
  no smoothing: {{attention.recipe: token(smooth_k=False)}}
  no norm: {{attention.recipe: token, model.qk_norm: false}}
""",
        encoding="utf-8",
    )
    folder = tmp_path / "runs"
    chosen = [part for name in ("sdpa", "token", "no smoothing") for part in ("--only", name)]
    command = ("compare", "--config", config, "--output", folder)
    _, said = run(*command, *chosen, code=0)
    assert "QK-norm" not in said
    _, said = run(
        *command, "--only", "no norm", "--set", "optimisation.steps=2", "--output", tmp_path / "norm", code=0
    )
    assert "without QK-norm INT8 attention can diverge" in said
    outcomes = json.loads((folder / "comparison.json").read_text())["outcomes"]
    final = {outcome["variant"]: outcome["held_out_loss"] for outcome in outcomes}
    first_losses = []
    for variant in ("sdpa", "token", "no smoothing"):
        assert abs(final[variant] / final["sdpa"] - 1) <= 0.01
        lines = [json.loads(line) for line in (folder / variant / "metrics.jsonl").read_text().splitlines()]
        first_losses.append(next(line["loss"] for line in lines if "loss" in line))
        assert final[variant] < first_losses[-1] - 1
    # the same weights saw the same first batch
    assert max(first_losses) - min(first_losses) < 0.01
    assert (folder / "curves.png").stat().st_size > 1000
    assert (folder / "report.html").stat().st_size > 1000


def test_story_10_doctor_says_why_there_is_no_kernel():
    """“prints GPU/arch/torch/triton and PASS, on CPU-only prints why not and exits non-zero without traceback”.

    The clean install is `make package` (tools/package.py)."""
    said, _ = run("doctor", code=1, program=DOCTOR, CUDA_VISIBLE_DEVICES="")
    assert torch.__version__ in said
    for part in ("triton", "GPU none that torch can see", "needs a CUDA device", "self-test PASS", "right and slow"):
        assert part in said


SMALL_BENCH = """
from benchmarks import __main__ as cli
from benchmarks import shapes
shapes.TOTAL_TOKENS = 64
cli.main()
"""


def test_story_10_honest_bench(tmp_path):
    """“writes PNG+CSV with rows fwd, bwd, fwd+bwd for sdpa and sagebwd, quantisation included, and says 'slower' where
    it is”."""
    arguments = (
        "attention", "--device", "cpu", "--impl", "reference", "--head-dim", 64, "--tokens", 64, "--recipe", "token",
        "--no-special", "--rounds", 1, "--output", tmp_path, "--commit", "story",
    )  # fmt: skip
    said, _ = run(*arguments, code=0, program=SMALL_BENCH)
    (results,) = tmp_path.glob("*.json")
    rows = json.loads(results.read_text())["rows"]
    ours = [row for row in rows if row["impl"] == "reference"]
    assert len(rows) > len(ours)
    assert {row["direction"] for row in ours} == {"fwd", "bwd", "fwd+bwd"}
    assert {row["scope"] for row in ours} == {"end_to_end"}
    with results.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["impl"], line["direction"], float(line["ms"])) for line in lines] == [
        (row["impl"], row["direction"], row["ms"]) for row in rows
    ]
    assert {line["impl"] for line in lines} == {"reference", "sdpa"}
    # “slower” stands where the saved rows say it; which of the two is faster depends on the machine
    means = {
        way: statistics.geometric_mean(row["speedup"] for row in ours if row["direction"] == way)
        for way in ("fwd", "bwd", "fwd+bwd")
    }
    line = ", ".join(f"{way} {mean:.2f}x" + (" (slower)" if mean < 1 else "") for way, mean in means.items())
    assert f"over the best baseline: {line}" in said
    assert results.with_suffix(".png").exists()
