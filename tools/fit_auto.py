"""Fit what `auto` goes by from timings, and print how far it is from them: `python -m tools.fit_auto FILE...`.

Files are those of ``benchmarks/results`` that have times of `mixed` beside torch's: ``crossings_*.json`` and
``timings_*.json``, of `sagebwd doctor --measure --output benchmarks/results`, and ``attention_*.json`` of `python -m
benchmarks attention`, whose dense calls count. With ``--write`` the costs of the files' cards go into
``src/sagebwd/auto/model.json``. Without a file it takes those that are there already. ``--hold-out`` fits each part of
the timings from the others, a file, a size or a number of tokens at a time, and prints how often the faster one is
chosen and what is lost where it is not.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from sagebwd.auto import model
from sagebwd.auto.fit import BOUND, LOW, TORCH, fitted, size_of
from sagebwd.auto.model import CAUSAL, FORWARD, FULL, TRAINING, Times

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODEL = Path(model.__file__).with_suffix(".json")
_DIRECTIONS = {"fwd": FORWARD, "fwd+bwd": TRAINING}


def rows_of(path: Path) -> tuple[dict, list[dict]]:
    """The facts of a results file, and its rows as `sagebwd.auto.fit` takes them; ValueError for one of other rows."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = content.pop("rows")
    if path.name.startswith("attention_"):
        rows = [found for row in rows if (found := _of_bench(row)) is not None]
    elif not path.name.startswith(("crossings_", "timings_")):
        raise ValueError(f"{path}: expected crossings_*.json, timings_*.json or attention_*.json")
    return content, [row | {"file": path.name} for row in rows]


def _of_bench(row: Mapping) -> dict | None:
    """A row of `python -m benchmarks attention`, of `mixed` beside cuDNN, whose backend torch picks here."""
    direction = _DIRECTIONS.get(row["direction"])
    plain = not row.get("lengths") and not row.get("window") and row["scope"] == "end_to_end"
    if (row["recipe"], row["gate"]) != ("mixed", "ok") or direction is None or not plain or row["cudnn_ms"] is None:
        return None
    return {
        "kind": CAUSAL if row["causal"] else FULL, "head_dim": row["head_dim"],
        "value_dim": row.get("value_dim", row["head_dim"]), "direction": direction, "recipe": "mixed",
        "impl": "hopper/hopper", "batch": row["batch"], "heads": row["heads"], "kv_heads": row["kv_heads"],
        "tokens": row["tokens"], "ms": row["ms"], "host_ms": row.get("host_ms"), "torch_ms": row["cudnn_ms"],
        "torch_host_ms": None,
    }  # fmt: skip


def place_of(row: Mapping) -> tuple:
    """What the costs of a row's call are found by."""
    return tuple(row[name] for name in Times._fields[:6])


def text_of(paths: Iterable[Path]) -> str:
    """``model.json`` of results files."""
    cards: dict[str, tuple[dict, list]] = {}
    for path in paths:
        facts, rows = rows_of(path)
        of, found = cards.setdefault(facts["gpu"], ({"torch": facts["torch"], "files": {}}, []))
        if of["torch"] != facts["torch"]:
            raise ValueError(f"{path}: torch {facts['torch']}; the other files of {facts['gpu']} have {of['torch']}")
        of["files"][str(path.resolve().relative_to(ROOT))] = facts["commit"]
        found += rows
    parts = []
    for card, (of, rows) in sorted(cards.items()):
        lines = []
        for times in fitted(rows, "", of["torch"]):
            costs = [None if cost is None else cost.written() for cost in (times.low, times.full)]
            lines.append("   " + json.dumps([*times[:6], *costs]))
        head = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in of.items())
        parts.append(f" {json.dumps(card)}: {{\n{head},\n" + '  "times": [\n' + ",\n".join(lines) + "\n  ]\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def files_of_model() -> list[Path]:
    """The results files that ``model.json`` was fitted from."""
    content = json.loads(MODEL.read_text(encoding="utf-8"))
    return [ROOT / name for of in content.values() for name in of["files"]]


def residuals(times: Iterable[Times], rows: Iterable[Mapping]) -> dict[tuple[str, str, str], list[float]]:
    """log(fitted / timed) of calls that the GPU's time decides, by kind, direction and side."""
    known = {one[:6]: one for one in times}
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        one = known.get(place_of(row))
        both = (None, None) if one is None else one.ms(size_of(row))
        for prefix, name, fit_ms in zip((LOW, TORCH), ("low", "full"), both):
            ms = row[f"{prefix}ms"]
            if fit_ms is None or ms is None or ms < BOUND * (row.get(f"{prefix}host_ms") or 0):
                continue
            value = math.log(fit_ms / ms)
            found.setdefault((row["kind"], row["direction"], name), []).append(value)
    return found


class Score:
    """How often a choice was the faster one of two, and how much longer it took."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.right = 0

    def add(self, chosen: float, other: float) -> None:
        """Ms of what was chosen and of what was not."""
        self.losses.append(math.log(chosen / min(chosen, other)))
        self.right += chosen <= 1.03 * other

    def cells(self) -> list[str]:
        """Calls, share of them within 3% of the faster one, geometric mean over it, and the worst."""
        if not self.losses:
            return ["0", "", "", ""]
        lost = [f"{math.exp(x):.3f}" for x in (fmean(self.losses), max(self.losses))]
        return [str(len(self.losses)), f"{self.right / len(self.losses):.3f}", *lost]


def held_out(rows: list[dict], part_of: Callable[[Mapping], object]) -> dict[object, tuple[Score, Score]]:
    """By part: the choices of a model that was fitted from the other parts, and those of torch always."""
    found = {}
    for part in sorted({part_of(row) for row in rows}, key=str):
        known = {one[:6]: one for one in fitted([row for row in rows if part_of(row) != part], "", "")}
        scores = Score(), Score()
        for row in rows:
            one = known.get(place_of(row))
            if part_of(row) != part or one is None or one.full is None or None in (row["ms"], row["torch_ms"]):
                continue
            wins = model.is_faster(one.low.with_margin(), one.full, size_of(row).work(row["kind"]))
            pair = row["ms"], row["torch_ms"]
            scores[0].add(*(pair if wins else pair[::-1]))
            scores[1].add(*pair[::-1])
        found[part] = scores
    return found


def _power(row: Mapping) -> int:
    """Of two: batch x heads x tokens x value_dim."""
    return round(math.log2(row["batch"] * row["heads"] * row["tokens"] * row["value_dim"]))


PARTS: dict[str, Callable[[Mapping], object]] = {
    "file": lambda row: row["file"], "size 2^": _power, "tokens": lambda row: row["tokens"],
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="write src/sagebwd/auto/model.json of these files alone")
    parser.add_argument("--hold-out", action="store_true", help="fit parts from the others")
    given = parser.parse_args(arguments)
    paths = given.files or files_of_model()
    cards: dict[str, list[dict]] = {}
    for path in paths:
        facts, rows = rows_of(path)
        cards.setdefault(facts["gpu"], []).extend(rows)
    console = Console(width=120)
    for card, rows in cards.items():
        shown = Table(
            "kind", "direction", "of", "timings", "rms", "most", title=f"{card}: log(fitted / timed)", box=None
        )
        for place, values in sorted(residuals(fitted(rows, "", ""), rows).items()):
            rms = math.sqrt(fmean(x * x for x in values))
            shown.add_row(*place, str(len(values)), f"{rms:.3f}", f"{max(map(abs, values)):.2f}")
        console.print(shown)
        if not given.hold_out:
            continue
        shown = Table(
            "left out", "timings", "within 3%", "lost", "most", title=f"{card}: chosen by the rest", box=None
        )
        for name, part_of in PARTS.items():
            for part, (score, torch) in held_out(rows, part_of).items():
                shown.add_row(f"{name} {part}", *score.cells())
                shown.add_row("  torch always", *torch.cells())
        console.print(shown)
    if given.write:
        MODEL.write_text(text_of(paths), encoding="utf-8")
        print(f"wrote {MODEL}")


if __name__ == "__main__":
    sys.exit(main())
