"""Timings of a machine, which `sagebwd doctor --measure` keeps in the cache folder: read, checked and fitted."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

from sagebwd.auto import model
from sagebwd.auto.model import DIRECTIONS, Times
from sagebwd.environment import cache_folder
from sagebwd.masks.kinds import KINDS
from sagebwd.version import __version__


@cache
def of_card(card: str, torch_version: str) -> tuple[Times, ...]:
    """What is known of a card, as CUDA names it: measured on this machine; what was not, by this project."""
    path, packaged = kept_at(card, torch_version), model.of_this_project().get(card, ())
    rows = rows_kept(path)
    if rows is None:
        return packaged
    from sagebwd.auto.fit import fitted  # which few machines need

    measured = fitted(rows, f"timings in {path}", torch_version)
    places = {times[:4] for times in measured}
    return (*measured, *(times for times in packaged if times[:4] not in places))


def rows_kept(path: Path) -> list[dict] | None:
    """The rows of a file of `kept_at`; None where there is none and, with a warning, where it cannot be read."""
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        logging.getLogger("sagebwd").warning(
            f"sagebwd: {path}, which says what calls take here, is not read: "
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
            if name not in row and name not in _LATER_COLUMNS:
                raise ValueError(f"rows[{number}]: {name} is missing; expected {accepted}")
            if name in row and not accepts(row[name]):
                raise ValueError(f"rows[{number}]: {name}={row[name]!r}: expected {accepted}")
        if not _are_times(row.get("others", {})):
            raise ValueError(f"rows[{number}]: others={row['others']!r}: expected names with pairs of times")
    return rows


def _is_count(x: object) -> bool:
    return type(x) is int and 0 < x <= _MOST


def _is_time(x: object) -> bool:
    return x is None or (type(x) in (int, float) and _SHORTEST_MS <= x <= _LONGEST_MS)


def _are_times(others: object) -> bool:
    """Whether they are ms and the host's ms by name, or, as in older files, ms."""
    if not isinstance(others, dict):
        return False
    return all(_is_time(x) or (isinstance(x, list) and len(x) == 2 and all(map(_is_time, x))) for x in others.values())


# What a call can have, and what a clock can give: numbers that a fit can square.
_MOST, _SHORTEST_MS, _LONGEST_MS = (1 << 31) - 1, 1e-6, 1e9
_COUNT, _TIME = f"an integer from 1 to {_MOST}", f"a number from {_SHORTEST_MS:g} to {_LONGEST_MS:g} or null"
# What `sagebwd.auto.fit` reads of a row, which values it takes and what these are called.
_COLUMNS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("head_dim", "value_dim", "batch", "heads", "tokens"), (_is_count, _COUNT)),
    "direction": (DIRECTIONS.__contains__, f"one of {', '.join(DIRECTIONS)}"),
    "kind": (KINDS.__contains__, f"one of {', '.join(KINDS)}"),
    **dict.fromkeys(("recipe", "impl"), (lambda x: isinstance(x, str), "a text")),
    **dict.fromkeys(("ms", "host_ms", "torch_ms", "torch_host_ms"), (_is_time, _TIME)),
    "kv_heads": (_is_count, _COUNT),
    **dict.fromkeys(("kv_tokens", "width"), (lambda x: x in (0, None) or _is_count(x), f"{_COUNT}, 0 or null")),
    "picked": (lambda x: isinstance(x, str), "a text"),
}
# Those that older files lack.
_LATER_COLUMNS = "kv_heads", "kv_tokens", "width", "picked"


def kept_at(card: str, torch_version: str) -> Path:
    """Where what was measured on this machine is kept, by the card and the versions of torch and sagebwd."""
    name = card.removeprefix("NVIDIA ").replace(" ", "-").lower()
    return cache_folder() / "timings" / f"{name}_torch-{torch_version}_sagebwd-{__version__}.json"
