"""What a folder of kernels says of itself: a `Family`, and a `Row` for each direction that it has.

Imports neither torch nor triton: `sagebwd.dispatch` asks the records before it imports any kernels, and tests, tools,
`doctor` and error messages read the same. `sagebwd.kernels.families` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from sagebwd.masks.kinds import ELEMENTS
from sagebwd.recipe import Recipe

FORWARD, BACKWARD = "forward", "backward"
# The widest that any kernel takes, and what the public functions refuse over.
MAX_HEAD_DIM = 512
# Beyond it heads are wide: of all kernels the portable ones alone take them, whose backward makes the codes of Q and K
# anew, and norm and rotary embedding before attention are composed of torch's operations.
WIDE = 256
KERNEL_DTYPES = ("bfloat16", "float16")
REFERENCE_DTYPES = (*KERNEL_DTYPES, "float32", "float64")
# Sizes of blocks that a tile of Triton's or mma.sync's kernels is made of.
BLOCKS = (32, 64, 128)


def is_wide(head_dim: int, value_dim: int) -> bool:
    """By either width, as given or as kernels fill them."""
    return max(head_dim, value_dim) > WIDE


class Row(NamedTuple):
    """One direction of a family.

    module: has ``prepare`` and the direction's function (`sagebwd.call`). fields: what each field of a recipe may be;
    any value of one that is not named. form: the (head_dim, value_dim) that the kernels run for a call's, which are
    filled up to it with zeros, or None. widths: those, in words. needs: a module whose ``unavailable()`` says what is
    missing here. in_torch: operators of torch run it, by no program, and backward reads q, k and v. mask_form: how its
    kernels read a mask (`sagebwd.masks.kinds`). means: rows of K's mean that its forward writes: K's, then V's.
    prologue: head_dims, value's the same, at which its passes take norm and rotary embedding of Q and K too, of all
    channels or none. powers_of_two: a width costs as much as the next of these. instead: by a field that is refused,
    what to name in place of the recipe. wide_fields: fields of which wide heads take less.
    """

    direction: str
    impl: str
    module: str
    dtypes: tuple[str, ...]
    fields: dict[str, tuple]
    form: Callable[[int, int], tuple[int, int] | None]
    widths: str
    needs: str | None = None
    in_torch: bool = False
    mask_form: str = ELEMENTS
    means: int = 1
    prologue: tuple[int, ...] = ()
    powers_of_two: bool = False
    instead: Mapping[str, str] = MappingProxyType({})
    wide_fields: Mapping[str, tuple] = MappingProxyType({})

    def is_wide(self, head_dim: int, value_dim: int) -> bool:
        """Whether heads are wide here."""
        return not self.in_torch and is_wide(head_dim, value_dim)

    def refusal(self, recipe: Recipe, head_dim: int, value_dim: int, dtype: str) -> str | None:
        """Why it does not run a recipe at some widths in a dtype, or None."""
        if dtype not in self.dtypes:
            return f"{dtype} is not one of {', '.join(self.dtypes)}"
        if self.form(head_dim, value_dim) is None:
            dims = head_dim if head_dim == value_dim else f"{head_dim}/{value_dim}"
            return f"head_dim {dims} is not one of {self.widths}"
        wide_fields = self.wide_fields if self.is_wide(head_dim, value_dim) else {}
        for name, accepted in {**self.fields, **wide_fields}.items():
            if getattr(recipe, name) not in accepted:
                wanted = ", ".join(map(str, accepted))
                has = f"recipe {str(recipe)!r} has {name}={getattr(recipe, name)}, which is not one of {wanted}"
                beyond = f" at a head_dim over {WIDE}" if name in wide_fields else ""
                return has + beyond + self.instead.get(name, "")
        return None


class Family(NamedTuple):
    """Kernels of one folder, which ``impl`` names.

    forward, backward: None for a direction that it lacks. auto: the recipe that "auto" stands for where it runs a
    call; auto_of_own_backward: the same where its own backward runs; auto_if_named: where ``impl`` names it.
    gpu: what it needs, in words; runs_on: compute capabilities that have that, 90 for 9.0 and 0 without a GPU;
    first_on: those that it is tried first on. interpreted: Triton's interpreter runs it too. falls_back: who runs a
    direction that it lacks, to the same recipe. needs: what has to be installed, as processes compare it.
    """

    name: str
    forward: Row | None
    backward: Row | None
    auto: str
    auto_of_own_backward: str | None = None
    auto_if_named: str | None = None
    gpu: str = ""
    runs_on: Callable[[int], bool] = lambda capability: True
    first_on: tuple[int, ...] = ()
    interpreted: bool = False
    falls_back: str | None = None
    needs: str | None = None

    def row(self, direction: str) -> Row | None:
        """What it has of a direction."""
        return self.forward if direction == FORWARD else self.backward


def as_it_is(head_dim: int, value_dim: int) -> tuple[int, int]:
    """The form of who takes any widths."""
    return head_dim, value_dim
