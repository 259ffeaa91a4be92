import itertools

import pytest
import torch

from sagebwd.masks.band import Band


def brute_force(is_causal, left, right, offset, tokens_q, tokens_k):
    visible = torch.zeros(tokens_q, tokens_k, dtype=torch.bool)
    for i, j in itertools.product(range(tokens_q), range(tokens_k)):
        distance = j - (i + offset)
        visible[i, j] = not (
            (is_causal and distance > 0) or (left >= 0 and distance < -left) or (right >= 0 and distance > right)
        )
    return visible


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (3, -1), (-1, 2), (2, 5)])
@pytest.mark.parametrize(("tokens_q", "tokens_k"), [(7, 7), (5, 9), (9, 5), (1, 4)])
@pytest.mark.parametrize("bottom_right", [False, True])
def test_mask_keys_and_pairs_match_brute_force(is_causal, window, tokens_q, tokens_k, bottom_right):
    offset = tokens_k - tokens_q if bottom_right else 0
    band = Band.of(is_causal, *window, offset)
    expected = brute_force(is_causal, *window, offset, tokens_q, tokens_k)
    mask = band.mask(torch.arange(tokens_q), torch.arange(tokens_k))
    assert torch.equal(expected if mask is None else mask, expected)
    assert (mask is None) == (not is_causal and window == (-1, -1))
    assert band.pairs(tokens_q, tokens_k) == int(expected.sum())
    for start, stop in itertools.combinations(range(tokens_q + 1), 2):
        seen = expected[start:stop].any(0).nonzero().flatten().tolist()
        first, last = band.keys(start, stop, tokens_k)
        assert all(first <= key < last for key in seen)
        if stop == start + 1 and seen:
            assert (first, last) == (seen[0], seen[-1] + 1)
