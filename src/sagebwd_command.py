"""What `sagebwd`, `python -m lab` and `python -m benchmarks` begin and end with: Ctrl-C and mistakes are one line.

It is outside of the package, since to import any module of the package takes the two seconds of torch's import, and
Ctrl-C in those is one line too. `python -m sagebwd` imports the package before it runs a line of its own, so Ctrl-C in
those two seconds is Python's traceback there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Entry point of `sagebwd`."""
    stop_by_ctrl_c("sagebwd")
    with _in_one_line("sagebwd"):  # the import too, which reads environment variables
        from sagebwd.cli.main import main as command

        command()


def stop_by_ctrl_c(name: str) -> None:
    """From now on Ctrl-C while modules are imported ends the process with one line, of ``name``, and exit code 130.

    Only for a process that is a command. One that is to ignore Ctrl-C, as a script's jobs behind its own commands are,
    ignores it still. It ends in the signal's handler: out of an import, KeyboardInterrupt can
    come as another error, or be caught. Once `sagebwd.cli.terminal` is imported, as it is before anything is written,
    KeyboardInterrupt is raised, and `interruptible` says what is kept.
    """

    def stop(number: int, frame: object) -> None:
        terminal = sys.modules.get("sagebwd.cli.terminal")
        if hasattr(terminal, "interruptible"):
            raise KeyboardInterrupt
        if os.environ.get("RANK", "0") == "0":  # of several processes the first one says it
            os.write(2, f"\n{name}: stopped by Ctrl-C, nothing was written\n".encode())
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)


def command_line(text: str) -> typer.Typer:
    """A command line without commands yet; text, its help. Ctrl-C that a command leaves to it is one line."""
    import typer
    from typer.core import TyperGroup

    class Commands(TyperGroup):
        def invoke(self, context: typer.Context) -> object:
            try:
                return super().invoke(context)
            except KeyboardInterrupt:
                typer.echo("\nstopped by Ctrl-C", err=True)
                raise typer.Exit(130) from None

    return typer.Typer(
        cls=Commands,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",  # rich's own drops what is in brackets
        help=text,
    )


def run(app: typer.Typer, name: str) -> None:
    """Run a command line: an error that a person can mend is one line, which begins with ``name``, and exit code 2."""
    with _in_one_line(name):
        app()


@contextmanager
def _in_one_line(name: str) -> Iterator[None]:
    """What `run` says of errors."""
    try:
        yield
    except Exception as error:
        line = _line(error)
        if line is None:
            raise
        # settings are wrong in all processes of a run alike
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, OSError):
            import typer

            typer.secho(f"{name}: {line}", fg="red", err=True)
        sys.exit(2)


def _line(error: Exception) -> str | None:
    """What a person is told of an error that a person can mend; None of any other, which is a fault of ours."""
    # torch's, on a GPU and on a CPU, without an import of torch
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        return f"too little memory: {str(error).splitlines()[0]}"
    if isinstance(error, (ValueError, TypeError, NotImplementedError, OSError, MemoryError)):
        return str(error) or type(error).__name__
    return None
