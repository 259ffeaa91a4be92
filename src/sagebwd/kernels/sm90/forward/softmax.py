"""Softmax of a warpgroup's score tile in registers: maxima, exponentials, and P packed as an operand.

A thread holds two rows of 64, r and r + 8, as it gets them from a tensor core: register i is of row i // 2 % 2 and
column i // 4 * 8 + i % 2, counted from the thread's own first, which is twice its place in its quad.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from sagebwd.kernels.sm90.forward.elements import LOG2_E, bit, row_of
from sagebwd.kernels.sm90.forward.variant import Variant

ptx = cute.arch.inline_ptx
PACK = {
    "bfloat16": "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
    "float16": "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};",
}
# A row's maximum may grow by this many octaves before O and its sum are rescaled: 16 bit have the range.
OCTAVES = 8.0
# By this many where no row can grow further: a sum of 2**17 products of P with V up to 2**50 still fits FP32.
MOST_OCTAVES = 60.0
# In octaves, more than P's rounding: a maximum of rounded P counts only where it exceeds the exact one by this.
ROUNDING = 0.01
HALVES = "and.b32 {$w0}, {$r0}, 0xffff0000; shl.b32 {$w1}, {$r0}, 16;"
LARGER = "max.bf16x2 {$w0}, {$r0}, {$r1};"


def exp2(x):
    """2**x, results under 2**-126 flushed to 0."""
    return ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def log2(x):
    """log2(x); -inf of 0."""
    return ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


class State(NamedTuple):
    """A thread's registers, two of each, one a row."""

    row_max: Any  # largest score so far
    max_ref: Any  # reference of exponents: the row's largest score, or less by some octaves
    row_sum: Any  # sum of P = exp2(S - max_ref)
    alpha: Any  # factor of O where `Softmax.update_maxima` asks for a rescale
    p_max: Any  # largest P of steps without maxima, of two columns, in BF16

    @classmethod
    def allocate(cls) -> State:
        """Registers."""
        return cls(*(cute.make_rmem_tensor(2, Float32) for _ in range(4)), cute.make_rmem_tensor(2, Int32))


class Softmax:
    """Softmax of one variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant

    @cute.jit
    def update_maxima(
        self, scores: cute.Tensor, x: cute.Tensor, state, factors: cute.Tensor, mask,
        first: cutlass.Constexpr, masked: cutlass.Constexpr,
    ):  # fmt: skip
        """Update max_ref, row_max and alpha with new scores, INT32 times ``factors``; whether O must be rescaled.

        first: there is no state yet. masked: scores go to x, -inf where a column is not in ``mask``, bounds and words
        of `Tiles`; of a mask of elements a word for each row.
        """
        row_max, max_ref, row_sum, alpha, _ = state
        size, negative = cute.size(scores), const_expr(self.variant.negative)
        if const_expr(masked):
            unseen = Float32.inf if negative and not self.variant.bias else -Float32.inf
            bounds, words, bias = mask
            for i in cutlass.range_constexpr(size):
                r, column = i // 2 % 2, i // 4 * 8 + i % 2
                score = scores[i].to(Float32)
                if const_expr(self.variant.lists):
                    keep = (words[r] & bit(i // 4 * 2 + i % 2)) != 0
                else:
                    low, high = bounds
                    keep = column < high[r]
                    if const_expr(self.variant.lower):
                        keep = keep & (column >= low[r])
                    if const_expr(self.variant.key_mask):
                        keep = keep & ((words[column // 32] & (1 << (column % 32))) != 0)
                if const_expr(self.variant.bias):
                    x[i] = unseen
                    if keep:  # what is not kept may lie outside
                        x[i] = score * factors[self.part(i)][r] + bias[r][column].to(Float32) * LOG2_E
                else:
                    x[i] = score if keep else unseen
        factors = self.left(factors, masked)
        maxima = []
        for r in cutlass.range_constexpr(2):
            best = self.largest(x if const_expr(masked) else scores, r, 0, masked) * factors[0][r]
            for part in cutlass.range_constexpr(1, len(factors)):
                other = self.largest(x if const_expr(masked) else scores, r, part, masked)
                best = cute.arch.fmax(best, other * factors[part][r])
            maxima.append(best)
        needs_rescale = Boolean(False)
        if const_expr(first):
            for r in cutlass.range_constexpr(2):
                row_max[r] = maxima[r]
                max_ref[r] = quad_max(maxima[r])
        else:
            for r in cutlass.range_constexpr(2):
                row_max[r] = cute.arch.fmax(row_max[r], maxima[r])
            # a vote of the warp instead of an exchange in each quad, as hardly a row moves
            grew = (maxima[0] > max_ref[0] + OCTAVES) | (maxima[1] > max_ref[1] + OCTAVES)
            needs_rescale = cute.arch.vote_any_sync(grew)
            if needs_rescale:
                for r in cutlass.range_constexpr(2):
                    m = quad_max(maxima[r])
                    m = m if m > max_ref[r] + OCTAVES else max_ref[r]
                    alpha[r] = exp2(max_ref[r] - m) if m > max_ref[r] else Float32(1)  # alpha = exp2(old - new)
                    row_sum[r] = row_sum[r] * alpha[r]  # l *= alpha
                    max_ref[r] = m
        return needs_rescale

    def part(self, i: int) -> int:
        """Number of the scale, of a step's, that register i of a score tile has."""
        return i // 4 * 8 // self.variant.tile.scale_keys

    def left(self, factors: list, masked: bool) -> list:
        """Factors that x still lacks: ones where a bias was added to scaled scores."""
        return [(Float32(1), Float32(1))] * len(factors) if masked and self.variant.bias else factors

    def largest(self, scores: cute.Tensor, r: int, part: int, masked: bool):
        """Largest score of a thread's row, in FP32, of those that share a scale; the least for a negative one."""
        negative = self.variant.negative and not (masked and self.variant.bias)
        if masked:
            best_of = cute.arch.fmin if negative else cute.arch.fmax
        else:
            best_of = cutlass.min if negative else cutlass.max
        at = [i for i in row_of(cute.size(scores), r) if self.part(i) == part]
        best = scores[at[0]]
        for i in at[1:]:
            best = best_of(best, scores[i])
        return best.to(Float32)

    @cute.jit
    def exponentials(self, scores: cute.Tensor, x: cute.Tensor, state, factors, masked: cutlass.Constexpr):
        """P = exp2(S - max_ref) into x, of scores, or of x where masked; row_sum += rowsum(P); each row's part."""
        _, max_ref, row_sum, _, _ = state
        parts, factors = [], self.left(factors, masked)
        for r in cutlass.range_constexpr(2):
            shift = -max_ref[r]
            if const_expr(masked):  # a row may have seen no key yet
                shift = Float32(0) if max_ref[r] == -Float32.inf else shift
            part = Float32(0)
            for i in row_of(cute.size(x), r):
                s = x[i] if const_expr(masked) else scores[i].to(Float32)
                x[i] = exp2(s * factors[self.part(i)][r] + shift)  # P = exp2(S - max_ref)
                part = part + x[i]
            row_sum[r] = row_sum[r] + part
            parts.append(part)
        return parts

    @cute.jit
    def is_bounded(self, q_norms, largest_k_norm, state):
        """Whether 16-bit P can hold all scores to come relative to max_ref; by Cauchy-Schwarz none exceeds |q| |k|."""
        safe = Boolean(True)
        for r in cutlass.range_constexpr(2):
            safe = safe & (q_norms[r] * largest_k_norm <= state.max_ref[r] + MOST_OCTAVES)
        return safe

    @cute.jit
    def note_p_max(self, p: cute.Tensor, state):
        """Update p_max with packed P."""
        pairs = cute.recast_tensor(p, Int32)
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(r, cute.size(pairs), 2):
                state.p_max[r] = ptx(LARGER, write_only_types=[Int32], read_only_args=[state.p_max[r], pairs[j]])

    @cute.jit
    def update_row_max(self, x: cute.Tensor, parts, state):
        """Update row_max exactly if P may be half of a row's sum: the backward then needs 1 - P / rowsum(P)."""
        over = Boolean(False)
        for r in cutlass.range_constexpr(2):
            over = over | (2.0 * parts[r] > state.row_sum[r])
        if cute.arch.vote_any_sync(over):
            for r in cutlass.range_constexpr(2):
                at = row_of(cute.size(x), r)
                largest = x[at[0]]
                for i in at[1:]:
                    largest = cute.arch.fmax(largest, x[i])
                state.row_max[r] = cute.arch.fmax(state.row_max[r], state.max_ref[r] + log2(largest))

    @cute.jit
    def fold_p_max(self, state):
        """Update row_max with p_max."""
        for r in cutlass.range_constexpr(2):
            high, low = ptx(HALVES, write_only_types=[Float32] * 2, read_only_args=[state.p_max[r]])
            found = state.max_ref[r] + log2(cute.arch.fmax(high, low))
            state.row_max[r] = found if found > state.row_max[r] + ROUNDING else state.row_max[r]

    @cute.jit
    def pack(self, x: cute.Tensor, p: cute.Tensor):
        """P in 16 bit, as the operand that a result's registers already are."""
        pairs = cute.recast_tensor(p, Int32)
        for j in cutlass.range_constexpr(cute.size(pairs)):
            pairs[j] = self.pair(x[2 * j], x[2 * j + 1])

    def pair(self, low, high):
        """Two FP32 rounded to 16 bit, in one word."""
        return ptx(PACK[self.variant.dtype], write_only_types=[Int32], read_only_args=[low, high])


def quad_max(x):
    """The largest of a quad's four."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))


def quad_sum(x):
    """The sum of a quad's four."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)
