"""The command that times the host, and with Triton's own launchers that a call asks its binder once a launch."""

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
import copy
import sys
import tempfile
from pathlib import Path

from triton.backends.nvidia.driver import wrap_handle_tensordesc
from triton.runtime.jit import JITFunction

from sagebwd.cache import PLANS
from sagebwd.kernels.runtime import launchers
from tools import host_time

run, bound = JITFunction.run, []


def counted(self, *args, **kwargs):
    bound.append(self.__name__)
    return run(self, *args, **kwargs)


def handed_on(launcher, addresses):
    # what Triton's own launcher is handed for the same memory, what ours is, and what that is under a profiler's hooks
    compiled, calls = launcher.compiled, []
    signature, described = dict(enumerate(compiled.src.signature.values())), compiled.metadata.tensordesc_meta
    theirs = wrap_handle_tensordesc(lambda *args: calls.append(args), signature, described)
    ours = lambda *args: calls.append(args)
    launch, launcher.run.launch = launcher.run.launch, ours
    launcher.start(addresses, [], 0)
    launcher.run.launch = launch
    run, whole = compiled.run, copy.copy(compiled.run)
    whole.launch = theirs
    filled = launcher.filled(addresses)
    whole(*launcher.grid[:3], 0, compiled.function, compiled.packed_metadata, None, None, None, *filled)
    is_hooked, launchers._is_hooked, compiled._run = launchers._is_hooked, lambda: True, whole
    launcher.start(addresses, [], 0)
    launchers._is_hooked, compiled._run = is_hooked, run
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
    times = host_time.measure(recipe, rounds=1, ms=0.001)
assert len(bound) == len(set(bound)) + repeated, bound
assert len(times) == 3, times
assert all(0 < time < 1e6 for time in times.values()), times
described = 0
programs = [program for plan in PLANS.values() for program in plan.programs.values()]
for program in programs:
    for launcher in program.launches:
        signature = launcher.compiled.src.signature.values() if isinstance(launcher, launchers.TritonLauncher) else ()
        if any(str(kind).startswith("tensordesc") for kind in signature):
            described += 1
            assert launcher.run is not launcher.compiled.run, "it encodes"
            for base in (1 << 20, 1 << 21, 1 << 20):
                ours, theirs, hooked = handed_on(launcher, [base + 4096 * n for n in range(40)])
                assert plain(ours) == plain(theirs), (ours, theirs)
                assert plain(hooked[-1]) == plain(theirs[-1]), (hooked, theirs)
assert described
"""


@pytest.mark.skipif(not (shutil.which("cc") and HEADERS.exists()), reason="needs a C compiler and Python's headers")
@pytest.mark.parametrize(("recipe", "repeated"), [("mixed", 0)])
def test_a_description_is_bound(recipe, repeated):
    """And calls hand Triton's launchers what Triton's own hand them."""
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
