import math

import pytest
import torch

from sagebwd.analysis.gaussian import BIAS_AND_SINK, PAPER_TABLE_1, draw, measure
from sagebwd.meaning.metrics import rms
from sagebwd.recipe import Recipe

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


def test_expected_figures_are_found_by_the_recipes_own_text():
    assert all(str(Recipe.parse(text)) == text for text in BIAS_AND_SINK)


def test_bias_and_sink_shows_what_v_smoothing_does():
    rows = measure(BIAS_AND_SINK, [1], kind="bias-and-sink", tokens=1024, head_dim=64)
    error = {recipe: by_tensor(rows, recipe, 1)["dq"].relative_l2 for recipe in BIAS_AND_SINK}
    token = "token(v_scale=block, p_levels=127, block_k=64, rotate=False)"
    assert error[token] < 0.4 * error[token.replace("rotate", "smooth_v=False, rotate")]
    assert error["paper(block_q=64, smooth_v=True)"] < 0.7 * error["paper(block_q=64)"]


def test_drawn_inputs():
    q, k, v, do = draw("plain", 5.0, 2048, 64, seed=3)
    assert [x.dtype for x in (q, k, v, do)] == [torch.bfloat16] * 4
    assert [rms(x) for x in (q, k, v, do)] == pytest.approx([5, 5, 1, 1], rel=0.02)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v, do), draw("plain", 5.0, 2048, 64, seed=3)))
    assert not torch.equal(q, draw("plain", 5.0, 2048, 64, seed=4)[0])
    biased_v = draw("bias-and-sink", 1.0, 2048, 64, seed=3)[2]
    assert rms(biased_v.float().mean(-2)) == pytest.approx(3, rel=0.3)


def test_sink_takes_most_of_the_weight():
    q, k, v, _ = (x.float() for x in draw("sink", 1.0, 512, 64, seed=0))
    weights = (q @ k.mT / 8).softmax(-1)[..., 0]
    assert weights.mean() > 0.8
    assert rms(v[:, :, 0]) < 0.2 * rms(v)


def test_rows_average_seeds():
    one, two = (measure(["token"], [1], tokens=128, head_dim=16, seeds=n) for n in (1, 2))
    assert len(one) == len(two) == 4
    assert one[0].relative_l2 != two[0].relative_l2
    assert all(0 < row.relative_l2 < 0.05 and math.isfinite(row.cosine) for row in two)


def test_bad_arguments():
    with pytest.raises(ValueError, match="at least one of each"):
        measure([], [1])
    with pytest.raises(ValueError, match="kind='uniform'"):
        draw("uniform", 1, 8, 8, 0)
