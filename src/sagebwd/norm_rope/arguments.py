"""Arguments of a norm and a rotary embedding: checked, and brought into the form that kernels take."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd import checks
from sagebwd.call import Prologue
from sagebwd.dispatch import check_known
from sagebwd.kernels.capabilities import REFERENCE_DTYPES
from sagebwd.norm_rope.composed import INTERLEAVED, ROPES

_LAYOUTS = "(batch, heads, tokens, head_dim), or packed (total_tokens, heads, head_dim)"
Positions = Tensor | tuple[Tensor | None, Tensor | None] | None


def check(
    query: Tensor, key: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float | None,
    cos: Tensor | None, sin: Tensor | None, rope: str, position_ids: Positions, impl: str | None,
) -> None:  # fmt: skip
    """Raises what `sagebwd.norm_rope.functions.qk_norm_rope` does."""
    _check_rows(query, key)
    checks.alike(query=query, key=key, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    for ids in position_ids if isinstance(position_ids, tuple) else (position_ids,):
        checks.alike(query=query, position_ids=ids)
    check_known(impl)
    _check_norm(query, q_weight, k_weight, eps)
    if rope not in ROPES:
        raise ValueError(f"rope={rope!r} is not known; accepted: {', '.join(map(repr, ROPES))}")
    if cos is not None and sin is not None:
        _check_tables(query, key, cos, sin, position_ids)
        return
    for name, given in (("cos", cos), ("sin", sin), ("position_ids", position_ids)):
        if given is not None:
            missing = "cos and sin" if cos is sin else "cos" if cos is None else "sin"
            raise ValueError(f"{name}: rotary embedding needs {missing} too, got None")


def prologue_of(
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float | None, cos: Tensor | None, sin: Tensor | None,
    rope: str, position_ids: Positions,
) -> Prologue:  # fmt: skip
    """The same as kernels take it: with the rows of cos and sin that queries have, and those that keys have."""
    tables = []
    for ids in position_ids if isinstance(position_ids, tuple) else (position_ids,):
        for x in (cos, sin):
            x = x if ids is None else x[ids]
            tables.append(x if x is None or x.dim() == 3 else x.unsqueeze(0))
    tables = tables if len(tables) == 4 else tables * 2
    return Prologue(None if eps is None else float(eps), rope == INTERLEAVED, q_weight, k_weight, *tables)


def _check_rows(query: Tensor, key: Tensor) -> None:
    for name, x in (("query", query), ("key", key)):
        checks.tensor(name, x)
        if x.is_nested:
            raise NotImplementedError(f"{name}: nested tensors are not supported; give values(), packed")
        checks.strided(name, x)
        if x.dim() not in (3, 4) or x.dim() != query.dim():
            raise ValueError(f"{name}: expected {_LAYOUTS}, the same of query and key, got shape {tuple(x.shape)}")
        if x.dtype not in checks.REFERENCE_DTYPES:
            raise TypeError(f"{name}: dtype {x.dtype} is not supported; accepted: {', '.join(REFERENCE_DTYPES)}")
        checks.same_device(name, x, query.device)
        if x.shape[-1] == 0 or x.shape[-1] != query.shape[-1]:
            raise ValueError(
                f"{name}: head_dim {x.shape[-1]} is not supported beside query's {query.shape[-1]}; accepted: equal, "
                "at least 1"
            )
    if query.dim() == 4 and key.shape[0] != query.shape[0]:
        raise ValueError(f"key: batch {key.shape[0]} differs from query's {query.shape[0]}; they must be equal")


def _check_norm(query: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float | None) -> None:
    if eps is not None and not checks.is_number(eps):
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
    checks.tensor(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name}: dtype {x.dtype} is not supported; accepted: floating point")
    checks.same_device(name, x, query.device)


def _check_tables(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, position_ids: Positions) -> None:
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
    sides = position_ids if isinstance(position_ids, tuple) else (position_ids, position_ids)
    if len(sides) != 2:
        raise ValueError(f"position_ids: a tuple of {len(sides)}; accepted: query's and key's")
    for name, x, ids in zip(("query", "key"), (query, key), sides):
        _check_places(name, x, cos, ids)


def _check_places(name: str, x: Tensor, cos: Tensor, ids: Tensor | None) -> None:
    """Of query or key: its tokens have a row each."""
    if ids is not None:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"position_ids: expected a tensor of int64 or int32, or a pair, got {ids!r}")
        checks.same_device("position_ids", ids, x.device, f"{name}'s")
        if cos.dim() != 2:
            raise ValueError(
                f"cos: expected (positions, R) beside position_ids, got shape {tuple(cos.shape)}; give either"
            )
        if ids.dim() not in (1, 2):
            raise ValueError(f"position_ids: expected (tokens,) or (batch or 1, tokens), got shape {tuple(ids.shape)}")
    rows = (1, *(cos.shape[:-1] if ids is None else ids.shape))[-2:]
    batch, tokens = (x.shape[0], x.shape[2]) if x.dim() == 4 else (1, x.shape[0])
    if rows[0] not in (1, batch) or rows[1] != tokens:
        given = "cos" if ids is None else "position_ids"
        raise ValueError(
            f"{given}: {rows[0]} x {rows[1]} positions do not fit {name}'s {batch} x {tokens}; accepted: "
            f"(tokens,) or (batch or 1, tokens), and position_ids=(query's, key's) where the two differ"
        )
