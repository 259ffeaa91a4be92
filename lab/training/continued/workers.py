"""Many runs side by side: processes that keep a model and train run after run, on the GPUs in turn."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

from lab.training.continued.config import Continued
from lab.training.gpus import visible_gpus
from lab.training.run_dir import last_step, read_metrics
from sagebwd.cli.processes import without_sigint
from sagebwd.cli.terminal import duration

POLL_SECONDS, TELL_SECONDS = 1.0, 5.0
RESERVE = 3.0  # seconds before the end in which a run that time has run out for writes what it has


class Worker(NamedTuple):
    """A process and the line to it; the number says which GPU it has."""

    number: int
    process: multiprocessing.process.BaseProcess
    line: Connection


class Running(NamedTuple):
    """A run that a worker is at."""

    name: str
    began: float


def train(
    runs: dict[str, Continued],
    output: Path,
    baseline: str,
    jobs: int,
    seconds: float | None,
    ended: Callable[[str], object],
    say: Callable[[str], object] = lambda text: print(text, file=sys.stderr, flush=True),
) -> None:
    """Train each config into ``output / name``, in their order, ``jobs`` at a time.

    Args: baseline, one of `FULL_PRECISION`, which losses are also evaluated by; seconds, after which runs stop where
    they are, and near whose end none is started that would take longer than what is left, as the longest of the last
    did; ended, called with the name of each run that has ended, finished or not; say, for lines of progress.

    Raises ValueError for ``jobs`` below 1 and, once all others have ended, where runs failed.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    begun = time.monotonic()
    stop_at = math.inf if seconds is None else time.time() + seconds - RESERVE
    waiting, failed, took = list(runs), [], []
    at: dict[Connection, Running] = {}
    any_run = next(iter(runs.values()), None)
    workers = {worker.line: worker for worker in (_start(n, any_run, jobs) for n in range(min(jobs, len(runs))))}
    told = time.monotonic()
    try:
        while workers and (waiting or at):
            for line in wait(list(workers), POLL_SECONDS):
                run, worker = at.pop(line, None), workers[line]
                try:
                    message = line.recv()
                except EOFError:
                    worker.process.join()
                    message = f"its process ended with status {worker.process.exitcode}"
                    del workers[line]
                    if run is None:
                        failed.append(f"a worker ({message})")
                    elif waiting:
                        again = _start(worker.number, any_run, jobs)
                        workers[again.line] = again
                if run is not None:
                    took = [*took, time.monotonic() - run.began][-jobs:]
                if line in workers:
                    left = math.inf if seconds is None else begun + seconds - time.monotonic()
                    if waiting and left > max(took, default=0.0):
                        name = waiting.pop(0)
                        at[line] = Running(name, time.monotonic())
                        line.send((runs[name], baseline, output / name, stop_at))
                    else:
                        del workers[line]
                        line.send(None)
                        worker.process.join()
                if run is not None:  # once its worker is busy again
                    say(f"{run.name}: {message}")
                    failed += [] if message.endswith(".json") else [f"{run.name} ({message})"]
                    ended(run.name)
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                ended_runs, spent = len(runs) - len(waiting) - len(at), told - begun
                steps = (last_step(output / run.name) / runs[run.name].optimisation.steps for run in at.values())
                share = (ended_runs + sum(steps)) / len(runs)
                left = f", about {duration(spent / share * (1 - share))} left" if share else ""
                for run in at.values():
                    say(f"  {duration(spent)}{left}: {_progress(runs[run.name], output / run.name, run)}")
    finally:
        for worker in workers.values():
            worker.process.terminate()
            worker.process.join()
    if failed:
        raise ValueError(f"{'; '.join(failed)}. What they printed is above; the same command tries again")


def _progress(config: Continued, folder: Path, run: Running) -> str:
    """One line of a run that goes on."""
    lines = read_metrics(folder)
    shown = [f"{run.name}: step {last_step(folder)} of {config.optimisation.steps}"]
    for key, name in (("loss", "loss"), ("held_out_loss", "held out"), ("tokens_per_s", "tokens/s")):
        values = [line[key] for line in lines if key in line]
        shown += (
            [f"{name} {values[-1]:,.0f}" if key == "tokens_per_s" else f"{name} {values[-1]:.4f}"] if values else []
        )
    return ", ".join(shown)


def _start(number: int, config: Continued, jobs: int) -> Worker:
    """A process that sees one GPU, its threads a share of the cores."""
    context, gpus = multiprocessing.get_context("spawn"), visible_gpus()
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    own = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
    own = {name: value for name, value in own.items() if name not in os.environ}
    own |= {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)  # what a process that is started finds
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, config))
    with without_sigint():
        process.start()
    there.close()
    for name, value in before.items():
        os.environ.pop(name)
        os.environ.update({} if value is None else {name: value})
    return Worker(number, process, here)


def _work(line: Connection, config: Continued) -> None:
    """A worker: loads the model, says so, and trains what it is sent until it is sent None."""
    import torch

    from lab.training.continued import train as one
    from sagebwd.cli.terminal import quiet

    quiet()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    trainee = one.Trainee(config, "cuda" if torch.cuda.is_available() else "cpu")
    line.send("ready")
    while (sent := line.recv()) is not None:
        try:
            line.send(one.train(trainee, *sent))
        except (ValueError, NotImplementedError) as error:  # of what was asked for; the next run may be fine
            line.send(f"{type(error).__name__}: {error}")
