import json

import pytest
import torch

from sagebwd.analysis import sinks
from sagebwd.analysis.gaussian import with_sinks
from sagebwd.recipe import Recipe

pytestmark = pytest.mark.rounding


def measured(kind="first", logits=12, recipes=("token", "token(first_key=int8)"), tokens=1536, head_dim=64):
    rows = sinks.measure_strengths([kind], recipes, [logits], tokens, head_dim, 1)
    return {row["recipe"]: row for row in rows}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_first_key_apart_mends_a_sink(head_dim):
    """Bounds: those asked of `token`; with the first key in INT8 more of dQ is wrong than a third."""
    rows = measured(head_dim=head_dim)
    apart, together = rows["token"], rows["token(first_key=int8)"]
    assert apart["weight"] > 0.9
    assert apart["o"] <= 0.01
    assert max(apart["dq"], apart["dk"]) <= 0.05
    assert together["o"] > 10 * apart["o"]
    assert together["dq"] > 10 * apart["dq"]


def test_paper_has_the_switch():
    rows = measured(recipes=("paper", "paper(first_key=16bit)"), tokens=512)
    assert rows["paper"]["dq"] > 5 * rows["paper(first_key=16bit)"]["dq"]


@pytest.mark.parametrize(("kind", "better"), [("first and mean", 3), ("four", 1), ("delimiter", 1)])
def test_other_sinks_are_no_worse(kind, better):
    rows = measured(kind, tokens=512)
    assert better * rows["token"]["dq"] < 1.1 * rows["token(first_key=int8)"]["dq"]


def test_backward_does_not_want_it():
    """Apart in dV only the sink's own row gains, in dQ a little, in dK nothing: its neighbours are as they were."""
    rows = {row["apart"]: row for row in sinks.measure_keys([12.0], 512, 64)}
    assert rows["dv"]["dv first"] < 0.7 * rows[""]["dv first"]
    assert all(row["dv rest"] == rows[""]["dv rest"] for row in rows.values())
    assert 0.5 * rows[""]["dq"] < rows["dq"]["dq"] < rows[""]["dq"]
    assert rows["dk"]["dk rest"] == rows[""]["dk rest"]


def test_drawn_sinks():
    q, k, _, do = sinks.draw("delimiter", 12, 64, 16, seed=1)
    plain = sinks.draw("delimiter", 0, 64, 16, seed=1)
    changed = [key for key in range(64) if not torch.equal(k[:, :, key], plain[1][:, :, key])]
    assert changed == [0, 32]
    more = (q @ (k - plain[1]).mT)[0, 0, :, changed] / 4
    assert more.mean(0).tolist() == pytest.approx([12, 12], rel=0.1)
    assert torch.equal(do, plain[3])
    with pytest.raises(ValueError, match="kind='last' is not known"):
        sinks.draw("last", 1, 8, 8, 0)


def test_queries_of_a_group_share_their_sink():
    q, k, v = (torch.zeros(1, heads, 8, 16) for heads in (4, 2, 2))
    q, k, _ = with_sinks(q, k, v, 12, (0,), torch.Generator().manual_seed(0))
    logits = (q.unflatten(1, (2, 2)) @ k[:, :, None].mT)[..., 0] / 4
    assert torch.allclose(logits, torch.full_like(logits, 12))


def test_products_are_named(tmp_path, capsys):
    sinks.main(["products", str(tmp_path / "products.json"), "--tokens", "128", "--recipe", "token"])
    rows = json.loads((tmp_path / "products.json").read_text())["rows"]
    assert [row["16bit"] for row in rows] == ["", "s", "o", "dv", "dq", "dk"]
    assert rows[0]["recipe"] == str(Recipe())
    assert "| token | o |" in capsys.readouterr().out


def test_plot(tmp_path):
    given = ["strengths", str(tmp_path / "s.json"), "--tokens", "64", "--kind", "first", "--seeds", "1"]
    sinks.main([*given, "--logits", "0", "--logits", "12", "--recipe", "token"])
    sinks.main(["plot", str(tmp_path / "s.json"), str(tmp_path / "s.png")])
    assert (tmp_path / "s.png").stat().st_size > 1000
