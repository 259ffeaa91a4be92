"""Environment variables, as a process that imports sagebwd reads them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sagebwd import environment
from sagebwd.training.config import Data
from sagebwd.training.data import _cache_folder

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
