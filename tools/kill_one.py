"""One process of a run is killed, and the run resumed: whether its loss goes on as it would have.

    python -m tools.kill_one --config configs/lab-53m.yaml --processes 2 --step 20 --output runs/killed

Runs of `python -m lab pretrain` under torchrun, side by side: one to its end, one more whose difference is the noise,
and one for each `--sharding` whose last process gets SIGKILL once a step is logged. Torchrun ends the others. The same
command with `--resume`, on as many processes, then trains the rest. The folder gets kill_one_....json with every loss.
Exit code 1 where a loss after the kill is further from the unbroken run's than `TOLERANCE`, or than twice the noise.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml

from lab.training import data, run_dir
from lab.training.config import Config, load
from sagebwd.cli.results import environment, save

TOLERANCE = 5e-3
"""Relative, of every loss: what sums in another order may come to (`tests/lab/training/test_gpus.py`)."""
SECONDS = 300.0
WHOLE, AGAIN = "whole", "again"


class Launched:
    """A run on ``count`` processes under torchrun, whose output goes to a log."""

    def __init__(self, arguments: list[str], count: int, log: Path) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        with log.open("a", encoding="utf-8") as printed:
            self.agent = subprocess.Popen(
                [sys.executable, *launcher, "-m", "lab", *arguments],
                stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def worker(self, rank: int) -> int:
        """The process id of a rank."""
        (found,) = (pid for pid in _children(self.agent.pid) if f"RANK={rank}" in _environment(pid))
        return found

    def ended(self) -> bool:
        """Whether it has."""
        return self.agent.poll() is not None

    def wait(self) -> int:
        """Its exit code."""
        return self.agent.wait(SECONDS)

    def stop(self) -> None:
        """End what still runs."""
        self.agent.terminate()
        self.agent.wait(SECONDS)


def measure(config: Config, output: Path, count: int, step: int, shardings: list[str]) -> list[dict[str, object]]:
    """A row for each run: what it was, and its losses by step.

    Raises RuntimeError where a run ends otherwise than it should.
    """
    output.mkdir(parents=True, exist_ok=True)
    data.load(config)  # made once, not by all at the same time
    names = [WHOLE, AGAIN, *(f"killed-{sharding}" for sharding in shardings)]
    commands = {name: _command(config, name, output) for name in names}
    running = {name: Launched(arguments, count, output / f"{name}.log") for name, arguments in commands.items()}
    rows = []
    try:
        killed = _kill({name: running[name] for name in names[2:]}, output, count - 1, step)
        for name, killed_at in killed.items():
            if running[name].wait() == 0:
                raise RuntimeError(f"{name}: a process was killed, and the run ended as if nothing had been")
            whole = run_dir.checkpoints(output / name)
            if (output / name / run_dir.RESULT).exists() or not whole:
                raise RuntimeError(f"{name}: killed at step {killed_at}, it had finished or has no checkpoint")
            from_step = run_dir.step_of(whole[-1])
            print(f"{name}: process {count - 1} killed at step {killed_at}, goes on from {from_step}", flush=True)
            running[name] = Launched([*commands[name], "--resume"], count, output / f"{name}.log")
            rows.append({"run": name, "killed_at": killed_at, "resumed_from": from_step})
        for name, launched in running.items():
            if launched.wait() != 0:
                raise RuntimeError(f"{name} failed: {output / name}.log")
    finally:
        for launched in running.values():
            if not launched.ended():
                launched.stop()
    rows = [{"run": WHOLE}, {"run": AGAIN}, *rows]
    for row in rows:
        row["losses"] = _losses(output / row["run"])
    return rows


def difference(losses: dict[str, float], whole: dict[str, float], after: int) -> float:
    """The largest relative difference of a loss after a step. Raises ValueError where steps are missing."""
    if losses.keys() != whole.keys():
        raise ValueError(f"losses of other steps: {sorted(losses.keys() ^ whole.keys())}")
    return max(abs(losses[key] / right - 1) for key, right in whole.items() if int(key.split()[0]) > after)


def verdicts(rows: list[dict]) -> Iterator[tuple[str, bool]]:
    """A line for each killed run, and whether its loss went on."""
    whole, again, *killed = rows
    for row in killed:
        noise = difference(again["losses"], whole["losses"], row["resumed_from"])
        found = difference(row["losses"], whole["losses"], row["resumed_from"])
        last = max(whole["losses"], key=lambda key: int(key.split()[0]))
        yield (
            f"{row['run']}: killed at step {row['killed_at']}, resumed from {row['resumed_from']}; losses after that "
            f"differ by {found:.2e} from the unbroken run's, which repeats within {noise:.2e}; {last}: "
            f"{row['losses'][last]:.4f}, {whole['losses'][last]:.4f} unbroken",
            found <= max(TOLERANCE, 2 * noise),
        )


def _command(config: Config, name: str, output: Path) -> list[str]:
    sharding = name.removeprefix("killed-") if name.startswith("killed-") else "none"
    chosen = config.replace({"optimisation.sharding": sharding})
    path = output / f"{name}.yaml"
    path.write_text(yaml.safe_dump(chosen.as_dict(), sort_keys=False), encoding="utf-8")
    return ["pretrain", "--config", str(path), "--output", str(output / name)]


def _kill(running: dict[str, Launched], output: Path, rank: int, step: int) -> dict[str, int]:
    """SIGKILL one process of each run once it has logged ``step``; the step that each has logged last."""
    end, killed = time.monotonic() + SECONDS, {}
    while len(killed) < len(running):
        for name in running.keys() - killed:
            if running[name].ended() or time.monotonic() > end:
                raise RuntimeError(f"{output / name}: it ended, or {SECONDS:.0f} s did, before step {step}")
            if _logged(output / name) >= step:
                os.kill(running[name].worker(rank), signal.SIGKILL)
                killed[name] = _logged(output / name)
        time.sleep(0.02)
    return {name: killed[name] for name in running}


def _logged(folder: Path) -> int:
    return max((line["step"] for line in run_dir.read_metrics(folder) if "loss" in line), default=0)


def _losses(folder: Path) -> dict[str, float]:
    return {
        f"{line['step']} {key}": line[key]
        for line in run_dir.read_metrics(folder)
        for key in ("loss", "held_out_loss")
        if key in line
    }


def _children(pid: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
        except OSError:  # it has ended
            continue
        if int(parent) == pid:
            yield int(path.parent.name)


def _environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")


def main(given: list[str] | None = None) -> None:
    """The runs, the file and the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", dest="settings", help="section.key=value; repeat")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--step", type=int, default=20, help="logged before the kill")
    parser.add_argument("--sharding", action="append", choices=["none", "fsdp"], help="repeat [none]")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit")
    arguments = parser.parse_args(given)
    config = load(arguments.config, arguments.settings).replace({"variants": {}})
    began = time.monotonic()
    shardings = arguments.sharding or ["none"]
    rows = measure(config, arguments.output, arguments.processes, arguments.step, shardings)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = environment(device, arguments.commit) | {
        "processes": arguments.processes, "seconds": round(time.monotonic() - began), "config": config.as_dict(),
    }  # fmt: skip
    found = list(verdicts(rows))
    for line, _ in found:
        print(line, flush=True)
    print(f"wrote {save(rows, facts, arguments.output, f'kill_one_{arguments.processes}-processes')}")
    if not all(good for _, good in found):
        sys.exit("a run that was resumed is another run")


if __name__ == "__main__":
    main()
