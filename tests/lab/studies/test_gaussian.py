"""Errors on random inputs: Gaussian ones, and with attention sinks."""

import pytest
import torch

from benchmarks.conformance import rms
from lab.studies.gaussian import BIAS_AND_SINK, PAPER_TABLE_1, draw, measure, with_sinks

pytestmark = pytest.mark.rounding


def by_tensor(rows, recipe, sigma):
    return {row.tensor: row for row in rows if row.recipe == recipe and row.sigma == sigma}


def test_table_1_at_sigma_5():
    """Paper's figures at the size where published block sizes give them: dQ and dK within a tenth."""
    rows = measure(["paper", "token"], [5])
    paper, token = (by_tensor(rows, recipe, 5) for recipe in ("paper", "token"))
    for name in ("dq", "dk"):
        assert paper[name].relative_l2 == pytest.approx(PAPER_TABLE_1[5][name][1], rel=0.1)
    for name, (_, published) in PAPER_TABLE_1[5].items():
        assert token[name].relative_l2 <= published
        assert token[name].expected_l2 == published


def test_the_default_recipe_is_within_a_seventh_of_table_1_at_sigma_1():
    for row in measure(["token"], [1]):
        assert row.relative_l2 <= 1.15 * row.expected_l2


def test_bias_and_sink_shows_what_v_smoothing_does():
    rows = measure(BIAS_AND_SINK, [1], kind="bias-and-sink", tokens=1024, head_dim=64)
    error = {recipe: by_tensor(rows, recipe, 1)["dq"].relative_l2 for recipe in BIAS_AND_SINK}
    token = "token(v_scale=block, p_levels=127, block_k=64, rotate=False)"
    assert error[token] < 0.4 * error[token.replace("rotate", "smooth_v=False, rotate")]
    assert error["paper(block_q=64, smooth_v=True)"] < 0.7 * error["paper(block_q=64)"]


def test_sink_takes_most_of_the_weight():
    q, k, v, _ = (x.float() for x in draw("sink", 1.0, 512, 64, seed=0))
    weights = (q @ k.mT / 8).softmax(-1)[..., 0]
    assert weights.mean() > 0.8
    assert rms(v[:, :, 0]) < 0.2 * rms(v)


def test_queries_of_a_group_share_their_sink():
    q, k, v = (torch.zeros(1, heads, 8, 16) for heads in (4, 2, 2))
    q, k, _ = with_sinks(q, k, v, 12, (0,), torch.Generator().manual_seed(0))
    logits = (q.unflatten(1, (2, 2)) @ k[:, :, None].mT)[..., 0] / 4
    assert torch.allclose(logits, torch.full_like(logits, 12))
