"""Tables of docs/support.md, from docs/support.json, which `python -m tools.support` writes."""

from lab.studies.study_tables import table
from tools.tables.cells import numbers
from tools.tables.results import BENCHMARKS, ROOT, load

FILE = ROOT / "docs" / "support.json"
REFERENCE = "reference"


def _cell(cells: dict[str, str]) -> str:
    """What runs by default, and what else may be named."""
    default = cells["default"]
    if default in ("declined", REFERENCE):
        return default if default == "declined" else "`reference`, native"
    forward, _, backward = default.partition(" / ")
    validated = not cells[forward].startswith("not validated")
    text = f"`{forward}`" + (f", its backward served by `{backward}`" if backward else "")
    text += ", native" * (validated and not backward) + ", not validated" * (not validated)
    others = [impl for impl, status in cells.items()
              if impl not in ("default", REFERENCE, forward) and status != "declined"]  # fmt: skip
    return text + (f"; by name {' or '.join(f'`{impl}`' for impl in others)}" if others else "")


def recipes() -> str:
    """By recipe and head_dims that are alike, and by cards that are alike."""
    content = load(FILE)
    cards: dict[str, list[str]] = {}
    for card, examples in content["cards"].items():
        column = str([by_card[card] for by_card in content["recipes"].values()])
        cards.setdefault(column, []).append(f"{card} ({examples})" if examples != "CPU" else "a CPU")
    first = [names[0].partition(" (")[0] for names in cards.values()]
    first = ["no GPU" if name == "a CPU" else name for name in first]
    rows: dict[tuple, list[str]] = {}
    for form, by_card in content["recipes"].items():
        recipe, _, head_dim = form.partition(", head_dim ")
        cells = tuple(_cell(by_card[card]) for card in first)
        rows.setdefault((recipe, cells), []).append(head_dim)
    head = ["recipe", "head_dim", *(", ".join(names) for names in cards.values())]
    return table(head, [[f"`{recipe}`", ", ".join(dims), *cells] for (recipe, cells), dims in rows.items()])


def forms() -> str:
    """Forms of a call on an H200."""
    found = load(FILE)["forms"]

    def shown(status: str) -> str:
        return status if status.startswith(("served", "declined")) else f"`{status}`, native"

    rows = [[form, *(shown(status) for status in cells.values())] for form, cells in found.items()]
    return table(["a call with", "`auto`", "`mixed`", "`token`"], rows)


def owners() -> str:
    """A row a file of `sagebwd doctor --measure --report`, which owners of other cards sent."""
    rows = []
    for path in sorted(BENCHMARKS.glob("report_*.json")):
        content = load(path)
        passed = [row["error"] is not None and row["error"] < 0.03 for row in content["self_tests"]]
        cells = []
        for head_dim in (64, 128):
            found = {}
            for row in content["rows"]:
                dims = row["head_dim"], row["value_dim"]
                if (row["kind"], row["tokens"], *dims) == ("causal", 8192, head_dim, head_dim) and row["ms"]:
                    full = [row["torch_ms"], *(ms for ms, _ in row["others"].values())]
                    found[row["direction"]] = min(ms for ms in full if ms) / row["ms"]
            cells.append(numbers(found.values(), 2) or "not timed")
        versions = f"torch {content['torch']}, triton {content['triton']}, sagebwd {content['sagebwd']}"
        tests = f"{sum(passed)} of {len(passed)}"
        rows.append([content["gpu"], content["capability"], content["date"], versions, tests, *cells])
    if not rows:
        return "No owner has sent a file yet."
    over = (f"causal, 8K, head_dim {head_dim}: forward / both over full precision" for head_dim in (64, 128))
    return table(["card", "capability", "date", "versions", "self-tests passed", *over], rows)
