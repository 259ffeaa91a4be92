"""The runs of a fine-tuning side by side: accuracy of each variant over its seeds, and against full precision."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from lab.training.config import SDPA
from lab.training.finetune_config import Finetuning
from lab.training.gaps import interval
from lab.training.run_dir import COMPARISON, end_of, write_whole


@dataclass(frozen=True)
class Outcome:
    """What one variant came to, over the seeds that have finished; accuracies are shares of held-out examples.

    ``deviation`` is the standard deviation over seeds, None of fewer than two. ``difference`` is the mean, over the
    seeds that both have, of the accuracy minus that of the baseline: the first variant whose recipe is "sdpa".
    ``interval`` is where that mean lies with 95% confidence, by Student's t, None of fewer than two.
    """

    variant: str
    recipe: str
    accuracies: dict[int, float]  # by seed
    mean: float | None
    deviation: float | None
    difference: float | None
    difference_deviation: float | None
    interval: tuple[float, float] | None
    before: float | None  # mean accuracy before the first step, None where it was not measured
    held_out_loss: float | None
    examples: int
    seconds: float | None
    diverged: list[int]  # seeds


def folder_name(variant: str, run: Finetuning) -> str:
    """The name of a run's folder."""
    return f"{variant}-seed-{run.seeds[0]}"


def report(config: Finetuning, output: Path) -> list[Outcome]:
    """Compare the runs that have come to an end, and write comparison.json and comparison.md."""
    runs = config.runs()
    results: dict[str, dict[int, dict]] = {name: {} for name in runs}
    for name, run in ((name, run) for name, of_variant in runs.items() for run in of_variant):
        run_dir = output / folder_name(name, run)
        end = end_of(run, run_dir)
        if end is not None:
            results[name][run.seeds[0]] = json.loads((run_dir / end).read_text(encoding="utf-8"))
    recipes = {name: of_variant[0].attention.recipe for name, of_variant in runs.items()}
    baseline = next((results[name] for name, recipe in recipes.items() if recipe == SDPA), {})
    outcomes = [_outcome(name, recipes[name], found, baseline) for name, found in results.items() if found]
    newest = next((result for found in reversed(results.values()) for result in found.values()), {})
    content = {"outcomes": [asdict(outcome) for outcome in outcomes], "environment": newest.get("environment")}
    write_whole(output / COMPARISON, json.dumps(content, indent=1) + "\n")
    heading, *rows = _rows(outcomes)
    lines = [heading, ["---"] * len(heading), *rows]
    write_whole(
        output / "comparison.md",
        f"# {config.name}\n\nAccuracy on held-out examples, mean ± standard deviation over seeds.\n\n"
        + "".join(f"| {' | '.join(line)} |\n" for line in lines),
    )
    return outcomes


def _outcome(name: str, recipe: str, results: dict[int, dict], baseline: dict[int, dict]) -> Outcome:
    finished = {seed: result for seed, result in results.items() if result["accuracy"] is not None}
    accuracies = {seed: result["accuracy"] for seed, result in finished.items()}
    differences = [
        accuracy - baseline[seed]["accuracy"]
        for seed, accuracy in accuracies.items()
        if seed in baseline and baseline[seed]["accuracy"] is not None
    ]
    before = [result["accuracy_before"] for result in results.values() if result["accuracy_before"] is not None]
    return Outcome(
        name,
        recipe,
        accuracies,
        *_spread(list(accuracies.values())),
        *_spread(differences),
        interval(differences),
        _spread(before)[0],
        _spread([result["held_out_loss"] for result in finished.values()])[0],
        max((result["examples"] for result in results.values()), default=0),
        _spread([result["seconds"] for result in finished.values()])[0],
        [seed for seed in results if seed not in finished],
    )


def _spread(values: list[float]) -> tuple[float | None, float | None]:
    """Mean and standard deviation."""
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def table(outcomes: list[Outcome]) -> Table:
    """The outcomes for a terminal."""
    heading, *rows = _rows(outcomes)
    drawn = Table(title="accuracy on held-out examples")
    for index, column in enumerate(heading):
        drawn.add_column(column, justify="left" if index < 2 else "right")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def _rows(outcomes: list[Outcome]) -> list[list[str]]:
    """A heading, and a row a variant."""
    heading = ["variant", "attention", "accuracy", "to full precision", "95%", "before", "held-out loss", "seeds"]
    return [[*heading, "examples"]] + [
        [
            outcome.variant,
            outcome.recipe,
            _plus_minus(outcome.mean, outcome.deviation, ".4f"),
            _plus_minus(outcome.difference, outcome.difference_deviation, "+.4f"),
            "" if outcome.interval is None else " to ".join(f"{end:+.4f}" for end in outcome.interval),
            _plus_minus(outcome.before, None, ".4f"),
            _plus_minus(outcome.held_out_loss, None, ".4f"),
            f"{len(outcome.accuracies)}" + (f", {len(outcome.diverged)} diverged" if outcome.diverged else ""),
            str(outcome.examples),
        ]
        for outcome in outcomes
    ]


def _plus_minus(mean: float | None, deviation: float | None, form: str) -> str:
    return "" if mean is None else f"{mean:{form}}" + ("" if deviation is None else f" ± {deviation:.4f}")
