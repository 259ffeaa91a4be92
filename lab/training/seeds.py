"""One comparison with several seeds, many runs side by side, within a time limit.

Runs start seed by seed, so that what has ended when time is up is whole pairs. Whenever a run ends, the outcomes of
all that have are written anew, so that a stop at any moment loses none of them.
"""

from __future__ import annotations

import json
from pathlib import Path

from lab.training import compare, kernel_commit, packed, parallel_runs
from lab.training.config import Config
from lab.training.run_dir import COMPARISON, end_of, refuse_single
from sagebwd.cli.results import commit
from sagebwd.environment import write_whole


def train(
    config: Config,
    seeds: list[int],
    output: Path,
    only: list[str] | None = None,
    jobs: int = 1,
    seconds: float | None = None,
    results: Path | None = None,
) -> list[str]:
    """Train the variants of ``config``, or those in ``only``, with each seed, into ``output / seed-N / variant``.

    What has finished is kept, and what was interrupted goes on. Writes comparison.json into ``output``, whose outcomes
    say of which seed they are, and keeps it with runs.jsonl.xz in ``results``, where given.

    Args: jobs, runs at once, on the GPUs in turn; seconds, after which runs are stopped, and near whose end none is
    started that would not come to its own. Returns the runs that have not ended.

    Raises ValueError for no seeds, without the config's first variant, where the commit of the kernels is not known or
    a faulty one, and as `lab.training.compare.compare` does.
    """
    if not seeds:
        raise ValueError("expected at least one seed, for example 3-12")
    everything = [config.replace({"seed": seed}) for seed in seeds]
    chosen = {f"seed-{one.seed}": one.chosen(only) for one in everything}
    baseline = next(iter(config.variants))
    if any(baseline not in variants for variants in chosen.values()):
        raise ValueError(f"only={only}: the gap is to {baseline!r}, which is none of them; add it")
    for variant in chosen[f"seed-{seeds[0]}"].values():
        if reason := kernel_commit.objection(variant.attention.recipe, commit()):
            raise ValueError(f"runs of {variant.attention.recipe} would not count: {reason}; set SAGEBWD_COMMIT")
    refuse_single(output)
    for folder, variants in chosen.items():
        compare.check(variants, output / folder)
    runs = {f"{folder}/{name}": variant for folder, variants in chosen.items() for name, variant in variants.items()}
    left = {name: runs[name] for name in _not_ended(runs, output)}

    gather(config, output, results, left)
    parallel_runs.train(left, output, jobs, seconds, lambda name: gather(config, output, results, left))
    return _not_ended(left, output)


def gather(config: Config, output: Path, results: Path | None, runs: dict[str, Config]) -> None:
    """Write comparison.json of all that has ended under ``output``, of whatever seed, where anything has; and which of
    ``runs`` and of earlier commands' have not, by which `python -m lab gaps` knows a look that comes too early."""
    rows, environment = [], {}
    left = _not_ended(_left_before(config, output) | runs, output)
    for seed in sorted(int(path.name.removeprefix("seed-")) for path in output.glob("seed-*")):
        runs, outcomes = compare.ended(config.replace({"seed": seed}), output / f"seed-{seed}")
        rows += [{"seed": seed, **row} for row in compare.as_rows(runs, outcomes)]
        environment = runs[-1].result["environment"] if runs else environment
    if not rows:
        return
    found = {"outcomes": rows, "environment": environment, "left": left}
    write_whole(output / COMPARISON, json.dumps(found, indent=1) + "\n")
    if results is not None:
        packed.pack(output, results)


def _not_ended(runs: dict[str, Config], output: Path) -> list[str]:
    return [name for name, variant in runs.items() if end_of(variant, output / name) is None]


def _left_before(config: Config, output: Path) -> dict[str, Config]:
    """What the comparison that is there says is left, of variants that there still are."""
    path, found = output / COMPARISON, {}
    for name in json.loads(path.read_text(encoding="utf-8")).get("left", ()) if path.is_file() else ():
        folder, _, variant = name.partition("/")
        variants = config.replace({"seed": int(folder.removeprefix("seed-"))}).each_variant()
        found |= {name: variants[variant]} if variant in variants else {}
    return found
