"""Tables of docs/sinks.md: errors beside attention sinks."""

from functools import cache

from lab.studies.study_tables import table
from tools.tables.cells import errors
from tools.tables.results import RECIPES, STUDIES, TENSORS, load

KINDS = {
    "first": "the first key",
    "first and mean": "the first key; K and V have a mean of 3",
    "four": "the first four keys",
    "delimiter": "the first key and one in the middle",
}


@cache
def rows_of_study() -> list[dict]:
    """Errors of heads with a sink, by kind, logits of the sink above the rest, and recipe."""
    return load(STUDIES / "sinks_64.json")["rows"]


def at_first_key() -> dict[tuple[float, str], dict]:
    """By logits and recipe, the rows of a sink at the first key alone."""
    return {(row["logits"], row["recipe"]): row for row in rows_of_study() if row["kind"] == "first"}


def by_strength() -> str:
    """Errors by the strength of a sink."""
    first = at_first_key()
    recipes = ("paper", "token(first_keys=0)", "token", "mixed")
    rows = [
        [f"{logits} ({first[logits, 'mixed']['weight']:.2f})",
         *(errors(first[logits, recipe][x] for x in TENSORS[:3]) for recipe in recipes)]
        for logits in sorted({logits for logits, _ in first})
    ]  # fmt: skip
    head = ["logits above the rest (mean weight)", "`paper`: O / dQ / dK", *(f"`{name}`" for name in recipes[1:])]
    return table(head, rows)


def elsewhere() -> str:
    """Errors beside sinks that are not the first key alone, at 12 logits."""
    found = {(row["kind"], row["recipe"]): row for row in rows_of_study() if row["logits"] == 12}
    rows = [
        [KINDS[kind], *(errors(found[kind, name][x] for x in TENSORS[:3]) for name in RECIPES)]
        for kind in dict.fromkeys(kind for kind, _ in found)
    ]
    return table(["kind", *(f"`{name}`" for name in RECIPES)], rows)
