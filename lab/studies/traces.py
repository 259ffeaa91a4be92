"""What `sagebwd trace` wrote, read again, and every layer of it: python -m lab.studies.traces FILE."""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.studies import summary
from sagebwd.diagnostics import layers, tables
from sagebwd.diagnostics.tables import LABELS, headed
from sagebwd.diagnostics.trace import OUTPUTS, Row, Source


def by_layer(rows: Sequence[Row]) -> Table:
    """Errors of every recipe, a line a layer: wide, where the table of `sagebwd trace` is long."""
    recipes = list(dict.fromkeys(row.recipe for row in rows))
    tensors = "/".join(LABELS[name] for name in OUTPUTS)
    table = headed(
        f"relative L2 over a layer's norm: {tensors}, root mean square over windows", "layer",
        "weight of the first key", "norm of its value", "largest logit", *recipes,
    )  # fmt: skip
    found: dict[int, list[Row]] = {}
    for row in layers.means(rows):
        found.setdefault(row.layer, []).append(row)
    for layer, own in found.items():
        errors = ["/".join(f"{row.relative_l2[name]:.3f}".removeprefix("0") for name in OUTPUTS) for row in own]
        facts = f"{own[0].first_weight:.2f}", f"{own[0].first_value:.2f}", f"{own[0].largest_logit:.0f}"
        table.add_row(str(layer), *facts, *errors)
    return table


def read(path: Path) -> list[Row]:
    """The rows of a file that `sagebwd trace --output` wrote, .json or .json.xz."""
    data = path.read_bytes()
    rows = json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)["rows"]
    return [Row(**{**row, "attribution": _sources(row["attribution"])}) for row in rows]


def _sources(attribution: dict[str, dict[str, dict]]) -> dict[str, dict[str, Source]]:
    return {source: {name: Source(**part) for name, part in parts.items()} for source, parts in attribution.items()}


def main(arguments: Sequence[str]) -> None:
    """Print the file that ``arguments`` name; exits with the module's text where they do not name one."""
    if len(arguments) != 1:
        sys.exit(__doc__)
    rows, console = read(Path(arguments[0])), Console(width=240)
    for table in (by_layer(rows), tables.overall(rows), *summary.tables(rows)):
        console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
