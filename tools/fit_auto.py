"""Fit what `auto` goes by from timings, and print how far it is from them: `python -m tools.fit_auto FILE...`.

Files are those of ``benchmarks/results`` that have times of `mixed` beside contenders in full precision:
``crossings_*.json`` and ``timings_*.json``, of `sagebwd doctor --measure --output benchmarks/results`, and
``attention_*.json`` and ``packed_*.json`` of `python -m benchmarks attention`, of whose packed calls those of equal
lengths count. ``FILE:mask,padding`` takes rows of these kinds of mask alone, ``FILE@96,192/128`` of these widths. It
prints how often the model chooses who is within 3% of the fastest, and what is lost where it does not. With
``--write`` the costs of the files' cards go into ``src/sagebwd/auto/model.json``. Without a file it takes those that
are there already. ``--packaged`` asks ``model.json`` as it is in place of a new fit. ``--hold-out`` fits each part of
the timings from the others, a file, a size or a number of tokens at a time. ``--drawn FILE...`` asks ``model.json``
about calls of `tools.auto_random`, by what these files say each contender took.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from sagebwd.auto import model
from sagebwd.auto.contenders import FA3, FA4, FLASH, LOW, PEERS
from sagebwd.auto.fit import BOUND, fitted, size_of, times_of
from sagebwd.auto.model import FORWARD, TRAINING, Cost, Times, widths_text
from sagebwd.environment import write_whole
from sagebwd.masks.kinds import CAUSAL, FULL, KINDS, PACKED

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODEL = Path(model.__file__).with_suffix(".json")
_DIRECTIONS = {"fwd": FORWARD, "fwd+bwd": TRAINING}


def rows_of(name: str) -> tuple[dict, list[dict]]:
    """The facts of a results file, and its rows as `sagebwd.auto.fit` takes them.

    name: FILE[:KIND,...][@WIDTH,...]. Raises ValueError for a file of other rows, and for what it has no rows of.
    """
    names, _, widths = name.partition("@")
    file, _, kinds = names.partition(":")
    path = Path(file)
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = content.pop("rows")
    if path.name.startswith(("attention_", "packed_")):
        rows = list(_of_bench(rows))
    elif not path.name.startswith(("crossings_", "timings_")):
        raise ValueError(f"{path}: expected crossings_*.json, timings_*.json, attention_*.json or packed_*.json")
    found = [
        row | {"file": path.name}
        for row in rows
        if (not kinds or row["kind"] in kinds.split(","))
        and (not widths or widths_text(row["head_dim"], row["value_dim"]) in widths.split(","))
    ]
    if not found:
        asked = f"{kinds or 'any kind'}, head_dim {widths or 'any'}"
        raise ValueError(f"{name}: no rows of {asked}; kinds are {', '.join(KINDS)}")
    return content, found


# Baselines of `python -m benchmarks attention` by their names here, first what torch picks, as results files have it.
_BASELINES = {"cudnn": "CUDNN_ATTENTION", "varlen": "varlen_attn", "fa2": FLASH, "fa4": FA4, "fa3": FA3}
_CALL = ("head_dim", "value_dim", "heads", "kv_heads", "batch", "tokens", "lengths", "causal", "direction")


def _of_bench(rows: Iterable[Mapping]) -> Iterator[dict]:
    """Rows of `python -m benchmarks attention`: of each call `mixed` beside the baselines that are right there."""
    calls: dict[str, dict[str, Mapping]] = {}
    for row in rows:
        lengths = row.get("lengths") or []
        plain = not row.get("window") and row["scope"] == "end_to_end" and len(set(lengths)) < 2
        if row["gate"] == "ok" and plain and row["direction"] in _DIRECTIONS:
            call = row | {"value_dim": row.get("value_dim", row["head_dim"]), "lengths": lengths}
            name = row["recipe"] if row["recipe"] == "mixed" else row["impl"]
            calls.setdefault(str([call[x] for x in _CALL]), {})[name] = call
    for of in calls.values():
        theirs = {name: (of[x]["ms"], of[x].get("host_ms")) for x, name in _BASELINES.items() if x in of}
        if "mixed" not in of or not {"CUDNN_ATTENTION", "varlen_attn"} & set(theirs):
            continue
        picked, *others = theirs
        row = of["mixed"]
        batch = len(row["lengths"]) or row["batch"]
        yield {
            "kind": PACKED if row["lengths"] else CAUSAL if row["causal"] else FULL, "head_dim": row["head_dim"],
            "value_dim": row["value_dim"], "direction": _DIRECTIONS[row["direction"]], "recipe": "mixed",
            "impl": "hopper/hopper", "batch": batch, "heads": row["heads"], "kv_heads": row["kv_heads"],
            "tokens": row["tokens"] // batch if row["lengths"] else row["tokens"], "ms": row["ms"],
            "host_ms": row.get("host_ms"), "torch_ms": theirs[picked][0], "torch_host_ms": None, "picked": picked,
            "others": {name: theirs[name] for name in others},
        }  # fmt: skip


def place_of(row: Mapping) -> tuple:
    """What the costs of a row's call are found by."""
    return tuple(row[name] for name in Times._fields[:6])


def written(cost: Cost) -> list[float]:
    """What `Cost.of` takes, with three digits."""
    return [float(f"{value / unit:.3g}") for value, unit in zip(cost, model.UNITS)]


def text_of(names: Iterable[str]) -> str:
    """``model.json`` of results files, named as for `rows_of`."""
    cards: dict[str, tuple[dict, list]] = {}
    for name in names:
        facts, rows = rows_of(name)
        of, found = cards.setdefault(facts["gpu"], ({"torch": facts["torch"], "files": {}}, []))
        if of["torch"] != facts["torch"]:
            raise ValueError(f"{name}: torch {facts['torch']}; the other files of {facts['gpu']} have {of['torch']}")
        of["files"][str(Path(name).resolve().relative_to(ROOT))] = facts["commit"]
        found += rows
    parts = []
    for card, (of, rows) in sorted(cards.items()):
        lines = []
        for times in fitted(rows, "", of["torch"]):
            full = {name: written(cost) for name, cost in times.full.items()}
            lines.append("   " + json.dumps([*times[:6], written(times.low), full]))
        head = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in of.items())
        parts.append(f" {json.dumps(card)}: {{\n{head},\n" + '  "times": [\n' + ",\n".join(lines) + "\n  ]\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def files_of_model() -> list[str]:
    """The results files that ``model.json`` was fitted from."""
    content = json.loads(MODEL.read_text(encoding="utf-8"))
    return [str(ROOT / name) for of in content.values() for name in of["files"]]


def residuals(times: Iterable[Times], rows: Iterable[Mapping]) -> dict[tuple[str, str, str], list[float]]:
    """log(fitted / timed) of what the GPU takes of calls that its time decides, by kind, direction and side."""
    known = {one[:6]: one for one in map(_on_gpu, times)}
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        one = known.get(place_of(row))
        if one is None:
            continue
        low_ms, full = one.ms(size_of(row))
        fit = {LOW: low_ms} | full
        for name, (ms, host_ms) in times_of(row).items():
            if name in fit and ms is not None and ms >= BOUND * (host_ms or 0):
                found.setdefault((row["kind"], row["direction"], name), []).append(math.log(fit[name] / ms))
    return found


def _on_gpu(one: Times) -> Times:
    """The same without hosts."""
    full = {name: cost._replace(host=0) for name, cost in one.full.items()}
    return one._replace(low=one.low._replace(host=0), full=full)


class Score:
    """How often a choice was the fastest of several, and how much longer it took."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.right = 0

    def add(self, chosen: float, least: float) -> None:
        """Ms of what was chosen and of the fastest."""
        self.losses.append(math.log(chosen / least))
        self.right += chosen <= 1.03 * least

    def cells(self) -> list[str]:
        """Calls, share of them within 3% of the faster one, geometric mean over it, and the worst."""
        if not self.losses:
            return ["0", "", "", ""]
        lost = [f"{math.exp(x):.3f}" for x in (fmean(self.losses), max(self.losses))]
        return [str(len(self.losses)), f"{self.right / len(self.losses):.3f}", *lost]


def chosen(one: Times, row: Mapping, peers: bool) -> tuple[float, float, float] | None:
    """Ms that a row has of what is chosen, of the fastest, and of what torch picks; None where there is no choice.

    peers: whether they are asked too.
    """
    timed = {name: ms for name, (ms, _) in times_of(row).items() if ms is not None and (peers or name not in PEERS)}
    low_ms, full = one.ms(size_of(row))
    fit = {LOW: (1 + model.MARGIN / 100) * low_ms} | {name: ms for name, ms in full.items() if name in timed}
    if LOW not in timed or len(fit) < 2:
        return None
    picked = next(name for name in timed if name != LOW)
    return timed[min(fit, key=fit.get)], min(timed.values()), timed[picked]


def choices(times: Iterable[Times], rows: Iterable[Mapping]) -> dict[tuple[str, str], Score]:
    """How well rows' calls are chosen among all that were timed, peers too, by kind and direction."""
    known, found = {one[:6]: one for one in times}, {}
    for row in rows:
        one = known.get(place_of(row))
        of = None if one is None else chosen(one, row, peers=True)
        if of is not None:
            found.setdefault((row["kind"], row["direction"]), Score()).add(*of[:2])
    return found


def held_out(rows: list[dict], part_of: Callable[[Mapping], object]) -> dict[object, tuple[Score, Score]]:
    """By part: the choices of a model that was fitted from the other parts, and those of torch always."""
    found = {}
    for part in sorted({part_of(row) for row in rows}, key=str):
        known = {one[:6]: one for one in fitted([row for row in rows if part_of(row) != part], "", "")}
        scores = Score(), Score()
        for row in rows:
            one = known.get(place_of(row)) if part_of(row) == part else None
            of = None if one is None else chosen(one, row, peers=False)
            if of is not None:
                scores[0].add(of[0], of[1])
                scores[1].add(of[2], of[1])
        found[part] = scores
    return found


def drawn_score(path: Path) -> Score:
    """How well ``model.json`` chooses the calls of a results file of `tools.auto_random`."""
    from tools import auto_random

    content, score = json.loads(path.read_text(encoding="utf-8")), Score()
    for row in (auto_random.Row(**row) for row in content["rows"]):
        call = auto_random.drawn(row.number + 1, row.seed)[row.number]
        if str(call) != row.call:
            raise ValueError(f"{path}: {row.call!r} of seed {row.seed} is drawn as {str(call)!r} today")
        if row.best is None:
            continue
        ms = auto_random.ms_by_package(call, row, content["gpu"])
        score.add(ms, row.best)
        if ms > auto_random.RIGHT * row.best:
            print(f"{row.best / ms:.3f} of the fastest: {row.call}")
    return score


def _power(row: Mapping) -> int:
    """Of two: batch x heads x tokens x value_dim."""
    return round(math.log2(row["batch"] * row["heads"] * row["tokens"] * row["value_dim"]))


PARTS: dict[str, Callable[[Mapping], object]] = {
    "file": lambda row: row["file"], "size 2^": _power, "tokens": lambda row: row["tokens"],
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE[:KIND,...][@WIDTH,...]")
    parser.add_argument("--write", action="store_true", help="write src/sagebwd/auto/model.json of these files alone")
    parser.add_argument("--hold-out", action="store_true", help="fit parts from the others")
    parser.add_argument("--packaged", action="store_true", help="ask model.json as it is")
    parser.add_argument("--drawn", type=Path, nargs="+", metavar="FILE", help="ask model.json about drawn calls")
    given = parser.parse_args(arguments)
    if given.drawn:
        for path in given.drawn:
            print(path.name, "calls {}, within 3% {}, lost {}, most {}".format(*drawn_score(path).cells()))
        return
    names = given.files or files_of_model()
    cards: dict[str, list[dict]] = {}
    for name in names:
        facts, rows = rows_of(name)
        cards.setdefault(facts["gpu"], []).extend(rows)
    console = Console(width=120)
    for card, rows in cards.items():
        shown = Table(
            "kind", "direction", "of", "timings", "rms", "most", title=f"{card}: log(fitted / timed)", box=None
        )
        times = model.of_this_project()[card] if given.packaged else fitted(rows, "", "")
        for place, values in sorted(residuals(times, rows).items()):
            rms = math.sqrt(fmean(x * x for x in values))
            shown.add_row(*place, str(len(values)), f"{rms:.3f}", f"{max(map(abs, values)):.2f}")
        console.print(shown)
        shown = Table("kind", "direction", "timings", "within 3%", "lost", "most", title=f"{card}: chosen", box=None)
        for place, score in sorted(choices(times, rows).items()):
            shown.add_row(*place, *score.cells())
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
        write_whole(MODEL, text_of(names))
        print(f"wrote {MODEL}")


if __name__ == "__main__":
    sys.exit(main())
