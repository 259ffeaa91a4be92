"""A model small enough for a test, with tokens for it."""

import torch
from torch import Tensor, nn

from sagebwd.training.config import Config
from sagebwd.training.model import build


def model_and_ids(tiny: Config, **overrides: object) -> tuple[nn.Module, Tensor]:
    """The model of a config, on the reference, and token ids (1, 32)."""
    model = build(tiny.replace({"attention.impl": "reference", **overrides}), 257)
    return model, torch.randint(0, 257, (1, 32), generator=torch.Generator().manual_seed(0))
