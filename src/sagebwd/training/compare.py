"""The variants of a config trained on the same data from the same weights, and their losses side by side."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from rich.table import Table

from sagebwd.training import pretrain
from sagebwd.training.config import Config
from sagebwd.training.folder import CONFIG, RESULT, checkpoints, read_metrics
from sagebwd.training.report import Run, write_curves, write_report


@dataclass(frozen=True)
class Outcome:
    """What one variant came to; losses in nats a token.

    ``gap`` is the held-out loss minus the config's first variant's, None while that one has not finished.
    """

    variant: str
    recipe: str
    held_out_loss: float
    gap: float | None
    train_loss: float
    largest_logit: float
    tokens_per_s: float
    seconds: float


def compare(config: Config, output: Path, only: list[str] | None = None) -> list[Outcome]:
    """Train each variant, or those in ``only``, into a folder of its own under ``output``; then compare and report.

    A variant that has finished is kept, one that was interrupted goes on from its newest checkpoint. The config's
    first variant is the baseline; every variant that has finished is compared, whether it ran now or before. Writes
    comparison.json, comparison.md, curves.png and report.html.

    Raises ValueError where the config has no variants, ``only`` names one that it has not, a name cannot be a
    folder's, or a folder holds a run of other settings: all of it before the first variant trains.
    """
    variants = _variants(config)
    unknown = [name for name in only or [] if name not in variants]
    if unknown:
        raise ValueError(f"there is no variant {unknown[0]!r}; variants: {', '.join(variants)}")
    chosen = {name: variant for name, variant in variants.items() if not only or name in only}
    for name, variant in chosen.items():
        if _digest(output / name) not in (None, variant.digest()):
            raise ValueError(f"{output / name} holds a run of other settings; choose another --output, or delete it")
    for name, variant in chosen.items():
        _train(variant, output / name)
    runs = [
        _read(config, name, output / name) for name, variant in variants.items() if _finished(variant, output / name)
    ]
    baseline = next((run for run in runs if run.name == next(iter(variants))), None)
    outcomes = [_outcome(run, baseline) for run in runs]
    rows = [{**asdict(outcome), "digest": run.result["digest"]} for outcome, run in zip(outcomes, runs)]
    content = {"outcomes": rows, "environment": runs[-1].result["environment"]}
    (output / "comparison.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (output / "comparison.md").write_text(_markdown(config, outcomes), encoding="utf-8")
    write_curves(runs, baseline, output / "curves.png")
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


def _variants(config: Config) -> dict[str, Config]:
    """Each variant as a config of its own, so that a mistake in the last one shows before the first has run."""
    if not config.variants:
        raise ValueError(f"config {config.name}: it has no variants to compare; `sagebwd pretrain` trains one run")
    variants = {}
    for name, overrides in config.variants.items():
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w .()=,-]*", name):
            raise ValueError(f"variants: {name!r} cannot name a folder; use a text of letters, digits, spaces, .()=,-")
        if not isinstance(overrides or {}, dict) or not all(isinstance(key, str) for key in overrides or {}):
            raise ValueError(
                f"variants: {name} must map keys to values, as attention.recipe: paper; got {overrides!r}"
            )
        variants[name] = config.replace({**(overrides or {}), "variants": {}})
    return variants


def _digest(folder: Path) -> str | None:
    """The digest of the run in a folder, finished or not; None where there is none."""
    for name in (RESULT, CONFIG):
        if (folder / name).exists():
            return yaml.safe_load((folder / name).read_text(encoding="utf-8"))["digest"]
    return None


def _finished(variant: Config, folder: Path) -> bool:
    return (folder / RESULT).exists() and _digest(folder) == variant.digest()


def _train(variant: Config, folder: Path) -> None:
    """Run a variant unless it has finished."""
    if _finished(variant, folder):
        print(f"{folder.name}: finished before, kept", file=sys.stderr)
        return
    pretrain.run(variant, folder, resume=bool(checkpoints(folder)))


def _read(config: Config, name: str, folder: Path) -> Run:
    """A finished variant from its folder."""
    overrides = config.variants[name] or {}
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    recipe = config.replace(overrides).attention.recipe
    return Run(name, overrides, recipe, read_metrics(folder), result)


def _outcome(run: Run, baseline: Run | None) -> Outcome:
    result = run.result
    return Outcome(
        run.name,
        run.recipe,
        result["held_out_loss"],
        None if baseline is None else result["held_out_loss"] - baseline.result["held_out_loss"],
        result["train_loss"],
        result["largest_logit"],
        result["tokens_per_s"],
        result["seconds"],
    )


def _rows(outcomes: list[Outcome]) -> list[list[str]]:
    """A heading, and a row a variant."""
    heading = ["variant", "attention", "held-out loss", "gap", "training loss", "largest logit", "tokens/s"]
    return [heading] + [
        [
            outcome.variant,
            outcome.recipe,
            f"{outcome.held_out_loss:.4f}",
            "" if outcome.gap is None else f"{outcome.gap:+.4f}",
            f"{outcome.train_loss:.4f}",
            f"{outcome.largest_logit:.1f}",
            f"{outcome.tokens_per_s:,.0f}",
        ]
        for outcome in outcomes
    ]


def _markdown(config: Config, outcomes: list[Outcome]) -> str:
    heading, *rows = _rows(outcomes)
    lines = [heading, ["---"] * len(heading), *rows]
    return f"# {config.name}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
