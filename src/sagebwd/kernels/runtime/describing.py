"""Whether this thread notes launches for a program (`sagebwd.kernels.runtime.program`); imports no Triton."""

from __future__ import annotations

import threading

# builder: of the description under way, where there is one.
local = threading.local()


def is_described() -> bool:
    """Whether launches of this thread are noted for a program."""
    return getattr(local, "builder", None) is not None
