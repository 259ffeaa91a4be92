"""What a GPU that is not there is asked, and what was measured of it."""

from __future__ import annotations

import torch

from sagebwd.auto.thresholds import CAUSAL, FORWARD, Threshold
from sagebwd.call import Ask

ASK = Ask("auto", 128, 128, torch.bfloat16, torch.device("cuda", 0), CAUSAL)
LARGE = 1 << 25


def threshold(tokens, dims=(128, 128), direction=FORWARD, kind=CAUSAL, elements=LARGE, impl="hopper/hopper"):
    recipe = "mixed" if "hopper" in impl else "token"
    return Threshold(*dims, direction, kind, elements, tokens, recipe, impl, "a file")
