"""Triton's interpreter without what it does again and again: half of an interpreted kernel's time and more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# Of two operands of one of these types the result has it too, whatever the operation.
CLOSED = {"fp32", *(f"{sign}{bits}" for sign in ("int", "uint") for bits in (8, 16, 32, 64)), "int1"}


def hasten() -> None:
    """For all kernels of this process: what a launch patches, and what it makes of types, it does once."""
    _drop_overflow_checks()
    _patch_once_a_launch()
    _look_types_up()
    _describe_blocks_once()
    _call_functions_directly()
    _leave_equal_operands()
    _convert_bfloat16()


def _drop_overflow_checks() -> None:
    """Every sum of integers is computed again in 64 bit for an assertion, which the interpreter then does not make."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _patch_once_a_launch() -> None:
    """Before a kernel, and before each function that it calls; what a launch has patched stays until its end."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()
    languages: dict[Callable, set[int]] = {}

    def patch_once(function: Callable) -> object:
        if function not in languages:
            languages[function] = {id(x) for x in function.__globals__.values() if x is tl or x is tl.core}
        if languages[function] <= patched:
            return None
        patched.update(languages[function])
        return patch(function)

    def launch_afresh(self: object, *args: object, **kwargs: object) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_afresh


def _look_types_up() -> None:
    """NumPy's type of Triton's by name, and equal types by identity first."""
    type_of, equal = interpreter._get_np_dtype, tl.dtype.__eq__
    types: dict[str, Any] = {}

    def known_type(of: tl.dtype) -> object:
        scalar = of.scalar
        if isinstance(scalar, tl.pointer_type):
            return type_of(scalar)
        if scalar.name not in types:
            types[scalar.name] = type_of(scalar)
        return types[scalar.name]

    interpreter._get_np_dtype = known_type
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _describe_blocks_once() -> None:
    """A block's type and the shape of a tensor of it, by element and lengths; a scalar's shape."""
    describe, hold = tl.block_type.__init__, tl.tensor.__init__
    known: dict[tuple, dict[str, Any]] = {}
    of_scalars = tl.tuple([]), tl.constexpr(1)

    def block(self: tl.block_type, element_ty: tl.dtype, shape: Sequence) -> None:
        lengths = [x.value if type(x) is tl.constexpr else x for x in shape]
        key = (element_ty.name, getattr(element_ty, "address_space", None), *lengths, *map(type, lengths))
        if key not in known:
            describe(self, element_ty, shape)
            first = tl.tensor.__new__(tl.tensor)
            hold(first, None, self)
            known[key] = {**vars(self), "of_tensors": (first.shape, first.numel)}
        vars(self).update(known[key])

    def tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else of_scalars

    tl.block_type.__init__, tl.tensor.__init__ = block, tensor


def _call_functions_directly() -> None:
    """A function of the language gets the interpreter's semantic, which its wrapper then need not look for."""

    def attribute(of: object, name: str, member: Callable, _builder: object, scope: object) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: object, **kwargs: object) -> object:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(of, name, call)

    interpreter._patch_attr = attribute


def _leave_equal_operands() -> None:
    """Operands of one type are not cast, nor broadcast where they have one shape; a number takes a tensor's type."""
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value

    def like(self: TritonSemantic, number: object, tensor: tl.tensor) -> object:
        name, kind = tensor.dtype.name, type(number)
        if (name == "fp32" and kind in (int, float)) or (
            name == "int32" and kind is int and -(2**31) <= number < 2**31
        ):
            return self.scalar_constant(number, tensor.dtype)
        return number

    def checked(self: TritonSemantic, lhs: object, rhs: object, *args: object, **kwargs: object) -> tuple:
        if isinstance(lhs, tl.tensor) and not isinstance(rhs, tl.tensor):
            rhs = like(self, rhs, lhs)
        elif isinstance(rhs, tl.tensor) and not isinstance(lhs, tl.tensor):
            lhs = like(self, lhs, rhs)
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
            name = lhs.dtype.name
            if name in CLOSED and name == rhs.dtype.name:
                return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, *args, **kwargs)

    def broadcasted(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple:
        a, b = lhs.type, rhs.type
        if a.is_block() == b.is_block() and (not a.is_block() or a.shape == b.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = checked, broadcasted


def _convert_bfloat16() -> None:
    """From FP32 and to it, where the interpreter takes every number's sign, exponent and fraction apart.

    FP32 is cut off, as the interpreter cuts it.
    """
    convert = interpreter._convert_float

    def converted(x: np.ndarray, of: tl.dtype, to: tl.dtype, rounding: object) -> np.ndarray:
        if rounding is None and (of.name, to.name) == ("bf16", "fp32"):
            return x.view(np.uint16).astype(np.uint32) << 16
        if rounding is None and (of.name, to.name) == ("fp32", "bf16"):
            return (x.view(np.uint32) >> 16).astype(np.uint16)
        return convert(x, of, to, rounding)

    interpreter._convert_float = converted
