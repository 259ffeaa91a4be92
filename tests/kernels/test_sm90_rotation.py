"""The forward's sums and differences, thread by thread, are products with R; needs neither compiler nor GPU."""

import numpy as np
import pytest
import torch

from sagebwd.kernels.sm90.forward.rotation import Share, Threads, root, stages, turned
from sagebwd.numerics import rotation_sizes
from sagebwd.reference.rotation import rotation

FILLED = [(64, 64), (48, 64), (33, 64), (128, 128), (112, 128), (100, 128), (120, 128), (65, 128), (1, 64)]


@pytest.mark.parametrize(
    ("head_dim", "width", "lanes"), [(*dims, lanes) for dims in FILLED for lanes in (1, 2, 4, 8)] + [(96, 96, 2)]
)
def test_threads_that_share_a_row_turn_it(head_dim, width, lanes):
    share = Share(lanes, min(16, width // lanes), width // lanes)
    lane = np.arange(lanes)
    owned = np.array(share.channels()) + share.chunk * lane[:, None]
    assert sorted(owned.ravel()) == list(range(width))
    row = np.zeros(width)
    row[:head_dim] = np.random.default_rng(0).standard_normal(head_dim)
    threads = Threads(lane, lambda x, offset: x[lane ^ offset], np.where, lambda a, b, c: a * b + c)
    found = np.zeros(width)
    for channels, values in zip(owned.T, turned(list(row[owned].T), rotation_sizes(head_dim), share, threads)):
        found[channels] = root(rotation_sizes(head_dim)) * values
    expected = torch.zeros(width, dtype=torch.float64)
    expected[:head_dim] = torch.from_numpy(row[:head_dim]) @ rotation(head_dim)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-14)


def test_stages_of_a_width_that_is_filled_up():
    assert stages((64, 32, 16)) == [(1, 112), (2, 112), (4, 112), (8, 112), (16, 96), (32, 64)]
    assert stages((64,)) == [(1 << bit, 64) for bit in range(6)]
