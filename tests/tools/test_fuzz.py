"""What `tools.fuzz` draws, and what it lets pass; its cases by the thousand need a GPU."""

import pytest
import torch

from tools import fuzz

RECIPE = "token"
LONGEST = 20
# Packed calls without a key are among them, of every kind of data.
SEEDS = range(4000)


def without_keys() -> dict[str, fuzz.Case]:
    """The first case of each kind of data in which no sequence has a key."""
    found = {}
    for seed in SEEDS:
        case = fuzz.Case.drawn(seed, LONGEST, RECIPE)
        if sum(case.lengths_k) == 0:
            found.setdefault(case.kind, case)
    return found


def test_a_packed_call_without_keys():
    cases = without_keys()
    assert set(cases) == set(fuzz.KINDS) - {"near-one-hot"}
    for case in cases.values():
        assert case.inputs("cpu")[1].shape[0] == 0
        assert fuzz.check(case, "reference", "cpu") is None


# One query that sees one key, whose V is 0 where the mean over keys is not.
ZERO_VALUE = fuzz.Case(
    seed=166, kind="zero-block", dtype=torch.bfloat16, head_dim=64, value_dim=64, heads=2, kv_heads=1, lengths_q=(1,),
    lengths_k=(100,), layout="dense", mask="", is_causal=True, window=None, scale=0.125, recipe=RECIPE,
)  # fmt: skip


def test_a_value_of_zero_comes_back_within_the_rounding_of_the_mean():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert fuzz.check(ZERO_VALUE, "triton", device) is None


def changed(monkeypatch, change):
    """Let `fuzz.check` find of a kernel, called "kernel", what ``change`` makes of inputs and right results."""
    outcome = fuzz.outcome

    def instead(case, inputs, impl, dtype, o=None):
        results = outcome(case, inputs, "reference", dtype, o)
        return change(inputs, results) if impl == "kernel" else results

    monkeypatch.setattr(fuzz, "outcome", instead)


# the mean is in 16 bit where several first keys are apart
ROUNDED = [(RECIPE, 1e-3), ("token(first_keys=1)", 1e-5), ("token(smooth_v=False)", 1e-8), ("mixed", 1e-8)]


@pytest.mark.parametrize(("recipe", "wrong"), ROUNDED)
def test_more_than_the_rounding_of_the_mean_is_found(monkeypatch, recipe, wrong):
    case = fuzz.replace(ZERO_VALUE, recipe=recipe)
    changed(monkeypatch, lambda inputs, results: [results[0] + wrong, *results[1:]])
    assert fuzz.check(case, "reference", "cpu") is None
    assert fuzz.check(case, "kernel", "cpu").startswith("o: ")


def replaced(monkeypatch, results):
    """Let `fuzz.check` find these results of a kernel, called "kernel", and an emulator that is exact in any dtype."""
    outcome = fuzz.outcome

    def instead(case, inputs, impl, dtype, o=None):
        exact = outcome(case, inputs, "reference", torch.float64, o)
        return [x.clone() for x in (results if impl == "kernel" else (x.to(dtype) for x in exact))]

    monkeypatch.setattr(fuzz, "outcome", instead)


# In the row of UNLUCKY a key has half the weight, and its dS, in which delta is 3.5 times as large as what it leaves,
# is 0.8% from where its code of e4m3 turns over: dQ moves by 2.1 of 12, and an O whose roundings add up is enough.
ONE_KEY = fuzz.Case(
    seed=108, kind="mean-and-outliers", dtype=torch.bfloat16, head_dim=128, value_dim=128, heads=6, kv_heads=3,
    lengths_q=(700,), lengths_k=(284,), layout="dense", mask="", is_causal=False, window=(-1, 0), scale=128**-0.5,
    recipe="mixed(rotate=False)",
)  # fmt: skip
UNLUCKY = 0, 3, 424


def test_a_code_that_turns_over_with_the_rounding_of_o(monkeypatch):
    inputs = ONE_KEY.inputs("cpu")
    high = fuzz.outcome(ONE_KEY, inputs, "reference", torch.float64)
    o, eps = high[0].bfloat16(), torch.finfo(torch.bfloat16).eps
    assert max(dq[0] for _, _, dq, *_ in fuzz._turned(ONE_KEY, inputs, o, high, eps)) < 0.95
    # the neighbours of O that make dO O least
    exact, nearest, do = high[0][UNLUCKY], o[UNLUCKY], inputs[3][UNLUCKY].double()
    above = torch.where(nearest >= exact, nearest, nearest.nextafter(torch.tensor(torch.inf, dtype=o.dtype)))
    below = torch.where(nearest <= exact, nearest, nearest.nextafter(torch.tensor(-torch.inf, dtype=o.dtype)))
    o[UNLUCKY] = torch.where(do > 0, below, above)
    moved = fuzz.outcome(ONE_KEY, inputs, "reference", torch.float64, o)
    assert (moved[2] - high[2])[UNLUCKY].abs().max() > 2
    results = [o, moved[1], *(x.bfloat16() for x in moved[2:])]
    replaced(monkeypatch, results)
    assert fuzz.check(ONE_KEY, "kernel", "cpu") is None
    results[0] = high[0].bfloat16()  # of which such a dQ is not
    assert fuzz.check(ONE_KEY, "kernel", "cpu").startswith("dq: error")
    results[0], results[2][UNLUCKY] = o, 0
    assert fuzz.check(ONE_KEY, "kernel", "cpu").startswith("dq: error")


# Each query sees one key: dP - delta is V's rounding to codes, and dQ is one code of e4m3, dS's, times a key. That of
# NEAR_TIE is 1.2e-5 from where it turns over, nearest of all; a step of it is a tenth of that dQ.
ONE_KEY_EACH = fuzz.Case(
    seed=30091, kind="sinks", dtype=torch.float16, head_dim=128, value_dim=128, heads=2, kv_heads=2,
    lengths_q=(700,), lengths_k=(63,), layout="packed", mask="", is_causal=True, window=(0, 30),
    scale=0.5 * 128**-0.5, recipe="mixed(dp=int8)",
)  # fmt: skip
NEAR_TIE = 674, 0


@pytest.mark.parametrize(
    ("changes", "at", "factor", "passes"),
    [
        ({}, NEAR_TIE, 0.9, True),
        ({}, NEAR_TIE, 0.5, False),
        ({}, slice(None), 0.75, False),  # of all queries
        ({"is_causal": False, "window": None}, slice(None), 0.9, False),
        ({"is_causal": False, "window": None}, "largest", 0.75, False),
        ({"window": (7, 30)}, "largest", 0.9, False),
    ],
)
def test_a_code_of_an_int8_dp_that_turns_over(monkeypatch, changes, at, factor, passes):
    case = fuzz.replace(ONE_KEY_EACH, **changes)
    results = fuzz.outcome(case, case.inputs("cpu"), "reference", torch.float64)
    results = [x if name == "lse" else x.half() for name, x in zip(fuzz.RESULTS, results)]
    dq = results[2]
    if at == "largest":
        at = tuple(torch.unravel_index(dq.abs().argmax(), dq.shape)[:2])
    dq[at] *= factor
    replaced(monkeypatch, results)
    problem = fuzz.check(case, "kernel", "cpu")
    assert problem is None if passes else problem.startswith("dq: ")


@pytest.mark.parametrize("recipe", ["token(o=16bit)", "mixed"])
def test_noise_may_overflow_fp16_and_nothing_else_may(monkeypatch, recipe):
    # each query sees one key, the last four are seen by none
    case = fuzz.Case(
        seed=60, kind="huge", dtype=torch.float16, head_dim=64, value_dim=64, heads=1, kv_heads=1, lengths_q=(8,),
        lengths_k=(12,), layout="dense", mask="", is_causal=True, window=(0, -1), scale=0.125, recipe=recipe,
    )  # fmt: skip

    def found(case, key, wrong):
        with monkeypatch.context() as patch:
            results = fuzz.outcome(case, case.inputs("cpu"), "reference", torch.float64)
            results = [x.to(case.dtype) for x in results]
            results[3][0, 0, key, 5] = wrong
            replaced(patch, results)
            return fuzz.check(case, "kernel", "cpu")

    assert found(case, 3, torch.inf) is None
    assert found(case, 3, -torch.inf) is None
    finite = "dk: 1 values are not finite"
    assert found(case, 3, torch.nan) == finite
    assert found(case, 9, torch.inf) == finite
    assert found(fuzz.replace(case, kind="normal"), 3, torch.inf) == finite
    assert found(fuzz.replace(case, dtype=torch.bfloat16), 3, torch.inf) == finite


# Two sequences of two heads of keys; NaN in one of the four is nothing to the others.
SPOILT = fuzz.Case(
    seed=0, kind="normal", dtype=torch.bfloat16, head_dim=16, value_dim=24, heads=4, kv_heads=2, lengths_q=(6, 9),
    lengths_k=(5, 9), layout="packed", mask="", is_causal=False, window=None, scale=0.25, recipe=RECIPE, spoilt="k",
)  # fmt: skip
DENSE = fuzz.replace(SPOILT, layout="dense", lengths_q=(9, 9), lengths_k=(9, 9))


def is_spoilt(inputs):
    return any(x.isnan().any() for x in inputs)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
@pytest.mark.parametrize("case", [SPOILT, DENSE], ids=["packed", "dense"])
def test_the_emulator_keeps_what_is_spoilt_apart(case, name, poison):
    assert fuzz.check(fuzz.replace(case, spoilt=name, poison=poison), "reference", "cpu") is None


@pytest.mark.parametrize("spoilt", ["q", "k", "v", "do"])
@pytest.mark.parametrize("case", [SPOILT, DENSE], ids=["packed", "dense"])
def test_what_is_spoilt_and_reaches_others_or_nothing_is_found(monkeypatch, case, spoilt):
    case = fuzz.replace(case, spoilt=spoilt)

    def found(change):
        with monkeypatch.context() as patch:
            changed(patch, lambda inputs, results: change(results) if is_spoilt(inputs) else results)
            return fuzz.check(case, "kernel", "cpu")

    assert found(lambda results: results) is None
    assert "finite in spite of nan" in found(lambda results: [x.nan_to_num() for x in results])
    assert "reaches others" in found(lambda results: [x * x.sum() for x in results])
    nearly = [*(1.0,) * 4, 1.02]
    assert found(lambda results: [x * y for x, y in zip(results, nearly)]).startswith("dv: nan in")


def test_the_command_counts_its_cases(capfd, monkeypatch):
    command = "fuzz --cases 3 --device cpu --impl reference --longest 8 --processes 1"
    monkeypatch.setattr("sys.argv", command.split())
    assert fuzz.main() == 0
    *_, last, verdict = capfd.readouterr().out.splitlines()
    assert last.startswith("3/3 cases, 0 failed, ")
    assert verdict == "3 passed, 0 failed"
