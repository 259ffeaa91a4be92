"""Epilogue of the forward: normalise O, and write O, lse and row maxima."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from sagebwd.kernels.sm90.forward.softmax import Softmax, log2, quad_max, quad_sum
from sagebwd.kernels.sm90.forward.tiles import Tiles
from sagebwd.kernels.sm90.forward.variant import Variant

LN_2 = 0.6931471805599453
STORE = "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"


class Epilogue:
    """Epilogue of one variant."""

    def __init__(self, variant: Variant, tiles: Tiles, softmax: Softmax) -> None:
        self.E, self.tiles, self.softmax = variant.value_dim, tiles, softmax
        self.columns = variant.columns[1]

    @cute.jit
    def write(
        self, acc: cute.Tensor, state, rows: cute.Tensor, work_tile, thread: Int32, o: cute.Tensor, lse: cute.Tensor,
        row_max: cute.Tensor | None,
    ):  # fmt: skip
        """Write O, lse and row maxima of rows inside the sequence; zeros and -inf where no key is visible."""
        o = self.tiles.of_head(o, work_tile.head, work_tile.batch)
        lse = self.tiles.values_of_head(lse, work_tile.head, work_tile.batch)
        if const_expr(row_max is not None):
            row_max = self.tiles.values_of_head(row_max, work_tile.head, work_tile.batch)
        for r in cutlass.range_constexpr(2):
            sum_of_row, largest = quad_sum(state.row_sum[r]), quad_max(state.row_max[r])
            unseen = sum_of_row == 0.0
            inverse = 1.0 / sum_of_row  # O /= rowsum(P)
            words = []
            for j in cutlass.range_constexpr(2 * r, self.E // 2, 4):
                pair = self.softmax.pair(acc[j] * inverse, acc[j + 1] * inverse)
                words.append(Int32(0) if unseen else pair)
            for i in cutlass.range_constexpr(0, self.E // 8, 4):
                words[i : i + 4] = self.transposed(words[i : i + 4])
            if rows[r] < work_tile.length_q:
                at = work_tile.start_q + rows[r]
                if thread % 4 == 0:
                    value = (state.max_ref[r] + log2(sum_of_row)) * LN_2  # lse = ln(2) (max_ref + log2(rowsum(P)))
                    lse[at] = -Float32.inf if unseen else value
                    if const_expr(row_max is not None):
                        row_max[at] = largest
                to = o[at, None].iterator.toint() + Int64(thread % 4 * 16)
                for i in cutlass.range_constexpr(0, self.columns // 8, 4):
                    self.store(to + Int64(16 * i), words[i : i + 4], self.columns // 8 - i, thread)

    @cute.jit
    def store(self, to: Int64, words: list, there: cutlass.Constexpr, thread: Int32):
        """Store eight channels a lane of a quad, of whose lanes the first ``there`` have channels in memory."""
        lane = thread % 4 if const_expr(there < 4) else 0
        if lane < there:
            cute.arch.inline_ptx(STORE, read_only_args=[to, *words])

    def transposed(self, words: list) -> list:
        """Transpose four words a lane within a quad: lane i gets word i of every lane."""
        lane = cute.arch.lane_idx()
        for bit in (1, 2):
            odd = (lane & bit) != 0
            moved = list(words)
            for i in range(4):
                if i & bit == 0:
                    a, b = words[i], words[i + bit]
                    got = cute.arch.shuffle_sync_bfly(cutlass.select_(odd, a, b), offset=bit)
                    moved[i], moved[i + bit] = cutlass.select_(odd, got, a), cutlass.select_(odd, b, got)
            words = moved
        return words
