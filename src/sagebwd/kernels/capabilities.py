"""Capabilities: recipes, dtypes and head sizes of each implementation, a row for each direction.

Imports neither torch nor triton: `sagebwd.dispatch` asks the rows before it imports any kernels, and tests, tools,
`doctor` and error messages read the same rows. What is tried first, and on which architecture, `dispatch` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sagebwd.kernels.mma_sync import variant
from sagebwd.kernels.sm90 import widths
from sagebwd.recipe import FP8, INT8, SIXTEEN_BIT, Recipe

FORWARD, BACKWARD = "forward", "backward"
# What ``impl`` may name.
IMPLEMENTATIONS = ("reference", "triton", "mma_sync", "hopper")
# Who else may run a call of "auto", by functions of its own.
TORCH = "torch"
# The widest that any kernel takes, and what the public functions refuse over.
MAX_HEAD_DIM = 256
KERNEL_DTYPES = ("bfloat16", "float16")
REFERENCE_DTYPES = (*KERNEL_DTYPES, "float32", "float64")

_BLOCKS = (32, 64, 128)
# Of a field that a row refuses, what to name in place of the recipe.
_INSTEAD = {"dp": "; name 'mixed', whose dP is 16 bit, or 'token(dp=int8)'"}


class Row(NamedTuple):
    """One implementation of a direction.

    fields: what each field of a recipe may be. form: the (head_dim, value_dim) that the kernels run for a call's,
    which are filled up to it with zeros, or None. widths: those, in words. needs: a module whose ``unavailable()``
    says what is missing here.
    """

    direction: str
    impl: str
    module: str
    dtypes: tuple[str, ...]
    fields: dict[str, tuple]
    form: Callable[[int, int], tuple[int, int] | None]
    widths: str
    needs: str | None = None

    def refusal(self, recipe: Recipe, head_dim: int, value_dim: int, dtype: str) -> str | None:
        """Why it does not run a recipe at some widths in a dtype, or None."""
        if dtype not in self.dtypes:
            return f"{dtype} is not one of {', '.join(self.dtypes)}"
        if self.form(head_dim, value_dim) is None:
            dims = head_dim if head_dim == value_dim else f"{head_dim}/{value_dim}"
            return f"head_dim {dims} is not one of {self.widths}"
        for name, accepted in self.fields.items():
            if getattr(recipe, name) not in accepted:
                wanted = ", ".join(map(str, accepted))
                has = f"recipe {str(recipe)!r} has {name}={getattr(recipe, name)}, which is not one of {wanted}"
                return has + _INSTEAD.get(name, "")
        return None


def _as_it_is(head_dim: int, value_dim: int) -> tuple[int, int]:
    return head_dim, value_dim


def _the_greater(head_dim: int, value_dim: int) -> tuple[int, int] | None:
    width = max(head_dim, value_dim)
    return (width, width) if width <= MAX_HEAD_DIM else None


_HOPPER_WIDTHS = f"1 to {max(widths.HEAD_DIMS)}"
_TILES = {"block_q": _BLOCKS, "block_k": _BLOCKS, "p_levels": (127, 254)}
_MMA_SYNC = {
    **dict.fromkeys(("s", "o", "dv", "dq", "dk"), (INT8,)), "dp": (SIXTEEN_BIT, INT8), "q_scale": ("token",),
    "k_scale": ("token",), "v_scale": ("channel",), "p_scale_dv": ("key",), "ds_scale_dq": ("query",),
    "ds_scale_dk": ("key",), "p_levels": (254,), "first_keys": (0, 16), "block_q": (64,), "block_k": (128,),
}  # fmt: skip
_SIXTEEN_OR_INT8 = dict.fromkeys(("dv", "dq", "dk"), (INT8, SIXTEEN_BIT))

ROWS = (
    Row(
        FORWARD, "hopper", "sagebwd.kernels.sm90.forward.launch", KERNEL_DTYPES,
        {
            "s": (INT8,), "o": (SIXTEEN_BIT,), "q_scale": ("token",), "k_scale": ("lane",), "block_k": (128,),
            "smooth_k": (True,),
        },
        widths.of_call, _HOPPER_WIDTHS, needs="sagebwd.kernels.sm90.forward.compile",
    ),
    Row(
        FORWARD, "mma_sync", "sagebwd.kernels.mma_sync.launch", KERNEL_DTYPES, _MMA_SYNC, variant.forward_form,
        f"1 to {max(variant.HEAD_DIMS)}", needs="sagebwd.kernels.runtime.nvrtc",
    ),
    Row(
        FORWARD, "triton", "sagebwd.kernels.portable.launch", KERNEL_DTYPES, {"first_keys": (0, 16), **_TILES},
        _the_greater, f"1 to {MAX_HEAD_DIM}",
    ),
    Row(
        FORWARD, "reference", "sagebwd.reference.emulator", REFERENCE_DTYPES, {}, _as_it_is, "any",
    ),
    Row(
        BACKWARD, "hopper", "sagebwd.kernels.sm90.backward.launch", KERNEL_DTYPES,
        {
            "s": (INT8,), "o": (SIXTEEN_BIT,), **dict.fromkeys(("dv", "dq", "dk"), (FP8,)), "dp": (SIXTEEN_BIT,),
            "k_scale": ("lane",), "block_q": (64,), "block_k": (128,), "smooth_v": (False,),
        },
        widths.of_call, _HOPPER_WIDTHS,
    ),
    Row(
        BACKWARD, "mma_sync", "sagebwd.kernels.mma_sync.launch", KERNEL_DTYPES, _MMA_SYNC, variant.backward_form,
        f"65 to {max(variant.HEAD_DIMS)}", needs="sagebwd.kernels.runtime.nvrtc",
    ),
    Row(
        BACKWARD, "triton", "sagebwd.kernels.portable.launch", KERNEL_DTYPES,
        {**_SIXTEEN_OR_INT8, **_TILES}, _the_greater, f"1 to {MAX_HEAD_DIM}",
    ),
    Row(
        BACKWARD, "reference", "sagebwd.reference.emulator", REFERENCE_DTYPES, {}, _as_it_is, "any",
    ),
    Row(FORWARD, TORCH, "torch.nn.functional", REFERENCE_DTYPES, {}, _as_it_is, "any"),
    Row(BACKWARD, TORCH, "torch.nn.functional", REFERENCE_DTYPES, {}, _as_it_is, "any"),
)  # fmt: skip

_OF = {(row.direction, row.impl): row for row in ROWS}


def row(direction: str, impl: str) -> Row:
    """The row of an implementation's direction."""
    return _OF[direction, impl]
