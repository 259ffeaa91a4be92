"""Error studies as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from sagebwd.diagnostics import layers
from sagebwd.diagnostics.trace import OUTPUTS, PAPER_TABLE_2, TENSORS, Row
from sagebwd.extras import extra

with extra("diagnostics"):
    from rich.markup import escape
    from rich.table import Table

LABELS = {"delta": "delta", "p": "P", "dp": "dP", "ds": "dS", "o": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}


def trace(rows: Sequence[Row], subject: str) -> list[Table]:
    """Errors beside the paper's Table 2, magnitudes, and, where it was asked for, the attribution.

    Args: rows of `sagebwd.diagnostics.layers.means`, and of heads; subject, what was traced, for the title.
    """
    tables = [_errors(rows, subject), _magnitudes(rows), _sinks(rows)]
    if any(row.attribution for row in rows):
        tables.append(_attribution(rows))
    return tables


def overall(rows: Sequence[Row]) -> Table:
    """Errors over all layers, of rows of `sagebwd.diagnostics.trace.measure`, of any number of windows."""
    names = [LABELS[name] for name in OUTPUTS]
    table = headed(
        "relative L2 over a layer's norm: root mean square over layers and windows, and the worst of them",
        "recipe", *names, *(f"worst {name}" for name in names),
    )  # fmt: skip
    for recipe, errors in layers.overall(rows).items():
        columns = [[error[index] for error in errors.values()] for index in (0, 1)]
        table.add_row(recipe, *(f"{error:.4f}" for column in columns for error in column))
    return table


def _errors(rows: Sequence[Row], subject: str) -> Table:
    table = headed(f"{subject}: cosine, and under it relative L2, to FP64", "layer", "recipe", *LABELS.values())
    for row in rows:
        cells = [f"{row.cosine[name]:.4f}\n{row.relative_l2[name]:.4f}" for name in TENSORS]
        table.add_row(where(row), row.recipe, *cells)
    cells = [f"[dim]{cosine:.4f}\n{norm:.4f}[/dim]" for cosine, norm in (PAPER_TABLE_2[name] for name in TENSORS)]
    table.add_row("[dim]11[/dim]", "[dim]published, 325M[/dim]", *cells)
    return table


def _magnitudes(rows: Sequence[Row]) -> Table:
    headings = ("layer", "RMS P", "RMS dP", "RMS dS", "bound on RMS dS", "bound / RMS dS", "peak / RMS dS")
    table = headed("full precision", *headings, "largest logit")
    for row in rows:
        if row.recipe == rows[0].recipe:
            sizes = [f"{row.rms[name]:.2e}" for name in ("p", "dp", "ds")]
            loose = f"{row.ds_bound / row.rms['ds']:.1f}" if row.rms["ds"] else ""
            table.add_row(
                where(row), *sizes, f"{row.ds_bound:.2e}", loose, f"{row.ds_peak_to_rms:.0f}",
                f"{row.largest_logit:.1f}",
            )  # fmt: skip
    return table


def _sinks(rows: Sequence[Row]) -> Table:
    """Weights in full precision; of a layer's heads the mean for the first key, the largest for the heaviest."""
    table = headed(
        "attention sinks: mean weight over queries; a value's norm over all values' root mean square", "layer",
        "weight of the first key", "norm of its value", "heaviest key", "its weight",
    )  # fmt: skip
    for row in rows:
        if row.recipe == rows[0].recipe:
            table.add_row(
                where(row), f"{row.first_weight:.3f}", f"{row.first_value:.2f}", str(row.sink),
                f"{row.sink_weight:.3f}",
            )  # fmt: skip
    return table


def _attribution(rows: Sequence[Row]) -> Table:
    title = "share of the squared error: a product alone in INT8; in brackets relative L2 alone > with all others"
    table = headed(title, "layer", "recipe", "product", *(LABELS[name] for name in OUTPUTS))
    for row in rows:
        for source, parts in row.attribution.items():
            own = [parts[name] for name in OUTPUTS]
            cells = [f"{x.share:.0%} ({x.alone:.4f} > {x.without:.4f})" if x.share >= 0.0005 else "0" for x in own]
            table.add_row(where(row), row.recipe, LABELS.get(source, source.upper()), *cells)
    return table


def where(row: Row) -> str:
    """The layer and head of a row."""
    return str(row.layer) if row.head is None else f"{row.layer} head {row.head}"


def headed(title: str, *headings: str) -> Table:
    """An empty table; words to the left, numbers to the right."""
    table = Table(title=escape(title), title_justify="left", box=None)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("layer", "recipe", "product") else "right")
    return table
