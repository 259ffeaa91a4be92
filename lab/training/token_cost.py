"""What a gap in held-out loss costs in training tokens, by a published fit of loss to model and data.

Hoffmann et al., Training Compute-Optimal Large Language Models (arXiv 2203.15556, equation 10 and its fit):

    L(N, D) = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28

with N weights and D tokens, nats a token. A model that ends g above another after D tokens gets down to it after D'
with B / D'^b = B / D^b - g, so D' / D = (1 - g D^b / B)^(-1/b). N does not enter. The fit is of other models and other
text than those here: it says how large a gap is, not what these models would do.
"""

from __future__ import annotations

B, EXPONENT = 410.7, 0.28


def cost(gap: float, tokens: float) -> float:
    """The share of ``tokens`` that make up for a gap in nats: 0.02 is 2% more; below 0 where the gap is.

    Infinite where no number of tokens does.
    """
    left = 1 - gap * tokens**EXPONENT / B
    return left ** (-1 / EXPONENT) - 1 if left > 0 else float("inf")


def worth(speed: float, tokens: float) -> float:
    """The gap in nats that costs what a step ``speed`` times as fast gains: `cost` of it is ``speed`` - 1."""
    return B / tokens**EXPONENT * (1 - speed**-EXPONENT)
