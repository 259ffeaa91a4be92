"""All pairs of a config: what is left of them is trained, and what has ended is compared as
`python -m lab gaps` reads it.

A folder for each learning rate, ``lr-RATE``, holds comparison.json and the runs, ``seed-N/VARIANT``. An outcome's gap
is of held-out losses by the run's own attention, ``gap_in_full_precision`` of those that both runs have in full
precision: of the weights alone.
"""

from __future__ import annotations

import json
from pathlib import Path

from lab.training import kernel_commit, packed
from lab.training.config import FULL_PRECISION
from lab.training.continued import workers
from lab.training.continued.config import Continued, rate_folder
from lab.training.run_dir import COMPARISON, digest_in, end_of, read_metrics, refuse_single
from sagebwd.cli.results import commit
from sagebwd.environment import write_whole

LOSS, IN_FULL = "held_out_loss", "held_out_loss_in_full_precision"


def train(
    config: Continued,
    output: Path,
    jobs: int = 1,
    seconds: float | None = None,
    results: Path | None = None,
) -> list[str]:
    """Train what has not ended under ``output``; the runs that have not ended then.

    Each time a run ends, comparison.json of its learning rate is written anew, and kept with runs.jsonl.xz in
    ``results / lr-RATE``, where given. Args: jobs and seconds, as `workers.train`'s.

    Raises ValueError where the first variant is not in full precision, the commit of the kernels is not known or a
    faulty one, a folder holds a run of other settings, and as `Continued.runs` and `workers.train` do.
    """
    runs = config.runs()
    baseline = next(iter(config.each_variant().values())).attention.recipe
    if baseline not in FULL_PRECISION:
        raise ValueError(f"variants: the first has attention.recipe={baseline}; expected {', '.join(FULL_PRECISION)}")
    refuse_single(output)
    for name, run in runs.items():
        if reason := kernel_commit.objection(run.attention.recipe, commit()):
            raise ValueError(f"runs of {run.attention.recipe} would not count: {reason}; set SAGEBWD_COMMIT")
        if digest_in(output / name) not in (None, run.digest()):
            raise ValueError(f"{output / name} holds a run of other settings; choose another --output, or delete it")
    left = {name: run for name, run in runs.items() if end_of(run, output / name) is None}
    for rate in _rates(config):
        gather(config, output, rate, results)
    workers.train(
        left, output, baseline, jobs, seconds, lambda name: gather(config, output, name.split("/")[0], results)
    )
    return [name for name, run in left.items() if end_of(run, output / name) is None]


def _rates(config: Continued) -> list[str]:
    """The folders of the config's learning rates."""
    return list(dict.fromkeys(rate_folder(stage.learning_rate) for stage in config.each_stage()))


def gather(config: Continued, output: Path, rate: str, results: Path | None = None) -> None:
    """Write comparison.json of a learning rate's runs that have ended, and of which have not, where any has begun."""
    runs = {name: run for name, run in config.runs().items() if name.startswith(f"{rate}/")}
    variants = list(config.variants)
    ordered = sorted(runs, key=lambda name: (runs[name].seeds, variants.index(_variant(name))))
    outcomes, unfinished, environment, baseline = [], [], {}, None
    for name in ordered:
        run, variant = runs[name], _variant(name)
        named = {"seed": run.seeds[0], "variant": variant}
        if baseline is None or baseline["seed"] != run.seeds[0]:
            baseline = {"seed": run.seeds[0]}
        end = end_of(run, output / name)
        if end is None:
            steps = max((line["step"] for line in read_metrics(output / name)), default=None)
            unfinished += [] if steps is None else [{**named, "steps": steps}]
            continue
        result = json.loads((output / name / end).read_text(encoding="utf-8"))
        environment = result["environment"]
        if variant == variants[0]:
            baseline.update(result)
        outcomes.append({**named, **_outcome(result, baseline)})
    if not outcomes and not unfinished:
        return
    content = {"outcomes": outcomes, "unfinished": unfinished, "environment": environment}
    write_whole(output / rate / COMPARISON, json.dumps(content, indent=1) + "\n")
    if results is not None:
        packed.pack(output / rate, results / rate)


def _variant(name: str) -> str:
    return name.rpartition("/")[2]


def _outcome(result: dict, baseline: dict) -> dict[str, object]:
    """A row of comparison.json, with gaps where both runs came to a finite loss."""
    comparable = LOSS in baseline and not baseline.get("diverged") and not result.get("diverged")
    kept = (
        "recipe",
        LOSS,
        IN_FULL,
        "train_loss",
        "tokens_per_s",
        "seconds",
        "steps",
        "learning_rate",
        "calls",
        "digest",
    )
    return {
        **{key: result[key] for key in kept},
        "gap": result[LOSS] - baseline[LOSS] if comparable else None,
        "gap_in_full_precision": result[IN_FULL] - baseline[IN_FULL] if comparable else None,
        "diverged": result.get("diverged"),
        "commit": result["environment"].get("commit"),
    }
