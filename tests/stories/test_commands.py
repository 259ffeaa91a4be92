"""Story 10: the command line; tests/lab/test_story.py has story 6."""

import csv
import json
import statistics
from pathlib import Path

import torch

from tests import programs

ROOT = Path(__file__).parents[2]


DOCTOR = "from sagebwd.cli import main as cli; cli.main()"


def run(*arguments, code, program, **environment):
    """What the command prints, and what it warns of; the exit code is as given, and no traceback is shown."""
    outcome = programs.run(program, ROOT, *map(str, arguments), **environment)
    assert outcome.returncode == code, outcome.stderr
    assert "Traceback" not in outcome.stderr
    return " ".join(outcome.stdout.split()), " ".join(outcome.stderr.split())


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
