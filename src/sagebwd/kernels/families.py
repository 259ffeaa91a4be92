"""The families of kernels, by name: a record of each folder, and the reference's, which runs on any device."""

from __future__ import annotations

from sagebwd.kernels.capabilities import BACKWARD, FORWARD, REFERENCE_DTYPES, Family, Row, as_it_is
from sagebwd.kernels.mma_sync.family import FAMILY as MMA_SYNC
from sagebwd.kernels.portable.family import FAMILY as PORTABLE
from sagebwd.kernels.sm90.family import FAMILY as SM90

_EMULATOR = "reference", "sagebwd.reference.emulator", REFERENCE_DTYPES, {}, as_it_is, "any"
# What nobody named runs where torch has no function for a call: in full precision.
REFERENCE = Family(
    "reference",
    Row(FORWARD, *_EMULATOR, in_torch=True),
    Row(BACKWARD, *_EMULATOR, in_torch=True),
    auto="full",
    auto_if_named="token",
)
# By what ``impl`` may name; of two that run a call's directions, `sagebwd.dispatch.Choice.impl` is the later.
FAMILIES = {family.name: family for family in (REFERENCE, PORTABLE, MMA_SYNC, SM90)}


def any_of(on_gpu: bool) -> Family:
    """Who runs a call wherever nobody is faster."""
    return PORTABLE if on_gpu else REFERENCE


def faster_on(capability: int) -> tuple[str, ...]:
    """Who is tried before the portable kernels on a GPU, 90 for compute capability 9.0."""
    return tuple(family.name for family in FAMILIES.values() if capability in family.first_on)


def row(direction: str, name: str) -> Row | None:
    """What a family has of a direction."""
    return FAMILIES[name].row(direction)
