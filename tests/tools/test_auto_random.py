"""`tools.auto_random` on small calls, by a clock that makes times up."""

from __future__ import annotations

import json
import math

import pytest

from sagebwd.auto.model import TRAINING
from sagebwd.masks.kinds import CAUSAL, FULL, KINDS, PACKED, WINDOW
from tests.auto.calls import times
from tools import auto_random
from tools.auto_random import MOST_ELEMENTS, Row
from tools.auto_shapes import Call

SMALL = [Call(kind, 16, 16, 2, 2, 1, 64, trains=kind == CAUSAL, left=9 if kind == "window" else 0) for kind in KINDS]


def timer(ms):
    return lambda runs, device, **_: {name: (ms.get(name, 1.0), 0.1) for name in runs}


def row(ms, errors=None, **more):
    by_name = {name: (x, 0.1) for name, x in ms.items()}
    given = {"seed": 0, "number": 0, "call": "a call", "chosen": "low", "ran": "mixed on hopper", "why": "so"} | more
    return Row(**given, times=by_name, errors=errors or {}, slow=[])


def test_calls_are_those_of_the_seed_and_within_bounds():
    calls = auto_random.drawn(300, 7)
    assert calls[:60] == auto_random.drawn(60, 7)
    assert calls != auto_random.drawn(300, 8)
    assert {call.kind for call in calls} == set(KINDS)
    for call in calls:
        assert 256 <= call.tokens <= 1 << 16
        assert call.heads % call.kv_heads == 0
        assert call.batch * call.heads * call.tokens * call.value_dim <= MOST_ELEMENTS * 8  # a group at least
        if call.lengths:
            assert call.kind == PACKED
            assert sum(call.lengths) == call.batch * call.tokens
            assert min(call.lengths) > 0


@pytest.mark.parametrize("call", SMALL, ids=lambda call: call.kind)
def test_a_call_of_each_kind(call):
    found = auto_random.measure(3, 5, call, "cpu", timer({"auto": 0.5}))
    assert (found.seed, found.number, found.call) == (3, 5, str(call))
    assert found.times["auto"] == (0.5, 0.1)
    has_torch = call.kind != PACKED  # whose function needs a GPU
    assert set(found.times) == {"auto", "low", *(["torch"] if has_torch else [])}
    assert found.chosen == ("torch" if has_torch else "low")
    assert found.why
    assert set(found.errors) == ({"auto", "low"} if has_torch else set())
    assert all(len(errors) == (4 if call.trains else 1) for errors in found.errors.values())
    assert not found.wrong
    assert found.over_best == 2.0


def test_who_is_wrong_does_not_count():
    found = row({"auto": 1.0, "low": 1.0, "torch": 1.1, "fa4": 0.5}, {"fa4": [0.001, 1.4, 0.1, 0.1]})
    assert (found.wrong, found.best, found.is_right) == (["fa4"], 1.0, True)
    assert row({"auto": 1.0, "low": 1.0, "fa4": 0.5}, {"fa4": [math.nan]}).wrong == ["fa4"]
    right = row({"auto": 1.0, "low": 1.0, "torch": 1.1, "fa4": 0.5}, {"fa4": [0.001]})
    assert (right.over_best, right.is_right) == (0.5, False)


def test_a_call_that_auto_does_not_run_is_lost():
    """Regression: a KeyError once all calls had been timed."""
    text, fine = auto_random.report([row({"low": 1.0, "torch": 2.0}), row({"auto": 1.0, "low": 1.0, "torch": 2.0})])
    assert not fine
    assert "2 calls, auto over the fastest: least 0.000, geometric mean 1.000, 1 raised" in text
    assert "lost: 0.000: a call: so" in text
    assert "chosen within 3% of the fastest: 1.000" in text


def test_whose_gradients_are_wrong_under_a_mask_is_not_the_packages_choice(monkeypatch):
    """Regression: cuDNN counted as chosen under windows that `sagebwd.dispatch` gives to others."""
    known = times((0, 0, 9, 9), (64, 64), TRAINING, WINDOW, full=None, cudnn=(0, 0, 1, 1))
    monkeypatch.setattr(auto_random.auto_choice, "times_of", lambda *_: known)
    for tokens, ms in ((448, 2.0), (512, 0.9)):
        call = Call(WINDOW, 64, 64, 32, 8, 2, tokens, left=127)
        found = row({"low": 2.0, "torch": 0.9, "cudnn": 1.0}, picked="cudnn")
        assert auto_random.ms_by_package(call, found, "NVIDIA H200") == ms


def test_the_command_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    calls = [SMALL[0], Call(FULL, 16, 8, 1, 2, 2, 32, kv_tokens=8, trains=False)]
    monkeypatch.setattr(auto_random, "drawn", lambda count, seed: calls[:count])
    timed = []

    def time_contenders(runs, device, **_):
        timed.append(runs)
        return timer({})(runs, device)

    monkeypatch.setattr(auto_random, "time_contenders", time_contenders)
    command = ["--device", "cpu", "--output", str(tmp_path), "--commit", "abc", "--seed", "4"]
    assert auto_random.main([*command, "--seconds", "-1"]) == 0
    assert (timed, list(tmp_path.iterdir())) == ([], [])
    assert "stopped before call 0 of 2" in capsys.readouterr().err
    for count, timings in ((1, 1), (2, 2), (2, 2)):
        assert auto_random.main([*command, "--calls", str(count)]) == 0
        assert len(timed) == timings
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("auto_cpu_")
    assert [one["number"] for one in json.loads(path.read_text(encoding="utf-8"))["rows"]] == [0, 1]
    assert "2 of 2 calls of seed 4" in capsys.readouterr().out
    path.write_text('{"rows": [{"call": "of auto_shapes"}]}', encoding="utf-8")
    with pytest.raises(SystemExit):
        auto_random.main(command)
