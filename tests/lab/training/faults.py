"""What ends a pre-training run: Ctrl-C, and a loss that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lab.training import pretrain


@contextmanager
def interrupted(step: int) -> Iterator[None]:
    """Inside, Ctrl-C ends a run that has logged ``step``."""
    real = pretrain._Record.on_log

    def on_log(self, args, state, control, **kwargs):
        real(self, args, state, control, **kwargs)
        if state.global_step == step:
            raise KeyboardInterrupt

    pretrain._Record.on_log = on_log
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        pretrain._Record.on_log = real


def lose(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[object], bool]) -> None:
    """The loss of a step is NaN where the trainer is chosen."""
    real = pretrain._Trainer.training_step

    def training_step(self, *args, **kwargs):
        loss = real(self, *args, **kwargs)
        return loss * math.nan if chosen(self) else loss

    monkeypatch.setattr(pretrain._Trainer, "training_step", training_step)
