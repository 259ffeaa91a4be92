"""Masks as the reference and the kernels read them: bands, elements, maps of blocks, tiles of a BlockMask."""

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from benchmarks.shapes import pairs_in
from sagebwd import read_mask
from sagebwd.masks import mask as masks
from sagebwd.masks import tiles
from sagebwd.masks.band import Band
from sagebwd.masks.mask import BLOCK, MASKED, SKIP, WHOLE, blocks_of, shown
from sagebwd.masks.tiles import tiles_of
from tests.masks import AXES, MODS, bias, boolean, dense, draw


def by_hand(visible, whole):
    """The map's blocks of dense (N, M)."""
    found = []
    for rows, whole_rows in zip(visible.split(BLOCK, 0), whole.split(BLOCK, 0)):
        found.append([
            SKIP if not part.any() else WHOLE if all_of.all() else MASKED
            for part, all_of in zip(rows.split(BLOCK, 1), whole_rows.split(BLOCK, 1))
        ])  # fmt: skip
    return torch.tensor(found, dtype=torch.uint8)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("form", ["bool", "bias"])
def test_blocks_of_a_tensor(form, axes, monkeypatch):
    monkeypatch.setattr(masks, "ROWS", 64)
    shape, generator = (2, 3, 150, 135), torch.Generator().manual_seed(0)
    mask = boolean(shape, axes, generator) if form == "bool" else bias(shape, axes, torch.bfloat16, generator)
    blocks, keys = blocks_of(mask)
    visible, whole = shown(mask), shown(mask) if form == "bool" else mask == 0
    for b, h in [(b, h) for b in range(mask.shape[0]) for h in range(mask.shape[1])]:
        full = [x[b, h].expand(150, 135) for x in (visible, whole)]
        assert torch.equal(blocks[b, h].expand(5, 5), by_hand(*full))
    expected = visible.expand(2, 3, 150, 135).any(1).any(1)
    assert torch.equal(keys.expand(2, 135), expected)


@pytest.mark.parametrize("kind", MODS)
@pytest.mark.parametrize("block", [128, (64, 256), 48])
def test_tiles_of_a_block_mask(kind, block, monkeypatch):
    monkeypatch.setattr(tiles, "TILES", 3)
    shape = (2, 3, 300, 270)
    mask, expected = tiles_of(draw(kind, shape, torch.bfloat16, 0, block)), dense(kind, shape)
    part = mask.part(slice(0, 512), slice(0, 512))  # as for blocks of 256
    assert torch.equal(part[:, :, :300, :270], expected)
    assert not part[:, :, 300:].any()
    for rows, keys in ((slice(64, 128), slice(128, 256)), (slice(256, 320), slice(0, 270))):
        part = mask.part(rows, keys)
        assert torch.equal(part[:, :, : 300 - rows.start], expected[:, :, rows, keys])
    for b, h in [(b, h) for b in range(expected.shape[0]) for h in range(expected.shape[1])]:
        found = mask.blocks[b, h]
        exact = by_hand(expected[b, h], expected[b, h])
        assert torch.equal(found == SKIP, exact == SKIP)
        assert not ((found == WHOLE) & (exact != WHOLE)).any()
        assert torch.equal(found[:-1, :-1], exact[:-1, :-1])
    assert torch.equal(mask.keys, expected.any(1).any(1))


def test_lists_of_blocks_go_before_the_function():
    """As in flex_attention: a full block is not asked, and one that is not listed is hidden."""
    counts, indices = (
        torch.tensor([[[1, 1]]], dtype=torch.int32),
        torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32),
    )
    full = torch.tensor([[[0, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    given = BlockMask.from_kv_blocks(
        counts, indices, *full, BLOCK_SIZE=64, mask_mod=lambda b, h, q, k: q % 2 == k % 2, seq_lengths=(128, 128)
    )
    part = tiles_of(given).part(slice(0, 128), slice(0, 128))[0, 0]
    even = torch.arange(64)[:, None] % 2 == torch.arange(64) % 2
    assert not part[:64, :64].any()
    assert torch.equal(part[:64, 64:], even)
    assert torch.equal(part[64:, :64], even)
    assert part[64:, 64:].all()


def test_partial_tiles_alone_are_stored():
    mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, 1024, 1024, device="cpu")
    found = tiles_of(mask)
    assert found.elements.shape[0] == 2 + 8
    assert torch.equal(found.tiles[0, 0].diagonal(), torch.arange(2, 10, dtype=torch.int32))


def brute_force(is_causal, left, right, offset, tokens_q, tokens_k):
    visible = torch.zeros(tokens_q, tokens_k, dtype=torch.bool)
    for i, j in itertools.product(range(tokens_q), range(tokens_k)):
        distance = j - (i + offset)
        visible[i, j] = not (
            (is_causal and distance > 0) or (left >= 0 and distance < -left) or (right >= 0 and distance > right)
        )
    return visible


def test_mask_keys_and_pairs_match_brute_force():
    windows, tokens = ((-1, -1), (0, 0), (3, -1), (-1, 2), (2, 5)), ((7, 7), (5, 9), (9, 5), (1, 4))
    for is_causal, window, lengths, bottom_right in itertools.product((False, True), windows, tokens, (False, True)):
        check_band(is_causal, window, *lengths, bottom_right)


def check_band(is_causal, window, tokens_q, tokens_k, bottom_right):
    offset = tokens_k - tokens_q if bottom_right else 0
    band = Band.of(is_causal, *window, offset)
    expected = brute_force(is_causal, *window, offset, tokens_q, tokens_k)
    mask = band.mask(torch.arange(tokens_q), torch.arange(tokens_k))
    assert torch.equal(expected if mask is None else mask, expected)
    assert (mask is None) == (not is_causal and window == (-1, -1))
    assert pairs_in(band, tokens_q, tokens_k) == int(expected.sum())
    for start, stop in itertools.combinations(range(tokens_q + 1), 2):
        seen = expected[start:stop].any(0).nonzero().flatten().tolist()
        first, last = band.keys(start, stop, tokens_k)
        assert all(first <= key < last for key in seen)
        assert first < last or first == last == 0
        if stop == start + 1 and seen:
            assert (first, last) == (seen[0], seen[-1] + 1)


def test_a_mask_without_memory_has_shapes_without_a_gpu():
    """Regression: kernels were launched on a user's meta tensors."""
    for elements in (torch.ones(2, 1, 40, 70, dtype=torch.bool), torch.zeros(40, 70)):
        found, expected = read_mask(elements.to("meta")), read_mask(elements)
        assert [x.shape for x in found.tensors[2:4]] == [x.shape for x in expected.tensors[2:4]]
