"""The command that times the host, and with Triton's own launchers that calls made again do not ask its binder."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

compile_ = pytest.importorskip("sagebwd.kernels.sm90.forward.compile")
HEADERS = Path(sysconfig.get_paths()["include"]) / "Python.h"
CODE = """
import sys
import tempfile
from pathlib import Path

from triton.backends.nvidia.driver import wrap_handle_tensordesc
from triton.runtime.jit import JITFunction

from sagebwd.kernels.host import replay
from tools import host_time

run, bound = JITFunction.run, []


def counted(self, *args, **kwargs):
    bound.append(self.__name__)
    return run(self, *args, **kwargs)


def handed_on(relaunch, owners):
    # what Triton's own launcher is handed for the same memory, and what ours is
    compiled, calls = relaunch.compiled, []
    signature, described = dict(enumerate(compiled.src.signature.values())), compiled.metadata.tensordesc_meta
    theirs = wrap_handle_tensordesc(lambda *args: calls.append(args), signature, described)
    ours = lambda *args: calls.append(args)
    whole = relaunch.run.launch, relaunch.encoded.run.launch
    relaunch.run.launch, relaunch.encoded.run.launch = theirs, ours
    relaunch.start(owners, 0)
    encoded, relaunch.encoded = relaunch.encoded, None
    relaunch.start(owners, 0)
    relaunch.encoded = encoded
    relaunch.run.launch, relaunch.encoded.run.launch = whole
    return calls


def plain(x):
    # of encoded descriptors no more than what they are
    if isinstance(x, (list, tuple)):
        return [plain(y) for y in x]
    return x if x is None or isinstance(x, (int, float, str, bytes)) else type(x).__name__


JITFunction.run = counted
recipe, repeated = sys.argv[1], int(sys.argv[2])
with tempfile.TemporaryDirectory() as folder:
    host_time.take_driver(Path(folder))
    host_time.take_runtime(Path(folder))
    times = host_time.measure(recipe, rounds=1, calls=1)
assert len(bound) == 2 * (len(set(bound)) + repeated), bound  # the first two calls
assert len(times) == 5, times
assert all(0 < time < 1e6 for time in times.values()), times
described = 0
for recording in replay._calls.values():
    for relaunch in recording.launches:
        signature = relaunch.compiled.src.signature.values() if hasattr(relaunch, "encoded") else ()
        if any(str(kind).startswith("tensordesc") for kind in signature):
            described += 1
            assert relaunch.encoded is not None
            for base in (1 << 20, 1 << 21, 1 << 20):
                ours, theirs = handed_on(relaunch, [base + 4096 * n for n in range(40)])
                assert plain(ours) == plain(theirs), (ours, theirs)
assert described
"""


@pytest.mark.skipif(not (shutil.which("cc") and HEADERS.exists()), reason="needs a C compiler and Python's headers")
@pytest.mark.parametrize(("recipe", "repeated"), [("mixed", 0)])
def test_two_calls_are_bound(recipe, repeated):
    """And later ones hand Triton's launchers what Triton's own hand them."""
    if recipe == "mixed" and compile_.unavailable():
        pytest.skip(compile_.unavailable())
    # in a process of its own, which compiles and has a GPU to all appearances
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, recipe, str(repeated)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
