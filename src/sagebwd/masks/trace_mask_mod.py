"""A mask_mod as a program of single operations, which a kernel computes (`sagebwd.kernels.masks.mask_mod_kernel`).

`traced` calls a mask_mod once, as FlexAttention's compiler does, with symbols in place of its four indices. What it
does with them is noted; whatever else it does, as reading a list that was rewritten since, it does now. So a trace is
one call's, and nothing about a mask_mod is remembered. Its text has no number and no tensor that was captured: these
go beside it, and a mask that changes in every step has the same kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MaskMod = Callable[[Any, Any, Any, Any], Any]
# Dtypes of symbols: their names in a trace, as Triton has them.
NAMES = {
    torch.bool: "int1", torch.uint8: "uint8", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32",
    torch.int64: "int64", torch.float32: "fp32", torch.float64: "fp64",
}  # fmt: skip
# Of a table that is indexed.
MOST_DIMENSIONS = 4
# Of these a sum or a quotient is the same on every device.
SIGNED = torch.int8, torch.int16, torch.int32, torch.int64
# Between an operation's fields, and between operations.
FIELD, STEP = ",", ";"
# The indices of a mask_mod, which are the first values of every trace, by the axes that they vary along: batch element
# and head are one for a tile.
QUERIES, KEYS = "q", "k"
INDICES = "", "", QUERIES, KEYS
COMPARISONS = "eq", "ne", "lt", "le", "gt", "ge"
ARITHMETIC = "add", "sub", "mul", "floordiv", "mod", "minimum", "maximum"
BITWISE = "and", "or", "xor"
# Torch's functions and methods, and operators of Python, by names of operations; those of `_SPECIAL` beside them.
SYNONYMS = {
    "subtract": "sub", "multiply": "mul", "floor_divide": "floordiv", "remainder": "mod", "not_equal": "ne",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "bitwise_and": "and",
    "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "invert", "negative": "neg", "absolute": "abs",
}  # fmt: skip
_REVERSED = {f"r{name}" for name in (*ARITHMETIC, *BITWISE)}


class Trace(NamedTuple):
    """What a mask_mod computes: its operations as text, and the tensors and numbers that they read."""

    text: str
    tables: tuple[Tensor, ...]
    numbers: tuple[int | float, ...]


class Untraceable(BaseException):
    """Something that a trace has no operation for; no Exception, which a mask_mod may catch and go on."""


def traced(mask_mod: MaskMod, device: torch.device) -> Trace | None:
    """The trace of a mask_mod; None where it does what is no operation, or reads tensors of another device."""
    tracer = _Tracer(device)
    try:
        with tracer:
            tracer.result(mask_mod(*tracer.indices))
        if any(_version(x) != version for x, version in zip(tracer.tables, tracer.versions, strict=True)):
            return None  # it wrote to what it had read
    except (Exception, Untraceable):  # a mask_mod's own too: whoever then calls it with tensors sees that
        return None
    return Trace(STEP.join(tracer.steps), tuple(tracer.tables), tuple(tracer.numbers))


class Symbol:
    """A value of a trace, with what a tensor without dimensions has."""

    shape, ndim, requires_grad = torch.Size(()), 0, False

    def __init__(self, tracer: _Tracer, place: int, dtype: torch.dtype, axes: str) -> None:
        self.tracer, self.place, self.dtype, self.axes = tracer, place, dtype, axes

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise Untraceable(func.__name__)  # which a tracer has, that comes first; torch takes a symbol for a tensor

    @property
    def device(self) -> torch.device:
        """Where the mask is computed."""
        return self.tracer.device

    def dim(self) -> int:
        """0."""
        return 0

    def size(self) -> torch.Size:
        """No dimensions."""
        return self.shape

    def __getattr__(self, name: str) -> Callable[..., Symbol]:
        """A method of a tensor."""
        if name.startswith("__"):
            raise AttributeError(name)
        if not callable(getattr(Tensor, name, None)):
            raise Untraceable(name)
        return lambda *args, **kwargs: self.tracer.apply(name, (self, *args), kwargs)

    def where(self, condition: Any, other: Any) -> Symbol:
        """The method, whose condition comes second."""
        return self.tracer.apply("where", (condition, self, other), {})

    def __bool__(self) -> bool:
        raise Untraceable("a branch on an index")

    __iter__ = __len__ = __int__ = __index__ = __float__ = __bool__
    __hash__ = object.__hash__


def _operator(name: str) -> Callable[..., Symbol]:
    return lambda self, *args: self.tracer.apply(name, (self, *args), {})


def _in_place(name: str) -> Callable[..., Symbol]:
    def written(self: Symbol, other: Any) -> Symbol:
        found = self.tracer.apply(name, (self, other), {})
        if found.dtype != self.dtype:
            raise Untraceable(f"i{name}")
        self.place, self.axes = found.place, found.axes
        return self

    return written


for _name in (*ARITHMETIC[:5], *BITWISE):
    setattr(Symbol, f"__i{_name}__", _in_place(_name))
for _name in (*COMPARISONS, *ARITHMETIC[:5], *BITWISE, *(f"r{x}" for x in (*ARITHMETIC[:5], *BITWISE)), "neg", "abs"):
    setattr(Symbol, f"__{_name}__", _operator(_name))
Symbol.__invert__ = _operator("invert")


class _Rows:
    """A table of which the first dimensions have been indexed."""

    def __init__(self, tracer: _Tracer, table: Tensor, places: tuple) -> None:
        self.tracer, self.table, self.places = tracer, table, places

    def __getitem__(self, places: Any) -> Symbol | _Rows:
        return self.tracer.indexed(self.table, (*self.places, *(places if isinstance(places, tuple) else (places,))))


class _Tracer(TorchFunctionMode):
    """Notes operations on symbols."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.steps: list[str] = []
        self.known: dict[str, int] = {}
        self.tables: list[Tensor] = []
        self.versions: list[int | None] = []  # of tables, as they were read
        self.numbers: list[int | float] = []
        self.indices = [Symbol(self, place, torch.int64, axes) for place, axes in enumerate(INDICES)]

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """A function of torch: noted where symbols are given to it."""
        if len(args) == 1 and not kwargs and args[0].__class__ is Tensor:  # what a tensor is, as its dtype
            return func(*args)
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and args[1].__class__ is Symbol:
            return self.indexed(args[0], args[1:])
        if not any(isinstance(x, (Symbol, _Rows)) for x in _leaves((args, tuple(kwargs.values())))):
            return func(*args, **kwargs)
        name = func.__name__
        if name == "__getitem__":
            table, places = args
            return self.indexed(table, places if isinstance(places, tuple) else (places,))
        return self.apply(name.removeprefix("__").removesuffix("__"), args, kwargs)

    def apply(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Symbol:
        """An operation by the name of torch's function or method, or of Python's operator."""
        name = SYNONYMS.get(name, name)
        if name in _SPECIAL:
            return _SPECIAL[name](self, *args, **kwargs)
        if name in _REVERSED:
            name, args = name[1:], args[::-1]
        if kwargs:
            raise Untraceable(name)
        if len(args) == 2 and (name in COMPARISONS or name in ARITHMETIC or name in BITWISE):
            common = self.common(*args)
            if name in COMPARISONS:
                return self.note(name, common, args, torch.bool)
            fits = common in SIGNED if name in ARITHMETIC else common in (torch.bool, *SIGNED)
            if fits:
                return self.note(name, common, args, common)
        raise Untraceable(name)

    def note(self, name: str, dtype: torch.dtype, args: tuple, result: torch.dtype) -> Symbol:
        """An operation on values, taken in a dtype."""
        return self.step(name, dtype, [self.value(x, dtype) for x in args], result)

    def step(
        self, name: str, dtype: torch.dtype, values: list[Symbol], result: torch.dtype, number: int | None = None
    ) -> Symbol:
        """A line of the trace: name, dtype, axes, the number of a table or of a number, and the places of values.

        What was computed is not computed again.
        """
        met = {x.axes for x in values}
        axes = QUERIES + KEYS if {QUERIES, KEYS} <= met else max(met, default="")  # "" < "k" < "q" < "qk"
        if len(axes) == 2 and any(x.dtype.is_floating_point and len(x.axes) == 1 for x in values):
            raise Untraceable("fractions of queries beside those of keys")
        numbers = [x.place for x in values] if number is None else [number, *[x.place for x in values]]
        line = FIELD.join((name, NAMES[dtype], axes, *map(str, numbers)))
        place = self.known.get(line)
        if place is None:
            place = self.known[line] = len(INDICES) + len(self.steps)
            self.steps.append(line)
        return Symbol(self, place, result, axes)

    def value(self, x: Any, dtype: torch.dtype) -> Symbol:
        """A symbol, a tensor without dimensions or a number, in a dtype."""
        if x.__class__ is not Symbol and isinstance(x, Tensor):
            x = self.indexed(x, ())
        if x.__class__ is Symbol:
            return x if x.dtype == dtype else self.step("to", dtype, [x], dtype)
        if not isinstance(x, float if dtype.is_floating_point else int):
            raise Untraceable("a number of another kind")
        if dtype == torch.float64 and ctypes.c_float(x).value != x:  # kernels take numbers in float32
            raise Untraceable("a number that float32 lacks")
        if dtype in SIGNED[:-1] or dtype == torch.uint8:  # torch raises, or cuts it
            least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        else:
            least, most = -(2**61), 2**61 - 1
        if isinstance(x, int) and not least <= x <= most:
            raise Untraceable("a number that its dtype lacks")
        self.numbers.append(int(x) if isinstance(x, bool) else x)
        return self.step("number", dtype, [], dtype, len(self.numbers) - 1)

    def common(self, a: Any, b: Any) -> torch.dtype:
        """The dtype that torch takes two operands in; a number is weak beside a tensor."""
        if a.__class__ is b.__class__ is Symbol and a.dtype == b.dtype:
            return a.dtype
        dtypes = [x.dtype for x in (a, b) if isinstance(x, (Symbol, Tensor))]
        if not dtypes:
            raise Untraceable("operands")
        common = _promoted(*dtypes) if len(dtypes) == 2 else dtypes[0]
        if common == torch.bool and any(isinstance(x, int) and not isinstance(x, bool) for x in (a, b)):
            common = torch.int64
        # beside what vmap hands on, torch narrows a tensor without dimensions, elsewhere not
        if any(isinstance(x, Symbol) and x.dtype != common for x in (a, b)) and any(
            isinstance(x, Tensor) for x in (a, b)
        ):
            raise Untraceable("a tensor of a wider dtype")
        if common.is_floating_point and any(dtype != common for dtype in dtypes):
            raise Untraceable("dtypes")
        return common

    def indexed(self, table: Any, places: tuple) -> Symbol | _Rows:
        """An element of a tensor that was captured."""
        if isinstance(table, _Rows):
            return table[places]
        if table.__class__ not in (Tensor, torch.nn.Parameter) or len(table.shape) > MOST_DIMENSIONS:
            raise Untraceable("a table")
        if table.is_neg() or table._is_zerotensor():
            raise Untraceable("a table")
        if table.dtype not in NAMES or table.device != self.device:
            raise Untraceable("a table")
        for x in places:
            dtype = type(x) if isinstance(x, bool) else getattr(x, "dtype", torch.int64)
            if dtype not in (torch.int32, torch.int64) or not isinstance(x, (Symbol, Tensor, int)):
                raise Untraceable("an index")
        if len(places) < table.dim():
            return _Rows(self, table, places)
        if len(places) > table.dim():
            raise Untraceable("indices")
        number = next((n for n, x in enumerate(self.tables) if x is table), len(self.tables))
        if number == len(self.tables):
            self.tables.append(table)
            self.versions.append(_version(table))
        at = [self.value(x, torch.int64) for x in places]
        return self.step("load", table.dtype, at, table.dtype, number)

    def result(self, x: Any) -> None:
        """The last value: whether a pair is seen."""
        if isinstance(x, (bool, int)):
            x = self.value(bool(x), torch.bool)
        found = self.value(x, torch.bool)
        if found.place != len(INDICES) + len(self.steps) - 1:  # known before
            self.steps.append(FIELD.join(("to", "int1", found.axes, str(found.place))))


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


_promoted = cache(torch.promote_types)


def _leaves(x: Any) -> list[Any]:
    return [leaf for field in x for leaf in _leaves(field)] if isinstance(x, (tuple, list)) else [x]


def _logical(name: str) -> Callable[..., Symbol]:
    return lambda tracer, a, b: tracer.note(name, torch.bool, (a, b), torch.bool)


def _of_integers(name: str) -> Callable[..., Symbol]:
    def noted(tracer: _Tracer, x: Symbol) -> Symbol:
        if x.dtype not in (SIGNED if name != "invert" else (torch.bool, *SIGNED)):
            raise Untraceable(name)
        return tracer.note(name, x.dtype, (x,), x.dtype)

    return noted


def _where(tracer: _Tracer, condition: Symbol, a: Any, b: Any) -> Symbol:
    if condition.__class__ is not Symbol or condition.dtype != torch.bool:  # of a tensor's own `where` it is another
        raise Untraceable("where")
    common = tracer.common(a, b)
    return tracer.step("where", common, [condition, *(tracer.value(x, common) for x in (a, b))], common)


def _to(tracer: _Tracer, x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    wanted = [y for y in (*args, *kwargs.values()) if isinstance(y, torch.dtype)]
    rest = [y for y in (*args, *kwargs.values()) if not isinstance(y, (torch.dtype, bool))]
    if len(wanted) > 1 or any(torch.device(y) != tracer.device for y in rest):
        raise Untraceable("to")
    dtype = wanted[0] if wanted else x.dtype
    if dtype not in (torch.bool, *SIGNED) or x.dtype not in (torch.bool, torch.uint8, *SIGNED):
        raise Untraceable("to")
    return tracer.value(x, dtype)


def _new(number: int | None) -> Callable[..., Symbol]:
    """A constant of a symbol's form: ``new_full`` and ``full_like`` say which."""

    def noted(
        tracer: _Tracer, x: Symbol, *args: Any, size: tuple = (), dtype: torch.dtype | None = None, device: Any = None,
        fill_value: Any = None,
    ) -> Symbol:  # fmt: skip
        args = list(args)
        if args and isinstance(args[0], (tuple, list, torch.Size)):
            size = args.pop(0)
        value = number if number is not None else args.pop(0) if args else fill_value
        if args or len(size):
            raise Untraceable("a tensor with dimensions")
        return tracer.value(value, x.dtype if dtype is None else dtype)

    return noted


_SPECIAL: dict[str, Callable[..., Symbol]] = {
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": lambda tracer, x: tracer.note("invert", torch.bool, (x,), torch.bool),
    "invert": _of_integers("invert"), "neg": _of_integers("neg"), "abs": _of_integers("abs"), "where": _where,
    "to": _to, "type": _to, "bool": lambda tracer, x: _to(tracer, x, torch.bool),
    "int": lambda tracer, x: _to(tracer, x, torch.int32), "long": lambda tracer, x: _to(tracer, x, torch.int64),
    "new_ones": _new(1), "new_zeros": _new(0), "new_full": _new(None), "ones_like": _new(1), "zeros_like": _new(0),
    "full_like": _new(None),
}  # fmt: skip
