"""Configs of commands: each command has a kind, and says so of a file of another one."""

from __future__ import annotations

from pathlib import Path

from lab.training import config
from lab.training.config import Config, Kind
from lab.training.continued.config import Continued
from lab.training.finetune_config import Finetuning

COMMANDS = {Config: "pretrain, compare, seeds and tokenize", Finetuning: "finetune", Continued: "continue"}


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
    try:
        config.load(path, None, kind)
    except ValueError:
        return False
    return True
