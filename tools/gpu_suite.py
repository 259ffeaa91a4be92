"""Every test of a GPU and the matrix, run and recorded: `python -m tools.gpu_suite` (make gpu-suite).

Tests marked gpu run in several pytest processes, spread over the machine's GPUs, those of `ALONE` after them one by
one, then `tools.call_sequences`, and then `tools.matrix`. What came of each test is kept in runs/gpu_suite.jsonl as
it comes, and what came of the sequences beside it: after ``--seconds``, or a stop, the same command goes on, and
leaves out what passed with the same code. The record is
benchmarks/results/gpu-suite_<gpu>_<date>_<commit>.json, with the hash of the tree src/sagebwd/kernels.

Exit code 1 where anything failed, 3 where something is left. pytest loads this file too, as a plugin.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from lab.training.gpus import visible_gpus
from sagebwd.cli.hardware import check_device, command_output
from sagebwd.cli.results import environment, save
from sagebwd.environment import write_whole
from tools.tree import digest

KERNELS = "src/sagebwd/kernels"
# Tests that need most of the GPU's memory, or that time.
ALONE = (
    "tests/test_floors.py::",
    "tests/lab/training/test_gpus.py::",
    "tests/stories/test_kernels.py::test_story_7_",
    "tests/stories/test_kernels.py::test_story_8_steps_",
)
# The matrix runs by itself.
LEFT_OUT = ("tests/tools/test_matrix.py::",)
# pytest's exit codes: all passed, some failed, none to run; and None, out of time.
FINE = (0, 1, 5, None)
SAID_EVERY = 10
# Seconds that `tools.call_sequences` takes for its last round, and to write the record.
LAST_ROUND = 20
SLOWEST = 20
# By which a pytest process learns what it is to run: "alone" or "beside"; the file of outcomes; the code they are of.
WHICH, FILE, CODE = "GPU_SUITE_WHICH", "GPU_SUITE_FILE", "GPU_SUITE_CODE"


def read(path: Path, code: str) -> dict[str, dict]:
    """The last outcome of each test with this code."""
    if not path.exists():
        return {}
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["test"]: line for line in lines if line["code"] == code}


def wanted(test: str, which: str, known: dict[str, dict]) -> bool:
    """Whether a test is one of those that are to run now."""
    if test.startswith(LEFT_OUT) or known.get(test, {}).get("outcome") == "passed":
        return False
    return test.startswith(ALONE) == (which == "alone")


def has_alone(tests: list[str]) -> bool:
    """Whether some of ``tests``, of all where none is named, may be of `ALONE`."""
    return not tests or any(
        f"{test}::".startswith(alone) or alone.startswith(test) for test in tests for alone in ALONE
    )


def pytest_configure() -> None:
    """Of a pytest process beside others: each sees one GPU, and they are spread over all of the machine."""
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER", "")[2:], visible_gpus()
    if worker and gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker) % len(gpus)]  # nothing has started CUDA here


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a pytest process: leave out what is not to run now."""
    known = read(Path(os.environ[FILE]), os.environ[CODE])
    kept = {item for item in items if wanted(item.nodeid, os.environ[WHICH], known)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_runtest_teardown() -> None:
    """After each test its memory is the other processes' again."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what came of a test: of the call, or of what failed or skipped before or after it."""
    if report.when == "call" or not report.passed:
        _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be read is a failure."""
    if report.failed:
        _note(report)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that started this one notes it
        return
    line = {"code": os.environ[CODE], "test": report.nodeid, "outcome": report.outcome}
    line["seconds"] = round(getattr(report, "duration", 0.0), 1)
    if not report.passed:
        line["message"] = last_line(report)
    with Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def last_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The line of a failure that says what it is, or the reason of a skip."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[0 if crash is not None else -1][:300] if lines else ""


def run_tests(which: str, workers: int, tests: list[str], path: Path, code: str, until: float) -> int | None:
    """pytest's exit code; None where time ran out."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "tools.gpu_suite", "-q", *tests]
    if workers:
        command += ["-n", str(workers), "--dist", "worksteal"]
    variables = {WHICH: which, FILE: str(path), CODE: code, "OMP_NUM_THREADS": "2"}
    log = path.with_suffix(f".{which}.log")
    with log.open("w", encoding="utf-8") as file:
        status = _wait(command, until, lambda: _said(which, path, code), stdout=file, stderr=file, env=variables)
    if status not in FINE:  # 5: none is left
        print("\n".join(log.read_text(encoding="utf-8").splitlines()[-30:]))
    return status


def _said(which: str, path: Path, code: str) -> str:
    counts = Counter(line["outcome"] for line in read(path, code).values())
    return f"tests, {which}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))


def _wait(command: list[str], until: float, say=None, env: dict[str, str] | None = None, **pipes) -> int | None:
    """The exit code of a command, None if it had to be ended; ``say()`` is printed now and then."""
    if time.monotonic() >= until:
        return None
    # what a pytest that this runs under says of itself is not of those that it starts
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    process = subprocess.Popen(command, env=own | (env or {}), start_new_session=True, **pipes)
    began = time.monotonic()
    try:
        while True:
            left = until - time.monotonic()
            try:
                return process.wait(max(0.0, min(SAID_EVERY, left)))
            except subprocess.TimeoutExpired:
                if left <= 0:
                    return None
                if say is not None:
                    print(f"{say()}, {time.monotonic() - began:.0f} s", flush=True)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its own group: pytest's workers too
            process.wait()


def run_sequences(steps: int, device: str, output: Path, code: str, until: float) -> dict[str, object]:
    """The record of `tools.call_sequences`, and whether steps are left; the one of a whole run of this code stands."""
    path = output.with_suffix(".sequences.json")
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if known.get("code") == code and known["asked"] == known["steps"] == steps and not known["differ"]:
        return known
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tools.call_sequences", "--steps", str(steps), "--device", device]
    command += ["--output", str(path)]
    seconds = until - time.monotonic()
    if seconds < float("inf"):
        command += ["--seconds", str(max(1.0, seconds - LAST_ROUND))]
    status = _wait(command, until)
    found = {"asked": steps, "steps": 0, "differ": 0, "differences": [], "failed": "", "code": code}
    if path.exists():
        found |= json.loads(path.read_text(encoding="utf-8"))
    elif status is not None:
        found["failed"] = f"ended with status {status}"
    found["left"] = found["steps"] < steps and not found["failed"]
    write_whole(path, json.dumps(found))
    return found


def run_matrix(size: str, commit: str | None, until: float) -> dict[str, object]:
    """Counts of the rows, whether some are left, and those that are wrong. "short" writes no results of its own."""
    from tools.matrix.__main__ import code as code_of_rows
    from tools.matrix.__main__ import read as read_rows

    output = Path(f"runs/gpu_suite_matrix_{size}.jsonl")
    command = [sys.executable, "-m", "tools.matrix", "--resume", "--output", str(output)]
    command += {"short": ["--short", "--no-results"], "cover": [], "every": ["--every"]}[size]
    command += ["--commit", commit] if commit else []
    seconds = until - time.monotonic()
    if seconds < float("inf"):
        command += ["--seconds", str(max(1.0, seconds - 30))]
    status = _wait(command, until)
    rows = list(read_rows(output, code_of_rows()).values())
    counts = Counter(str(row["status"]) for row in rows)
    wrong = [row for row in rows if row["status"] in ("wrong", "crashed")]
    return {"size": size, "counts": dict(counts), "left": status not in (0, 1), "wrong": wrong}


def main(arguments: list[str] | None = None) -> int:
    """Run what is not done yet, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files or node ids; all, unless named")
    parser.add_argument("--matrix", choices=["short", "cover", "every", "none"], default="short")
    parser.add_argument("--sequences", type=int, default=2000, help="steps of tools.call_sequences; 0 leaves them out")
    parser.add_argument("--processes", type=int, default=8, help="of pytest side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so long")
    parser.add_argument("--commit", help="to record outside a git checkout")
    parser.add_argument("--kernels-hash", help="of the tree of kernels, outside a git checkout")
    parser.add_argument("--device", default="cuda", help="cpu tries the command out: its tests then skip")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_suite.jsonl"), help="outcomes as they come")
    given = parser.parse_args(arguments)
    check_device(given.device)
    until = time.monotonic() + given.seconds
    facts = environment(given.device, given.commit)
    kernels = given.kernels_hash or command_output("git", "rev-parse", f"HEAD:{KERNELS}")
    if kernels is None:
        parser.error(f"--kernels-hash: there is no git here; give what `git rev-parse HEAD:{KERNELS}` prints")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    code = digest("src", "tests", "tools")
    statuses = [
        run_tests(which, workers, given.tests, given.output, code, until)
        for which, workers in (("beside", given.processes), ("alone", 0))
        if which == "beside" or has_alone(given.tests)
    ]
    sequences = None
    if given.sequences:
        sequences = run_sequences(given.sequences, given.device, given.output, code, until)
    matrix = None
    if given.matrix != "none":
        matrix = run_matrix(given.matrix, given.commit, until)
    known = list(read(given.output, code).values())
    failures = [{name: line[name] for name in ("test", "message")} for line in known if line["outcome"] == "failed"]
    failures += [
        {"test": "pytest", "message": f"ended with status {status}"} for status in statuses if status not in FINE
    ]
    slowest = sorted(known, key=lambda line: -line["seconds"])[:SLOWEST]
    if sequences is not None and (sequences["differ"] or sequences["failed"]):
        message = f"{sequences['differ']} of {sequences['steps']} steps differ; {sequences['failed']}"
        failures.append({"test": "tools.call_sequences", "message": message.rstrip("; ")})
    left = None in statuses or any(stage is not None and stage["left"] for stage in (sequences, matrix))
    facts |= {
        "kernels": kernels,
        "counts": dict(Counter(line["outcome"] for line in known)),
        "left": left,
        "slowest": [{name: line[name] for name in ("test", "seconds")} for line in slowest],
        "sequences": sequences,
        "matrix": matrix,
    }
    for failure in failures:
        print(f"failed: {failure['test']}: {failure['message']}")
    walked = sequences and f"{sequences['steps']} steps, {sequences['differ']} differ"
    print(f"tests: {facts['counts']}; sequences: {walked}", end="; ")
    print(f"matrix: {matrix and matrix['counts']}{'; something is left' if left else ''}")
    print(f"wrote {save(failures, facts, given.results, 'gpu-suite')}")
    if failures or (matrix is not None and matrix["wrong"]):
        return 1
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
