"""A process that imports sagebwd: what it prints, and which environment variables it reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sagebwd import environment
from sagebwd.training.config import Data
from sagebwd.training.data import _cache_folder

ROOT = Path(__file__).parent.parent


def run(*arguments, first=()):
    """What Python prints, given folders that come first on its path."""
    path = os.pathsep.join([*map(str, first), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path}
    )


def test_without_numpy_nothing_is_printed_that_torch_does_not_print(tmp_path):
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ModuleNotFoundError('No module named numpy')\n")
    torch, both = (run("-c", program, first=[tmp_path]) for program in ("import torch", "import torch, sagebwd"))
    assert (both.stdout, both.stderr) == (torch.stdout, torch.stderr)


def test_python_m_is_the_command_line():
    assert "pretrain" in run("-m", "sagebwd", "--help").stdout


PRINT = "from sagebwd.switches import current; print(current)"


def imported(**variables: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(environment.PREFIX)}
    return subprocess.run([sys.executable, "-c", PRINT], env=kept | variables, capture_output=True, text=True)


def test_switches_are_read_on_import():
    done = imported(SAGEBWD_DETERMINISTIC="1", SAGEBWD_DISABLED="0", SAGEBWD_BACKWARD_16BIT="")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "_Switches(disabled=False, backward_16bit=False, deterministic=True)\n"


def test_a_variable_that_nothing_reads_is_warned_of():
    """As SAGEBWD_CACHE, which the folder of token files once had beside SAGEBWD_CACHE_DIR."""
    done = imported(SAGEBWD_CACHE="/tmp", SAGEBWD_CACHE_DIR="/tmp")
    assert done.returncode == 0
    assert done.stderr.count("is not read by sagebwd") == 1
    assert "SAGEBWD_CACHE is not read by sagebwd; accepted: " in done.stderr


@pytest.mark.parametrize("variable", environment.FLAGS)
def test_a_flag_is_0_or_1(variable, monkeypatch):
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(variable, value)
        environment.check()
        assert environment.is_on(variable) is expected
    monkeypatch.setenv(variable, "yes")
    for refuses in (environment.check, lambda: environment.is_on(variable)):
        with pytest.raises(ValueError, match=f"{variable}='yes' is not understood; accepted: 0 and 1"):
            refuses()


def test_one_folder_for_all_that_is_kept(monkeypatch):
    monkeypatch.delenv("SAGEBWD_CACHE_DIR", raising=False)
    assert environment.cache_folder() == _cache_folder(Data()) == Path.home() / ".cache" / "sagebwd"
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", "~/elsewhere")
    assert environment.cache_folder() == _cache_folder(Data()) == Path.home() / "elsewhere"
    assert _cache_folder(Data(cache="~/given")) == Path.home() / "given"
    tune = pytest.importorskip("sagebwd.kernels.portable.tune")
    assert tune.CACHE.name == "launch.json"
