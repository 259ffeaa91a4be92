"""What a row of the matrix is: its form, widths, recipe and dtype, and the inputs of its calls."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from sagebwd import Recipe, dispatch, read_block_mask
from sagebwd.call import Ask
from sagebwd.kernels.capabilities import MAX_HEAD_DIM
from sagebwd.masks.kinds import FULL, MASK
from sagebwd.masks.mask import Mask
from sagebwd.recipe import AUTO, FP8
from tests.inputs import draw
from tests.masks import draw as draw_mask
from tools.fuzz import Case

LARGE = 50
"""Times the size of others that hidden keys and values have."""


@dataclass(frozen=True)
class Form:
    """What a call is but for its widths, recipe and dtype; ``layout`` and ``mask`` as `tools.fuzz.Case` has them.

    spoilt: what is large or NaN and must not show: "large" or "nan" keys and values that padding hides, a NaN
    "sequence" of a pack (the second), a NaN "head" (the second). left: padding stands before the keys, not after.
    contiguous: heads before tokens in memory; else tokens before heads, as after a projection.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...] = ()
    layout: str = "dense"
    heads: int = 2
    kv_heads: int = 2
    is_causal: bool = False
    window: tuple[int, int] | None = None
    mask: str = ""
    spoilt: str = ""
    left: bool = False
    contiguous: bool = False
    deterministic: bool = False


def _packed(*lengths: int, **rest: object) -> Form:
    return Form(lengths, layout="packed", **rest)


# Lengths repeat where forms may then share kernels: compiling takes nearly all the time.
FORMS = {
    "full": Form((300,), contiguous=True),
    "causal": Form((301, 301), is_causal=True),
    "ragged": Form((301,), (299,)),
    "one-token": Form((1, 1)),
    "17-tokens": Form((17,), is_causal=True),
    "more-keys-causal": Form((131,), (301,), is_causal=True),
    "fewer-keys-causal": Form((301,), (131,), is_causal=True),
    "window": Form((300,), heads=4, window=(40, 25)),
    "window-causal": Form((300,), heads=4, window=(64, -1), is_causal=True),
    "grouped-causal": Form((300,), heads=4, is_causal=True, contiguous=True),
    "multi-query": Form((301,), heads=4, kv_heads=1, is_causal=True),
    "deterministic": Form((301, 301), is_causal=True, deterministic=True),
    "head-nan": Form((301, 301), is_causal=True, spoilt="head"),
    "packed": Form((300, 0, 1, 2, 17, 5), (299, 3, 1, 2, 17, 0), "packed"),
    "packed-causal": _packed(0, 1, 2, 17, 300, is_causal=True),
    "packed-window": _packed(2, 300, 17, heads=4, is_causal=True, window=(64, -1)),
    "packed-nan": _packed(150, 33, 130, is_causal=True, spoilt="sequence"),
    "padding": Form((301, 301), (301, 170), "padded", spoilt="large"),
    "padding-nan": Form((300, 300), (300, 170), "padded", spoilt="nan", left=True, is_causal=True),
    "bool-matrix": Form((300,), layout="masked", mask="bool-matrix"),
    "bool-all": Form((300, 300), layout="masked", mask="bool-all"),
    "bias": Form((301,), layout="masked", mask="bias-heads"),
    "document": Form((300,), layout="masked", mask="document"),
    "sinks": Form((300,), layout="masked", mask="sinks"),
}
# Forms that launch what another compiles: their rows cost next to nothing after one of it.
LIKE = {
    "17-tokens": "causal",
    "more-keys-causal": "causal",
    "fewer-keys-causal": "causal",
    "deterministic": "causal",
    "head-nan": "causal",
    "window-causal": "window",
    "packed-nan": "packed-window",
}

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@lru_cache
def _mask(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor | Mask:
    mask = draw_mask(kind, shape, dtype, seed=0)
    return mask if isinstance(mask, Tensor) else read_block_mask(mask)


@dataclass(frozen=True, kw_only=True)
class Cell(Case):
    """One row: a form at its widths, of a recipe and dtype. The calls of a row differ in ``seed``."""

    form: str
    shape: Form

    def key(self) -> dict[str, object]:
        """What names the row."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        dims = {"head_dim": self.head_dim, "value_dim": self.value_dim}
        return {**dims, "form": self.form, "recipe": self.recipe, "dtype": names[self.dtype]}

    @property
    def width(self) -> int:
        """That of the kernels, which the lesser is filled up to."""
        return max(self.head_dim, self.value_dim)

    def may_be_refused(self, device: str, impl: str | None) -> bool:
        """Whether the package may say that it does not take the call."""
        if self.width > MAX_HEAD_DIM:
            return True
        if self.recipe == AUTO or impl == "reference":
            return False
        recipe = Recipe.parse(self.recipe)
        if FP8 not in (recipe.dv, recipe.dq, recipe.dk) and impl != "hopper":
            return False
        return dispatch.arch_of(torch.device(device)) != 90

    def emulated_as(self, device: str, impl: str | None) -> Cell:
        """The same with the recipe that "auto" stands for."""
        if self.recipe != AUTO:
            return self
        dims, kind = (self.head_dim, self.value_dim), MASK if self.layout == "masked" else FULL
        choice = dispatch.choose(Ask(AUTO, *dims, self.dtype, torch.device(device), kind, impl))
        return replace(self, recipe=str(choice.recipe))

    def inputs(self, device: str) -> list[Tensor]:
        """q, k, v and do in the layout's shape; nothing spoilt yet."""
        packed = self.layout == "packed"
        total = sum if packed else max
        drawn = draw(
            self.kind, 1 if packed else len(self.lengths_q), self.heads, self.kv_heads, total(self.lengths_q),
            total(self.lengths_k), self.width, self.seed,
        )  # fmt: skip
        q, k, v, do = drawn
        cut = q[..., : self.head_dim], k[..., : self.head_dim], v[..., : self.value_dim], do[..., : self.value_dim]
        placed = [self._placed(x.to(device, self.dtype)) for x in cut]
        return [x[0].transpose(0, 1) for x in placed] if packed else placed

    def _placed(self, x: Tensor) -> Tensor:
        if self.shape.contiguous:
            return x.contiguous()
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def with_spoilt(self, inputs: list[Tensor]) -> list[Tensor]:
        """The inputs with what must not show, in the same places of memory."""
        what = self.shape.spoilt
        found = [x.clone() for x in inputs]  # which keeps strides
        q, k, v, do = found
        if what in ("large", "nan"):
            hidden = ~self.masks(k.device)["attn_mask"][:, 0, 0, :, None][:, None]
            for x in (k, v):
                x.copy_(torch.where(hidden, math.nan if what == "nan" else LARGE * x, x))
        elif what == "sequence":
            for x, lengths in ((q, self.lengths_q), (k, self.lengths_k), (v, self.lengths_k), (do, self.lengths_q)):
                x[lengths[0] : lengths[0] + lengths[1]] = math.nan
        elif what == "head":
            for x in found:
                x[:, 1] = math.nan
        return found

    def masks(self, device: str | torch.device) -> dict[str, Tensor | Mask]:
        """The mask arguments of a dense call."""
        if self.layout == "padded" and self.shape.left:
            longest = max(self.lengths_k)
            keys = torch.arange(longest, device=device)
            return {
                "attn_mask": (keys >= longest - torch.tensor(self.lengths_k, device=device)[:, None])[:, None, None]
            }
        return super().masks(device)

    def drawn_mask(self) -> Tensor | Mask:
        """The mask of a masked form, the same for every call of the row."""
        shape = len(self.lengths_q), self.heads, max(self.lengths_q), max(self.lengths_k)
        return _mask(self.mask, shape, self.dtype)

    def kept(self, results: list[Tensor]) -> list[Tensor]:
        """What of o, lse, dq, dk and dv must be right: the NaN sequence or head left out."""
        if self.shape.spoilt == "head":
            return [torch.cat([x[:, :1], x[:, 2:]], 1) for x in results]
        if self.shape.spoilt != "sequence":
            return results
        kept = []
        for name, x in zip(("o", "lse", "dq", "dk", "dv"), results):
            lengths = self.lengths_k if name in ("dk", "dv") else self.lengths_q
            dim = 1 if name == "lse" else 0
            first, _, *rest = x.split(list(lengths), dim)
            kept.append(torch.cat([first, *rest], dim))
        return kept


def cell_of(forms: dict[str, Form], head_dim: int, value_dim: int, form: str, recipe: str, dtype: str) -> Cell:
    """A row of some forms by its names."""
    shape = forms[form]
    return Cell(
        seed=0, kind="normal", dtype=DTYPES[dtype], head_dim=head_dim, heads=shape.heads, kv_heads=shape.kv_heads,
        lengths_q=shape.lengths_q, lengths_k=shape.lengths_k or shape.lengths_q, layout=shape.layout,
        mask=shape.mask, is_causal=shape.is_causal, window=shape.window, scale=head_dim**-0.5, recipe=recipe,
        value_dim=value_dim, form=form, shape=shape,
    )  # fmt: skip
