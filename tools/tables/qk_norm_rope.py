"""Tables of docs/qk-norm-rope.md: norm, rotary embedding and attention in one call."""

from lab.studies.study_tables import table
from tools.tables.cells import length
from tools.tables.results import PEERS, rows_of
from tools.tables.steps import of_325m


def blocks() -> str:
    """Milliseconds of one call, and of BF16 attention behind a compiled norm and rotary embedding."""
    calls: dict[tuple[int, int, int, int, str], dict[str, float]] = {}
    for name in ("block_h200_2026-11-28_614c2a6", "block_h200_2026-11-28_fa73f48"):
        for row in rows_of(name):
            if row["part"] == "block":
                call = row["head_dim"], row["heads"], row["kv_heads"], row["tokens"], row["direction"]
                calls.setdefault(call, {})[row["name"]] = row["ms"]
    rows = []
    for (head_dim, heads, kv_heads, tokens, direction), ms in sorted(calls.items()):
        best = min(ms[peer] for peer in PEERS)
        cells = (f"{ms[name]:.3f}" for name in ("sagebwd", "compiled + sagebwd", *PEERS))
        on = f"{heads}" if heads == kv_heads else f"{heads} on {kv_heads}"
        what = f"{length(tokens)}, {'forward' if direction == 'fwd' else 'both'}"
        rows.append([str(head_dim), on, what, *cells, f"{best / ms['sagebwd']:.2f}"])
    names = ["this call", "compiled, then `mixed`", *PEERS.values(), "over the best"]
    return table(["head_dim", "heads", "tokens", *names], rows)


def steps() -> str:
    """Speed of a step of the 325M model over that with the best BF16 attention, by length, fused and not."""
    names = {"mixed": "`mixed`", "mixed+fused": "`mixed`, fused"}
    found = {name: of_325m(name) for name in names}
    lengths = sorted(found["mixed"])
    rows = [[names[name], *(f"{own[tokens]['speedup']:.3f}" for tokens in lengths)] for name, own in found.items()]
    return table(["", *map(length, lengths)], rows)
