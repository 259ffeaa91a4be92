"""Story 6: the laboratory's command line."""

import json
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[2]
LAB = "from lab import __main__ as cli; cli.main()"


def run(*arguments):
    """What the command warns of; it exits with 0, and no traceback is shown."""
    outcome = programs.run(LAB, ROOT, *map(str, arguments))
    assert outcome.returncode == 0, outcome.stderr
    assert "Traceback" not in outcome.stderr
    return " ".join(outcome.stderr.split())


@pytest.mark.rounding
def test_story_6_pretrain_parity(tmp_path):
    """“same data order; final val loss differs by <= 1%; [no QK-norm] warns. Files: metrics.jsonl, curves.png for
    both; a third run with [no K-smoothing] shown”. Here a tiny model for 40 steps; the story's 1000 steps are
    configs/parity.yaml, whose outcome is in docs/results/training.md. At three times this learning rate another order
    of adding moves an end by .7%."""
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
    said = run(*command, *chosen)
    assert "QK-norm" not in said
    said = run(*command, "--only", "no norm", "--set", "optimisation.steps=2", "--output", tmp_path / "norm")
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
