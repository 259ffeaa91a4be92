"""The sm_90a forward against softmax attention in FP32 on the codes and scales that it reads, on a Hopper GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sagebwd.call import Call, Packing
from sagebwd.kernels.common.quantize import launch_quantize
from sagebwd.kernels.runtime.device import capability
from sagebwd.kernels.sm90.forward import compile as sm90
from sagebwd.kernels.sm90.forward.launch import Written, launch_forward
from sagebwd.kernels.sm90.operands.masked_values import launch_masked_values
from sagebwd.kernels.sm90.operands.quantize_k import QuantizedK, launch_quantize_k
from sagebwd.masks.band import Band
from sagebwd.numerics import rotation_sizes
from sagebwd.recipe import Recipe
from sagebwd.reference.quantize import quantize_tokens
from sagebwd.reference.rotation import rotated

# Relative error of P and O rounded to 16 bit, P relative to a maximum up to 8 octaves old.
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Case:
    """A call; lengths make it a packed one."""

    name: str
    head_dim: int = 64
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    tokens: int = 300
    kv_tokens: int = 300
    lengths: tuple[tuple[int, int], ...] = ()
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    masked: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.bfloat16
    factor: float = 1.0  # of q and k
    strided: bool = False
    turned: int = 0  # the head_dim whose rotation Q and K get, filled up with zeros
    value_dim: int = 0  # of V if not head_dim

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        generator = torch.Generator("cuda").manual_seed(seed)
        tokens, kv_tokens = self.tokens, self.kv_tokens
        if self.lengths:
            tokens, kv_tokens = (sum(x) for x in zip(*self.lengths))

        def draw(heads: int, count: int, width: int = self.head_dim) -> Tensor:
            shape = (count, heads, width) if self.lengths else (self.batch, heads, count, width)
            if self.strided and not self.lengths:
                shape = (self.batch, count, heads, width)
            x = torch.randn(shape, generator=generator, device="cuda").to(self.dtype)
            return x.transpose(1, 2) if self.strided and not self.lengths else x

        q, k, v = draw(self.heads, tokens), draw(self.kv_heads, kv_tokens), draw(self.kv_heads, kv_tokens, self.values)
        if self.turned:
            q[..., self.turned :] = k[..., self.turned :] = 0
        key_mask = None
        if self.masked:
            key_mask = torch.rand(self.batch, kv_tokens, generator=generator, device="cuda") < 0.5
            key_mask[-1, : kv_tokens // 2] = False
        return q * self.factor, k * self.factor, v, key_mask

    @property
    def values(self) -> int:
        return self.value_dim or self.head_dim

    def packings(self) -> tuple[Packing, Packing]:
        def of(side: int, heads: int, tokens: int) -> Packing:
            if not self.lengths:
                return Packing(self.batch, heads, tokens, tokens, None)
            lengths = [x[side] for x in self.lengths]
            ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
            return Packing(len(lengths), heads, max(lengths), sum(lengths), ends)

        return of(0, self.heads, self.tokens), of(1, self.kv_heads, self.kv_tokens)

    def quantized(self, k: Tensor, key_mask: Tensor | None = None) -> QuantizedK:
        return launch_quantize_k(k, self.packings()[1], key_mask, 128, k_sampled=True, turned=self.turned)

    def run(self, q: Tensor, quantized: QuantizedK, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Written]:
        """O, poisoned before, and the rest."""
        call = Call(
            Recipe.named("mixed"), self.softmax_scale(), v.dtype, v.device, self.head_dim, self.values,
            *self.packings(), key_mask, self.is_causal, *self.window, rotation=rotation_sizes(self.turned),
        )  # fmt: skip
        o = torch.full((*q.shape[:-1], self.values), math.nan, dtype=v.dtype, device=v.device)
        masked_v = None if key_mask is None else launch_masked_values(v, call.keys, key_mask)
        return o, launch_forward(call, q, quantized, v, o, masked_v)

    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def expected(
        self, written: Written, quantized: QuantizedK, v: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """o, lse and row maxima, sequence by sequence."""
        parts = []
        begin_q = begin_k = 0
        for length_q, length_k in self.lengths or [(self.tokens, self.kv_tokens)]:
            rows, columns = slice(begin_q, begin_q + length_q), slice(begin_k, begin_k + length_k)
            begin_q, begin_k = begin_q + length_q, begin_k + length_k
            if self.lengths:
                q, k, values = (
                    x[at].transpose(0, 1)[None].float()
                    for x, at in ((written.q_int8, rows), (quantized.k_int8, columns), (v, columns))
                )
                q, k = q * written.q_scale[:, rows, None], k * quantized.k_scale[:, columns, None]
            else:
                q, k, values = written.q_int8.float(), quantized.k_int8.float(), v.float()
                q, k = q * written.q_scale[..., None], k * quantized.k_scale[..., None]
            k, values = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, values))
            s = q.double() @ k.double().mT * self.softmax_scale()
            offset = length_k - length_q if self.lengths else 0
            band = Band.of(self.is_causal, *self.window, offset)
            keep = band.mask(torch.arange(length_q, device="cuda"), torch.arange(length_k, device="cuda"))
            if keep is not None:
                s = s.masked_fill(~keep, -math.inf)
            if key_mask is not None:
                s = s.masked_fill(~key_mask[:, None, None], -math.inf)
            top = s.amax(-1) if length_k else s.new_full(s.shape[:-1], -math.inf)
            p = torch.exp(s - top.clamp(min=-1e300)[..., None])
            total = p.sum(-1, keepdim=True)
            o = torch.where(total == 0, 0, p @ values.double() / total)
            parts.append((o, top + total.squeeze(-1).log(), top * LOG2_E))
        o, lse, top = (torch.cat(x, 2) for x in zip(*parts))
        return (o[0].transpose(0, 1), lse[0], top[0]) if self.lengths else (o, lse, top)

    def check_row_max(self, row_max: Tensor, lse: Tensor, expected: Tensor) -> None:
        """Assert row maxima: where blocks take none (`Variant.bounded`), exact if a key has half of a row's weight."""
        dominated = expected - lse * LOG2_E > -1
        exact = torch.ones_like(dominated) if self.dtype == torch.float16 or self.masked else dominated
        torch.testing.assert_close(row_max[exact].double(), expected[exact], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(row_max.double(), expected, rtol=1e-5, atol=0.015)

    def check(self, seed: int = 0) -> float:
        """The error of O, having asserted it and those of lse and the row maxima."""
        q, k, v, key_mask = self.inputs(seed)
        quantized = self.quantized(k, key_mask)
        o, written = self.run(q, quantized, v, key_mask)
        lse, row_max = written.lse, written.row_max
        expected = self.expected(written, quantized, v, key_mask)
        unseen = torch.isneginf(expected[1])
        assert torch.equal(torch.isneginf(lse), unseen)
        assert torch.equal(torch.isneginf(row_max), unseen)
        o_rows, o_expected = (x.transpose(0, 1) if self.lengths else x for x in (o.double(), expected[0]))
        assert not o_rows[unseen].any()
        seen = ~unseen
        if not seen.any():
            return 0.0
        error = ((o_rows - o_expected).norm() / o_expected.norm()).item()
        assert error < LIMITS[self.dtype], f"{self.name}: O is off by {error}"
        torch.testing.assert_close(lse[seen].double(), expected[1][seen], rtol=1e-5, atol=1e-4)
        self.check_row_max(row_max[seen], expected[1][seen], expected[2][seen])
        return error


CASES = [
    Case("one query", tokens=1),
    Case("one key", tokens=65, kv_tokens=1),
    Case("odd", tokens=1000, kv_tokens=17, batch=2),
    Case("head_dim 128, odd", head_dim=128, tokens=63, kv_tokens=129),
    Case("head_dim 128", head_dim=128, tokens=1000, kv_tokens=1000, batch=2, kv_heads=1),
    Case("head_dim 96", head_dim=96, tokens=257, kv_tokens=385),
    Case("causal", tokens=1000, kv_tokens=1000, is_causal=True),
    Case("causal, more queries", tokens=700, kv_tokens=300, is_causal=True),
    Case("causal, more keys", head_dim=128, tokens=130, kv_tokens=900, is_causal=True),
    Case("head_dim 96, causal", head_dim=96, tokens=513, kv_tokens=513, is_causal=True),
    Case("window", tokens=900, kv_tokens=900, window=(100, 30)),
    Case("window, head_dim 128", head_dim=128, tokens=900, kv_tokens=700, window=(200, 0)),
    Case("window left", tokens=900, kv_tokens=900, window=(129, -1)),
    Case("window right", tokens=900, kv_tokens=900, window=(-1, 5)),
    Case("window past the keys", tokens=900, kv_tokens=200, window=(64, 64)),
    Case("causal window", head_dim=128, tokens=1000, kv_tokens=1000, is_causal=True, window=(300, -1)),
    Case("grouped heads", head_dim=128, batch=2, heads=8, kv_heads=2, tokens=400, kv_tokens=400, is_causal=True),
    Case("key mask", batch=3, tokens=333, kv_tokens=777, masked=True),
    Case("key mask, causal", head_dim=128, batch=2, tokens=333, kv_tokens=333, masked=True, is_causal=True),
    Case("packed", lengths=((1, 1), (130, 257), (300, 64), (64, 128)), heads=4),
    Case("packed, empty", lengths=((0, 40), (40, 0), (65, 129)), heads=4, kv_heads=2),
    Case("packed, causal", lengths=((100, 300), (300, 100), (1, 77), (513, 513)), is_causal=True),
    Case("packed, window", head_dim=128, lengths=((100, 300), (300, 100), (65, 65)), window=(64, 16), kv_heads=1),
    Case("negative scale", tokens=500, kv_tokens=500, scale=-0.2, is_causal=True),
    Case("scale 0", tokens=100, kv_tokens=500, scale=0.0),
    Case("float16", tokens=700, kv_tokens=700, dtype=torch.float16, is_causal=True),
    Case("float16, head_dim 128", head_dim=128, tokens=700, kv_tokens=700, dtype=torch.float16, factor=4),
    Case("sharp", tokens=2000, kv_tokens=2000, factor=10),
    Case("sharp, head_dim 128", head_dim=128, tokens=2000, kv_tokens=2000, factor=6),
    Case("strided", head_dim=128, batch=2, tokens=500, kv_tokens=500, heads=4, kv_heads=4, strided=True),
]  # fmt: skip


ROTATED = [
    Case("rotated", turned=64, tokens=1000, kv_tokens=1000, is_causal=True),
    Case("rotated, one query", turned=64, tokens=1),
    Case("rotated, head_dim 48", turned=48, tokens=333, kv_tokens=500),
    Case("rotated, head_dim 128", head_dim=128, turned=128, tokens=1000, kv_tokens=1000, batch=2, kv_heads=1),
    Case("rotated, head_dim 112", head_dim=128, turned=112, tokens=700, kv_tokens=700, is_causal=True),
    Case("rotated, head_dim 100", head_dim=128, turned=100, tokens=300, kv_tokens=300),
    Case("rotated, head_dim 120", head_dim=128, turned=120, tokens=320, kv_tokens=320),
    Case("rotated, key mask", head_dim=128, turned=112, batch=2, tokens=333, kv_tokens=777, masked=True),
    Case("rotated, packed", turned=64, lengths=((100, 300), (0, 40), (1, 77), (513, 513)), is_causal=True),
    Case("rotated, packed, head_dim 128", head_dim=128, turned=128, lengths=((100, 300), (65, 65)), window=(64, 16)),
    Case("rotated, float16", head_dim=128, turned=128, tokens=700, kv_tokens=700, dtype=torch.float16, factor=4),
    Case("rotated, strided", turned=64, batch=2, tokens=500, kv_tokens=500, heads=4, kv_heads=4, strided=True),
]  # fmt: skip

# What tiles of other widths have to do with: ends of blocks of keys and of their scales, every mask, either type.
FORMS = [
    Case("one query", tokens=1),
    Case("odd", tokens=1000, kv_tokens=17, batch=2),
    Case("groups", batch=2, heads=8, kv_heads=2, tokens=400, kv_tokens=400, is_causal=True),
    Case("ragged, no mask", tokens=63, kv_tokens=1025, kv_heads=1),
    Case("causal, more keys", tokens=130, kv_tokens=900, is_causal=True),
    Case("causal, more queries", tokens=700, kv_tokens=300, is_causal=True),
    Case("causal window", tokens=1000, kv_tokens=1000, is_causal=True, window=(300, -1)),
    Case("window", tokens=900, kv_tokens=700, window=(100, 30)),
    Case("key mask", batch=3, tokens=333, kv_tokens=777, masked=True),
    Case("packed", lengths=((1, 1), (0, 40), (40, 0), (130, 257), (300, 64)), heads=4, is_causal=True),
    Case("packed, window", lengths=((100, 300), (300, 100), (65, 65)), window=(64, 16), kv_heads=1),
    Case("float16", tokens=700, kv_tokens=700, dtype=torch.float16, is_causal=True),
    Case("negative scale", tokens=500, kv_tokens=500, scale=-0.1, is_causal=True),
    Case("sharp", tokens=2000, kv_tokens=2000, factor=4),
    Case("strided", batch=2, tokens=500, kv_tokens=500, heads=4, kv_heads=4, strided=True),
]
OTHERS = [
    replace(case, name=f"{case.name}, {d}/{e}{', rotated' * (turned > 0)}", head_dim=d, value_dim=e, turned=turned)
    for d, e in ((96, 96), (192, 128), (192, 192), (256, 256))
    for turned in (0, d)
    for case in FORMS
]


def _why_not() -> str | None:
    if not torch.cuda.is_available() or capability(torch.device("cuda")) != 90:
        return "needs a GPU of compute capability 9.0"
    return sm90.unavailable()


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))]


@pytest.mark.parametrize("case", CASES + ROTATED + OTHERS, ids=lambda case: case.name)
def test_is_attention_on_its_codes(case):
    case.check()


def test_a_rising_maximum_rescales_what_was_added_up():
    # key blocks are taken from the last to the first: each has larger scores than those before it
    case = Case("rising", tokens=200, kv_tokens=1024, factor=1)
    q, k, v, _ = case.inputs(1)
    q[...] = q[:, :, :1]
    k += torch.linspace(8, 0, 1024, device="cuda", dtype=k.dtype)[:, None] * q[:, :1, :1]
    quantized = case.quantized(k)
    o, written = case.run(q, quantized, v, None)
    lse, row_max = written.lse, written.row_max
    expected = case.expected(written, quantized, v, None)
    assert expected[2].max() > 30
    assert (o.double() - expected[0]).norm() / expected[0].norm() < LIMITS[torch.bfloat16]
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-4)
    case.check_row_max(row_max, expected[1], expected[2])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_key_with_most_of_the_weight_is_met_last(head_dim, is_causal):
    # of norms so small that no maxima are taken, though P grows by 20 octaves and more: rows of fixed norms but for a
    # part of each query along the first key, so that whatever is drawn no score is larger than 2.5 sqrt(D + 36)
    case = Case("sink", head_dim=head_dim, tokens=1500, kv_tokens=1500, is_causal=is_causal)
    q, k, v, _ = case.inputs(3)
    q, k = (head_dim**0.5 * torch.nn.functional.normalize(x.float(), dim=-1) for x in (q, k))
    generator = torch.Generator().manual_seed(3)
    direction = torch.randn(1, case.heads, 1, head_dim, generator=generator).to(q.device)
    direction = torch.nn.functional.normalize(direction, dim=-1)
    along = 6 * torch.rand(case.tokens, 1, generator=generator).to(q.device)
    q = (q + (along - (q * direction).sum(-1, keepdim=True)) * direction).bfloat16()
    k[:, :, :1] = 2.5 * head_dim**0.5 * direction
    k = k.bfloat16()
    quantized = case.quantized(k)
    largest = q.float().norm(dim=-1).amax() * quantized.largest_norm.max() / head_dim**0.5 * LOG2_E
    assert largest < 58
    o, written = case.run(q, quantized, v, None)
    expected = case.expected(written, quantized, v, None)
    share = torch.exp2(expected[2] - expected[1] * LOG2_E)
    assert share.max() > 0.99
    assert share.min() < 0.5
    assert (o.double() - expected[0]).norm() / expected[0].norm() < LIMITS[torch.bfloat16]
    torch.testing.assert_close(written.lse.double(), expected[1], rtol=1e-5, atol=1e-4)
    case.check_row_max(written.row_max, expected[1], expected[2])
    got = torch.exp2(written.row_max - written.lse * LOG2_E).double()
    torch.testing.assert_close((1 - got)[share > 0.5], (1 - share)[share > 0.5], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(("head_dim", "turned"), [(64, 0), (128, 0), (64, 64), (128, 112)])
def test_nan_in_a_query_is_nan_in_its_row_alone(head_dim, turned):
    case = Case("nan", head_dim=head_dim, tokens=500, kv_tokens=500, is_causal=True, turned=turned)
    q, k, v, _ = case.inputs(2)
    q[0, 1, 321, 5] = math.nan
    o, written = case.run(q, case.quantized(k), v, None)
    wrong = torch.isnan(o.float()).any(-1)
    assert wrong[0, 1, 321]
    assert torch.isnan(written.lse[0, 1, 321])
    assert wrong.sum() == 1


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_nan_of_a_masked_key_stays_there(head_dim):
    """Few keys are masked, so that most blocks of V are loaded as they lie."""
    case = Case("masked nan", head_dim=head_dim, tokens=200, kv_tokens=1500, heads=4)
    q, k, v, _ = case.inputs(5)
    key_mask = torch.ones(1, 1500, dtype=torch.bool, device="cuda")
    key_mask[:, [383, 384, 800, 1499]] = False
    quantized, kept = case.quantized(k, key_mask), v.masked_fill(~key_mask[:, None, :, None], 0)
    o, written = case.run(q, quantized, v.masked_fill(~key_mask[:, None, :, None], math.nan), key_mask)
    again, _ = case.run(q, quantized, kept, key_mask)
    assert torch.equal(o, again)
    expected = case.expected(written, quantized, kept, key_mask)[0]
    assert (o.double() - expected).norm() / expected.norm() < LIMITS[torch.bfloat16]


def test_a_packed_neighbours_nan_stays_there():
    case = Case("packed nan", lengths=((70, 70), (90, 90)))
    q, k, v, _ = case.inputs(3)
    v[70:] = math.nan
    o, _ = case.run(q, case.quantized(k), v, None)
    assert torch.isfinite(o[:70].float()).all()
    assert torch.isnan(o[70:].float()).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_repeat_runs_are_identical(head_dim):
    case = Case("repeat", head_dim=head_dim, heads=16, kv_heads=16, tokens=2048, kv_tokens=2048, is_causal=True)
    q, k, v, _ = case.inputs(4)
    quantized = case.quantized(k)
    o, first = case.run(q, quantized, v, None)
    for _ in range(5):
        again, written = case.run(q, quantized, v, None)
        assert all(map(torch.equal, (again, *written), (o, *first)))


def test_runs_in_a_cuda_graph():
    case = Case("graph", tokens=500, kv_tokens=500)
    q, k, v, _ = case.inputs(5)
    quantized = case.quantized(k)
    expected = case.run(q, quantized, v, None)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = case.run(q, quantized, v, None)[0]
    o.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_codes_of_queries_are_those_of_the_pass(case):
    """Bit for bit."""
    q, k, v, key_mask = case.inputs(3)
    expected = launch_quantize(q, case.packings()[0], "token", 64, codes=True)
    _, written = case.run(q, case.quantized(k, key_mask), v, key_mask)
    assert torch.equal(written.q_int8, expected.codes)
    assert torch.equal(written.q_scale, expected.token_scale)


@pytest.mark.parametrize("case", ROTATED, ids=lambda case: case.name)
def test_codes_of_rotated_queries(case):
    """Equal but for a few ties, which FP32 rounds another way than FP64."""
    q, k, v, key_mask = case.inputs(3)
    rows = torch.cat([rotated(q[..., : case.turned].double()), q[..., case.turned :].double()], -1)
    rows = rows.transpose(0, 1) if case.lengths else rows
    quantized, scale = quantize_tokens(rows, "token", 64)
    _, written = case.run(q, case.quantized(k, key_mask), v, key_mask)
    found = written.q_int8.transpose(0, 1) if case.lengths else written.q_int8
    torch.testing.assert_close(written.q_scale.double(), scale[..., 0], rtol=1e-5, atol=0)
    difference = (found.double() - quantized).abs()
    assert difference.max() <= 1
    assert difference.mean() <= 1e-3
    assert not found[..., case.turned :].any()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_tiles_than_programs(head_dim):
    """Each takes many, of sequences of all lengths, most of them shorter than the longest."""
    lengths = tuple((n, n) for n in (1500, 1, 64, 700, 129, 5, 0, 1000) * 3)
    Case("many", head_dim=head_dim, heads=8, lengths=lengths, is_causal=True).check()
