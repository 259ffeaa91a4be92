"""What packed runs say as they train: each evaluation with its gap to the seed's first run, the first step, and the
monitor.

    python -m sagebwd.training.evaluations docs/results/demo    prints it, in Markdown

Gradient norms are means, and tokens/s medians, of the steps logged since the evaluation before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, median, stdev

from sagebwd.training.packed import by_seed, read

HEADING = ("step", "tokens", "held-out loss", "gap", "largest logit", "gradient norm", "tokens/s")
CHECKED = {"ds": "dS", "dq": "dQ", "dk": "dK", "dv": "dV", "o": "O"}


def describe(run: dict, baseline: dict) -> str:
    """One of the runs that `sagebwd.training.packed.read` gives, against another or itself: a table of its evaluations
    and a line each for its first step, for the gaps of the later half of its evaluations, and for each check of the
    monitor with the largest error of any layer."""
    theirs = {line["step"]: line["held_out_loss"] for line in _with(baseline, "held_out_loss")}
    steps, evaluations = _with(run, "loss"), _with(run, "held_out_loss")
    rows, gaps, before = [HEADING, ["---"] * len(HEADING)], [], 0
    for line in evaluations:
        since = [other for other in steps if before < other["step"] <= line["step"]]
        before, other = line["step"], theirs.get(line["step"])
        gap = None if other is None else line["held_out_loss"] - other
        gaps += [] if gap is None else [gap]
        rows.append(
            [
                str(line["step"]),
                str(line["tokens"]),
                f"{line['held_out_loss']:.4f}",
                "" if gap is None else f"{gap:+.4f}",
                f"{line['largest_logit']:.1f}" if "largest_logit" in line else "",
                f"{mean(other['grad_norm'] for other in since):.3f}" if since else "",
                f"{median(other['tokens_per_s'] for other in since):.0f}" if since else "",
            ]
        )
    lines = [f"## {run['run']}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    if steps:
        first = steps[0]
        lines.append(
            f"step {first['step']}: training loss {first['loss']:.4f}, gradient norm {first['grad_norm']:.4f}"
        )
    later = gaps[len(gaps) // 2 :]
    if run is not baseline and len(later) > 1:
        lines.append(f"gap, last {len(later)} evaluations: mean {mean(later):+.4f}, deviation {stdev(later):.4f}")
    for check in _with(run, "monitor/seconds"):
        errors = [f"{name} {_largest(check, key):.3f}" for key, name in CHECKED.items()]
        cost = f"{check['monitor/seconds']:.2f} s, {check['monitor/share']:.2%} of the time so far"
        lines.append(f"monitor, step {check['step']} ({cost}): largest error of {', '.join(errors)}")
    return "\n".join(lines) + "\n"


def _with(run: dict, key: str) -> list[dict]:
    return [line for line in run["metrics"] if key in line]


def _largest(check: dict[str, float], key: str) -> float:
    return max(
        error for name, error in check.items() if name.startswith("monitor/layer_") and name.endswith(f"/{key}")
    )


def main(arguments: list[str]) -> None:
    """Print the folder that ``arguments`` name; exits with the module's text where they do not name one."""
    if len(arguments) != 1:
        sys.exit(__doc__)
    seeds = by_seed(read(Path(arguments[0])))
    print("\n".join(describe(run, runs[0]) for runs in seeds for run in runs), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
