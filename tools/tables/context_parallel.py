"""The table of docs/integrations/context_parallel.md: one sequence over two GPUs."""

from lab.studies.study_tables import table
from tools.tables.cells import length
from tools.tables.results import rows_of


def ring() -> str:
    """Milliseconds of forward + backward of ring attention, `mixed` and torch's."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows_of("ring_2-processes_h200_2026-11-26_093eef2"):
        found.setdefault((row["head_dim"], row["tokens"]), {})[row["attention"]] = row["ms"]["both"]
    rows = []
    for (head_dim, tokens), ms in found.items():
        fa4, cudnn = (
            min(value for name, value in ms.items() if name.startswith(f"torch {kernel}"))
            for kernel in ("fa4", "cudnn")
        )
        mixed = ms["sagebwd mixed"]
        cells = [f"{value:.1f}" for value in (ms["one process, mixed"], mixed, fa4, cudnn)]
        rows.append([f"{head_dim}, {length(tokens)}", *cells, f"{mixed / min(fa4, cudnn):.2f}"])
    head = ["head_dim, tokens", "`mixed` on one GPU", "`mixed` on two", "torch, FlashAttention-4", "torch, cuDNN"]
    return table([*head, "`mixed` over the best of torch's"], rows)
