"""Tables of README, from the files of other pages' tables: what a call, a step and an error come to."""

import re

from lab.studies.study_tables import table
from lab.training.token_cost import cost, worth
from tools.tables.accuracy import NAMES, gaussian, of_all_weights, smollm2
from tools.tables.cells import between, length, mask_and_length
from tools.tables.pretraining import (
    FROM_SCRATCH,
    MARGIN,
    PASS,
    REPEATED,
    SIZES,
    TRAINED_ON,
    UNROTATED,
    Comparison,
    find,
    gap,
    rows_of,
    starred,
)
from tools.tables.results import BENCHMARKS, RECIPES, TENSORS, load
from tools.tables.speed import BESIDE_FA3, CARDS, LENGTHS, UNROTATED_AT_2K, packed_speeds, training_speeds
from tools.tables.steps import OF_325M, calls_of, of_325m, over_flash_attention, spread

FILLED = (72, 80, 112)
"""head_dims that run in the kernels of 96 and 128, filled up."""


def facts() -> str:
    """What one call, one step and one number cost; then the figure, with three head_dims of speed.md's first table."""
    h200, h100 = (training_speeds(*files) for files in CARDS.values())
    h200_at_8k, h100_at_8k = (
        between(speed for (*_, tokens), speed in found.items() if tokens == 8192) for found in (h200, h100)
    )
    steps = {name: of_325m(name) for name in ("mixed", "mixed+fused", "fa4")}
    one, fused = (
        [f"{steps[name][tokens]['speedup']:.2f}" for tokens in (2048, 4096, 8192, 16384)]
        for name in ("mixed", "mixed+fused")
    )
    level, level_fused = (
        " and ".join(length(tokens) for tokens, row in sorted(steps[name].items()) if spread(row, OF_325M)[0] < 1)
        for name in ("mixed", "mixed+fused")
    )
    step_peak, fa4_step_peak = (f"{steps[name][4096]['peak_bytes'] / 2**30:.1f}" for name in ("mixed", "fa4"))
    calls = [(widths[0], own) for tokens in LENGTHS for widths, own in calls_of(tokens).items()]
    peak, peak_filled = (
        between(over_flash_attention("peak_bytes", own) for width, own in calls if (width in FILLED) == filled)
        for filled in (False, True)
    )
    kept = between(over_flash_attention("kept_bytes", own) for _, own in calls)
    mixed, full = ([100 * smollm2()[name][x][0] for x in TENSORS[1:]] for name in ("mixed", "full"))
    ratios = [mine / theirs for mine, theirs in zip(mixed, full)]
    weights = {name: own["error"][0] for name, own in of_all_weights().items()}
    plain = {test.key: gap(rows_of(test)[0]) for test in FROM_SCRATCH if test.model == "no QK-norm, 16K"}
    lines = [
        f"- **One call**: forward + backward of the recipe `mixed` is {h200_at_8k} times as fast as the best of "
        "FlashAttention-3, FlashAttention-4 and cuDNN in BF16, over nine head_dims from 64 to 256 (8K tokens, "
        f"H200; on an H100, without FlashAttention-3, {h100_at_8k}); short sequences, and calls on a GPU "
        "that has done little before, gain less or lose ([all](docs/results/speed.md)).",
        f"- **One training step** of a 325M model (head_dim 64) is {one[0]} (2K tokens), {one[1]} (4K), "
        f"{one[2]} (8K) and {one[3]} (16K) times as fast as with "
        "FlashAttention-4 on one H200 (cuDNN is slower, FlashAttention-3 was not timed); where "
        "[one call](docs/qk-norm-rope.md#in-transformers) does norm and rotary embedding too "
        f"{fused[0]}, {fused[1]}, {fused[2]} and {fused[3]}. Intervals hold 1 at {level}, with that call at "
        f"{level_fused} ([steps](docs/results/steps.md)).",
        f"- **Memory**: a call keeps {kept} times what FlashAttention's keeps for backward, and its peak is {peak} "
        f"times as high, {peak_filled} at head_dim 72, 80 and 112; the step's peak is {step_peak} GiB for "
        f"{fa4_step_peak} ([memory](docs/results/steps.md#memory)).",
        f"- **Error**: on SmolLM2-135M dQ, dK and dV of `mixed`, call by call and emulated, are off by "
        f"{between(mixed, 1)}%, {min(ratios):.0f} to {max(ratios):.0f} times as much as with 16-bit attention; the "
        f"gradient of all weights, on an H200, by {weights['mixed']:.1%} for {weights['bf16']:.1%}, "
        f"{weights['mixed'] / weights['bf16']:.1f} times.",
        "- **Largest run**: 325M weights, 252M tokens under an unrotated `token` and 73M under `mixed`, one seed "
        "each: too few to tell a gap from chance. At 35M weights with QK-norm and 16K tokens a step the mean of ten "
        f"seeds of `mixed` is within {MARGIN:g} nats of 16-bit attention's; at 131K that is not shown. Without "
        "QK-norm `mixed` was not tried there, and in one seed each an unrotated `token` ended at "
        f"{plain['token']}, `paper` at {plain['paper']}, full precision again at {plain[REPEATED]} "
        "([below](#is-it-safe)).",
        "- **Tested GPUs**: H100 and H200 alone, with torch 2.11 and triton 3.6. The project is alpha.",
        "",
        "![Speed over the best BF16 kernel, by head_dim and length](docs/figures/widths.png)",
        "`mixed`, forward + backward, over the best of FlashAttention-3, FlashAttention-4 and cuDNN in BF16; one "
        "H200, by tokens:",
        "",
    ]
    columns = [(causal, tokens) for causal in (True, False) for tokens in LENGTHS]
    rows = [
        [str(head_dim), *(f"{h200[head_dim, head_dim, *column]:.2f}" for column in columns)]
        for head_dim in (64, 128, 256)
    ]
    return "\n".join([*lines, table(["head_dim", *(mask_and_length(*column) for column in columns)], rows)])


def errors_of_smollm2() -> str:
    """Errors of SmolLM2 beside those of 16-bit attention."""
    found, weights = smollm2(), {NAMES.get(name, name): own["error"][0] for name, own in of_all_weights().items()}
    rows = []
    for name in (*RECIPES, "full"):
        gradients = [found[name][x][0] / found["full"][x][0] for x in TENSORS[1:]]
        over = "1" if name == "full" else f"{min(gradients):.0f} to {max(gradients):.0f}"
        recipe = NAMES.get(name, name)
        label = "`full`, 16-bit attention" if name == "full" else f"`{recipe}`"
        of_weights = "not measured"
        if recipe in weights:
            of_weights = f"{weights[recipe]:.4f}, {weights[recipe] / weights['full']:.1f}"
        rows.append([label, *(f"{found[name][x][0]:.4f}" for x in TENSORS), over, of_weights])
    dq = {(name, sigma): gaussian()[name, sigma, "dq"] for name in ("mixed", "printed") for sigma in (1, 10)}
    below = (
        "On [random data](docs/results/accuracy.md) the error depends on the size of the scores: with Q and "
        "K of standard "
        f"deviation 1 dQ is off by {dq['mixed', 1]:.0%} under `mixed`, at 10 by {dq['mixed', 10]:.0%}; the paper "
        f"prints {dq['printed', 10]:.0%} of its own recipe there."
    )
    head = ["recipe", "O", "dQ", "dK", "dV", "dQ, dK, dV over 16-bit's", "all weights' gradient, over 16-bit's"]
    return table(head, rows) + "\n\n" + below


def cell(test: Comparison | None, digits: int = 3) -> str:
    """A gap by the model's own attention, with a star where the test shows it to be within the margin."""
    return "not run" if test is None else gap(rows_of(test)[0], digits) + " *" * starred(test)


def training() -> str:
    """Gaps of models trained from scratch and of SmolLM2 trained further; below, what the margin costs in tokens."""
    small, large = "QK-norm, 16K", "QK-norm, 131K"
    rows = []
    for name, recipe, sizes, further in (
        ("`mixed`", "mixed", (small, large), "mixed"),
        ("`token(first_keys=1)`; from scratch unrotated, `first_keys=0`", UNROTATED, (small, large),
         "token(first_keys=1)"),
        ("`token(dp=int8)`", "token(dp=int8)", (small, None), "token(dp=int8)"),
        ("`paper`", "paper", (small, large), "paper"),
    ):  # fmt: skip
        cells = [cell(model and find(recipe, model, FROM_SCRATCH)) for model in sizes]
        rows.append([name, *cells, cell(find(further, "1e-4", TRAINED_ON), 5)])
    head = ["", "from scratch, 16K tokens a step", "from scratch, 131K", "SmolLM2-135M, trained further, rate 1e-4"]
    gain = round(of_325m("mixed")[8192]["speedup"], 2)
    papers = next(tokens for *_, tokens, which in SIZES if which == "the paper's")
    below = (
        f"{MARGIN:g} nats are {cost(MARGIN, PASS):.1%} of the tokens of the runs from scratch by Hoffmann's fit, and "
        f"{cost(MARGIN, papers):.0%} of the paper's 78B, where a gap of {worth(gain, papers):.3f} eats what a step "
        f"{gain} times as fast gains ([costs](docs/results/pretraining.md#what-a-gap-costs))."
    )
    return table(head, rows) + "\n\n" + below


def gpu_tests() -> str:
    """The newest whole run of the GPU tests, the newest, and an H100's."""
    whole, newest = (
        load(BENCHMARKS / f"gpu-suite_h200_{run}.json")["counts"]
        for run in ("2026-11-28_2451bcf", "2026-11-29_94846373")
    )
    whole, newest = (
        ", ".join(f"{counts.get(outcome, 0)} {outcome}" for outcome in ("passed", "failed", "skipped"))
        for counts in (whole, newest)
    )
    older = load(BENCHMARKS / "gpu-suite_h100_2026-11-24_b1f1da0.json")["counts"]
    sequences = (BENCHMARKS / "call-sequences_h200_2026-11-29_dbd5b219.txt").read_text(encoding="utf-8")
    steps, differ = re.findall(r"(\d+) steps, (\d+) differ", sequences)[-1]
    return (
        f"The GPU tests on two H200s on 2026-11-28, until time ended: {whole} (most stand for combinations that "
        f"others cover); of the newest tree on one H200, of less than half of them, {newest}, which wanted an error "
        f"that is gone. "
        f"That no call leaves a trace in later ones: of {steps} random calls, each compared with the same call in a "
        f"fresh process, {differ} differ. On an H100, an older tree on 2026-11-24: {older['passed']} passed, "
        f"{older['failed']} failed, a test of how long steps of other lengths take."
    )


def limits() -> str:
    """Where it is not faster."""
    h200, h100 = (training_speeds(*files) for files in CARDS.values())
    (head_dim, _, _, tokens), slowest = min(h200.items(), key=lambda item: item[1])
    at_2k = [speed for (*_, tokens), speed in training_speeds(UNROTATED_AT_2K, *BESIDE_FA3).items() if tokens == 2048]
    packed = [own["fwd+bwd"] for (*_, sequences), own in packed_speeds().items() if sequences.endswith("x 2048")]
    return "\n".join([
        f"- **Where another kernel is as fast.** Over nine head_dims and 4K to 16K tokens `mixed` is "
        f"{between(h200.values())} times as fast as the best BF16 kernel on an H200 and "
        f"{between(h100.values())} on an H100. The lowest on an H200, {slowest:.2f}, is head_dim {head_dim} at "
        f"{length(tokens)} under a causal mask. FlashAttention-3 is one of those kernels on the H200 alone. In "
        "[short bursts](docs/results/speed.md#short-bursts), before power limits the clock, most gain less, and at 2K "
        "tokens all lose under a causal mask.",
        f"- **Short sequences.** At 2K tokens and head_dim 64 or 128 it is {between(at_2k)} times as fast "
        "(at 128 an earlier `mixed`, and FlashAttention-3 was not timed). "
        f"[Packed](docs/results/speed.md#packed-sequences) documents of 2K tokens are slower than with "
        f"FlashAttention-4: {between(packed)}.",
    ])  # fmt: skip
