"""Codes of K against psi and smoothing in plain PyTorch."""

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from sagebwd.call import Packing
from sagebwd.kernels.common.strided import Strided
from sagebwd.kernels.sm90.backward.descriptor import empty_by_head
from sagebwd.kernels.sm90.operands.quantize_k import QuantizedK, launch_channel_maxima, launch_quantize_k
from sagebwd.reference.quantize import quantize_tokens, smooth
from sagebwd.reference.rotation import rotated, rotation

BLOCK_K = 128


def scales_of_channels(v, key_mask=None):
    """psi's, of the bits that the pass leaves."""
    keys = Packing.of(v, None, v.shape[2])
    maxima = torch.zeros(keys.batch, keys.heads, v.shape[3], dtype=torch.int32)
    launch_channel_maxima(v, keys, key_mask, maxima)
    largest = maxima.view(torch.float32)
    return torch.where(largest == 0, 1, largest / 127)


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_codes(quantized, scale, x, group):
    """Scales to FP32 rounding; codes equal but for a few ties, which FP32 rounds another way than FP64."""
    expected, expected_scale = quantize_tokens(x, group, BLOCK_K)
    assert torch.allclose(scale, expected_scale[..., 0].float(), rtol=1e-5, atol=0)
    difference = (quantized.double() - expected).abs()
    assert difference.max() <= 1
    assert difference.mean() <= 5e-3


def assert_bounded(largest, quantized, scale):
    """No key as codes has a larger norm than is said, which is at most rounding more than the largest."""
    norms = (quantized.double() * scale.double()[..., None]).norm(dim=-1).amax(-1).flatten()
    rounding = scale.amax(-1).flatten() * quantized.shape[-1] ** 0.5
    assert (norms <= largest * (1 + 1e-6)).all()
    assert (largest <= norms + rounding + 1e-5).all()


def check(k, key_mask=None, device="cpu", sampled=False, turned=0, columns=None):
    """turned: the head_dim whose rotation keys get, of which k's is filled up with zeros. columns: of the codes."""
    k = k.to(device)
    key_mask_there = None if key_mask is None else key_mask.to(device)
    packing = Packing.of(k, None, k.shape[2])
    out = launch_quantize_k(k, packing, key_mask_there, BLOCK_K, columns=columns, k_sampled=sampled, turned=turned)
    out = QuantizedK(*(x.cpu() for x in out))
    assert out.k_int8.shape[-1] == (columns or k.shape[-1])
    assert not out.k_int8[..., k.shape[-1] :].any()
    out = out._replace(k_int8=out.k_int8[..., : k.shape[-1]])
    valid = None if key_mask is None else key_mask[:, None, :, None]
    smoothed, mean = smooth(k.cpu().double(), valid, sampled)
    assert torch.allclose(out.k_mean.double(), mean[:, :, 0], rtol=1e-5, atol=1e-6)
    if turned:
        smoothed = torch.cat([rotated(smoothed[..., :turned]), smoothed[..., turned:]], -1)
        assert not out.k_int8[..., turned:].any()
    assert_codes(out.k_int8, out.k_scale, smoothed, "lane")
    assert_bounded(out.largest_norm, out.k_int8, out.k_scale)
    assert out.tiles_taken.item() == 0
    tokens = k.shape[2]
    lanes = out.lane_scale.view(*k.shape[:2], -1, 1, 4, 1).expand(-1, -1, -1, BLOCK_K // 8, 4, 2).flatten(2)
    assert torch.equal(lanes[..., :tokens], out.k_scale)


@pytest.mark.parametrize("tokens", [1, 63, 130, 600])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_dense(tokens, head_dim):
    check(draw(2, 2, tokens, head_dim, seed=1) + 2)


@pytest.mark.parametrize("tokens", [1, 130, 511, 512, 650, 1100])
def test_means_of_a_sample(tokens):
    k = draw(2, 2, tokens, 64, seed=1) + 2
    k[:, :, 30::128] += 100  # of many keys these are not in the sample
    check(k, sampled=True)


@pytest.mark.parametrize(("turned", "head_dim"), [(64, 64), (128, 128), (112, 128), (96, 96)])
def test_rotated(turned, head_dim):
    k = draw(2, 2, 300, head_dim, seed=1) + 2
    k[..., turned:] = 0
    key_mask = torch.rand(2, 300, generator=torch.Generator().manual_seed(2)) > 0.3
    check(k, turned=turned)
    check(torch.where(key_mask[:, None, :, None], k, torch.inf), key_mask, turned=turned)


@pytest.mark.parametrize("head_dim", [8, 72, 101, 136, 192, 200, 256])
@pytest.mark.parametrize("columns", [64, 96, 128, 192, 256])
def test_codes_that_are_wider_than_keys(head_dim, columns):
    """Each form of Hopper's kernels, of keys that lie as they are, also where V's channels alone ask for it."""
    if head_dim > columns:
        pytest.skip("no form has fewer channels than the call")
    k = draw(1, 2, 140, head_dim, seed=1) + 2
    check(k, columns=columns)
    check(k, columns=columns, turned=head_dim)


@pytest.mark.parametrize(("turned", "width"), [(64, 64), (128, 128), (112, 128), (72, 128)])
def test_signs_of_the_rotation_are_left_for_the_next_kernel(turned, width):
    v, signs = draw(1, 1, 40, 64, seed=1), torch.full((width, width), 99, dtype=torch.int8)
    maxima = torch.zeros(1, 1, 64, dtype=torch.int32)
    launch_channel_maxima(v, Packing.of(v, None, 40), None, maxima, signs, turned)
    assert torch.equal(signs[:turned, :turned].double(), rotation(turned).sign())
    assert torch.equal(maxima.view(torch.float32)[0, 0], v[0, 0].float().abs().amax(0))


@pytest.mark.parametrize("packed", [False, True])
def test_a_copy_of_values_is_left_beside_their_maxima(packed):
    v = draw(70, 2, 80, seed=1)
    keys = Packing.of(v, torch.tensor([0, 5, 5, 70], dtype=torch.int32), 65)
    if not packed:
        v = v.transpose(0, 1)[None]
        keys = Packing.of(v, None, 70)
    copy = empty_by_head(v)
    maxima = torch.zeros(keys.batch, keys.heads, 80, dtype=torch.int32)
    launch_channel_maxima(v, keys, None, maxima, copy=copy)
    assert torch.equal(copy, v)


@pytest.mark.parametrize("turned", [0, 136])
@pytest.mark.parametrize("channel", [5, 130])
@pytest.mark.parametrize("token", [70, 401])
def test_nan_in_a_key_of_two_pieces_is_in_its_scale(token, channel, turned, monkeypatch):
    """token 70 is in the sample that the mean is of, so that all keys have it; 401 is not."""
    # as on a GPU, where a maximum is the other number's; the interpreter's own is NaN
    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax)
    )
    k = draw(1, 2, 1030, 136, seed=1)
    k[0, 1, token, channel] = torch.nan
    out = launch_quantize_k(k, Packing.of(k, None, 1030), None, BLOCK_K, k_sampled=True, turned=turned)
    smoothed, _ = smooth(k.double(), sample=True)
    _, expected = quantize_tokens(smoothed, "lane", BLOCK_K)
    assert expected.isnan().any()
    assert torch.equal(out.k_scale.isnan(), expected[..., 0].isnan())


@pytest.mark.parametrize("tokens", [1, 3, 300])
def test_keys_that_are_all_alike_are_zeros_when_they_are_rotated(tokens):
    """The products of keys and of their mean are rounded apart."""
    k = (draw(2, 2, 1, 64, seed=1) + 100).expand(2, 2, tokens, 64).contiguous()
    out = launch_quantize_k(k, Packing.of(k, None, tokens), None, BLOCK_K, turned=64)
    assert not out.k_int8.any()
    assert (out.k_scale == 1).all()


@pytest.mark.parametrize(("head_dim", "unit"), [(64, 1), (72, 8), (73, 0)])
def test_rows_of_a_fused_projection(head_dim, unit):
    """Strides in eights where multiples of 8 and not of 16, ANY where of neither; of one length as of another."""
    for tokens in (140, 141):
        k = draw(1, tokens, 2, 3, head_dim, seed=1)[:, :, :, 1].transpose(1, 2)
        strided = Strided.of(k, Packing.of(k, None, tokens))
        assert strided.unit.value == unit
        assert unit == 1 or all(x % 2 == 1 and x > 1 for x in strided[1:4])
        check(k)
        check(k, turned=head_dim, columns=96)


def test_masked_keys_count_nowhere():
    k = draw(2, 2, 300, 64, seed=1) + 1
    key_mask = torch.rand(2, 300, generator=torch.Generator().manual_seed(2)) > 0.3
    key_mask[1] = False
    check(torch.where(key_mask[:, None, :, None], k, torch.inf), key_mask)
    most = torch.arange(600).expand(2, -1) != 3
    check(draw(2, 2, 600, 64, seed=1) + 2, most, sampled=True)


@pytest.mark.parametrize("sampled", [False, True])
def test_sequences_of_a_pack_are_smoothed_apart(sampled):
    lengths = [5, 0, 200, 129, 1200, 511]
    k = draw(sum(lengths), 2, 64, seed=1) + 3
    offsets = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    out = launch_quantize_k(k, Packing.of(k, offsets, max(lengths)), None, BLOCK_K, k_sampled=sampled)
    for index, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist())):
        if start == stop:
            continue
        smoothed, mean = smooth(k[start:stop].transpose(0, 1).double(), sample=sampled)
        assert torch.allclose(out.k_mean[index].double(), mean[:, 0], rtol=1e-5, atol=1e-6)
        quantized, scale = out.k_int8[start:stop].transpose(0, 1), out.k_scale[:, start:stop]
        assert_codes(quantized, scale, smoothed, "lane")
        assert_bounded(out.largest_norm.view(len(lengths), -1)[index], quantized, scale)


@pytest.mark.parametrize("tokens", [1, 300, 700])
@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("masked", [False, True])
def test_scales_of_channels(tokens, head_dim, masked):
    v = draw(2, 2, tokens, head_dim, seed=0)
    v[:, :, :, 3] = 0
    key_mask = torch.rand(2, tokens, generator=torch.Generator().manual_seed(1)) > 0.4 if masked else None
    valid = torch.ones(2, tokens, dtype=torch.bool) if key_mask is None else key_mask
    scale = scales_of_channels(torch.where(valid[:, None, :, None], v, torch.nan), key_mask)
    _, expected = quantize_tokens(torch.where(valid[:, None, :, None], v, 0).float(), "sequence", BLOCK_K)
    assert torch.equal(scale, expected[:, :, 0])


def test_a_channel_with_nan_has_a_scale_of_nan():
    v = draw(1, 1, 600, 64, seed=0)
    v[0, 0, 500, 7] = torch.nan
    scale = scales_of_channels(v)
    assert scale.isnan().nonzero().tolist() == [[0, 0, 7]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("tokens", [1, 1000, 16384, 40000])
def test_on_a_gpu(tokens, sampled):
    for turned in (0, 128):
        check(draw(1, 2, tokens, 128, seed=1) + 2, device="cuda", sampled=sampled, turned=turned)


def test_a_sequence_without_keys_has_scales():
    """The forward reads those of one block: were they NaN, so would its queries' output be."""
    k = draw(100, 2, 64, seed=1)
    keys = Packing.of(k, torch.tensor((0, 40, 40, 100), dtype=torch.int32), 60)
    lanes = launch_quantize_k(k, keys, None, BLOCK_K).lane_scale.view(2, -1, 4)
    # sequences begin at blocks 0, 1 and 2 of their own
    assert torch.equal(lanes[:, 1], torch.ones(2, 4))
    assert torch.isfinite(lanes[:, :3]).all()


def test_a_pack_without_keys_has_scales():
    k = draw(0, 2, 64, seed=1)
    out = launch_quantize_k(k, Packing.of(k, torch.zeros(3, dtype=torch.int32), 0), None, BLOCK_K)
    assert torch.equal(out.lane_scale.view(2, -1, 4)[:, :2], torch.ones(2, 2, 4))
    assert out.tiles_taken.item() == 0
