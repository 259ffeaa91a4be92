"""Options that commands of the benchmarks and of the laboratory share."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

Recipes = Annotated[list[str] | None, typer.Option("--recipe", help="Recipe name or text; repeat for several.")]
Device = Annotated[str, typer.Option(help="cuda, or cpu to try the command out.")]
Rounds = Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")]
Commit = Annotated[str | None, typer.Option(help="Commit to record outside a git checkout.")]
KernelsHash = Annotated[str | None, typer.Option(help="Of the tree of kernels, outside a git checkout.")]
Results = Annotated[Path, typer.Option("--output", help="Folder for the results file, JSON.")]
RESULTS = Path("benchmarks/results")


def check_at_least(least: int, **values: int | None) -> None:
    """Raises ValueError for an option that was given below the least."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def kernels(kernels_hash: str | None) -> dict[str, str | None]:
    """What a results file says of the kernels: the hash of their tree, or what git says it is."""
    from sagebwd.cli.hardware import command_output

    return {"kernels": kernels_hash or command_output("git", "rev-parse", "HEAD:src/sagebwd/kernels")}


def check_known(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a value of an option that is not one of those known."""
    for value in given:
        if value not in known:
            raise ValueError(f"{option}={value!r} is not known; accepted: {', '.join(known)}")


def tokens_of(text: str) -> int:
    """A number of tokens, "8192" or "8K"; raises ValueError for anything else."""
    number, unit = (text[:-1], 1024) if text[-1:] in ("K", "k") else (text, 1)
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(f"tokens={text!r} is no number of tokens; accepted: as 8192 or 8K")
    return int(number) * unit


def rows_of_others(
    path: Path, facts: dict[str, object], fields: tuple[str, ...], measured: Collection[tuple]
) -> list[dict]:  # fmt: skip
    """Rows of a file whose fields are none of ``measured``, so that a run that is split over calls writes one file.

    None of a file that was written on another machine, with other versions or of another commit.
    """
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    if any(content.get(name) != value for name, value in facts.items()):
        return []
    return [row for row in content["rows"] if tuple(row[name] for name in fields) not in measured]


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Says that libraries are imported, which takes seconds."""
    from sagebwd.cli.terminal import progress

    with progress() as tell:
        tell(f"loading {what}")
        yield
