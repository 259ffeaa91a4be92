"""What README says in numbers, from the files of other pages' tables."""

from lab.studies.study_tables import table
from lab.training.token_cost import worth
from tools.tables import gains as estimates
from tools.tables.accuracy import NAMES, of_all_weights, smollm2
from tools.tables.cells import between, length
from tools.tables.masks import newest, speeds
from tools.tables.pretraining import FROM_SCRATCH, SIZES, TRAINED_ON, find, gap, rows_of
from tools.tables.results import BENCHMARKS, PEERS, RECIPES, TENSORS, load
from tools.tables.results import rows_of as rows_of_file
from tools.tables.speed import CARDS, LENGTHS, packed_speeds, training_speeds
from tools.tables.steps import OF_MODELS, calls_of, over_flash_attention

H200_SUITE, H100_SUITE = "h200_2026-11-30_5771030e", "h100_2026-11-24_b1f1da0"
"""Records of the GPU tests."""
FILLED = (72, 80, 112)
"""head_dims that run in the kernels of 96 and 128, filled up."""


def steps_of(model: str, tokens: int = 8192) -> dict[tuple[str, bool], dict]:
    """Rows of `python -m benchmarks step` of a model, by attention and whether it was compiled."""
    every = (row for name in OF_MODELS for row in rows_of_file(name))
    rows = (row for row in every if (row["model"], row["asked_tokens"]) == (model, tokens))
    return {(row["attention"], row["compiled"]): row for row in rows}


def gains() -> str:
    """A step, a call and a mask."""
    at = 8192
    fused, theirs = "sagebwd+fuse", "flash_attention_4"
    steps, large = steps_of("llama-1b-128"), steps_of("llama-8b")
    over, of_large = (
        {place: f"{row['over_best']:.2f}" for place, row in rows.items() if row["attention"] in ("sagebwd", fused)}
        for rows in (steps, large)
    )
    longer, gemma, wan = steps_of("llama-1b-128", 32768), steps_of("gemma3-4b"), steps_of("wan-1.3b", 32768)
    one, own, other = large[fused, True], steps[fused, True], steps[theirs, True]
    saved, copies = other["ms"] - own["ms"], other["parts"]["copies"] - own["parts"]["copies"]
    over_sdpa = steps["sdpa", True]["ms"] / own["ms"]
    call, alone = (
        next(row for row in rows_of_file(CARDS["H200"][0])
             if (row["recipe"], row["direction"], row["causal"], row["tokens"]) == ("mixed", direction, True, at))
        for direction in ("fwd+bwd", "fwd")
    )  # fmt: skip
    masks = speeds(newest())
    frames = next(mask for mask in masks if mask[0] == "causal-frames")
    over_flex, over_best = masks[frames][False, "fwd+bwd"]
    return "\n".join([
        f"- **A step** of a 1.1B Llama with head_dim 128, at {length(at)} tokens a sequence on one H200, is "
        f"{over[fused, True]} times as fast as with FlashAttention-4 under `torch.compile` and {over[fused, False]} "
        "times uncompiled ([times](docs/steps.md#time-a-model): steps of 32K tokens, medians of three rounds). "
        "Both have the rotary embedding [inside attention's kernels](docs/qk-norm-rope.md#in-transformers), the "
        f"default of Llama and Qwen3 with `use_cache=False`; outside it is {over['sagebwd', True]} and "
        f"{over['sagebwd', False]}. About {copies:.0f} of the {saved:.0f} ms saved are copies that "
        "FlashAttention-4's graph breaks cause. FlashAttention-3 was not timed in a step.",
        f"- **An 8B**, by {one['layers']} of Llama 3 8B's {one['whole_layers']} layers, measured alike: "
        f"{of_large[fused, True]} times as fast as with FlashAttention-4 compiled and {of_large[fused, False]} "
        f"uncompiled; with the rotary embedding outside {of_large['sagebwd', True]} and {of_large['sagebwd', False]}. "
        "Gradient checkpointing, communication and FP8 linears are not in it "
        "([other sizes](docs/questions.md#what-do-i-gain-on-a-7b)).",
        "- **More attention in a step**: the 1.1B's at 32K tokens, by 4 of its 16 layers, is "
        f"{longer[fused, True]['over_best']:.2f} times as fast as with FlashAttention-4 compiled and "
        f"{longer[fused, False]['over_best']:.2f} uncompiled. "
        f"Wan 2.1 1.3B under a teacher-forcing mask of {wan['sagebwd', True]['tokens']} tokens, by 4 of 30 layers, "
        f"is {wan['sagebwd', True]['over_best']:.2f} and {wan['sagebwd', False]['over_best']:.2f} times as fast as "
        f"with FlexAttention. Gemma 3 4B, uncompiled, by 6 of 34 layers, {gemma[fused, False]['over_best']:.2f} "
        "over FlashAttention-4, with norm and rotary embedding inside ([times](docs/steps.md#time-a-model)).",
        f"- **Over Transformers' compiled `sdpa`** that 1.1B's step is {over_sdpa:.2f} times as fast, mostly "
        "because compiled `sdpa` [reads a mask of tokens x "
        "tokens](docs/steps.md#what-sdpa-loses-in-a-compiled-model). Two lines mend that for plain causal batches, "
        "without low precision.",
        f"- **A call** with {call['heads']} heads of {call['head_dim']}, {length(at)} tokens and a batch of "
        f"{call['batch']}, causal, forward and backward, takes {call['ms']:.2f} ms on an H200, where "
        f"{PEERS[call['peer']]}, the fastest in BF16, takes {call['peer_ms']:.2f}: "
        f"{call['peer_ms'] / call['ms']:.2f} times as fast, its forward alone {alone['peer_ms'] / alone['ms']:.2f} "
        "([speed](docs/results/speed.md)).",
        f"- **A call under a mask** of causal video frames, {frames[1]} tokens and {frames[2]} heads of {frames[4]} "
        f"as in Wan 2.1 1.3B, forward and backward, the `BlockMask` passed as it is, is {over_flex:.2f} times as "
        f"fast as in compiled FlexAttention and {over_best:.2f} times as fast as in the fastest other BF16 "
        "attention, on an H200 ([masks](docs/masks.md#what-it-costs)).",
    ])  # fmt: skip


def memory() -> str:
    """What a call keeps and its peak, and the peak of a step."""
    calls = [(widths[0], own) for widths, own in calls_of(4096).items()]
    kept = between(over_flash_attention("kept_bytes", own) for _, own in calls)
    peak, filled = (
        between(over_flash_attention("peak_bytes", own) for width, own in calls if (width in FILLED) == which)
        for which in (False, True)
    )
    ours, theirs = (
        steps_of("llama-1b-128")[name, True]["peak_bytes"] for name in ("sagebwd+fuse", "flash_attention_4")
    )
    return (
        "**Memory** of a call of `mixed` without a mask, at 4K tokens on an H200: between forward and backward "
        f"it keeps {kept} times the bytes that FlashAttention keeps. While it runs, its peak is {peak} times "
        f"FlashAttention's, and {filled} times at head_dim 72, 80 and 112 ([memory](docs/results/steps.md#memory)). "
        "The peak of the 1.1B's compiled step is "
        f"{ours / theirs:.2f} times its peak with FlashAttention-4."
    )


def errors_of_smollm2() -> str:
    """Errors of SmolLM2 beside those of 16-bit attention."""
    found, weights = smollm2(), {NAMES.get(name, name): own["error"][0] for name, own in of_all_weights().items()}
    rows = []
    for name in ("full", *RECIPES):
        recipe = NAMES.get(name, name)
        of_call = " / ".join(f"{found[name][x][0]:.1%}" for x in TENSORS)
        of_weights = f"{weights[recipe]:.1%}" if recipe in weights else "not measured"
        label = {"full": "16 bit (`full`)", "token": "`token(first_keys=1)`, an older form of `token`"}
        rows.append([label.get(name, f"`{recipe}`"), of_call, of_weights])
    return table(["recipe", "a call: O / dQ / dK / dV", "gradient of all weights"], rows)


def safety() -> str:
    """What was trained, and what a gap costs."""
    scratch, further = find("mixed", "QK-norm, 16K", FROM_SCRATCH), find("mixed", "1e-4", TRAINED_ON)
    gain = round(estimates.of("8B", 8192).gain(estimates.OVER), 2)
    tokens = next(tokens for name, tokens, _ in SIZES if name == "7B")
    own = [rows_of(test)[0] for test in (scratch, further)]
    return "\n".join([
        "- **From scratch**: 35M weights with QK-norm, heads of 64, 4K tokens a sequence, 39.3M tokens, 16K a step, "
        f"{len(own[0].gaps)} seeds. `mixed` "
        f"ends {gap(own[0])} nats from 16 bit, within the margin of 0.02 that was set before the runs.",
        "- **Trained further**: SmolLM2-135M, heads of 64, for 500 steps of 8K tokens at a learning rate of 1e-4, "
        f"{len(own[1].gaps)} seeds. `mixed` ends {gap(own[1], 5)} nats from 16 bit: slightly worse, by less than "
        "the margin of 0.001.",
        f"- **What a gap costs**: for a 7B on 2T tokens a gap of {worth(gain, tokens):.4f} nats cancels a step "
        f"{gain} times as fast, by a published scaling law ([how](docs/results/pretraining.md#what-a-gap-costs)). "
        "The test from scratch cannot see so small a gap.",
    ])  # fmt: skip


def limits() -> str:
    """Where it is not faster."""
    h200, h100 = (
        [speed for (*_, tokens), speed in training_speeds(*files).items() if tokens in LENGTHS]
        for files in CARDS.values()
    )
    packed: dict[str, list[float]] = {}
    for (*_, sequences), own in packed_speeds().items():
        lengths = "2K" if sequences.endswith("x 2048") else "short" if int(sequences.split()[-1]) < 2048 else "many"
        packed.setdefault(lengths, []).append(own["fwd+bwd"])
    return (
        "- **Short sequences.** Below 4K tokens causal calls of attention alone gain nothing or lose. Packed "
        f"documents of 2K tokens run at {between(packed['2K'])} of FlashAttention-4's speed on an H200, forward and "
        f"backward; packs of documents of many lengths, to 8K, run at {between(packed['many'])}, and of conversations "
        f"of 50 to 2000 tokens at {between(packed['short'])}. Calls of 4K to 16K "
        f"tokens, causal or without a mask, forward and backward, are {between(h200)} times as fast as the "
        "best BF16 kernel on an H200 that is kept busy, by head_dim and length. On an H100, where FlashAttention-3 "
        f"was not timed, they are {between(h100)} times as fast. In [short "
        "bursts](docs/results/speed.md#short-bursts) on an idle GPU causal calls of 2K tokens lose, and most of 8K "
        "gain little. `auto` gives calls without a gain to 16-bit attention. What SDPA cannot compute "
        "(`block_mask`, `sinks`, `return_lse`) runs on sagebwd's kernels at every length."
    )


def gpu_tests() -> str:
    """The newest whole run of the GPU tests, and an H100's."""
    outcomes = "passed", "failed", "skipped"
    rows = []
    for what, name in (
        ("H200, 2026-11-30, every test", H200_SUITE),
        ("H100, 2026-11-24, an older commit; the one that failed times steps of different lengths", H100_SUITE),
    ):  # fmt: skip
        counts = load(BENCHMARKS / f"gpu-suite_{name}.json")["counts"]
        cells = ("not counted" if outcome not in counts and outcome != "failed" else str(counts.get(outcome, 0))
                 for outcome in outcomes)  # fmt: skip
        rows.append([what, *cells, f"`benchmarks/results/gpu-suite_{name}.json`"])
    return table(["GPU tests on", *outcomes, "file"], rows)
