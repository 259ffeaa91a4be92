"""`tools.auto_sweep` on a CPU, where `auto` is torch, and where something is wrong."""

from __future__ import annotations

import pytest
import torch

from sagebwd.auto.contenders import TORCH
from tests.scaled import scaled
from tools import auto_sweep
from tools.auto_sweep import IN_PLACE, KINDS, LAYOUTS, Case

SMALL = "--device", "cpu", "--longest", "40", "--cases"


def test_cases_are_those_of_the_seed_and_have_all_that_there_is():
    cases = [Case.drawn(seed, 2048, "cuda") for seed in range(300)]
    assert cases[7] == Case.drawn(7, 2048, "cuda")
    assert {case.kind for case in cases} == set(KINDS)
    assert {name for case in cases for name in case.layouts} == set(LAYOUTS)
    assert {case.is_in_place for case in cases} == {case.is_over_0 for case in cases} == {True, False}
    assert all(case.keys >= case.queries > 0 and case.heads % case.kv_heads == 0 for case in cases)
    assert sum(case.keys % 128 == 64 for case in cases) > 10


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_where_numbers_lie_alone(name):
    x = torch.randn(2, 3, 5, 8).bfloat16()
    lying = LAYOUTS[name](x)
    assert torch.equal(lying, x)
    *rows, last = lying.stride()
    begins = last == 1 and not any(2 * s % 16 for s in rows) and lying.data_ptr() % 16 == 0
    assert begins is (name in IN_PLACE)


def test_auto_is_right_on_a_cpu(capsys):
    assert auto_sweep.main([*SMALL, "10", "--seed", "1", "--others"]) == 0
    out = capsys.readouterr().out
    assert "auto: 10 of 10 right; " in out
    assert "not known" not in out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_auto_is_right_on_a_gpu():
    assert auto_sweep.main(["--cases", "60", "--longest", "1024"]) == 0


def seed_of(fits):
    return next(seed for seed in range(1, 200) if fits(Case.drawn(seed, 40, "cpu")))


@pytest.mark.parametrize("wrong", [{"o": 1.1}, {"dq": 1.3}, {"dv": 1.3}])
def test_what_is_wrong_shows(wrong, capsys, monkeypatch):
    attention, seed = auto_sweep.sage_attention, seed_of(lambda case: case.kind == "full" and case.scale == 2)
    monkeypatch.setattr(
        auto_sweep, "sage_attention", lambda *x, **more: scaled(lambda *y: attention(*y, **more), **wrong)(*x)
    )
    assert auto_sweep.main([*SMALL, "1", "--seed", str(seed)]) == 1
    assert f"WRONG {seed}: full on torch: planned: o " in capsys.readouterr().out


def test_what_others_get_wrong_is_known_or_told(capsys, monkeypatch):
    monkeypatch.setattr(auto_sweep, "others_of", lambda *_: [(TORCH, lambda q, k, v: (q + k.mean() + v.mean()) * 0)])
    for over_0, told in ((True, "not known: torch: o 1"), (False, "   1 calls: a scale of 0 or less: ")):
        seed = seed_of(lambda case: case.kind == "causal" and case.is_over_0 is over_0 and case.head_dim == 64)  # noqa: B023
        assert auto_sweep.main([*SMALL, "1", "--seed", str(seed), "--others"]) == 0
        out = capsys.readouterr().out
        assert told in out
        assert ("not known" in out) is over_0
        assert "seen with torch 2." in out
