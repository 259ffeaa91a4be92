"""The runs of a comparison in one file, `runs.jsonl.xz`: a JSON object a run, of its metrics and its result.

Raw metrics are what curves are drawn from, and too many files to keep in a repository.

    python -m lab.training.packed pack runs/demo docs/results/demo    writes it, with comparison.json beside
    python -m lab.training.packed unpack docs/results/demo runs/demo  gives each run its folder again
    python -m lab.training.packed curves docs/results/demo            draws curves.png, as `python -m lab compare` does
    python -m lab.training.packed evaluations docs/results/demo       prints each evaluation, in Markdown
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import sys
from pathlib import Path
from statistics import mean, median, stdev

from lab.training.report import Run, write_curves
from lab.training.run_dir import COMPARISON, DIVERGED, METRICS, RESULT, read_metrics
from sagebwd.environment import write_whole

PACKED = "runs.jsonl.xz"
HEADING = ("step", "tokens", "held-out loss", "gap", "largest logit", "gradient norm", "tokens/s")
CHECKED = {"ds": "dS", "dq": "dQ", "dk": "dK", "dv": "dV", "o": "O"}


def pack(folder: Path, output: Path) -> None:
    """Write the runs under ``folder``, an output of `compare` or `seeds`, in the order of its comparison, into one
    file in ``output``.

    Raises ValueError where ``folder`` holds no run.
    """
    paths = [*folder.glob(f"*/{METRICS}"), *folder.glob(f"seed-*/*/{METRICS}")]
    names = sorted(path.parent.relative_to(folder).as_posix() for path in paths)
    if not names:
        raise ValueError(f"{folder} holds no run: expected folders with {METRICS}, as `compare` writes them")
    output.mkdir(parents=True, exist_ok=True)
    comparison = folder / COMPARISON
    if comparison.exists():
        rows = json.loads(comparison.read_text(encoding="utf-8"))["outcomes"]
        compared = [name_of(row) for row in rows]
        names.sort(key=lambda name: compared.index(name) if name in compared else len(compared))
        if output != folder:
            shutil.copy(comparison, output)
    scratch = output / f".{PACKED}.writing"  # what was packed before stays until this is whole
    with lzma.open(scratch, "wt", encoding="utf-8") as file:
        for name in names:
            found = next((end for end in (RESULT, DIVERGED) if (folder / name / end).exists()), None)
            end = json.loads((folder / name / found).read_text(encoding="utf-8")) if found else None
            run = {"run": name, "ended": found, "result": end, "metrics": read_metrics(folder / name)}
            file.write(json.dumps(run) + "\n")
    scratch.replace(output / PACKED)


def name_of(row: dict) -> str:
    """Of the run that a row of comparison.json is of, the folder under the comparison's."""
    return f"seed-{row['seed']}/{row['variant']}" if "seed" in row else row["variant"]


def read(folder: Path) -> list[dict]:
    """The packed runs of a folder: ``run``, its name; ``metrics``, its lines; ``result``, None if it has not ended,
    otherwise the content of the file that ``ended`` names."""
    with lzma.open(folder / PACKED, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def by_seed(runs: list[dict]) -> list[list[dict]]:
    """The runs that `read` gives, those of one seed together: as `seeds` names them, else all are of one."""
    groups: dict[str, list[dict]] = {}
    for run in runs:
        groups.setdefault(run["run"].rpartition("/")[0], []).append(run)
    return list(groups.values())


def unpack(folder: Path, output: Path) -> None:
    """Write each packed run of ``folder`` into a folder of its own under ``output``."""
    for run in read(folder):
        run_dir = output / run["run"]
        if (run_dir / METRICS).exists():  # which may have gone on since it was packed
            raise ValueError(f"{run_dir / METRICS} is there already; give another folder")
        write_whole(run_dir / METRICS, "".join(json.dumps(line) + "\n" for line in run["metrics"]))
        if run["ended"]:
            write_whole(run_dir / run["ended"], json.dumps(run["result"]) + "\n")


def curves(folder: Path) -> Path:
    """Draw the packed runs of ``folder``, of one seed, gaps to the first, into its curves.png."""
    runs = [Run(run["run"], {}, "", run["metrics"], run["result"] or {}) for run in read(folder)]
    write_curves(runs, runs[0], folder / "curves.png")
    return folder / "curves.png"


def evaluations(folder: Path) -> None:
    """Print what the packed runs of ``folder`` say as they train, each against its seed's first run."""
    print("\n".join(describe(run, runs[0]) for runs in by_seed(read(folder)) for run in runs), end="")


def describe(run: dict, baseline: dict) -> str:
    """One of the runs that `read` gives, against another or itself: a table of its evaluations
    and a line each for its first step, for the gaps of the later half of its evaluations, and for each check of the
    monitor with the largest error of any layer. Gradient norms are means, and tokens/s medians, of the steps logged
    since the evaluation before."""
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
    """Run the command that ``arguments`` name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for function, names in (
        (pack, ("folder", "output")),
        (unpack, ("folder", "output")),
        (curves, ("folder",)),
        (evaluations, ("folder",)),
    ):
        command = commands.add_parser(function.__name__, description=function.__doc__)
        command.set_defaults(function=function, names=names)
        for name in names:
            command.add_argument(name, type=Path)
    given = parser.parse_args(arguments)
    try:
        given.function(*(getattr(given, name) for name in given.names))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
