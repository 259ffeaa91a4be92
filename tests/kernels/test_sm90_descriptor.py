"""Tensors as the matrices that the backward's TMA descriptors read."""

import pytest
import torch

pytest.importorskip("triton")

from sagebwd.call import Packing, empty_gradients
from sagebwd.kernels.runtime.alignment import TMA_BYTES
from sagebwd.kernels.sm90.backward.descriptor import Rows, empty_by_head, gradient_blocks

BATCH, HEADS, TOKENS, HEAD_DIM = 2, 3, 5, 16
LAYOUTS = {
    "by head": lambda: torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM),
    "by token": lambda: torch.randn(BATCH, TOKENS, HEADS, HEAD_DIM).transpose(1, 2),
    "of a fused projection": lambda: torch.randn(BATCH, TOKENS, 3, HEADS, HEAD_DIM)[:, :, 1].transpose(1, 2),
    "tokens first": lambda: torch.randn(TOKENS, BATCH, HEADS, HEAD_DIM).permute(1, 2, 0, 3),
    "apart by what TMA does not take": lambda: torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM + 1)[..., :HEAD_DIM],
    "heads apart by what TMA does not take": lambda: heads_apart(BATCH, TOKENS).transpose(1, 2),
}
PACKED = {
    "by token": lambda: torch.randn(TOKENS, HEADS, HEAD_DIM),
    "by head": lambda: torch.randn(HEADS, TOKENS, HEAD_DIM).transpose(0, 1),
    "apart by what TMA does not take": lambda: torch.randn(TOKENS, HEADS * HEAD_DIM + 1)[:, :-1].unflatten(
        1, (HEADS, -1)
    ),
    "heads apart by what TMA does not take": lambda: heads_apart(TOKENS),
}


def heads_apart(*tokens: int) -> torch.Tensor:
    """(*tokens, heads, head_dim), of which each token's first head alone begins at a multiple of 16 bytes."""
    pitch = HEAD_DIM + 2
    row = HEADS * pitch + -HEADS * pitch % 4
    return torch.randn(*tokens, row)[..., : HEADS * pitch].unflatten(-1, (HEADS, pitch))[..., :HEAD_DIM]


def row(rows: Rows, batch: int, head: int, token: int) -> torch.Tensor:
    """What a kernel reads there."""
    assert all(x * rows.x.element_size() % TMA_BYTES == 0 for x in (rows.pitch, rows.column))
    matrix = rows.x.as_strided((rows.rows, rows.columns), (rows.pitch, 1), rows.x.storage_offset())
    return matrix[batch * rows.batch + head * rows.head + token, head * rows.column :][: rows.x.shape[-1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_a_batch(layout):
    x = LAYOUTS[layout]()
    rows = Rows.of(x, Packing.of(x, None, TOKENS))
    for batch, head, token in torch.cartesian_prod(*map(torch.arange, x.shape[:3])).tolist():
        assert torch.equal(row(rows, batch, head, token), x[batch, head, token])


@pytest.mark.parametrize("layout", PACKED)
def test_rows_of_a_pack_whatever_the_sequence(layout):
    """A kernel adds where a sequence begins, and its number counts for nothing."""
    x = PACKED[layout]()
    rows = Rows.of(x, Packing.of(x, torch.tensor([0, 2, TOKENS], dtype=torch.int32), 3))
    for sequence, head, token in torch.cartesian_prod(*map(torch.arange, (2, HEADS, TOKENS))).tolist():
        assert torch.equal(row(rows, sequence, head, token), x[token, head])


@pytest.mark.parametrize("x", [LAYOUTS["by token"](), PACKED["by token"]()], ids=["batch", "pack"])
def test_rows_by_head_have_nothing_beside_them(x):
    made = empty_by_head(x)
    offsets = None if x.dim() == 4 else torch.tensor([0, TOKENS], dtype=torch.int32)
    rows = Rows.of(made, Packing.of(x, offsets, TOKENS))
    assert made.shape == x.shape
    assert rows.x is made
    assert (rows.columns, rows.column) == (HEAD_DIM, 0)


@pytest.mark.parametrize("head_dim", [HEAD_DIM, 24])
@pytest.mark.parametrize(
    "v", [LAYOUTS["by head"](), LAYOUTS["by token"](), PACKED["by token"]()], ids=["by head", "by token", "pack"]
)
def test_gradients_are_where_keys_and_values_lie(v, head_dim):
    """Where `epilogue.store_gradient` writes a block of TMA is the tokens' own place."""
    is_packed = v.dim() == 3
    for x in empty_gradients(head_dim, v, v)[1:]:
        blocks, (*_, width) = gradient_blocks(x, (1, 8)), x.shape
        assert blocks.shape[0] * blocks.shape[1] == x.numel()
        matrix = x.fill_(0).as_strided(blocks.shape, blocks.strides)
        by_batch = x.transpose(0, 1)[None] if is_packed else x
        by_token = by_batch.stride(1) < by_batch.stride(2)
        assert by_token or not is_packed
        for batch, head, token in torch.cartesian_prod(*map(torch.arange, by_batch.shape[:3])).tolist():
            row = batch * TOKENS + token if by_token else (batch * HEADS + head) * TOKENS + token
            matrix[row, head * width * by_token :][:width] = 1
            assert (by_batch[batch, head, token] == 1).all()
