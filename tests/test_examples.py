"""The examples run, and learn."""

import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.training.runs import finish, program

EXAMPLES = Path(__file__).parent.parent / "examples"
SOURCES = EXAMPLES.parent / "src"
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
RUN_AND_LEAVE = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
from tests.lab.training.runs import gloo_threads
assert not gloo_threads()
"""


def by_torchrun(path, arguments, folder):
    """What two processes print."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable]
    finished = subprocess.run(
        [sys.executable, *launcher, "-c", RUN_AND_LEAVE, str(path), *arguments], capture_output=True, text=True,
        check=False, timeout=300,
        env=os.environ | {"PYTHONPATH": f"{SOURCES}:{EXAMPLES.parent}", "OMP_NUM_THREADS": "1", **NO_GPU},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def as_torchrun_would(path, arguments, folder):
    """The same of two that need not import torch again."""
    finish(program(path, arguments, 2, folder / "printed"))
    return (folder / "printed").read_text(encoding="utf-8")


# without AVX the losses of both ways are these to 0.001: no rounding decides what is asserted
def test_plain_pytorch(capsys):
    example = runpy.run_path(str(EXAMPLES / "plain_pytorch.py"))
    losses, expected = example["train"](34), example["train"](34, use_sdpa=True)
    assert losses != expected
    assert abs(losses[-1] - expected[-1]) < 0.02
    # what is left without attention
    assert losses[-1] < math.log(example["VOCABULARY"]) / 10
    assert capsys.readouterr().out.startswith("step   0  loss 3.")


def test_qk_norm_rope(capsys):
    example = runpy.run_path(str(EXAMPLES / "qk_norm_rope.py"))
    losses, expected = example["train"](26), example["train"](26, use_composed=True)
    assert losses != expected
    assert losses[0] == pytest.approx(expected[0], abs=0.02)
    assert max(losses[-1], expected[-1]) < math.log(example["VOCABULARY"]) / 10
    assert capsys.readouterr().out.startswith("step   0  loss 3.")


@pytest.mark.parametrize(
    ("recipe", "apart", "steps", "run"),
    [
        pytest.param("full", 1e-3, 31, as_torchrun_would, marks=pytest.mark.rounding),
        # a tenth apart, no rounding decides it; a ring of two under "token" is in integrations/test_accelerate.py too
        pytest.param("token", 0.1, 11, by_torchrun, marks=pytest.mark.slow),
    ],
)
def test_context_parallel_on_two_processes_is_one(recipe, apart, steps, run, capsys, tmp_path):
    """Losses of the first ten steps, as later ones multiply what rounding there is; two processes learn to repeat."""
    alone = runpy.run_path(str(EXAMPLES / "context_parallel.py"))["train"](11, recipe=recipe)
    assert "tokens/s on 1 processes" in capsys.readouterr().out
    printed = run(EXAMPLES / "context_parallel.py", ["--steps", str(steps), "--recipe", recipe], tmp_path)
    assert "tokens/s on 2 processes" in printed
    together = {int(n): float(x) for n, x in re.findall(r"step +(\d+)  loss ([\d.]+)", printed)}
    assert together.keys() == {*range(0, steps, 10), steps - 1}
    assert alone[0] > 3
    assert together[0] == pytest.approx(alone[0], abs=apart / 10)
    assert together[10] == pytest.approx(alone[10], abs=apart)
    if steps > 11:
        assert together[steps - 1] < math.log(32) / 4  # it stays at log(32) without the other process's keys
