"""Runs in processes of their own, which can be killed, and what they wrote."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from lab.training import run_dir
from lab.training.config import Config


def losses(output: Path) -> dict[tuple[int, str], float]:
    """Losses, gradient norms and largest logits by step and name."""
    return {
        (line["step"], key): line[key]
        for line in run_dir.read_metrics(output)
        for key in ("loss", "grad_norm", "held_out_loss", "largest_logit")
        if key in line
    }


def write_run(output: Path, config: Config, loss: float, environment: dict[str, str]) -> None:
    """What a run of 8 steps leaves that has ended with a held-out loss."""
    output.mkdir(parents=True, exist_ok=True)
    lines = [
        {"step": 1, "tokens": 256, "loss": loss + 1, "grad_norm": 1.0, "learning_rate": 0.1, "tokens_per_s": 5.0,
         "seconds": 1.0},
        {"step": 8, "tokens": 2048, "held_out_loss": loss, "largest_logit": 3.0},
    ]  # fmt: skip
    (output / run_dir.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {
        "digest": config.digest(), "held_out_loss": loss, "train_loss": loss + 0.1, "largest_logit": 3.0, "steps": 8,
        "tokens": 2048, "parameters": 1000, "seconds": 2.0, "tokens_per_s": 1024.0, "environment": environment,
    }  # fmt: skip
    (output / run_dir.RESULT).write_text(json.dumps(result))


def cut_after(step: int, finished: Path, output: Path) -> None:
    """A copy of a finished run as it was when ``step``'s checkpoint had been written."""
    shutil.copytree(finished, output)
    (output / run_dir.RESULT).unlink()
    for path in run_dir.checkpoints(output):
        if run_dir.step_of(path) > step:
            shutil.rmtree(path)


def start(config: Config, output: Path, count: int, device: str = "cpu", resume: bool = False) -> list[BaseProcess]:
    """``count`` processes of one run, as torchrun would start them; device, "cpu" or "cuda"."""
    return begin(count, device, _train, config, output, resume)


def command(arguments: list[str], count: int, log: Path, **environment: str) -> list[BaseProcess]:
    """``count`` processes of `sagebwd` with these arguments, as torchrun would start them, on CPUs.

    What they print is added to ``log``.
    """
    return begin(count, "cpu", _command, arguments, log, environment)


def program(path: Path, arguments: list[str], count: int, log: Path) -> list[BaseProcess]:
    """The same of another program."""
    return begin(count, "cpu", _program, path, arguments, log)


def begin(count: int, device: str, target: Callable[..., None], *given: object) -> list[BaseProcess]:
    """``count`` processes of ``target(*given)``, as torchrun would start them; device, "cpu" or "cuda"."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # a server that has imported torch once starts CPU processes in no time; CUDA does not survive a fork
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        context.set_forkserver_preload(["lab.training.compare", "lab.__main__", "torch.utils.tensorboard"])
    started = [
        context.Process(target=_enter, args=(rank, count, port, device, target, given)) for rank in range(count)
    ]
    for process in started:
        process.start()
    return started


def finish(started: list[BaseProcess]) -> None:
    """Wait for a run, and fail where a process of it did."""
    for process in started:
        process.join(300)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert codes == [0] * len(codes), f"exit codes {codes}; what they print is above"


def kill(started: list[BaseProcess], output: Path, step: int) -> None:
    """SIGKILL every process of a run that has just been started a moment after it has logged ``step``."""
    end, path = time.monotonic() + 300, output / run_dir.METRICS
    before = path.stat().st_mtime_ns if path.exists() else None  # a resumed run writes the file anew as it begins

    def logged() -> int:
        if not path.exists() or path.stat().st_mtime_ns == before:
            return 0
        return max((line["step"] for line in run_dir.read_metrics(output)), default=0)

    while logged() < step:
        assert time.monotonic() < end, f"no step {step} in {output}"
        assert all(process.exitcode is None for process in started), "ended before it was killed"
        time.sleep(0.01)
    time.sleep(random.random() * 0.05)  # anywhere in a step, an evaluation or a checkpoint
    for process in started:
        os.kill(process.pid, signal.SIGKILL)
    for process in started:
        process.join()
        assert process.exitcode == -signal.SIGKILL, "ended before it was killed"


def _enter(
    rank: int, count: int, port: int, device: str, target: Callable[..., None], given: tuple[object, ...]
) -> None:
    visible = {"cpu": "", "cuda": "0" if count == 1 else os.environ.get("CUDA_VISIBLE_DEVICES")}[device]
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    if count > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in {**places, **address}.items()})
    import torch

    from tests.gpus import hide_peers

    torch.set_num_threads(1)
    if device == "cpu":
        hide_peers()
    target(*given)


def _train(config: Config, output: Path, resume: bool) -> None:
    from lab.training import pretrain, processes

    pretrain.run(config, output, resume)
    processes.leave()
    if config.optimisation.sharding == "none":  # torch caches layouts of divided tensors, and with them their groups
        assert not gloo_threads()


def gloo_threads() -> list[Path]:
    """Those of process groups that this process still has, on Linux: one that outlives the interpreter aborts it."""

    def is_gloo(thread: Path) -> bool:
        try:
            return (thread / "comm").read_text().startswith("pt_gloo")
        except OSError:  # it has ended
            return False

    end = time.monotonic() + 10  # a thread that has been joined may be listed for a moment
    while (found := list(filter(is_gloo, Path("/proc/self/task").glob("*")))) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def _command(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    from lab import __main__ as cli

    _print_to(log)
    sys.argv = ["lab", *arguments]
    cli.main()


def _program(path: Path, arguments: list[str], log: Path) -> None:
    _print_to(log)
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")
    assert not gloo_threads()


def _print_to(log: Path) -> None:
    with log.open("a", encoding="utf-8") as printed:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(printed.fileno(), stream.fileno())
