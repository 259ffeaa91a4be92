"""The table of docs/masks.md: `mixed` under masks, over FlexAttention and the best of others."""

from benchmarks.mask_attentions import FLEX, PEERS, READ
from lab.studies.study_tables import table
from tools.tables.cells import length, numbers
from tools.tables.results import rows_of

FILES = "masks_h200_2026-11-29_e01d0088", "masks_h200_2026-11-29_8fde0586"
"""Files of `python -m benchmarks masks`; of a mask that several have the first counts."""
DIRECTIONS = ("fwd", "fwd+bwd")


def speeds(rows: list[dict], recipe: str = "mixed") -> dict[tuple, dict[tuple[bool, str], tuple[float, float | None]]]:
    """By a mask's call, and whether the mask was read once, and direction: times of FlexAttention and of the best
    other over ours, None without another.

    In a file without masks that were read once, of before 2026-11-29, a call kept what it had read.
    """
    kept = not any(row["attention"].startswith(READ) for row in rows)
    found: dict[tuple, dict[tuple[bool, str], tuple[float, float | None]]] = {}
    for row in rows:
        if row["attention"] not in (recipe, READ + recipe) or FLEX not in row["over"]:
            continue
        call = row["mask"], row["tokens"], row["heads"], row["kv_heads"], row["head_dim"], row["shown"]
        best = min((row["over"][peer] for peer in PEERS if peer in row["over"] and peer != FLEX), default=None)
        was_read = kept or row["attention"].startswith(READ)
        found.setdefault(call, {})[was_read, row["direction"]] = row["over"][FLEX], best
    return found


def speeds_table(rows: list[dict]) -> str:
    """A row a mask: as a BlockMask in each call, and read once; what was not timed has no column."""
    found = speeds(rows)
    ways = [was_read for was_read in (False, True) if any((was_read, "fwd") in own for own in found.values())]
    cells = []
    for (mask, tokens, heads, kv_heads, head_dim, shown), own in found.items():
        grouped = "" if heads == kv_heads else f" on {kv_heads}"
        call = [mask, f"{length(tokens)}, {heads}{grouped} heads of {head_dim}", f"{shown:.1%}"]
        for was_read in ways:
            for other in range(2):
                over = [own.get((was_read, way), (None, None))[other] for way in DIRECTIONS]
                call.append("-" if None in over else numbers(over, 2))
        cells.append(call)
    names = {False: "passed as it is", True: "read once"}
    over = [f"{names[was_read]}: over {other}" for was_read in ways for other in ("FlexAttention", "the best other")]
    return table(["mask", "call", "pairs seen", *over], cells)


def newest() -> list[dict]:
    """Rows of the committed files."""
    rows: list[dict] = []
    for name in FILES:
        known = {row["mask"] for row in rows}
        rows += [row for row in rows_of(name) if row["mask"] not in known]
    return rows


def masks() -> str:
    """`speeds_table` of them."""
    return speeds_table(newest())
