"""Gaps over seeds and their intervals, Student's t, and whose gradients a run had."""

import json
import lzma
import math
import statistics
from pathlib import Path

import pytest

from lab.commands import seeds as command
from lab.training import kernel_commit
from lab.training.gaps import (
    MARGIN,
    by_step,
    critical,
    equivalence,
    gaps,
    holm,
    interval,
    not_higher,
)
from lab.training.packed import PACKED
from lab.training.run_dir import COMPARISON


def comparison(folder, losses, digests=None, diverged=(), commit="2534d87"):
    """A comparison.json of variants by their losses, the first the baseline; their names are recipes, or "again"."""
    first = next(iter(losses.values()))
    rows = [
        {
            "variant": name, "recipe": "full" if name == "again" else name, "held_out_loss": loss,
            "commit": commit, "digest": (digests or {}).get(name, name),
            "gap": None if name in diverged else loss - first, "diverged": "at step 3" if name in diverged else None,
        }
        for name, loss in losses.items()
    ]  # fmt: skip
    folder.mkdir()
    (folder / COMPARISON).write_text(json.dumps({"outcomes": rows}))
    return folder


@pytest.fixture
def folders(tmp_path):
    same = {"again": "full"}
    return [
        comparison(tmp_path / "0", {"full": 2.0, "token": 2.01, "paper": 2.05, "again": 2.03}, same),
        comparison(tmp_path / "1", {"full": 3.0, "token": 2.99, "paper": 9.0, "again": 2.96}, same, ["paper"]),
        comparison(tmp_path / "2", {"full": 4.0, "token": 4.06}),
    ]


def test_means_and_noise(folders):
    token, paper, again = gaps(folders)
    assert token.gaps == pytest.approx((0.01, -0.01, 0.06))
    assert token.mean == pytest.approx(0.02)
    single = math.sqrt((0.03**2 + 0.04**2) / 2)
    assert token.noise == pytest.approx(single / math.sqrt(3))
    # deviations -.01, -.03 and .04, of two degrees of freedom
    assert token.scatter == pytest.approx(math.sqrt(0.0026 / 2 / 3))
    assert (paper.scatter, paper.interval) == (None, None)
    assert token.interval == interval(token.gaps)
    assert (paper.gaps, paper.diverged) == (pytest.approx((0.05,)), 1)
    assert paper.noise == pytest.approx(single)
    assert again.noise == pytest.approx(single / math.sqrt(2))


def test_the_interval_of_a_mean():
    assert interval([0.01]) is None
    low, high = interval([0.0295, -0.0062, -0.0035])  # t = 4.3027 at two degrees of freedom, from a table of Student's
    assert (low, high) == pytest.approx((-0.0428, 0.0560), abs=1e-4)
    centred = [-1.0, 1.0] * 50
    low, high = interval(centred)
    assert low == -high
    assert high == pytest.approx(2.0 * statistics.stdev(centred) / 10, rel=0.05)


def test_equivalence_is_two_tests_at_once():
    values = [0.004, -0.002, 0.001, 0.006, -0.003, 0.0]  # mean .001, standard error .00146 at five degrees of freedom
    assert equivalence(values, 0.02) < 0.001
    # at the margin that the 90% interval just reaches, p is .05
    low, high = interval(values, 0.9)
    assert equivalence(values, max(-low, high)) == pytest.approx(0.05, abs=1e-9)
    assert equivalence([-value for value in values], max(-low, high)) == pytest.approx(0.05, abs=1e-9)
    # no gap shows and none is excluded; a mean outside can never be equivalent
    assert interval([0.05, -0.05, 0.01])[0] < 0
    assert equivalence([0.05, -0.05, 0.01], 0.02) > 0.3
    assert equivalence([0.03, 0.031, 0.029], 0.02) > 0.95
    assert equivalence([0.01]) is None
    assert (equivalence([0.01, 0.01], 0.02), equivalence([0.03, 0.03], 0.02)) == (0, 1)
    assert MARGIN == command.MARGIN


def test_not_higher_is_one_of_the_two_tests():
    values = [-0.03, -0.01, -0.035, -0.02]
    assert not_higher(values) < 0.01 < equivalence(values)
    above = [-value for value in values]
    assert not_higher(above) == equivalence(above) > 0.5
    assert not_higher([0.01]) is None
    assert (not_higher([-0.3, -0.3]), not_higher([0.02, 0.02])) == (0, 1)


def test_holm_multiplies_the_least_most():
    assert holm([0.03, 0.01, 0.04]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.5, 0.001]) == pytest.approx([1, 1, 0.003])
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_runs_of_faulty_kernels_do_not_count_for_mixed(tmp_path):
    losses = {"full": 2.0, "mixed": 2.02, "token": 2.01}
    folders = [
        comparison(tmp_path / str(index), losses, commit=commit)
        for index, commit in enumerate(("a9c0339", "2534d87", "2330368-dirty", None))
    ]
    mixed, token = gaps(folders)
    assert (len(mixed.gaps), mixed.commits) == (1, ("2534d87",))
    assert list(mixed.objections.values()) == [1, 1, 1]
    assert (len(token.gaps), token.objections) == (4, {})
    wrong, none = gaps(folders, faulty=True)
    assert (len(wrong.gaps), wrong.commits, wrong.objections) == (3, ("a9c0339", "2330368-dirty"), {})
    assert none.gaps == ()


def pack(folder, losses):
    """runs.jsonl.xz beside a comparison: of each run the held-out losses by step."""
    with lzma.open(folder / PACKED, "wt", encoding="utf-8") as file:
        for name, by_run in losses.items():
            lines = [{"step": 1, "loss": 9.0}, *({"step": step, "held_out_loss": x} for step, x in by_run.items())]
            file.write(json.dumps({"run": name, "ended": None, "result": None, "metrics": lines}) + "\n")
    return folder


def test_gaps_at_each_evaluation(tmp_path):
    first = comparison(tmp_path / "0", {"full": 2.0, "token": 2.03, "paper": 9.0}, diverged=["paper"])
    pack(first, {"full": {0: 4.0, 5: 3.0, 9: 2.0}, "token": {0: 4.5, 5: 3.01, 9: 2.03}, "paper": {0: 9.0}})
    second = comparison(tmp_path / "1", {"full": 2.5, "token": 2.56})
    # its baseline has no step 7 and its token no step 5, so neither is a step of all pairs
    pack(second, {"full": {0: 4.0, 5: 3.5, 9: 2.5}, "token": {0: 4.5, 7: 3.0, 9: 2.56}})
    start, end = by_step([first, second], 0.02)
    assert (start.step, start.gap.gaps, start.changes) == (0, (0.5, 0.5), ())
    assert (end.step, end.gap.variant) == (9, "token")
    assert end.gap.gaps == pytest.approx((0.03, 0.06))
    assert end.changes == pytest.approx((-0.47, -0.44))
    assert (end.gap.interval, end.gap.p) == (interval(end.gap.gaps), equivalence(end.gap.gaps, 0.02))
    assert [at.gap.mean for at in by_step([first])] == pytest.approx([0.5, 0.01, 0.03])
    with pytest.raises(ValueError, match="has no evaluations of token, which"):
        by_step([pack(second, {"full": {0: 4.0}})])
    with pytest.raises(ValueError, match=f"holds no {PACKED}; `python -m lab.training.packed pack` writes it"):
        by_step([comparison(tmp_path / "2", {"full": 2.0, "token": 2.1})])


def test_scatter_is_followed_to_the_end_and_later_changes_are_apart(tmp_path):
    gaps_of = {0: (0.5, 0.5, 0.5), 5: (0.2, 0.1, 0.3), 7: (0.3, 0.2, 0.1), 9: (0.21, 0.11, 0.32)}
    folders = []
    for pair in range(3):
        folder = comparison(tmp_path / str(pair), {"full": 2.0, "token": 2.0 + gaps_of[9][pair]})
        token = {step: 2.0 + of_pairs[pair] for step, of_pairs in gaps_of.items()}
        folders.append(pack(folder, {"full": dict.fromkeys(gaps_of, 2.0), "token": token}))
    start, early, middle, end = by_step(folders)
    assert start.r is None, "gaps that are one and the same have no scatter"
    assert (early.r, end.r) == (pytest.approx(0.021 / math.sqrt(0.02 * 0.0220667), abs=1e-6), pytest.approx(1))
    assert middle.r < 0
    assert all(at.r is None for at in by_step(folders[:2]))
    (late,) = by_step(folders, since=7)
    assert (late.step, late.gap.gaps) == (9, pytest.approx((-0.09, -0.09, 0.22)))
    assert late.gap.interval == interval(late.gap.gaps)
    assert by_step(folders, since=9) == []
    with pytest.raises(
        ValueError, match="since=6 is no step at which all of 'token' were evaluated; accepted: 0, 5, 7"
    ):
        by_step(folders, since=6)


@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    [
        (0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 3, 3.182), (0.95, 9, 2.262), (0.95, 12, 2.179), (0.95, 120, 1.980),
        (0.90, 4, 2.132), (0.90, 9, 1.833), (0.99, 7, 3.499), (0.99, 30, 2.750),
    ],
)  # fmt: skip
def test_critical_values_are_those_of_tables(confidence, freedom, expected):
    assert critical(confidence, freedom) == pytest.approx(expected, abs=5e-4)


ROOT = Path(__file__).parents[3]


def test_faulty_kernels_do_not_count_for_what_ran_on_them():
    for commit in kernel_commit.FAULTY:
        for named in (commit, f"{commit}-dirty"):
            for recipe in ("mixed", "mixed(rotate=False)", "token(dv=fp8)"):
                assert f"the kernels of {named} made its dV" in kernel_commit.objection(recipe, named)
            assert kernel_commit.objection("token", named) is None
            assert kernel_commit.objection("sdpa", named) is None
    assert kernel_commit.objection("mixed", kernel_commit.MENDED) is None
    assert "names no commit" in kernel_commit.objection("mixed", None)
    assert kernel_commit.objection("paper", None) is None
    for commit in kernel_commit.LOST_DK:
        assert f"{commit} lost dK" in kernel_commit.objection("mixed(dp=int8)", commit)
        assert kernel_commit.objection("mixed", commit) is kernel_commit.objection("token(dp=int8)", commit) is None
    with pytest.raises(ValueError, match="nonsense"):
        kernel_commit.objection("nonsense", "2534d87")


def test_no_repeat_no_noise(folders):
    (token,) = gaps(folders[2:])
    assert (token.mean, token.noise) == (pytest.approx(0.06), None)
    (token,) = gaps(folders[2:], noise_of=[folders[0], folders[2]])
    assert (token.mean, token.noise) == pytest.approx((0.06, 0.03))
