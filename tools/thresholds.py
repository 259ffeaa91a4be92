"""Write the table of thresholds that comes with the package: `python -m tools.thresholds FILE...`.

Each file is of one card, whose rows of the file's kinds of mask at its widths it replaces: ``thresholds_*.json``,
which `sagebwd doctor --measure --output benchmarks/results` writes, or ``attention_*.json`` of
`python -m benchmarks attention`, of which `mixed` is compared with the faster of cuDNN and FlashAttention-2.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from sagebwd.auto import thresholds
from sagebwd.auto.thresholds import CAUSAL, FORWARD, FULL, TRAINING, Threshold, of_rows

ROOT = Path(__file__).parents[1]
TABLE = Path(thresholds.__file__).with_suffix(".json")
_DIRECTIONS = {"fwd": FORWARD, "fwd+bwd": TRAINING}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    for path in parser.parse_args().files:
        card, found = of_file(path)
        anew = {(row.kind, row.head_dim, row.value_dim) for row in found}
        others = [row for row in table.get(card, ()) if (row["kind"], row["head_dim"], row["value_dim"]) not in anew]
        table[card] = others + [row._asdict() for row in found]
        print(f"{card}: {len(found)} thresholds")
    TABLE.write_text(text_of(table), encoding="utf-8")
    print(f"wrote {TABLE.relative_to(ROOT)}")


def of_file(path: Path) -> tuple[str, list[Threshold]]:
    """The card of a results file, and what it says of it. Raises ValueError for one of another kind."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows, source = content["rows"], str(path.resolve().relative_to(ROOT))
    if path.name.startswith("attention_"):
        rows = list(_of_bench(rows))
    elif not path.name.startswith(("thresholds_", "crossings_")):
        raise ValueError(f"{path}: expected thresholds_*.json or attention_*.json")
    return content["gpu"], of_rows(rows, source)


def text_of(table: dict[str, list[dict]]) -> str:
    """The table as JSON, a line a row."""
    cards = []
    for card, rows in sorted(table.items()):
        lines = ",\n".join("  " + json.dumps(row) for row in sorted(rows, key=_place))
        cards.append(f" {json.dumps(card)}: [\n{lines}\n ]")
    return "{\n" + ",\n".join(cards) + "\n}\n"


def _place(row: dict) -> tuple[object, ...]:
    return Threshold(**row)[:5]


def _of_bench(rows: list[dict]) -> Iterator[dict]:
    """Rows of `python -m benchmarks attention` as those of `sagebwd.cli.measure`."""
    for row in rows:
        peers = [ms for ms in (row["cudnn_ms"], row["fa2_ms"]) if ms is not None]
        direction = _DIRECTIONS.get(row["direction"])
        dense = row["heads"] == row["kv_heads"] and not row.get("lengths")
        if (row["recipe"], row["gate"]) != ("mixed", "ok") or direction is None or not dense:
            continue
        yield {
            "kind": CAUSAL if row["causal"] else FULL, "head_dim": row["head_dim"],
            "value_dim": row.get("value_dim", row["head_dim"]), "tokens": row["tokens"], "direction": direction,
            "elements": row["batch"] * row["heads"] * row["tokens"] * row.get("value_dim", row["head_dim"]),
            "recipe": "mixed", "impl": "hopper/hopper", "ms": row["ms"], "torch_ms": min(peers, default=None),
        }  # fmt: skip


if __name__ == "__main__":
    main()
