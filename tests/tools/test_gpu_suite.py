"""The suite of a GPU: what it runs and records, and which code a result is of."""

import json
from pathlib import Path

import pytest

from tools import gpu_suite
from tools.tree import digest

ROOT = Path(__file__).parents[2]
NO_STAGES = ["--matrix", "none", "--sequences", "0"]
PASSED, FAILED = ({"outcome": outcome} for outcome in ("passed", "failed"))


def test_tests_that_need_the_gpu_alone_exist():
    for name in (*gpu_suite.ALONE, *gpu_suite.LEFT_OUT):
        path, _, start = name.partition("::")
        assert f"def {start}" in (ROOT / path).read_text()


def test_what_passed_is_left_out_and_no_test_runs_twice():
    beside, alone = "tests/kernels/test_fp8.py::test_x[1]", f"{gpu_suite.ALONE[0]}test_y"
    for test, which, other in ((beside, "beside", "alone"), (alone, "alone", "beside")):
        assert gpu_suite.wanted(test, which, {})
        assert not gpu_suite.wanted(test, other, {})
        assert gpu_suite.wanted(test, which, {test: FAILED})
        assert not gpu_suite.wanted(test, which, {test: PASSED})
        assert gpu_suite.wanted(test, which, {test + "z": PASSED})


def test_the_second_run_is_left_out_where_no_test_is_alone():
    for test in ("tests", "tests/test_floors.py", "tests/stories", "tests/test_floors.py::test_x[1]"):
        assert gpu_suite.has_alone([test])
        assert gpu_suite.has_alone(["tests/kernels", test])
    assert gpu_suite.has_alone([])
    assert not gpu_suite.has_alone(["tests/kernels", "tests/test_float8.py"])


def test_the_last_outcome_with_this_code_counts(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    lines = [("a", "x", "passed"), ("b", "x", "failed"), ("b", "y", "passed"), ("b", "x", "passed")]
    path.write_text("".join(json.dumps({"code": k, "test": t, "outcome": outcome}) + "\n" for k, t, outcome in lines))
    assert {test: line["outcome"] for test, line in gpu_suite.read(path, "b").items()} == {
        "x": "passed",
        "y": "passed",
    }
    assert gpu_suite.read(tmp_path / "none", "b") == {}


TESTS = """
import pytest

@pytest.mark.gpu
def test_passes(): pass

@pytest.mark.gpu
def test_fails(): assert 1 + 1 == 3, "not so"

@pytest.mark.gpu
@pytest.mark.skip(reason="needs two GPUs")
def test_skips(): pass

def test_of_a_cpu(): assert False
"""


@pytest.mark.parametrize("processes", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_the_command_records_failures_and_goes_on(tmp_path, processes, capfd):
    (tmp_path / "test_few.py").write_text(TESTS)
    arguments = [str(tmp_path / "test_few.py"), "--device", "cpu", *NO_STAGES, "--processes", processes]
    arguments += ["--results", str(tmp_path / "results"), "--output", str(tmp_path / "outcomes.jsonl")]
    assert gpu_suite.main([*arguments, "--commit", "abc", "--kernels-hash", "123"]) == 1
    (path,) = (tmp_path / "results").glob("gpu-suite_cpu_*_abc.json")
    written = json.loads(path.read_text())
    assert (written["kernels"], written["left"]) == ("123", False)
    assert written["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    (failure,) = written["rows"]
    assert failure["test"].endswith("test_few.py::test_fails")
    assert failure["message"].startswith("AssertionError: not so")
    capfd.readouterr()
    (tmp_path / "test_few.py").write_text(TESTS.replace("== 3", "== 2").replace("pass\n", "assert False\n", 1))
    assert gpu_suite.main([*arguments, "--commit", "abc", "--kernels-hash", "123"]) == 0
    assert "{'passed': 2, 'skipped': 1}" in capfd.readouterr().out


def test_a_command_out_of_time_has_something_left(tmp_path):
    arguments = ["--device", "cpu", *NO_STAGES, "--seconds", "0", "--commit", "abc", "--kernels-hash", "1"]
    paths = ["--results", str(tmp_path), "--output", str(tmp_path / "outcomes.jsonl")]
    assert gpu_suite.main([*arguments, *paths]) == 3


def ran(steps, differ=0, failed="", status=None):
    """A stand-in for a process of call_sequences, which counts how often it ran; steps: None, it wrote no record."""

    def wait(command, until, **_):
        wait.count += 1
        path, asked = (command[command.index(name) + 1] for name in ("--output", "--steps"))
        if steps is not None:
            record = {"asked": int(asked), "steps": steps, "differ": differ, "differences": ["x"] * differ}
            Path(path).write_text(json.dumps(record | {"failed": failed}))
        return status

    wait.count = 0
    return wait


def test_sequences_that_are_done_are_not_run_again(tmp_path, monkeypatch):
    output = tmp_path / "outcomes.jsonl"

    def found(wait, code="a", steps=50):
        monkeypatch.setattr(gpu_suite, "_wait", wait)
        return gpu_suite.run_sequences(steps, "cpu", output, code, float("inf")), wait.count

    part, count = found(ran(20))
    assert (part["left"], part["steps"], count) == (True, 20, 1)
    whole, count = found(ran(50))
    assert (whole["left"], whole["differ"], count) == (False, 0, 1)
    assert found(ran(0)) == (whole, 0)
    assert found(ran(50), code="b")[1] == found(ran(60), code="b", steps=60)[1] == 1
    wrong, _ = found(ran(50, differ=2), code="c")
    assert (wrong["differ"], wrong["differences"], found(ran(50), code="c")[1]) == (2, ["x", "x"], 1)


@pytest.mark.parametrize(
    ("wait", "code", "message"),
    [
        (ran(6, status=0), 0, None),
        (ran(6, differ=2, status=1), 1, "2 of 6 steps differ"),
        (ran(3, differ=1, failed="hangs", status=1), 1, "1 of 3 steps differ; hangs"),
        (ran(None, status=-9), 1, "0 of 0 steps differ; ended with status -9"),
        (ran(3, status=3), 3, None),
        (ran(None), 3, None),
    ],
)
def test_the_record_has_the_sequences(tmp_path, monkeypatch, wait, code, message):
    monkeypatch.setattr(gpu_suite, "run_tests", lambda *_: 0)
    monkeypatch.setattr(gpu_suite, "_wait", wait)
    arguments = ["--device", "cpu", "--matrix", "none", "--sequences", "6", "--commit", "abc", "--kernels-hash", "1"]
    paths = ["--results", str(tmp_path), "--output", str(tmp_path / "outcomes.jsonl")]
    assert gpu_suite.main([*arguments, *paths]) == code
    (path,) = tmp_path.glob("gpu-suite_cpu_*_abc.json")
    written = json.loads(path.read_text())
    assert (written["sequences"]["asked"], written["left"]) == (6, code == 3)
    assert [row["message"] for row in written["rows"]] == ([] if message is None else [message])


def test_what_is_in_a_file_and_its_name_count(tmp_path):
    (tmp_path / "src").mkdir()
    file = tmp_path / "src" / "a.py"
    file.write_text("x = 1")
    first = digest("src", root=tmp_path)
    assert digest("src", root=tmp_path) == first
    (tmp_path / "src" / "notes.md").write_text("of no weight")
    assert digest("src", root=tmp_path) == first
    file.write_text("x = 2")
    second = digest("src", root=tmp_path)
    file.rename(tmp_path / "src" / "b.py")
    assert len({first, second, digest("src", root=tmp_path)}) == 3


def test_of_the_repository():
    assert digest("src") != digest("src", "tools/matrix") != digest("tools/matrix")
