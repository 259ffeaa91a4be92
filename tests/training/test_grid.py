"""The configs of configs/grid: what they vary, and nothing else."""

from pathlib import Path

import pytest

from sagebwd.recipe import Recipe
from sagebwd.training.config import load

GRID = Path(__file__).parents[2] / "configs" / "grid"
NORMS, SIZES = ("qknorm", "no-qknorm"), ("small", "large")
CONFIGS = {(norm, size): load(GRID / f"{norm}-{size}.yaml") for norm in NORMS for size in SIZES}
RATES = {size: load(GRID / f"learning-rates-{size}.yaml") for size in SIZES}


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


@pytest.mark.parametrize(("norm", "size"), CONFIGS)
def test_each_cell_has_its_recipes(norm, size):
    config = CONFIGS[norm, size]
    variants = config.each_variant()
    recipes = [variant.attention.recipe for variant in variants.values()]
    expected = ["sdpa", "token", "paper"]
    if norm == "qknorm":
        expected += [
            f"{name}({change})" for name in ("token", "paper") for change in ("smooth_k=False", "smooth_q=True")
        ]
    assert recipes == [*expected, "sdpa", "mixed", "token_fp8"]
    assert all(variant.model.qk_norm == (norm == "qknorm") for variant in variants.values())
    parsed = [Recipe.parse(recipe) for recipe in recipes if recipe != "sdpa"]
    assert len(set(parsed)) == len(parsed)
    for variant in variants.values():
        assert differing(variant.as_dict(), config.as_dict()) <= {"attention.recipe", "variants"} | {
            f"variants.{name}" for name in config.variants
        }


def test_tokens_per_step_differ_by_eight_and_tokens_do_not():
    for norm in NORMS:
        small, large = (CONFIGS[norm, size].optimisation for size in SIZES)
        assert large.tokens_per_step == 8 * small.tokens_per_step
        assert large.tokens_per_step * large.steps == small.tokens_per_step * small.steps
        assert large.tokens_per_step * large.warmup_steps == small.tokens_per_step * small.warmup_steps
        logs = [CONFIGS[norm, size].logging for size in SIZES]
        for name in ("every", "evaluate_every", "checkpoint_every"):
            assert getattr(logs[0], name) == 8 * getattr(logs[1], name)


def test_only_the_norm_differs_between_files_of_one_size():
    for size in SIZES:
        one, other = (CONFIGS[norm, size].replace({"variants": {}}).as_dict() for norm in NORMS)
        assert differing(one, other) == {"name", "model.qk_norm"}


def test_the_data_suffice_for_whole_evaluations_and_processes_divide():
    for (_, size), config in CONFIGS.items():
        assert config.data.context == 4096
        assert config.model.width // config.model.heads == 64
        assert config.logging.evaluate_sequences * config.data.context <= 430_128
        assert [config.accumulation(devices) for devices in ((1,) if size == "small" else (1, 2, 4))]


@pytest.mark.parametrize("size", SIZES)
def test_learning_rates_are_chosen_on_full_precision(size):
    config = RATES[size]
    variants = config.each_variant()
    assert {variant.attention.recipe for variant in variants.values()} == {"sdpa"}
    tried = {(variant.model.qk_norm, variant.optimisation.learning_rate) for variant in variants.values()}
    assert len(tried) == len(variants) == 8
    for norm in NORMS:
        cell = CONFIGS[norm, size]
        assert (cell.model.qk_norm, cell.optimisation.learning_rate) in tried
        same = cell.replace({"variants": {}, "attention.recipe": "sdpa"})
        assert same.digest() in {variant.digest() for variant in variants.values()}
