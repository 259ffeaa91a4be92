"""The variants of a config trained on the same data from the same weights, and their losses side by side."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table

from lab.training import parallel_runs, pretrain, processes
from lab.training.config import Config
from lab.training.report import Run, write_curves, write_report
from lab.training.run_dir import (
    COMPARISON,
    RESULT,
    checkpoints,
    digest_in,
    end_of,
    read_metrics,
    refuse_single,
)
from sagebwd.environment import write_whole


@dataclass(frozen=True)
class Outcome:
    """What one variant came to; losses in nats a token.

    ``gap`` is the held-out loss minus the config's first variant's, None while that one has not finished. Of a variant
    that diverged, ``diverged`` says where and why; its losses are the last that were finite, and it has no gap.
    ``commit`` is the one that its kernels are of, None where nothing named it.
    """

    variant: str
    recipe: str
    held_out_loss: float | None
    gap: float | None
    train_loss: float | None
    largest_logit: float | None
    tokens_per_s: float
    seconds: float
    steps: int
    diverged: str | None
    commit: str | None


def compare(config: Config, output: Path, only: list[str] | None = None, jobs: int | None = None) -> list[Outcome]:
    """Train each variant, or those in ``only``, into a folder of its own under ``output``; then compare and report.

    A variant that has finished is kept, one that was interrupted goes on from its newest checkpoint; one that diverges
    is reported as such, and the others go on. The config's first variant is the baseline; every variant that has come
    to an end is compared, whether it ran now or before. Writes comparison.json, comparison.md, curves.png and
    report.html. Of several processes the first one compares and writes; the others return no outcomes. With ``jobs``
    that many variants train at once, each in a process of its own, and what `lab.training.parallel_runs.train`
    raises is raised here.

    Raises ValueError where the config has no variants, ``only`` names one that it has not, a name cannot be a
    folder's, or a folder holds a run of other settings: all of it before the first variant trains.
    """
    variants = config.chosen(only)
    processes.join()
    processes.agreed(lambda: check(variants, output))
    left = {name: variant for name, variant in variants.items() if not _has_ended(variant, output / name)}
    if jobs is None:
        for number, (name, variant) in enumerate(left.items(), 1):
            _say(f"{name}: {number} of {len(left)} variants")
            _train(variant, output / name)
    else:
        parallel_runs.train(left, output, jobs)
    return _report(config, output) if processes.is_first() else []


def check(variants: dict[str, Config], output: Path) -> None:
    """Raises ValueError where ``output`` is a run's own folder, or that of a variant in it holds other settings."""
    refuse_single(output)
    for name, variant in variants.items():
        if digest_in(output / name) not in (None, variant.digest()):
            raise ValueError(f"{output / name} holds a run of other settings; choose another --output, or delete it")


def ended(config: Config, output: Path) -> tuple[list[Run], list[Outcome]]:
    """The config's variants that have come to an end under ``output``, and their outcomes."""
    variants = config.each_variant()
    runs = [_read(config, name, output / name) for name, variant in variants.items() if end_of(variant, output / name)]
    return runs, [_outcome(run, _baseline(config, runs)) for run in runs]


def as_rows(runs: list[Run], outcomes: list[Outcome]) -> list[dict[str, object]]:
    """What comparison.json holds of each of `ended`."""
    return [{**asdict(outcome), "digest": run.result["digest"]} for outcome, run in zip(outcomes, runs)]


def _baseline(config: Config, runs: list[Run]) -> Run | None:
    return next((run for run in runs if run.name == next(iter(config.variants))), None)


def _report(config: Config, output: Path) -> list[Outcome]:
    """Compare the variants that have come to an end, and write what the comparison is."""
    runs, outcomes = ended(config, output)
    content = {"outcomes": as_rows(runs, outcomes), "environment": runs[-1].result["environment"]}
    write_whole(output / COMPARISON, json.dumps(content, indent=1) + "\n")
    write_whole(output / "comparison.md", _markdown(config, outcomes))
    write_curves(runs, _baseline(config, runs), output / "curves.png")
    write_report(config, runs, _rows(outcomes), output)
    return outcomes


def table(outcomes: list[Outcome]) -> Table:
    """The outcomes for a terminal."""
    heading, *rows = _rows(outcomes)
    drawn = Table(title="held-out loss, nats a token")
    for index, column in enumerate(heading):
        drawn.add_column(column, justify="left" if index < 2 else "right")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def _has_ended(variant: Config, run_dir: Path) -> bool:
    """Whether a variant ran to an end before, which is told."""
    end = processes.agreed(lambda: end_of(variant, run_dir))
    if end is not None:
        how = "finished before" if end == RESULT else f"diverged before (delete {run_dir} to train it again)"
        _say(f"{run_dir.name}: {how}, kept")
    return end is not None


def _train(variant: Config, run_dir: Path) -> None:
    """Run a variant in this process."""
    try:
        pretrain.run(variant, run_dir, resume=processes.agreed(lambda: bool(checkpoints(run_dir))))
    except pretrain.TrainingStopped as stopped:
        _say(f"{run_dir.name}: {stopped}")
    finally:  # compiled code counts against torch's limit, a model against the GPU's memory
        torch._dynamo.reset()
        gc.collect()


def _say(line: str) -> None:
    if processes.is_first():
        print(line, file=sys.stderr)


def _read(config: Config, name: str, run_dir: Path) -> Run:
    """A variant that has come to an end."""
    overrides = config.variants[name] or {}
    variant = config.replace({**overrides, "variants": {}})
    result = json.loads((run_dir / end_of(variant, run_dir)).read_text(encoding="utf-8"))
    return Run(name, overrides, variant.attention.recipe, read_metrics(run_dir), result)


def _outcome(run: Run, baseline: Run | None) -> Outcome:
    result = run.result
    diverged = result.get("diverged")
    comparable = baseline is not None and not diverged and not baseline.result.get("diverged")
    return Outcome(
        run.name,
        run.recipe,
        result["held_out_loss"],
        result["held_out_loss"] - baseline.result["held_out_loss"] if comparable else None,
        result["train_loss"],
        result["largest_logit"],
        result["tokens_per_s"],
        result["seconds"],
        result["steps"],
        diverged,
        result["environment"].get("commit"),
    )


def _rows(outcomes: list[Outcome]) -> list[list[str]]:
    """A heading, and a row a variant."""
    heading = ["variant", "attention", "held-out loss", "gap", "training loss", "largest logit", "tokens/s"]
    return [heading] + [
        [
            outcome.variant,
            outcome.recipe,
            f"diverged, step {outcome.steps}" if outcome.diverged else f"{outcome.held_out_loss:.4f}",
            "" if outcome.gap is None else f"{outcome.gap:+.4f}",
            "" if outcome.train_loss is None else f"{outcome.train_loss:.4f}",
            "" if outcome.largest_logit is None else f"{outcome.largest_logit:.1f}",
            f"{outcome.tokens_per_s:,.0f}",
        ]
        for outcome in outcomes
    ]


def _markdown(config: Config, outcomes: list[Outcome]) -> str:
    heading, *rows = _rows(outcomes)
    lines = [heading, ["---"] * len(heading), *rows]
    return f"# {config.name}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
