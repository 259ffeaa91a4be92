"""Configs: what they accept, and what those of configs/grid vary."""

import json
import re
from pathlib import Path

import pytest
import yaml

from lab.training.config import FULL_PRECISION, Config, load
from sagebwd.recipe import Recipe

ROOT = Path(__file__).parents[3] / "configs"
CONFIGS = sorted(set(ROOT.rglob("*.yaml")) - set((ROOT / "continued").iterdir()))  # which are of another kind


def write(path, content):
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load_with_all_their_variants(path):
    config = load(path)
    for overrides in ({}, *config.variants.values()):
        variant = config.replace(overrides)
        assert variant.attention.recipe in FULL_PRECISION or Recipe.parse(variant.attention.recipe)
        assert variant.accumulation(devices=1) >= 1


def test_settings_change_keys_with_their_types(tmp_path):
    path = write(tmp_path / "run.yaml", "optimisation: {learning_rate: 1e-3, steps: 5}\nmodel: {qk_norm: false}\n")
    config = load(path, ["optimisation.steps=7", "attention.recipe=token(smooth_k=False)", "model.kv_heads=1"])
    assert config.name == "run"
    assert config.optimisation.learning_rate == 1e-3
    assert config.optimisation.steps == 7
    assert config.attention.recipe == "token(smooth_k=False)"
    assert config.model.kv_heads == 1
    assert not config.model.qk_norm


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("optimization: {}", [], "there is no key optimization; did you mean optimisation"),
        ("optimisation: {step: 5}", [], "there is no key optimisation.step; did you mean optimisation.steps"),
        ("optimisation: {steps: many}", [], "optimisation.steps='many' has the wrong type; expected int"),
        ("optimisation: {steps: true}", [], "optimisation.steps=True has the wrong type"),
        ("model: 5", [], "model must hold keys, got 5"),
        ("- 1", [], "expected sections and keys, got list"),
        ("a: [", [], "not readable as YAML"),
        ("{}", ["optimisation.steps"], "expected section.key=value"),
        ("{}", ["optimisation.stepz=5"], "did you mean optimisation.steps"),
        ("{}", ["training.steps=5"], "there is no key training; accepted: name, seed,"),
        ("{}", ["attention.recipe=fp8"], "none called 'fp8'"),
        ("{}", ["optimisation.precision=fp16"], "accepted: fp32, bf16"),
        ("{}", ["optimisation.keep_attention=true"], "needs optimisation.gradient_checkpointing=true"),
        ("{}", ["optimisation.sharding=ddp"], "optimisation.sharding='ddp' is not known; accepted: none, fsdp"),
        ("{}", ["optimisation.steps=0"], "must be at least 1"),
        ("{}", ["model.heads=3"], "model.width=128 is not a multiple of model.heads=3"),
        ("{}", ["model.kv_heads=3", "model.heads=4"], "model.kv_heads=3 does not divide"),
        ("{}", ["model.value_dim=128"], "model.value_dim=128 with model.head_dim=None: expected a head_dim that is"),
        ("{}", ["model.value_dim=64", "model.head_dim=65"], "larger by an even number, as 192 for 128"),
        ("{}", ["model.value_dim=64", "model.head_dim=96"], "expected qk_norm: false and no kv_heads"),
        ("monitor: {ever: 5}", [], "there is no key monitor.ever; did you mean monitor.every"),
        ("{}", ["monitor.every=-1"], "monitor.every=-1 must be at least 0"),
        ("{}", ["monitor.heads=0"], "monitor.heads=0 must be at least 1"),
        ("{}", ["model.vocabulary_multiple=0"], "model.vocabulary_multiple=0 must be at least 1"),
        ("{}", ["monitor.tokens=1"], "monitor.tokens=1 must be at least 2"),
        ("{}", ["monitor.threshold=0"], "monitor.threshold=0.0 must be a number above 0"),
        ("{}", ["monitor.threshold=.nan"], "monitor.threshold=nan must be a number above 0"),
        ("{}", ["monitor.layers=[]"], "monitor.layers=[] must list layers from 0"),
        ("{}", ["monitor.layers=[0, last]"], "monitor.layers=[0, 'last'] must list layers from 0"),
        ("{}", ["monitor.layers=3"], "monitor.layers=3 has the wrong type; expected list or nothing"),
        ("{}", ["monitor.layers=[4]"], "monitor.layers=[4] goes beyond model.layers=4"),
    ],
)
def test_bad_configs_are_one_clear_line(tmp_path, content, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(write(tmp_path / "run.yaml", content), settings)
    assert "\n" not in str(caught.value)


def test_tokens_per_step_is_the_setting():
    config = Config("x").replace({"optimisation.tokens_per_step": 16384, "optimisation.micro_batch": 8})
    assert [config.accumulation(devices) for devices in (1, 2, 4)] == [8, 4, 2]
    with pytest.raises(ValueError, match="16384 is not a multiple of"):
        config.accumulation(3)


def test_digest_sees_what_changes_numbers_and_nothing_else():
    config = Config("x")
    assert config.digest() == Config("y", variants={"a": {}}).digest()
    assert config.digest() == config.replace({"data.cache": "/elsewhere"}).digest()
    assert config.digest() == config.replace({"optimisation.sharding": "fsdp"}).digest()
    checkpointed = config.replace({"optimisation.gradient_checkpointing": True})
    assert checkpointed.digest() == checkpointed.replace({"optimisation.keep_attention": True}).digest()
    for change in ({"seed": 1}, {"attention.recipe": "paper"}, {"optimisation.steps": 7}, {"data.context": 128}):
        assert config.replace(change).digest() != config.digest()
    assert config.digest() == config.replace({"attention.fuse": False}).digest()
    assert config.digest() != config.replace({"attention.fuse": True}).digest()
    latent = config.replace({"model.head_dim": 192, "model.value_dim": 128, "model.qk_norm": False})
    assert latent.digest() != latent.replace({"model.value_dim": None}).digest()


def test_as_dict_reads_back(tmp_path):
    config = Config("x", variants={"a": {"attention.recipe": "paper"}})
    path = write(tmp_path / "x.yaml", yaml.safe_dump(config.as_dict()))
    assert load(path) == config


GRID = Path(__file__).parents[3] / "configs" / "grid"
CONFIGS_OF_GRID = {size: load(GRID / f"{size}.yaml") for size in ("small", "large")}


def test_digests_of_committed_runs_are_todays():
    folder = Path(__file__).parents[3] / "docs" / "results" / "grid" / "mixed-small"
    rows = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["outcomes"]
    variants = CONFIGS_OF_GRID["small"].each_variant()
    assert rows
    for row in rows:
        assert variants[row["variant"]].replace({"seed": row["seed"]}).digest() == row["digest"], row["variant"]


def test_a_fused_attention_is_a_recipe_of_heads():
    fused = CONFIGS_OF_GRID["small"].each_variant()["mixed fused"]
    assert (fused.attention.recipe, fused.attention.fuse) == ("mixed", True)
    with pytest.raises(ValueError, match=r"attention\.fuse=true with attention\.recipe=sdpa"):
        fused.replace({"attention.recipe": "sdpa"})
    latent = {"model.head_dim": 96, "model.value_dim": 64, "model.qk_norm": False}
    with pytest.raises(ValueError, match=r"model\.value_dim=64 with attention\.fuse=true"):
        fused.replace(latent)
