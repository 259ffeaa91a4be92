"""The studies' JSON, written with a line for each row, and their Markdown tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sagebwd.environment import write_whole


def tell(what: str, step: int, steps: int | None = None) -> None:
    """Say on standard error what is measured now, the ``step``-th, counted from 1: studies take minutes."""
    print(f"{step}{'' if steps is None else f' of {steps}'}: {what}", file=sys.stderr, flush=True)


def write(path: Path, content: dict) -> None:
    """Write a study's JSON, whose "rows" come last and on a line each, so that a change of one shows as one."""
    head = json.dumps({key: value for key, value in content.items() if key != "rows"})
    lines = ",\n".join(json.dumps(row) for row in content["rows"])
    write_whole(path, f'{head[:-1]}, "rows": [\n{lines}\n]}}\n')


def table(headings: Iterable[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    headings = list(headings)
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def command(
    arguments: Sequence[str], description: str | None, measured: Callable[[], dict], markdown: Callable[[dict], str]
) -> None:
    """Measure, write the JSON that ``arguments`` name, if any, and print a study's tables."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="JSON to write, .json")
    file = parser.parse_args(arguments).file
    if file is not None and file.suffix != ".json":
        parser.error(f"file: {file} does not end in .json")
    content = measured()
    if file is not None:
        write(file, content)
    print(markdown(content))
