"""What sweeps over another library's models say: whether an error is a refusal by name, and the page of their rows."""

from __future__ import annotations

import argparse
import collections
import json
import re
import traceback
from pathlib import Path

from tools.forked import Row

NEAR = 1e-3  # relative error, where nothing but rounding differs


class NotRun(Exception):
    """Nothing can be compared; says why."""


def arguments(description: str, models: str, library: str) -> argparse.Namespace:
    """A sweep's command line; models, what they are named by."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"{models}; all by default")
    parser.add_argument("--tests", type=Path, help=f"a checkout of {library}, whose tests' tiny models run too")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rows", type=Path, help="a JSON file of rows: other models' are kept")
    parser.add_argument("--table", type=Path, help="a file to write the page to")
    return parser.parse_args()


def judged(error: Exception) -> Row:
    """Whether an error is a refusal by name: one that sagebwd raises, of the kinds that say what is accepted."""
    text = str(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, (NotImplementedError, ValueError, TypeError)) and "/sagebwd/" in where.filename:
        return "refused", text
    return "crash", f"{type(error).__name__}: {text[:120]} ({Path(where.filename).name}:{where.lineno})"


def kept(path: Path | None, found: dict[str, Row]) -> dict[str, Row]:
    """What was found, with the rows of other models that a JSON file has, where one is given; it keeps them all."""
    if path is None:
        return found
    known = json.loads(path.read_text()) if path.exists() else {}
    rows = dict(sorted({**known, **found}.items()))
    path.write_text(json.dumps(rows, indent=1))
    return rows


def failed(rows: dict[str, Row]) -> int:
    """Print how many rows there are of each status; 1 where a row is different or a crash, else 0."""
    count = collections.Counter(status for status, _ in rows.values())
    print(dict(count))
    return int(bool(count["different"] or count["crash"]))


def reason(words: str) -> str:
    """A refusal's or an error's own words, without what differs from model to model."""
    words = " ".join(words.split()).replace("|", "/")
    words = re.sub(r" \(same: .*\)$", "", words)
    if missing := re.search(r"requires the (\w+) library|No module named '(\w+)'", words):
        return f"needs {missing[1] or missing[2]}"
    words = re.sub(r"\(\d+(, \d+)*\)", "(...)", re.sub(r"^\w+ computes its", "the model computes its", words))
    if "packed documents: " in words:
        return "the model's attention mask: " + words.split("packed documents: ")[1].split(";")[0]
    if re.match(r"(\w+Error|NotRun): ", words):  # not one of ours
        return words.removeprefix("NotRun: ")
    return re.split(r"[,;]? (?:and cannot run|which is|is|which has|\bnot) (?:under|not|supported|causal)", words)[0]


def table(title: str, command: str, versions: str, rows: dict[str, Row], meanings: dict[str, str]) -> str:
    """The page of the documentation: rows by status, in the order of what each status means."""
    count = collections.Counter(status for status, _ in rows.values())
    lines = [
        f"# {title}", "",
        f"Printed by `{command}`, which says what is run: {versions}, a CPU, recipe `full` beside SDPA.", "",
        f"{len(rows)} models: " + ", ".join(f"{n} {status}" for status, n in count.most_common()) + ".", "",
    ]  # fmt: skip
    for status, meaning in meanings.items():
        chosen = {name: words for name, (kind, words) in rows.items() if kind == status}
        if not chosen:
            continue
        lines += [f"## {status[0].upper()}{status[1:]} ({len(chosen)})", "", *([meaning, ""] if meaning else [])]
        if not any(reason(words) for words in chosen.values()) or status.startswith("same"):
            lines += [", ".join(f"`{name}`" for name in chosen) + ".", ""]
            continue
        grouped = collections.defaultdict(list)
        for name, words in chosen.items():
            grouped[reason(words)].append(f"`{name}`")
        lines += ["| why | models |", "| --- | --- |"]
        lines += [f"| {why} | {', '.join(names)} |" for why, names in sorted(grouped.items())] + [""]
    return "\n".join(lines)
