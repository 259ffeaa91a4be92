"""Runs that begin, stop, resume, diverge and go on with another attention."""

import errno
import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from lab.training import pretrain
from lab.training.model import build
from tests.lab.training.faults import interrupted, lose
from tests.lab.training.runs import losses


@pytest.mark.rounding
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("recipe", ["sdpa", "token"])
def test_a_run_learns_and_says_what_it_did(tiny, tmp_path, recipe, qk_norm):
    config = tiny.replace({"attention.recipe": recipe, "model.qk_norm": qk_norm})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pretrain.run(config, tmp_path / "run")
    warned = any("without QK-norm INT8 attention can diverge" in str(one.message) for one in caught)
    assert warned == (recipe == "token" and not qk_norm)
    lines = losses(tmp_path / "run")
    assert lines[8, "loss"] < lines[1, "loss"] - 0.5
    assert lines[8, "held_out_loss"] < lines[4, "held_out_loss"]
    assert all(math.isfinite(value) for value in lines.values())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["digest"] == config.digest()
    assert result["held_out_loss"] == lines[8, "held_out_loss"]
    assert result["tokens"] == 8 * 256
    assert result["environment"]["torch"] == torch.__version__
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert list((tmp_path / "run" / "tensorboard").rglob("events*"))
    assert [path.name for path in pretrain.checkpoints(tmp_path / "run")] == ["checkpoint-6", "checkpoint-8"]


@pytest.mark.rounding
def test_same_weights_and_data_whatever_the_attention(tiny, tmp_path):
    first = {}
    for recipe in ("sdpa", "token"):
        config = tiny.replace({"attention.recipe": recipe, "optimisation.steps": 1})
        pretrain.run(config, tmp_path / recipe)
        first[recipe] = losses(tmp_path / recipe)[1, "loss"]
    assert first["token"] == pytest.approx(first["sdpa"], abs=1e-3)
    assert first["token"] != first["sdpa"]
    weights = [dict(build(tiny.replace({"attention.recipe": r}), 257).named_parameters()) for r in ("sdpa", "paper")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("recipe", ["sdpa", "token"])
def test_stopped_and_resumed_is_never_stopped(tiny, tmp_path, recipe):
    config = tiny.replace({"attention.recipe": recipe})
    pretrain.run(config, tmp_path / "whole")
    with interrupted(5):
        pretrain.run(config, tmp_path / "broken")
    assert [path.name for path in pretrain.checkpoints(tmp_path / "broken")] == ["checkpoint-2", "checkpoint-4"]
    before = {
        line["step"]: line["seconds"] for line in pretrain.read_metrics(tmp_path / "broken") if "seconds" in line
    }
    pretrain.run(config, tmp_path / "broken", resume=True)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    after = {line["step"]: line["seconds"] for line in pretrain.read_metrics(tmp_path / "broken") if "seconds" in line}
    assert after[4] == before[4], "of the first part"
    result = json.loads((tmp_path / "broken" / "result.json").read_text())
    assert result["seconds"] == after[8] > before[4]
    assert result["tokens_per_s"] == pytest.approx(result["tokens"] / result["seconds"])


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tiny, tmp_path, monkeypatch):
    lose(monkeypatch, lambda trainer: trainer.state.global_step >= 5)
    with pytest.raises(pretrain.TrainingStopped, match=r"loss \(nan\) is not finite at step 6.*checkpoint-4"):
        pretrain.run(tiny, tmp_path / "run")
    assert [path.name for path in pretrain.checkpoints(tmp_path / "run")] == ["checkpoint-2", "checkpoint-4"]
    assert not (tmp_path / "run" / "result.json").exists()


def test_weights_that_are_not_finite_are_never_saved(tiny, tmp_path, monkeypatch):
    real = pretrain._Trainer.training_step

    def training_step(self, model, *args, **kwargs):
        if self.state.global_step == 3:
            next(model.parameters()).data.fill_(math.nan)
            return torch.zeros(())
        return real(self, model, *args, **kwargs)

    monkeypatch.setattr(pretrain._Trainer, "training_step", training_step)
    with pytest.raises(pretrain.TrainingStopped, match="a weight is not finite at step 4"):
        pretrain.run(tiny, tmp_path / "run")
    assert [path.name for path in pretrain.checkpoints(tmp_path / "run")] == ["checkpoint-2"]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")],
)
def test_a_full_disk_leaves_no_half_checkpoint(tiny, tmp_path, monkeypatch, error):
    real = pretrain.Trainer._save_optimizer_and_scheduler

    def save(self, folder):
        real(self, folder)
        if self.state.global_step == 4:
            raise error

    monkeypatch.setattr(pretrain.Trainer, "_save_optimizer_and_scheduler", save)
    with pytest.raises(OSError, match=r"checkpoint-4 could not be written.*--resume"):
        pretrain.run(tiny, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint-4").exists()
    monkeypatch.undo()
    pretrain.run(tiny, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "result.json").exists()


def test_a_kill_while_an_old_checkpoint_is_deleted_costs_nothing(tiny, tmp_path, monkeypatch):
    def rmtree(folder, **_):
        next(Path(folder).glob("scheduler.pt")).unlink()  # without it Trainer warms up again, and says nothing
        raise KeyboardInterrupt

    config = tiny.replace({"logging.keep_checkpoints": 1})
    with monkeypatch.context() as patch:
        for module in ("lab.training.run_dir", "transformers.trainer_utils"):
            patch.setattr(f"{module}.shutil", SimpleNamespace(rmtree=rmtree))
        with pytest.raises(KeyboardInterrupt):
            pretrain.run(config, tmp_path / "run")
    assert [path.name for path in pretrain.checkpoints(tmp_path / "run")] == ["checkpoint-4"]
    pretrain.run(config, tmp_path / "run", resume=True)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-8"]
    pretrain.run(config, tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_folders_that_hold_something_else(tiny, tmp_path):
    with pytest.raises(ValueError, match="no whole checkpoint to resume from"):
        pretrain.run(tiny, tmp_path / "run", resume=True)
    with interrupted(3):
        pretrain.run(tiny, tmp_path / "run")
    with pytest.raises(ValueError, match="unfinished; go on with --resume"):
        pretrain.run(tiny, tmp_path / "run")
    other = tiny.replace({"model.width": 64})
    with pytest.raises(ValueError, match="holds a run of another config"):
        pretrain.run(other, tmp_path / "run", resume=True)
    pretrain.run(tiny, tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="holds this run, finished"):
        pretrain.run(tiny, tmp_path / "run")


@pytest.mark.rounding
def test_from_full_precision_to_a_recipe_and_back(tiny, tmp_path):
    full = tiny.replace({"attention.recipe": "sdpa", "monitor.every": 1})
    mixed = full.replace({"attention.recipe": "mixed"})
    pretrain.run(full, tmp_path / "whole")
    with interrupted(5):
        pretrain.run(full, tmp_path / "run")
    with interrupted(7):
        pretrain.run(mixed, tmp_path / "run", resume=True)
    pretrain.run(full, tmp_path / "run", resume=True)

    switched = [
        {"until": n, "recipe": recipe, "impl": None, "fuse": False} for n, recipe in ((4, "sdpa"), (6, "mixed"))
    ]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["switched"] == switched
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["switched"] == switched
    assert result["digest"] not in (full.digest(), mixed.digest())

    here, whole = losses(tmp_path / "run"), losses(tmp_path / "whole")
    for step in range(1, 5):
        assert here[step, "loss"] == whole[step, "loss"]
    assert 0 < abs(here[5, "loss"] - whole[5, "loss"]) < 0.05, "the same weights, another attention"
    assert here[8, "loss"] < here[1, "loss"] - 0.5
    watched = {line["step"] for line in pretrain.read_metrics(tmp_path / "run") if "monitor/seconds" in line}
    assert watched == {5, 6}, "while attention is quantised"
