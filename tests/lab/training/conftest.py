"""A run small enough for a test: a second or two."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lab.training.config import Config

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A text file of a few hundred short documents."""
    path = tmp_path / "corpus.txt"
    documents = [f"Document {n}. " + TEXT * (2 + n % 5) for n in range(300)]
    path.write_text("".join(f"{document}\n<|endoftext|>\n" for document in documents), encoding="utf-8")
    return path


@pytest.fixture
def tiny(tmp_path: Path, corpus: Path) -> Config:
    """Two narrow layers, eight steps, a checkpoint every two."""
    return Config(name="tiny").replace(
        {
            "model.layers": 2,
            "model.width": 32,
            "model.heads": 2,
            "model.mlp_width": 48,
            "data.source": str(corpus),
            "data.context": 32,
            "data.cache": str(tmp_path / "cache"),
            "optimisation.tokens_per_step": 256,
            "optimisation.micro_batch": 4,
            "optimisation.steps": 8,
            "optimisation.warmup_steps": 2,
            "optimisation.learning_rate": 1e-2,
            "logging.every": 1,
            "logging.evaluate_every": 4,
            "logging.evaluate_sequences": 8,
            "logging.checkpoint_every": 2,
        }
    )


@pytest.fixture
def model_and_ids(tiny: Config) -> Callable[..., tuple[nn.Module, Tensor]]:
    """The model of that run, with keys of its config changed, on the reference, and token ids (1, 32)."""

    from lab.training.model import build

    def make(**overrides: object) -> tuple[nn.Module, Tensor]:
        model = build(tiny.replace({"attention.impl": "reference", **overrides}), 257)
        return model, torch.randint(0, 257, (1, 32), generator=torch.Generator().manual_seed(0))

    return make
