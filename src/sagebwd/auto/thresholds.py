"""From how many tokens low precision is faster than torch's own attention: what was measured, by card.

Imports neither torch nor triton, as `sagebwd.kernels.capabilities`. ``thresholds.json`` beside this file has what was
measured on the cards of this project, each row with the results file that says so; `python -m tools.thresholds` writes
it. `sagebwd doctor --measure` keeps what it measures on a machine in the cache folder.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sagebwd.environment import cache_folder
from sagebwd.version import __version__

# Of a call whose inputs need no gradient, and of forward and backward together.
FORWARD, TRAINING = "forward", "training"
DIRECTIONS = (FORWARD, TRAINING)
# What hides keys: nothing; the future; a window, causal or not; padding of keys; bounds of packed sequences, causal or
# not; anything else that a mask of elements says.
KINDS = ("full", "causal", "window", "padding", "packed", "mask")
FULL, CAUSAL, WINDOW, PADDING, PACKED, MASK = KINDS
# Batch x heads x tokens x value_dim of what is timed, about: one sequence of a small model, one of 4096 tokens with 32
# heads of 128, and a training step of 16384 tokens.
SIZES = (1 << 22, 1 << 24, 1 << 25)
SMALL, MIDDLE, LARGE = SIZES


class Threshold(NamedTuple):
    """What was measured at one pair of widths: low precision is faster from ``tokens`` tokens on.

    elements: batch x heads x tokens x value_dim of the calls that were timed. tokens: None where it never was faster.
    recipe, impl: what ran in low precision, and on whose kernels (`sagebwd.dispatch.Choice.name`). source: the file
    that says so.
    """

    head_dim: int
    value_dim: int
    direction: str
    kind: str
    elements: int
    tokens: int | None
    recipe: str
    impl: str
    source: str


def widths_text(head_dim: int, value_dim: int) -> str:
    """A pair of widths as the command line takes it: one number where they are equal."""
    return str(head_dim) if head_dim == value_dim else f"{head_dim}/{value_dim}"


def of_rows(rows: Iterable[Mapping], source: str) -> list[Threshold]:
    """The thresholds of the rows of a results file (`sagebwd.cli.measure.Timing`)."""
    groups: dict[tuple, list[Mapping]] = {}
    for row in rows:
        size = row.get("size") or min(SIZES, key=lambda size: abs(math.log2(row["elements"] / size)))
        key = row["head_dim"], row["value_dim"], row["direction"], row["kind"], size, row["recipe"], row["impl"]
        groups.setdefault(key, []).append(row)
    found = []
    for (head_dim, value_dim, direction, kind, _, *runs), timed in groups.items():
        elements = min(row["elements"] for row in timed)
        found.append(Threshold(head_dim, value_dim, direction, kind, elements, least(timed), *runs, source))
    return found


def least(rows: Iterable[Mapping]) -> int | None:
    """The least number of tokens from which on low precision was faster, of rows of one kind; None of none."""
    tokens = None
    for row in sorted(rows, key=lambda row: row["tokens"], reverse=True):
        if not wins(row["ms"], row["torch_ms"]):
            break
        tokens = row["tokens"]
    return tokens


def wins(ms: float | None, torch_ms: float | None) -> bool:
    """Whether low precision is faster; None is what did not run."""
    return ms is not None and (torch_ms is None or ms <= torch_ms)


@cache
def of_card(card: str, torch_version: str) -> tuple[Threshold, ...]:
    """What is known of a card, as CUDA names it: measured on this machine, or else by this project."""
    path = kept_at(card, torch_version)
    rows = rows_kept(path)
    if rows is not None:
        return tuple(of_rows(rows, str(path)))
    return tuple(Threshold(**row) for row in _of_this_project().get(card, ()))


def rows_kept(path: Path) -> list[dict] | None:
    """The rows of a file of `kept_at`; None where there is none and, with a warning, where it cannot be read."""
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        logging.getLogger("sagebwd").warning(
            f"sagebwd: {path}, which says from how many tokens low precision is faster here, is not read: "
            f"{type(error).__name__}: {error}. Delete it, or measure anew with `sagebwd doctor --measure`; until then "
            "what this project measured counts"
        )
        return None


def _checked(content: object) -> list[dict]:
    """The rows of a results file. Raises ValueError that says what of them is not what it should be."""
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list):
        raise ValueError('expected an object with a list "rows"')
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"rows[{number}]: expected an object, got {row!r}")
        for name, (accepts, accepted) in _COLUMNS.items():
            if name not in row and name != "size":  # which older files have not
                raise ValueError(f"rows[{number}]: {name} is missing; expected {accepted}")
            if name in row and not accepts(row[name]):
                raise ValueError(f"rows[{number}]: {name}={row[name]!r}: expected {accepted}")
    return rows


def _is_count(x: object) -> bool:
    return type(x) is int and x > 0


def _is_time(x: object) -> bool:
    return x is None or type(x) in (int, float)


# What `of_rows` reads of a row, which values it takes and what these are called.
_COLUMNS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("head_dim", "value_dim", "tokens", "elements"), (_is_count, "an integer, at least 1")),
    "direction": (DIRECTIONS.__contains__, f"one of {', '.join(DIRECTIONS)}"),
    "kind": (KINDS.__contains__, f"one of {', '.join(KINDS)}"),
    **dict.fromkeys(("recipe", "impl"), (lambda x: isinstance(x, str), "a text")),
    **dict.fromkeys(("ms", "torch_ms"), (_is_time, "a number or null")),
    "size": (_is_count, "an integer, at least 1"),
}


def kept_at(card: str, torch_version: str) -> Path:
    """Where what was measured on this machine is kept, by the card and the versions of torch and sagebwd."""
    name = card.removeprefix("NVIDIA ").replace(" ", "-").lower()
    return cache_folder() / "thresholds" / f"{name}_torch-{torch_version}_sagebwd-{__version__}.json"


def _of_this_project() -> dict[str, list[dict]]:
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
