"""The environment variables that sagebwd reads: four that are on or off, a folder and a commit.

- SAGEBWD_DISABLED, SAGEBWD_BACKWARD_16BIT, SAGEBWD_DETERMINISTIC: see `sagebwd.switches`; read once, on import.
- SAGEBWD_AUTOTUNE: Triton's kernels time a few launches on this GPU and keep the best.
- SAGEBWD_CACHE_DIR: the folder of token files, tuned launches and compiled kernels; ~/.cache/sagebwd without it.
- SAGEBWD_COMMIT: the commit that training runs record, where the code runs outside its git checkout.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

PREFIX = "SAGEBWD_"
FLAGS = ("SAGEBWD_DISABLED", "SAGEBWD_BACKWARD_16BIT", "SAGEBWD_DETERMINISTIC", "SAGEBWD_AUTOTUNE")
CACHE_DIR, COMMIT = "SAGEBWD_CACHE_DIR", "SAGEBWD_COMMIT"


def is_on(variable: str) -> bool:
    """Whether one of `FLAGS` is 1; 0, nothing or no variable is off. Raises ValueError for any other value."""
    value = os.environ.get(variable, "0")
    if value not in ("0", "1", ""):
        raise ValueError(f"{variable}={value!r} is not understood; accepted: 0 and 1")
    return value == "1"


def cache_folder() -> Path:
    """Where token files, tuned launches and compiled kernels are kept."""
    return Path(os.environ.get(CACHE_DIR) or "~/.cache/sagebwd").expanduser()


def check() -> None:
    """Raises ValueError for a value that is not understood; warns of variables of our prefix that nothing reads."""
    for variable in FLAGS:
        is_on(variable)
    known = (*FLAGS, CACHE_DIR, COMMIT)
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable not in known:
            warnings.warn(f"{variable} is not read by sagebwd; accepted: {', '.join(known)}", stacklevel=2)
