"""The folder of a run: the files in it, and how it is opened and written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import yaml

from sagebwd.training.config import Config

METRICS, RESULT, DIVERGED, CONFIG = "metrics.jsonl", "result.json", "diverged.json", "config.yaml"
COMPARISON = "comparison.json"
"""What a comparison's runs came to, in the folder above theirs."""
COMPLETE = "complete"
"""The file that makes a checkpoint folder a checkpoint."""


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl; a last line cut off by a crash is left out."""
    path = run_dir / METRICS
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def checkpoints(run_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [path for path in run_dir.glob("checkpoint-*") if (path / COMPLETE).exists()]
    return sorted(found, key=lambda path: int(path.name.rsplit("-", 1)[1]))


def digest_in(run_dir: Path) -> str | None:
    """The digest of the run in a folder, finished or not; None where there is none."""
    for name in (RESULT, CONFIG):
        if (run_dir / name).exists():
            return yaml.safe_load((run_dir / name).read_text(encoding="utf-8"))["digest"]
    return None


def end_of(config: Config, run_dir: Path) -> str | None:
    """The file that says how a config's run ended, `RESULT` or `DIVERGED`; None where it has not."""
    if digest_in(run_dir) != config.digest():
        return None
    return next((name for name in (RESULT, DIVERGED) if (run_dir / name).exists()), None)


def open_run_dir(config: Config, run_dir: Path, resume: bool) -> Path | None:
    """Make or check the run's folder; returns the checkpoint to go on from.

    Raises ValueError where it holds another run or a finished one, or does not fit ``resume``.
    """
    known = run_dir / CONFIG
    whole = checkpoints(run_dir)
    if known.exists():
        before = yaml.safe_load(known.read_text(encoding="utf-8"))
        if before["digest"] != config.digest():
            raise ValueError(f"{run_dir} holds a run of another config; choose another --output, or delete the folder")
        if (run_dir / RESULT).exists():
            raise ValueError(f"{run_dir} holds this run, finished; choose another --output, or delete the folder")
        if whole and not resume:
            raise ValueError(f"{run_dir} holds this run, unfinished; go on with --resume, or choose another --output")
    if resume and not whole:
        raise ValueError(f"{run_dir} holds no whole checkpoint to resume from; start without --resume")
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / DIVERGED).unlink(missing_ok=True)
    for path in set(run_dir.glob("checkpoint-*")) - set(whole):
        shutil.rmtree(path)
    write_whole(known, yaml.safe_dump({"digest": config.digest(), **config.as_dict()}, sort_keys=False))
    return whole[-1] if whole else None


def write_whole(path: Path, content: str) -> None:
    """Write a file so that it is there in full or not at all; of several processes that write it, one prevails."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.writing")
    scratch.write_text(content, encoding="utf-8")
    scratch.replace(path)
