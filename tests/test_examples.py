"""The examples run, and learn."""

import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rounding

EXAMPLES = Path(__file__).parent.parent / "examples"
SOURCES = EXAMPLES.parent / "src"
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
RUN_AND_LEAVE = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
from tests.training.runs import gloo_threads
assert not gloo_threads()
"""


def test_plain_pytorch(capsys):
    example = runpy.run_path(str(EXAMPLES / "plain_pytorch.py"))
    losses, expected = example["train"](40), example["train"](40, use_sdpa=True)
    assert losses != expected
    assert abs(losses[-1] - expected[-1]) < 0.02
    # what is left without attention
    assert losses[-1] < math.log(example["VOCABULARY"]) / 10
    assert capsys.readouterr().out.startswith("step   0  loss 3.")


@pytest.mark.parametrize(("recipe", "apart", "steps"), [("full", 1e-3, 60), ("token", 0.1, 11)])
def test_context_parallel_on_two_processes_is_one(recipe, apart, steps):
    """Losses of the first ten steps, as later ones multiply what rounding there is; two processes learn to repeat."""
    printed = {}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable]
    launchers = {1: [], 2: [*launcher, "-c", RUN_AND_LEAVE]}
    for count, taken in ((1, 11), (2, steps)):
        arguments = [str(EXAMPLES / "context_parallel.py"), "--steps", str(taken), "--recipe", recipe]
        finished = subprocess.run(
            [sys.executable, *launchers[count], *arguments], capture_output=True, text=True, check=False, timeout=300,
            env=os.environ | {"PYTHONPATH": f"{SOURCES}:{EXAMPLES.parent}", "OMP_NUM_THREADS": "1", **NO_GPU},
        )  # fmt: skip
        assert finished.returncode == 0, finished.stderr
        assert f"tokens/s on {count} processes" in finished.stdout
        printed[count] = {int(n): float(x) for n, x in re.findall(r"step +(\d+)  loss ([\d.]+)", finished.stdout)}
        assert printed[count].keys() == {*range(0, taken, 10), taken - 1}
    assert printed[1][0] > 3
    assert printed[2][0] == pytest.approx(printed[1][0], abs=apart / 10)
    assert printed[2][10] == pytest.approx(printed[1][10], abs=apart)
    if steps > 11:
        assert printed[2][steps - 1] < math.log(32) / 4  # it stays at log(32) without the other process's keys


def test_context_parallel_wants_two_chunks_a_process(monkeypatch):
    example = runpy.run_path(str(EXAMPLES / "context_parallel.py"))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="tokens=20 must be a multiple of 8"):
        example["train"](tokens=20)
