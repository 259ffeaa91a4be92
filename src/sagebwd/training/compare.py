"""The variants of a config trained on the same data from the same weights, and their losses side by side."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from sagebwd.training import pretrain
from sagebwd.training.config import Config
from sagebwd.training.report import Run, write_curves, write_report


@dataclass(frozen=True)
class Outcome:
    """What one variant came to; losses and the gap to the first variant in nats a token."""

    variant: str
    recipe: str
    held_out_loss: float
    gap: float
    train_loss: float
    largest_logit: float
    tokens_per_s: float
    seconds: float


def compare(config: Config, output: Path, only: list[str] | None = None) -> list[Outcome]:
    """Train each variant into a folder of its own under ``output``, then write the comparison and its report.

    A variant that has finished is kept, one that was interrupted goes on from its newest checkpoint. The first of
    those run is what the others are held against. Writes comparison.json, comparison.md, curves.png and report.html.

    Raises ValueError where the config has no variants, ``only`` names one that it has not, a name cannot be a
    folder's, or a folder holds a run of other settings.
    """
    chosen = _chosen(config, only)
    runs = []
    for name, overrides in chosen.items():
        variant = config.replace({**overrides, "variants": {}})
        folder = output / name
        _train(variant, folder)
        result = json.loads((folder / pretrain.RESULT).read_text(encoding="utf-8"))
        runs.append(Run(name, overrides, variant.attention.recipe, pretrain.read_metrics(folder), result))
    outcomes = [_outcome(run, runs[0]) for run in runs]
    content = {"outcomes": [asdict(x) for x in outcomes], "environment": runs[-1].result["environment"]}
    (output / "comparison.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (output / "comparison.md").write_text(_markdown(config, outcomes), encoding="utf-8")
    write_curves(runs, output / "curves.png")
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


def _chosen(config: Config, only: list[str] | None) -> dict[str, dict[str, object]]:
    if not config.variants:
        raise ValueError(f"config {config.name}: it has no variants to compare; `sagebwd pretrain` trains one run")
    unknown = [name for name in only or [] if name not in config.variants]
    if unknown:
        raise ValueError(f"there is no variant {unknown[0]!r}; variants: {', '.join(config.variants)}")
    for name, overrides in config.variants.items():
        if not re.fullmatch(r"[\w][\w .()=,-]*", name):
            raise ValueError(f"variants: {name!r} cannot name a folder; use letters, digits, spaces and .()=,-")
        config.replace(dict(overrides or {}))  # a mistake in the last variant shows before the first has run
    return {name: overrides or {} for name, overrides in config.variants.items() if not only or name in only}


def _train(variant: Config, folder: Path) -> None:
    """Run a variant unless its folder says that it has finished."""
    finished = folder / pretrain.RESULT
    if finished.exists():
        if json.loads(finished.read_text(encoding="utf-8"))["digest"] != variant.digest():
            raise ValueError(f"{folder} holds a run of other settings; choose another --output, or delete the folder")
        return
    pretrain.run(variant, folder, resume=bool(pretrain.checkpoints(folder)))


def _outcome(run: Run, baseline: Run) -> Outcome:
    result = run.result
    return Outcome(
        run.name,
        run.recipe,
        result["held_out_loss"],
        result["held_out_loss"] - baseline.result["held_out_loss"],
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
            f"{outcome.gap:+.4f}",
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
