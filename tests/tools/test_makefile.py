"""What `make` says before what takes long."""

import shutil
import subprocess

import pytest

from tests.commands import ROOT


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_says_first_that_pip_installs(target, tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    steps = subprocess.run(
        ["make", "--no-print-directory", "PYTHON=true", "BIN=false", target],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert steps.stdout.startswith("first run: pip installs")
