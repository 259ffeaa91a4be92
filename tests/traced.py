"""Every intermediate tensor of the emulator at once, for short sequences."""

import torch
from torch import Tensor

from sagebwd.masks.band import Band
from sagebwd.recipe import Recipe
from sagebwd.reference.emulator import Emulator


def trace(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    recipe: Recipe | str,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Every tensor of the paper's Table 2, under a recipe and in full precision.

    Args: query (B, Hq, N, D), key and value (B, Hkv, M, D), grad_out as query; recipe, a Recipe or its text.
    Returns: {"recipe": ..., "full": ...}, each with o, lse, delta, dq, dk, dv and, of size queries x keys, p, dp, ds;
    the full side computed in FP64 from the same inputs. dP and dS are zero where a query does not see a key.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    band = Band.of(is_causal, *(window or (-1, -1)))
    sides = {
        "recipe": (Recipe.parse(recipe), (query, key, value, grad_out)),
        "full": (Recipe.named("full"), tuple(t.double() for t in (query, key, value, grad_out))),
    }
    return {name: _side(side, *tensors, band, scale) for name, (side, tensors) in sides.items()}


def _side(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, do: Tensor, band: Band, scale: float) -> dict[str, Tensor]:
    emulator = Emulator(q, k, v, recipe, scale, band)
    o, lse, _ = emulator.forward()
    tokens_q, tokens_k = q.shape[2], k.shape[2]
    pairs = {
        name: torch.zeros(*q.shape[:3], tokens_k, dtype=emulator.compute, device=q.device)
        for name in ("p", "dp", "ds")
    }

    def observe(name: str, rows: slice, keys: slice, value: Tensor) -> None:
        rows = slice(rows.start, min(rows.stop, tokens_q))
        keys = slice(keys.start, min(keys.stop, tokens_k))
        value = value[..., : rows.stop - rows.start, : keys.stop - keys.start]
        if name == "dp":
            value = value.masked_fill(~emulator._visible(rows, keys), 0)
        pairs[name][:, :, rows, keys] = value.flatten(1, 2)

    dq, dk, dv = emulator.backward(do, o, lse, observe=observe)
    return {"o": o, "lse": lse, "delta": emulator.delta(do, o, lse), **pairs, "dq": dq, "dk": dk, "dv": dv}
