"""A run that goes on with another attention: from full precision to a recipe and back."""

import json

import pytest
import yaml

from sagebwd.training import pretrain
from tests.training.test_pretrain import metrics, stop_at


def stopped(config, folder, step, resume=False):
    """A run that is interrupted at ``step``; the checkpoint before it is whole."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, step, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            pretrain.run(config, folder, resume)


@pytest.mark.rounding
def test_from_full_precision_to_a_recipe_and_back(tiny, tmp_path):
    full = tiny.replace({"attention.recipe": "sdpa", "monitor.every": 1})
    mixed = full.replace({"attention.recipe": "mixed"})
    pretrain.run(full, tmp_path / "whole")
    stopped(full, tmp_path / "run", 5)
    stopped(mixed, tmp_path / "run", 7, resume=True)
    pretrain.run(full, tmp_path / "run", resume=True)

    switched = [{"until": 4, "recipe": "sdpa", "impl": None}, {"until": 6, "recipe": "mixed", "impl": None}]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["switched"] == switched
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["switched"] == switched
    assert result["digest"] not in (full.digest(), mixed.digest())

    here, whole = metrics(tmp_path / "run"), metrics(tmp_path / "whole")
    for step in range(1, 5):
        assert here[step, "loss"] == whole[step, "loss"]
    assert 0 < abs(here[5, "loss"] - whole[5, "loss"]) < 0.05, "the same weights, another attention"
    assert here[8, "loss"] < here[1, "loss"] - 0.5
    watched = {line["step"] for line in pretrain.read_metrics(tmp_path / "run") if "monitor/seconds" in line}
    assert watched == {5, 6}, "while attention is quantised"


def test_a_switched_run_is_resumed_as_what_it_is(tiny, tmp_path):
    full = tiny.replace({"attention.recipe": "sdpa"})
    mixed = full.replace({"attention.recipe": "mixed"})
    stopped(full, tmp_path / "run", 3)
    stopped(mixed, tmp_path / "run", 5, resume=True)
    stopped(mixed, tmp_path / "run", 7, resume=True)
    pretrain.run(mixed, tmp_path / "run", resume=True)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["switched"] == [{"until": 2, "recipe": "sdpa", "impl": None}]


def test_nothing_else_may_change(tiny, tmp_path):
    stopped(tiny, tmp_path / "run", 5)
    other = tiny.replace({"attention.recipe": "mixed", "optimisation.learning_rate": 2e-2})
    with pytest.raises(ValueError, match="holds a run of another config"):
        pretrain.run(other, tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="holds a run of another config"):
        pretrain.run(tiny.replace({"attention.recipe": "mixed"}), tmp_path / "run")


def test_not_under_automatic_precision(tiny, tmp_path):
    automatic = tiny.replace({"monitor.every": 2, "monitor.precision": "auto"})
    stopped(automatic, tmp_path / "run", 5)
    with pytest.raises(ValueError, match=r"attention\.recipe cannot change on --resume under monitor\.precision=auto"):
        pretrain.run(automatic.replace({"attention.recipe": "mixed"}), tmp_path / "run", resume=True)
