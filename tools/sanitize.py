"""memcheck, racecheck and synccheck of Hopper's kernels: `python -m tools.sanitize` (make sanitize-gpu).

Of each form of widths, fuzz cases of some groups of seeds, which share their kernels, run under compute-sanitizer,
each in a process of its own, and nothing but this package's kernels is checked. Exit code 1 where memcheck or
synccheck finds anything, racecheck anything that is not triton's own hand-over, or a case fails.

Triton hands partitions their number and the values that they use through shared memory, ordered by barriers of the
whole CTA, and racecheck reports that in kernels that also have barriers of a warpgroup; not in the kernel of
`tools.handover`, which has nothing else. A report counts as hand-over where all its accesses are at a kernel's
`def` or its `gl.warp_specialize`; dev/log/2026-11-22-correctness.md has the proof from machine code.

The forward's computing warps read what the loading warp wrote of masks into a stage, and then one elected lane gives
the stage back. ptxas drops the warp's barrier before that, since the warp is together and its reads have come back,
and racecheck counts the reads of the elected lane alone. A report counts as that where the loading warp's write of a
stage's masks meets reads of it; dev/log/2026-11-25-sanitizers.md has the machine code.
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
from typing import NamedTuple

from sagebwd.environment import cache_folder
from sagebwd.kernels.sm90 import widths
from tools.fuzz import GROUP, Case

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "src/sagebwd/kernels"
HANDOVER = ROOT / "tools/handover.py"
# What the forward's kernels have in their names: CuTe names a kernel by its module.
CUTE = "sagebwdkernelssm90"
TOOLS = ("racecheck", "memcheck", "synccheck")
FORWARD = KERNELS / "sm90/forward"
# What the forward's stages hold of masks, as the kernel's source reads or writes it.
_STAGED = re.compile(r"\bmemory\.(?:block|mask_tiles)\[|\bkeys_kept\[")
_ACCESS = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\S+\.py):(\d+)")
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
    """What a check's output amounts to: how many reports are no race, and what is wrong, if anything."""

    explained: int
    problem: str | None


@dataclass(frozen=True)
class Lines:
    """Where accesses are reported that are no race, by file name: triton's hand-over, and the forward's stages' masks.

    Files of forward and backward have names in common, so a kernel counts as one of either.
    """

    handover: dict[str, set[int]]
    staged: dict[str, set[int]]

    @classmethod
    def of_package(cls) -> Lines:
        """Those of the package's kernels."""
        gluon = (*(KERNELS / "sm90/backward").glob("*.py"), HANDOVER)
        forward = FORWARD.glob("*.py")
        return cls(
            {path.name: handover_lines(path) for path in gluon}, {path.name: staged_lines(path) for path in forward}
        )

    def explain(self, accesses: Sequence[Access]) -> bool:
        """Whether a report is no race."""
        if len(accesses) < 2:
            return False
        of_forward = all(CUTE in one.kernel for one in accesses)
        known = self.staged if of_forward else self.handover
        if any(one.line not in known.get(one.file, ()) for one in accesses):
            return False
        if not of_forward:
            return True
        # the loading warp writes, the others read
        return {(one.kind, one.file == "producer.py") for one in accesses} == {("Write", True), ("Read", False)}


class Access(NamedTuple):
    """One end of a race that racecheck reports."""

    kind: str
    kernel: str
    file: str
    line: int


def kernel_names() -> list[str]:
    """Parts of the names of the package's kernels, and of the one that does nothing but hand over."""
    sources = [*KERNELS.rglob("*.py"), HANDOVER]
    names = {name for path in sources for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)}
    return sorted(names | {CUTE})


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


def staged_lines(path: Path) -> set[int]:
    """Lines of a file of the forward that read or write what its stages hold of masks."""
    return {
        number for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if _STAGED.search(line)
    }


def races(text: str) -> Iterator[list[Access]]:
    """The accesses of each report of racecheck."""
    for report in text.split("Race reported between")[1:]:
        yield [
            Access(kind, kernel, Path(file).name, int(line)) for kind, kernel, file, line in _ACCESS.findall(report)
        ]


def judge(text: str, code: int, lines: Lines) -> Finding:
    """What a process printed."""
    found = _SUMMARY.search(text)
    if found is None:
        return Finding(0, f"no summary, exit code {code}: {text.strip()[-300:]}")
    explained, others = 0, []
    for accesses in races(text):
        if lines.explain(accesses):
            explained += 1
        else:
            ends = (f"{one.kind} {one.kernel} {one.file}:{one.line}" for one in accesses)
            others.append(", ".join(ends) or "no source line")
    reported = int(found[1] or found[2] or 0)
    if others:
        return Finding(explained, f"{len(others)} races: {'; '.join(others)}")
    if reported > explained:
        return Finding(explained, f"{reported - explained} errors: {text.strip()[:600]}")
    if code:
        return Finding(explained, f"exit code {code}: {text.strip()[-300:]}")
    return Finding(explained, None)


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
    for tool in TOOLS:
        found += [Check(tool, None), *(Check(tool, "mixed", seed) for seed in seeds)]
        found += [Check(tool, "mixed", seed, deterministic=True) for seed in few]
    return found


def run(check: Check, command: Sequence[str], timeout: float, lines: Lines) -> Finding:
    """Run one check; kernels are compiled with their source lines, once for all."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment["SAGEBWD_DETERMINISTIC"] = str(int(check.deterministic))
    environment["CUTE_DSL_LINEINFO"] = "1"
    environment["SAGEBWD_CACHE_DIR"] = str(cache_folder() / "lineinfo")
    try:
        finished = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
            errors="replace", timeout=timeout,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding(0, f"not done after {timeout:.0f} s; --timeout gives it more")
    return judge(finished.stdout + finished.stderr, finished.returncode, lines)


def main() -> int:
    """Run the checks; exit code 1 where any found something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4, help="groups of fuzz seeds a form of widths, a case of each")
    parser.add_argument("--recipe", help="the checks of this recipe alone")
    parser.add_argument("--tool", choices=TOOLS, help="this tool alone")
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
    wanted = [check for check in wanted if arguments.tool in (None, check.tool)]
    lines, problems, explained = Lines.of_package(), 0, 0
    with ThreadPoolExecutor(arguments.processes) as pool:
        tasks = {
            pool.submit(run, check, check.command(arguments.longest, kernels), arguments.timeout, lines): check
            for check in wanted
        }
        for done, task in enumerate(as_completed(tasks), 1):
            finding = task.result()
            problems += finding.problem is not None
            explained += finding.explained
            note = f" ({finding.explained} reports that are no race)" if finding.explained else ""
            print(f"{done}/{len(tasks)} {tasks[task]}: {finding.problem or 'clean'}{note}", flush=True)
    print(f"{len(wanted) - problems} clean, {problems} not; {explained} reports of hand-overs that are no race")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
