"""Heads whose tiles are taken by turns, and the order of tiles of packed sequences."""

import bisect
import heapq
import itertools
from types import SimpleNamespace

import pytest

from sagebwd.block_masks import teacher_forcing
from sagebwd.kernels.sm90.longest_first import MOST_TOGETHER, ROUNDS, heads_at_once, in_turns, last_heads


@pytest.mark.parametrize("heads", [0, 1, 2, 7, 32, 33, 64, 1000])
@pytest.mark.parametrize("tiles", [0, 1, 5, 32, 64, 5000])
def test_groups_are_even_and_fill_the_programs(tiles, heads):
    at_once = heads_at_once(tiles, heads, 132)
    assert at_once >= 1
    groups = -(-heads // at_once)
    # no group is short by more than a head for each of the others, and together they have tiles for some rounds
    assert at_once * groups - heads < max(groups, 1)
    assert groups <= 1 or at_once * max(tiles, 1) >= ROUNDS * 132


def ends_of(costs: list[float], programs: int = 132) -> list[float]:
    """When each program ends, where a tile goes to whichever is free first."""
    ends = [0.0] * programs
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return ends


@pytest.mark.parametrize("heads", [1, 4, 12])
def test_the_last_heads_take_turns_and_level_the_end(heads):
    """Of clean and noisy frames, whose tiles see 13 to 135 blocks: head by head programs ended 9% after their mean."""
    mask = teacher_forcing(10, 1560, device="cpu")
    steps = (mask.kv_num_blocks + mask.full_kv_num_blocks + 4).flatten().flip(0).tolist()
    tiles = len(steps)
    last = last_heads(tiles, heads, 132)
    first = (heads - last) * tiles
    taken = [*range(first), *(in_turns(number, first, last, tiles) for number in range(first, heads * tiles))]
    assert sorted(taken) == list(range(heads * tiles))
    ends, before = (ends_of([steps[number % tiles] for number in order]) for order in (taken, sorted(taken)))
    assert max(ends) <= max(before)
    if heads == 12:
        assert last == 5
        assert max(ends) < 1.015 * sum(ends) / 132


@pytest.mark.parametrize(("tiles", "heads"), [(0, 1), (1, 0), (5000, 3), (3, 2)])
def test_as_many_heads_as_there_are(tiles, heads):
    assert 1 <= last_heads(tiles, heads, 132) <= max(heads, 1)


PACKED = {
    "alike": [2048] * 4, "none in some": [0, 300, 0, 0, 129, 0], "long and short": [128 * 70, 5, 128, 1000] + [7] * 40,
}  # fmt: skip


def in_turns_by_sequence(begins: list[int], heads: int, step: int) -> list[tuple[int, int]]:
    """Head and block of each tile: sequence by sequence, of each as many heads in turns as have few tiles together."""
    tiles = []
    for begin, end in list(itertools.pairwise(begins))[::step]:
        blocks = range(begin, end)
        at_once = -(-heads // (1 + heads * len(blocks) // MOST_TOGETHER))
        for first in range(0, heads, at_once):
            group = range(first, min(first + at_once, heads))
            tiles += [(head, block) for block in blocks[::step] for head in group]
    return tiles


@pytest.mark.parametrize("heads", [1, 3, 16, 40])
@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED)
class TestTilesOfPackedSequences:
    def test_of_the_forward(self, lengths, heads):
        pytest.importorskip("cutlass")
        from sagebwd.kernels.sm90.forward.tiles import Tiles
        from sagebwd.kernels.sm90.forward.variant import Variant
        from sagebwd.kernels.sm90.widths import width

        class Offsets(list):
            shape = property(lambda self: (len(self),))

        tiles = Tiles(Variant(128, 128, "bfloat16", width(128, 128).forward, varlen=True))
        ends = [0, *itertools.accumulate(lengths)]
        begins = [end // tiles.M + i for i, end in enumerate(ends)]
        count = begins[-1]
        grid = SimpleNamespace(tiles=count * heads, blocks_q=count, heads=heads, cu_seqlens_q=Offsets(ends))
        tiles.owner = lambda grid, block: bisect.bisect_right(begins[:-1], block) - 1
        order = Tiles.of_sequences.__wrapped__
        found = [order(tiles, grid, number) for number in range(grid.tiles)]
        assert [owner for _, owner in found] == sorted((owner for _, owner in found), reverse=True)
        in_order = [(tile // count, count - 1 - tile % count) for tile, _ in found]
        assert in_order == in_turns_by_sequence(begins, heads, -1)
        assert order(tiles, grid, grid.tiles) == (grid.tiles, 0)

    def test_of_the_backward(self, lengths, heads):
        pytest.importorskip("triton")
        from sagebwd.kernels.sm90.backward.key_blocks import turn_of

        begins, found = [0], []
        for length in lengths:
            programs = length // 128 + 1
            turns = [turn_of.fn(number, heads, programs) for number in range(programs * heads)]
            found += [(head, begins[-1] + number) for head, number in turns]
            begins.append(begins[-1] + programs)
        assert found == in_turns_by_sequence(begins, heads, 1)
