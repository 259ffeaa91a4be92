"""Several runs at once, each `python -m lab pretrain` in a process of its own, on the GPUs in turn.

A small model leaves much of a GPU idle while its host compiles, evaluates and writes: other runs fill that. What a run
prints goes to NAME.log beside its folder.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import yaml
from tqdm import tqdm

from lab.training import data, processes
from lab.training.config import Config
from lab.training.gpus import visible_gpus
from lab.training.run_dir import checkpoints, end_of, last_step

ROOT = Path(__file__).parents[2]
POLL_SECONDS = 1.0


def train(
    runs: dict[str, Config],
    output: Path,
    jobs: int,
    seconds: float | None = None,
    ended: Callable[[str], object] = lambda name: None,
) -> None:
    """Train each config into ``output / name``, ``jobs`` at a time; one that was interrupted goes on.

    Runs that diverge end with their `lab.training.run_dir.DIVERGED` file, and the others go on. Stopped by Ctrl-C
    or an error, no process stays behind.

    Args: seconds, after which runs are stopped where they are, and near whose end none is started that would take
    longer than what is left, as the longest so far did; ended, called with the name of each run that has ended.

    Raises ValueError for ``jobs`` below 1, under torchrun, and, once all others have ended, where a run failed.
    """
    begun = time.monotonic()
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    if processes.count() > 1:
        raise ValueError(f"jobs={jobs} starts processes of its own: start the command without torchrun")
    for config in runs.values():
        data.load(config)  # made once, not by all at the same time
    waiting, failed, logged, longest = list(runs), [], 0, 0.0
    running: dict[str, _Running] = {}
    gpus = visible_gpus()
    steps = sum(config.optimisation.steps for config in runs.values())
    with tqdm(total=steps, desc=f"{len(runs)} runs, {jobs} at a time", unit="step", file=sys.stderr) as bar:
        try:
            while waiting or running:
                left = math.inf if seconds is None else begun + seconds - time.monotonic()
                if left <= 0 or (left < longest and not running):
                    break
                while waiting and len(running) < jobs and longest < left:
                    name = waiting.pop(0)
                    busy = [run.gpu for run in running.values()]
                    gpu = min(gpus, key=busy.count) if gpus else None
                    running[name] = _Running(_start(runs[name], output / name, gpu, jobs), gpu, time.monotonic())
                time.sleep(POLL_SECONDS)
                for name in [name for name, run in running.items() if run.process.poll() is not None]:
                    run = running.pop(name)
                    if end_of(runs[name], output / name) is None:
                        failed.append(f"{name} (exit status {run.process.returncode}: {_last_line(output, name)})")
                    longest = max(longest, time.monotonic() - run.began)
                    bar.write(f"{name}: ended", file=sys.stderr)
                    ended(name)
                    logged += last_step(output / name)
                bar.update(logged + sum(last_step(output / name) for name in running) - bar.n)
        finally:
            for run in running.values():
                run.process.terminate()
            for run in running.values():
                run.process.wait()
    if failed:
        raise ValueError(f"{'; '.join(failed)}. Logs are in {output}; the same command tries again")


class _Running(NamedTuple):
    process: subprocess.Popen
    gpu: str | None
    began: float


def _start(config: Config, run_dir: Path, gpu: str | None, jobs: int) -> subprocess.Popen:
    """`python -m lab pretrain` of a config on a GPU, its threads a share of the cores."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    written = run_dir.with_name(f"{run_dir.name}.yaml")
    written.write_text(yaml.safe_dump(config.as_dict(), sort_keys=False), encoding="utf-8")
    command = [
        sys.executable, "-m", "lab", "pretrain", "--config", str(written), "--output", str(run_dir),
    ]  # fmt: skip
    threads = str(max(1, (os.cpu_count() or 1) // (2 * jobs)))
    environment = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    with _log(run_dir).open("a", encoding="utf-8") as log:
        return subprocess.Popen(
            [*command, *(["--resume"] if checkpoints(run_dir) else [])],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _log(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.log")


def _last_line(output: Path, name: str) -> str:
    lines = _log(output / name).read_text(encoding="utf-8", errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
