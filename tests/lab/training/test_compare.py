"""Comparisons of variants, and their report."""

import json
import math

import pytest
from rich.console import Console

from lab.training import compare as comparison
from lab.training import pretrain, run_dir
from tests.lab.training.faults import lose
from tests.lab.training.runs import write_run

LOSSES = {"sdpa": 2.0, "token": 2.001, "paper": 2.01}


@pytest.fixture
def config(tiny):
    return tiny.replace(
        {
            "variants": {
                "full precision": {"attention.recipe": "sdpa"},
                "token": {},
                "paper": {"attention.recipe": "paper"},
            }
        }
    )


@pytest.fixture
def calls(monkeypatch):
    """Instead of training: write what a run writes, and note the calls."""
    calls = []

    def run(config, output, resume=False):
        calls.append((output.name, resume))
        write_run(output, config, LOSSES[config.attention.recipe], {"torch": "x", "device": "<somewhere> & elsewhere"})

    monkeypatch.setattr(pretrain, "run", run)
    return calls


def test_outcomes_and_files(config, tmp_path, calls):
    outcomes = comparison.compare(config, tmp_path / "out")
    assert calls == [("full precision", False), ("token", False), ("paper", False)]
    assert [outcome.recipe for outcome in outcomes] == ["sdpa", "token", "paper"]
    assert [outcome.gap for outcome in outcomes] == pytest.approx([0, 0.001, 0.01])
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["variant"] for row in content["outcomes"]] == list(config.variants)
    digests = [config.replace(overrides).digest() for overrides in config.variants.values()]
    assert [row["digest"] for row in content["outcomes"]] == digests
    assert "| token | token | 2.0010 | +0.0010 |" in (tmp_path / "out" / "comparison.md").read_text()
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    console = Console(record=True, width=120)
    console.print(comparison.table(outcomes))
    assert "+0.0100" in console.export_text()


def test_finished_variants_are_kept(config, tmp_path, calls, capsys):
    comparison.compare(config, tmp_path / "out", only=["full precision", "token"])
    first = list(calls)
    comparison.compare(config, tmp_path / "out")
    assert calls[len(first) :] == [("paper", False)]
    assert "token: finished before, kept" in capsys.readouterr().err


def test_the_gap_is_to_the_first_variant_of_the_config(config, tmp_path, calls):
    (alone,) = comparison.compare(config, tmp_path / "out", only=["paper"])
    assert alone.gap is None
    outcomes = comparison.compare(config, tmp_path / "out", only=["full precision"])
    assert [(x.variant, x.gap) for x in outcomes] == [("full precision", 0), ("paper", pytest.approx(0.01))]


def test_an_interrupted_variant_goes_on(config, tmp_path, calls, monkeypatch):
    real = pretrain.run

    def interrupted(variant, output, resume=False):
        if output.name == "token" and not resume:
            (output / "checkpoint-2").mkdir(parents=True)
            (output / "checkpoint-2" / run_dir.COMPLETE).touch()
            raise KeyboardInterrupt
        real(variant, output, resume)

    monkeypatch.setattr(pretrain, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        comparison.compare(config, tmp_path / "out")
    comparison.compare(config, tmp_path / "out")
    assert calls == [("full precision", False), ("token", True), ("paper", False)]


@pytest.mark.rounding
def test_a_variant_that_diverges_is_reported_and_the_others_go_on(config, tmp_path, monkeypatch, capsys):
    def is_broken(trainer):
        return trainer.model.config._attn_implementation == "sagebwd" and trainer.state.global_step >= 5

    lose(monkeypatch, is_broken)
    variants = {"token": {}, "full precision": {"attention.recipe": "sdpa"}}
    config = config.replace({"variants": variants})
    token, full = comparison.compare(config, tmp_path / "out")
    assert "token: the loss (nan) is not finite at step 6" in capsys.readouterr().err
    assert token.diverged.startswith("the loss (nan) is not finite at step 6")
    assert (token.steps, token.gap, full.diverged, full.gap) == (6, None, None, None)
    assert math.isfinite(token.train_loss)
    assert token.held_out_loss == pytest.approx(full.held_out_loss, abs=1)
    assert "| token | token | diverged, step 6 |  |" in (tmp_path / "out" / "comparison.md").read_text()
    assert "diverged, step 6" in (tmp_path / "out" / "report.html").read_text()
    content = json.loads((tmp_path / "out" / "comparison.json").read_text(), parse_constant=pytest.fail)
    assert content["outcomes"][0]["diverged"] == token.diverged

    monkeypatch.undo()
    assert comparison.compare(config, tmp_path / "out") == [token, full]
    assert "token: diverged before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variants", "only", "message"),
    [
        ({}, None, "no variants to compare"),
        ({"a": {}}, ["b"], "there is no variant 'b'; variants: a"),
        ({"../a": {}}, None, "'../a' cannot name a folder"),
        ({1: {}}, None, "1 cannot name a folder"),
        ({"a": "token"}, None, "a must map keys to values, .*; got 'token'"),
        ({"a": {1: 2}}, None, "a must map keys to values"),
        ({"a": {}, "b": {"model.widht": 3}}, None, "did you mean model.width"),
    ],
)
def test_bad_variants(tiny, tmp_path, calls, variants, only, message):
    with pytest.raises(ValueError, match=message):
        comparison.compare(tiny.replace({"variants": variants}), tmp_path / "out", only)
    assert calls == []
