"""Programs in processes of their own, as `python -c` runs them, forked from one where the longest imports are done."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import types
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
# nothing of sagebwd: a program imports it itself
IMPORTED = ("torch._dynamo", "transformers.trainer")
SECONDS = 300
PRINTED = "stdout", "stderr"


def run(code: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a folder, with one thread and no network; environment, what it has beside that of the tests."""
    server = _server()
    with tempfile.TemporaryDirectory() as printed:
        server.stdin.write(json.dumps([code, str(folder), printed, arguments, environment]) + "\n")
        server.stdin.flush()
        returncode = int(server.stdout.readline())
        stdout, stderr = ((Path(printed) / name).read_text(encoding="utf-8") for name in PRINTED)
    return subprocess.CompletedProcess(arguments, returncode, stdout, stderr)


def compiled(module: str, *arguments: str, triton: str | None = None) -> list[dict]:
    """The lines of JSON that `python -m module` prints where kernels are compiled, not interpreted as here.

    triton: the folder of another triton than the installed one, which a process of its own imports.
    """
    if triton is None:
        code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        done = run(code, SOURCES.parent, *arguments)
    else:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in [triton, *sys.path] if path)
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, cwd=SOURCES.parent
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(SOURCES), environment.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _serve() -> None:
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # a program that needs it says so
            importlib.import_module(name)
    gc.freeze()  # or every program, as it ends, looks through all that was imported here
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(*json.loads(line))
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(code: str, folder: str, printed: str, arguments: list[str], environment: dict[str, str]) -> None:
    """What is raised ends the process as it would end any."""
    signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, name in enumerate(PRINTED, 1):
        os.dup2(os.open(os.path.join(printed, name), os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv, sys.path[0] = ["-c", *arguments], ""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    _serve()
