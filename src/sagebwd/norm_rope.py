"""QK-norm and rotary embedding before attention: the public functions, and their checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagebwd import checks, norm_rope_ops, norm_rope_plan
from sagebwd.arguments import autocast_dtype
from sagebwd.attention import sage_attention, sage_attention_varlen
from sagebwd.call import Prologue
from sagebwd.derivatives import savable
from sagebwd.dispatch import check_known
from sagebwd.kernels.capabilities import MAX_HEAD_DIM
from sagebwd.kernels.families import REFERENCE
from sagebwd.norm_rope_composed import HALF, INTERLEAVED, ROPES, norm_rope

_LAYOUTS = "(batch, heads, tokens, head_dim), or packed (total_tokens, heads, head_dim)"


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
    packed = "cu_seqlens_q" in attention
    if isinstance(query, Tensor) and query.dim() != (3 if packed else 4):
        wanted = "3 dimensions, (total_tokens, heads, head_dim), beside" if packed else "4 dimensions without"
        raise ValueError(f"query: expected {wanted} cu_seqlens_q, got shape {tuple(query.shape)}")
    checks.kind(query, key, value)
    tables = _checked(query, key, q_weight, k_weight, eps, cos, sin, rope, position_ids, attention.get("impl"))
    prologue = _prologue(q_weight, k_weight, eps, tables, rope)
    out = norm_rope_plan.attend(query, key, value, prologue, attention)
    if out is not None:
        return out
    offsets = [attention.get(name) for name in norm_rope_plan.OFFSETS] if packed else None
    query, key = _composed(query, key, prologue, rope, attention.get("impl"), offsets)
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
    tables = _checked(query, key, q_weight, k_weight, eps, cos, sin, rope, position_ids, impl)
    return _composed(query, key, _prologue(q_weight, k_weight, eps, tables, rope), rope, impl)


def _checked(
    query: Tensor, key: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float | None,
    cos: Tensor | None, sin: Tensor | None, rope: str, position_ids: Tensor | tuple[Tensor, Tensor] | None,
    impl: str | None,
) -> tuple[Table, Table]:  # fmt: skip
    """Query's cos and sin, and key's, of arguments that were checked."""
    _check_rows(query, key)
    check_known(impl)
    _check_norm(query, q_weight, k_weight, eps)
    return _tables(query, key, cos, sin, rope, position_ids)


def _prologue(
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float | None, tables: tuple[Table, Table], rope: str
) -> Prologue:
    return Prologue(
        None if eps is None else float(eps), rope == INTERLEAVED, q_weight, k_weight, *tables[0], *tables[1]
    )


def _composed(
    query: Tensor, key: Tensor, prologue: Prologue, rope: str, impl: str | None,
    offsets: list[Tensor | None] | None = None,
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
        ends = () if offsets is None or (q_weight is None and k_weight is None) else offsets
        *found, _, _ = norm_rope_ops.qk_norm_rope(*given, *ends)
    else:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            rows, (q_weight, k_weight), tables = (list(map(savable, x)) for x in (rows, (q_weight, k_weight), tables))
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
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0


def _check_rows(query: Tensor, key: Tensor) -> None:
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.is_nested:
            raise NotImplementedError(f"{name}: nested tensors are not supported; give values(), packed")
        checks.strided(name, x)
        if x.dim() not in (3, 4) or x.dim() != query.dim():
            raise ValueError(f"{name}: expected {_LAYOUTS}, the same of query and key, got shape {tuple(x.shape)}")
        if x.dtype not in checks.REFERENCE_DTYPES:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in checks.REFERENCE_DTYPES)
            raise TypeError(f"{name}: dtype {x.dtype} is not supported; accepted: {accepted}")
        if x.device != query.device:
            raise ValueError(f"{name}: device {x.device} differs from query's {query.device}")
        if x.shape[-1] == 0 or x.shape[-1] != query.shape[-1]:
            raise ValueError(
                f"{name}: head_dim {x.shape[-1]} is not supported beside query's {query.shape[-1]}; accepted: equal, "
                "at least 1"
            )
    if query.dim() == 4 and key.shape[0] != query.shape[0]:
        raise ValueError(f"key: batch {key.shape[0]} differs from query's {query.shape[0]}; they must be equal")


def _check_norm(query: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float | None) -> None:
    if eps is not None and (isinstance(eps, bool) or not isinstance(eps, (int, float))):
        raise TypeError(f"eps={eps!r} must be a number, or None for no norm")
    if eps is not None and not 0 <= eps < float("inf"):
        raise ValueError(f"eps={eps} must be finite and not negative")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is None:
            continue
        if eps is None:
            raise ValueError(f"{name}: a norm's weight needs eps, which is None; give the norm's, such as eps=1e-6")
        _check_floats(name, weight, query)
        if weight.shape != query.shape[-1:]:
            raise ValueError(f"{name}: expected shape ({query.shape[-1]},), got {tuple(weight.shape)}")


def _check_floats(name: str, x: Tensor, query: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: dtype {x.dtype} is not supported; accepted: floating point")
    if x.device != query.device:
        raise ValueError(f"{name}: device {x.device} differs from query's {query.device}")


Table = tuple[Tensor | None, Tensor | None]
"""cos and sin of one side, (batch or 1, tokens, R)."""


def _tables(
    query: Tensor, key: Tensor, cos: Tensor | None, sin: Tensor | None, rope: str,
    position_ids: Tensor | tuple[Tensor, Tensor] | None,
) -> tuple[Table, Table]:  # fmt: skip
    """Query's and key's."""
    if rope not in ROPES:
        raise ValueError(f"rope={rope!r} is not known; accepted: {', '.join(map(repr, ROPES))}")
    if cos is None or sin is None:
        for name, given in (("cos", cos), ("sin", sin), ("position_ids", position_ids)):
            if given is not None:
                missing = "cos and sin" if cos is sin else "cos" if cos is None else "sin"
                raise ValueError(f"{name}: rotary embedding needs {missing} too, got None")
        return (None, None), (None, None)
    for name, x in (("cos", cos), ("sin", sin)):
        _check_floats(name, x, query)
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name}: its gradient is not computed; give {name}.detach()")
        if x.dim() not in (2, 3) or x.shape != cos.shape:
            raise ValueError(
                f"{name}: expected (tokens, R) or (batch or 1, tokens, R), the same of cos and sin, got shape "
                f"{tuple(x.shape)}"
            )
    head_dim, channels = query.shape[-1], cos.shape[-1]
    if channels % 2 or not 2 <= channels <= head_dim:
        raise ValueError(
            f"cos: {channels} channels are not supported; accepted: an even number from 2 to head_dim {head_dim}"
        )
    if position_ids is None:
        by_side = (None, None)
    elif isinstance(position_ids, tuple):
        if len(position_ids) != 2:
            raise ValueError(f"position_ids: a tuple of {len(position_ids)}; accepted: query's and key's")
        by_side = position_ids
    else:
        by_side = (position_ids, position_ids)
    q_table = _table("query", query, cos, sin, by_side[0])
    if by_side[0] is by_side[1] and _tokens(query) == _tokens(key):
        return q_table, q_table
    return q_table, _table("key", key, cos, sin, by_side[1])


def _tokens(x: Tensor) -> tuple[int, int]:
    """The batch, and the tokens of a head."""
    return (x.shape[0], x.shape[2]) if x.dim() == 4 else (1, x.shape[0])


def _table(name: str, x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, tokens = _tokens(x)
    if position_ids is not None:
        if not isinstance(position_ids, Tensor) or position_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"position_ids: expected a tensor of int64 or int32, or a pair, got {position_ids!r}")
        if position_ids.device != x.device:
            raise ValueError(f"position_ids: device {position_ids.device} differs from {name}'s {x.device}")
        if cos.dim() != 2:
            raise ValueError(
                f"cos: expected (positions, R) beside position_ids, got shape {tuple(cos.shape)}; give either"
            )
        if position_ids.dim() not in (1, 2):
            raise ValueError(
                f"position_ids: expected (tokens,) or (batch or 1, tokens), got shape {tuple(position_ids.shape)}"
            )
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin = (y if y.dim() == 3 else y.unsqueeze(0) for y in (cos, sin))
    if cos.shape[0] not in (1, batch) or cos.shape[1] != tokens:
        given = "cos" if position_ids is None else "position_ids"
        raise ValueError(
            f"{given}: {cos.shape[0]} x {cos.shape[1]} positions do not fit {name}'s {batch} x {tokens}; accepted: "
            f"(tokens,) or (batch or 1, tokens), and position_ids=(query's, key's) where the two differ"
        )
    return cos, sin
