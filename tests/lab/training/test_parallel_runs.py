"""Runs in processes of their own: the same numbers, kept, gone on with, and told of where they fail."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.training import compare as comparison
from lab.training import parallel_runs
from lab.training.gpus import visible_gpus
from lab.training.run_dir import COMPLETE, RESULT, checkpoints
from tests.lab.training.runs import command, losses


@pytest.fixture
def config(tiny):
    variants = {"full precision": {"attention.recipe": "sdpa"}, "token": {}}
    return tiny.replace({"variants": variants, "monitor.every": 0})


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(parallel_runs, "POLL_SECONDS", 0.1)


class Forked:
    """In place of subprocess.Popen: the command in a process that need not import torch again."""

    def __init__(self, arguments, env, stdin, stdout, stderr):
        assert arguments[:3] == [sys.executable, "-m", "lab"]
        (self.process,) = command(arguments[3:], 1, Path(stdout.name))

    def poll(self):
        return self.process.exitcode


def test_the_same_losses_as_in_one_process(config, tmp_path, monkeypatch):
    streams = {"DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT}
    monkeypatch.setattr(parallel_runs, "subprocess", SimpleNamespace(Popen=Forked, **streams))
    comparison.compare(config, tmp_path / "one")
    outcomes = comparison.compare(config, tmp_path / "two", jobs=2)
    assert [outcome.variant for outcome in outcomes] == list(config.variants)
    for name in config.variants:
        assert losses(tmp_path / "two" / name) == losses(tmp_path / "one" / name)
    # what was interrupted goes on
    folder = tmp_path / "two" / "token"
    (folder / RESULT).unlink()
    (checkpoints(folder)[-1] / COMPLETE).unlink()
    comparison.compare(config, tmp_path / "two", jobs=1)
    assert losses(folder) == losses(tmp_path / "one" / "token")
    assert (tmp_path / "two" / "token.log").read_text().count("finished:") == 2


def test_a_run_that_fails_is_named_and_the_others_end(config, tmp_path):
    blocked = tmp_path / "out" / "token"
    blocked.parent.mkdir()
    blocked.write_text("a file where its folder should be")
    with pytest.raises(ValueError, match=r"token \(exit status 2: .*File exists.*\)\. Logs are in .*out; the same"):
        parallel_runs.train(config.each_variant(), tmp_path / "out", 2)
    assert json.loads((tmp_path / "out" / "full precision" / RESULT).read_text())["steps"] == 8


def test_gpus_as_the_environment_names_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,3")
    assert visible_gpus() == ["GPU-1", "3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert visible_gpus() == ["0", "1"]
