"""The picture of docs/precisions.md, from the recipes: `python -m tools.precisions [FILE]` draws the seven products.

Each product is a card with a row a named recipe: its precision, and which elements of an operand share a scale.
A test holds the committed picture to what this draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from html import escape
from pathlib import Path

from sagebwd.recipe import FP8, INT8, RECIPES, SIXTEEN_BIT, Recipe

PICTURE = Path(__file__).parents[1] / "docs" / "figures" / "precisions.svg"
NAMES = "full", "paper", "token", "mixed"
WIDTH, ROW, TOP = 500, 22, 34
COLOURS = {SIXTEEN_BIT: "#c9ced6", INT8: "#9ecae9", FP8: "#ffc685"}
PRECISIONS = {SIXTEEN_BIT: "16 bit", INT8: "INT8", FP8: "e4m3"}
# What stands in the picture from top to bottom: a heading, a product with its formula, or a step between products.
STEPS = (
    ("heading", "Forward, reads Q, K, V"),
    ("s", "S = Q Kᵀ τ"),
    ("step", "lse = log Σ exp(S),  P = exp(S − lse), in FP32"),
    ("o", "O = P V"),
    ("heading", "Backward, reads Q, K, V, O, lse and dO"),
    ("s", "S = Q Kᵀ τ, again, of the same operands"),
    ("step", "P = exp(S − lse), in FP32"),
    ("dv", "dV = Pᵀ dO"),
    ("dp", "dP = dO Vᵀ"),
    ("step", "delta = rowsum(dO ∘ O),  dS = P ∘ (dP − delta), in FP32"),
    ("dq", "dQ = dS K τ"),
    ("dk", "dK = dSᵀ Q τ"),
)


def groups(recipe: Recipe, product: str) -> str:
    """Which elements of each operand of a product share a scale, in words; nothing of a product in 16 bit."""
    precision = getattr(recipe, product)
    if precision == SIXTEEN_BIT:
        return ""
    queries, keys = f"{recipe.block_q} queries", f"{recipe.block_k} keys"
    tile = f"{recipe.block_q} × {recipe.block_k} tile"
    if precision == FP8:  # docs/gradients-e4m3.md
        block = "64 or 128 queries"
        return {
            "dv": f"P: query; dO: {block}",
            "dq": "dS: query; K: sequence",
            "dk": f"dS: query; Q: {block}",
        }[product]
    first = {
        "s": "Q: " + {"token": "query", "block": queries}[recipe.q_scale],
        "o": f"P: query in {keys}",
        "dv": "P: " + {"key": f"key in a {tile}", "tile": tile}[recipe.p_scale_dv],
        "dq": "dS: " + {"query": f"query in a {tile}", "tile": tile}[recipe.ds_scale_dq],
        "dk": "dS: " + {"key": f"key in a {tile}", "tile": tile}[recipe.ds_scale_dk],
    }[product]
    v_scale = {"block": keys, "channel": f"channel in {keys}", "sequence": "channel"}[recipe.v_scale]
    second = {
        "s": "K: " + {"token": "key", "lane": f"lane in {keys}", "block": keys}[recipe.k_scale],
        "o": f"V: {v_scale}",
        "dv": f"dO: {queries}",
        "dq": "K: as in S",
        "dk": "Q: as in S",
    }[product]
    return f"{first}; {second}"


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'.replace(" >", ">")


def _card(y: int, product: str, formula: str) -> Iterator[str]:
    """A product at a height: its formula, and a row a recipe."""
    height = TOP + ROW * len(NAMES) + 6
    yield f'<rect x="10" y="{y}" width="{WIDTH - 20}" height="{height}" rx="6" fill="#fff" stroke="#8a94a3"/>'
    yield _text(22, y + 22, formula, 'font-weight="bold" font-size="15"')
    for index, name in enumerate(NAMES):
        at = y + TOP + ROW * index
        precision = getattr(RECIPES[name], product)
        yield _text(22, at + 14, name)
        yield f'<rect x="70" y="{at}" width="56" height="18" rx="4" fill="{COLOURS[precision]}"/>'
        yield _text(98, at + 14, PRECISIONS[precision], 'text-anchor="middle"')
        yield _text(136, at + 14, groups(RECIPES[name], product), 'font-size="12.5"')


def drawn() -> str:
    """The picture as SVG."""
    parts, y = [], 8
    for kind, text in STEPS:
        if kind == "heading":
            y += 26
            parts.append(_text(10, y, text, 'font-weight="bold" font-size="16"'))
            y += 12
        elif kind == "step":
            parts.append(_text(WIDTH / 2, y + 14, f"↓  {text}", 'text-anchor="middle" font-style="italic"'))
            y += 26
        else:
            parts += _card(y, kind, text)
            y += TOP + ROW * len(NAMES) + 6 + 10
    title = "The seven products of attention, forward and backward, and their precisions in each named recipe"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
            'role="img" font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#1d2430">',
            f"<title>{title}</title>",
            "<style>@media(prefers-color-scheme:dark){svg{filter:invert(.88) hue-rotate(180deg)}}</style>",
            f'<rect width="{WIDTH}" height="{y}" fill="#f6f8fa"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=PICTURE, help="the picture")
    path = parser.parse_args().file
    path.write_text(drawn(), encoding="utf-8")
    print(path)
