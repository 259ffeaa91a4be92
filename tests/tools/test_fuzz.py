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


def test_inputs_are_as_long_as_their_lengths_say():
    layouts = set()
    for seed in range(0, 500, 7):
        case = fuzz.Case.drawn(seed, LONGEST, RECIPE)
        layouts.add(case.layout)
        total, tokens = (sum, -3) if case.layout == "packed" else (max, -2)
        q, k, v, do = case.inputs("cpu")
        assert q.shape[tokens] == do.shape[tokens] == total(case.lengths_q), case
        assert k.shape[tokens] == v.shape[tokens] == total(case.lengths_k), case
    assert layouts == {"dense", "padded", "packed", "masked"}


def test_a_packed_call_without_keys():
    cases = without_keys()
    assert set(cases) == set(fuzz.KINDS) - {"near-one-hot"}
    for case in cases.values():
        assert case.inputs("cpu")[1].shape[0] == 0
        assert fuzz.check(case, "reference", "cpu") is None


# One query that sees one key, whose V is 0 where the mean over keys is not.
ZERO_VALUE = fuzz.Case(
    seed=166, kind="zero-block", dtype=torch.bfloat16, head_dim=64, heads=2, kv_heads=1, lengths_q=(1,),
    lengths_k=(100,), layout="dense", mask="", is_causal=True, window=None, scale=0.125, recipe=RECIPE,
)  # fmt: skip


def test_a_value_of_zero_comes_back_within_the_rounding_of_the_mean():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert fuzz.check(ZERO_VALUE, "triton", device) is None


@pytest.mark.parametrize(("recipe", "wrong"), [(RECIPE, 1e-5), ("token(smooth_v=False)", 1e-8)])
def test_more_than_the_rounding_of_the_mean_is_found(monkeypatch, recipe, wrong):
    case, outcome = fuzz.replace(ZERO_VALUE, recipe=recipe), fuzz.outcome

    def shifted(case, inputs, impl, dtype):
        o, *others = outcome(case, inputs, "reference", dtype)
        return [o + wrong if impl == "shifted" else o, *others]

    monkeypatch.setattr(fuzz, "outcome", shifted)
    assert fuzz.check(case, "reference", "cpu") is None
    assert fuzz.check(case, "shifted", "cpu").startswith("o: error")
