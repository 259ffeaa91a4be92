"""When the monitor warns of a layer, and under auto moves it: decided by errors that tests write down."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch

from sagebwd import dispatch
from sagebwd.call import Ask
from sagebwd.diagnostics import monitor as monitoring
from sagebwd.diagnostics.capture import capture
from sagebwd.diagnostics.monitor import AttentionMonitor, Monitor, ladder
from sagebwd.recipe import RECIPES, Recipe

pytestmark = [pytest.mark.rounding, pytest.mark.filterwarnings("ignore:attention monitor")]
FINER, BOTH = "token(s=16bit)", "token(s=16bit, o=16bit)"


class Script:
    """Errors of dQ and dK by recipe, in place of measuring them."""

    def __init__(self, monkeypatch):
        self.errors = {}
        monkeypatch.setattr(monitoring, "measure", self)

    def __call__(self, calls, recipes):
        errors = {str(recipe): dict.fromkeys(monitoring.TENSORS, self.errors[str(recipe)]) for recipe in recipes}
        shared = {"head": 0, "saturated": 0.0}
        return [SimpleNamespace(recipe=recipe, relative_l2=error, **shared) for recipe, error in errors.items()]


@pytest.fixture
def judged(model_and_ids, monkeypatch):
    """A function: errors by recipe in, what layer 0's check announces out."""
    model, ids = model_and_ids()
    call = capture(model, ids, layers=[0])[0]
    script = Script(monkeypatch)

    def start(**settings):
        monitor = AttentionMonitor(ids, Monitor(**settings))
        monitor.layers = {0: monitoring.Layer("token", "token")}

        def check(**errors):
            names = {"token": "token", "output": "token(o=16bit)", "scores": FINER, "both": BOTH, "full": "full"}
            script.errors = {names[key]: error for key, error in errors.items()}
            before = len(monitor.events)
            monitor._judge(call, 1, "reference")
            return [event["message"] for event in monitor.events[before:]]

        return monitor.layers[0], check

    return start


def test_a_layer_is_warned_of_once_until_it_falls(judged):
    layer, check = judged(threshold=0.1)
    finer = {"output": 0.15, "scores": 0.05}
    assert check(token=0.09) == []
    assert len(check(token=0.2, **finer)) == 1
    assert check(token=0.3) == check(token=0.2) == []  # nothing else is measured either
    assert check(token=0.1) == []
    assert not layer.warned
    assert len(check(token=0.2, **finer)) == 1
    assert (layer.recipe, layer.highest) == ("token", 0.3)


def test_auto_moves_up_after_k_checks_in_a_row(judged):
    layer, check = judged(threshold=0.1, precision="auto", checks=3)
    finer = {"output": 0.15, "scores": 0.05}
    check(token=0.2, **finer)
    check(token=0.2)
    assert check(token=0.05) == []  # the row is broken
    check(token=0.2, **finer)
    assert check(token=0.2) == []
    assert layer.recipe == "token"
    (message,) = check(token=0.2, **finer)
    assert message.startswith(f"layer 0: moved from token to {FINER}: relative L2 error of dQ 0.200, dK 0.200, above")
    assert layer.recipe == FINER


@pytest.mark.parametrize(
    ("finer", "expected"),
    [
        ({"output": 0.05}, "token(o=16bit)"),
        ({"output": 0.15, "scores": 0.1}, FINER),
        ({"output": 0.19, "scores": 0.15, "both": 0.09}, BOTH),
        ({"output": 0.19, "scores": 0.15, "both": 0.12, "full": 0.11}, "full"),
        ({"output": 0.19, "scores": 0.15, "both": 0.12, "full": 0.13}, BOTH),
        ({"output": 0.3, "scores": 0.3, "both": 0.3, "full": 0.2}, "token"),
        ({"output": math.nan, "scores": math.nan, "both": math.nan, "full": 0.01}, "full"),
    ],
)
def test_auto_takes_the_coarsest_recipe_that_helps(judged, finer, expected):
    layer, check = judged(threshold=0.1, precision="auto", checks=1)
    messages = check(token=0.2, **finer)
    assert layer.recipe == expected
    if expected == "token":
        assert "no finer recipe has less, full precision included" in messages[0]


def test_auto_moves_back_when_the_coarser_recipe_would_stay_well_under(judged):
    layer, check = judged(threshold=0.1, precision="auto", checks=2)
    layer.recipe = FINER
    check(scores=0.001, output=0.04)
    check(scores=0.001, output=0.06)  # under the threshold, but not well under: the row is broken
    assert check(scores=0.001, output=0.04) == []
    (message,) = check(scores=0.001, output=0.05)
    assert message.startswith(f"layer 0: moved from {FINER} to token(o=16bit): it would have stayed at or below 0.05,")
    check(output=0.01, token=0.2)
    check(output=0.01, token=0.01)
    check(output=0.01, token=0.01)
    assert layer.recipe == "token"
    assert check(token=0.01) == []


def test_an_error_that_is_not_a_number_is_above(judged):
    layer, check = judged(threshold=0.1)
    check(token=math.nan, output=0.01)
    assert layer.warned


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_run_every_rung(name, head_dim):
    pytest.importorskip("triton")
    for recipe in ladder(Recipe.named(name)):
        ask = Ask(recipe, head_dim, head_dim, torch.bfloat16, torch.device("cuda"))
        reasons = [dispatch.refusal(ask._replace(impl=impl)) for impl in ("hopper", "triton")]
        assert None in reasons, (str(recipe), reasons)


def test_ladders_end_in_full_precision_and_repeat_nothing():
    assert list(map(str, ladder(Recipe.named("token")))) == ["token", "token(o=16bit)", FINER, BOTH, "full"]
    assert list(map(str, ladder(Recipe.parse(BOTH)))) == [BOTH, "full"]
    assert str(ladder(Recipe.named("paper"))[1]) == "paper(first_keys=1)"
    assert str(ladder(Recipe.parse("paper(o=16bit)"))[1]) == "paper(s=16bit, o=16bit)"
    assert list(map(str, ladder(Recipe.named("full")))) == ["full"]


def test_rungs_that_the_implementation_lacks_are_left_out(judged, monkeypatch):
    def refuse(ask):
        if ask.recipe != Recipe.named("token"):
            raise NotImplementedError(f"{ask.impl} has no {ask.recipe}")

    monkeypatch.setattr(dispatch, "choose", refuse)
    layer, check = judged(threshold=0.1, precision="auto", checks=1)
    assert "no finer recipe" in check(token=0.2)[0]
    assert layer.recipe == "token"


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_warns(judged, monkeypatch, rank):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, check = judged(threshold=0.1)
        assert len(check(token=0.2, output=0.05)) == 1
    expected = [True] if rank == 0 else []
    assert [str(one.message).startswith("attention monitor, step 1: layer 0") for one in caught] == expected
