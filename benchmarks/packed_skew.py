"""Peak memory of packed documents of any skew, forward and backward, beside FlashAttention-4's.

Documents of very different lengths, sequences without a token, as static shapes have them behind the last, and a
``max_seqlen`` that is only a bound: what a call takes should follow its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.attention import attention_of, memory
from benchmarks.baselines import FLASH_ATTENTION_4, candidates, refusal
from benchmarks.correctness import gate
from benchmarks.packed import CPU_DOCUMENTS, CPU_SHARE, DOCUMENTS, Packed
from sagebwd.recipe import Recipe

MOST = 1.35
"""Times FlashAttention-4's peak that ours may take."""
CASES = {
    "one of 32768 among 1366 of 70": Packed.of(128, 32, 32, [32768] + [70] * 1366),
    "one of 16384 among 1000 of 120": Packed.of(128, 16, 16, [16384] + [120] * 1000),
    "static shapes, 509 empty behind the last": Packed.of(128, 16, 4, [16084, 200, 100] + [0] * 509),
    "509 empty in between": Packed.of(128, 16, 4, [16084] + [0] * 509 + [200, 100]),
    "max_seqlen of 131072": Packed.of(128, 16, 4, DOCUMENTS["mixed"], bound=131072),
    "3000 of 8": Packed.of(128, 16, 4, [8] * 3000),
    "3000 of 8, as many key heads": Packed.of(128, 16, 16, [8] * 3000),
    "sft": Packed.of(128, 16, 16, DOCUMENTS["sft"]),
    "web": Packed.of(128, 16, 4, DOCUMENTS["web"]),
}


@dataclass(frozen=True)
class Measurement:
    """One row of the result file; MiB beyond the inputs, forward and backward, None where there is nothing.

    over: of FlashAttention-4's peak. gate: of the last document that has a token, "ok" or "FAILED".
    """

    case: str
    recipe: str
    impl: str | None
    head_dim: int
    heads: int
    kv_heads: int
    tokens: int
    documents: int
    longest: int
    bound: int
    peak_mib: float | None
    fa4_peak_mib: float | None
    over: float | None
    gate: str


def cases(device: str) -> dict[str, Packed]:
    """`CASES`; on a CPU of few documents, of a share of their tokens."""
    if device != "cpu":
        return CASES
    return {
        name: Packed.of(
            32, 2, 1, [-(-n // CPU_SHARE) for n in (*one.lengths[:CPU_DOCUMENTS], *one.lengths[-2:])],
            bound=-(-one.bound // CPU_SHARE),
        )
        for name, one in CASES.items()
    }  # fmt: skip


def measure(
    recipe: Recipe, impl: str | None, device: str, names: Iterable[str],
    tell: Callable[[str, float], object] = lambda *_: None,
) -> Iterator[Measurement]:  # fmt: skip
    """A row of each case named."""
    shapes, names = cases(device), list(names)
    for number, name in enumerate(names):
        shape = shapes[name]
        tell(name, number / len(names))
        inputs = shape.inputs(device, torch.bfloat16)
        ours = attention_of(shape, recipe, impl, device)
        last = [one for one in shape.sequences() if one.start < one.stop][-1]
        checked = gate(shape, ours, recipe, inputs, tokens=last)  # by then all is compiled, and kept memory is there
        peak, _ = memory(ours, inputs)
        theirs = candidates(shape, device).get(FLASH_ATTENTION_4)
        their_peak = None
        if theirs is not None and refusal(theirs, shape, device) is None:
            their_peak, _ = memory(theirs, inputs)
        yield Measurement(
            name, str(recipe), impl, shape.head_dim, shape.heads, shape.kv_heads, shape.tokens, len(shape.lengths),
            max(shape.lengths), shape.longest, _mib(peak), _mib(their_peak),
            None if None in (peak, their_peak) else peak / their_peak, checked,
        )  # fmt: skip


def _mib(peak: int | None) -> float | None:
    return None if peak is None else round(peak / 2**20, 1)
