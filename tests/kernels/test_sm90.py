"""Every kind of sm_90a forward compiles without a GPU; its machine code is what it is meant to be."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sagebwd.kernels.sm90.forward import compile as sm90
from sagebwd.kernels.sm90.forward.variant import REGISTERS, Variant
from sagebwd.kernels.sm90.widths import WIDTHS
from sagebwd.numerics import rotation_sizes
from tests.shared import made_once
from tools.cross_compile import count, matrix_loops, sass

pytestmark = pytest.mark.skipif(sm90.unavailable() is not None, reason=str(sm90.unavailable()))

# Instructions of a step without masks, by element of the score tile that a thread holds; measured, and 3% more.
TILES = {row[:2]: row.forward for row in WIDTHS}
MOST_INSTRUCTIONS = {
    (64, 64): 7.7, (96, 96): 9.8, (128, 128): 8.4, (192, 128): 8.6, (192, 192): 9.2, (256, 256): 12.1,
}  # fmt: skip
# Of one without maxima, and of one that looks at P for them, which counts what is skipped where no key dominates.
MOST_WITHOUT_MAXIMA = {
    (64, 64): (6.1, 7.55), (96, 96): (7.2, 8.7), (128, 128): (6.3, 7.75), (192, 128): (6.5, 7.85),
    (192, 192): (6.6, 8.05), (256, 256): (7.6, 9.3),
}  # fmt: skip
# Widths that are compiled under every mask; `make test` compiles more than one or two variants of 128 alone.
ALL_KINDS = ((64, 64), (128, 128))


def row(dims: tuple[int, int], *values: object, slow: bool | None = None):
    """Parameters, which `make test-all` alone compiles where ``slow`` or, by default, of other widths than 128."""
    is_slow = dims != (128, 128) if slow is None else slow
    return pytest.param(*values, dims, marks=pytest.mark.slow if is_slow else ())


ROWS = [row(dims) for dims in sorted(TILES)]
KINDS = {
    "full": {},
    "causal": {"upper": True},
    "window": {"lower": True, "upper": True},
    "key mask": {"key_mask": True},
    "packed": {"varlen": True, "upper": True, "row_max": True},
}


@cache
def machine_code(variant: Variant) -> list[str]:
    """Lines of disassembly."""
    with tempfile.TemporaryDirectory() as folder:

        def compile_to(path: Path) -> None:
            cubin = sm90.compiled(variant, f"--keep-cubin --dump-dir={folder}").artifacts.CUBIN
            path.write_text("\n".join(sass(SimpleNamespace(asm={"cubin": cubin}))), encoding="utf-8")

        return made_once(repr(variant), compile_to, Path(folder) / "sass").read_text(encoding="utf-8").split("\n")


def loops(variant: Variant) -> list[Counter]:
    """Instructions of each innermost loop with products."""
    bodies = [count(body) for body in matrix_loops(machine_code(variant))]
    # waits that last jump back from behind the program's end
    return [body for body in bodies if not body["EXIT"]]


@pytest.mark.parametrize(
    ("kind", "dims"),
    [
        row(
            dims,
            kind,
            # of a mask of keys 96 is between 64 and 128, 192 between 192/128 and 256
            slow=kind == "causal"
            or (dims != (128, 128) and kind in ("full", "window", "packed"))
            or dims in ((96, 96), (192, 192)),
        )
        for dims in sorted(TILES)
        for kind in KINDS
        if dims in ALL_KINDS or kind in ("key mask", "packed")
    ],
)
def test_loops_have_their_products_and_spill_nothing(kind, dims):
    variant = Variant(*dims, "bfloat16", TILES[dims], **KINDS[kind])
    found = loops(variant)
    # whole blocks, with and without maxima, and masked ones on either side of them
    assert len(found) == (1 if variant.key_mask else 2 + variant.upper + variant.lower)
    for body in found:
        assert body["IGMMA"] == dims[0] // 32
        assert body["HGMMA"] == variant.tile.keys // 16
        assert body["STL"] + body["LDL"] == 0


@pytest.mark.parametrize("dims", ROWS)
def test_whole_blocks_take_few_instructions(dims):
    def least(dtype: str, row_max: bool) -> float:
        variant = Variant(*dims, dtype, TILES[dims], upper=True, row_max=row_max)
        return min(sum(body.values()) for body in loops(variant)) / variant.tile.keys * 2

    assert least("float16", row_max=True) <= MOST_INSTRUCTIONS[dims]
    without, looking = MOST_WITHOUT_MAXIMA[dims]
    assert least("bfloat16", row_max=False) <= without
    assert least("bfloat16", row_max=True) <= looking


@pytest.mark.parametrize("dims", ROWS)
def test_products_of_a_step_are_queued_together(dims):
    # ptxas waits for every one of them where it cannot keep their registers apart
    for dtype in ("float16", "bfloat16"):
        for body in loops(Variant(*dims, dtype, TILES[dims], upper=True, row_max=True)):
            assert body["WARPGROUP"] <= 4


ROTATED = [
    ((64, 64), 64), ((96, 96), 96), ((128, 128), 112), ((128, 128), 128), ((192, 128), 192), ((192, 192), 192),
    ((256, 256), 256),
]  # fmt: skip


@pytest.mark.parametrize(("turned", "dims"), [row(dims, turned) for dims, turned in ROTATED])
def test_a_rotation_costs_a_tile_little(dims, turned):
    """No loop is touched, and what sums take is saved where fewer threads share a row."""
    plain = Variant(*dims, "bfloat16", TILES[dims], upper=True, row_max=True)
    rotated = replace(plain, rotation=rotation_sizes(turned))
    for body, expected in zip(loops(rotated), loops(plain), strict=True):
        assert body.total() <= 1.01 * expected.total()
    before, after = (count(machine_code(variant)) for variant in (plain, rotated))
    assert after.total() <= 1.1 * before.total()
    assert after["STL"] + after["LDL"] == 0


@pytest.mark.parametrize(("kind", "dims"), [row((64, 64), "upper"), row((128, 128), "varlen")])
def test_codes_of_q_shorten_the_beginning_of_a_tile_alone(kind, dims):
    made = Variant(*dims, "bfloat16", TILES[dims], row_max=True, rotation=rotation_sizes(dims[0]), **{kind: True})
    given = replace(made, q_codes=True)
    for body, expected in zip(loops(given), loops(made), strict=True):
        assert body.total() <= 1.01 * expected.total()
    before, after = (count(machine_code(variant)) for variant in (made, given))
    assert after.total() < 0.95 * before.total()
    assert after["STL"] + after["LDL"] == 0


@pytest.mark.parametrize("warpgroups", sorted(REGISTERS))
def test_registers_are_no_more_than_a_launch_has(warpgroups):
    """Warps that ask for more than the others give back stand still, on a GPU alone."""
    threads = 128 * (warpgroups + 1)
    of_launch = 65536 // threads // 8 * 8  # a thread, as ptxas counts them
    computing, loading = REGISTERS[warpgroups]
    assert 128 * (warpgroups * computing + loading) <= of_launch * threads


def test_what_was_compiled_is_kept_and_depends_on_the_variant(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    variant = Variant(64, 64, "bfloat16", TILES[64, 64])
    path = sm90.object_path(variant)
    assert path.is_relative_to(tmp_path)
    assert path != sm90.object_path(Variant(64, 64, "float16", TILES[64, 64]))
    sm90.build(variant, path)
    assert [x.name for x in path.parent.iterdir()] == [path.name]
    assert path.read_bytes()[:4] == b"\x7fELF"
    kernel = sm90.forward_kernel.__wrapped__(variant)
    with pytest.raises(TypeError, match="row_max"):  # TVM-FFI says what the call takes
        kernel.laid_out((), (1,), torch.device("cuda", 0)).start([], 0)
