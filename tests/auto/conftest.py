"""A GPU that is not there, of which something was measured."""

from __future__ import annotations

import pytest

from sagebwd import dispatch
from sagebwd.auto import choice as auto_choice
from sagebwd.auto import timings
from sagebwd.auto.model import Times


@pytest.fixture
def measured(monkeypatch):
    """Every CUDA device is an H100 with all of the extra, of which this was measured."""
    rows: list[Times] = []
    monkeypatch.setattr(dispatch, "arch_of", lambda device: 90 if device.type == "cuda" else 0)
    monkeypatch.setattr(dispatch, "missing", lambda row: None)
    monkeypatch.setattr(auto_choice, "card_of", lambda device: "a card")
    monkeypatch.setattr(timings, "of_card", lambda card, version: tuple(rows))
    for known in (dispatch._choose, auto_choice.times_of):
        known.cache_clear()
    yield rows
    for known in (dispatch._choose, auto_choice.times_of):
        known.cache_clear()
