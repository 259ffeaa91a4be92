"""memcheck, racecheck and synccheck of Hopper's kernels: `python -m tools.sanitize` (make sanitize-gpu).

Of each form of widths, fuzz cases of some groups of seeds, which share their kernels, run under compute-sanitizer,
each in a process of its own, and nothing but this package's kernels is checked. Exit code 1 where memcheck or
synccheck finds anything, racecheck anything that is not triton's own hand-over, or a case fails.

Triton hands partitions their number and the values that they use through shared memory, ordered by barriers of the
whole CTA, and racecheck reports that in kernels that also have barriers of a warpgroup; not in the kernel of
`tools.handover`, which has nothing else. A report counts as hand-over where all its accesses are at a kernel's
`def` or its `gl.warp_specialize`; docs/log/2026-11-22-correctness.md has the proof from machine code.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from sagebwd.kernels.sm90 import widths
from tools.fuzz import GROUP, Case

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "src/sagebwd/kernels"
HANDOVER = ROOT / "tools/handover.py"
_ACCESS = re.compile(r"(?:Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\S+\.py):(\d+)")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed")


@dataclass(frozen=True)
class Check:
    """One process: a tool and a fuzz case, or the kernel of `tools.handover`."""

    tool: str
    recipe: str | None
    seed: int = 0
    deterministic: bool = False

    def __str__(self) -> str:
        if self.recipe is None:
            return f"{self.tool}, hand-over alone"
        return f"{self.tool}, {self.recipe}{' deterministic' if self.deterministic else ''}, seed {self.seed}"

    def command(self, longest: int, kernels: Sequence[str]) -> list[str]:
        """The command line of the process."""
        filters = [part for name in kernels for part in ("--kernel-name", f"kns={name}")]
        run = ["-m", "tools.handover"]
        if self.recipe is not None:
            run = ["-m", "tools.fuzz", "--first", str(self.seed), "--cases", "1", "--longest", str(longest)]
            run += ["--impl", "hopper", "--recipe", self.recipe, "--processes", "1"]
        sanitizer = ["compute-sanitizer", "--tool", self.tool, "--target-processes", "all", "--print-limit", "2000"]
        return [*sanitizer, *filters, sys.executable, *run]


@dataclass(frozen=True)
class Finding:
    """What a check's output amounts to: how many reports are triton's hand-over, and what is wrong, if anything."""

    handovers: int
    problem: str | None


def kernel_names() -> list[str]:
    """Parts of the names of the package's kernels, and of the one that does nothing but hand over."""
    sources = [*KERNELS.rglob("*.py"), HANDOVER]
    names = {name for path in sources for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)}
    return sorted(names | {"sagebwdkernelssm90"})  # CuTe names a kernel by its module


def handover_lines(path: Path) -> set[int]:
    """Lines of a file at which triton's hand-over is reported: of the kernels with partitions, `def` and the call."""
    lines: set[int] = set()
    for kernel in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(kernel, ast.FunctionDef):
            continue
        calls = [one for one in kernel.body if "warp_specialize" in ast.dump(one)]
        if calls:
            lines.add(kernel.lineno)
        for call in calls:
            lines.update(range(call.lineno, call.end_lineno + 1))
    return lines


def races(text: str) -> Iterator[list[tuple[str, str, int]]]:
    """(kernel, file, line) of the accesses of each report of racecheck."""
    for report in text.split("Race reported between")[1:]:
        yield [(kernel, file, int(line)) for kernel, file, line in _ACCESS.findall(report)]


def judge(text: str, code: int, allowed: dict[str, set[int]]) -> Finding:
    """What a process printed. allowed: lines of hand-over, by file name."""
    found = _SUMMARY.search(text)
    if found is None:
        return Finding(0, f"no summary, exit code {code}: {text.strip()[-300:]}")
    handovers, others = 0, []
    for accesses in races(text):
        if len(accesses) > 1 and all(line in allowed.get(file, ()) for _, file, line in accesses):
            handovers += 1
        else:
            others.append(", ".join(f"{kernel} {file}:{line}" for kernel, file, line in accesses) or "no source line")
    reported = int(found[1] or found[2] or 0)
    if others:
        return Finding(handovers, f"{len(others)} races: {'; '.join(others)}")
    if reported > handovers:
        return Finding(handovers, f"{reported - handovers} errors: {text.strip()[:600]}")
    if code:
        return Finding(handovers, f"exit code {code}: {text.strip()[-300:]}")
    return Finding(handovers, None)


def seeds_of(form: tuple[int, int], groups: int, longest: int) -> list[int]:
    """The first seed but one of so many groups whose calls run at a form."""
    found, seed = [], 1
    while len(found) < groups:
        case = Case.drawn(seed, longest, "mixed", "hopper")
        if widths.of_call(case.head_dim, case.value_dim) == form:
            found.append(seed)
        seed += GROUP
    return found


def checks(seeds: Sequence[int], few: Sequence[int]) -> list[Check]:
    """All tools: on hand-over alone, ``mixed`` at all seeds, and in deterministic mode at a few."""
    found = []
    for tool in ("racecheck", "memcheck", "synccheck"):
        found += [Check(tool, None), *(Check(tool, "mixed", seed) for seed in seeds)]
        found += [Check(tool, "mixed", seed, deterministic=True) for seed in few]
    return found


def run(check: Check, command: Sequence[str], timeout: float, allowed: dict[str, set[int]]) -> Finding:
    """Run one check; compiled kernels are shared with the others."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment["SAGEBWD_DETERMINISTIC"] = str(int(check.deterministic))
    try:
        finished = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
            errors="replace", timeout=timeout,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding(0, f"not done after {timeout:.0f} s; --timeout gives it more")
    return judge(finished.stdout + finished.stderr, finished.returncode, allowed)


def main() -> int:
    """Run the checks; exit code 1 where any found something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4, help="groups of fuzz seeds a form of widths, a case of each")
    parser.add_argument("--recipe", help="the checks of this recipe alone")
    parser.add_argument("--longest", type=int, default=300, help="longest sequence, in tokens")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one check may take")
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    by_form = [seeds_of(form, arguments.groups, arguments.longest) for form in widths.FORMS]
    wanted, kernels = checks([*itertools.chain(*by_form)], [seeds[0] for seeds in by_form]), kernel_names()
    if arguments.recipe:
        known = sorted({check.recipe for check in wanted if check.recipe})
        if arguments.recipe not in known:
            parser.error(f"--recipe {arguments.recipe}: checks are of {', '.join(known)}")
        wanted = [check for check in wanted if check.recipe == arguments.recipe]
    allowed = {path.name: handover_lines(path) for path in (*(KERNELS / "sm90/backward").glob("*.py"), HANDOVER)}
    problems, handovers = 0, 0
    with ThreadPoolExecutor(arguments.processes) as pool:
        tasks = {
            pool.submit(run, check, check.command(arguments.longest, kernels), arguments.timeout, allowed): check
            for check in wanted
        }
        for done, task in enumerate(as_completed(tasks), 1):
            finding = task.result()
            problems += finding.problem is not None
            handovers += finding.handovers
            note = f" ({finding.handovers} reports of triton's hand-over)" if finding.handovers else ""
            print(f"{done}/{len(tasks)} {tasks[task]}: {finding.problem or 'clean'}{note}", flush=True)
    print(f"{len(wanted) - problems} clean, {problems} not; {handovers} reports of triton's hand-over to partitions")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
