"""Which recipe "auto" is, and who asks."""

from __future__ import annotations

import pytest
import torch

from sagebwd import Recipe, dispatch, sage_attention, switches
from sagebwd.attention import choose_recipe

CARD = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    """Every CUDA device is an H100."""
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: device.type == "cuda")


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (64, torch.float16)])
def test_on_hopper_auto_is_mixed(hopper, head_dim, dtype):
    assert dispatch.automatic(None, head_dim, dtype, CARD) == "mixed"
    assert dispatch.automatic("hopper", head_dim, dtype, CARD) == "mixed"
    assert dispatch.automatic(dispatch.FASTEST, head_dim, dtype, CARD) == "mixed"


@pytest.mark.parametrize(
    "call",
    [
        (None, 96, torch.bfloat16, CARD),
        (None, 256, torch.bfloat16, CARD),
        (None, 64, torch.float32, CARD),
        (None, 64, torch.bfloat16, CARD, True),
        ("triton", 64, torch.bfloat16, CARD),
        ("reference", 64, torch.bfloat16, CARD),
        (None, 64, torch.bfloat16, torch.device("cpu")),
    ],
    ids=["head_dim 96", "head_dim 256", "FP32", "a mask", "triton", "reference", "a CPU"],
)
def test_where_hoppers_kernels_do_not_run_mixed_auto_is_token(hopper, call):
    assert dispatch.automatic(*call) == "token"


def test_on_another_card_auto_is_token(monkeypatch):
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: False)
    assert dispatch.automatic(None, 64, torch.bfloat16, CARD) == "token"


def test_auto_is_the_default():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 32, requires_grad=True) for _ in range(3))
    for given in ({}, {"recipe": "auto"}):
        assert torch.equal(sage_attention(q, k, v, **given), sage_attention(q, k, v, recipe="token"))


@pytest.mark.parametrize("switch", ["disabled", "backward_16bit"])
def test_under_a_switch_auto_is_token(hopper, switch):
    query = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device="meta")
    with switches(**{switch: True}):
        chosen = choose_recipe(query, "auto", None)
        assert chosen == choose_recipe(query, Recipe.named("token"), None)


def test_a_compiled_call_settles_auto_as_an_eager_one():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 32, dtype=torch.float64, requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda q, k, v: sage_attention(q, k, v, is_causal=True), backend="aot_eager")
    pairs = []
    for call in (compiled, lambda q, k, v: sage_attention(q, k, v, is_causal=True, recipe="token")):
        out = call(q, k, v)
        pairs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for found, expected in zip(*pairs):
        assert torch.equal(found, expected)


def test_auto_fixes_no_numbers():
    with pytest.raises(ValueError, match="'auto' is chosen call by call and fixes no numbers; name one: token, paper"):
        Recipe.parse("auto")
    assert Recipe.parse_or_auto("auto") == "auto"
    assert Recipe.parse_or_auto("token") == Recipe.named("token")
