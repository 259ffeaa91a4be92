"""The studies' JSON: written with a line for each row, and the error study's as Markdown tables."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from lab.studies.ablations import ABLATIONS, BASES, NOT_MEASURED
from sagebwd.environment import write_whole

LABELS = {"o": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}
SHOWN = 0.01
"""An ablation is in a tensor's table if some kind of data changes by more than this."""
NO_WORSE, BETTER = 1.02, 0.97
"""Ratios to `token`'s error, give or take two standard errors of the mean: over the first anywhere is worse than
`token`; to beat it, at most the second somewhere too."""


def tell(what: str, step: int, steps: int | None = None) -> None:
    """Say on standard error what is measured now, the ``step``-th, counted from 1: studies take minutes."""
    print(f"{step}{'' if steps is None else f' of {steps}'}: {what}", file=sys.stderr, flush=True)


def write(path: Path, content: dict) -> None:
    """Write a study's JSON, whose "rows" come last and on a line each, so that a change of one shows as one."""
    head = json.dumps({key: value for key, value in content.items() if key != "rows"})
    lines = ",\n".join(json.dumps(row) for row in content["rows"])
    write_whole(path, f'{head[:-1]}, "rows": [\n{lines}\n]}}\n')


def markdown(content: dict) -> str:
    """The tables of one file of `lab.studies.study`."""
    tables = {"ablations": _ablations, "lengths": _lengths, "roundings": _roundings}[content["part"]](content["rows"])
    return "\n\n".join(tables)


def ratios(rows: Sequence[dict], tensor: str) -> dict[str, dict[str, list[float]]]:
    """ablation to kind to each sample's error over `token`'s on the same sample."""
    base = {row["kind"]: row["errors"][tensor] for row in rows if row["ablation"] == "token"}
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        pairs = zip(row["errors"][tensor], base[row["kind"]])
        found.setdefault(row["ablation"], {})[row["kind"]] = [a / b if b else 1.0 for a, b in pairs]
    return found


def _ablations(rows: Sequence[dict]) -> list[str]:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    bases = [str(ablation) for ablation in BASES]
    by_ablation = {(row["kind"], row["ablation"]): row["errors"] for row in rows}
    lines = [
        [kind, f"`{base}`", *(_spread(by_ablation[kind, base][name], 4) for name in LABELS)]
        for kind in kinds for base in bases
    ]  # fmt: skip
    tables = [table(["data", "recipe", *LABELS.values()], lines)]
    by_tensor = {name: ratios(rows, name) for name in LABELS}
    for name, label in LABELS.items():
        lines = []
        for ablation, by_kind in by_tensor[name].items():
            means = [statistics.mean(by_kind[kind]) for kind in kinds]
            if ablation not in bases and max(abs(mean - 1) for mean in means) > SHOWN:
                lines.append([_quoted(ablation), *(_spread(by_kind[kind], 2) for kind in kinds)])
        tables.append(table([f"{label}: error over `token`'s", *kinds], lines))
    lines = []
    for ablation in (*BASES[1:], *ABLATIONS):
        errors = {
            (name, kind): (statistics.mean(values), 2 * _standard_error(values))
            for name in LABELS for kind, values in by_tensor[name].get(str(ablation), {}).items()
        }  # fmt: skip
        if not errors:
            continue
        means = {of: mean for of, (mean, _) in errors.items()}
        worst, best = max(means, key=means.get), min(means, key=means.get)
        no_worse = all(mean - margin <= NO_WORSE for mean, margin in errors.values())
        verdict = "no"
        if no_worse and any(mean + margin <= BETTER for mean, margin in errors.values()):
            measured = not ablation.cost.startswith(NOT_MEASURED)
            verdict = "**yes**" if ablation.no_more else "at a cost" if measured else "cost not measured"
        cells = [f"{means[of]:.2f} ({LABELS[of[0]]}, {of[1]})" for of in (best, worst)]
        lines.append([_quoted(str(ablation)), *cells, ablation.cost, verdict])
    heads = ["ablation", "least error over `token`'s", "largest", "added cost", "beats `token`"]
    return [*tables, table(heads, lines)]


def _lengths(rows: Sequence[dict]) -> list[str]:
    tokens = sorted({row["tokens"] for row in rows})
    by_curve = {(row["kind"], row["is_causal"], row["ablation"], row["tokens"]): row["errors"] for row in rows}
    curves = list(dict.fromkeys((kind, is_causal, ablation) for kind, is_causal, ablation, _ in by_curve))
    tables = []
    for name, label in LABELS.items():
        lines = [
            [kind, "causal" if is_causal else "none", f"`{ablation}`"]
            + [_spread(by_curve[kind, is_causal, ablation, n][name], 4) for n in tokens]
            for kind, is_causal, ablation in curves
        ]
        tables.append(table([f"{label} of", "mask", "recipe", *(f"{n} tokens" for n in tokens)], lines))
    return tables


def _roundings(rows: Sequence[dict]) -> list[str]:
    by_rounding = {(row["kind"], row["rounding"]): row for row in rows}
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        pair = [by_rounding[kind, rounding] for rounding in ("nearest", "stochastic")]
        for name in pair[0]["error"]:
            gains = [row["gain"][name] for row in pair]
            lines.append([
                kind, LABELS[name], *(f"{row['error'][name]:.4f}" for row in pair),
                f"{pair[1]['error_of_mean'][name]:.4f}",
                *(f"{100 * statistics.mean(gain):+.3f}% ± {100 * _standard_error(gain):.3f}%" for gain in gains),
            ])  # fmt: skip
    heads = ["nearest, error", "stochastic, error", "of its mean", "nearest, gain", "stochastic, gain"]
    return [table(["data", "tensor", *heads], lines)]


def _quoted(ablation: str) -> str:
    return f"`{ablation}`" if ablation.startswith(("token", "paper")) else ablation


def _spread(values: Sequence[float], digits: int) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def table(headings: Iterable[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    headings = list(headings)
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
