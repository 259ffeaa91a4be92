"""What sweeps over a library's models share: a process for each case, what is a refusal by name, the page."""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path

from sagebwd.cli.outputs import check_files
from sagebwd.environment import write_whole

Row = tuple[str, str]  # a status and words
SECONDS = 150  # of the processor that a case may take

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
    given = parser.parse_args()
    try:
        check_files({"--rows": given.rows, "--table": given.table})
    except ValueError as error:
        parser.error(str(error))
    return given


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
    write_whole(path, json.dumps(rows, indent=1))
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
        f"Printed by `{command}` on {time.strftime('%Y-%m-%d')}, which says what is run: {versions}, a CPU, recipe "
        "`full` beside SDPA.", "",
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


def _work(run: Callable[[str], Row], name: str, pipe: Connection) -> None:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor: others may be at work
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        pipe.send(run(name))
    except BaseException as error:  # the parent reports it
        pipe.send(("crash", f"{type(error).__name__}: {str(error)[:120]}"))


def rows_of(names: Iterable[str], run: Callable[[str], Row], jobs: int) -> dict[str, Row]:
    """``run`` of every name, ``jobs`` at a time, printed as they come; "not built" for one that takes too long.

    Each in a process forked from this one, where the imports are done: a crash is a row.
    """
    context, rows, waiting, running = multiprocessing.get_context("fork"), {}, list(names), {}
    total = len(waiting)
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(run, name, theirs))
            process.start()
            theirs.close()
            running[name] = (process, ours)
        for name, (process, pipe) in list(running.items()):
            if pipe.poll(0.05):
                try:
                    rows[name] = pipe.recv()
                except EOFError:
                    rows[name] = ("not built", f"took more than {SECONDS} s of the processor, or died")
                process.join()
                del running[name]
                words = " ".join(rows[name][1].split())[:150]
                print(f"[{len(rows)}/{total}] {name}: {rows[name][0]}  {words}", flush=True)
        time.sleep(0.02)
    return dict(sorted(rows.items()))
