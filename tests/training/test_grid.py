"""The configs of configs/grid: what they vary, and nothing else."""

from pathlib import Path

import pytest

from sagebwd.recipe import Recipe
from sagebwd.training.config import load

GRID = Path(__file__).parents[2] / "configs" / "grid"
CONFIGS = {size: load(GRID / f"{size}.yaml") for size in ("small", "large")}


def differing(one, other, prefix=""):
    """Dotted keys in which two nested dictionaries differ."""
    keys = set()
    for key in one.keys() | other.keys():
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            keys |= differing(a, b, f"{prefix}{key}.")
        elif a != b:
            keys.add(f"{prefix}{key}")
    return keys


@pytest.mark.parametrize("size", CONFIGS)
def test_variants_differ_in_their_recipes_alone(size):
    config = CONFIGS[size]
    variants = config.each_variant()
    recipes = [variant.attention.recipe for variant in variants.values()]
    smoothings = [f"{name}({change})" for name in ("token", "paper") for change in ("smooth_k=False", "smooth_q=True")]
    scales = ("q_scale=token", "k_scale=token", "p_scale_dv=key", "ds_scale_dq=query", "ds_scale_dk=key")
    scales = [f"paper({change})" for change in scales] if size == "small" else []
    assert recipes == ["sdpa", "token", "paper", *smoothings, "sdpa", "mixed", *scales]
    parsed = [Recipe.parse(recipe) for recipe in recipes if recipe != "sdpa"]
    assert len(set(parsed)) == len(parsed)
    for variant in variants.values():
        assert differing(variant.as_dict(), config.as_dict()) <= {"attention.recipe", "variants"} | {
            f"variants.{name}" for name in config.variants
        }


def test_tokens_per_step_differ_by_eight_and_tokens_do_not():
    small, large = (config.optimisation for config in CONFIGS.values())
    assert large.tokens_per_step == 8 * small.tokens_per_step
    assert large.tokens_per_step * large.steps == small.tokens_per_step * small.steps
    assert large.tokens_per_step * large.warmup_steps == small.tokens_per_step * small.warmup_steps
    logs = [config.logging for config in CONFIGS.values()]
    for name in ("every", "evaluate_every", "checkpoint_every"):
        assert getattr(logs[0], name) == 8 * getattr(logs[1], name)


def test_steps_and_logs_alone_differ_between_sizes():
    optimisation = {f"optimisation.{name}" for name in ("tokens_per_step", "micro_batch", "steps", "warmup_steps")}
    logs = {"logging.every", "logging.evaluate_every", "logging.checkpoint_every", "monitor.every"}
    small, large = (config.replace({"variants": {}}).as_dict() for config in CONFIGS.values())
    assert differing(small, large) == {"name"} | optimisation | logs


def test_the_data_suffice_for_whole_evaluations_and_processes_divide():
    for size, config in CONFIGS.items():
        assert config.data.context == 4096
        assert config.model.width // config.model.heads == 64
        assert config.logging.evaluate_sequences * config.data.context <= 430_128
        assert [config.accumulation(devices) for devices in ((1,) if size == "small" else (1, 2, 4))]
