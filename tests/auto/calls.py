"""What a GPU that is not there is asked, and what was measured of it."""

from __future__ import annotations

import torch

from sagebwd.auto.contenders import TORCH
from sagebwd.auto.model import FORWARD, Cost, Times
from sagebwd.call import Ask
from sagebwd.masks.kinds import CAUSAL

ASK = Ask("auto", 128, 128, torch.bfloat16, torch.device("cuda", 0), CAUSAL)
# Microseconds of torch in `times`: for each row 1 ns, for each pair 2 ps, beside nothing.
FULL = Cost.of(0, 0, 1, 2)


def times(low, dims=(128, 128), direction=FORWARD, kind=CAUSAL, impl="hopper/hopper", full=FULL, **more):
    """Low precision takes ``low``: microseconds of the host and the launches, ns of a row, ps of a pair.

    full: torch's, None where it does not run; more: of other contenders in full precision, as ``low``.
    """
    recipe = "mixed" if "hopper" in impl else "token"
    full = {} if full is None else {TORCH: full}
    full |= {name: Cost.of(*cost) for name, cost in more.items()}
    return Times(kind, *dims, direction, recipe, impl, Cost.of(*low), full, "some timings", torch.__version__)


# What is faster at any size, and what never is.
FASTER, SLOWER = (0, 0, 0.5, 1), (0, 0, 2, 4)
# Causal, of as many queries as keys and heads that are alike: 2 ns of rows are 1 ps of pairs at 4000 tokens, of the 2
# that torch takes.
FROM_4000 = (0, 0, 2, 1)
