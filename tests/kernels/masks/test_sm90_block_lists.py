"""Lists and bits of masks for Hopper's kernels, walked as those do, against the mask's elements."""

import pytest
import torch
from torch import Tensor

from sagebwd.kernels.masks import work_splits
from sagebwd.kernels.masks.blocks import of_tensor
from sagebwd.kernels.masks.sm90_block_lists import BlockLists, of_keys, of_queries, pack
from sagebwd.kernels.masks.work_splits import HEAD_BIT
from sagebwd.masks.band import Band
from sagebwd.masks.mask import TILE, Mask, shown
from sagebwd.masks.parts import PartsOfCall
from tests import torch_lists
from tests.masks import KINDS, drawn

BAND = Band(lower=-70, upper=0)
# Shapes and bands that every kind of mask is listed under.
CALLS = [
    ((2, 4, 300, 500), BAND), ((1, 2, 128, 96), Band()), ((2, 2, 257, 130), BAND), ((2, 2, 257, 130), Band()),
    ((1, 1, 1, 1), BAND),
]  # fmt: skip


@pytest.fixture(autouse=True)
def by_torch(monkeypatch):
    """The lists that kernels' are equal to (test_list_kernels.py), sooner."""
    torch_lists.stand_in(monkeypatch.setattr)


FORWARD_TILES = [(192, 128), (128, 128), (192, 96), (128, 96)]


def unpacked(words: Tensor) -> Tensor:
    """(TILE, TILE) bool of (TILE, 4) words: column 8j + 2t + b at bit 2j + b of word t."""
    columns = torch.arange(TILE)
    j, t, b = columns // 8, columns % 8 // 2, columns % 2
    return (words[:, t] >> (2 * j + b) & 1).bool()


def broadcast(x: Tensor, batch: int, head: int) -> Tensor:
    return x[batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]


def seen_of(mask: Mask, key_mask: Tensor, shape: tuple[int, ...], band: Band) -> Tensor:
    """(B, H, N, M) bool: every pair that counts."""
    batch, heads, tokens_q, tokens_k = shape
    seen = shown(mask.part(slice(0, tokens_q), slice(0, tokens_k))).expand(batch, heads, tokens_q, tokens_k)
    seen = seen & key_mask[:, None, None]
    visible = band.mask(torch.arange(tokens_q), torch.arange(tokens_k))
    return seen if visible is None else seen & visible


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """x (N, M) as whole tiles of ``rows`` x ``columns``, False beyond."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))


def case(kind: str, shape: tuple[int, ...]) -> tuple[Mask, Tensor]:
    """A mask and which keys count: those that any query sees, and of some batch elements not all."""
    mask = drawn(kind, shape, torch.bfloat16, 3, "cpu")
    key_mask = mask.keys.expand(shape[0], shape[3]).clone()
    key_mask[-1, shape[3] // 2 :] &= shape[3] == 1
    return mask, key_mask


def bits(block_lists: BlockLists, batch: int, head: int) -> Tensor:
    """All pairs that the bits show, whole tiles of them."""
    grid = broadcast(block_lists.tiles, batch, head)
    return torch.cat([torch.cat([unpacked(block_lists.words[t]) for t in row], 1) for row in grid])


def test_bits_of_a_tile():
    tiles = torch.rand(3, TILE, TILE, generator=torch.Generator().manual_seed(0)) < 0.5
    assert all(torch.equal(unpacked(words), tile) for words, tile in zip(pack(tiles), tiles))


@pytest.mark.parametrize("kind", KINDS)
def test_queries_meet_what_they_see(kind):
    for shape, band in CALLS:
        check_lists_of_queries(kind, shape, band)


def check_lists_of_queries(kind, shape, band):
    mask, key_mask = case(kind, shape)
    seen = seen_of(mask, key_mask, shape, band)
    batch, heads, *tokens = shape
    for tile in FORWARD_TILES:
        block_lists = of_queries(mask, key_mask, tuple(tokens), band, tile)
        for b in range(batch):
            for h in range(heads):
                of_bits = bits(block_lists, b, h)[: tokens[0], : tokens[1]]
                want = padded(seen[b, h], *tile)
                for row, listed in enumerate(broadcast(block_lists.lists, b, h)):
                    in_part, whole = listed[:2].tolist()
                    met = listed[2 : 2 + in_part + whole].tolist()
                    assert in_part >= 1
                    assert len(set(met)) == len(met)
                    queries = want[row * tile[0] : (row + 1) * tile[0]]
                    there = {
                        n for n in range(want.shape[1] // tile[1]) if queries[:, n * tile[1] :][:, : tile[1]].any()
                    }
                    assert there <= set(met)
                    for block in met[in_part:]:  # where nothing is added either
                        real = min(tokens[0] - row * tile[0], tile[0])
                        assert queries[:real, block * tile[1] : (block + 1) * tile[1]].all()
                # what bits show is what elements show
                elements = shown(mask.part(slice(0, tokens[0]), slice(0, tokens[1]))).expand(*shape)[b, h]
                assert torch.equal(of_bits, elements)


def test_the_first_of_whole_blocks_counts_as_one_seen_in_part_and_once():
    """The forward's first step is one with masks."""
    documents = torch.arange(512) // 256
    mask = of_tensor((documents[:, None] == documents)[None, None])
    lists = of_queries(mask, torch.ones(1, 512, dtype=torch.bool), (512, 512), Band(), (128, 128)).lists
    assert lists[0, 0, :, :4].tolist() == [[1, 1, 0, 1]] * 2 + [[1, 1, 2, 3]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_keys_meet_the_queries_that_see_them(kind):
    for shape, band in CALLS:
        check_lists_of_keys(kind, shape, band)


def check_lists_of_keys(kind, shape, band):
    mask, key_mask = case(kind, shape)
    seen = seen_of(mask, key_mask, shape, band)
    batch, heads, *tokens = shape
    for block_q, group in ((64, 2 - heads % 2), (128, heads)):
        block_lists = of_keys(mask, key_mask, tuple(tokens), band, (block_q, TILE), group)
        lists = block_lists.lists
        assert all(size == 1 or stride % 16 == 0 for size, stride in zip(lists.shape[:3], lists.stride()))
        for b in range(batch):
            for key_head in range(heads // group):
                found: dict[tuple[int, int], list[tuple[int, int]]] = {}
                for block_k, listed in enumerate(broadcast(block_lists.lists, b, key_head)):
                    in_part, whole = listed[:2].tolist()
                    rows = listed[4 : 4 + 4 * (in_part + whole)].view(-1, 4).tolist()
                    for number, (entry, tile, rank, _) in enumerate(rows):
                        head, block = key_head * group + (entry >> HEAD_BIT), entry & ((1 << HEAD_BIT) - 1)
                        want = padded(seen[b, head], block_q, TILE).mT
                        pairs = want[block_k * TILE :, block * block_q :][:TILE, :block_q]
                        assert pairs.any() or number < in_part
                        if number >= in_part:
                            assert pairs.all()
                        of_bits = unpacked(block_lists.words[tile])[:, block * block_q % TILE :][:, :block_q]
                        elements = shown(mask.part(slice(0, tokens[0]), slice(0, tokens[1]))).expand(*shape)[b, head]
                        elements = padded(elements, block_q, TILE).mT[block_k * TILE :, block * block_q :]
                        assert torch.equal(of_bits, elements[:TILE, :block_q])
                        found.setdefault((head, block), []).append((block_k, rank))
                # nothing that is seen is missing, and blocks of keys add to a block of queries from the last on
                for head in range(key_head * group, key_head * group + group):
                    want = padded(seen[b, head], block_q, TILE)
                    for block in range(want.shape[0] // block_q):
                        pairs = want[block * block_q : (block + 1) * block_q].unflatten(1, (-1, TILE))
                        there = pairs.any(0).any(-1).nonzero()[:, 0].tolist()
                        met = sorted(found.get((head, block), []))
                        assert set(there) <= {k for k, _ in met}
                        assert [rank for _, rank in met] == list(range(len(met) - 1, -1, -1))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("bias")])
def test_what_is_added_lies_as_kernels_read_it(kind):
    shape = 2, 4, 30, 50
    mask, key_mask = case(kind, shape)
    settings = key_mask, shape[2:], Band(), (64, TILE), 2
    block_lists = of_keys(mask, *settings)
    assert block_lists.bias.stride(3) == 1
    assert torch.equal(block_lists.bias.expand(*shape), mask.elements.expand(*shape))
    copied = block_lists.bias.data_ptr() != mask.elements.data_ptr()
    assert copied == (mask.elements.shape[3] == 1)
    of_call = mask.with_parts(PartsOfCall())
    walks = of_queries(of_call, key_mask, shape[2:], Band(), (128, 128)), of_keys(of_call, *settings)
    assert walks[0].bias.data_ptr() == walks[1].bias.data_ptr()
    double = Mask(mask.elements.double(), None, mask.blocks, mask.keys)
    assert of_keys(double, *settings).bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("most", "least", "last_heads"), [(264, 32, 1), (264, 32, 4), (264, 1, 4), (264, 32, 3), (5, 2, 1)]
)
@pytest.mark.parametrize("kind", ["bool-all", "bool-none", "prefix", "sinks", "document"])
def test_shares_have_each_block_of_a_list_once(kind, most, least, last_heads, monkeypatch):
    monkeypatch.setattr(work_splits, "MOST", most)
    monkeypatch.setattr(work_splits, "LEAST", least)
    shape, heads = (2, 4, 700, 380), 2
    mask, key_mask = case(kind, shape)
    blocks_k = -(-shape[3] // TILE)
    lists = of_keys(mask, key_mask, shape[2:], Band(), (64, TILE), shape[1] // heads).lists
    programs = torch_lists.work_splits_of(lists, shape[0], heads, last_heads)
    if (most, least) == (264, 32):
        group = shape[1] // heads
        block_lists = of_keys(mask, key_mask, shape[2:], Band(), (64, TILE), group, heads, last_heads)
        assert torch.equal(block_lists.work_splits, programs)
    programs = programs.tolist()
    assert len(programs) == shape[0] * heads * blocks_k + most
    there = [block < blocks_k for _, block, *_ in programs]
    assert there == sorted(there, reverse=True)  # those that have nothing come last
    met: dict[tuple[int, int], list] = {}
    for head, block, at, in_part, count, among, place, _ in programs[: sum(there)]:
        entries = lists.flatten()[at + 4 :][: 4 * count : 4].tolist()
        assert 0 <= in_part <= count
        met.setdefault((head, block), []).append(
            ([(entry, number < in_part) for number, entry in enumerate(entries)], among, place)
        )
    assert set(met) == {(head, block) for head in range(shape[0] * heads) for block in range(blocks_k)}
    for (head, block), taken in met.items():
        listed = broadcast(lists, head // heads, head % heads)[block]
        in_part, length = int(listed[0]), int(listed[:2].sum())
        entries = listed[4 : 4 + 4 * length : 4].tolist()
        assert [x for blocks, _, _ in taken for x in blocks] == [(x, n < in_part) for n, x in enumerate(entries)]
        assert {among for _, among, _ in taken} == {len(taken)}
        lengths = [len(blocks) for blocks, _, _ in taken]
        assert max(lengths) - min(lengths) <= 1
    cut = sorted({x[2] for taken in met.values() if len(taken) > 1 for x in taken})
    assert cut == list(range(len(cut)))
    assert len(cut) <= most
    assert sum(len(taken) > 1 for taken in met.values()) == len(cut)
    if least == 1 and kind == "bool-none":
        assert cut
    uncut = [program for program in programs[: sum(there)] if program[5] == 1]
    first = shape[0] * heads - last_heads
    whole = [(head, block) if head < first else (first, block, head) for head, block, *_ in uncut]
    assert whole == sorted(whole)  # key heads one after another, the last ones by turns
