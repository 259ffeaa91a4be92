"""What a comparison looks like: curves, and one self-contained page."""

from __future__ import annotations

import base64
import html
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.pictures import save
from lab.training.config import Config
from sagebwd.environment import write_whole

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { padding: .35rem .8rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left }
img { max-width: 100% } pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: 14px }
"""


@dataclass(frozen=True)
class Run:
    """One variant: its overrides, the lines of its metrics.jsonl and its result.json."""

    name: str
    overrides: dict[str, object]
    recipe: str
    metrics: list[dict[str, float]]
    result: dict[str, object]

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Tokens and values of one metric, where it was measured and is finite."""
        points = [(line["tokens"], line[key]) for line in self.metrics if line.get(key) is not None]
        points = [(x, y) for x, y in points if math.isfinite(y)]
        return [x for x, _ in points], [y for _, y in points]


def write_curves(runs: list[Run], baseline: Run | None, path: Path) -> None:
    """Draw training loss, held-out loss, its gap to the baseline's, gradient norm and largest logit over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

    figure, axes = plt.subplots(2, 3, figsize=(14, 7.5))
    panels = dict(zip(("loss", "held_out_loss", "gap", "grad_norm", "largest_logit"), axes.flat))
    titles = {
        "loss": "training loss, nats",
        "held_out_loss": "held-out loss, nats",
        "gap": f"held-out loss minus {baseline.name}'s, nats" if baseline else "gap: the baseline has not finished",
        "grad_norm": "gradient norm",
        "largest_logit": "largest attention logit",
    }
    for index, run in enumerate(runs):
        color, line = f"C{index}", ("-", "--", ":")[index // 10 % 3]  # matplotlib has ten colours
        for key, axis in panels.items():
            tokens, values = gap(run, baseline) if key == "gap" else run.series(key)
            if key in ("loss", "grad_norm"):
                axis.plot(tokens, values, color=color, alpha=0.25, linewidth=0.8)
                values = smoothed(values)
            marker = "." if key not in ("loss", "grad_norm") else None
            axis.plot(tokens, values, line, color=color, marker=marker, label=run.name, linewidth=1.3)
    for key, axis in panels.items():
        axis.set_title(titles[key], fontsize=10)
        axis.set_xlabel("tokens")
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
    norm = panels["grad_norm"]
    norm.set_yscale("log")
    norm.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    norm.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    norm.yaxis.set_minor_formatter(NullFormatter())
    axes.flat[-1].axis("off")
    axes.flat[-1].legend(*panels["held_out_loss"].get_legend_handles_labels(), loc="center", frameon=False)
    figure.tight_layout()
    save(figure, path)


def gap(run: Run, baseline: Run | None) -> tuple[list[float], list[float]]:
    """Tokens and gaps where both runs were measured."""
    expected = dict(zip(*baseline.series("held_out_loss"))) if baseline else {}
    points = [(x, y - expected[x]) for x, y in zip(*run.series("held_out_loss")) if x in expected]
    return [x for x, _ in points], [y for _, y in points]


def smoothed(values: list[float]) -> list[float]:
    """Mean of the neighbours on both sides, a twentieth of the line: lines can be told apart, and none lags."""
    smoothed, last = [], len(values) - 1
    for index in range(len(values)):
        reach = min(len(values) // 40, index, last - index)
        window = values[index - reach : index + reach + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed


def write_report(config: Config, runs: list[Run], rows: list[list[str]], output: Path) -> None:
    """Write report.html into ``output``: one file that needs no other, curves.png of that folder inside it.

    Args: rows, a heading and a row a run.
    """
    heading, *body = rows
    picture = base64.b64encode((output / "curves.png").read_bytes()).decode()
    shared = {key: value for key, value in config.as_dict().items() if key != "variants"}
    variants = {run.name: dict(run.overrides) for run in runs}
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in body)
    facts = runs[-1].result["environment"] | {"parameters": f"{runs[-1].result['parameters']:,}"}
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>sagebwd: {html.escape(config.name)}</title><style>{STYLE}</style></head><body>
<h1>{html.escape(config.name)}</h1>
<p>The same data in the same order, from the same weights; only what the variant changes differs.
Losses in nats a token; the gap is to {html.escape(next(iter(config.variants)))}.</p>
<table><tr>{"".join(f"<th>{html.escape(cell)}</th>" for cell in heading)}</tr>
{cells}</table>
<p><img alt="training loss, held-out loss, gap, gradient norm and largest logit over tokens"
src="data:image/png;base64,{picture}"></p>
{_attention_error(runs)}<h2>What ran</h2>
<pre>{html.escape(shlex.join(["sagebwd", *sys.argv[1:]]))}</pre>
<pre>{html.escape(yaml.safe_dump(facts, sort_keys=False))}</pre>
<h2>Config</h2>
<pre>{html.escape(yaml.safe_dump(shared, sort_keys=False))}</pre>
<h2>Variants</h2>
<pre>{html.escape(yaml.safe_dump(variants, sort_keys=False))}</pre>
</body></html>
"""
    write_whole(output / "report.html", page)


def _attention_error(runs: list[Run]) -> str:
    """What the attention monitor found, a row a layer; nothing where no run made a check."""
    found = {run.name: run.result["monitor"] for run in runs if (run.result.get("monitor") or {}).get("checks")}
    if not found:
        return ""
    tensors = {"ds": "dS", "dq": "dQ", "dk": "dK", "dv": "dV", "o": "O"}
    heading = ["variant", "recipe", "layer", *tensors.values(), "dQ or dK, highest"]
    rows, notes = [], []
    for name, monitor in found.items():
        for index, layer in monitor["layers"].items():
            errors = [f"{layer['errors'][key]:.4f}" if layer["errors"] else "" for key in tensors]
            rows.append([name, layer["recipe"], index, *errors, f"{layer['highest']:.4f}"])
        notes.append(f"{name}: {monitor['checks']} checks, {monitor['share']:.2%} of the time")
        notes += [f"{name}, step {event['step']}: {event['message']}" for event in monitor["events"]]
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"""<h2>Attention error while training</h2>
<p>At the last check: relative L2 against FP64 of each layer's recipe on one held-out sequence, its worst head checked.
</p>
<table><tr>{head}</tr>
{body}</table>
<pre>{html.escape(chr(10).join(notes))}</pre>
"""
