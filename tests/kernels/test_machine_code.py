"""The committed table of machine code against what the kernels compile to, with every triton that is here.

Beside the installed triton, `make test` puts the one that GPUs were timed with into .venv/triton-VERSION.
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
    for family in (TABLE[version] if version == triton.__version__ else ["hopper"])
    for call in machine_code.CALLS[family]
]


@pytest.mark.parametrize(
    ("version", "family", "call"), COMPARED, ids=[f"{v} {machine_code.name_of(call)}" for v, _, call in COMPARED]
)
def test_kernels_are_those_of_the_table(version, family, call):
    found = machine_code.facts(call, HERE[version])
    lines = machine_code.differences(found, TABLE[version][family][machine_code.name_of(call)])
    assert not lines, (
        "machine code changed:\n"
        + "\n".join(lines)
        + "\nIf it was meant to: `python -m tools.machine_code --write` with each triton, commit, `sagebwd "
        "bench` of that commit on a GPU, and name the results file in the table's `timed`"
    )


def test_this_triton_is_in_the_table():
    assert triton.__version__ in TABLE, f"`python -m tools.machine_code --write` adds {triton.__version__}"


SOURCES = {"hopper": ["src/sagebwd/kernels/gluon", ":(glob)src/sagebwd/kernels/*.py"]}


def git(*arguments):
    command = ["git", "-C", str(machine_code.ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("family", TABLE["timed"])
def test_what_the_table_has_was_timed(family):
    """The commit that a results file names had this family's machine code, under the triton that ran.

    What kernels compile to is compared, not what a call is named: recipes' texts follow `token`. Where that commit is
    older than the table, the first one that is there counts, if the sources had not changed.
    """
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("only a git checkout with its history knows what a commit's table was")
    results = json.loads((machine_code.ROOT / "benchmarks/results" / TABLE["timed"][family]).read_text())
    assert results["triton"] == machine_code.TIMED_VERSION
    commit, place = results["commit"], str(machine_code.TABLE.relative_to(machine_code.ROOT))
    assert git("cat-file", "-e", commit).returncode == 0, (
        f"{commit}, which {TABLE['timed'][family]} names, is not here"
    )
    if git("cat-file", "-e", f"{commit}:{place}").returncode:
        first = git("log", "--diff-filter=A", "--format=%H", "--", place).stdout.split()[-1]
        assert git("diff", "--name-only", commit, first, "--", *SOURCES[family]).stdout == ""
        commit = first
    then = json.loads(git("show", f"{commit}:{place}").stdout)[machine_code.TIMED_VERSION][family]
    now = TABLE[machine_code.TIMED_VERSION][family]
    changed = [call for call in now if now[call] not in then.values()]
    assert not changed, f"{commit} was timed; since then the machine code of {changed} has changed"


def test_a_spill_in_a_loop_is_a_difference():
    version, family, call = COMPARED[0]
    committed = TABLE[version][family][machine_code.name_of(call)]
    name = next(name for name, kernel in committed.items() if kernel["loops"])
    spilled = {**committed[name], "stored": [1 + n for n in committed[name]["stored"]]}
    (line,) = machine_code.differences(committed | {name: spilled}, committed)
    assert line.startswith(f"{name}: stored ")


def test_kernels_that_come_and_go_are_differences():
    version, family, call = COMPARED[0]
    committed = TABLE[version][family][machine_code.name_of(call)]
    (first, *_) = committed
    rest = {name: kernel for name, kernel in committed.items() if name != first}
    assert machine_code.differences(rest, committed) == [f"{first}: no longer launched"]
    assert machine_code.differences(committed, rest) == [f"{first}: not in the table"]
