"""Plots of a benchmark's result file: TFLOPS over tokens, a panel for each head_dim and mask."""

from __future__ import annotations

import json
from pathlib import Path


def plot_attention(results: Path, direction: str = "fwd+bwd") -> Path:
    """Draw a result file of `sagebwd bench` as PNG next to it and return the picture's path.

    Raises ValueError where the file holds nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    content = json.loads(results.read_text(encoding="utf-8"))
    rows = [row for row in content["rows"] if row["direction"] == direction and row["ms"] and _on_grid(row)]
    panels = sorted({(row["head_dim"], row["causal"]) for row in rows})
    if not panels:
        raise ValueError(f"{results}: no measurement of the standard grid in direction {direction!r} to draw")
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), sharey=True, squeeze=False)
    lines = sorted({(row["recipe"] == "bf16", row["impl"], row["recipe"]) for row in rows})
    for axis, (head_dim, causal) in zip(axes[0], panels):
        for is_peer, impl, recipe in lines:
            points = sorted(
                (row["tokens"], row["tflops"])
                for row in rows
                if (row["head_dim"], row["causal"], row["impl"], row["recipe"]) == (head_dim, causal, impl, recipe)
            )
            style = "--" if is_peer else "-"
            axis.plot(*zip(*points), style, marker="o", markersize=3, label=impl if is_peer else f"{recipe} ({impl})")
        axis.set_xscale("log", base=2)
        axis.set_title(f"head_dim {head_dim}, {'causal' if causal else 'no mask'}")
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"TFLOPS, {direction}, end to end")
    axes[0][0].set_ylim(bottom=0)
    axes[0][-1].legend(fontsize=8)
    figure.suptitle(f"{content['gpu']}, torch {content['torch']}, triton {content['triton']}, {content['date']}")
    figure.tight_layout()
    picture = results.with_suffix(".png")
    figure.savefig(picture, dpi=130)
    plt.close(figure)
    return picture


def _on_grid(row: dict) -> bool:
    return row["heads"] == row["kv_heads"] and row["heads"] * row["head_dim"] == 2048
