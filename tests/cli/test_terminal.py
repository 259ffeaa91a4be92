"""What commands print while they run, and how processes that they start meet Ctrl-C."""

import os
import signal
import subprocess
import sys
import time

import pytest
import typer

from sagebwd.cli.processes import run_in_processes
from sagebwd.cli.terminal import Progress, interruptible
from tests.commands import ROOT


def test_progress_estimates_what_is_left():
    shown, now = [], [0.0]
    tell = Progress(shown.append, clock=lambda: now[0])
    tell("first")
    now[0] = 30.0
    tell("second", 0.25)
    now[0] = 9000.0
    tell("third", 0.5)
    assert shown == ["0 s: first", "30 s, about 90 s left: second", "2.5 h, about 2.5 h left: third"]


def test_progress_in_a_log_keeps_its_lines_apart():
    shown, now = [], [0.0]
    tell = Progress(shown.append, every=1.0, clock=lambda: now[0])
    for now[0] in (0.0, 0.5, 1.5, 2.0):
        tell(f"at {now[0]}")
    assert shown == ["0 s: at 0.0", "2 s: at 1.5"]


@pytest.mark.parametrize(("rank", "said"), [("0", "stopped: all of it"), ("1", "")])
def test_the_first_process_alone_says_what_is_kept(monkeypatch, capsys, rank, said):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(typer.Exit) as stop, interruptible(lambda: "all of it"):
        raise KeyboardInterrupt
    assert stop.value.exit_code == 130
    assert capsys.readouterr().err.strip() == said


def test_calls_in_processes_say_what_they_raised():
    outcomes = dict(run_in_processes(divmod, [(7, 2), (1, 0)], 2))
    assert outcomes[0] is None
    assert isinstance(outcomes[1], ZeroDivisionError)


PROGRAM = """
import time
from sagebwd.cli.processes import run_in_processes
from sagebwd.cli.terminal import interruptible
import typer

if __name__ == "__main__":
    try:
        with interruptible("nothing"):
            for index, error in run_in_processes(time.sleep, [(0,), (600,)], 2):
                print(index, error, flush=True)
    except typer.Exit as stop:
        raise SystemExit(stop.exit_code)
"""


def test_ctrl_c_ends_processes_that_compile_and_shows_no_traceback(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout.readline() == "0 None\n"
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of them
    _, stderr = process.communicate(timeout=120)
    assert time.monotonic() - began < 100
    assert process.returncode == 130
    assert stderr.strip() == "stopped: nothing"
