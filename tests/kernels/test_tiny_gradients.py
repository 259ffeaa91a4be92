"""A gradient of the output as small as BF16 represents it: gradients as small, no zeros; in every family."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sagebwd.reference.metrics import relative_l2
from tests.attention_case import AttentionCase
from tests.gpus import DEVICE, needs_hopper, on_gpu

pytest.importorskip("triton")
SIZE = 2.0**-100


@pytest.mark.parametrize(("impl", "recipe", "head_dim"), [
    *(pytest.param("reference", recipe, 64) for recipe in ("token", "paper", "mixed")),
    *(pytest.param("triton", recipe, head_dim, marks=on_gpu)
      for recipe, head_dim in (("token", 72), ("token", 128), ("paper", 64))),
    *(pytest.param("hopper", "mixed", head_dim, marks=needs_hopper) for head_dim in (64, 128, 192, 256)),
])  # fmt: skip
def test_gradients_are_as_small_as_the_outputs_and_no_zeros(impl, recipe, head_dim):
    call = AttentionCase(
        recipe=recipe, head_dim=head_dim, tokens_q=70, tokens_k=70, is_causal=True, do_size=SIZE,
        device="cpu" if impl == "reference" else DEVICE,
    )  # fmt: skip
    actual = call.check(impl)
    leaves = [x.double().requires_grad_() for x in call.inputs()[:3]]
    o = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    exact = torch.autograd.grad(o, leaves, call.inputs()[3].double())
    for name, expected in zip(("dq", "dk", "dv"), exact):
        assert 0 < expected.abs().max() < 2.0**10 * SIZE
        assert relative_l2(actual[name], expected) < 0.1, name
