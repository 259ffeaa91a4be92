"""Recipes: the precision, scale groups and smoothing of each attention product.

Attention has seven matrix products: six that are ours to choose, of which the first is computed twice::

    S  = Q K^T      forward, and again in backward from the same operands
    O  = P V        forward, reduces over keys
    dV = P^T dO     backward, reduces over queries
    dP = dO V^T     backward, reduces over head_dim
    dQ = dS K       backward, reduces over keys
    dK = dS^T Q     backward, reduces over queries

A product is ``"int8"`` (INT8 operands, INT32 sums) or ``"16bit"`` (operands in the dtype of the input, FP32 sums);
dV, dQ and dK may also be ``"fp8"`` (e4m3 operands, FP32 sums; `sagebwd.reference.float8` has the scales). Scale groups
are part of the recipe, never of a kernel's tile: a tile may change speed, not numbers. docs/method.md says where a
scale may sit, and what each named recipe was chosen for.

Source: arXiv 2603.02170 (``paper``).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from dataclasses import dataclass

INT8 = "int8"
SIXTEEN_BIT = "16bit"
FP8 = "fp8"

# The default: full precision where that is faster, else `mixed`, `token(dp=int8)` or `token`, by card and width
# (`sagebwd.dispatch.choose`).
AUTO = "auto"

PRODUCTS = ("s", "o", "dv", "dp", "dq", "dk")
BLOCK_SIZES = (16, 32, 64, 128, 256)
P_LEVELS = (127, 254)
MOST_FIRST_KEYS = 128
# Which keys a sampled mean is of (`Recipe.k_mean`).
SAMPLE, SAMPLE_AT, SAMPLE_OF, SAMPLED_FROM = 32, 64, 128, 512

_CHOICES: dict[str, tuple[str | int, ...]] = {
    **dict.fromkeys(("s", "o", "dp"), (INT8, SIXTEEN_BIT)),
    **dict.fromkeys(("dv", "dq", "dk"), (INT8, SIXTEEN_BIT, FP8)),
    "q_scale": ("token", "block"),
    "k_scale": ("token", "lane", "block"),
    "v_scale": ("block", "channel", "sequence"),
    "p_scale_dv": ("key", "tile"),
    "ds_scale_dq": ("query", "tile"),
    "ds_scale_dk": ("key", "tile"),
    "k_mean": ("all", "sample"),
    **dict.fromkeys(("block_q", "block_k"), BLOCK_SIZES),
    "p_levels": P_LEVELS,
}


@dataclass(frozen=True)
class Recipe:
    """Every choice that fixes the numbers of one attention call.

    Products (``"int8"`` or ``"16bit"``; ``dv``, ``dq`` and ``dk`` also ``"fp8"``): ``s``, ``o``, ``dv``, ``dp``,
    ``dq``, ``dk``. The scale groups of P and dS below are those of INT8 products; dO has one scale a block in dV.

    - ``q_scale``, ``k_scale``: one scale a ``"token"`` or one a ``"block"`` of tokens; ``k_scale`` also ``"lane"``,
      one for the keys of a block with the same ``(index mod 8) // 2``: those whose scores one lane of a tensor core's
      quad holds, to whom it is one number.
    - ``v_scale``: one scale a ``"block"``, one a ``"channel"`` (head_dim column) of each block, or ``"sequence"``, one
      a channel over all tokens of the sequence. Products in FP8 take the magnitudes of V's channels over the sequence
      in any recipe.
    - ``p_scale_dv``: P in dV, per ``"key"`` of a tile or per ``"tile"``.
    - ``ds_scale_dq``, ``ds_scale_dk``: dS per ``"query"`` / per ``"key"`` of a tile, or per ``"tile"``.
    - ``block_q``, ``block_k``: tokens in a block of queries and of keys; a tile is block_q x block_k.
    - ``p_levels``: steps of P in forward, 127, or 254: codes 0 to 254, held in INT8 as code - 128. Its scale is per
      query row of each key block in every recipe.
    - ``first_keys``: how many of the first keys of a sequence, the first that a key-padding mask leaves, take part in
      an INT8 O in 16 bit, 0 to 128, apart from the scale of the others' P. A single one has P and V in FP32; the
      operands of several are rounded to the dtype of the input. A 16-bit O has no such scales, and the field no
      meaning there.
    - ``dp``: an INT8 dP is of dO R and (V - c) R, each with a scale a token; c is the mean of O over the queries of a
      key head that see a key, and R is `rotate`'s, of value's head_dim. delta is the sum over channels of dO's codes,
      times their scale, and (O - c) R: dP and delta then share dO's rounding, and in their difference c is gone.
    - ``smooth_k``, ``smooth_v``: the mean over tokens is subtracted, which is exact in real arithmetic. V is smoothed
      only to be quantised: a 16-bit O takes it as it lies.
    - ``k_mean``: K's mean is that of ``"all"`` keys, or of a ``"sample"``: in a sequence of `SAMPLED_FROM` keys or
      more `SAMPLE` of every `SAMPLE_OF`, from the one numbered `SAMPLE_AT` on, unless a mask hides keys.
    - ``rotate``: the codes of an INT8 S are those of Q R and of K less its mean times R, R being orthogonal
      (`sagebwd.reference.rotation`). Products of dQ and dK that read S's codes turn their sums back; Q's e4m3 operand
      is made of codes that are turned back. The field has no meaning for a 16-bit S whose dP, dQ and dK are 16 bit
      too.

    Raises ValueError for an unknown choice, block size or number of keys, and TypeError for a switch that is not a
    bool.
    """

    s: str = INT8
    o: str = INT8
    dv: str = INT8
    dp: str = SIXTEEN_BIT
    dq: str = INT8
    dk: str = INT8
    q_scale: str = "token"
    k_scale: str = "token"
    v_scale: str = "channel"
    p_scale_dv: str = "key"
    ds_scale_dq: str = "query"
    ds_scale_dk: str = "key"
    p_levels: int = 254
    first_keys: int = 16
    block_q: int = 64
    block_k: int = 128
    smooth_k: bool = True
    smooth_v: bool = True
    k_mean: str = "all"
    rotate: bool = True

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            value = getattr(self, name)
            if value not in accepted:
                raise ValueError(
                    f"recipe: {name}={value!r} is not supported; accepted: {', '.join(map(str, accepted))}"
                )
        first = self.first_keys
        if not isinstance(first, int) or isinstance(first, bool) or not 0 <= first <= MOST_FIRST_KEYS:
            raise ValueError(f"recipe: first_keys={first!r} is not supported; accepted: 0 to {MOST_FIRST_KEYS}")
        for name in ("smooth_k", "smooth_v", "rotate"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"recipe: {name}={value!r} must be True or False")

    @classmethod
    def named(cls, name: str) -> Recipe:
        """The recipe called ``name``: one of `RECIPES`. Raises ValueError for any other."""
        if name == AUTO:
            raise ValueError(
                f"recipe: {AUTO!r} is chosen call by call and fixes no numbers; name one: {', '.join(RECIPES)}"
            )
        if name not in RECIPES:
            raise ValueError(
                f"recipe: there is none called {name!r}; named recipes: {', '.join(RECIPES)}; calls of attention take "
                f"{AUTO!r} too"
            )
        return RECIPES[name]

    @classmethod
    def parse(cls, text: str | Recipe) -> Recipe:
        """The recipe that ``text`` describes: ``token``, or ``token(smooth_v=False, block_k=128)``.

        The inverse of ``str``. Raises ValueError where the text has another form, names no recipe or field, or
        gives a value that the field does not accept.
        """
        if isinstance(text, Recipe):
            return text
        if not isinstance(text, str):
            raise TypeError(f"recipe: expected a name or a Recipe, got {type(text).__name__}")
        name, opened, rest = text.strip().partition("(")  # torch 2.11 and 2.12 cannot trace a regular expression
        name, arguments = name.rstrip(), rest[:-1]
        if not name.isidentifier() or bool(opened) != rest.endswith(")"):
            raise ValueError(f"recipe: cannot read {text!r}; expected NAME or NAME(field=value, ...)")
        recipe = cls.named(name)
        return recipe.replace(**_parse_fields(text, arguments)) if arguments else recipe

    @classmethod
    def parse_or_auto(cls, text: str | Recipe) -> Recipe | str:
        """As `parse`, but for "auto", which each call is to choose for itself (`sagebwd.dispatch.choose`)."""
        if isinstance(text, str) and text.strip() == AUTO:
            if text != AUTO:  # each call compares it
                raise ValueError(f"recipe: {text!r} has blanks; write {AUTO!r}")
            return AUTO
        return cls.parse(text)

    def replace(self, **changes: object) -> Recipe:
        """A copy with the given fields changed. Raises ValueError for a field that does not exist."""
        _check_fields(changes)
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        """One line that `parse` reads back: the named recipe with the fewest differences, and those."""
        for name, named in RECIPES.items():
            if named is self:
                return name
        differences = {
            name: [x for x in _FIELDS if getattr(named, x) != getattr(self, x)] for name, named in RECIPES.items()
        }
        best = min(differences, key=lambda name: len(differences[name]))
        changes = ", ".join([f"{field}={_constant(getattr(self, field))}" for field in differences[best]])
        return f"{best}({changes})" if changes else best


_FIELDS = tuple(field.name for field in dataclasses.fields(Recipe))


def _constant(value: str | int) -> str | int:
    """A field's value, of which a trace takes a number for a symbol that no text has."""
    return operator.index(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_fields(names: Iterable[str]) -> None:
    """Raises ValueError for a name that is no field's."""
    for name in names:
        if name not in _FIELDS:
            raise ValueError(f"recipe: there is no field {name!r}; fields: {', '.join(_FIELDS)}")


def _parse_fields(text: str, arguments: str) -> dict[str, object]:
    """``field=value`` pairs; a value is an integer, True, False or a bare word."""
    fields: dict[str, object] = {}
    for pair in arguments.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise ValueError(f"recipe: cannot read {pair.strip()!r} in {text!r}; expected field=value")
        if name in fields:
            raise ValueError(f"recipe: {text!r} has {name} twice")
        _check_fields([name])
        if value in ("True", "False"):
            fields[name] = value == "True"
        else:
            fields[name] = int(value) if value.isdecimal() else value
    return fields


_TOKEN = Recipe()

RECIPES: dict[str, Recipe] = {
    "token": _TOKEN,
    "paper": Recipe(
        q_scale="block",
        k_scale="block",
        v_scale="block",
        p_scale_dv="tile",
        ds_scale_dq="tile",
        ds_scale_dk="tile",
        p_levels=127,
        first_keys=0,
        block_q=128,
        block_k=64,
        smooth_v=False,
        rotate=False,
    ),
    "mixed": Recipe(
        o=SIXTEEN_BIT, dv=FP8, dq=FP8, dk=FP8, k_scale="lane", v_scale="sequence", smooth_v=False, k_mean="sample"
    ),
    "full": Recipe(
        s=SIXTEEN_BIT,
        o=SIXTEEN_BIT,
        dv=SIXTEEN_BIT,
        dq=SIXTEEN_BIT,
        dk=SIXTEEN_BIT,
        smooth_k=False,
        smooth_v=False,
        rotate=False,
    ),
}
