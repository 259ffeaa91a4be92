"""The standard grid, and the operations of its shapes."""

from dataclasses import replace

import pytest
import torch

from sagebwd.benchmarks.shapes import WIDTHS, Shape, on_grid, special_shapes, standard_grid


def test_standard_grid():
    grid = standard_grid()
    assert len(grid) == 2 * 2 * 6
    assert {(s.head_dim, s.heads) for s in grid} == {(64, 32), (128, 16)}
    assert {s.batch * s.tokens for s in grid if s.tokens <= 16384} == {16384}
    assert all(s.batch == 1 for s in grid if s.tokens > 16384)
    grouped, _, video = special_shapes()
    assert (grouped.heads, grouped.kv_heads) == (32, 8)
    assert (video.batch, video.heads, video.tokens, video.is_causal) == (1, 24, 32760, False)


def test_the_grid_of_all_widths():
    grid = standard_grid(WIDTHS, [2048])
    assert {(s.head_dim, s.value_dim, s.heads) for s in grid} == {
        (64, 64, 32), (72, 72, 28), (80, 80, 25), (96, 96, 21), (112, 112, 18), (128, 128, 16), (192, 192, 10),
        (192, 128, 16), (256, 256, 8),
    }  # fmt: skip
    assert {s.batch for s in grid} == {8}
    with pytest.raises(
        ValueError, match="head_dim=100 is not of the grid; accepted: 64, 72, 80, 96, 112, 128, 192, 192/128, 256"
    ):
        standard_grid(["100"])


def test_value_has_a_width_of_its_own():
    shape = Shape(192, 4, 2, 2, 32, True, value_dim=128)
    assert str(shape) == "D192/128 H4/2 B2 N32 causal"
    assert str(replace(shape, value_dim=None)) == "D192 H4/2 B2 N32 causal"
    shapes = [tuple(x.shape) for x in shape.inputs("cpu", torch.bfloat16)]
    assert shapes == [(2, 4, 32, 192), (2, 2, 32, 192), (2, 2, 32, 128), (2, 4, 32, 128)]
    pairs = 2 * 4 * 32 * 33 // 2
    assert shape.flops("fwd") == 2 * pairs * (192 + 128)
    assert shape.flops("bwd") == 2 * pairs * (3 * 192 + 2 * 128)


def test_rows_of_the_grid():
    old = {"heads": 32, "kv_heads": 32, "head_dim": 64}
    assert on_grid(old)
    assert not on_grid(old | {"kv_heads": 8})
    assert on_grid({"heads": 16, "kv_heads": 16, "head_dim": 192, "value_dim": 128})
    assert not on_grid({"heads": 24, "kv_heads": 24, "head_dim": 128, "value_dim": 128})
