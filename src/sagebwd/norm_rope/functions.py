"""QK-norm and rotary embedding before attention: the public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagebwd import checks
from sagebwd.arguments import autocast_dtype
from sagebwd.attention import run, sage_attention, sage_attention_varlen
from sagebwd.cache import PLANS
from sagebwd.call import Prologue
from sagebwd.derivatives import savable
from sagebwd.kernels.capabilities import MAX_HEAD_DIM
from sagebwd.kernels.families import REFERENCE
from sagebwd.norm_rope import ops
from sagebwd.norm_rope.arguments import check, prologue_of
from sagebwd.norm_rope.composed import HALF, norm_rope
from sagebwd.norm_rope.plan import COMPOSED, by_operator, plan_of, spec_of


def qk_norm_rope_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rope: str = HALF,
    position_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    **attention: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of queries and keys, rotary embedding, then `sage_attention`, as Qwen3 and others compose them.

    On a GPU norm and rotary embedding of both are one pass over them, and one in backward; where Hopper's kernels take
    the call (docs/qk-norm-rope.md), the passes that make INT8 codes do it. Of a norm the projections' own outputs are
    kept for backward, with 4 bytes a row; of rotary embedding alone nothing.

    Args:
        query: (batch, heads, tokens, head_dim), or packed (total_tokens, heads, head_dim).
        key, value: of as many dimensions, as in `sage_attention` or `sage_attention_varlen`.
        q_weight, k_weight, eps, cos, sin, rope, position_ids: as in `qk_norm_rope`.
        attention: every other argument of `sage_attention`, by keyword; of `sage_attention_varlen`, where
            ``cu_seqlens_q`` is among them, for packed sequences. Rows behind the last offset, as fixed shapes have
            them, are in no gradient of the weights, whatever they hold.

    Returns: as `sage_attention` or `sage_attention_varlen`.

    Raises: as these, and as `qk_norm_rope`.
    """
    return attend(query, key, value, (q_weight, k_weight, eps, cos, sin, rope, position_ids), attention)


def attend(
    query: Tensor, key: Tensor, value: Tensor, given: tuple[Any, ...], attention: dict[str, Any],
    rows: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`qk_norm_rope_attention`.

    Args: given, all of q_weight to position_ids; rows, makes query and key of them where attention does not within,
    in place of `qk_norm_rope`.
    """
    spec = spec_of(query, key, value, given, attention)
    plan = None if spec is None else PLANS.get(spec)
    packed = "cu_seqlens_q" in attention
    if plan is None:
        if isinstance(query, Tensor) and query.dim() != (3 if packed else 4):
            wanted = "3 dimensions, (total_tokens, heads, head_dim), beside" if packed else "4 dimensions without"
            raise ValueError(f"query: expected {wanted} cu_seqlens_q, got shape {tuple(query.shape)}")
        checks.kind(query, key, value)
        check(query, key, *given, attention.get("impl"))
    prologue = prologue_of(*given)
    if plan is None and spec is not None:
        plan = plan_of(query, key, value, prologue, attention)
        PLANS.put(spec, plan)
    offsets = attention.get("cu_seqlens_q"), attention.get("cu_seqlens_k")
    if plan is not None and plan is not COMPOSED:
        return run(plan, (query, key, value, None, *offsets, None), prologue=prologue)
    if plan is None and (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()):
        out = None if _is_transformed() else by_operator(query, key, value, prologue, attention)
        if out is not None:
            return out
    if rows is not None:
        query, key = rows(query, key)
    else:
        query, key = _composed(query, key, prologue, given[5], attention.get("impl"), offsets)
    return (sage_attention_varlen if packed else sage_attention)(query, key, value, **attention)


def qk_norm_rope(
    query: Tensor,
    key: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rope: str = HALF,
    position_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS norm over head_dim and rotary embedding of queries and keys, each of the two optional.

    z = x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467), then z cos + rotate(z) sin (arXiv 2104.09864), computed
    in FP32 and rounded once.

    Args:
        query: (batch, heads, tokens, head_dim), or packed (total_tokens, heads, head_dim), of bf16, fp16, fp32 or
            fp64. Any strides.
        key: (batch, kv_heads, kv_tokens, head_dim), or (total_kv_tokens, kv_heads, head_dim).
        q_weight, k_weight: (head_dim,), what the norm multiplies each channel by; None for ones. Gemma's norms keep
            weights that 1 is added to: give ``1 + norm.weight.float()``, which passes the gradient on.
        eps: added to the mean square, in squared units of query; None for no norm.
        cos, sin: (tokens, R), or (batch or 1, tokens, R), of any floating-point dtype; packed (total_tokens, R), each
            sequence with its own positions. Every channel's own: R is the number of channels that rotate, the first
            of head_dim's (partial rotary embedding), and a pair's two have the same angle. They get no gradient.
            A table of half as many is ``cat((table, table), -1)`` for "half", and ``repeat_interleave(2, -1)`` for
            "interleaved". None for no rotary embedding.
        rope: which channels are a pair: "half" for i and i + R / 2, as in Llama, Qwen and GPT-NeoX; "interleaved" for
            2 i and 2 i + 1, as in GPT-J and GLM.
        position_ids: (tokens,), or (batch or 1, tokens), integers: the rows of cos and sin, (positions, R), of each
            token, such as an offset's; packed (total_tokens,). A pair of such, query's and key's, where the two
            have other tokens. On a CUDA device the host does not read the values.
        impl: None or the name of an implementation of `sage_attention`. "reference" composes torch's operations, as
            does None on a CPU and for FP64, more than 256 channels and transforms of torch.func; else Triton's
            kernels run.

    Returns:
        query and key, shaped as they were, in their dtype (autocast's under autocast), each in memory as it lies.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or value.
        NotImplementedError: cos or sin that need a gradient; nested and sparse tensors; of the kernels, in backward,
            a second derivative.
    """
    check(query, key, q_weight, k_weight, eps, cos, sin, rope, position_ids, impl)
    prologue = prologue_of(q_weight, k_weight, eps, cos, sin, rope, position_ids)
    return _composed(query, key, prologue, rope, impl)


def _composed(
    query: Tensor, key: Tensor, prologue: Prologue, rope: str, impl: str | None,
    offsets: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """query and key normalised and rotated, by the operator or by torch's own.

    offsets: of packed sequences; rows behind the last are in no gradient of the weights. On a CPU there are none.
    """
    eps, interleaved, q_weight, k_weight, *tables = prologue
    dtypes = [_result_dtype(x) for x in (query, key)]
    rows = [x if x.dim() == 4 else x.transpose(0, 1).unsqueeze(0) for x in (query, key)]
    if _runs_kernels(query, key, impl):
        dtype = dtypes[0] if dtypes[0] == dtypes[1] else None
        given = *rows, q_weight, k_weight, *tables, eps, interleaved, dtype
        ends = () if q_weight is None and k_weight is None else offsets
        *found, _, _ = ops.qk_norm_rope(*given, *ends)
    else:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            rows, (q_weight, k_weight), tables = (savable(*x) for x in (rows, (q_weight, k_weight), tables))
        found = [
            norm_rope(x, weight, eps, *table, rope, dtype)
            for x, weight, table, dtype in zip(rows, (q_weight, k_weight), (tables[:2], tables[2:]), dtypes)
        ]
    q, k = (y if x.dim() == 4 else y[0].transpose(0, 1) for x, y in zip((query, key), found))
    return q, k


def _result_dtype(x: Tensor) -> torch.dtype:
    """x's dtype, or autocast's in its place, as `sagebwd.arguments.autocast` casts."""
    dtype = autocast_dtype(x.device)
    return x.dtype if dtype is None or x.dtype == torch.float64 else dtype


def _runs_kernels(query: Tensor, key: Tensor, impl: str | None) -> bool:
    if impl == REFERENCE.name or (impl is None and not query.is_cuda):
        return False
    if torch.float64 in (query.dtype, key.dtype) or query.shape[-1] > MAX_HEAD_DIM:
        return False
    return not _is_transformed()


def _is_transformed() -> bool:
    """Whether a transform of torch.func or forward mode looks on, which the operators have no rules for."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
