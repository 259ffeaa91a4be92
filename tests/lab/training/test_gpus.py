"""One run on one process, on two, and on two that divide the model, over NCCL; `test_processes.py` has gloo."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from lab.training.config import Config
from tests.lab.training.runs import finish, kill, losses, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

STEPS = 20
TOLERANCE = 5e-3
"""Relative, of every loss: in BF16 sums in another order move INT8 codes, and steps multiply what is there."""


@pytest.fixture
def config(tiny: Config) -> Config:
    """Small, of the shape and precision that the kernels take."""
    changes = {"optimisation.steps": STEPS, "logging.checkpoint_every": 4, "logging.keep_checkpoints": 100}
    changes |= {"monitor.every": 6}
    changes |= {"model.width": 128, "model.mlp_width": 192, "data.context": 128, "optimisation.precision": "bf16"}
    changes |= {"optimisation.tokens_per_step": 1024, "optimisation.learning_rate": 3e-3}
    return tiny.replace(changes)


def run(config: Config, output: Path, count: int, sharding: str, resume: bool = False) -> None:
    config = config.replace({"optimisation.sharding": sharding})
    finish(start(config, output, count, "cuda", resume))


def only_losses(output: Path) -> dict[tuple[int, str], float]:
    """Without norms of the gradient: they scatter more, and nothing is decided by them."""
    return {key: value for key, value in losses(output).items() if "loss" in key[1]}


def test_one_process_two_and_two_that_divide_the_model(config, tmp_path):
    ways = {"one": (1, "none"), "two": (2, "none"), "divided": (2, "fsdp")}
    for name, way in ways.items():
        run(config, tmp_path / name, *way)
    one = only_losses(tmp_path / "one")
    assert one[STEPS, "loss"] < one[1, "loss"] - 0.5
    results = {name: json.loads((tmp_path / name / "result.json").read_text()) for name in ways}
    for name, (_, sharding) in ways.items():
        assert only_losses(tmp_path / name) == pytest.approx(one, rel=TOLERANCE)
        assert results[name]["parameters"] == results["one"]["parameters"]
        share = results[name]["parameters_held"] / results[name]["parameters"]
        assert share == 1 if sharding == "none" else share < 0.6

    # killed by one way, resumed by another, there and back
    for before, after in (("divided", "one"), ("one", "divided"), ("two", "divided")):
        output = tmp_path / f"{before} then {after}"
        count, sharding = ways[before]
        changed = config.replace({"optimisation.sharding": sharding})
        step = random.randint(5, STEPS - 8)  # once 5 is logged, the first checkpoint, of 4, is whole
        print(f"{output.name}: killed at {step}")
        kill(start(changed, output, count, "cuda"), output, step)
        run(config, output, *ways[after], resume=True)
        assert only_losses(output) == pytest.approx(one, rel=TOLERANCE)
