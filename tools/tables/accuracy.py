"""Tables of docs/results/accuracy.md: relative L2 errors of O, dQ, dK and dV."""

import math
import statistics
from functools import cache
from itertools import pairwise

from lab.studies import summary, traces
from lab.studies.study_tables import table
from sagebwd.diagnostics import layers
from sagebwd.diagnostics.tables import LABELS
from sagebwd.diagnostics.trace import Row
from tools.tables import sinks
from tools.tables.cells import errors
from tools.tables.results import RECIPES, STUDIES, TENSORS, load

WEIGHTS = "trained_gradients_h200_start.json"
NAMES = {"bf16": "full", "token": "token(first_keys=1)"}
"""What the files of SmolLM2's errors call recipes that have another form, or another name, now."""
PLANTED = {"35M, kernels": "assay_35m_h200.json.xz", "SmolLM2, emulated": "assay_smollm2.json"}
"""By the model's name in the table, the record of `python -m lab assay`."""


@cache
def trace() -> list[Row]:
    """Rows of heads of SmolLM2-135M."""
    return traces.read(STUDIES / "trace_smollm2.json.xz")


@cache
def smollm2() -> dict[str, dict[str, tuple[float, float]]]:
    """By recipe and tensor of SmolLM2-135M, the error over all layers and the worst layer's."""
    return layers.overall(trace())


@cache
def gaussian() -> dict[tuple[str, float, str], float]:
    """By recipe (or `printed`, the paper's), sigma and tensor, the error on Gaussian data."""
    found = {}
    for name in ("gaussian_plain", "gaussian_plain_mixed"):
        for row in load(STUDIES / f"{name}.json"):
            found[row["recipe"], row["sigma"], row["tensor"]] = row["relative_l2"]
            found["printed", row["sigma"], row["tensor"]] = row["expected_l2"]
    return found


def by_data() -> str:
    """Errors on Gaussian data, on two strengths of a sink, and of SmolLM2."""
    first = sinks.at_first_key()
    rows = [
        [f"`{recipe}`", errors(gaussian()[recipe, 1, x] for x in TENSORS),
         *(errors(first[logits, recipe][x] for x in TENSORS) for logits in (8, 12)),
         errors(smollm2()[recipe][x][0] for x in TENSORS)]
        for recipe in RECIPES
    ]  # fmt: skip
    rows.append(["`full`", *["not measured"] * 3, errors(smollm2()["full"][x][0] for x in TENSORS)])
    weights = (f"first key with {first[logits, 'mixed']['weight']:.0%}" for logits in (8, 12))
    return table(["recipe", "Gaussian, sigma 1", *weights, "SmolLM2-135M"], rows)


def by_sigma() -> str:
    """The paper's Table 1: errors on Gaussian data by the standard deviation of Q and K."""
    names = ("printed", *RECIPES)
    rows = [
        [str(sigma), *(errors(gaussian()[name, sigma, x] for x in TENSORS) for name in names)]
        for sigma in sorted({sigma for _, sigma, _ in gaussian()})
    ]
    return table(["sigma of Q and K", "the paper prints", *(f"`{name}`" for name in RECIPES)], rows)


def of_smollm2() -> str:
    """Errors of SmolLM2 over all layers, and of the worst layer."""
    rows = [
        [f"`{recipe}`", *(errors(own[name][worst] for name in TENSORS) for worst in (0, 1))]
        for recipe, own in smollm2().items()
    ]
    return table(["recipe", "O / dQ / dK / dV, all layers", "the worst layer and window"], rows)


def of_variants() -> str:
    """Errors of SmolLM2's heads with and without the rotation."""
    rows = load(STUDIES / "trained_heads_smollm2.json")["rows"]
    return table(
        ["recipe", "O / dQ / dK / dV"],
        [
            [f"`{name}`",
             errors(math.sqrt(statistics.mean(row["errors"][name][x] ** 2 for row in rows)) for x in TENSORS)]
            for name in rows[0]["errors"] if "smooth_q" not in name  # a field that went
        ],
    )  # fmt: skip


@cache
def of_all_weights() -> dict[str, dict[str, tuple[float, float]]]:
    """By recipe, means over windows, with standard errors, of the error and slope less 1 of SmolLM2's whole gradient.

    Of `WEIGHTS`, whose recipes ran on an H200's kernels; "bf16" is full precision on tensors in BF16.
    """
    rows = load(STUDIES / WEIGHTS)["rows"]
    found = {}
    for recipe in rows[0]["recipes"]:
        own = [row["recipes"][recipe]["all"] for row in rows]
        found[recipe] = {
            what: (statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values)))
            for what in ("error", "slope") for values in [[one[what] for one in own]]
        }  # fmt: skip
    return found


def gradients_of_all_weights() -> str:
    """The error of SmolLM2's whole gradient, beside 16-bit attention's."""
    found = of_all_weights()
    rows = [
        [f"`{NAMES.get(recipe, recipe)}`", f"{own['error'][0]:.4f} ± {own['error'][1]:.4f}",
         f"{own['error'][0] / found['bf16']['error'][0]:.1f}", f"{own['slope'][0]:+.4f} ± {own['slope'][1]:.4f}"]
        for recipe, own in found.items()
    ]  # fmt: skip
    return table(["recipe", "error", "over 16-bit's", "slope - 1"], rows)


def planted_faults() -> str:
    """What the assay tells apart from a recipe, and by what."""
    rows = []
    for where, file in PLANTED.items():
        for one in load(STUDIES / file)["apart"]:
            recipe, arm = one["arm"].rsplit(", ", 1)
            rows.append(
                [where, f"`{recipe}`", arm, "yes" if one["apart"] else "no", f"{one['measure']}, {one['group']}",
                 f"{one['mean']:+.4f} ({one['interval'][0]:+.4f} to {one['interval'][1]:+.4f})", f"{one['p']:.4f}"]
            )  # fmt: skip
    return table(["model", "recipe", "planted", "told apart", "best by", "difference (95%)", "p, corrected"], rows)


def by_weight_of_the_first_key() -> str:
    """Median errors of SmolLM2's heads by the first key's weight."""
    found = summary.by_weight(trace(), summary.idle(trace()))
    rows = []
    for least, most in pairwise(summary.WEIGHTS):
        medians = [
            errors(statistics.median(row.relative_l2[name] for row in found[recipe, most]) for name in TENSORS)
            for recipe in RECIPES
        ]
        rows.append([f"{least:g} to {most:g}", str(len(found["full", most])), *medians])
    return table(["weight of the first key", "heads", *(f"`{recipe}`" for recipe in RECIPES)], rows)


def by_product() -> str:
    """Shares of the products in the error of SmolLM2."""
    found = summary.shares(traces.read(STUDIES / "trace_smollm2_attribution.json.xz"))
    rows = [
        [f"`{recipe}`", LABELS.get(source, source.upper()), " / ".join(f"{share:.0%}" for share in own.values())]
        for (recipe, source), own in found.items()
    ]
    return table(["recipe", "product", "share of the squared error of O / dQ / dK / dV"], rows)
