"""Forward and backward as `sagebwd.ops` calls them: memory, passes and grids.

Dense and packed calls differ in strides and sequence bounds alone: `Packing` hides which one it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sagebwd.kernels.triton.backward import dkdv_kernel, dq_kernel
from sagebwd.kernels.triton.forward import forward_kernel
from sagebwd.kernels.triton.launch import capability, choose, padded_head_dim, pass_warps
from sagebwd.kernels.triton.quantize import grad_out_kernel, mean_kernel, quantize_kernel, transpose_kernel
from sagebwd.recipe import INT8, SIXTEEN_BIT, Recipe
from triton.tools.tensor_descriptor import TensorDescriptor

# Tokens that one program averages: enough programs to fill a GPU at batch x heads = 16, few enough to sum quickly.
MEAN_CHUNK = 256
BLOCK_SIZES = (32, 64, 128)


def unsupported(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run a call, or None."""
    if recipe.dp != SIXTEEN_BIT:
        return "dp='int8' is for error studies: only impl='reference' computes it"
    if head_dim > 256:
        return f"head_dim {head_dim} is over 256"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} is neither bfloat16 nor float16"
    for name in ("block_q", "block_k"):
        if getattr(recipe, name) not in BLOCK_SIZES:
            return f"{name}={getattr(recipe, name)} is not one of {', '.join(map(str, BLOCK_SIZES))}"
    return None


@dataclass(frozen=True)
class Packing:
    """How the tokens of one side (queries or keys) lie: (B, H, N, D), or (total, H, D) with ``cu_seqlens``."""

    batch: int
    heads: int
    tokens: int  # of the longest sequence
    total: int  # tokens of one head, over all sequences if packed
    cu_seqlens: Tensor | None

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int) -> Packing:
        """The packing of x, (B, H, N, D) or (total, H, D)."""
        if cu_seqlens is None:
            return cls(x.shape[0], x.shape[1], x.shape[2], x.shape[2], None)
        return cls(cu_seqlens.numel() - 1, x.shape[1], max_seqlen, x.shape[0], cu_seqlens)

    @property
    def rows(self) -> int:
        """(head, token) rows."""
        return self.heads * self.total * (1 if self.cu_seqlens is not None else self.batch)

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        """Strides of batch, head and token."""
        if self.cu_seqlens is None:
            return x.stride(0), x.stride(1), x.stride(2)
        return 0, x.stride(1), x.stride(0)

    def blocks(self, block: int) -> int:
        """Blocks of one head in a padded layout, where every sequence begins a block of its own."""
        if self.cu_seqlens is None:
            return -(-self.total // block)
        return self.total // block + self.batch

    def padded(self, block: int, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised (heads, blocks, *shape), heads counted over the batch if dense."""
        heads = self.heads if self.cu_seqlens is not None else self.batch * self.heads
        return torch.empty(heads, self.blocks(block), *shape, dtype=dtype, device=device)

    def per_token(self, device: torch.device) -> Tensor:
        """Uninitialised FP32, one value a row: (B, H, N) or (H, total)."""
        shape = (self.batch, self.heads) if self.cu_seqlens is None else (self.heads,)
        return torch.empty(*shape, self.total, dtype=torch.float32, device=device)

    def grid(self, block: int) -> int:
        """Blocks of the longest sequence."""
        return -(-self.tokens // block)

    def view(self, x: Tensor) -> Tensor:
        """x as (batch or 1, H, tokens, D), whichever packing."""
        return x if self.cu_seqlens is None else x.transpose(0, 1).unsqueeze(0)


def _fits_tma(x: Tensor) -> bool:
    size = x.element_size()
    return x.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in x.stride()[:-1]) and min(x.shape) > 0


def _described(blocks: dict[str, tuple[Tensor, tuple[int, int]]]) -> dict[str, TensorDescriptor] | None:
    """A TMA descriptor for each (tensor, block of its last two dimensions), or None if one has odd strides."""
    if not all(_fits_tma(x) for x, _ in blocks.values()):
        return None
    return {
        name: TensorDescriptor(x, list(x.shape), list(x.stride()), [1] * (x.dim() - 2) + list(block))
        for name, (x, block) in blocks.items()
    }


def _transposed_view(x: Tensor, head_dim: int) -> Tensor:
    """A transposed copy as (heads, head_dim, padded tokens)."""
    return x.view(x.shape[0], head_dim, -1)


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(0, dtype=torch.int8, device=device), torch.empty(0, dtype=torch.float32, device=device)


def launch_means(x: Tensor, packing: Packing, key_mask: Tensor | None) -> Tensor:
    """(B, H, D) FP32 means over each sequence's valid tokens."""
    head_dim = x.shape[-1]
    if key_mask is None and packing.cu_seqlens is None:
        return x.mean(2, dtype=torch.float32)
    chunks = max(1, -(-packing.tokens // MEAN_CHUNK))
    heads = packing.batch * packing.heads
    partial = torch.empty(chunks, heads, head_dim, dtype=torch.float32, device=x.device)
    mean_kernel[(heads, chunks)](
        x,
        partial,
        key_mask,
        packing.cu_seqlens,
        *packing.strides(x),
        packing.heads,
        packing.tokens,
        MEAN_CHUNK,
        head_dim=head_dim,
        VARLEN=packing.cu_seqlens is not None,
        BLOCK=64,
        BLOCK_D=padded_head_dim(head_dim),
    )
    return partial.sum(0).view(packing.batch, packing.heads, head_dim)


@dataclass
class Quantized:
    """What one quantisation pass wrote; see `quantize_kernel`."""

    codes: Tensor | None = None
    token_scale: Tensor | None = None
    block_scale: Tensor | None = None
    transposed: Tensor | None = None
    smoothed: Tensor | None = None
    block_mean: Tensor | None = None


def launch_quantize(
    x: Tensor,
    packing: Packing,
    group: str,
    block: int,
    mean: Tensor | None = None,
    key_mask: Tensor | None = None,
    *,
    codes: bool = False,
    transposed: bool = False,
    smoothed: bool = False,
    block_mean: bool = False,
) -> Quantized:
    """Smooth x and write the asked-for outputs."""
    head_dim, device = x.shape[-1], x.device
    out = Quantized()
    if codes:
        out.codes = torch.empty(x.shape, dtype=torch.int8, device=device)
    if codes or group == "token":
        out.token_scale = packing.per_token(device)
    if smoothed:
        out.smoothed = torch.empty(x.shape, dtype=x.dtype, device=device)
    if transposed:
        out.transposed = packing.padded(block, block * head_dim, dtype=torch.int8, device=device)
    if group == "channel" or (transposed and group == "block"):
        channels = (head_dim,) if group == "channel" else ()
        out.block_scale = packing.padded(block, *channels, dtype=torch.float32, device=device)
    if block_mean:
        out.block_mean = packing.padded(block, head_dim, dtype=torch.float32, device=device)
    rows = out.codes if codes else out.smoothed if smoothed else x
    quantize_kernel[(packing.grid(block), packing.batch * packing.heads)](
        x,
        mean,
        key_mask,
        packing.cu_seqlens,
        out.block_mean,
        out.codes,
        out.token_scale,
        out.block_scale,
        out.transposed,
        out.smoothed,
        *packing.strides(x),
        *packing.strides(rows),
        packing.heads,
        packing.tokens,
        packing.total,
        packing.blocks(block),
        head_dim=head_dim,
        GROUP=group,
        VARLEN=packing.cu_seqlens is not None,
        BLOCK=block,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=pass_warps(block, head_dim),
    )
    return out


def launch_transpose(codes: Tensor, packing: Packing, block: int) -> Tensor:
    """The transposed copy of saved codes."""
    head_dim = codes.shape[-1]
    transposed = packing.padded(block, block * head_dim, dtype=torch.int8, device=codes.device)
    transpose_kernel[(packing.grid(block), packing.batch * packing.heads)](
        codes,
        packing.cu_seqlens,
        transposed,
        *packing.strides(codes),
        packing.heads,
        packing.tokens,
        packing.blocks(block),
        head_dim=head_dim,
        VARLEN=packing.cu_seqlens is not None,
        BLOCK=block,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=pass_warps(block, head_dim),
    )
    return transposed


def _band(is_causal: bool, window_left: int, window_right: int) -> dict[str, int | bool]:
    """Bounds on key - query, before a packed sequence's offset."""
    upper = 0 if is_causal else window_right
    return {
        "lower": -window_left,
        "upper": upper,
        "HAS_LOWER": window_left >= 0,
        "HAS_UPPER": is_causal or window_right >= 0,
    }


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    """o, lse of the smoothed scores, and what backward reads: q_int8, q_scale, k_int8, k_scale, k_mean."""
    q, k, v = (_rows_contiguous(x) for x in (q, k, v))
    head_dim, device = q.shape[-1], q.device
    queries = Packing.of(q, cu_seqlens_q, max_seqlen_q)
    keys = Packing.of(k, cu_seqlens_k, max_seqlen_k)
    key_mask = None if key_mask is None else key_mask.contiguous()

    k_mean = launch_means(k, keys, key_mask) if recipe.smooth_k else None
    v_mean = launch_means(v, keys, key_mask) if recipe.smooth_v else None
    q_int8 = INT8 in (recipe.s, recipe.dk)
    k_int8 = INT8 in (recipe.s, recipe.dq)
    s_int8, o_int8 = recipe.s == INT8, recipe.o == INT8

    q_pass = Quantized()
    if q_int8 or recipe.smooth_q:
        smoothed = recipe.smooth_q and not s_int8
        q_pass = launch_quantize(
            q, queries, recipe.q_scale, recipe.block_q, codes=q_int8, smoothed=smoothed, block_mean=recipe.smooth_q
        )
    k_pass = Quantized()
    k_smoothed = not s_int8 and recipe.smooth_k
    if k_int8 or k_smoothed:
        k_pass = launch_quantize(
            k, keys, recipe.k_scale, recipe.block_k, k_mean, key_mask, codes=k_int8, smoothed=k_smoothed
        )
    v_pass = Quantized()
    v_smoothed = not o_int8 and (recipe.smooth_v or key_mask is not None)
    if o_int8 or v_smoothed:
        v_pass = launch_quantize(
            v, keys, recipe.v_scale, recipe.block_k, v_mean, key_mask, transposed=o_int8, smoothed=v_smoothed
        )

    q_operand = q_pass.codes if s_int8 else q_pass.smoothed if recipe.smooth_q else q
    k_operand = k_pass.codes if s_int8 else k_pass.smoothed if k_smoothed else k
    v_operand = v_pass.transposed if o_int8 else v_pass.smoothed if v_smoothed else v
    if k_mean is None:
        k_mean = torch.zeros(keys.batch, keys.heads, head_dim, dtype=torch.float32, device=device)

    o = torch.empty(q.shape, dtype=q.dtype, device=device)
    lse = queries.per_token(device)
    launch = choose("forward", head_dim, recipe, capability(device))
    grid = queries.grid(launch.rows)
    block_d = padded_head_dim(head_dim)
    v_strides = (0, 0, 0) if o_int8 else keys.strides(v_operand)
    blocked = {"k": k_operand, "v": v_operand}
    if launch.tma:
        k_block = (recipe.block_k, block_d)
        v_block = (_transposed_view(v_operand, head_dim), k_block[::-1]) if o_int8 else (keys.view(v_operand), k_block)
        blocked = _described({"k": (keys.view(k_operand), k_block), "v": v_block}) or blocked
    if queries.rows:
        forward_kernel[(grid * queries.batch * queries.heads,)](
            q_operand,
            blocked["k"],
            blocked["v"],
            q_pass.token_scale,
            k_pass.token_scale,
            v_pass.block_scale,
            v_mean,
            q_pass.block_mean,
            k if recipe.smooth_q else None,
            k_mean if recipe.smooth_q else None,
            o,
            lse,
            key_mask,
            cu_seqlens_q,
            cu_seqlens_k,
            *queries.strides(q_operand),
            *keys.strides(k_operand),
            *v_strides,
            *queries.strides(o),
            *keys.strides(k),
            queries.heads,
            queries.heads // keys.heads,
            queries.tokens,
            keys.tokens,
            queries.total,
            keys.total,
            queries.blocks(recipe.block_q),
            keys.blocks(recipe.block_k),
            grid,
            scale=scale,
            **_band(is_causal, window_left, window_right),
            head_dim=head_dim,
            INT8_S=s_int8,
            INT8_O=o_int8,
            K_TOKEN=recipe.k_scale == "token",
            V_CHANNEL=recipe.v_scale == "channel",
            VARLEN=cu_seqlens_q is not None,
            TMA=isinstance(blocked["k"], TensorDescriptor),
            BLOCK_Q=launch.rows,
            BLOCK_K=recipe.block_k,
            BLOCK_D=block_d,
            **launch.options,
        )
    saved_q = (q_pass.codes, q_pass.token_scale) if q_int8 else _empty(device)
    saved_k = (k_pass.codes, k_pass.token_scale) if k_int8 else _empty(device)
    return o, lse, *saved_q, *saved_k, k_mean


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    q_int8: Tensor,
    q_scale: Tensor,
    k_int8: Tensor,
    k_scale: Tensor,
    k_mean: Tensor,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    recipe: Recipe,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. Without atomics, so every run is bit for bit the same whether ``deterministic`` or not."""
    do, v, o = (_rows_contiguous(x) for x in (do, v, o))
    head_dim, device = v.shape[-1], v.device
    varlen = cu_seqlens_q is not None
    queries = Packing.of(o, cu_seqlens_q, max_seqlen_q)
    keys = Packing.of(v, cu_seqlens_k, max_seqlen_k)
    key_mask = None if key_mask is None else key_mask.contiguous()
    block_q, block_k, block_d = recipe.block_q, recipe.block_k, padded_head_dim(head_dim)
    s_int8, dv_int8, dq_int8, dk_int8 = (getattr(recipe, name) == INT8 for name in ("s", "dv", "dq", "dk"))
    dq = torch.empty(o.shape, dtype=o.dtype, device=device)
    dk, dv = (torch.empty(v.shape, dtype=v.dtype, device=device) for _ in range(2))
    if not queries.rows or not keys.rows:
        return dq.zero_(), dk.zero_(), dv.zero_()

    q_mean, q_rows, k_rows = None, None, None
    if recipe.smooth_q:
        q = _rows_contiguous(q)
        q_pass = launch_quantize(q, queries, recipe.q_scale, block_q, smoothed=True, block_mean=True)
        q_rows, q_mean = q_pass.smoothed, q_pass.block_mean
    elif q is not None:
        q_rows = _rows_contiguous(q)
    k_exact = None if k is None else _rows_contiguous(k)
    if k is not None:
        k_rows = k_exact
        if recipe.smooth_k and not (s_int8 and dq_int8):
            k_rows = launch_quantize(k_exact, keys, "token", block_k, k_mean, key_mask, smoothed=True).smoothed
    q_operand = q_int8 if s_int8 else q_rows
    k_operand = k_int8 if s_int8 else k_rows
    q_t = launch_transpose(q_int8, queries, block_q) if dk_int8 else None
    k_t = launch_transpose(k_int8, keys, block_k) if dq_int8 else None

    row_values = queries.padded(block_q, block_q * 4, dtype=torch.float32, device=device)
    channels = (head_dim,) if recipe.do_scale == "channel" else ()
    do_scale = queries.padded(block_q, *channels, dtype=torch.float32, device=device)
    do_t = queries.padded(block_q, block_q * head_dim, dtype=torch.int8, device=device) if dv_int8 else None
    grad_out_kernel[(queries.grid(block_q), queries.batch * queries.heads)](
        do,
        o,
        lse,
        None if dlse is None else dlse.contiguous(),
        cu_seqlens_q,
        q_scale if s_int8 or dk_int8 else None,
        do_t,
        do_scale,
        row_values,
        *queries.strides(do),
        *queries.strides(o),
        queries.heads,
        queries.tokens,
        queries.total,
        queries.blocks(block_q),
        head_dim=head_dim,
        GROUP=recipe.do_scale,
        VARLEN=varlen,
        BLOCK=block_q,
        BLOCK_D=block_d,
        num_warps=pass_warps(block_q, head_dim),
    )

    band = _band(is_causal, window_left, window_right)
    arch, group = capability(device), queries.heads // keys.heads
    exact_strides = keys.strides(k_exact) if recipe.smooth_q else (0, 0, 0)
    launch = choose("dkdv", head_dim, recipe, arch)
    grid = keys.grid(launch.rows)
    blocked = {"q": q_operand, "do": do, "q_t": q_t, "do_t": do_t}
    if launch.tma:
        rows = {name: (queries.view(blocked[name]), (block_q, block_d)) for name in ("q", "do")}
        copies = {
            name: (_transposed_view(blocked[name], head_dim), (block_d, block_q))
            for name in ("q_t", "do_t")
            if blocked[name] is not None
        }
        blocked |= _described(rows | copies) or {}
    dkdv_kernel[(grid * keys.batch * keys.heads,)](
        blocked["q"],
        k_operand,
        v,
        blocked["do"],
        k_scale,
        do_scale,
        blocked["q_t"],
        blocked["do_t"],
        None if dk_int8 else q_rows,
        row_values,
        q_mean,
        k_exact if recipe.smooth_q else None,
        k_mean if recipe.smooth_q else None,
        dk,
        dv,
        key_mask,
        cu_seqlens_q,
        cu_seqlens_k,
        *queries.strides(q_operand),
        *keys.strides(k_operand),
        *keys.strides(v),
        *queries.strides(do),
        *(queries.strides(q_rows) if not dk_int8 else (0, 0, 0)),
        *exact_strides,
        *keys.strides(dk),
        keys.heads,
        group,
        queries.tokens,
        keys.tokens,
        queries.total,
        keys.total,
        queries.blocks(block_q),
        grid,
        scale=scale,
        **band,
        head_dim=head_dim,
        INT8_S=s_int8,
        INT8_DV=dv_int8,
        INT8_DK=dk_int8,
        Q_TOKEN=recipe.q_scale == "token",
        DO_CHANNEL=recipe.do_scale == "channel",
        P_PER_KEY=recipe.p_scale_dv == "key",
        DS_PER_KEY=recipe.ds_scale_dk == "key",
        VARLEN=varlen,
        TMA=isinstance(blocked["q"], TensorDescriptor),
        BLOCK_Q=block_q,
        BLOCK_K=launch.rows,
        BLOCK_D=block_d,
        **launch.options,
    )
    launch = choose("dq", head_dim, recipe, arch)
    grid = queries.grid(launch.rows)
    blocked = {"k": k_operand, "v": v, "k_t": k_t}
    if launch.tma:
        views = {name: (keys.view(blocked[name]), (block_k, block_d)) for name in ("k", "v")}
        if dq_int8:
            views["k_t"] = _transposed_view(k_t, head_dim), (block_d, block_k)
        blocked |= _described(views) or {}
    dq_kernel[(grid * queries.batch * queries.heads,)](
        q_operand,
        blocked["k"],
        blocked["v"],
        do,
        k_scale,
        blocked["k_t"],
        None if dq_int8 else k_rows,
        row_values,
        q_mean,
        k_exact if recipe.smooth_q else None,
        k_mean if recipe.smooth_q else None,
        dq,
        key_mask,
        cu_seqlens_q,
        cu_seqlens_k,
        *queries.strides(q_operand),
        *keys.strides(k_operand),
        *keys.strides(v),
        *queries.strides(do),
        *(keys.strides(k_rows) if not dq_int8 else (0, 0, 0)),
        *exact_strides,
        *queries.strides(dq),
        queries.heads,
        group,
        queries.tokens,
        keys.tokens,
        queries.total,
        keys.total,
        queries.blocks(block_q),
        keys.blocks(block_k),
        grid,
        scale=scale,
        **band,
        head_dim=head_dim,
        INT8_S=s_int8,
        INT8_DQ=dq_int8,
        K_TOKEN=recipe.k_scale == "token",
        DS_PER_QUERY=recipe.ds_scale_dq == "query",
        VARLEN=varlen,
        TMA=isinstance(blocked["k"], TensorDescriptor),
        PAD_Q=block_q,
        BLOCK_Q=launch.rows,
        BLOCK_K=block_k,
        BLOCK_D=block_d,
        **launch.options,
    )
    return dq, dk, dv
