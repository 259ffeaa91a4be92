"""Tables of docs/results/speed.md: one call of attention, forward and backward, over other kernels."""

from benchmarks.shapes import value_dim_of
from lab.studies.study_tables import table
from tools.tables.cells import between, length, mask_and_length, numbers, width
from tools.tables.results import PEERS, TENSORS, rows_of

Call = tuple[int, int, bool, int]
"""head_dim, V's head_dim, causal, tokens."""

BESIDE_FA3 = (  # FlashAttention-3 is among the best: 128; 64; 256; 72, 80 and 112; 96, 192 and 192/128
    "attention_h200_2026-11-29_9ef9e0db",
    "attention_h200_2026-11-29_e01d0088_64",
    "attention_h200_2026-11-28_49cd924",
    "attention_h200_2026-11-28_214a762",
    "attention_h200_2026-11-28_9f53c6e",
)
CARDS = {  # the later file counts for a call of two
    "H200": BESIDE_FA3,
    "H100": ("attention_h100-80gb-hbm3_2026-11-27_3bed015",),
}
UNROTATED = "attention_h200_2026-11-23_0c6affd"  # `mixed` before it rotated Q and K
UNROTATED_AT_2K = "attention_h200_2026-11-23_0c6affd_2k-grouped-video"
DIRECTIONS = ("fwd", "bwd", "fwd+bwd")
LENGTHS = (4096, 8192, 16384)
OVER_256 = {
    "triton": "`token`", "flex": "FlexAttention", "efficient": "torch's memory-efficient", "math": "plain torch"
}  # fmt: skip


def speeds(*files: str) -> dict[Call, dict[str, float]]:
    """By call and direction, the speed of `mixed` over the fastest BF16 kernel's; heads of Q and K are as many."""
    found: dict[Call, dict[str, float]] = {}
    for name in files:
        for row in rows_of(name):
            if (row["impl"], row["recipe"]) == ("hopper", "mixed") and row["heads"] == row["kv_heads"]:
                call = row["head_dim"], value_dim_of(row), row["causal"], row["tokens"]
                found.setdefault(call, {})[row["direction"]] = row["peer_ms"] / row["ms"]
    return found


def training_speeds(*files: str) -> dict[Call, float]:
    """By call, the speed of forward + backward."""
    return {call: by_direction["fwd+bwd"] for call, by_direction in speeds(*files).items()}


def by_head_dim() -> str:
    """Speeds of forward / forward + backward on both cards, by head_dim, mask and length."""
    cards = {card: speeds(*files) for card, files in CARDS.items()}
    rows = []
    for causal in (True, False):
        for head_dim, value_dim in sorted({call[:2] for call in cards["H200"]}):
            calls = [(head_dim, value_dim, causal, tokens) for tokens in LENGTHS]
            timed = [found.get(call) for found in cards.values() for call in calls]
            cells = ["not timed" if own is None else numbers((own["fwd"], own["fwd+bwd"]), 2) for own in timed]
            rows.append([width(head_dim, value_dim), "causal" if causal else "none", *cells])
    return table(["head_dim", "mask", *(f"{card}, {length(tokens)}" for card in cards for tokens in LENGTHS)], rows)


def beside_flash_attention_3() -> str:
    """`mixed` over FlashAttention-3, by head_dim, mask and length."""
    ms: dict[tuple[int, int], dict[tuple[bool, int, str, str], float]] = {}
    for row in (row for name in BESIDE_FA3 for row in rows_of(name) if row["gate"] == "ok"):
        call = row["causal"], row["tokens"], row["direction"], row["impl"]
        ms.setdefault((row["head_dim"], value_dim_of(row)), {})[call] = row["ms"]
    calls = [(causal, tokens) for causal in (True, False) for tokens in LENGTHS]
    rows = []
    for widths, own in sorted(ms.items()):
        cells = []
        for call in calls:
            pairs = [(own.get((*call, way, "fa3")), own.get((*call, way, "hopper"))) for way in DIRECTIONS]
            cells.append(" / ".join("-" if fa3 is None else f"{fa3 / mixed:.2f}" for fa3, mixed in pairs))
        rows.append([width(*widths), *cells])
    return table(["head_dim", *(mask_and_length(*call) for call in calls)], rows)


def bursts() -> str:
    """Speeds over the fastest of what `sagebwd doctor --measure` timed, by kernels that run for 8 ms each."""
    found: dict[tuple[int, int], dict[tuple[bool, int], dict[str, float]]] = {}
    for name in ("timings_h200_2026-11-28_05d8c37", "timings_h200_2026-11-28_49cd924"):
        for row in rows_of(name):
            size = row["batch"] * row["heads"] * row["tokens"] * row["value_dim"]
            if row["kind"] in ("causal", "full") and row["tokens"] in (2048, 8192) and size > 1 << 24:
                times = [row["torch_ms"], *(ms for ms, _ in row["others"].values())]
                calls = found.setdefault((row["head_dim"], row["value_dim"]), {})
                by_direction = calls.setdefault((row["kind"] == "causal", row["tokens"]), {})
                by_direction[row["direction"]] = min(ms for ms in times if ms) / row["ms"]
    calls = [(causal, tokens) for causal in (True, False) for tokens in (2048, 8192)]
    rows = []
    for widths, own in sorted(found.items()):
        timed = [own.get(call) for call in calls]
        cells = ["not timed" if one is None else numbers((one["forward"], one["training"]), 2) for one in timed]
        rows.append([width(*widths), *cells])
    return table(["head_dim", *(mask_and_length(*call) for call in calls)], rows)


def behind_a_pause() -> str:
    """Speeds over the fastest others, of a call behind a pause, on a GPU that has idled."""
    found: dict[tuple[int, bool, int], dict[str, tuple[float, str]]] = {}
    for row in rows_of("attention-bursts_h200_2026-11-29_e01d0088"):
        if row["recipe"] == "mixed":
            call = row["head_dim"], row["causal"], row["tokens"]
            found.setdefault(call, {})[row["direction"]] = row["speedup"], PEERS[row["peer"]]
    rows = [
        [str(head_dim), mask_and_length(causal, tokens), numbers((own[way][0] for way in DIRECTIONS), 2),
         own["fwd+bwd"][1]]
        for (head_dim, causal, tokens), own in sorted(found.items())
    ]  # fmt: skip
    return table(["head_dim", "call", "forward / backward / both", "the best other, of both"], rows)


def energy() -> str:
    """Energy of causal calls under a steady load: millijoules, and `mixed` over the one that takes the least."""
    calls: dict[tuple[int, int, str], dict[str, dict]] = {}
    for row in rows_of("energy_h200_2026-11-29_9ef9e0db"):
        calls.setdefault((row["head_dim"], row["tokens"], row["direction"]), {})[row["impl"]] = row
    rows = []
    for (head_dim, tokens, direction), own in calls.items():
        mixed, *_ = cells = [own[name] for name in ("hopper", "fa3", "fa4", "cudnn")]
        rows.append([
            str(head_dim), length(tokens), "forward" if direction == "fwd" else "both",
            *(f"{row['joules'] * 1e3:.0f}" for row in cells), numbers((mixed["energy_over"], mixed["time_over"]), 2),
        ])  # fmt: skip
    names = "`mixed`", *(PEERS[name] for name in ("fa3", "fa4", "cudnn"))
    return table(["head_dim", "tokens", "direction", *names, "`mixed` over the best, energy / time"], rows)


def over_256() -> str:
    """Milliseconds and peak memory of heads of 512, `token` beside torch's kernels and FlexAttention."""
    calls: dict[tuple[int, int | None, int], dict[str, dict]] = {}
    for row in rows_of("attention-wide_h200_2026-11-30_68a0645a"):
        if row["direction"] == "fwd+bwd":
            calls.setdefault((row["tokens"], row["window"], row["kv_heads"]), {})[row["impl"]] = row
    rows = []
    for (tokens, window, kv_heads), own in calls.items():
        what = f"{length(tokens)}{', window' * bool(window)}{f', on {kv_heads} heads' * (kv_heads != 8)}"
        ms = [f"{own[name]['ms']:.1f}" for name in OVER_256]
        peak = numbers((own[name]["peak_bytes"] / 2**20 for name in ("triton", "flex")), 0)
        rows.append([what, *ms, f"{own['flex']['ms'] / own['triton']['ms']:.2f}", peak])
    head = ["call", *OVER_256.values(), "`token` over FlexAttention", "peak MiB of both"]
    return table(head, rows)


def lengths() -> str:
    """Speeds of forward + backward without the rotation, from 2K to 32K tokens."""
    found = training_speeds(UNROTATED_AT_2K, UNROTATED)
    tokens = (2048, 4096, 8192, 16384, 32768)
    rows = [
        [str(head_dim), "causal" if causal else "none",
         *(f"{found[head_dim, head_dim, causal, many]:.2f}" for many in tokens)]
        for head_dim in (64, 128) for causal in (True, False)
    ]  # fmt: skip
    return table(["head_dim", "mask", *map(length, tokens)], rows)


def fp8() -> str:
    """`mixed` over cuDNN's FP8, and the errors of each."""
    found: dict[tuple[int, bool], dict[str, dict[str, dict]]] = {}
    for row in rows_of("attention_h200_2026-11-26_b6e3431_cudnn-fp8"):
        kernels = found.setdefault((row["tokens"], row["causal"]), {})
        kernels.setdefault(row["impl"], {})[row["direction"]] = row
    rows = []
    for (tokens, causal), kernels in found.items():
        mixed, *peers = (kernels[name] for name in ("hopper", "cudnn-fp8", "cudnn-fp8-e4m3"))
        over = [numbers((peer[way]["ms"] / mixed[way]["ms"] for way in DIRECTIONS), 2) for peer in peers]
        errors = [numbers((own["fwd"]["errors"][x] for x in TENSORS), 3) for own in (mixed, *peers)]
        rows.append([f"{length(tokens)}{', causal' * causal}", *over, *errors])
    names = ["e5m2", "e4m3"]
    return table(["tokens", *(f"over {name}" for name in names), "errors of `mixed`: O / dQ / dK / dV", *names], rows)


def masks() -> str:
    """`mixed` over FlexAttention and FlashAttention-4 under block masks."""
    rows = []
    for name in ("masks_h200_2026-11-25_7133de8", "masks_h200_2026-11-25_7133de8_gpt-oss"):
        own = [row for row in rows_of(name) if row["attention"] == "mixed"]
        found = {(row["head_dim"], row["mask"], row["direction"]): row["over"] for row in own}
        for mask, shown in {row["mask"]: row["shown"] for row in own}.items():
            cells = []
            for head_dim in (128, 64):
                for peer in ("flex", "fa4"):
                    over = [found.get((head_dim, mask, way), {}).get(peer) for way in ("fwd", "fwd+bwd")]
                    cells.append("-" if None in over else numbers(over, 2))
            rows.append([f"{mask}, {length(own[0]['tokens'])}", f"{shown:.1%}", *cells])
    peers = [f"{head_dim}: over {peer}" for head_dim in (128, 64) for peer in ("FlexAttention", "FlashAttention-4")]
    return table(["mask", "pairs shown", *peers], rows)


PACKED = "packed_h200_2026-11-29_e01d0088", "packed_h200_2026-11-29_9ef9e0db"
"""Files of `python -m benchmarks attention --packed`."""


def packed_speeds() -> dict[tuple[str, str, str], dict[str, float]]:
    """By head_dim, heads and sequences of a packed call: speed of `mixed` over FlashAttention-4, by direction."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in (row for name in PACKED for row in rows_of(name)):
        if (row["impl"], row["recipe"]) == ("hopper", "mixed"):
            tokens, kv = row["lengths"], f" on {row['kv_heads']}" * (row["kv_heads"] != row["heads"])
            equal = len(set(tokens)) == 1
            sequences = f"{len(tokens)} x {tokens[0]}" if equal else f"{len(tokens)} of {min(tokens)} to {max(tokens)}"
            call = str(row["head_dim"]), f"{row['heads']}{kv}", sequences
            found.setdefault(call, {})[row["direction"]] = row["peer_ms"] / row["ms"]
    return found


def packed() -> str:
    """`mixed` over FlashAttention-4 on packed sequences."""
    rows = [[*call, numbers((own[way] for way in DIRECTIONS), 2)] for call, own in packed_speeds().items()]
    return table(["head_dim", "heads", "sequences", "forward / backward / both"], rows)


def auto() -> str:
    """Calls of `auto` beside torch's own."""
    rows = []
    for card, name in (
        ("H100", "auto_h100-80gb-hbm3_2026-11-27_3bed015"),
        ("H100, another machine", "auto_h100-80gb-hbm3_2026-11-27_29638e6"),
        ("H200", "auto_h200_2026-11-26_3f70cad"),
    ):
        cells = []
        for recipe in ("mixed", "full"):
            own = [row["torch_ms"] / row["ms"] for row in rows_of(name) if row["ran"].startswith(recipe)]
            cells += [str(len(own)), between(own)]
        rows.append([card, *cells])
    head = ["card", "calls that ran `mixed`", "their speed over torch's", "calls handed to torch", "their speed"]
    return table(head, rows)
