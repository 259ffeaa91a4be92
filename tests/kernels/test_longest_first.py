"""Groups of heads whose tiles are taken together."""

import pytest

from sagebwd.kernels.sm90.forward.launch import ROUNDS, heads_at_once


@pytest.mark.parametrize("heads", [0, 1, 2, 7, 32, 33, 64, 1000])
@pytest.mark.parametrize("tiles", [0, 1, 5, 32, 64, 5000])
def test_groups_are_even_and_fill_the_programs(tiles, heads):
    at_once = heads_at_once(tiles, heads, 132)
    assert at_once >= 1
    groups = -(-heads // at_once)
    # no group is short by more than a head for each of the others, and together they have tiles for some rounds
    assert at_once * groups - heads < max(groups, 1)
    assert groups <= 1 or at_once * max(tiles, 1) >= ROUNDS * 132
