"""Every kind of sm_90a kernel compiles without a GPU; its machine code is what it is meant to be."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import cache
from types import SimpleNamespace

import pytest

from sagebwd.kernels.sm90 import compile as sm90
from sagebwd.kernels.sm90.config import BACKWARD, TILES, BackwardVariant, Variant
from tools.cross_compile import count, matrix_loops, sass

pytestmark = pytest.mark.skipif(sm90.unavailable() is not None, reason=str(sm90.unavailable()))

# Instructions of a step without masks, by element of the score tile that a thread holds; measured, and 3% more.
MOST_INSTRUCTIONS = {64: 7.7, 96: 7.85, 128: 8.4}
KINDS = {
    "full": {},
    "causal": {"upper": True},
    "window": {"lower": True, "upper": True},
    "key mask": {"key_mask": True},
    "packed": {"varlen": True, "upper": True, "row_max": True},
}
BACKWARD_KINDS = {
    "full": {},
    "causal": {"upper": True},
    "window": {"lower": True, "upper": True},
    "key mask": {"key_mask": True},
    "packed": {"varlen": True, "upper": True},
    "ragged, a scale a key": {"ragged": True, "lane_scale": False},
}
# Of the loop's two steps, the code that masks them included; measured, and 3% more.
MOST_BACKWARD_INSTRUCTIONS = {(64, "full"): 858, (64, "causal"): 1294, (128, "full"): 852, (128, "causal"): 1296}


@cache
def loops(variant: Variant | BackwardVariant) -> list[Counter]:
    """Instructions of each innermost loop with products."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = sm90.compiled(variant, f"--keep-cubin --dump-dir={folder}").artifacts.CUBIN
    kernel = SimpleNamespace(asm={"cubin": cubin})
    bodies = [count(body) for body in matrix_loops(sass(kernel))]
    # waits that last jump back from behind the program's end
    return [body for body in bodies if not body["EXIT"]]


@pytest.mark.parametrize("head_dim", sorted(TILES))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_loops_have_their_products_and_spill_nothing(kind, head_dim):
    variant = Variant(head_dim, "bfloat16", TILES[head_dim], **KINDS[kind])
    found = loops(variant)
    # whole blocks, and masked ones on either side of them
    assert len(found) == (1 if variant.key_mask else 1 + variant.upper + variant.lower)
    for body in found:
        assert body["IGMMA"] == head_dim // 32
        assert body["HGMMA"] == variant.tile.keys // 16
        assert body["STL"] + body["LDL"] == 0


@pytest.mark.parametrize("head_dim", sorted(TILES))
def test_whole_blocks_take_few_instructions(head_dim):
    variant = Variant(head_dim, "bfloat16", TILES[head_dim], upper=True)
    least = min(sum(body.values()) for body in loops(variant))
    assert least <= MOST_INSTRUCTIONS[head_dim] * variant.tile.keys / 2


@pytest.mark.parametrize("head_dim", sorted(TILES))
def test_products_of_a_step_are_queued_together(head_dim):
    # ptxas waits for every one of them where it cannot keep their registers apart
    for body in loops(Variant(head_dim, "float16", TILES[head_dim], upper=True)):
        assert body["WARPGROUP"] <= 4


def test_what_was_compiled_is_kept_and_depends_on_the_variant(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    variant = Variant(64, "bfloat16", TILES[64])
    path = sm90.object_path(variant)
    assert path.is_relative_to(tmp_path)
    assert path != sm90.object_path(Variant(64, "float16", TILES[64]))
    sm90.build(variant, path)
    assert [x.name for x in path.parent.iterdir()] == [path.name]
    assert path.read_bytes()[:4] == b"\x7fELF"
    kernel = sm90.kernel.__wrapped__(variant)
    with pytest.raises(TypeError, match="row_max"):  # TVM-FFI says what the call takes
        kernel[()](1)


def backward_loop(kind: str, dtype: str, head_dim: int) -> Counter:
    """Instructions of the only loop with products, two steps."""
    (body,) = loops(BackwardVariant(head_dim, dtype, **BACKWARD[head_dim], **BACKWARD_KINDS[kind]))
    return body


@pytest.mark.parametrize("head_dim", sorted(BACKWARD))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", sorted(BACKWARD_KINDS))
def test_backward_steps_have_their_products_and_spill_nothing(kind, dtype, head_dim):
    body, chosen = backward_loop(kind, dtype, head_dim), BACKWARD[head_dim]
    assert body["IGMMA"] == 2 * (head_dim // 32)
    assert body["HGMMA"] == 2 * (head_dim // 16 + 1)  # delta's channels
    assert body["QGMMA"] == 2 * (2 * chosen["queries"] // 32 + 64 * chosen["warpgroups"] // 32)
    assert body["STL"] + body["LDL"] == 0
    # ptxas waits for every product where it cannot keep their registers apart
    assert body["WARPGROUP"] <= 14


@pytest.mark.parametrize(("head_dim", "kind"), sorted(MOST_BACKWARD_INSTRUCTIONS))
def test_backward_steps_take_few_instructions(head_dim, kind):
    most = MOST_BACKWARD_INSTRUCTIONS[head_dim, kind]
    assert sum(backward_loop(kind, "bfloat16", head_dim).values()) <= most
