"""What README says in numbers, from the files of other pages' tables."""

from lab.studies.study_tables import table
from lab.training.token_cost import worth
from tools.tables import gains as estimates
from tools.tables.accuracy import NAMES, of_all_weights, smollm2
from tools.tables.cells import between, length
from tools.tables.masks import FILE, speeds
from tools.tables.pretraining import FROM_SCRATCH, SIZES, TRAINED_ON, find, gap, rows_of
from tools.tables.results import BENCHMARKS, PEERS, RECIPES, TENSORS, load
from tools.tables.results import rows_of as rows_of_file
from tools.tables.speed import CARDS, LENGTHS, packed_speeds, training_speeds
from tools.tables.steps import OF_MODELS, calls_of, over_flash_attention

WHOLE_SUITE, NEWEST_SUITE, H100_SUITE = (
    "h200_2026-11-28_2451bcf",
    "h200_2026-11-29_94846373",
    "h100_2026-11-24_b1f1da0",
)
"""Records of the GPU tests."""
FILLED = (72, 80, 112)
"""head_dims that run in the kernels of 96 and 128, filled up."""


def gains() -> str:
    """A step, a call and a mask."""
    at = 8192
    steps = {
        (row["attention"], row["compiled"]): row for name in OF_MODELS for row in rows_of_file(name)
        if row["model"] == "llama-1b-128"
    }  # fmt: skip
    over = {(name, compiled): f"{steps[name, compiled]['over_best']:.2f}" for name, compiled in steps
            if name in ("sagebwd", "sagebwd+fuse")}  # fmt: skip
    over_sdpa = steps["sdpa", True]["ms"] / steps["sagebwd", True]["ms"]
    call = next(
        row for row in rows_of_file(CARDS["H200"][0])
        if (row["recipe"], row["direction"], row["causal"], row["tokens"]) == ("mixed", "fwd+bwd", True, at)
    )  # fmt: skip
    (frames, own), *_ = [(call, own) for call, own in speeds(rows_of_file(FILE)).items() if call[0] == "causal-frames"]
    over_flex, over_best = own[False, "fwd+bwd"]
    return "\n".join([
        f"- **A step** of a Llama with 1.1B weights, heads of 128 and {length(at)} tokens a sequence, under "
        f"`torch.compile` on one H200, is {over['sagebwd', True]} times as fast as with FlashAttention-4, and "
        f"{over_sdpa:.2f} times as fast as with Transformers' `sdpa`, which "
        "[reads a mask of elements there](docs/steps.md#what-sdpa-loses-in-a-compiled-model). Uncompiled it is "
        f"{over['sagebwd', False]} times as fast as with FlashAttention-4, and {over['sagebwd+fuse', False]} times "
        "with the [rotary embedding in the call](docs/qk-norm-rope.md#in-transformers). An 8B was not timed: "
        f"{estimates.of('8B', at).gain(estimates.OVER):.2f} compiled is "
        "[our estimate](docs/questions.md#what-do-i-gain-on-a-7b).",
        f"- **A call** with {call['heads']} heads of {call['head_dim']} and {length(at)} tokens, causal, forward and "
        f"backward, takes {call['ms']:.2f} ms on an H200, where {PEERS[call['peer']]}, the fastest in BF16, takes "
        f"{call['peer_ms']:.2f}: {call['peer_ms'] / call['ms']:.2f} times as fast ([speed](docs/results/speed.md)).",
        f"- **A mask** of causal video frames, {frames[1]} tokens and {frames[2]} heads of {frames[4]} as in Wan 2.1 "
        f"1.3B, forward and backward, runs {over_flex:.2f} times as fast as in compiled FlexAttention and "
        f"{over_best:.2f} times as fast as in the fastest other BF16 attention, on an H200 "
        "([masks](docs/masks.md#what-it-costs)).",
    ])  # fmt: skip


def memory() -> str:
    """What a call keeps and its peak."""
    calls = [(widths[0], own) for tokens in LENGTHS for widths, own in calls_of(tokens).items()]
    kept = between(over_flash_attention("kept_bytes", own) for _, own in calls)
    peak, filled = (
        between(over_flash_attention("peak_bytes", own) for width, own in calls if (width in FILLED) == which)
        for which in (False, True)
    )
    return (
        f"Under `mixed` without a mask a call of 4K to 16K tokens keeps {kept} times FlashAttention's bytes for "
        f"backward. Its peak is {peak} times as high, and {filled} times at head_dim 72, 80 and "
        "112 ([memory](docs/results/steps.md#memory))."
    )


def errors_of_smollm2() -> str:
    """Errors of SmolLM2 beside those of 16-bit attention."""
    found, weights = smollm2(), {NAMES.get(name, name): own["error"][0] for name, own in of_all_weights().items()}
    rows = []
    for name in ("full", *RECIPES):
        recipe = NAMES.get(name, name)
        of_call = " / ".join(f"{found[name][x][0]:.1%}" for x in TENSORS)
        of_weights = f"{weights[recipe]:.1%}" if recipe in weights else "not measured"
        rows.append(["16 bit (`full`)" if name == "full" else f"`{recipe}`", of_call, of_weights])
    return table(["recipe", "a call: O / dQ / dK / dV", "gradient of all weights"], rows)


def safety() -> str:
    """What was trained, and what a gap costs."""
    scratch, further = find("mixed", "QK-norm, 16K", FROM_SCRATCH), find("mixed", "1e-4", TRAINED_ON)
    gain = round(estimates.of("8B", 8192).gain(estimates.OVER), 2)
    tokens = next(tokens for name, tokens, _ in SIZES if name == "7B")
    own = [rows_of(test)[0] for test in (scratch, further)]
    return "\n".join([
        f"- **From scratch**: 35M weights with QK-norm on 39.3M tokens, 16K a step, {len(own[0].gaps)} seeds. `mixed` "
        f"ends {gap(own[0])} nats from 16 bit, within the margin of 0.02 that was written before.",
        f"- **Trained further**: SmolLM2-135M for 500 steps at a rate of 1e-4, {len(own[1].gaps)} seeds. `mixed` ends "
        f"{gap(own[1], 5)} nats from 16 bit: a gap, and within the margin of 0.001.",
        f"- **What a gap costs**: in a 7B trained on 2T tokens, {worth(gain, tokens):.4f} nats eat what a step {gain} "
        "times as fast gains ([how](docs/results/pretraining.md#what-a-gap-costs)).",
    ])  # fmt: skip


def limits() -> str:
    """Where it is not faster."""
    h200, h100 = (training_speeds(*files) for files in CARDS.values())
    packed = [own["fwd+bwd"] for (*_, sequences), own in packed_speeds().items() if sequences.endswith("x 2048")]
    return (
        "- **Short sequences.** Forward and backward, calls of 4K to 16K tokens are "
        f"{between(h200.values())} times as fast as the best BF16 kernel on an H200, and {between(h100.values())} on "
        "an H100 where FlashAttention-3 was not timed. Shorter ones gain nothing or lose: packed documents of 2K "
        f"tokens have {between(packed)} of FlashAttention-4's speed on an H200. `auto` leaves such calls to others."
    )


def gpu_tests() -> str:
    """The newest whole run of the GPU tests, the newest, and an H100's."""
    outcomes = "passed", "failed", "skipped"
    rows = []
    for what, name in (
        ("H200, 2026-11-28, until time ended", WHOLE_SUITE),
        ("H200, 2026-11-29, a newer tree, less than half of them; what failed wanted an error that is gone",
         NEWEST_SUITE),
        ("H100, 2026-11-24, an older tree; what failed times steps of other lengths", H100_SUITE),
    ):  # fmt: skip
        counts = load(BENCHMARKS / f"gpu-suite_{name}.json")["counts"]
        cells = ("not counted" if outcome not in counts and outcome != "failed" else str(counts.get(outcome, 0))
                 for outcome in outcomes)  # fmt: skip
        rows.append([what, *cells, f"`benchmarks/results/gpu-suite_{name}.json`"])
    return table(["GPU tests on", *outcomes, "file"], rows)
