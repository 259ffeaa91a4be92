"""What Hopper's FP8 tensor cores make of long sums, emulated on a CPU: `python -m tools.accumulation`.

Their accumulator keeps 13 bits behind its leading one (DeepSeek-V3, arXiv 2412.19437, section 3.3.2, finds "around 14
bits"): in each product of 32 terms all terms and the sum so far are cut off, toward zero, below the 13th bit of the
largest of them. Where terms of a sum have the same sign this makes it too small, the more the longer it is.

Prints, for dV of causal attention as `mixed` computes it (P and dO in e4m3, by `sagebwd.reference.float8`'s scales),
the slope of the result on the exact dV and its relative error: with the accumulator of 13 bits, and with one of 23.
Keys are the first 64 of a sequence and 64 in its middle. dO is normal noise plus a vector that all tokens share, whose
length is ``share`` times the noise's. Scores are equal, or normal with standard deviation 1.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from sagebwd.reference.float8 import E4M3_MAX, e4m3

HOPPER, FP32 = 13, 23
# Terms of one instruction.
TERMS = 32
HEAD_DIM, KEYS = 64, 64


def add_product(total: Tensor, a: Tensor, b: Tensor, bits: int) -> Tensor:
    """total + a b for (M, K), (K, N) and (M, N), every term cut off ``bits`` below the largest one's leading bit."""
    terms = torch.cat([total[:, None], a[:, :, None] * b], 1)
    exponent = torch.frexp(terms.abs().amax(1, keepdim=True)).exponent - 1
    unit = torch.ldexp(torch.ones_like(terms[:, :1]), exponent - bits)
    return (torch.trunc(terms / unit) * unit).sum(1).float().double()


def summed(a: Tensor, b: Tensor, bits: int, promote: int | None = None) -> Tensor:
    """a b in instructions of `TERMS` terms, which begin anew every ``promote`` terms and are then added up exactly."""
    total = kept = a.new_zeros(len(a), b.shape[1])
    for first in range(0, a.shape[1], TERMS):
        if promote and first % promote == 0:
            kept, total = kept + total, torch.zeros_like(total)
        total = add_product(total, a[:, first : first + TERMS], b[first : first + TERMS], bits)
    return kept + total


def operands(tokens: int, first: int, share: float, deviation: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """P^T of `KEYS` keys and dO as e4m3 codes, and the exact dV in units of the codes' product."""
    generator = torch.Generator().manual_seed(seed)
    q, k, do = (torch.randn(tokens, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(3))
    do += share * torch.randn(HEAD_DIM, generator=generator, dtype=torch.float64)
    weights = torch.zeros(tokens, KEYS, dtype=torch.float64)
    lse, top = (torch.full((tokens,), -math.inf, dtype=torch.float64) for _ in range(2))
    for begin in range(0, tokens, 1024):
        rows = slice(begin, begin + 1024)
        scores = deviation * (q[rows] @ k.T) / math.sqrt(HEAD_DIM)
        scores.masked_fill_(torch.arange(tokens) > torch.arange(tokens)[rows, None], -math.inf)
        lse[rows], top[rows] = scores.logsumexp(1), scores.amax(1)
        weights[rows] = torch.exp(scores[:, first : first + KEYS] - lse[rows, None])
    exponent = torch.floor((lse - top) / math.log(2) + math.log2(E4M3_MAX))
    factor = torch.exp2(-exponent)[:, None]
    unit = torch.exp2(torch.floor(torch.log2(E4M3_MAX / (do * factor).abs().max())))
    return e4m3(weights / factor).T, e4m3(do * factor * unit), weights.T @ do * unit


def line(tokens: int, first: int, share: float, deviation: float, promote: int | None = None, seed: int = 0) -> str:
    """A row of the table."""
    a, b, exact = operands(tokens, first, share, deviation, seed)
    cells = []
    for bits in (HOPPER, FP32):
        got = summed(a, b, bits, promote)
        slope, error = (got * exact).sum() / (exact * exact).sum(), (got - exact).norm() / exact.norm()
        cells.append(f"{slope:.3f} | {error:.3f}")
    where = "first" if first == 0 else "middle"
    return f"| {tokens} | {'equal' if deviation == 0 else 'normal'} | {where} | {share:g} | {' | '.join(cells)} |"


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--share", type=float, nargs="+", default=[0.0, 0.5, 2.0])
    parser.add_argument("--promote", type=int, help="queries after which sums are added up exactly and begin anew")
    arguments = parser.parse_args()
    print("| tokens | scores | keys | share | slope, 13 bits | error | slope, 23 bits | error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for tokens in arguments.tokens:
        for deviation in (0.0, 1.0):
            for first in (0, tokens // 2):
                for share in arguments.share:
                    print(line(tokens, first, share, deviation, arguments.promote), flush=True)


if __name__ == "__main__":
    main()
