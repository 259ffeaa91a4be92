"""Masks of elements on Hopper's kernels against the recipe emulator, on a GPU of compute capability 9.0."""

import dataclasses

import pytest
import torch

from tests.attention_case import AttentionCase
from tests.gpus import needs_hopper

pytest.importorskip("triton")
from sagebwd import read_block_mask, sage_attention
from sagebwd.block_masks import teacher_forcing
from sagebwd.kernels.masks import work_splits
from sagebwd.kernels.sm90.backward.launch import prepare
from sagebwd.kernels.sm90.longest_first import last_heads
from sagebwd.kernels.sm90.widths import FORMS

pytestmark = needs_hopper

CALLS = {
    "bool-all-gqa": AttentionCase(mask="bool-all", batch=2, heads=4, kv_heads=2, tokens_q=300, tokens_k=500),
    "bool-rows": AttentionCase(mask="bool-rows", heads=2, kv_heads=2, tokens_q=200, tokens_k=260),
    "bool-columns": AttentionCase(mask="bool-columns", heads=2, kv_heads=1, tokens_q=130, tokens_k=40),
    "bool-heads-causal": AttentionCase(mask="bool-heads", tokens_q=700, tokens_k=700, is_causal=True),
    "bool-batch-window": AttentionCase(mask="bool-batch", batch=2, tokens_q=450, tokens_k=400, window=(160, 20)),
    "bool-matrix-key-mask": AttentionCase(mask="bool-matrix", batch=2, masked=True, tokens_q=260, tokens_k=390),
    "dlse": AttentionCase(mask="bool-matrix", tokens_q=200, tokens_k=200, with_dlse=True),
    "one-token": AttentionCase(mask="bool-none", tokens_q=1, tokens_k=1),
    "document": AttentionCase(mask="document", tokens_q=1270, tokens_k=1270, heads=4, kv_heads=2),
    "documents-whole": AttentionCase(mask="document", tokens_q=1536, tokens_k=1536, heads=2, kv_heads=1),
    "prefix-batch": AttentionCase(mask="prefix", batch=2, tokens_q=570, tokens_k=740, masked=True),
    "chunked": AttentionCase(mask="chunked", tokens_q=830, tokens_k=830, heads=2, kv_heads=2),
    "sinks-heads": AttentionCase(mask="sinks", tokens_q=640, tokens_k=640, sink=12),
    "bias-all-gqa": AttentionCase(mask="bias-all", batch=2, heads=4, kv_heads=2, tokens_q=300, tokens_k=500),
    "bias-columns": AttentionCase(mask="bias-columns", heads=2, kv_heads=1, tokens_q=130, tokens_k=40),
    "bias-matrix-causal-key-mask": AttentionCase(mask="bias-matrix", tokens_q=330, is_causal=True, masked=True),
    "bias-float32-window": AttentionCase(mask="bias-float32", tokens_q=300, tokens_k=280, window=(150, 5)),
    "bias-fp16": AttentionCase(mask="bias-rows", dtype=torch.float16, tokens_q=200, tokens_k=150),
    "fp16": AttentionCase(mask="document", dtype=torch.float16, tokens_q=400, tokens_k=400),
}
CHANGES = {
    "": {"recipe": "mixed"},
    "deterministic-": {"recipe": "mixed", "deterministic": True},
    "plain-": {"recipe": "mixed(rotate=False)"},
    "16bit-": {"recipe": "mixed(dv=16bit, dq=16bit, dk=16bit)"},  # whose backward is the portable one
}


@pytest.mark.parametrize(("head_dim", "value_dim"), FORMS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("change", CHANGES)
def test_is_the_recipe(change, name, head_dim, value_dim):
    if change in ("plain-", "16bit-") and name not in ("bool-all-gqa", "bias-all-gqa", "document"):
        pytest.skip("three masks are enough")
    call = dataclasses.replace(CALLS[name], head_dim=head_dim, value_dim=value_dim, device="cuda", **CHANGES[change])
    call.check("hopper")


# Keys that many queries see beside others, so that several programs share a list.
SHARED = {
    "sinks": AttentionCase(mask="sinks", heads=8, kv_heads=2, tokens_q=1280, tokens_k=1280),
    "sinks-ragged": AttentionCase(mask="sinks", heads=8, kv_heads=2, tokens_q=1270, tokens_k=1270),
    "prefix-batch-key-mask": AttentionCase(mask="prefix", batch=2, masked=True, heads=4, tokens_q=1100, tokens_k=900),
    "bias": AttentionCase(mask="bias-matrix", heads=8, kv_heads=2, tokens_q=1300, tokens_k=384),
    "few-shares": AttentionCase(mask="bool-none", heads=4, tokens_q=1152, tokens_k=256),
}


@pytest.mark.parametrize("least", [32, 3])
@pytest.mark.parametrize(("head_dim", "value_dim"), FORMS)
@pytest.mark.parametrize("name", SHARED)
def test_lists_that_programs_share(name, head_dim, value_dim, least, monkeypatch):
    monkeypatch.setattr(work_splits, "LEAST", least)
    shape = {"head_dim": head_dim, "value_dim": value_dim, "device": "cuda", "recipe": "mixed"}
    call = dataclasses.replace(SHARED[name], **shape)
    inputs = call.inputs()
    lists = prepare("backward", call.call(*inputs[:2])).lists
    assert (lists.work_splits[:, 5] > 1).any()
    shared = [call.run("hopper", inputs) for _ in range(4)]  # which add in other orders
    alone = dataclasses.replace(call, deterministic=True).run("hopper", inputs)
    for gradient in ("dk", "dv"):
        size = alone[gradient].float().norm()
        for found in shared:
            difference = (found[gradient].float() - alone[gradient].float()).norm() / size
            assert difference < 0.01, f"{gradient}: {difference:.4f}"
    call.check_outputs(inputs, shared[-1], ("o", "dq", "dk", "dv"))


@pytest.mark.parametrize("pair", [(72, 72), (80, 80), (160, 192), (250, 200), (40, 24)])
@pytest.mark.parametrize("name", ["bool-all-gqa", "document"])
def test_narrower_widths(name, pair):
    call = dataclasses.replace(CALLS[name], head_dim=pair[0], value_dim=pair[1], device="cuda", recipe="mixed")
    call.check("hopper")


def test_heads_that_take_turns_are_what_they_are_alone():
    """The order of tiles changes no bit but dQ's, which programs add to as they come."""
    mask = read_block_mask(teacher_forcing(8, 100, device="cuda"))
    assert last_heads(13, 100, 132) == 82
    torch.manual_seed(0)
    tensors = [torch.randn(1, 100, 1600, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

    def outputs(heads: slice) -> list[torch.Tensor]:
        *leaves, do = (x[:, heads].detach().requires_grad_() for x in tensors)
        o = sage_attention(*leaves, block_mask=mask, recipe="mixed", impl="hopper")
        return [o, *torch.autograd.grad(o, leaves[1:], do)]

    together = outputs(slice(None))
    for head in (0, 17, 18, 99):
        alone = outputs(slice(head, head + 1))
        assert all(torch.equal(x[:, head : head + 1], y) for x, y in zip(together, alone)), head


@pytest.mark.parametrize(("head_dim", "value_dim"), FORMS)
def test_a_mask_that_shows_all_gives_what_no_mask_gives(head_dim, value_dim):
    shape = {"tokens_q": 640, "tokens_k": 768, "head_dim": head_dim, "value_dim": value_dim, "device": "cuda"}
    shape |= {"recipe": "mixed", "deterministic": True}
    plain, masked = AttentionCase(**shape), AttentionCase(mask="bool-none", **shape)
    inputs = plain.inputs()
    one, other = plain.run("hopper", inputs), masked.run("hopper", inputs)
    for name in ("o", "dq", "dk", "dv"):  # the means of K differ by how keys are sampled, so codes do
        difference = (one[name].float() - other[name].float()).norm() / one[name].float().norm()
        assert difference < 0.1, f"{name}: {difference:.3f}"
    masked.check_outputs(inputs, other, ("o", "dq", "dk", "dv"))


@pytest.mark.parametrize(("head_dim", "value_dim"), FORMS)
def test_deterministic_runs_are_equal_bit_for_bit(head_dim, value_dim):
    call = AttentionCase(
        recipe="mixed", mask="sinks", tokens_q=1500, tokens_k=1500, heads=4, kv_heads=2, deterministic=True,
        head_dim=head_dim, value_dim=value_dim, device="cuda",
    )  # fmt: skip
    inputs = call.inputs()
    first = call.run("hopper", inputs)
    for _ in range(4):
        again = call.run("hopper", inputs)
        assert all(torch.equal(first[name], again[name]) for name in ("o", "dq", "dk", "dv"))
