"""A traced mask_mod (`sagebwd.masks.trace_mask_mod`) computed by torch's rules for integers.

Values along one axis, most divisions and loads of tables among them, are computed once for each token by
`store_along`; a tile's pairs (`seen`) load them. In one kernel the compiler would compute them again for each row and
column that a thread holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sagebwd.masks import trace_mask_mod

INDICES = tl.constexpr(len(trace_mask_mod.INDICES))
MOST_DIMENSIONS = tl.constexpr(trace_mask_mod.MOST_DIMENSIONS)


@triton.constexpr_function
def steps_of(text):
    """The fields of each operation of a trace."""
    return [step.split(trace_mask_mod.FIELD) for step in text.split(trace_mask_mod.STEP)]


@triton.constexpr_function
def places_of(step):
    """The values that an operation takes."""
    return [int(field) for field in step[4 if step[0] in ("load", "number") else 3 :]]


@triton.constexpr_function
def crossings(text):
    """Values along one axis that are met with the other's, or that are the result: computed once for all tiles."""
    steps = steps_of(text)
    axes = [*trace_mask_mod.INDICES, *(step[2] for step in steps)]
    met = {place for step in steps if len(step[2]) == 2 for place in places_of(step)} | {len(axes) - 1}
    return [place for place in sorted(met) if place >= len(trace_mask_mod.INDICES) and len(axes[place]) == 1]


@triton.constexpr_function
def _count(text):
    return len(steps_of(text))


@triton.constexpr_function
def _name(text, step):
    return steps_of(text)[step][0]


@triton.constexpr_function
def _dtype(text, step):
    name = steps_of(text)[step][1]
    return getattr(tl, {"fp32": "float32", "fp64": "float64"}.get(name, name))


@triton.constexpr_function
def _axes(text, place):
    """The axes of a value."""
    indices = trace_mask_mod.INDICES
    return indices[place] if place < len(indices) else steps_of(text)[place - len(indices)][2]


@triton.constexpr_function
def _first(text, step):
    """The first number of an operation: of a table or a number, or the place of a value."""
    return int(steps_of(text)[step][3])


@triton.constexpr_function
def _places(text, step):
    return len(places_of(steps_of(text)[step]))


@triton.constexpr_function
def _place(text, step, number):
    return places_of(steps_of(text)[step])[number]


@triton.constexpr_function
def _crossing(text, place):
    """The number of a value among `crossings`; -1 where it is none."""
    found = crossings(text)
    return found.index(place) if place in found else -1


@triton.jit
def store_along(TEXT: tl.constexpr, AXIS: tl.constexpr, asked, along, stride_value, batch, head, at, there):
    """Store values along an axis, ``"q"`` or ``"k"``, at some tokens of a head.

    asked: as of `block_mask_pass`. along: where a head's first value goes,
    ``stride_value`` before the next. batch, head, at: int64.
    """
    values = (batch, head, at, at)
    for step in tl.static_range(_count(TEXT)):
        x = 0
        if _axes(TEXT, step + INDICES) == AXIS or _axes(TEXT, step + INDICES) == "":
            x = _value(TEXT, step, values, asked)
        if _axes(TEXT, step + INDICES) == AXIS and _crossing(TEXT, step + INDICES) >= 0:
            to = along + _crossing(TEXT, step + INDICES) * stride_value + at
            tl.store(to, x.to(tl.int64), mask=there)
        values = values + (x,)  # noqa: RUF005 (Triton unpacks no tuple)


@triton.jit
def seen(TEXT: tl.constexpr, asked, along, stride_value, batch, head, q, k, BY_KEY: tl.constexpr):
    """Whether pairs are seen of q (queries,) and k (keys,), int64: what broadcasts to (queries, keys), or by key to
    (keys, queries)."""
    values = (batch, head, across(q, BY_KEY), across(k, not BY_KEY))
    for step in tl.static_range(_count(TEXT)):
        x = 0
        if _axes(TEXT, step + INDICES) == "qk" or _axes(TEXT, step + INDICES) == "":
            x = _value(TEXT, step, values, asked)
        elif _crossing(TEXT, step + INDICES) >= 0:
            x = _met(TEXT, step, q, k, BY_KEY, along + _crossing(TEXT, step + INDICES) * stride_value)
        values = values + (x,)  # noqa: RUF005
    return values[_count(TEXT) + INDICES - 1]


@triton.jit
def across(x, AS_ROW: tl.constexpr):
    """Values in a row, or in a column."""
    if AS_ROW:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def _met(TEXT: tl.constexpr, STEP: tl.constexpr, q, k, BY_KEY: tl.constexpr, along):
    """A value along one axis beside those of the other."""
    if _axes(TEXT, STEP + INDICES) == "q":
        x = across(tl.load(along + q), BY_KEY)
    else:
        x = across(tl.load(along + k), not BY_KEY)
    if _is_bool(_name(TEXT, STEP), _dtype(TEXT, STEP)):
        return x != 0
    else:
        return x.to(_dtype(TEXT, STEP))


@triton.constexpr_function
def _is_bool(name, dtype):
    """Whether an operation gives what is true or false."""
    return name in trace_mask_mod.COMPARISONS or dtype == tl.int1


@triton.jit
def _value(TEXT: tl.constexpr, STEP: tl.constexpr, values, asked):
    """What one operation gives."""
    NAME: tl.constexpr = _name(TEXT, STEP)
    DTYPE: tl.constexpr = _dtype(TEXT, STEP)
    FIRST: tl.constexpr = _first(TEXT, STEP)
    if NAME == "number":
        if DTYPE.is_floating():
            return tl.full((), asked.numbers[FIRST], tl.float64).to(DTYPE)
        else:
            return _to((tl.full((), asked.numbers[FIRST], tl.int64) - 3) >> 2, DTYPE)
    elif NAME == "load":
        return _loaded(TEXT, STEP, values, asked, DTYPE)
    elif NAME == "to":
        return _to(values[FIRST], DTYPE)
    elif NAME == "invert":
        return ~values[FIRST]
    elif NAME == "neg":
        return (0 - values[FIRST]).to(DTYPE)
    elif NAME == "abs":
        return tl.abs(values[FIRST])
    elif NAME == "where":
        return tl.where(values[FIRST], values[_place(TEXT, STEP, 1)], values[_place(TEXT, STEP, 2)])
    else:
        return _of_two(NAME, values[FIRST], values[_place(TEXT, STEP, 1)], DTYPE)


@triton.jit
def _of_two(NAME: tl.constexpr, a, b, DTYPE: tl.constexpr):
    if NAME == "eq":
        return a == b
    elif NAME == "ne":
        return a != b
    elif NAME == "lt":
        return a < b
    elif NAME == "le":
        return a <= b
    elif NAME == "gt":
        return a > b
    elif NAME == "ge":
        return a >= b
    elif NAME == "and":
        return a & b
    elif NAME == "or":
        return a | b
    elif NAME == "xor":
        return a ^ b
    elif NAME == "add":
        return (a + b).to(DTYPE)
    elif NAME == "sub":
        return (a - b).to(DTYPE)
    elif NAME == "mul":
        return (a * b).to(DTYPE)
    elif NAME == "minimum":
        return tl.minimum(a, b)
    elif NAME == "maximum":
        return tl.maximum(a, b)
    elif NAME == "floordiv":
        # Triton's quotient is cut towards 0, torch's is the floor
        return (a // b - _crosses(a, b).to(DTYPE)).to(DTYPE)
    else:
        tl.static_assert(NAME == "mod")
        return (a % b + tl.where(_crosses(a, b), b, 0)).to(DTYPE)


@triton.jit
def _crosses(a, b):
    """Whether a quotient is below 0 and not whole."""
    rest = a % b
    return (rest != 0) & ((rest < 0) != (b < 0))


@triton.jit
def _loaded(TEXT: tl.constexpr, STEP: tl.constexpr, values, asked, DTYPE: tl.constexpr):
    """Elements of a table; indices below 0 count from its end, as in torch, and beyond it there is 0."""
    TABLE: tl.constexpr = _first(TEXT, STEP)
    at = tl.full((), 0, tl.int64)
    there = at == 0
    for dim in tl.static_range(_places(TEXT, STEP)):
        place, size = values[_place(TEXT, STEP, dim)], asked.sizes[TABLE * MOST_DIMENSIONS + dim] // 2
        place = tl.where(place < 0, place + size, place)
        there = there & (place >= 0) & (place < size)
        at = at + place * (asked.strides[TABLE * MOST_DIMENSIONS + dim] // 2)
    return _to(tl.load(asked.tables[TABLE] + at, mask=there, other=0), DTYPE)


@triton.jit
def _to(x, DTYPE: tl.constexpr):
    if tl.int1 == DTYPE:
        return x != 0
    else:
        return x.to(DTYPE)
