"""Which rows the matrix has, in three sizes: `short`, `cover`, which fits nine minutes of one machine, and `every`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from sagebwd.call import padded_head_dim
from sagebwd.kernels.capabilities import WIDE
from sagebwd.kernels.sm90 import widths
from sagebwd.recipe import AUTO
from tools.matrix.forms import FORMS, LIKE, Cell, cell_of

Dims = tuple[int, int]
"""head_dim and value head_dim."""

WIDTHS = tuple(range(8, WIDE + 1, 8))
ODD_WIDTHS = (1, 3, 17, 33, 65, 100, 250)
PAIRS = ((192, 128), (64, 128), (128, 64), (72, 80), (96, 64), (100, 192), (256, 128), (576, 512))
WIDE_WIDTHS = (512, 384, 320, 288, 257)
"""They compile for so long that the cover has one row of the first alone."""
EVERY = (*((width, width) for width in (*WIDTHS, *ODD_WIDTHS)), *PAIRS)
# By alignment, so that a rotation over them gives each variant some of each; 64 and 128 side by side.
VARIED = (
    (8, 8), (40, 40), (72, 72), (64, 64), (128, 128), (80, 80), (192, 128), (256, 256), (17, 17), (33, 33), (100, 100),
    (250, 250),
)  # fmt: skip
KINDS = (*VARIED, (96, 96), (120, 120))
SHORT = ((8, 8), (17, 17), (64, 64), (72, 72), (80, 80), (128, 128), (192, 128), (256, 256))
VARIANTS = (("paper", "bfloat16"), ("full", "bfloat16"), ("token", "float16"))
APART = (("token(dp=int8)", "bfloat16"),)
"""Another backward than `token`'s; few rows of it fit the cover."""
MOST_USED = ((64, 64), (128, 128))
FEW_FORMS = ("causal", "packed-causal", "padding")
THIRDS = (
    (
        "causal", "17-tokens", "more-keys-causal", "fewer-keys-causal", "deterministic", "head-nan", "packed",
        "bool-matrix",
    ),
    ("full", "one-token", "window", "window-causal", "packed-causal", "padding-nan", "bool-all", "document"),
    ("ragged", "grouped-causal", "multi-query", "packed-window", "packed-nan", "padding", "bias", "sinks"),
)  # fmt: skip
"""Of the forms; those that are `LIKE` one are in its third."""
ROTATION = 7
"""Widths in a row that meet all forms."""


def alike(width: int) -> tuple[int, int]:
    """What widths have in common that compile alike: the columns of a tile, and 16, 8 or 1 that divides the width."""
    return padded_head_dim(width), next(n for n in (16, 8, 1) if width % n == 0)


def cells(size: str) -> Iterator[Cell]:
    """Every row of a size but those of `tools.matrix.large`."""
    return {"short": _short, "cover": _cover, "every": _every}[size]()


def _rows(dims: Dims, forms: Collection[str], recipe: str, dtype: str) -> Iterator[Cell]:
    return (cell_of(FORMS, *dims, form, recipe, dtype) for form in FORMS if form in forms)


def _short() -> Iterator[Cell]:
    for dims in SHORT:
        yield from _rows(dims, FORMS, AUTO, "bfloat16")


def rotated() -> list[Dims]:
    """Widths that meet a part of the forms, those that compile alike next to each other.

    All others are of KINDS, are filled up to one of them and launch its kernels, or are refused.
    """
    compiled = {max(dims) for dims in KINDS}
    found = [dims for dims in EVERY if max(dims) not in compiled and max(dims) <= WIDE]
    return sorted(found, key=lambda dims: (alike(max(dims)), dims))


def _cover() -> Iterator[Cell]:
    rotating = rotated()
    for dims in EVERY:
        if dims not in rotating:
            yield from _rows(dims, FORMS, "token", "bfloat16")
    rest = [form for form in FORMS if form not in LIKE and form not in FEW_FORMS]
    for number, dims in enumerate(rotating):
        part = (*FEW_FORMS, *rest[number % ROTATION :: ROTATION])
        yield from _rows(dims, [form for form in FORMS if LIKE.get(form, form) in part], "token", "bfloat16")
        yield from _rows(dims, FEW_FORMS[number % 3 :][:1], ("paper", "full")[number % 2], "bfloat16")
    for number, dims in enumerate(VARIED):
        for shift, variant in enumerate(VARIANTS):
            yield from _rows(dims, THIRDS[(number + shift) % 3], *variant)
    for dims, variant in itertools.product(MOST_USED, APART):
        yield from _rows(dims, FEW_FORMS, *variant)
    for dims in EVERY:
        yield from _rows(dims, FORMS if dims in widths.FORMS else FEW_FORMS, AUTO, "bfloat16")
    for number, dims in enumerate(widths.FORMS):
        yield from _rows(dims, FEW_FORMS[number % 3 :][:1], AUTO, "float16")
    yield from _rows((WIDE_WIDTHS[0],) * 2, FEW_FORMS[:1], "token", "bfloat16")


def _every() -> Iterator[Cell]:
    for dims in EVERY:
        for recipe in ("token", AUTO):
            yield from _rows(dims, FORMS, recipe, "bfloat16")
        for variant in VARIANTS if dims in KINDS else VARIANTS[:2]:
            yield from _rows(dims, FORMS if dims in KINDS else FEW_FORMS, *variant)
        for variant in APART if dims in KINDS else ():
            yield from _rows(dims, FORMS, *variant)
    for dims in widths.FORMS:
        yield from _rows(dims, FORMS, AUTO, "float16")
    for width, variant in itertools.product(WIDE_WIDTHS, (("token", "bfloat16"), *VARIANTS)):
        yield from _rows((width, width), FORMS, *variant)
