"""The pictures of docs/masks.md: `python -m tools.mask_pictures [FOLDER]` draws each mask of `sagebwd.block_masks`.

A row is a query and a column a key, few of each; coloured where the query sees the key. Colours follow the reader's
light or dark scheme. A test holds the committed pictures to what this draws.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from sagebwd import block_masks

FOLDER = Path(__file__).parents[1] / "docs" / "figures" / "masks"
CELL, MARGIN = 8, 20
STYLE = (
    "text{font:10px Helvetica,Arial,sans-serif;fill:#57606a;text-anchor:middle}.hidden{fill:#eaeef2}"
    ".shown{fill:#2f81f7}.grid{stroke:#fff}.bound{stroke:#57606a}@media(prefers-color-scheme:dark){text{fill:#9198a1}"
    ".hidden{fill:#262c36}.grid{stroke:#0d1117}.bound{stroke:#9198a1}}"
)
Pieces = list[tuple[str, int]]
"""Labels along an axis, and how many tokens each spans."""


def _frames(labels: Iterable[str]) -> Pieces:
    return [(label, 4) for label in labels]


def _images(pieces: Pieces) -> Tensor:
    return torch.tensor([label == "image" for label, tokens in pieces for _ in range(tokens)])


_DOCUMENTS = [("document", 10), ("document", 8), ("doc.", 6)]
_TEXT = [("text", 4), ("image", 6), ("text", 4), ("image", 6), ("text", 4)]
PICTURES: dict[str, tuple[Callable[[], BlockMask], Pieces]] = {
    "causal_frames": (lambda: block_masks.causal_frames(6, 4, device="cpu"), _frames("123456")),
    "diffusion_forcing": (lambda: block_masks.diffusion_forcing(6, 4, chunk=2, device="cpu"), _frames("123456")),
    "sliding_frames": (lambda: block_masks.sliding_frames(6, 4, (1, 0), sink=1, device="cpu"), _frames("123456")),
    "teacher_forcing": (
        lambda: block_masks.teacher_forcing(3, 4, device="cpu"),
        _frames(["clean"] * 3 + ["noisy"] * 3),
    ),
    "prefix_documents": (
        lambda: block_masks.prefix_documents([tokens for _, tokens in _DOCUMENTS], [5, 0, 3], device="cpu"),
        _DOCUMENTS,
    ),
    "image_blocks": (lambda: block_masks.image_blocks(_images(_TEXT)), _TEXT),
}


def _runs(row: Iterable[bool]) -> list[tuple[int, int]]:
    """Where the cells of a row that are shown begin and end."""
    found, start = [], 0
    for shown, cells in itertools.groupby(row):
        stop = start + len(list(cells))
        if shown:
            found.append((start, stop))
        start = stop
    return found


def _labels(pieces: Pieces) -> list[str]:
    """Along the keys, and turned along the queries."""
    found, start = [], 0
    for label, tokens in pieces:
        middle, start = MARGIN + CELL * (start + tokens / 2), start + tokens
        found.append(f'<text x="{middle:g}" y="{MARGIN - 6}">{label}</text>')
        found.append(f'<text transform="translate({MARGIN - 6} {middle:g})rotate(-90)">{label}</text>')
    return found


def _lines(name: str, places: Iterable[int], side: int) -> str:
    ends = MARGIN, MARGIN + side
    steps = (f"M{at} {ends[0]}V{ends[1]}M{ends[0]} {at}H{ends[1]}" for at in places)
    return f'<path class="{name}" fill="none" d="{"".join(steps)}"/>'


def drawn(name: str) -> str:
    """The picture of a mask as SVG."""
    make, pieces = PICTURES[name]
    mask = make()
    tokens, _ = mask.seq_lengths
    rows = create_mask(mask.mask_mod, None, None, tokens, tokens, device="cpu")[0, 0].tolist()
    side = CELL * tokens
    size = side + MARGIN + 4
    shown = "".join(
        f"M{MARGIN + CELL * start} {MARGIN + CELL * number}h{CELL * (stop - start)}v{CELL}h{CELL * (start - stop)}z"
        for number, row in enumerate(rows)
        for start, stop in _runs(row)
    )
    bounds = itertools.accumulate((count for _, count in pieces), initial=0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" width="{size}" height="{size}" '
        'role="img">',
        f"<title>{name}: a row is a query, a column a key, coloured where it is seen</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="hidden" x="{MARGIN}" y="{MARGIN}" width="{side}" height="{side}"/>',
        f'<path class="shown" d="{shown}"/>',
        _lines("grid", range(MARGIN, MARGIN + side + 1, CELL), side),
        _lines("bound", (MARGIN + CELL * bound for bound in bounds), side),
        *_labels(pieces),
        "</svg>\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="of the pictures")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        (folder / f"{name}.svg").write_text(drawn(name), encoding="utf-8")
        print(folder / f"{name}.svg")
