"""The command that times the host, and with Triton's own launchers that calls made again do not ask its binder."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("sagebwd.kernels.gluon")
HEADERS = Path(sysconfig.get_paths()["include"]) / "Python.h"
CODE = """
import tempfile
from pathlib import Path

from triton.runtime.jit import JITFunction

from tools import host_time

run, launched = JITFunction.run, []


def counted(self, *args, **kwargs):
    launched.append(self.__name__)
    return run(self, *args, **kwargs)


JITFunction.run = counted
with tempfile.TemporaryDirectory() as folder:
    host_time.take_driver(Path(folder))
    times = host_time.measure("token_fp8", rounds=1, calls=1)
assert len(launched) == 2 * (len(set(launched)) + 2), launched  # the first two calls; three quantise
assert len(times) == 5, times
assert all(0 < time < 1e6 for time in times.values()), times
"""


@pytest.mark.skipif(not (shutil.which("cc") and HEADERS.exists()), reason="needs a C compiler and Python's headers")
def test_two_calls_are_bound():
    # in a process of its own, which compiles and has a GPU to all appearances
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
