"""Triton's pass over a mask's elements, interpreted where there is no GPU, against torch's operators."""

import pytest
import torch

from sagebwd import Recipe, dispatch
from sagebwd.kernels.masks import blocks as maps
from sagebwd.kernels.masks import mask_blocks, sm90_block_lists
from sagebwd.masks.mask import HIDDEN, HIDDEN_ELSE, TILE, Mask, blocks_of
from sagebwd.planning import mask_argument
from tests.gpus import DEVICE, on_gpu
from tests.masks import bias, boolean

# interpreted where there is no GPU, and of the GPU's tests where there is one
pytestmark = on_gpu
DTYPES = [torch.bool, torch.float16, torch.bfloat16, torch.float32]
SHAPE = 2, 2, 150, 135


def elements(dtype, axes, shape=SHAPE):
    generator = torch.Generator().manual_seed(0)
    return boolean(shape, axes, generator) if dtype == torch.bool else bias(shape, axes, dtype, generator)


def equal(ours, theirs):
    return all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axes", ["all", "matrix", "rows", "columns"])
def test_a_pass_is_what_torch_computes(dtype, axes):
    mask = elements(dtype, axes)
    for x in (mask, mask.mT.contiguous().mT, mask.repeat(1, 1, 1, 2)[..., ::2]):
        assert equal(mask_blocks.blocks_of(x.to(DEVICE)), blocks_of(x))
        full = x.expand(-1, -1, *SHAPE[2:])
        for by_key in (False, True):
            found = mask_blocks.words_of(x.to(DEVICE).expand_as(full), by_key)
            assert equal(found, sm90_block_lists.words_of(full, by_key))


@pytest.fixture
def taken(monkeypatch):
    """The pass runs on a CPU too; how often it did."""
    read, calls = mask_blocks.read, []
    monkeypatch.setattr(maps, "takes", lambda x: x.dtype in DTYPES)
    monkeypatch.setattr(mask_blocks, "read", lambda *args, **kwargs: calls.append(kwargs) or read(*args, **kwargs))
    return calls


def hidden_wholly(dtype):
    shown = torch.zeros(1, 1, 33, 40, dtype=torch.bool)
    return shown if dtype == torch.bool else torch.where(shown, 0.0, HIDDEN_ELSE).to(dtype)


def with_nan(dtype):
    mask = torch.zeros(1, 1, 33, 40, dtype=dtype)
    mask[..., 3, 5], mask[..., 32, 39], mask[..., 0, 0] = torch.nan, -torch.inf, 1
    return mask


MASKS = {
    "all": elements(torch.bool, "all"),
    "matrix": elements(torch.bfloat16, "matrix"),
    "rows": elements(torch.float32, "rows"),
    "columns": elements(torch.bool, "columns"),
    "none": elements(torch.float16, "none"),
    "one-token": torch.zeros(1, 1, 1, 1, dtype=torch.bool),
    "hidden": hidden_wholly(torch.bool),
    "low": hidden_wholly(torch.bfloat16),
    "nan": with_nan(torch.float32),
    "whole": torch.ones(1, 2, 128, 160, dtype=torch.bool),
}


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_a_call_reads_its_mask_once(name, by_key, taken, monkeypatch):
    """With the keys of its batch, and the bits of both directions if a backward will come."""
    mask = MASKS[name]
    tokens = SHAPE[2:] if name in ("rows", "columns", "none") else tuple(mask.shape[2:])
    full = mask.expand(-1, -1, *tokens)
    found = sm90_block_lists.read(mask.to(DEVICE), 2, tokens, by_query=True, by_key=by_key)
    blocks, keys = blocks_of(full)
    assert equal((found.blocks, found.keys), (blocks, keys.expand(2, -1)))
    bits = [sm90_block_lists._bits(found, tokens, way) for way in (False, True)[: 1 + by_key]]
    assert len(taken) == 1
    monkeypatch.undo()  # by torch
    for way, made in enumerate(bits):
        assert equal(made, sm90_block_lists.words_of(full, bool(way)))


def test_bits_of_queries_are_kept_until_the_forward_has_them(taken):
    found = sm90_block_lists.read(MASKS["all"].to(DEVICE), 2, SHAPE[2:], by_query=True, by_key=True)
    for by_key in (True, False):
        assert len(found.parts._made) == 2
        words, _ = sm90_block_lists._bits(found, SHAPE[2:], by_key)
        # made anew, where nobody else reads them
        assert torch.equal(sm90_block_lists._bits(found, SHAPE[2:], by_key)[0], words)
    assert list(found.parts._made) == [("bits", SHAPE[2:], True)]
    kept = found.kept()
    assert sm90_block_lists._bits(kept, SHAPE[2:], False) is sm90_block_lists._bits(kept, SHAPE[2:], False)


@pytest.mark.parametrize(
    ("forward", "backward", "by_key", "words"),
    [
        ("hopper", "hopper", True, (True, True)),
        ("hopper", "hopper", False, (True, False)),
        ("hopper", "triton", True, (True, False)),
        ("triton", "hopper", True, (False, True)),
        ("triton", "triton", True, None),
    ],
)
def test_only_bits_that_kernels_read_are_made(forward, backward, by_key, words, taken):
    mask, q, k = MASKS["all"].to(DEVICE), torch.empty(2, 4, 150, 64), torch.empty(2, 2, 135, 64)
    choice = dispatch.named(Recipe.named("token"), f"{forward}/{backward}")
    keys, found = mask_argument.read(mask, mask, None, q, k, by_key=by_key, choice=choice)
    assert torch.equal(keys, found.keys)
    asked = [(x["words"], x["words_by_key"]) for x in taken if "words" in x]
    assert asked == ([] if words is None else [words])


def test_a_mask_of_other_numbers_is_read_by_torch(taken):
    mask = torch.zeros(1, 1, 40, 50, dtype=torch.float64, device=DEVICE)
    found = sm90_block_lists.read(mask, 1, (40, 50), by_query=True, by_key=True)
    assert equal(found.tensors[2:], blocks_of(mask.cpu()))
    assert not taken


def test_bits_of_stored_tiles():
    tiles = torch.rand(3, TILE, TILE, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = Mask(tiles.to(DEVICE), torch.zeros(1), None, None)
    for by_key in (False, True):
        words, _ = mask_blocks.words_of(mask.elements[:, None], by_key)
        assert torch.equal(words.cpu(), sm90_block_lists.pack(tiles.mT if by_key else tiles))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_what_is_added_hides_from_the_same_number_on(dtype):
    """As torch compares with it; NaN shows."""
    least = torch.tensor(HIDDEN.get(dtype, HIDDEN_ELSE), dtype=dtype)
    away = [torch.tensor(way, dtype=dtype) for way in (-torch.inf, torch.inf)]
    numbers = [least, *(torch.nextafter(least, way) for way in away), *away, torch.tensor(torch.nan, dtype=dtype)]
    mask = torch.stack([*numbers, torch.zeros((), dtype=dtype)])[None, None, None]
    assert torch.equal(mask_blocks.blocks_of(mask.to(DEVICE))[1].cpu(), blocks_of(mask)[1])


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_gpu_takes_them():
    mask = torch.ones(1, 1, TILE, TILE, dtype=torch.bool, device=DEVICE)
    assert maps.takes(mask)
    assert not maps.takes(mask.double())
