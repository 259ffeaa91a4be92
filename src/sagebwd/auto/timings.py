"""Timings of a machine, which `sagebwd doctor --measure` keeps in the cache folder: read and fitted."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path

from sagebwd.auto import model
from sagebwd.auto.model import Times
from sagebwd.environment import cache_folder
from sagebwd.version import __version__


@cache
def of_card(card: str, torch_version: str) -> tuple[Times, ...]:
    """What is known of a card, as CUDA names it: measured on this machine; what was not, by this project."""
    _, measured = read(kept_at(card, torch_version), torch_version)
    places = {times[:4] for times in measured}
    return (*measured, *(times for times in model.of_this_project().get(card, ()) if times[:4] not in places))


def read(path: Path, torch_version: str) -> tuple[list[dict], list[Times]]:
    """The rows of a file of `kept_at`, and what calls take by them.

    Nothing where there is no file and, with a warning, where one cannot be read, or says what cannot be fitted.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        from sagebwd.auto.fit import fitted  # which few machines need

        return rows, fitted(rows, f"timings in {path}", torch_version)
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    except Exception as error:  # whatever comes of what `sagebwd doctor --measure` did not write
        logging.getLogger("sagebwd").warning(
            f"sagebwd: {path}, which says what calls take here, is not read: "
            f"{type(error).__name__}: {error}. Delete it, or measure anew with `sagebwd doctor --measure`; until then "
            "what this project measured counts"
        )
        return [], []


def kept_at(card: str, torch_version: str) -> Path:
    """Where what was measured on this machine is kept, by the card and the versions of torch and sagebwd."""
    name = card.removeprefix("NVIDIA ").replace(" ", "-").lower()
    return cache_folder() / "timings" / f"{name}_torch-{torch_version}_sagebwd-{__version__}.json"
