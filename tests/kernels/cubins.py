"""Machine code of kernels of CUDA C++, which the tests of one run share."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from unittest import mock

from sagebwd.kernels.runtime import nvrtc
from tests import shared
from tools.cross_compile import BINARIES


def cubin(source: nvrtc.Source, capability: int, folder: Path) -> Path:
    """A kernel's machine code as a file in a test's folder; kept for other tests as calls keep it."""
    path = folder / f"{source.name}.cubin"
    with mock.patch.dict(os.environ, SAGEBWD_CACHE_DIR=str(shared.folder() or folder)):
        path.write_bytes(nvrtc.machine_code(source, capability))
    return path


def stack_bytes(source: nvrtc.Source, capability: int, folder: Path) -> int:
    """A thread's local memory, where registers that do not fit go."""
    command = [BINARIES / "cuobjdump", "--dump-resource-usage", cubin(source, capability, folder)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"\bSTACK:(\d+)", text)[1])
