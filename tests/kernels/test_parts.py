"""A backward by parts gives the bits of one of all heads at a time."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
from sagebwd import sage_attention
from sagebwd.cache import PLANS
from sagebwd.call import Call
from sagebwd.kernels.portable import launch
from sagebwd.kernels.runtime import driver
from sagebwd.kernels.runtime.parts import parts_of
from tests.attention_case import AttentionCase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []

SMALL = AttentionCase(
    "token(block_q=32, block_k=32, rotate=False)", tokens_q=5, tokens_k=18, head_dim=264, kv_heads=2
)  # fmt: skip
CALLS = {
    "grouped": dataclasses.replace(SMALL, recipe="token", heads=4, by_token=True, with_dlse=True),
    "keys-and-window": dataclasses.replace(SMALL, batch=2, kv_heads=1, masked=True, window=(9, 3), is_causal=True),
    "elements": dataclasses.replace(SMALL, batch=2, tokens_k=24, mask="bias-all"),
    "tiles": dataclasses.replace(SMALL, mask="sinks", tokens_q=18),
    "packed": dataclasses.replace(SMALL, lengths_q=[5, 0], lengths_k=[9, 20], is_causal=True, with_dlse=True),
    "tile-maxima": dataclasses.replace(SMALL, recipe="paper"),
    "16bit-gradients": dataclasses.replace(SMALL, recipe="token(dv=16bit, dq=16bit, dk=16bit)"),
}


def test_a_mask_is_not_cut_at_unaligned_addresses(monkeypatch):
    """Kernels are others there, and a copy of its elements takes more than what parts save."""
    call, made = dataclasses.replace(SMALL, batch=2, mask="bias-all", device=DEVICE), []
    inputs = call.inputs()
    asked = call.call(*inputs[:2])
    saved = call.forward("triton", asked, inputs)
    monkeypatch.setattr(launch, "parts_of", lambda *given: made.append([*parts_of(*given)]) or made[-1])
    monkeypatch.setattr(launch, "SHARE_OF_OPERANDS", 1 << 60)
    monkeypatch.setattr(launch, "LEAST_OPERANDS", 0)
    PLANS.clear()
    call.backward("triton", asked, saved, inputs)
    assert [len(parts) for parts in made] == [1]


@pytest.mark.parametrize("name", CALLS)
def test_parts_of_a_backward_have_the_bits_of_the_whole(name, monkeypatch):
    monkeypatch.setattr(driver, "key_heads_a_part", lambda call: call.keys.heads)  # of so few tokens another matter
    call, made = dataclasses.replace(CALLS[name], device=DEVICE), []

    inputs = call.inputs()
    asked = call.call(*inputs[:2])
    saved = call.forward("triton", asked, inputs)

    def run(share: int, least: int) -> tuple[torch.Tensor, ...]:
        def noted(whole: Call, most: int) -> list:
            made.append([*parts_of(whole, most)])
            return made[-1]

        monkeypatch.setattr(launch, "parts_of", noted)
        monkeypatch.setattr(launch, "SHARE_OF_OPERANDS", share)
        monkeypatch.setattr(launch, "LEAST_OPERANDS", least)
        PLANS.clear()
        return call.backward("triton", asked, saved, inputs)

    whole = run(launch.SHARE_OF_OPERANDS, launch.LEAST_OPERANDS)
    assert [len(parts) for parts in made] == [1], "so few bytes are never divided"
    made.clear()
    by_parts = run(1 << 60, 0)
    heads = asked.keys.heads_in_all
    assert [len(parts) for parts in made] == [heads] * (1 if call.recipe == "paper" else 2)
    for field, x, y in zip(("dq", "dk", "dv"), by_parts, whole):
        assert torch.equal(x, y), field


@pytest.mark.parametrize(("batch", "heads", "most", "expected"), [
    (1, 8, 4, [(1, 4), (1, 4)]),
    (1, 8, 3, [(1, 3), (1, 3), (1, 2)]),
    (2, 8, 6, [(1, 4)] * 4),
    (2, 8, 12, [(1, 8)] * 2),
    (5, 2, 6, [(3, 2), (2, 2)]),
    (3, 1, 9, [(3, 1)]),
])  # fmt: skip
def test_parts_are_few_and_even(batch, heads, most, expected):
    shape = AttentionCase(batch=batch, heads=2 * heads, kv_heads=heads, head_dim=8, tokens_q=1, tokens_k=1)
    parts = [part.call for part in parts_of(shape.call(*shape.inputs()[:2]), most)]
    assert [(part.keys.batch, part.keys.heads) for part in parts] == expected
    assert all(part.queries.batch == part.keys.batch and part.group == 2 for part in parts)


def test_codes_that_backward_makes_are_made_in_a_compiled_call_too():
    """Of q and k, which the operators' autograd keeps by the same rule."""
    q, k, v = (torch.randn(1, 1, 5, 264, dtype=torch.bfloat16, device=DEVICE, requires_grad=True) for _ in range(3))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sage_attention(q, k, v, recipe="token(rotate=False)", impl="triton")

    found = []
    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        o = run(q, k, v)
        found.append((o, *torch.autograd.grad(o.float().square().sum(), (q, k, v))))
    assert all(torch.equal(x, y) for x, y in zip(*found))
