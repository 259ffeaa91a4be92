"""`sagebwd.norm_rope.composed` on a GPU: Q and K in one launch each way, every row read once and written once.

Of one row, with r = 1 / sqrt(mean(x^2) + eps), w the weight and pairs (a, b) of channels that rotate together::

    z = x r w                       a' = a cos_a - b sin_a        b' = b cos_b + a sin_b
    dz = rotated back               da = da' cos_a + db' sin_b    db = db' cos_b - da' sin_a
    dw = sum of dz x r over rows    dx = r (dz w - x r mean(dz w x r))

Forward keeps r, one FP32 a row; backward reads it and x, the projection's output, or neither where there is no norm.
A program has a block of tokens, whose cos and sin it reads once, and several heads of Q or of K. Its share of dw is a
row of its own, so that their sum is the same in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import empty_like_rows
from sagebwd.kernels.common.strided import Strided, counted, pitch_of, row_of
from sagebwd.kernels.common.tile import load_rows, to_16bit
from sagebwd.kernels.runtime.alignment import aligned_rows, contiguous
from sagebwd.kernels.runtime.program import launch

# Tokens and heads of a program, warps at least, and how many heads' loads are under way: the best of eight on an H200
# (16K tokens, 16 heads of 128), forward and backward.
BLOCK, HEADS, WARPS, STAGES = 16, 8, 4, 3
# Channels of a row for each warp beyond four: more would take more registers than a thread has.
CHANNELS_OF_WARP = 32
# Channels of rows whose loads are under way for several heads, as timed; with 64 or 256 some registers are spilled.
IN_STAGES = 128


@triton.jit
def load_pairs(x, rows, pitch, left, ROTARY: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """a and b, (rows, HALF) each, of the first ROTARY channels; what lies outside is 0."""
    if INTERLEAVED:
        tile = load_rows(x, rows, tl.arange(0, 2 * HALF), pitch, left, ROTARY, False, ROTARY == 2 * HALF)
        a, b = tl.split(tile.to(tl.float32).reshape(rows.shape[0], HALF, 2))
    else:
        columns = tl.arange(0, HALF)
        EVEN: tl.constexpr = ROTARY == 2 * HALF
        a = load_rows(x, rows, columns, pitch, left, ROTARY // 2, False, EVEN).to(tl.float32)
        b = load_rows(x + ROTARY // 2, rows, columns, pitch, left, ROTARY // 2, False, EVEN).to(tl.float32)
    return a, b


@triton.jit
def _load_rest(x, rows, pitch, left, head_dim: tl.constexpr, ROTARY: tl.constexpr, REST: tl.constexpr):
    """The channels after the first ROTARY, (rows, REST)."""
    columns = tl.arange(0, REST)
    WIDTH: tl.constexpr = head_dim - ROTARY
    return load_rows(x + ROTARY, rows, columns, pitch, left, WIDTH, False, REST == WIDTH).to(tl.float32)


@triton.jit
def store_pairs(y, a, b, rows, pitch, left, ROTARY: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Write what `load_pairs` read."""
    if INTERLEAVED:
        _store(y, tl.join(a, b).reshape(rows.shape[0], 2 * HALF), rows, pitch, left, ROTARY)
    else:
        _store(y, a, rows, pitch, left, ROTARY // 2)
        _store(y + ROTARY // 2, b, rows, pitch, left, ROTARY // 2)


@triton.jit
def _store(y, tile, rows, pitch, left, WIDTH: tl.constexpr):
    columns = tl.arange(0, tile.shape[1])
    inside = (rows < left)[:, None] & (columns < WIDTH)[None, :]
    tl.store(y + rows[:, None] * pitch + columns[None, :], to_16bit(tile, y.dtype.element_ty), mask=inside)


@triton.jit
def place(program, heads, tokens, BLOCK: tl.constexpr, HEADS: tl.constexpr):
    """A program's sequence, its first token and its first head: heads of a token are neighbours in memory."""
    groups, blocks = tl.cdiv(heads, HEADS), tl.cdiv(tokens, BLOCK)
    return program // (groups * blocks), program // groups % blocks * BLOCK, program % groups * HEADS


@triton.jit
def forward_rows(
    x, y, inverse_rms, weight, cos, sin, heads, tokens, eps, program, head_dim: tl.constexpr, ROTARY: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program of `forward_kernel`."""
    batch, first, head = place(program, heads, tokens, BLOCK, HEADS)
    rows, left = tl.arange(0, BLOCK), tokens - first
    one, alone = tl.arange(0, 1), 1
    if ROTARY > 0:
        cos_at, sin_at = row_of(cos, batch, head, first), row_of(sin, batch, head, first)
        cos_a, cos_b = load_pairs(cos_at, rows, pitch_of(cos), left, ROTARY, HALF, INTERLEAVED)
        sin_a, sin_b = load_pairs(sin_at, rows, pitch_of(sin), left, ROTARY, HALF, INTERLEAVED)
        if weight is not None:
            weight_a, weight_b = load_pairs(weight, one, 0, alone, ROTARY, HALF, INTERLEAVED)
    if head_dim > ROTARY and weight is not None:
        weight_rest = _load_rest(weight, one, 0, alone, head_dim, ROTARY, REST)
    for step in tl.range(tl.minimum(heads - head, HEADS), num_stages=STAGES):
        number = head + step
        x_at, y_at = row_of(x, batch, number, first), row_of(y, batch, number, first)
        squares = tl.zeros((BLOCK,), tl.float32)
        if ROTARY > 0:
            a, b = load_pairs(x_at, rows, pitch_of(x), left, ROTARY, HALF, INTERLEAVED)
            squares += tl.sum(a * a + b * b, 1)
        if head_dim > ROTARY:
            rest = _load_rest(x_at, rows, pitch_of(x), left, head_dim, ROTARY, REST)
            squares += tl.sum(rest * rest, 1)
        if inverse_rms is not None:
            # r = 1 / sqrt(mean(x^2) + eps)
            r = 1 / tl.sqrt(squares / head_dim + eps)
            row = (batch.to(tl.int64) * heads + number) * tokens + first + rows
            tl.store(inverse_rms + row, r, mask=rows < left)
            # z = x r w
            if ROTARY > 0:
                a, b = a * r[:, None], b * r[:, None]
                if weight is not None:
                    a, b = a * weight_a, b * weight_b
            if head_dim > ROTARY:
                rest *= r[:, None]
                if weight is not None:
                    rest *= weight_rest
        if ROTARY > 0:
            # a' = a cos - b sin, b' = b cos + a sin
            turned_a, turned_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
            store_pairs(y_at, turned_a, turned_b, rows, pitch_of(y), left, ROTARY, HALF, INTERLEAVED)
        if head_dim > ROTARY:
            _store(y_at + ROTARY, rest, rows, pitch_of(y), left, head_dim - ROTARY)


@triton.jit
def backward_rows(
    dy, dx, x, inverse_rms, weight, dweight, cos, sin, offsets, sequences, heads, tokens, program,
    head_dim: tl.constexpr,
    ROTARY: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program of `backward_kernel`."""
    batch, first, head = place(program, heads, tokens, BLOCK, HEADS)
    rows, left = tl.arange(0, BLOCK), tokens - first
    if offsets is not None:  # rows behind the last offset are nobody's and may be anything
        left = tl.load(offsets + sequences) - first
    one, alone = tl.arange(0, 1), 1
    if ROTARY > 0:
        cos_at, sin_at = row_of(cos, batch, head, first), row_of(sin, batch, head, first)
        cos_a, cos_b = load_pairs(cos_at, rows, pitch_of(cos), left, ROTARY, HALF, INTERLEAVED)
        sin_a, sin_b = load_pairs(sin_at, rows, pitch_of(sin), left, ROTARY, HALF, INTERLEAVED)
        if weight is not None:
            weight_a, weight_b = load_pairs(weight, one, 0, alone, ROTARY, HALF, INTERLEAVED)
            dweight_a, dweight_b = tl.zeros((BLOCK, HALF), tl.float32), tl.zeros((BLOCK, HALF), tl.float32)
    if head_dim > ROTARY and weight is not None:
        weight_rest = _load_rest(weight, one, 0, alone, head_dim, ROTARY, REST)
        dweight_rest = tl.zeros((BLOCK, REST), tl.float32)
    for step in tl.range(tl.minimum(heads - head, HEADS), num_stages=STAGES):
        number = head + step
        dy_at, dx_at = row_of(dy, batch, number, first), row_of(dx, batch, number, first)
        if ROTARY > 0:
            # da = da' cos + db' sin, db = db' cos - da' sin
            turned_a, turned_b = load_pairs(dy_at, rows, pitch_of(dy), left, ROTARY, HALF, INTERLEAVED)
            a, b = turned_a * cos_a + turned_b * sin_b, turned_b * cos_b - turned_a * sin_a
        if head_dim > ROTARY:
            rest = _load_rest(dy_at, rows, pitch_of(dy), left, head_dim, ROTARY, REST)
        if inverse_rms is not None:
            x_at = row_of(x, batch, number, first)
            row = (batch.to(tl.int64) * heads + number) * tokens + first + rows
            r = tl.load(inverse_rms + row, mask=rows < left, other=0)
            products = tl.zeros((BLOCK,), tl.float32)
            # dw += dz x r, dz w, and its products with x r
            if ROTARY > 0:
                unit_a, unit_b = load_pairs(x_at, rows, pitch_of(x), left, ROTARY, HALF, INTERLEAVED)
                unit_a, unit_b = unit_a * r[:, None], unit_b * r[:, None]
                if weight is not None:
                    dweight_a += a * unit_a
                    dweight_b += b * unit_b
                    a, b = a * weight_a, b * weight_b
                products += tl.sum(a * unit_a + b * unit_b, 1)
            if head_dim > ROTARY:
                unit_rest = _load_rest(x_at, rows, pitch_of(x), left, head_dim, ROTARY, REST) * r[:, None]
                if weight is not None:
                    dweight_rest += rest * unit_rest
                    rest *= weight_rest
                products += tl.sum(rest * unit_rest, 1)
            # dx = r (dz w - x r mean(dz w x r))
            mean = products / head_dim
            if ROTARY > 0:
                a = (a - unit_a * mean[:, None]) * r[:, None]
                b = (b - unit_b * mean[:, None]) * r[:, None]
            if head_dim > ROTARY:
                rest = (rest - unit_rest * mean[:, None]) * r[:, None]
        if ROTARY > 0:
            store_pairs(dx_at, a, b, rows, pitch_of(dx), left, ROTARY, HALF, INTERLEAVED)
        if head_dim > ROTARY:
            _store(dx_at + ROTARY, rest, rows, pitch_of(dx), left, head_dim - ROTARY)
    if weight is not None:
        dweight += program.to(tl.int64) * head_dim
        if ROTARY > 0:
            sum_a, sum_b = tl.sum(dweight_a, 0)[None, :], tl.sum(dweight_b, 0)[None, :]
            store_pairs(dweight, sum_a, sum_b, one, 0, alone, ROTARY, HALF, INTERLEAVED)
        if head_dim > ROTARY:
            _store(dweight + ROTARY, tl.sum(dweight_rest, 0)[None, :], one, 0, alone, head_dim - ROTARY)


@triton.jit(do_not_specialize=["q_tokens", "k_tokens", "q_programs"])
def forward_kernel(
    q, q_out, q_inverse_rms, q_weight, q_cos, q_sin, q_heads, q_tokens, k, k_out, k_inverse_rms, k_weight, k_cos,
    k_sin, k_heads, k_tokens, eps, q_programs, head_dim: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of Q and K (`Strided`) normalised and rotated, and r of each, (B, H, N); None where there is no norm."""
    program = tl.program_id(0)
    if program < q_programs:
        forward_rows(
            q, q_out, q_inverse_rms, q_weight, q_cos, q_sin, q_heads, q_tokens, eps, program, head_dim, ROTARY, HALF,
            REST, INTERLEAVED, BLOCK, HEADS, STAGES,
        )  # fmt: skip
    else:
        forward_rows(
            k, k_out, k_inverse_rms, k_weight, k_cos, k_sin, k_heads, k_tokens, eps, program - q_programs, head_dim,
            ROTARY, HALF, REST, INTERLEAVED, BLOCK, HEADS, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["q_tokens", "k_tokens", "q_programs", "q_sequences", "k_sequences"])
def backward_kernel(
    dq_out, dq, q, q_inverse_rms, q_weight, dq_weight, q_cos, q_sin, q_offsets, q_sequences, q_heads, q_tokens,
    dk_out, dk, k, k_inverse_rms, k_weight, dk_weight, k_cos, k_sin, k_offsets, k_sequences, k_heads, k_tokens,
    q_programs, head_dim: tl.constexpr, ROTARY: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows, and of the weights a share a program, (programs, D) FP32.

    offsets, sequences: of packed rows, cu_seqlens and where in it the last stands; None for all rows.
    """
    program = tl.program_id(0)
    if program < q_programs:
        backward_rows(
            dq_out, dq, q, q_inverse_rms, q_weight, dq_weight, q_cos, q_sin, q_offsets, q_sequences, q_heads,
            q_tokens, program, head_dim, ROTARY, HALF, REST, INTERLEAVED, BLOCK, HEADS, STAGES,
        )  # fmt: skip
    else:
        backward_rows(
            dk_out, dk, k, k_inverse_rms, k_weight, dk_weight, k_cos, k_sin, k_offsets, k_sequences, k_heads,
            k_tokens, program - q_programs, head_dim, ROTARY, HALF, REST, INTERLEAVED, BLOCK, HEADS, STAGES,
        )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, q_cos: Tensor | None,
    q_sin: Tensor | None, k_cos: Tensor | None, k_sin: Tensor | None, eps: float | None, interleaved: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Q and K normalised and rotated, each as it lies, and 1 / rms of their rows; see `sagebwd.norm_rope.ops`."""
    outputs, inverse_rms, given = [], [], []
    for x, weight, cos, sin in ((q, q_weight, q_cos, q_sin), (k, k_weight, k_cos, k_sin)):
        outputs.append(empty_like_rows(x, dtype=dtype))
        inverse_rms.append(None if eps is None else x.new_empty(x.shape[:-1], dtype=torch.float32))
        y, x = strided(outputs[-1]), strided(x)
        given += [x, y, inverse_rms[-1], contiguous(weight), strided(cos), strided(sin), *outputs[-1].shape[1:3]]
    _launch(forward_kernel, q, k, q_cos, interleaved, *given, 0.0 if eps is None else eps)
    return *outputs, *inverse_rms


def backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor | None, k: Tensor | None, q_inverse_rms: Tensor | None,
    k_inverse_rms: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, q_cos: Tensor | None,
    q_sin: Tensor | None, k_cos: Tensor | None, k_sin: Tensor | None, q_offsets: Tensor | None,
    k_offsets: Tensor | None, interleaved: bool, dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of Q and K in ``dtypes``, each as its own lies, and the programs' shares in those of the weights.

    offsets: cu_seqlens, of rows that are packed; those behind the last get no gradient and are in no weight's.
    """
    gradients, shares, given = [], [], []
    sides = (
        (dq_out, q, q_inverse_rms, q_weight, q_cos, q_sin, q_offsets, dtypes[0]),
        (dk_out, k, k_inverse_rms, k_weight, k_cos, k_sin, k_offsets, dtypes[1]),
    )
    for dy, x, r, weight, cos, sin, offsets, dtype in sides:
        dx = empty_like_rows(dy if x is None else x, dtype=dtype)
        shape = programs(dy), dy.shape[-1]
        share = None if weight is None else torch.empty(shape, dtype=torch.float32, device=dy.device)
        gradients.append(dx)
        shares.append(share)
        given += [
            strided(dy), strided(dx), strided(x), contiguous(r), contiguous(weight), share, strided(cos), strided(sin),
            contiguous(offsets), None if offsets is None else offsets.numel() - 1, *dy.shape[1:3],
        ]  # fmt: skip
    _launch(backward_kernel, dq_out, dk_out, q_cos, interleaved, *given)
    return *gradients, *shares


def programs(x: Tensor) -> int:
    """How many programs the rows of (batch, heads, tokens, D) have."""
    batch, heads, tokens, _ = x.shape
    return batch * -(-heads // HEADS) * -(-tokens // BLOCK)


def strided(x: Tensor | None) -> Strided | None:
    """Rows of (batch, heads, tokens, D), or of cos and sin, (batch or 1, tokens, R), which all heads share."""
    if x is None:
        return None
    x = aligned_rows(x)
    if x.dim() == 4:
        return Strided(x, *counted(*x.stride()[:3]))
    return Strided(x, *counted(x.stride(0) if x.shape[0] > 1 else 0, 0, x.stride(1)))


def _launch(kernel: object, q: Tensor, k: Tensor, cos: Tensor | None, interleaved: bool, *given: object) -> None:
    count, head_dim, rotary = programs(q) + programs(k), q.shape[-1], 0 if cos is None else cos.shape[-1]
    if not count:
        return
    stages = STAGES if head_dim == IN_STAGES else 1
    launch(
        kernel, (count,), *given, programs(q), head_dim=head_dim, ROTARY=rotary,
        HALF=_power_of_two(rotary // 2), REST=_power_of_two(head_dim - rotary), INTERLEAVED=interleaved,
        BLOCK=BLOCK, HEADS=HEADS, STAGES=stages,
        num_warps=max(WARPS, _power_of_two(head_dim) // CHANNELS_OF_WARP),
    )  # fmt: skip


def _power_of_two(width: int) -> int:
    """The least that has room for a width."""
    return 1 << max(width - 1, 0).bit_length()
