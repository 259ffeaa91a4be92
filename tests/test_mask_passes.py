"""Triton's passes over a mask's elements, interpreted where there is no GPU, against torch's operators."""

import pytest
import torch

from sagebwd.masks import passes, walks
from sagebwd.masks.mask import HIDDEN, HIDDEN_ELSE, TILE, blocks_of
from tests.masks import bias, boolean

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# interpreted where there is no GPU, and of the GPU's tests where there is one
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.bool, torch.float16, torch.bfloat16, torch.float32]


def elements(dtype, axes, shape=(2, 2, 150, 135)):
    generator = torch.Generator().manual_seed(0)
    return boolean(shape, axes, generator) if dtype == torch.bool else bias(shape, axes, dtype, generator)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axes", ["all", "matrix", "rows", "columns"])
def test_a_pass_is_what_torch_computes(dtype, axes):
    mask = elements(dtype, axes)
    for x in (mask, mask.mT.contiguous().mT, mask.repeat(1, 1, 1, 2)[..., ::2]):
        found = passes.blocks_of(x.to(DEVICE))
        for ours, theirs in zip(found, blocks_of(x)):
            assert torch.equal(ours.cpu(), theirs)
        full = x.expand(-1, -1, 150, 135)
        for by_key in (False, True):
            ours = passes.words_of(x.to(DEVICE).expand(-1, -1, 150, 135), by_key)
            assert torch.equal(ours.cpu(), walks.words_of(full, by_key))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_what_is_added_hides_from_the_same_number_on(dtype):
    """As torch compares with it; NaN shows."""
    least = torch.tensor(HIDDEN.get(dtype, HIDDEN_ELSE), dtype=dtype)
    away = [torch.tensor(way, dtype=dtype) for way in (-torch.inf, torch.inf)]
    numbers = [least, *(torch.nextafter(least, way) for way in away), *away, torch.tensor(torch.nan, dtype=dtype)]
    mask = torch.stack([*numbers, torch.zeros((), dtype=dtype)])[None, None, None]
    assert torch.equal(passes.blocks_of(mask.to(DEVICE))[1].cpu(), blocks_of(mask)[1])


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_gpu_takes_them():
    mask = torch.ones(1, 1, TILE, TILE, dtype=torch.bool, device=DEVICE)
    assert passes.takes(mask)
    assert not passes.takes(mask.double())
