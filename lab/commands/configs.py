"""Configs of commands, and the options of those that have one: each command has a kind, and says so of a file of
another one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lab.training import config
from lab.training.config import Config, Kind
from lab.training.continued.config import Continued

COMMANDS = {Config: "pretrain, compare, seeds and tokenize", Continued: "continue"}

ConfigFile = Annotated[Path, typer.Option("--config", help="YAML file; those in configs/ are examples.")]
Setting = Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeat for several.")]
Folder = Annotated[Path | None, typer.Option("--output", help="Folder of what is trained [default: runs/NAME].")]
Only = Annotated[list[str] | None, typer.Option("--only", help="These variants alone; repeat for several.")]
# Of commands that train many runs.
Jobs = Annotated[int, typer.Option(help="Runs at once, in processes of their own, on the GPUs in turn.")]
Seconds = Annotated[float | None, typer.Option(help="Stop after so long; what has ended counts.")]
Kept = Annotated[
    Path | None,
    typer.Option("--results", help="Folder for comparison.json and runs.jsonl.xz, written after each run."),
]
Margin = Annotated[float, typer.Option(help="Nats a token within which two attentions count as equivalent.")]
MARGIN = 0.02  # `lab.training.gaps.MARGIN`, which takes torch to import


def load(path: Path, settings: list[str] | None = None, kind: type[Kind] = Config) -> Kind:
    """`lab.training.config.load`, which also raises ValueError for a config of other commands."""
    try:
        return config.load(path, settings, kind)
    except ValueError:
        other = None if _is(path, kind) else next((one for one in COMMANDS if _is(path, one)), None)
        if other is None:
            raise
        raise ValueError(
            f"config {path}: a config of `python -m lab` {COMMANDS[other]}; expected one of {COMMANDS[kind]}"
        ) from None


def _is(path: Path, kind: type) -> bool:
    """Whether a file's keys are those of a kind."""
    try:
        config.read(path, None, kind)
    except ValueError:
        return False
    return True
