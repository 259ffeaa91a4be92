"""What a training step of a decoder takes, and gains, on a card that this project has timed; nothing runs.

Attention's time is what `auto` goes by. The rest is a roofline of a compiled decoder in BF16 with AdamW: its products
at a share of the card's peak, and what passes over activations, logits and weights move at its memory's bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from sagebwd.auto import model
from sagebwd.auto.contenders import NAMES
from sagebwd.auto.model import CAUSAL, TRAINING, Size
from sagebwd.cli.hardware import peak_rates

PRODUCTS = 0.66
"""The share of the BF16 peak at which a step's products run."""
WIDTH_PASSES, MLP_PASSES, HEADS_PASSES = 28, 11, 6
"""How often a layer's forward and backward read or write the stream, the MLP's inside, and queries and keys."""
LOGIT_BYTES, WEIGHT_BYTES = 16, 14
"""Of a logit, in BF16 and FP32, and of a weight, its gradient and two moments in AdamW."""
TOKENS, WIDENING = 32768, 3.5
"""Tokens of a step, and the MLP's inside over the width, unless told; the latter is Llama 3's."""
VOCABULARY = 128256
MOST = 10**12
"""Of any number that is given: what follows from several is one that a float holds."""


@dataclass(frozen=True)
class Estimate:
    """Milliseconds of a step: rest, all but attention; ours, attention under "auto"; others, by its contenders."""

    rest_ms: float
    ours_ms: float
    others_ms: dict[str, float]

    def gain(self, contender: str) -> float:
        """How many times as fast a step is as with another attention."""
        return (self.rest_ms + self.others_ms[contender]) / (self.rest_ms + self.ours_ms)

    def share(self, contender: str) -> float:
        """Of attention in a step with another one."""
        return self.others_ms[contender] / (self.rest_ms + self.others_ms[contender])


def card_of(gpu: str) -> str:
    """The name in full of a card that was timed; raises ValueError for another, or for one of several."""
    known = list(model.of_this_project())
    found = [name for name in known if gpu.lower() in name.lower()]
    if len(found) != 1:
        raise ValueError(f"gpu={gpu!r} was not timed; accepted: {', '.join(known)}, or a part of one of these")
    return found[0]


def estimate(
    gpu: str, *, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, tokens: int,
    batch: int | None = None, intermediate: int | None = None, vocabulary: int = VOCABULARY,
) -> Estimate:  # fmt: skip
    """A step of a causal decoder.

    Args: gpu, a card that was timed, or a part of its name; tokens, of each of ``batch`` sequences [`TOKENS` in all];
    intermediate, the MLP's inside [3.5 times hidden].

    Raises ValueError for a card or a head_dim that was not timed, for numbers below 1 or above `MOST` and for
    heads that are no multiple of kv_heads.
    """
    given = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
             "tokens": tokens, "batch": batch, "intermediate": intermediate, "vocabulary": vocabulary}  # fmt: skip
    for name, value in given.items():
        if value is not None and not 1 <= value <= MOST:
            raise ValueError(f"{name}={value} must be at least 1 and at most {MOST:,}")
    if heads % kv_heads:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
    batch = max(1, TOKENS // tokens) if batch is None else batch
    intermediate = round(WIDENING * hidden) if intermediate is None else intermediate
    card = card_of(gpu)
    of_card = [times for times in model.of_this_project()[card] if (times.kind, times.direction) == (CAUSAL, TRAINING)]
    times = next((times for times in of_card if times.head_dim == times.value_dim == head_dim), None)
    if times is None:
        timed = ", ".join(str(times.head_dim) for times in of_card if times.head_dim == times.value_dim)
        raise ValueError(f"head_dim={head_dim} was not timed on an {card}; accepted: {timed}")
    low, full = times.ms(Size(tokens, tokens, heads * batch, kv_heads * batch))
    best = min(full.values())
    ours = best if low is None or model.with_margin(low) > best else low
    # all but attention, of the tokens of a step
    step = tokens * batch
    projections = 2 * hidden * (heads + kv_heads) * head_dim
    weights = layers * (projections + 3 * hidden * intermediate) + vocabulary * hidden
    passes = WIDTH_PASSES * hidden + MLP_PASSES * intermediate + HEADS_PASSES * (heads + kv_heads) * head_dim
    moved = 2 * passes * step * layers + LOGIT_BYTES * vocabulary * step + WEIGHT_BYTES * weights
    rates = peak_rates(card)
    rest = 6 * weights * step / (PRODUCTS * rates.bf16_tflops) * 1e-9 + moved / rates.memory_tb_per_s * 1e-9
    others = sorted(full.items(), key=lambda item: item[1])
    return Estimate(rest, layers * ours, {name: layers * ms for name, ms in others})


def lines(found: Estimate) -> list[str]:
    """What the command prints."""
    said = [f"all but attention about {found.rest_ms:.0f} ms a step, attention under auto {found.ours_ms:.0f} ms"]
    for name, ms in found.others_ms.items():
        said.append(
            f"  over {NAMES[name]}: {found.gain(name):.2f} times as fast a step; its attention {ms:.0f} ms, "
            f"{found.share(name):.0%} of the step"
        )
    return said
