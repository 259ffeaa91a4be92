"""A GPU that is not there, of which something was measured."""

from __future__ import annotations

import pytest

from sagebwd import dispatch
from sagebwd.auto import thresholds
from sagebwd.auto.thresholds import Threshold


@pytest.fixture
def measured(monkeypatch):
    """Every CUDA device is an H100 with all of the extra, of which this was measured."""
    rows: list[Threshold] = []
    monkeypatch.setattr(dispatch, "arch_of", lambda device: 90 if device.type == "cuda" else 0)
    monkeypatch.setattr(dispatch, "_missing", lambda: None)
    monkeypatch.setattr(dispatch, "card_of", lambda device: "a card")
    monkeypatch.setattr(thresholds, "of_card", lambda card, version: tuple(rows))
    for known in (dispatch._choose, dispatch.thresholds_of):
        known.cache_clear()
    yield rows
    for known in (dispatch._choose, dispatch.thresholds_of):
        known.cache_clear()
