"""V near masked keys, interpreted where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton")
from sagebwd.call import Packing
from sagebwd.kernels.sm90.operands.masked_values import launch_masked_values
from sagebwd.kernels.sm90.widths import WIDTHS
from tests.gpus import DEVICE, on_gpu

pytestmark = on_gpu
HIDDEN = {"none": [], "first": [0], "ends of blocks": [127, 512], "one": [700], "some": [*range(300, 333), 895]}


@pytest.mark.parametrize("tokens", [40, 896, 1000])
@pytest.mark.parametrize("name", HIDDEN)
def test_steps_with_a_masked_key_find_all_their_values(name, tokens):
    """Of steps of any tile: V as it is, and zeros for NaN; what no step asks for is not written."""
    heads, head_dim = 2, 40
    v = torch.randn(2, tokens, heads, head_dim, generator=torch.Generator().manual_seed(0)).to(DEVICE).transpose(1, 2)
    key_mask = torch.ones(2, tokens, dtype=torch.bool, device=DEVICE)
    key_mask[1, [key for key in HIDDEN[name] if key < tokens]] = False
    expected = v.masked_fill(~key_mask[:, None, :, None], 0)
    given = v.masked_fill(~key_mask[:, None, :, None], torch.nan)
    written = launch_masked_values(given, Packing(2, heads, tokens, tokens, None), key_mask)
    for keys in {tile.keys for row in WIDTHS for tile in (row.forward, row.forward_of(True))}:
        for first in range(0, tokens, keys):
            step = slice(first, first + keys)
            for batch in range(2):
                if first + keys > tokens or not key_mask[batch, step].all():
                    assert torch.equal(written[batch, :, step], expected[batch, :, step])
    untouched = written.isnan().all(-1).all(1)
    assert untouched[0, : max(tokens // 128 - 1, 0) * 128 - 128].all()
    assert not untouched[:, -1].any()
