"""Results files of the benchmarks: as `sagebwd.cli.results` writes them, a line a row, and CSV."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, fields
from pathlib import Path

from sagebwd.cli.results import environment, path_of, save

__all__ = ["environment", "save", "save_csv", "save_lines"]


def save_lines(rows: list[dict], facts: dict[str, object], folder: Path, name: str) -> Path:
    """As `save`, of thousands of rows that are dictionaries: a line for each."""
    path = path_of(facts, folder, name)
    lines = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items()]
    text = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("{\n" + "".join(lines) + ' "rows": [\n' + text + "\n ]\n}\n", encoding="utf-8")
    return path


def save_csv(rows: list, path: Path) -> Path:
    """Write the rows beside ``path``, the JSON that `save` wrote, as .csv; its path. What is None there is empty."""
    path = path.with_suffix(".csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])] if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    return path
