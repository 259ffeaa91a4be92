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
