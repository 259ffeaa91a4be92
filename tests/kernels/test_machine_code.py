"""The committed table of machine code against what the kernels compile to, with every triton that is here.

Beside the installed triton, `make` puts the one that GPUs were timed with into .venv/triton-VERSION; `make test-all`
compares with both.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from tools import machine_code  # noqa: E402 (triton may be missing)

TABLE = machine_code.read()
HERE = {triton.__version__: None} | {
    folder.name.removeprefix("triton-"): str(folder) for folder in Path(sys.prefix).glob("triton-*")
}
# the portable kernels have no other compiler to be slow under: they are compared with the installed one alone
COMPARED = [
    (version, family, call)
    for version in HERE
    if version in TABLE
    for family, calls in machine_code.calls_of(version).items()
    if family == "hopper" or version == triton.__version__
    for call in calls
]
# Calls that `make test` compares, with the installed triton: those that test_compile.py compiles there too. The
# others, and every call with another triton, are marked slow.
QUICK = {
    "hopper 64 mixed ungrouped", "hopper 128 mixed ungrouped", "89 128 token causal", "90 128 token causal",
    "89 128 paper causal",
}  # fmt: skip
assert {machine_code.name_of(call) for calls in machine_code.CALLS.values() for call in calls} >= QUICK


def _row(version: str, family: str, call: tuple):
    name = machine_code.name_of(call)
    marks = () if version == triton.__version__ and name in QUICK else pytest.mark.slow
    return pytest.param(version, family, call, id=f"{version} {name}", marks=marks)


@pytest.mark.parametrize(("version", "family", "call"), [_row(*compared) for compared in COMPARED])
def test_kernels_are_those_of_the_table(version, family, call):
    found = machine_code.facts(call, HERE[version])
    differ = machine_code.differences(found, TABLE[version][family][machine_code.name_of(call)])
    assert all(difference.allowed for difference in differ), (
        "machine code changed:\n"
        + "\n".join(difference.text for difference in differ)
        + "\nIf it was meant to: `python -m tools.machine_code --write` with each triton, commit, `sagebwd "
        "bench` of that commit on a GPU, and name the results file in the table's `timed`"
    )


@pytest.mark.parametrize(
    "call",
    [
        (90, 64, "token", "causal"), (90, 64, "paper", "bias-heads"), (80, 64, "full", "padded-causal"),
        (90, 64, "token(dp=int8)", "packed-causal"),
        pytest.param((90, 288, "token", "packed-causal"), marks=pytest.mark.slow),
    ],
    ids=machine_code.name_of,
)  # fmt: skip
@pytest.mark.parametrize("version", HERE)
def test_portable_kernels_compile_with_every_triton(version, call):
    """Regression: a function of theirs returned None in a tuple, which Triton 3.6 refuses, and 3.7 alone was tried."""
    kernels = {row["kernel"] for row in machine_code.launches((*call, 256, "ttgir"), HERE[version])}
    assert {"forward_kernel", "dq_kernel", "dkdv_kernel"} <= kernels


def test_this_triton_is_in_the_table():
    assert triton.__version__ in TABLE, f"`python -m tools.machine_code --write` adds {triton.__version__}"


SOURCES = {"hopper": ["src/sagebwd/kernels/sm90/backward", "src/sagebwd/kernels/sm90/operands"]}


def git(*arguments):
    command = ["git", "-C", str(machine_code.ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("family", TABLE["timed"])
def test_what_the_table_has_was_timed(family):
    """The commit that a results file names had this family's machine code, under the triton that ran.

    It had where its kernels' sources are those of now. Else what kernels compile to is compared, not what a call is
    named: recipes' texts follow `token`. Where that commit is older than the table, the first one that is there
    counts, if the sources had not changed.
    """
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("only a git checkout with its history knows what a commit's table was")
    results = json.loads((machine_code.ROOT / "benchmarks/results" / TABLE["timed"][family]).read_text())
    assert results["triton"] == machine_code.TIMED_VERSION
    commit, place = results["commit"], str(machine_code.TABLE.relative_to(machine_code.ROOT))
    assert git("cat-file", "-e", commit).returncode == 0, (
        f"{commit}, which {TABLE['timed'][family]} names, is not here"
    )
    if git("diff", "--quiet", commit, "--", "src/sagebwd/kernels").returncode == 0:
        return  # its kernels are those of now, whenever the table was written
    if git("cat-file", "-e", f"{commit}:{place}").returncode:
        first = git("log", "--diff-filter=A", "--format=%H", "--", place).stdout.split()[-1]
        assert git("diff", "--name-only", commit, first, "--", *SOURCES[family]).stdout == ""
        commit = first
    then = json.loads(git("show", f"{commit}:{place}").stdout)[machine_code.TIMED_VERSION][family]
    now = TABLE[machine_code.TIMED_VERSION][family]
    untimed = TABLE["untimed"].get(family, [])
    changed = [call for call in now if not any(_was_timed(now[call], old, untimed) for old in then.values())]
    assert not changed, f"{commit} was timed; since then the machine code of {changed} has changed"


def _was_timed(now, then, untimed):
    """Whether a call's kernels, but for those, are within what CI allows of those of a call that was timed."""
    kept = {name: kernel for name, kernel in now.items() if name not in untimed}
    pairs = machine_code.differences(kept, {name: then[name] for name in kept if name in then})
    return all(difference.allowed for difference in pairs)


def test_what_is_untimed_is_there():
    for family, kernels in TABLE["untimed"].items():
        here = {name for call in TABLE[machine_code.TIMED_VERSION][family].values() for name in call}
        assert set(kernels) <= here


KERNEL = {
    "registers": 128, "shared_bytes": 4096, "instructions": 3000, "spills": 5, "loops": [914, 200],
    "stored": [2, 0], "loaded": [3, 0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("fact", "value", "allowed"),
    [
        ("loops", [913, 200], True),
        ("loops", [914, 202], True),
        ("loops", [896, 200], False),
        ("loops", [932, 200], False),
        ("loops", [914], False),
        ("loops", [914, 200, 200], False),
        ("instructions", 2985, True),
        ("instructions", 3060, False),
        ("instructions", 2940, False),
        ("registers", 127, True),
        ("registers", 129, False),
        ("shared_bytes", 4080, True),
        ("shared_bytes", 4112, False),
        ("spills", 4, True),
        ("spills", 6, False),
        ("stored", [1, 0], True),
        ("stored", [2, 1], False),
        ("loaded", [0, 0], True),
        ("loaded", [2, 1], False),
    ],
)
def test_what_may_differ(fact, value, allowed):
    (difference,) = machine_code.differences({"dq_kernel": KERNEL | {fact: value}}, {"dq_kernel": KERNEL})
    assert difference == (f"dq_kernel: {fact} {KERNEL[fact]} -> {value}", allowed)
