"""Triton's lists of blocks, interpreted where there is no GPU, against torch's; and compiled for sm_90."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sagebwd.kernels.masks import list_kernels, lists, sm90_block_lists, work_splits
from sagebwd.masks.band import Band
from sagebwd.masks.mask import Mask
from tests import programs, torch_lists
from tests.gpus import DEVICE, on_gpu
from tests.mask_lengths import FIRST, PART
from tests.masks import drawn

CAUSAL, WINDOW, ONE_SIDED = Band(upper=0), Band(lower=-70, upper=5), Band(lower=-40)
# kind of mask, (batch, heads, queries, keys), band, tile of the forward, query heads of a key head
CASES = {
    "matrix": ("bool-matrix", (2, 4, 300, 500), Band(), (192, 96), 2),
    "all": ("bool-all", (2, 2, 257, 130), CAUSAL, (128, 128), 1),
    "heads": ("bool-heads", (1, 4, 130, 257), WINDOW, (192, 128), 4),
    "batch": ("bias-batch", (2, 2, 200, 300), ONE_SIDED, (128, 96), 2),
    "rows": ("bias-rows", (2, 4, 260, 300), CAUSAL, (192, 128), 2),
    "columns": ("bool-columns", (2, 2, 300, 200), Band(), (128, 96), 2),
    "none": ("bool-none", (2, 2, 300, 200), WINDOW, (192, 128), 1),
    "one-token": ("bool-none", (1, 1, 1, 1), Band(), (128, 96), 1),
    "even": ("bool-matrix", (1, 2, 256, 384), CAUSAL, (128, 128), 2),
    "prefix": ("prefix", (2, 2, 300, 300), Band(), (192, 128), 2),
    "sinks": ("sinks", (1, 2, 300, 260), CAUSAL, (128, 128), 1),
}


def case(name: str) -> tuple[Mask, Tensor, tuple[int, int], Band, tuple[int, int], int, int]:
    """A mask, the keys that count, of some batch elements not all, tokens, band, tile, and heads."""
    kind, shape, band, tile, group = CASES[name]
    mask = drawn(kind, shape, torch.bfloat16, 3, "cpu")
    key_mask = mask.keys.expand(shape[0], shape[3]).clone()
    key_mask[-1, shape[3] // 2 :] &= shape[3] == 1
    return mask, key_mask, shape[2:], band, tile, group, shape[1] // group


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [x.to(DEVICE) for x in tensors]


def check_queries(name: str) -> None:
    mask, key_mask, *settings, _, _ = case(name)
    settings = len(key_mask), *settings
    found = list_kernels.of_queries(*on_device(mask.blocks, key_mask), *settings)
    assert torch.equal(found.cpu(), torch_lists.of_queries(mask.blocks, key_mask, *settings))


def check_keys(name: str, queries: int, turns: bool) -> None:
    mask, key_mask, tokens, band, _, group, heads = case(name)
    tiles = sm90_block_lists._packed(mask, tokens, True)[1]
    settings = len(key_mask), tokens, band, (queries, 128), group, heads, heads * len(key_mask) if turns else 1
    expected, programs = torch_lists.of_keys(mask.blocks, tiles, key_mask, *settings)
    ours, our_programs = list_kernels.of_keys(*on_device(mask.blocks, tiles, key_mask), *settings)
    assert torch.equal(ours.cpu(), expected)
    there = programs[:, 1] < expected.shape[2]  # of what comes behind nothing else is read
    assert torch.equal(our_programs.cpu()[there], programs[there])
    assert torch.equal(our_programs[:, 1].cpu(), programs[:, 1])
    given = *on_device(mask.blocks, tiles, key_mask), *settings[:-2]
    alone, nothing = list_kernels.of_keys(*given, 0, 1)
    assert torch.equal(alone.cpu(), expected)
    assert nothing is None


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in CASES])
def test_lists_of_queries_are_torchs(name):
    check_queries(name)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in CASES])
def test_lists_of_portable_kernels_are_torchs(name, by_key, monkeypatch):
    """With first keys apart and without, of tiles that fit the stored ones and of others."""
    if len(name) % 2:
        monkeypatch.setattr(list_kernels, "CHUNK", 2)
    mask, key_mask, tokens, band, *_ = case(name)
    for first_keys, tile in ((0, (64, 128)), (1, (128, 32)), (16, (64, 32))):
        last, settings = lists.last_of(key_mask, first_keys) if first_keys else None, (len(key_mask), tokens, tile)
        expected = torch_lists.lists_of(mask.blocks, mask.tiles, key_mask, last, *settings, band, by_key)
        last = None if last is None else last.to(DEVICE)
        tiles = None if mask.tiles is None else mask.tiles.to(DEVICE)
        blocks, keys = on_device(mask.blocks, key_mask)
        found = list_kernels.lists_of(blocks, tiles, keys, last, *settings, band, by_key)
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in CASES])
def test_lists_of_keys_are_torchs(name):
    check_keys(name, queries=64 if name != "even" else 128, turns=len(name) % 2 == 0)


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in CASES])
def test_a_masks_own_keys_say_nothing_that_blocks_do_not(name):
    mask, _, tokens, band, tile, group, heads = case(name)
    tiles, batch = sm90_block_lists._packed(mask, tokens, True)[1], CASES[name][1][0]
    own = mask.keys.expand(batch, tokens[1]).contiguous()
    blocks, tiles, own = on_device(mask.blocks, tiles, own)
    for function, stored, settings in (
        (list_kernels.of_queries, (), (tokens, band, tile)),
        (list_kernels.of_keys, (tiles,), (tokens, band, (64, 128), group, heads, heads)),
    ):
        found, expected = (function(blocks, *stored, keys, batch, *settings) for keys in (None, own))
        assert all(torch.equal(x, e) for x, e in zip(found, expected, strict=True))
    for by_key in (False, True):
        settings = None, batch, tokens, (64, 128), band, by_key
        found, expected = (list_kernels.lists_of(blocks, None, keys, *settings) for keys in (None, own))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in ("matrix", "sinks")])
def test_lists_longer_than_a_chunk(name, monkeypatch):
    monkeypatch.setattr(list_kernels, "CHUNK", 2)
    check_queries(name)
    check_keys(name, 64, False)


FAR = {"int32": 2**31 - 1, "beyond int32": 2**31, "int64": 2**40, "beyond int64": 2**70}


@pytest.mark.parametrize("far", [pytest.param(name, marks=on_gpu) for name in FAR])
def test_a_window_beyond_every_key_is_none(far):
    """Of each side, beside a near one on the other; kernels' sums of bounds and places fit 32 bits."""
    tokens, tile, group, heads = (130, 140), (128, 96), 2, 1
    mask, key_mask = drawn("bool-matrix", (1, 2, *tokens), torch.bfloat16, 3, "cpu"), torch.ones(1, 140).bool()
    blocks, keys, tiles = on_device(mask.blocks, key_mask, sm90_block_lists._packed(mask, tokens, True)[1])
    for near in (5, -1):
        for window in ((FAR[far], near), (near, FAR[far])):
            open_ended = tuple(-1 if side == FAR[far] else side for side in window)
            expected, found = Band.of(False, *open_ended), Band.of(False, *window)
            assert found != expected
            assert all(bound is None or -(2**31) <= bound < 2**31 for bound in (found.lower, found.upper))
            ours, exact = (list_kernels.of_queries(blocks, keys, 1, tokens, band, tile) for band in (found, expected))
            assert torch.equal(ours, exact)
            settings = (64, 128), group, heads, heads
            ours, exact = (
                list_kernels.of_keys(blocks, tiles, keys, 1, tokens, band, *settings)[0] for band in (found, expected)
            )
            assert torch.equal(ours, exact)
            for by_key in (False, True):
                ours, exact = (
                    list_kernels.lists_of(blocks, None, keys, None, 1, tokens, (64, 64), band, by_key)
                    for band in (found, expected)
                )
                assert torch.equal(ours, exact)
                made = torch_lists.lists_of(mask.blocks, None, key_mask, None, 1, tokens, (64, 64), found, by_key)
                assert torch.equal(exact.cpu(), made)


@pytest.mark.parametrize("last_heads", [pytest.param(x, marks=on_gpu) for x in (1, 2, 6)])
@pytest.mark.parametrize(("most", "least"), [(264, 1), (5, 2), (40, 3)])
@pytest.mark.parametrize("heads", [1, 3])
def test_shares_are_torchs(heads, most, least, last_heads, monkeypatch):
    """Of lists of any lengths, more of them than are looked at together."""
    monkeypatch.setattr(list_kernels, "LISTS", 8)
    monkeypatch.setattr(work_splits, "MOST", most)
    monkeypatch.setattr(work_splits, "LEAST", least)
    lengths = torch.randint(0, 9, (2, heads, 7, 16), generator=torch.Generator().manual_seed(heads), dtype=torch.int32)
    lengths[0, 0, 3, 1] = 60
    expected = torch_lists.work_splits_of(lengths, 2, 3, last_heads)
    found = list_kernels._work_splits(lengths.to(DEVICE), 3, last_heads, most, least).cpu()
    there = expected[:, 1] < 7
    assert torch.equal(found[there], expected[there])
    assert torch.equal(found[:, 1], expected[:, 1])


@pytest.mark.parametrize(
    ("folder", "which"),
    [pytest.param(None, ["few"], id="few")]
    + [
        pytest.param(folder, [], id=Path(folder).name if folder else "installed", marks=pytest.mark.slow)
        for folder in (None, *map(str, Path(sys.prefix).glob("triton-*")))
    ],
)
def test_they_compile_for_hopper(folder, which):
    """Every kernel, by the installed triton for the last shape and dtype alone, and by each triton for all."""
    rows = programs.compiled("tests.mask_compilations", *which, triton=folder)
    names = "pass", "lists", "query_lists", "codes", "key_lists", "places", "shares"
    assert {row["kernel"] for row in rows} == {f"_{name}_kernel" for name in names}
    for row in rows:
        assert row["spills"] == 0, row
        assert row["shared_bytes"] <= 96 << 10, row


def test_no_length_after_two_has_kernels_of_its_own():
    """Regression: strides and sizes were kernels' constants where they are 1 or multiples of 16: every few lengths
    some combination was new, and compiled for seconds. Later the first length that is a multiple of a block did, and
    wide heads' parts of a backward, by how many heads they have and where their masks begin; and strides of widths
    that are no multiple of 8, which some lengths make multiples of 16."""
    rows = programs.compiled("tests.mask_lengths")
    parts = Counter(tuple(row["call"][1:]) for row in rows if row["kernel"] == PART)
    assert sorted(parts) == [("causal", 300), *((name, 512) for name in ("causal", "elements", "keys", "packed"))]
    assert min(parts.values()) > 1, "parts are alike at all lengths, and show nothing"
    rows = [row for row in rows if row["kernel"] != PART]
    kernels = {row["kernel"] for row in rows}
    assert {"_pass_kernel", "_lists_kernel", "_codes_kernel", "dq_kernel", "backward_kernel"} <= kernels
    # but for half a second the first multiple of 16 under a mask_mod that reads a table as long as the tokens
    late = {(row["kernel"], row["length"]) for row in rows if row["length"] not in FIRST}
    assert late <= {("_along_kernel", 336), ("_shown_kernel", 336)}
    # forms of other lengths are the second's, so that whoever has one length compiles none of them
    second = [(*row["call"], row["kernel"]) for row in rows if row["length"] == FIRST[1]]
    portable = "forward_kernel", "dq_kernel", "dkdv_kernel"
    assert sorted(second) == sorted([
        ("token", "bias", 128, "_pass_kernel"), *(("token", "bias", 128, kernel) for kernel in portable),
        *(("token", "BlockMask", 128, kernel) for kernel in portable), ("mixed", "causal", 128, "backward_kernel"),
        ("mixed", "bias", 128, "_pass_kernel"), ("mixed", "bias", 128, "backward_kernel"),
        ("mixed", "BlockMask, unread", 128, "backward_kernel"), ("token", "elements", 512, "_pass_kernel"),
        *(("token", "elements", 512, kernel) for kernel in ("forward_kernel", *portable)),  # by halves of the columns
    ])  # fmt: skip
