"""Rotated codes of heads of over 256 channels against psi and smoothing in plain PyTorch."""

import pytest
import torch

pytest.importorskip("triton")
from sagebwd.call import Packing
from sagebwd.kernels.common import chunks
from sagebwd.kernels.common.quantize import launch_quantize
from sagebwd.reference.quantize import quantize_tokens, smooth
from sagebwd.reference.rotation import rotated
from tests.gpus import HAS_GPU

DEVICE = "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def of_few_programs(monkeypatch):
    """A program of each head, which takes all of its blocks."""
    monkeypatch.setattr(chunks, "TURNED_PROGRAMS", 64)


def draw(*shape, dtype=torch.bfloat16):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 2).to(DEVICE, dtype)


@pytest.mark.parametrize(("head_dim", "turned"), [(512, 512), (384, 384), (300, 300), (288, 288), (512, 64)])
@pytest.mark.parametrize("group", ["token", "block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_is_psi(head_dim, turned, group, dtype):
    k = draw(2, 1, 70, head_dim, dtype=dtype)
    k[..., turned:] = 0
    key_mask = torch.arange(70, device=DEVICE).expand(2, -1) % 7 != 3
    valid = key_mask[:, None, :, None]
    smoothed, mean = smooth(k.double(), valid)
    found = launch_quantize(
        k, Packing.of(k, None, 70), group, 32, mean[:, :, 0].float().contiguous(), key_mask, codes=True, turned=turned
    )
    wanted = torch.cat([rotated(smoothed[..., :turned]), smoothed[..., turned:]], -1) * valid
    codes, scale = quantize_tokens(wanted, group, 32)
    torch.testing.assert_close(found.token_scale, scale[..., 0].float(), rtol=1e-5, atol=0)
    off = (found.codes - codes).abs()
    assert off.max() <= 1, "a code is more than a tie away"
    assert off.mean() < 1e-3, "more codes differ than ties explain"


@pytest.mark.parametrize("group", ["token", "block"])
def test_packed_sequences_have_the_codes_that_they_have_alone(group):
    lengths = [1, 0, 50, 20]
    x = draw(sum(lengths), 2, 320)
    offsets = torch.tensor([0, 1, 1, 51, 71], dtype=torch.int32, device=DEVICE)
    found = launch_quantize(x, Packing.of(x, offsets, 50), group, 32, codes=True, turned=320)
    for start, length in zip(offsets.tolist(), lengths):
        if length:
            alone = x[start : start + length].transpose(0, 1)[None].contiguous()
            of_one = launch_quantize(alone, Packing.of(alone, None, length), group, 32, codes=True, turned=320)
            assert torch.equal(found.codes[start : start + length].transpose(0, 1), of_one.codes[0])
            assert torch.equal(found.token_scale[:, start : start + length], of_one.token_scale[0])


def test_keys_that_are_all_alike_are_zeros():
    of_many_sizes = 10.0 ** (torch.arange(500, device=DEVICE) % 7)  # products of which are rounded, in other orders
    k = (draw(1, 1, 1, 500) * of_many_sizes).bfloat16().expand(1, 1, 20, 500).contiguous()
    mean = k.float().mean(2)
    found = launch_quantize(k, Packing.of(k, None, 20), "token", 64, mean, codes=True, turned=500)
    assert not found.codes.any()
    assert (found.token_scale == 1).all()


def test_a_row_with_nan_has_it_in_its_scale_alone():
    q = draw(1, 1, 20, 320)
    q[0, 0, 3, 300] = float("nan")
    scale = launch_quantize(q, Packing.of(q, None, 20), "token", 64, codes=True, turned=320).token_scale
    assert scale.isnan().flatten().nonzero().flatten().tolist() == [3]
