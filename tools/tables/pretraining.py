"""Tables of docs/results/pretraining.md: losses of training runs, as gaps to full precision."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean

from lab.studies.study_tables import table
from lab.training import packed
from lab.training.gaps import CONTINUED_MARGIN, MARGIN, Gap, equivalence, gaps, holm, interval
from lab.training.token_cost import cost, worth
from tools.tables.results import STUDIES, load
from tools.tables.steps import of_325m

PASS, THIRD = 2400 * 16384, 800 * 16384
"""Tokens of a run from scratch: one pass over the corpus, and a third of it."""
UNROTATED = "token(first_keys=0, v_scale=sequence, rotate=False)"
"""What `token` was in the runs of 2026-11-21 to 23."""
SMALL, LARGE = ("qknorm-small", "qknorm-small-seed?"), ("qknorm-large", "qknorm-large-seed?")
PLAIN_SMALL = ("no-qknorm-small",)
PLAIN = ("no-qknorm-large", "no-qknorm-large-seed?")


@dataclass(frozen=True)
class Comparison:
    """A test of equivalence: a recipe as it was when it trained, and the runs.

    looks: pairs at each reading of these runs' gaps that was committed, the last being of all; None at one some of
    whose runs were made anew since. beforehand: the margin was written before the runs were, which holds since
    2dc2c2a1 (0.02) and 46e8fec8 (0.001), both of 2026-11-25.
    """

    recipe: str
    model: str
    folders: tuple[str, ...]
    looks: tuple[int | None, ...]
    variant: str = ""
    beforehand: bool = True
    tokens: int = PASS

    @property
    def key(self) -> str:
        """The variant's name in the files."""
        return self.variant or self.recipe


INT8_DP = "token with dP in INT8"
REPEATED, CONTROL = IN_FULL_PRECISION = "full precision repeated", "control, dV 8% too small"
REGISTERED = "no QK-norm, 16K, ten seeds"
LOOKS_AT_REGISTERED = {"mixed": (1, 7, 10), REPEATED: (1, 7, 10), CONTROL: (2, 8, 10)}
"""The first two were not planned (configs/grid/no-qk-norm.md)."""
FROM_SCRATCH = (
    Comparison("mixed", "QK-norm, 16K", ("grid/mixed-small",), (10,)),
    Comparison("mixed", "QK-norm, fused, 16K", ("grid/mixed-small",), (4, 5), "mixed fused"),
    Comparison("token(dp=int8)", "QK-norm, 16K", ("grid/mixed-small",), (4, 5, 10), INT8_DP),
    Comparison("token(dp=int8)", "three heads of 128, QK-norm, 16K", ("grid/heads-128-small",), (3,), INT8_DP),
    Comparison("mixed", "QK-norm, 131K", ("grid/mixed-large",), (10,)),
    *(
        Comparison(recipe, model, tuple(f"grid/{name}" for name in folders), looks, variant, beforehand=False)
        for recipe, variant in ((UNROTATED, "token"), ("paper", "paper"))
        for model, folders, looks in (
            ("QK-norm, 16K", SMALL, (1, 2, 3)),
            ("QK-norm, 131K", LARGE, (2, 3)),
            ("no QK-norm, 16K", PLAIN_SMALL, (1,)),
            ("no QK-norm, 16K, rate 4e-3", ("no-qknorm-small-4e-3",), (1,)),
            ("no QK-norm, 131K", PLAIN, (1, 2)),
            ("no QK-norm, 131K, rate 4e-3", ("no-qknorm-large-4e-3",), (1,)),
        )
    ),
    Comparison(REPEATED, "no QK-norm, 16K", tuple(f"grid/{name}" for name in PLAIN_SMALL), (1,), beforehand=False),
    *(
        Comparison(recipe, REGISTERED, ("grid/no-qknorm-registered",), looks, "control" if recipe == CONTROL else "")
        for recipe, looks in LOOKS_AT_REGISTERED.items()
    ),
    Comparison("mixed", "head_dim 256, QK-norm, 16K", ("widths/256",), (None, 5), tokens=THIRD),
    Comparison("mixed", "head_dim 96, QK-norm, 16K", ("widths/96",), (None, 5), tokens=THIRD),
    Comparison("mixed", "head_dim 192/128, no QK-norm, 16K", ("widths/192-128",), (6,), tokens=THIRD),
)
AT_1E4, AT_1E3, AT_8K = ("continued/lr-0.0001",), ("continued/lr-0.001",), ("continued/8k/lr-0.0001",)
TRAINED_ON = (
    Comparison(REPEATED, "1e-4", AT_1E4, (4, 5)),
    Comparison("mixed", "1e-4", AT_1E4, (5,)),
    Comparison("token(first_keys=1)", "1e-4", AT_1E4, (5,), "token"),
    Comparison("paper", "1e-4", AT_1E4, (5,)),
    Comparison("mixed(dp=int8)", "1e-4", AT_1E4, (3, 5), "mixed with dP in INT8"),
    Comparison("token(dp=int8)", "1e-4", AT_1E4, (2, 5), INT8_DP),
    Comparison("mixed", "1e-4, 8K tokens a sequence", AT_8K, (5,)),
    Comparison(REPEATED, "1e-3", AT_1E3, (5,)),
    Comparison("mixed", "1e-3", AT_1E3, (5,)),
    Comparison("token(first_keys=1)", "1e-3", AT_1E3, (1, 5), "token"),
    Comparison("paper", "1e-3", AT_1E3, (1, 5)),
)
LOST_DK = "continued/lost-dk"
FAULTS = (  # what was wrong, recipe, model, variant, folders, margin
    ("dK lost from one block of 16 queries", "mixed(dp=int8)", "SmolLM2, trained on", (LOST_DK,), CONTINUED_MARGIN),
    ("dV and dK 7 to 10% too small", "mixed", "from scratch, QK-norm, 16K", SMALL, MARGIN),
    ("dV and dK 7 to 10% too small", "mixed", "from scratch, QK-norm, 131K", LARGE, MARGIN),
    ("dV and dK 7 to 10% too small", "mixed", "from scratch, no QK-norm, 131K", PLAIN, MARGIN),
)  # fmt: skip


@cache
def gaps_in(
    patterns: tuple[str, ...], margin: float = MARGIN, in_full_precision: bool = False, faulty: bool = False
) -> dict[str, Gap]:
    """By variant, the gaps over the runs of some folders of docs/results, which patterns name."""
    folders = [path for pattern in patterns for path in sorted(STUDIES.glob(pattern))]
    return {row.variant: row for row in gaps(folders, None, margin, in_full_precision, faulty)}


def rows_of(test: Comparison) -> list[Gap]:
    """A test's gaps; of SmolLM2 those by its own attention and those of its weights, both of which it asks."""
    if test in FROM_SCRATCH:
        return [gaps_in(test.folders)[test.key]]
    return [gaps_in(test.folders, CONTINUED_MARGIN, weights)[test.key] for weights in (False, True)]


def p_at(test: Comparison, pairs: int | None) -> float | None:
    """p over the first ``pairs`` of a test's, the larger where it asks of two gaps; None of fewer than two."""
    if pairs is None or pairs < 2:
        return None
    margin = MARGIN if test in FROM_SCRATCH else CONTINUED_MARGIN
    return max(equivalence(row.gaps[:pairs], margin) for row in rows_of(test))


@cache
def corrected(tests: tuple[Comparison, ...]) -> dict[Comparison, float]:
    """By test of a table, p of all its pairs times its looks, then Holm's over the tests that have a p."""
    found = {test: p_at(test, test.looks[-1]) for test in tests}
    found = {test: min(1.0, p * len(test.looks)) for test, p in found.items() if p is not None}
    return dict(zip(found, holm(list(found.values()))))


def starred(test: Comparison) -> bool:
    """Whether equivalence is shown: a margin written before, one look, and Holm's p below .05."""
    tests = FROM_SCRATCH if test in FROM_SCRATCH else TRAINED_ON
    return test.beforehand and len(test.looks) == 1 and corrected(tests).get(test, 1.0) < 0.05


def verdict(test: Comparison) -> str:
    """What intervals and tests show together."""
    rows, margin = rows_of(test), MARGIN if test in FROM_SCRATCH else CONTINUED_MARGIN
    if len(rows[0].gaps) < 2:
        return "one pair"
    if starred(test):
        return f"**within {margin:g}** *"
    if corrected(FROM_SCRATCH if test in FROM_SCRATCH else TRAINED_ON)[test] < 0.05:
        return f"within {margin:g}, {len(test.looks)} looks"
    return "**a gap**" if all(row.interval[0] > 0 for row in rows) else "undecided"


def looks(test: Comparison) -> str:
    """Pairs at each look."""
    return ", ".join("others" if pairs is None else str(pairs) for pairs in test.looks)


def ps(test: Comparison) -> str:
    """p at each look, and corrected."""
    at = [p_at(test, pairs) for pairs in test.looks]
    if at[-1] is None:
        return "-"
    tests = FROM_SCRATCH if test in FROM_SCRATCH else TRAINED_ON
    return f"{', '.join('-' if p is None else f'{p:.4f}' for p in at)}; {corrected(tests)[test]:.4f}"


def find(recipe: str, model: str, tests: Sequence[Comparison] = FROM_SCRATCH) -> Comparison:
    """The test of a recipe and a model."""
    return next(test for test in tests if (test.recipe, test.model) == (recipe, model))


def gap(row: Gap, digits: int = 3) -> str:
    """A mean gap with its 95% interval."""
    middle = f"{row.mean:+.{digits}f}"
    return middle + (f" ({row.interval[0]:+.{digits}f} to {row.interval[1]:+.{digits}f})" if row.interval else "")


def in_tokens(row: Gap, tokens: int) -> str:
    """What a mean gap and the ends of its interval cost in tokens."""
    middle, *ends = (f"{cost(x, tokens):+.1%}" for x in (row.mean, *(row.interval or ())))
    return middle + (f" ({' to '.join(ends)})" if ends else "")


def named(test: Comparison) -> str:
    """A recipe as code, full precision as words."""
    return test.recipe if test.recipe in IN_FULL_PRECISION else f"`{test.recipe}`"


def commits(row: Gap) -> str:
    """Commits of the kernels that trained."""
    return ", ".join(f"`{commit}`" for commit in row.commits)


def from_scratch() -> str:
    """Gaps of models trained from scratch."""
    rows = []
    for test in FROM_SCRATCH:
        (row,) = rows_of(test)
        higher = "-" if row.higher is None else f"{row.higher:.4f}"
        rows.append([named(test), test.model, verdict(test), gap(row, 4), in_tokens(row, test.tokens),
                     looks(test), ps(test), higher, commits(row)])  # fmt: skip
    head = ["recipe", "model, tokens a step", "verdict", "gap (95%)", "in tokens (95%)", "pairs at each look",
            "p at each; corrected", "p, higher", "commit"]  # fmt: skip
    return table(head, rows)


def of_text(test: Comparison) -> float:
    """Half of the 95% interval of a mean gap over held-out sequences, of each the mean over pairs."""
    runs = {run["run"]: run["result"] for run in packed.read(STUDIES / test.folders[0]) if run["result"]}
    pairs = [
        (runs[name]["held_out_sequences"], runs[f"{seed}/full precision"]["held_out_sequences"])
        for name in runs for seed, _, variant in [name.partition("/")] if variant == test.key
    ]  # fmt: skip
    each = [[own - full for own, full in zip(*pair)] for pair in pairs]
    low, high = interval([mean(one) for one in zip(*each)])
    return (high - low) / 2


def continued_from_smollm2() -> str:
    """Gaps of SmolLM2's continued pretraining."""
    rows = []
    for test in TRAINED_ON:
        own, weights = rows_of(test)
        rows.append([named(test), test.model, verdict(test), gap(own, 5), f"{of_text(test):.5f}", gap(weights, 5),
                     looks(test), ps(test), commits(own)])  # fmt: skip
    head = ["recipe", "rate", "verdict", "gap by its own attention (95%)", "± of the text", "gap of its weights (95%)",
            "pairs at each look", "p at each; corrected", "commit"]  # fmt: skip
    return table(head, rows)


def of_wrong_kernels() -> str:
    """Gaps of runs whose gradients are known to have been wrong."""
    rows = []
    for wrong, recipe, model, folders, margin in FAULTS:
        variant = "mixed with dP in INT8" if folders == (LOST_DK,) else "mixed"
        patterns = folders if folders == (LOST_DK,) else tuple(f"grid/{name}" for name in folders)
        row = gaps_in(patterns, margin, faulty=True)[variant]
        rows.append([wrong, f"`{recipe}`", model, gap(row, 5 if margin < MARGIN else 4), str(len(row.gaps)),
                     f"{row.p:.4f}", commits(row)])  # fmt: skip
    return table(["the kernels' gradients had", "recipe", "model", "gap (95%)", "pairs", "p", "commit"], rows)


SIZES = (  # weights, tokens, which they are
    ("35M", PASS, "the runs from scratch"),
    ("35M", 7e8, "20 tokens a weight"),
    ("325M", 6.5e9, "20 tokens a weight"),
    ("325M", 7.8e10, "the paper's"),
    ("7B", 2e12, "as such models are trained"),
)


def costs_of_gaps() -> str:
    """What the margin costs in tokens, and the gaps that eat what a step gains."""
    gains = {tokens: round(of_325m("mixed")[tokens]["speedup"], 2) for tokens in (8192, 16384)}
    rows = [
        [f"{weights}, {tokens / 1e6:,.0f}M ({which})", f"{cost(MARGIN, tokens):.1%}",
         *(f"{worth(gain, tokens):.4f}" for gain in gains.values())]
        for weights, tokens, which in SIZES
    ]  # fmt: skip
    of_gains = (f"a step {gain} times as fast ({tokens // 1024}K) is worth" for tokens, gain in gains.items())
    return table(["weights, tokens", f"{MARGIN:g} nats cost, in tokens", *of_gains], rows)


def losses_of_325m() -> str:
    """Held-out losses of the 325M runs."""
    rows = []
    for folder, tokens, token in (("120-steps", "2.1M", UNROTATED), ("280-steps", "262K", "token(first_keys=1)")):
        ends = {}
        for run in packed.read(STUDIES / "325m" / folder):
            last = [line for line in run["metrics"] if "held_out_loss" in line][-1]
            ends[run["run"]] = last["step"], last["held_out_loss"]
        full = ends["full precision"][1]
        for name, (step, loss) in ends.items():
            name = {"token": f"`{token}`", "mixed": "`mixed`"}.get(name, name)
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
