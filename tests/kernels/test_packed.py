"""Packed sequences of any skew: what is launched and allocated, and that a document's numbers are its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl

import sagebwd
from sagebwd import checks, sage_attention_varlen
from sagebwd.cache import PLANS
from sagebwd.call import Call, Saved, empty_like_rows
from sagebwd.kernels import sinks
from sagebwd.kernels.common.tile import block_in_sequence
from sagebwd.kernels.mma_sync import launch as mma_sync
from sagebwd.kernels.portable import launch as portable
from sagebwd.kernels.portable import tune
from sagebwd.kernels.runtime import device, driver, program
from sagebwd.kernels.sm90.backward import launch as hopper_backward
from sagebwd.kernels.sm90.forward import launch as hopper_forward
from sagebwd.recipe import Recipe
from tests.gpus import DEVICE, HAS_GPU, needs_hopper, on_gpu

pytestmark = on_gpu
META = torch.device("meta")
# One long among many, static shapes, all short, all alike: query heads, key heads, lengths.
SKEWS = {
    "one long": (16, 16, [16384] + [120] * 400),
    "static": (16, 4, [16084] + [0] * 509 + [200, 100]),
    "all short": (16, 4, [8] * 3000),
    "all alike": (16, 4, [2048] * 16),
    "1366": (32, 32, [32768] + [70] * 1366),
}
# What `Packing.blocks` counts by at least, and bytes of a token and head and of a sequence and head, of 128 channels.
LEAST_BLOCK, OF_TOKEN, OF_SEQUENCE = 16, 2400, 2400 * 64


class Described(NamedTuple):
    """Bytes and programs of a direction."""

    bytes: int
    programs: list[int]


def describe(monkeypatch, function: Callable, *given: object) -> Described:
    """A family's function on memory that nobody has."""
    programs: list[int] = []
    monkeypatch.setattr(program, "compiled", lambda kernel, grid, *_: programs.append(math.prod(grid)))
    made = program.Program.of(function, given)
    outputs = sum(math.prod(shape) * dtype.itemsize for shape, _, dtype in made.memory)
    return Described(outputs + made.scratch_bytes, programs)


def saved_of(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    codes = [torch.empty(x.shape, dtype=torch.int8, device=META) for x in (q, k)]
    lse, q_scale, row_max = (call.queries.per_token(META) for _ in range(3))
    k_mean = torch.empty(call.keys.batch, call.keys.heads, q.shape[-1], device=META)
    o = empty_like_rows(q, v.shape[-1])
    return Saved(o, lse, codes[0], q_scale, codes[1], call.keys.per_token(META), row_max, k_mean)


def both(monkeypatch, family: str, recipe: str, skew: str, bound: int) -> tuple[Described, Described]:
    """Forward and backward of a family, told that no sequence is longer than ``bound``."""
    heads, kv_heads, lengths = SKEWS[skew]
    q, k, v = (
        torch.empty(sum(lengths), n, 128, dtype=torch.bfloat16, device=META) for n in (heads, kv_heads, kv_heads)
    )
    offsets = torch.empty(len(lengths) + 1, dtype=torch.int32, device=META)
    call = Call.of(
        q, k, (128, 128), None, offsets, offsets, bound, bound, True, -1, -1, 0.1, Recipe.parse(recipe)
    )  # fmt: skip
    monkeypatch.setattr(device, "num_sms", lambda device: 132)
    monkeypatch.setattr(hopper_forward, "num_sms", lambda device: 132)
    monkeypatch.setattr(hopper_forward, "forward_kernel", lambda variant: None)
    for module in (tune, mma_sync):
        monkeypatch.setattr(module, "capability", lambda device: 90, raising=False)
    monkeypatch.setattr(mma_sync, "kernel_of", lambda *_: None)
    forward, backward = {
        "hopper": (hopper_forward, hopper_backward),
        "portable": (portable, portable),
        "mma_sync": (mma_sync, mma_sync),
    }[family]
    saved, form = saved_of(call, q, k, v), (128, 128)
    return (
        describe(monkeypatch, driver.forward, forward, form, call, q, k, v),
        describe(monkeypatch, driver.backward, backward, form, call, saved, saved.o, None, q, k, v),
    )


FAMILIES = [
    ("hopper", "mixed"), ("portable", "token"), ("portable", "token(dp=int8)"), ("portable", "full"),
    ("portable", "paper"), ("mma_sync", "token"),
]  # fmt: skip


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize(("family", "recipe"), FAMILIES)
def test_what_is_launched_and_allocated_follows_tokens_and_sequences(family, recipe, skew, monkeypatch):
    """Regression: `mixed` cleared 107 GiB for 128K tokens, one document of 32768 among 1366."""
    heads, kv_heads, lengths = SKEWS[skew]
    total, sequences = sum(lengths), len(lengths)
    for told in (max(lengths), 1 << 20):
        for direction in both(monkeypatch, family, recipe, skew, told):
            assert direction.bytes <= (OF_TOKEN * total + OF_SEQUENCE * sequences) * (heads + kv_heads) // 2
            blocks = total // LEAST_BLOCK + 2 * sequences
            assert max(direction.programs) <= blocks * (heads + kv_heads)


@pytest.mark.parametrize(("family", "recipe"), FAMILIES)
@pytest.mark.parametrize("kv_heads", [4, 16])
def test_tiny_documents_take_no_more_than_seven_times_their_tensors(family, recipe, kv_heads, monkeypatch):
    """Regression: 3000 of 8 tokens, each in blocks of its own, took 8.2 times, of `token` on mma.sync 12.5."""
    heads, _, lengths = SKEWS["all short"]
    monkeypatch.setitem(SKEWS, "all short", (heads, kv_heads, lengths))
    _, backward = both(monkeypatch, family, recipe, "all short", 8)
    assert backward.bytes <= 7 * sum(lengths) * 2 * 128 * 2 * (heads + kv_heads)


@pytest.mark.parametrize(("recipe", "heads"), [("token", (4, 2)), ("token(dp=int8)", (5, 5)), ("paper", (4, 2))])
def test_heads_by_parts_have_their_own_numbers(recipe, heads, monkeypatch):
    lengths = [3, 0, 7, 2, 1]
    tensors = drawn(lengths, 0, *heads, 32)
    parts, at_once = [], driver.key_heads_a_part
    monkeypatch.setattr(driver, "key_heads_a_part", lambda call: parts.append(at_once(call)) or parts[-1])
    by_parts = attend(tensors, lengths, 100, recipe, "triton")
    assert parts == [1]
    PLANS.clear()
    monkeypatch.setattr(driver, "key_heads_a_part", lambda call: call.keys.heads)
    for name, x, whole in zip(("o", "dq", "dk", "dv"), by_parts, attend(tensors, lengths, 100, recipe, "triton")):
        assert torch.equal(x, whole), name


def test_sinks_too(monkeypatch):
    heads, _, lengths = SKEWS["static"]
    total, offsets = sum(lengths), torch.empty(len(lengths) + 1, dtype=torch.int32, device=META)
    x = torch.empty(total, heads, 128, dtype=torch.bfloat16, device=META)
    lse = torch.empty(heads, total, device=META)

    def function(x: Tensor, lse: Tensor, offsets: Tensor) -> tuple[Tensor]:
        return (sinks.gradient_by_block(x, None, x, lse, x, None, 1.0, offsets, 1 << 20),)

    found = describe(monkeypatch, function, x, lse, offsets)
    blocks = heads * (total // sinks.BLOCK + len(lengths))
    assert found.programs == [blocks]
    assert found.bytes == 4 * blocks


@triton.jit(do_not_specialize=["sequences"])  # Triton 3.6 compiles it for no 1, as it does the package's kernels
def _places(offsets, sequences, blocks, found, BLOCK: tl.constexpr):
    number, sequence = block_in_sequence(blocks, 1, offsets, sequences, BLOCK, True)
    tl.store(found + 2 * tl.program_id(0), sequence)
    tl.store(found + 2 * tl.program_id(0) + 1, number)


@pytest.mark.parametrize(
    "lengths",
    [[5], [0], [0, 0, 40, 0, 16, 17, 0], [1] * 33, [16] * 32 + [100], [3, 0] * 60, [70] + [0] * 40 + [1, 2]],
    ids=lambda x: str(len(x)),
)
def test_each_block_of_each_sequence_has_one_program(lengths):
    block, offsets = 16, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)
    blocks = sum(lengths) // block + len(lengths)
    found = torch.full((blocks, 2), -1, dtype=torch.int32, device=DEVICE)
    _places[(blocks,)](offsets, len(lengths), blocks, found, BLOCK=block)
    places = [tuple(x) for x in found.tolist()]
    assert len(set(places)) == blocks
    wanted = {(i, n) for i, length in enumerate(lengths) for n in range(max(1, -(-length // block)))}
    assert wanted <= set(places)
    beyond = set(places) - wanted
    assert all(n * block >= lengths[i] for i, n in beyond)


def drawn(lengths: list[int], behind: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """q, k, v and dO with NaN behind the last offset."""
    generator = torch.Generator().manual_seed(len(lengths))
    rows = sum(lengths) + behind
    found = [torch.randn(rows, n, head_dim, generator=generator) for n in (heads, kv_heads, kv_heads, heads)]
    for x in found:
        x[sum(lengths) :] = float("nan")
    return [x.to(torch.bfloat16).to(DEVICE) for x in found]


def attend(tensors: list[Tensor], lengths: list[int], bound: int, recipe: str, impl: str) -> tuple[Tensor, ...]:
    """O and gradients."""
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)
    q, k, v = leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    settings = {"is_causal": True, "recipe": recipe, "impl": impl}
    o = sage_attention_varlen(q, k, v, offsets, offsets, bound, bound, **settings)
    return (o.detach(), *torch.autograd.grad(o, leaves, tensors[3]))


def check(
    lengths: list[int], recipe: str, impl: str, *, heads=(2, 1), head_dim=32, behind=9, bound=100_000,
    names=("o", "dq", "dk", "dv"),
) -> None:  # fmt: skip
    """Bit for bit, a document has what it has alone; told only that none is longer than ``bound``."""
    tensors = drawn(lengths, behind, *heads, head_dim)
    found = attend(tensors, lengths, bound, recipe, impl)
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    there = [i for i, length in enumerate(lengths) if length]
    for i in {there[0], there[-1], there[len(there) // 2], max(there, key=lambda i: lengths[i])}:
        rows = slice(ends[i], ends[i + 1])
        alone = attend([x[rows] for x in tensors], [lengths[i]], lengths[i], recipe, impl)
        for name, x, wanted in zip(("o", "dq", "dk", "dv"), found, alone):
            assert name not in names or torch.equal(x[rows], wanted), (i, name)


@pytest.mark.parametrize("recipe", ["token", "paper", "full", "token(dp=int8)"])
def test_a_document_s_numbers_are_its_own(recipe, monkeypatch):
    """Rows behind the last offset hold NaN, and most sequences none."""
    monkeypatch.setattr(checks, "packing_values", lambda *_: None)  # which a CPU reads, and refuses rows behind
    check([3, 0, 70, 40] + [0] * 35 + [5, 0], recipe, "triton")


MANY = {
    "one long": [2048] + [60] * 30, "one of a thousand": [70] * 600 + [4096] + [70] * 399, "all short": [8] * 3000,
    "static": [8000] + [0] * 509 + [200, 100], "chunks": [20000, 300, 9000],
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="at the size of models")
@pytest.mark.parametrize("skew", MANY)
@pytest.mark.parametrize(
    ("recipe", "impl"),
    [
        pytest.param("mixed", "hopper", marks=needs_hopper),
        ("token", "triton"),
        ("token", "mma_sync"),
        ("full", "triton"),
    ],
)
def test_a_document_s_numbers_are_its_own_at_the_size_of_models(recipe, impl, skew):
    with sagebwd.switches(deterministic=True):
        check(MANY[skew], recipe, impl, heads=(8, 2), head_dim=128)


@pytest.mark.parametrize("skew", MANY)
@pytest.mark.parametrize("head_dim", [pytest.param(dim, marks=needs_hopper) for dim in (64, 128, 256)])
def test_heads_in_turns_have_a_document_s_numbers(head_dim, skew):
    """But for dQ, whose sums come in any order; heads and key heads that are no whole groups of those in turns."""
    check(MANY[skew], "mixed", "hopper", heads=(10, 5), head_dim=head_dim, names=("o", "dk", "dv"))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="80 GB of a GPU's memory at most")
def test_sums_of_many_sequences_stay_in_their_memory():
    """Regression: of 7.2e8 numbers and more a plane began in front of the memory, in other tensors'."""
    lengths, heads = [32768] + [70] * 1366, 32
    guard = torch.full((1 << 28,), 7, dtype=torch.int32, device=DEVICE)
    check(lengths, "token", "triton", heads=(heads, heads), head_dim=128, bound=32768)
    assert bool((guard == 7).all())
