"""Passes of mma.sync's kernels: beside Triton's, or FP64, on a GPU or by emulation on a CPU."""

import dataclasses

import pytest
import torch

from sagebwd.call import Call, Saved
from sagebwd.recipe import Recipe
from sagebwd.reference.rotation import rotated
from tests.attention_case import AttentionCase
from tests.gpus import DEVICE, HAS_GPU, on_gpu
from tests.kernels import emulated_cuda

pytest.importorskip("triton")
from sagebwd.kernels.common.means import launch_statistics
from sagebwd.kernels.common.preprocess_do import launch_preprocess_do, row_values_of
from sagebwd.kernels.common.quantize import launch_quantize
from sagebwd.kernels.mma_sync import launch
from sagebwd.kernels.mma_sync.variant import (
    BACKWARD,
    Variant,
    finish_variant,
    quantize_variant,
    row_values_variant,
    variant_of,
)
from sagebwd.kernels.runtime import nvrtc

CODES = {
    "128": AttentionCase(batch=2, tokens_q=70, tokens_k=200, head_dim=128),
    "64-fp16": AttentionCase(tokens_q=300, tokens_k=140, head_dim=64, dtype=torch.float16),
    "holes": AttentionCase(batch=2, tokens_q=1, tokens_k=140, head_dim=64, masked=True),
    "few": AttentionCase(batch=2, tokens_q=1, tokens_k=140, head_dim=128, masked=True, every=11),
    "packed": AttentionCase(lengths_q=[30, 0, 70], lengths_k=[20, 9, 140], head_dim=64),
    "as-it-is": AttentionCase(recipe="token(rotate=False)", tokens_q=20, tokens_k=20, head_dim=128),
}


ARCH = 89
if HAS_GPU:
    ARCH = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]


def kernel_of(asked: Variant) -> object:
    """A variant compiled, or emulated."""
    return nvrtc.kernel_of(asked.source, ARCH) if HAS_GPU else emulated_cuda.EmulatedKernel(asked.source)


def codes_of(call: Call, inputs: tuple, first_keys: torch.Tensor | None) -> launch.Operands:
    """Codes by the kernel of q, k and v and the means of these."""
    settings = {"half": inputs[0].dtype == torch.float16, "first_keys": call.recipe.first_keys, "turned": call.turned}
    return launch.quantize(call, kernel_of(quantize_variant(call.head_dim, **settings)), *inputs, first_keys)


@pytest.mark.skipif(emulated_cuda.COMPILER is None and not HAS_GPU, reason="no C++ compiler")
@pytest.mark.parametrize("count", [0, 16])
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("on", [pytest.param(DEVICE, marks=on_gpu)])
def test_codes(name, count, on):
    """Those of Triton's passes but for what FP32 sums of the rotation round; their scales by pairs; keys apart."""
    case, magic = CODES[name], 12582912.0
    recipe = Recipe.parse(case.recipe).replace(first_keys=count)
    case = dataclasses.replace(case, device=on, recipe=str(recipe))
    q, k, v, *_ = case.inputs()
    call = case.call(q, k)
    keys, head_dim = call.keys, call.head_dim
    k_mean, v_mean, _, first_keys = launch_statistics(recipe, k, v, keys, call.key_mask)
    made = codes_of(call, (q, k, v, k_mean, v_mean), first_keys)
    rows = {"q": (q, call.queries, None, None), "k": (k, keys, k_mean, call.key_mask)}
    for which, (x, packing, mean, mask) in rows.items():
        expected = launch_quantize(x, packing, "token", 64, mean, mask, codes=True, turned=call.turned)
        codes, scale = (made.q_int8, made.q_scale) if which == "q" else (made.k_int8, made.k_scale)
        torch.testing.assert_close(scale, expected.token_scale, rtol=1e-5, atol=0)
        apart = (codes.int() - expected.codes.int()).abs()
        assert apart.max() <= 1
        assert apart.float().mean() < 1e-3
    expected = launch_quantize(v, keys, "channel", 128, v_mean, call.key_mask, transposed=True, column_sum=True)
    lengths = case.lengths_k or [case.tokens_k] * case.batch
    at = 0  # the first block of a sequence, among its heads'
    for batch, length in enumerate(lengths):
        number = torch.arange(length, device=on)
        seen = number >= 0 if call.key_mask is None else call.key_mask[batch]
        their = number[seen][:count]
        seen = seen & (number > (their[-1] if len(their) == count > 0 else length if count else -1))
        for head in range(keys.heads):
            z = head if call.packed else batch * keys.heads + head
            begin = sum(lengths[:batch]) if call.packed else 0
            at = begin // 128 + batch if call.packed else 0
            blocks = slice(at, at + -(-length // 128))
            v_codes, of_k, of_v = made.values[z, blocks].split([128 * head_dim, 1024, 8 * head_dim], 1)
            of_k, of_v = (x.contiguous().view(torch.float32) for x in (of_k, of_v))
            scale, lacking = (x.flatten() for x in of_k.view(-1, 64, 2, 2).unbind(2))
            of_keys = (made.k_scale[head, begin:] if call.packed else made.k_scale[batch, head])[:length]
            assert torch.equal(scale[:length], torch.where(seen, of_keys, 0.0))
            assert torch.equal(lacking[:length], torch.where(seen, of_keys * -magic, -torch.inf))
            assert (lacking[length:] == -torch.inf).all()
            assert (scale[length:] == 0).all()
            scale, lacking = (x.flatten(1) for x in of_v.view(-1, head_dim // 2, 2, 2).unbind(2))
            assert torch.equal(scale, expected.block_scale[z, blocks])
            assert torch.equal(lacking, (expected.column_sum[z, blocks] - magic) * scale)
            width = keys.blocks(128) * 128
            others = expected.transposed.flatten()[z * head_dim * width :][: head_dim * width].view(head_dim, -1, 128)
            assert torch.equal(v_codes.view(-1, head_dim, 128), others[:, blocks].transpose(0, 1))
            if count:
                values = (v[begin:, head] if call.packed else v[batch, head])[their].float() - v_mean[batch, head]
                found = made.first_values[batch, head]
                # a thread's four tokens of a product, 2 t, 2 t + 1 and 8 more, lie side by side
                found = found.view(head_dim, 4, 2, 2).permute(0, 2, 1, 3).reshape(head_dim, 16).T
                assert (found[len(their) :] == 0).all()
                assert torch.equal(found[: len(their)], values.to(v.dtype))


@pytest.mark.skipif(emulated_cuda.COMPILER is None and not HAS_GPU, reason="no C++ compiler")
@pytest.mark.parametrize("head_dim", [8, 33, 67, 72, 96, 126])
@pytest.mark.parametrize("on", [pytest.param(DEVICE, marks=on_gpu)])
def test_widths_of_several_blocks_of_the_rotation(head_dim, on):
    """Codes times scales are rows less the mean, rotated, but for half a scale; channels filled up have codes 0."""
    width = 64 if head_dim <= 64 else 128
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 40, head_dim, generator=generator).bfloat16() for _ in range(3))
    mean = k.float().mean(2)
    call = AttentionCase(tokens_q=40, tokens_k=40, heads=1, head_dim=head_dim, device=on).call(q.to(on), k.to(on))
    filled = [torch.nn.functional.pad(x, (0, width - head_dim)).to(on) for x in (q, k, v, mean)]
    asked = quantize_variant(width, half=False, first_keys=0, turned=head_dim)
    made = launch.quantize(call._replace(head_dim=width), kernel_of(asked), *filled, None, None)
    for codes, scale, x in (
        (made.q_int8, made.q_scale, q.double()),
        (made.k_int8, made.k_scale, k.double() - mean.double()[:, :, None]),
    ):
        found, step = (codes.double() * scale.double()[..., None]).cpu(), scale.double()[..., None].cpu()
        assert ((found[..., :head_dim] - rotated(x)).abs() <= 0.501 * step).all()
        assert not codes[..., head_dim:].any()
        assert (codes.abs().amax(-1) == 127).all()


@pytest.mark.skipif(emulated_cuda.COMPILER is None and not HAS_GPU, reason="no C++ compiler")
@pytest.mark.parametrize("on", [pytest.param(DEVICE, marks=on_gpu)])
def test_keys_that_are_all_alike_have_codes_of_zero(on):
    """But for one that is not: of others rounding alone is left."""
    q, k, v = (torch.randn(1, 1, 1, 128).bfloat16().expand(1, 1, 300, 128).contiguous().to(on) for _ in range(3))
    k[0, 0, 17] += 1
    mean = k[:, :, :1].float()[:, :, 0]
    call = AttentionCase(tokens_q=300, tokens_k=300, heads=1, head_dim=128, device=on).call(q, k)
    made = codes_of(call, (q, k, v, mean, None), None)
    assert made.k_int8[0, 0].ne(0).any(-1).nonzero().tolist() == [[17]]
    assert made.k_scale[0, 0, :17].eq(1).all()


@pytest.mark.skipif(emulated_cuda.COMPILER is None and not HAS_GPU, reason="no C++ compiler")
@pytest.mark.parametrize("lost", [torch.nan, torch.inf])
@pytest.mark.parametrize("on", [pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="emulated"))])
def test_what_is_not_finite_makes_nan_of_its_scale(lost, on):
    case = AttentionCase(tokens_q=9, tokens_k=140, head_dim=64, device=on)
    q, k, v, *_ = case.inputs()
    q[0, 0, 4, 7] = k[0, 0, 5, 7] = v[0, 0, 130, 7] = lost
    made = codes_of(case.call(q, k), (q, k, v, None, None), None)
    assert made.q_scale[0].isnan().nonzero().tolist() == [[0, 4]]
    assert made.k_scale[0].isnan().nonzero().tolist() == [[0, 5]]
    scales = made.values[..., 128 * 64 + 1024 :].contiguous().view(torch.float32)
    assert scales.view(2, 32, 2, 2).isnan().nonzero().tolist() == [[1, 3, 0, 1], [1, 3, 1, 1]]


def rows_of_queries(case: AttentionCase) -> tuple[Call, Saved, torch.Tensor, torch.Tensor | None]:
    """A call, what its forward would leave of queries, dO and dlse, drawn."""
    q, k, _, do, dlse = case.inputs()
    call = case.call(q, k)
    g = torch.Generator().manual_seed(1)
    lse, scale = (call.queries.per_token(q.device) for _ in range(2))
    lse.copy_(torch.randn(lse.shape, generator=g))
    lse.flatten()[2] = -torch.inf
    scale.copy_(torch.rand(scale.shape, generator=g))
    codes = torch.randint(-127, 128, q.shape, generator=g, dtype=torch.int8).to(q.device)
    return call, Saved(q.flip(-1).contiguous(), lse, codes, scale, None, None, None, None), do, dlse


ROWS = {
    "packed-dlse": AttentionCase(lengths_q=[30, 0, 70], lengths_k=[5, 5, 5], head_dim=128, with_dlse=True),
    "fp16": AttentionCase(tokens_q=100, tokens_k=5, head_dim=128, dtype=torch.float16),
}


@pytest.mark.skipif(emulated_cuda.COMPILER is None and not HAS_GPU, reason="no C++ compiler")
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("on", [pytest.param(DEVICE, marks=on_gpu)])
def test_values_and_codes_of_queries(name, on):
    """Those of Triton's pass; a block of zeros has scale 0."""
    call, saved, do, dlse = rows_of_queries(dataclasses.replace(ROWS[name], device=on))
    if not call.packed:
        do[:, :, 64:] = 0
    values, scale, do_t, q_t, _ = launch_preprocess_do(call, saved, do, dlse, row_values_of(call, do.device))
    half = do.dtype == torch.float16
    kernel = kernel_of(row_values_variant(128, half=half, int8_dp=False, turned=0))
    made = launch.row_values(call, kernel, saved, do, dlse, None)
    blocks = [0, 2, 3] if call.packed else [0, 1]  # the third sequence begins at 30 // 64 + 2
    width = made.values.shape[1] * 64
    at = torch.cat([torch.arange(64) + 64 * block for block in blocks]).to(on)
    torch.testing.assert_close(made.values[:, blocks], values.view_as(made.values)[:, blocks], rtol=1e-5, atol=1e-5)
    assert torch.equal(made.do_scale[:, blocks[0]], scale.view_as(made.do_scale)[:, blocks[0]])
    if not call.packed:
        assert (made.do_scale[:, 1] == 0).all()
    for found, expected in ((made.do_t, do_t), (made.q_t, q_t)):
        found, expected = (x.view(-1, 128, width)[:, :, at] for x in (found, expected))
        assert torch.equal(found, expected)


@pytest.mark.skipif(emulated_cuda.COMPILER is None and not HAS_GPU, reason="no C++ compiler")
@pytest.mark.parametrize(("recipe", "adds_four"), [("token", False), ("token", True), ("token(rotate=False)", False)])
@pytest.mark.parametrize("on", [pytest.param(DEVICE, marks=on_gpu)])
def test_dq_from_sums(recipe, adds_four, on):
    case = AttentionCase(recipe=recipe, tokens_q=70, tokens_k=5, head_dim=128, dtype=torch.float16, device=on)
    q, k, *_ = case.inputs()
    call = case.call(q, k)
    z, blocks = call.queries.heads_in_all, 2
    sums = torch.randn(z, blocks * 64, 128, generator=torch.Generator().manual_seed(0))
    if adds_four:  # row 16 m + 8 h + g, channel 16 n + 8 e + 2 t + b
        given = sums.view(z, blocks, 4, 2, 8, 8, 2, 4, 2).permute(0, 1, 2, 5, 3, 4, 7, 6, 8)
    else:  # channel 8 n + 2 t + b
        given = sums.view(z, blocks, 4, 2, 8, 16, 4, 2).permute(0, 1, 2, 5, 3, 7, 4, 6)
    backward = variant_of(BACKWARD, 128, ARCH, half=True, turned=call.turned)._replace(adds_four=adds_four)
    dq = torch.full_like(q, torch.nan)
    launch.finish(call, kernel_of(finish_variant(backward)), given.contiguous().to(on), dq)
    expected = rotated(sums.double()) if call.turned else sums.double()
    torch.testing.assert_close(dq.cpu().double().view(z, 70, 128), expected[:, :70], atol=2e-3, rtol=2e-3)
