"""Triton's interpreter without what it does again and again: half of an interpreted kernel's time and more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """For all kernels of this process: what a launch patches, and what it makes of types, it does once."""
    _drop_overflow_checks()
    _patch_once_a_launch()
    _look_types_up()
    _describe_blocks_once()


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
