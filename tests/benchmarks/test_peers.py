"""Which attentions a bench compares with, and when they are the best there are."""

import pytest
import torch

from sagebwd.benchmarks import peers
from sagebwd.benchmarks.shapes import Shape

SHAPE = Shape(head_dim=16, heads=2, kv_heads=2, batch=1, tokens=32, is_causal=True)


def test_baselines_are_the_candidates_that_run(monkeypatch):
    (name, sdpa), *_ = peers.candidates(SHAPE, "cpu").items()

    def refuses(*_):
        raise AssertionError("no such width")

    monkeypatch.setattr(peers, "candidates", lambda shape, device: {name: sdpa, "fa4": refuses})
    assert set(peers.baselines(SHAPE, "cpu")) == {name}
    assert peers.refusal(refuses, SHAPE, "cpu") == "does not run: AssertionError: no such width"
    assert peers.refusal(sdpa, SHAPE, "cpu") is None


@pytest.mark.parametrize(
    ("hopper", "timed", "may"),
    [(True, {"cudnn", "fa2"}, False), (True, {"cudnn", "fa4"}, True), (False, {"cudnn", "fa2"}, True)],
)
def test_on_hopper_there_is_no_best_without_flash_attention_4(monkeypatch, hopper, timed, may):
    monkeypatch.setattr(peers, "is_hopper", lambda device: hopper and device == torch.device("cuda"))
    assert peers.may_claim_best(timed, "cuda") is may
