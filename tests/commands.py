"""Commands as a person runs them: in a process of their own, or in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[1]


def started(module, *arguments, **environment):
    """The outcome of ``python -m module``, on a machine without a GPU."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)], capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment,
    )  # fmt: skip


def forked(module, *arguments):
    """The same, of a process that need not import torch again."""
    code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return programs.run(code, ROOT, *map(str, arguments), CUDA_VISIBLE_DEVICES="")


def without(package, program, *arguments):
    """The outcome of a program where a package cannot be imported."""
    code = f"import sys; sys.modules[{package!r}] = None; {program}"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
    )  # fmt: skip


def runner(main, monkeypatch, capsys):
    """A function that runs a command in this process: exit code, stdout and stderr on one line each."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["a command", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return stop.value.code, " ".join(out.split()), " ".join(err.split())

    return run
