"""Tables of docs/results/pretraining.md: losses of training runs, as gaps to full precision."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from lab.studies.study_tables import table
from lab.training import packed
from lab.training.gaps import CONTINUED_MARGIN, MARGIN, Gap, gaps
from tools.tables.results import STUDIES, load

GRID = (  # variant, model, tokens a step, folders
    ("mixed", "QK-norm", "16K", ("mixed-small",)),
    ("mixed fused", "QK-norm", "16K", ("mixed-small",)),
    ("token with dP in INT8", "QK-norm", "16K", ("mixed-small",)),
    ("token with dP in INT8", "three heads of 128, QK-norm", "16K", ("heads-128-small",)),
    ("mixed", "QK-norm", "131K", ("mixed-large",)),
    ("token", "QK-norm", "16K", ("qknorm-small", "qknorm-small-seed?")),
    ("token", "QK-norm", "131K", ("qknorm-large", "qknorm-large-seed?")),
    ("token", "no QK-norm", "131K", ("no-qknorm-large", "no-qknorm-large-seed?")),
    ("paper", "QK-norm", "16K", ("qknorm-small", "qknorm-small-seed?")),
    ("paper", "QK-norm", "131K", ("qknorm-large", "qknorm-large-seed?")),
    ("paper", "no QK-norm", "131K", ("no-qknorm-large", "no-qknorm-large-seed?")),
)
WIDTHS = (  # folder, model and tokens a step
    ("256", "head_dim 256, QK-norm, 16K"),
    ("96", "head_dim 96, QK-norm, 16K"),
    ("192-128", "head_dim 192/128, no QK-norm, 16K"),
)
# Folders of SmolLM2's continued pretraining, by learning rate; sequences of 2048 tokens where nothing else is said.
CONTINUED = {"lr-0.0001": "1e-4", "8k/lr-0.0001": "1e-4, 8K tokens a sequence", "lr-0.001": "1e-3"}

LONGER = "a longer run, or a larger model, in which it leaves the margin"
AT_MARGIN = f"more pairs: its interval ends at the margin; {LONGER}"
SECOND_LOOK = "heads of 128, whose backward is another kernel; more pairs, as these were a second look"
BRANCHED = "more pairs, or pairs that branch from one checkpoint: an interval within the margin, or above 0"
OTHERS = "another model or text, sequences over 2048 tokens, or more steps, that show a gap"
LONGER_STILL = "another model or text, more steps, or sequences over 8K tokens, that show a gap"
CLAIMS = (  # variant, folders of the grid or a folder of `CONTINUED`, what would change our mind
    ("mixed", ("mixed-small",), LONGER),
    ("mixed fused", ("mixed-small",), AT_MARGIN),
    ("token with dP in INT8", ("mixed-small",), SECOND_LOOK),
    ("token", ("qknorm-small", "qknorm-small-seed?"), "pairs under today's `token`, which is rotated"),
    ("paper", ("qknorm-small", "qknorm-small-seed?"), "more pairs, to tell a gap from chance"),
    ("mixed", ("mixed-large",), BRANCHED),
    ("mixed", "lr-0.0001", LONGER_STILL),
    ("mixed", "8k/lr-0.0001", LONGER_STILL),
    ("token", "lr-0.0001", OTHERS),
    ("token with dP in INT8", "lr-0.0001", "heads of 128; " + OTHERS),
    ("mixed with dP in INT8", "lr-0.0001", OTHERS),
    ("paper", "lr-0.0001", "the authors' kernels, if they show none"),
    ("full precision repeated", "lr-0.001", "more pairs: chance alone reaches beyond the margin at this rate"),
    ("mixed", "lr-0.001", "pairs that leave an interval within the margin, or above 0"),
)


@cache
def gaps_in(folders: tuple[Path, ...], margin: float = MARGIN, in_full_precision: bool = False) -> dict[str, Gap]:
    """By variant, the gaps over the runs of some folders."""
    found = gaps(list(folders), margin=margin, in_full_precision=in_full_precision)
    return {row.variant: row for row in found}


def from_grid(*patterns: str) -> dict[str, Gap]:
    """By variant, the gaps over folders of the grid, whose models are trained from scratch."""
    return gaps_in(tuple(path for pattern in patterns for path in sorted((STUDIES / "grid").glob(pattern))))


def continued(folder: str, in_full_precision: bool = False) -> dict[str, Gap]:
    """By variant, the gaps of SmolLM2 trained further; held-out loss under its own attention or full precision's."""
    return gaps_in((STUDIES / "continued" / folder,), CONTINUED_MARGIN, in_full_precision)


def gap(row: Gap, digits: int = 3) -> str:
    """A mean gap with its 95% interval."""
    mean = f"{row.mean:+.{digits}f}"
    return mean + (f" ({row.interval[0]:+.{digits}f} to {row.interval[1]:+.{digits}f})" if row.interval else "")


def commits(row: Gap) -> str:
    """Commits of the kernels that trained."""
    return ", ".join(f"`{commit}`" for commit in row.commits)


def conclusion(rows: Sequence[Gap], margin: float) -> str:
    """What intervals and tests of equivalence show together."""
    if all(row.p < 0.05 for row in rows):
        return f"within {margin:g}"
    return "a gap" if all(row.interval[0] > 0 for row in rows) else "undecided"


def verdicts() -> str:
    """Each claim of training with its number, and what would change our mind."""
    found = []
    for variant, where, mind in CLAIMS:
        if isinstance(where, str):
            rows = [continued(where)[variant], continued(where, in_full_precision=True)[variant]]
            model, margin, digits = f"trained on at {CONTINUED[where]}", CONTINUED_MARGIN, 5
        else:
            rows = [from_grid(*where)[variant]]
            model, margin, digits = f"from scratch, {'131K' if 'large' in where[0] else '16K'}", MARGIN, 4
        found.append([f"`{variant}`, {model}", f"**{conclusion(rows, margin)}**",
                      "; weights ".join(gap(row, digits) for row in rows),
                      "; ".join(f"{row.p:.4f}" for row in rows), str(len(rows[0].gaps)), mind])  # fmt: skip
    return table(["claim", "verdict", "gap (95%)", "p", "pairs", "what would change our mind"], found)


def from_scratch() -> str:
    """Gaps of models trained from scratch."""
    found = [(name, f"{model}, {tokens}", from_grid(*folders)[name]) for name, model, tokens, folders in GRID]
    found += [("mixed", model, gaps_in((STUDIES / "widths" / folder,))["mixed"]) for folder, model in WIDTHS]
    rows = [
        [f"`{name}`", model, gap(row, 4), str(len(row.gaps)), f"{row.p:.4f}", commits(row)]
        for name, model, row in found
    ]
    return table(["recipe", "model, tokens a step", "gap (95%)", "pairs", "p", "commit"], rows)


def continued_from_smollm2() -> str:
    """Gaps of SmolLM2's continued pretraining."""
    rows = []
    for folder, name in CONTINUED.items():
        of_weights = continued(folder, in_full_precision=True)
        for variant, row in continued(folder).items():
            if row.interval is not None:
                weights = of_weights[variant]
                rows.append([f"`{variant}`", name, gap(row, 5), f"{row.p:.4f}", gap(weights, 5), f"{weights.p:.4f}",
                             str(len(row.gaps)), commits(row)])  # fmt: skip
    gaps_and_p = "gap by its own attention (95%)", "p", "gap of its weights (95%)", "p"
    return table(["recipe", "rate", *gaps_and_p, "pairs", "commit"], rows)


def losses_of_325m() -> str:
    """Held-out losses of the 325M runs."""
    rows = []
    for folder, tokens in (("120-steps", "2.1M"), ("280-steps", "262K")):
        ends = {}
        for run in packed.read(STUDIES / "325m" / folder):
            last = [line for line in run["metrics"] if "held_out_loss" in line][-1]
            ends[run["run"]] = last["step"], last["held_out_loss"]
        full = ends["full precision"][1]
        for name, (step, loss) in ends.items():
            rows.append([name, tokens, str(step), f"{loss:.4f}", f"{loss - full:+.4f}"])
    return table(["run", "tokens a step", "steps", "held-out loss", "gap"], rows)


def fine_tuning() -> str:
    """Accuracies of SmolLM2 fine-tuned."""
    rows = []
    for folder, what in (
        ("smollm2-subject", "`subject`, chance 0.25"),
        ("smollm2-neighbours", "`neighbours`, chance 0.5"),
    ):
        for row in load(STUDIES / "finetune" / folder / "comparison.json")["outcomes"]:
            difference = row.get("difference")
            shown = "" if row["variant"] == "full precision" or difference is None else f"{difference:+.4f}"
            rows.append([what, row["variant"], f"{row['mean']:.4f}", shown])
    return table(["task", "variant", "accuracy", "difference to full precision"], rows)
