"""The environment variables that sagebwd reads.

- SAGEBWD_DISABLED, SAGEBWD_BACKWARD_16BIT, SAGEBWD_DETERMINISTIC: see `sagebwd.switches`; read once, on import.
- SAGEBWD_AUTOTUNE: Triton's kernels time a few launches on this GPU and keep the best.
- SAGEBWD_CACHE_DIR: the folder of token files, tuned launches and compiled kernels, ~/.cache/sagebwd without it.
- SAGEBWD_COMMIT: the commit that training runs record, where the code runs outside its git checkout.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import secrets
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

PREFIX = "SAGEBWD_"
FLAGS = ("SAGEBWD_DISABLED", "SAGEBWD_BACKWARD_16BIT", "SAGEBWD_DETERMINISTIC", "SAGEBWD_AUTOTUNE")
CACHE_DIR, COMMIT = "SAGEBWD_CACHE_DIR", "SAGEBWD_COMMIT"
# Folders that were warned of.
_unwritable: set[Path] = set()


def is_on(variable: str) -> bool:
    """Whether one of `FLAGS` is 1; 0, nothing or no variable is off. Raises ValueError for any other value."""
    value = os.environ.get(variable, "0")
    if value not in ("0", "1", ""):
        raise ValueError(f"{variable}={value!r} is not understood; accepted: 0 and 1")
    return value == "1"


def cache_folder() -> Path:
    """Where token files, tuned launches and compiled kernels are kept; it need not be there, nor be writable."""
    given = Path(os.environ.get(CACHE_DIR) or "~/.cache/sagebwd")
    try:
        return given.expanduser()
    except RuntimeError as error:  # the user has no home, as in containers under a number that no name belongs to
        warn_of_unwritable(given, error)
        return folder_of_process(os.getpid())


def make(folder: Path) -> None:
    """Make a folder where it is missing. Raises OSError where it cannot be made, or cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder):
        return


def writable(folder: Path, variable: str = CACHE_DIR) -> Path:
    """A folder, made where it was missing; with a warning, one of this process where it cannot be written.

    variable: by which its user names another.
    """
    try:
        make(folder)
    except OSError as error:
        warn_of_unwritable(folder, error, variable)
        return folder_of_process(os.getpid())
    return folder


@cache
def folder_of_process(process: int) -> Path:
    """A folder that is removed when this process ends; those forked from it have others."""
    folder = Path(tempfile.mkdtemp(prefix="sagebwd-"))
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == process else None)
    return folder


def warn_of_unwritable(folder: Path, error: Exception, variable: str = CACHE_DIR) -> None:
    """Warn, once a folder, that what belongs there is kept for this process alone."""
    if folder in _unwritable:
        return
    _unwritable.add(folder)
    logging.getLogger("sagebwd").warning(
        f"sagebwd: {folder} cannot be written ({type(error).__name__}: {error}): what is compiled or tuned is kept "
        f"for this process alone, and every process takes the time anew; set {variable} to one that can be written"
    )


def write_whole(path: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file, text in UTF-8, so that readers find the old one or the new one, however many write it at once.

    Args: content, or what writes it to a path that it is given. A link is followed, and what is no file, as a pipe or
    /dev/stdout, is written to. Who may read and write the old one may the new one.

    Raises OSError, which names the file, where it cannot be written; nothing of it is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    is_special = path.exists() and not path.is_file()  # /dev/stdout may be a link to a pipe, which has no path
    target = path if is_special else Path(os.path.realpath(path))
    temporary = target if is_special else target.with_name(f".sagebwd-{secrets.token_hex(8)}")
    try:
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not is_special:
            temporary.touch()  # with the mode that files of this user have
            mode = (target if target.exists() else temporary).stat().st_mode
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        if not is_special:
            with suppress(OSError):  # a file system may have no modes
                temporary.chmod(stat.S_IMODE(mode))
            os.replace(temporary, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        if not is_special:
            temporary.unlink(missing_ok=True)


def check() -> None:
    """Raises ValueError for a value that is not understood; warns of variables of our prefix that nothing reads."""
    for variable in FLAGS:
        is_on(variable)
    known = (*FLAGS, CACHE_DIR, COMMIT)
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable not in known:
            warnings.warn(f"{variable} is not read by sagebwd; accepted: {', '.join(known)}", stacklevel=2)
