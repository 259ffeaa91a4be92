"""When the monitor warns of a layer: decided by errors that tests write down."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch

from sagebwd.diagnostics import monitor as monitoring
from sagebwd.diagnostics.capture import capture
from sagebwd.diagnostics.monitor import AttentionMonitor, Monitor
from sagebwd.recipe import Recipe

pytestmark = [pytest.mark.rounding, pytest.mark.filterwarnings("ignore:attention monitor")]


@pytest.fixture
def judged(model_and_ids, monkeypatch):
    """A function: the error of dQ and dK in, what layer 0's check announces out."""
    model, ids = model_and_ids()
    call = capture(model, ids, layers=[0])[0]

    def start(**settings):
        monitor = AttentionMonitor(ids, Monitor(**settings))
        monitor.layers = {0: monitoring.Layer()}

        def check(error):
            row = SimpleNamespace(relative_l2=dict.fromkeys(monitoring.TENSORS, error), head=0, saturated=0.0)
            monkeypatch.setattr(monitoring, "measure", lambda *_: [row])
            before = len(monitor.events)
            monitor._judge(call, 1, Recipe.named("token"))
            return [event["message"] for event in monitor.events[before:]]

        return monitor.layers[0], check

    return start


def test_a_layer_is_warned_of_once_until_it_falls(judged):
    layer, check = judged(threshold=0.1)
    assert check(0.09) == []
    (message,) = check(0.2)
    assert message.startswith(
        "layer 0: relative L2 error of dQ 0.200, dK 0.200, above 0.1, under token; a finer recipe"
    )
    assert check(0.3) == check(0.2) == []
    assert check(0.1) == []
    assert not layer.warned
    assert len(check(0.2)) == 1
    assert (layer.recipe, layer.highest) == ("token", 0.3)


def test_an_error_that_is_not_a_number_is_above(judged):
    layer, check = judged(threshold=0.1)
    check(math.nan)
    assert layer.warned


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_warns(judged, monkeypatch, rank):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, check = judged(threshold=0.1)
        assert len(check(0.2)) == 1
    expected = [True] if rank == 0 else []
    assert [str(one.message).startswith("attention monitor, step 1: layer 0") for one in caught] == expected
