"""Ctrl-C of a command, from its first import to its last line: one line, exit code 130, no traceback."""

import signal
import subprocess
import sys

import pytest
import torch
import typer

from sagebwd_command import command_line, run
from tests import programs
from tests.commands import ROOT

# a process that is interrupted where it first looks for a module, as by Ctrl-C then
INTERRUPTED = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests that run behind a script's commands lack
class Finder:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.path[:0] = ["src", "."]
sys.meta_path.insert(0, Finder())
sys.argv[1:] = {arguments!r}
"""
SCRIPT = "from sagebwd_command import main; main()"  # what pip writes into the script


def module_run(name):
    return f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


@pytest.mark.parametrize(
    ("name", "program", "module", "arguments"),
    [
        ("sagebwd", SCRIPT, "torch", ["--help"]),
        ("sagebwd", SCRIPT, "sagebwd.cli.terminal", ["doctor"]),
        ("lab", module_run("lab"), "typer", ["--help"]),
        ("lab", module_run("lab"), "torch", ["pretrain", "--config", "configs/demo.yaml"]),
        ("benchmarks", module_run("benchmarks"), "typer", ["--help"]),
        ("benchmarks", module_run("benchmarks"), "torch", ["attention"]),
    ],
)
def test_ctrl_c_in_an_import(name, program, module, arguments):
    """Regression: Python's traceback, in the seconds that torch's import takes."""
    code = INTERRUPTED.format(module=module, arguments=arguments) + program
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip() == f"{name}: stopped by Ctrl-C, nothing was written"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are of POSIX")
def test_ctrl_c_that_is_ignored_stays_so():
    """Regression: a job that a script's `command &` keeps from Ctrl-C was ended by it."""
    code = "import os, signal; from sagebwd_command import stop_by_ctrl_c; stop_by_ctrl_c('x')"
    code = f"import sys; sys.path.insert(0, 'src'); {code}; os.kill(os.getpid(), signal.SIGINT); print('goes on')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "goes on", "")


def test_ctrl_c_that_a_command_leaves_is_one_line(monkeypatch, capsys):
    app = command_line("A command line.")

    @app.command()
    def wait():
        raise KeyboardInterrupt

    @app.command()
    def fail():
        raise typer.Exit(3)

    for name, code, said in (("wait", 130, "stopped by Ctrl-C"), ("fail", 3, "")):
        monkeypatch.setattr(sys, "argv", ["a command", name])
        with pytest.raises(SystemExit) as stop:
            run(app, "name")
        assert (stop.value.code, capsys.readouterr().err.strip()) == (code, said)


@pytest.mark.parametrize("program", [SCRIPT, "import runpy; " + module_run("lab")])
def test_a_variable_that_is_not_understood_is_one_line(program):
    done = programs.run(program, ROOT, "trace", "--model", "x", SAGEBWD_DISABLED="yes")
    assert done.returncode == 2
    assert done.stderr.strip().endswith(": SAGEBWD_DISABLED='yes' is not understood; accepted: 0 and 1")
    assert "Traceback" not in done.stderr


def test_without_a_standard_output_a_command_runs():
    """As under `>&-`."""
    done = programs.run(f"import sys; sys.stdout = None; {SCRIPT}", ROOT, "--version")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "x: too little memory: CUDA out of memory. Tried"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "x: too little memory: DefaultCPUAllocator"),
        (MemoryError(), "x: MemoryError"),
        (PermissionError(13, "Permission denied", "a file"), "x: [Errno 13] Permission denied: 'a file'"),
    ],
)
def test_errors_that_a_person_can_mend_are_one_line(capsys, error, told):
    def command():
        raise error

    with pytest.raises(SystemExit, match="2"):
        run(command, "x")
    line = capsys.readouterr().err
    assert line.startswith(told)
    assert line.count("\n") == 1


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="size"):
        run(lambda: torch.ones(2) @ torch.ones(3), "x")
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0, "x")
