"""The same run on one process and on two, by accelerate or as torchrun would, whole or divided by FSDP, over gloo."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from lab.training import compare, pretrain, run_dir
from tests.lab.training.runs import command, cut_after, finish, kill, losses, start

ROOT = Path(__file__).parents[3]
# --cpu --num_processes 2 starts a single process: on CPUs accelerate leaves starting them to mpirun
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
ACCELERATE += ["--mixed_precision", "fp16"]
SET_ASIDE = "ACCELERATE_MIXED_PRECISION=fp16 is set aside: the config says it, by "


def written(config, folder):
    path = folder / f"{config.name}.yaml"
    path.write_text(yaml.safe_dump(config.as_dict(), sort_keys=False), encoding="utf-8")
    return str(path)


@pytest.fixture
def launch(tmp_path):
    """Run a command of ``sagebwd`` on two processes by accelerate: exit code and all that they print."""

    def run(name, config, output):
        finished = subprocess.run(
            [
                sys.executable, "-m", *ACCELERATE, "-m", "lab", name,
                "--config", written(config, tmp_path), "--output", str(output),
            ],
            capture_output=True, text=True, check=False, timeout=300,
            env=os.environ
            | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        return finished.returncode, finished.stdout + finished.stderr

    return run


@pytest.fixture
def forked(tmp_path):
    """The same without a launcher, which takes a tenth of the time: exit codes and all that they print."""

    def run(name, config, output, **environment):
        arguments = [name, "--config", written(config, tmp_path), "--output", str(output)]
        started = command(arguments, 2, tmp_path / "printed", **environment)
        for process in started:
            process.join(300)
        return [process.exitcode for process in started], (tmp_path / "printed").read_text(encoding="utf-8")

    return run


@pytest.fixture
def config(tiny):
    """Two micro-batches a step on one process, one each on two; every checkpoint is kept.

    The recipe quantises nothing: a sum in another order would put codes at ties on their other side, and a few steps
    make more of that than of a gradient that one process got wrong.
    """
    return tiny.replace({"logging.keep_checkpoints": 10, "monitor.every": 3, "attention.recipe": "full"})


def test_two_processes_train_as_one_and_resume_each_others_checkpoints(config, launch, tmp_path):
    # fills the cache, so that both processes come to the fresh folder of the next run at once
    pretrain.run(config, tmp_path / "one")
    one = losses(tmp_path / "one")

    code, printed = launch("pretrain", config, tmp_path / "two")
    assert code == 0, printed
    assert printed.count("finished:") == 1
    assert printed.count(SET_ASIDE) == 1
    two = losses(tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-4)
    lines = run_dir.read_metrics(tmp_path / "two")
    assert len(lines) == len(run_dir.read_metrics(tmp_path / "one"))
    assert json.loads((tmp_path / "two" / "result.json").read_text())["environment"]["processes"] == "2"

    cut_after(4, tmp_path / "two", tmp_path / "two then one")
    pretrain.run(config, tmp_path / "two then one", resume=True)
    assert losses(tmp_path / "two then one") == pytest.approx(one, rel=1e-4)

    cut_after(4, tmp_path / "one", tmp_path / "one then two")
    finish(start(config, tmp_path / "one then two", 2, resume=True))
    assert losses(tmp_path / "one then two") == pytest.approx(one, rel=1e-4)


def checks(output, step):
    """What the attention monitor measured: relative L2 by layer and tensor."""
    (line,) = [line for line in run_dir.read_metrics(output) if line["step"] == step and "monitor/seconds" in line]
    return {key: line[key] for key in line if re.fullmatch(r"monitor/layer_\d/\w+", key)}


@pytest.mark.rounding
def test_two_processes_that_divide_the_model_train_as_one(config, forked, tmp_path):
    """BF16 is autocast, not accelerate's policy, and its own wishes are set aside; checkpoints are those of one."""
    config = config.replace(
        {"optimisation.precision": "bf16", "optimisation.sharding": "fsdp", "attention.recipe": "token"}
    )
    pretrain.run(config, tmp_path / "one")
    codes, printed = forked("pretrain", config, tmp_path / "two", ACCELERATE_MIXED_PRECISION="fp16")
    assert codes == [0, 0], printed
    assert printed.count(SET_ASIDE) == 1
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert two.keys() == one.keys()
    # sums in another order round some codes otherwise: little in a loss, more in a gradient with every step
    for (step, name), value in one.items():
        if name != "grad_norm":
            assert two[step, name] == pytest.approx(value, rel=2e-3), (step, name)
        elif step <= 3:
            assert two[step, name] == pytest.approx(value, rel=1e-2), (step, name)
    # a recipe errs by as much however the numbers before were rounded; a part of a tensor would be far off
    measured, alone = checks(tmp_path / "two", 3), checks(tmp_path / "one", 3)
    assert measured.keys() == alone.keys()
    assert all(value / 2 < measured[name] < 2 * value for name, value in alone.items()), (measured, alone)
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert result["parameters_held"] < 0.6 * result["parameters"]
    for name in ("model", "checkpoint-4"):
        # 257 rows of embeddings, tied, divide unevenly
        whole, other = (load_file(tmp_path / run / name / "model.safetensors") for run in ("one", "two"))
        assert {key: value.shape for key, value in whole.items()} == {key: value.shape for key, value in other.items()}
    configs = [(tmp_path / run / "model" / "config.json").read_text() for run in ("one", "two")]
    assert configs[0] == configs[1]


def test_killed_three_times_and_resumed_by_another_number_of_processes(config, tmp_path):
    """Issue 7: killed at random three times, with 1 and 2 processes in turn, it ends with an unbroken run's loss."""
    config = config.replace({"optimisation.steps": 24, "monitor.every": 0, "logging.keep_checkpoints": 2})
    finish(start(config, tmp_path / "unbroken", 1))
    broken = tmp_path / "broken"
    steps = sorted(random.sample(range(3, 17), 3))
    print(f"killed at {steps}")
    for index, (count, step) in enumerate(zip((1, 2, 1), steps)):
        kill(start(config, broken, count, resume=index > 0), broken, step)
        assert not (broken / run_dir.RESULT).exists()
    finish(start(config, broken, 2, resume=True))
    assert losses(broken) == pytest.approx(losses(tmp_path / "unbroken"), rel=1e-4)


def test_two_processes_compare_as_one(config, forked, tmp_path):
    variants = {
        "full precision": {"attention.recipe": "sdpa"},
        "too fast": {"optimisation.learning_rate": 1e20},
        "token": {"attention.recipe": "token"},
    }
    changes = {"optimisation.steps": 5, "optimisation.learning_rate": 1e-3, "monitor.every": 0, "variants": variants}
    config = config.replace(changes)
    codes, printed = forked("compare", config, tmp_path / "two")
    assert codes == [0, 0], printed
    assert printed.count("report:") == 1
    assert printed.count("too fast: the loss (nan) is not finite at step 4") == 1
    rows = json.loads((tmp_path / "two" / "comparison.json").read_text())["outcomes"]
    assert [(row["variant"], row["steps"]) for row in rows] == [("full precision", 5), ("too fast", 4), ("token", 5)]
    expected = compare.compare(config, tmp_path / "one")
    for row, one in zip(rows, expected):
        assert row["steps"] == one.steps
        assert (row["diverged"] is None) == (one.diverged is None)
        assert row["train_loss"] == pytest.approx(one.train_loss, rel=1e-4)
