"""The folder of a run: the files in it, and how it is opened and written."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import yaml

from lab.training.config import Config
from sagebwd.environment import write_whole

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


def last_step(run_dir: Path) -> int:
    """The step that a run has logged last; 0 of one that has logged none."""
    return max((line["step"] for line in read_metrics(run_dir)), default=0)


def checkpoints(run_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted((path for path in run_dir.glob("checkpoint-*") if (path / COMPLETE).exists()), key=step_of)


def keep_newest(run_dir: Path, count: int) -> None:
    """Delete the whole checkpoints of a run but the ``count`` newest.

    The marker goes first: a checkpoint whose deletion is cut short is none.
    """
    for checkpoint in checkpoints(run_dir)[:-count]:
        (checkpoint / COMPLETE).unlink()
        shutil.rmtree(checkpoint)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint was written at."""
    return int(checkpoint.name.rsplit("-", 1)[1])


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


def switches_in(run_dir: Path) -> list[dict[str, object]]:
    """What attention a run had before it was resumed with another: ``until``, a step, ``recipe`` and ``impl``."""
    known = run_dir / CONFIG
    return yaml.safe_load(known.read_text(encoding="utf-8")).get("switched", []) if known.exists() else []


def digest_after(config: Config, switched: list[dict[str, object]]) -> str:
    """The config's digest, another one where the run began with other attention."""
    if not switched:
        return config.digest()
    return hashlib.sha256(json.dumps([config.digest(), switched], sort_keys=True).encode()).hexdigest()[:16]


def _switched(config: Config, before: dict, switched: list[dict[str, object]], step: int) -> list[dict[str, object]]:
    """``switched`` with the attention of ``before``, a config.yaml; none where more than attention is another."""
    attention = before["attention"]
    of_before = {"attention.fuse": False} | {f"attention.{name}": value for name, value in attention.items()}
    as_it_was = config.replace(of_before)
    if before["digest"] != digest_after(as_it_was, switched):
        return []
    return [*switched, {"until": step, **attention}]


def refuse_several(run_dir: Path) -> None:
    """Raises ValueError where a folder is one of several runs, as `compare` and others of `python -m lab` write."""
    if (run_dir / COMPARISON).exists() or any(run_dir.glob(f"*/{CONFIG}")) or any(run_dir.glob(f"seed-*/*/{CONFIG}")):
        raise ValueError(f"{run_dir} holds several runs, of a comparison; choose another --output for one run")


def refuse_single(output: Path) -> None:
    """Raises ValueError where the folder of several runs is one of a single run."""
    if any((output / name).exists() for name in (CONFIG, RESULT, DIVERGED, METRICS)):
        raise ValueError(f"{output} holds a run of `python -m lab pretrain`; choose another --output for several runs")


def open_run_dir(config: Config, run_dir: Path, resume: bool) -> Path | None:
    """Make or check the run's folder; returns the checkpoint to go on from.

    A resumed run may have another attention than before: config.yaml then says which it had until when.

    Raises ValueError where it holds another run or a finished one, several runs, or does not fit ``resume``.
    """
    refuse_several(run_dir)
    known = run_dir / CONFIG
    whole, switched = checkpoints(run_dir), []
    if known.exists():
        before = yaml.safe_load(known.read_text(encoding="utf-8"))
        switched = before.get("switched", [])
        if before["digest"] != digest_after(config, switched):
            switched = _switched(config, before, switched, step_of(whole[-1])) if resume and whole else []
            if not switched:
                raise ValueError(
                    f"{run_dir} holds a run of another config; choose another --output, or delete the folder "
                    "(attention.recipe, attention.impl and attention.fuse alone may change, with --resume)"
                )
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
    content = {"digest": digest_after(config, switched), **config.as_dict()}
    write_whole(known, yaml.safe_dump({**content, "switched": switched} if switched else content, sort_keys=False))
    return whole[-1] if whole else None
