"""Heads whose tiles are taken by turns."""

import heapq

import pytest

from sagebwd.block_masks import teacher_forcing
from sagebwd.kernels.sm90.longest_first import ROUNDS, heads_at_once, in_turns, last_heads


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
