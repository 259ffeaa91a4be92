"""activate_flash_attention_impl("sagebwd"): torch's operator runs sagebwd, with gradients, and is torch's again after.

torch's registry overrides CUDA kernels. Here the same functions are put under the CPU's dispatch keys, where the
operator has no kernel of its own, and it is called as scaled_dot_product_attention calls it on a GPU.
"""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    register_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.utils._python_dispatch import TorchDispatchMode

from sagebwd import sage_attention
from sagebwd.auto import torch_attention
from sagebwd.integrations import torch_registry
from sagebwd.integrations.torch_registry import register

OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention
NAME = "aten::_scaled_dot_product_flash_attention"


@pytest.fixture
def active():
    """sagebwd under torch's operator on a CPU, by the recipe token."""
    activation = torch_registry.activate("token", device="CPU")
    yield activation
    activation.remove()


@pytest.fixture
def registry():
    """torch's registry, as it was afterwards."""
    names = list_flash_attention_impls()
    yield
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
    from torch.nn.attention import _registry

    for name in set(list_flash_attention_impls()) - set(names):
        del _registry._FLASH_ATTENTION_IMPLS[name]


def draw(heads=4, kv_heads=4, tokens=40, head_dim=32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, n, tokens, head_dim, generator=generator, requires_grad=True) for n in (heads, *[kv_heads] * 2)
    ]


def gradients(out, inputs):
    return torch.autograd.grad(out.square().sum(), inputs)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_torchs_operator_is_sage_attention(active, kv_heads, is_causal):
    inputs = draw(kv_heads=kv_heads)
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, debug = OPERATOR(*inputs, 0.0, is_causal, scale=0.3)
    expected, expected_lse = sage_attention(
        *inputs, is_causal=is_causal, scale=0.3, enable_gqa=True, recipe="token", return_lse=True
    )
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert (cum_q, cum_k, max_q, max_k) == (None, None, 40, 40)
    assert (seed.shape, offset.shape, debug.numel()) == ((2,), (), 0)
    for x, e in zip(gradients(out, inputs), gradients(expected, inputs)):
        assert torch.equal(x, e)


def test_compiled_it_is_sagebwds_operator(active):
    seen = []

    def backend(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph, inputs):
            seen.append({str(node.target) for node in graph.graph.nodes})
            return graph.forward

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)

    torch._dynamo.reset()
    inputs = draw(kv_heads=2)
    expected = OPERATOR(*inputs, 0.0, True)[0]
    out = torch.compile(lambda q, k, v: OPERATOR(q, k, v, 0.0, True)[0], backend=backend, fullgraph=True)(*inputs)
    assert torch.equal(out, expected)
    for x, e in zip(gradients(out, inputs), gradients(expected, inputs)):
        assert torch.equal(x, e)
    forward, backward = seen
    assert "sagebwd.attention.default" in forward
    assert "sagebwd.attention_backward.default" in backward


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dropout_p": 0.1}, r"dropout_p=0.1, .*; set it to 0, or call restore_flash_attention_impl"),
        ({"return_debug_mask": True}, "return_debug_mask=True"),
    ],
)
def test_what_is_not_taken_is_refused_by_name(active, arguments, match):
    with pytest.raises(NotImplementedError, match=match):
        OPERATOR(*draw(), **arguments)


def test_a_causal_mask_of_other_lengths_is_refused(active):
    q, k, v = draw()
    with pytest.raises(NotImplementedError, match="is_causal with 8 queries and 40 keys"):
        OPERATOR(q[:, :, :8], k, v, 0.0, True)
    assert torch.equal(OPERATOR(q[:, :, :8], k, v)[0], sage_attention(q[:, :, :8], k, v, recipe="token"))


def test_torchs_backward_by_itself_is_refused(active):
    q, k, v = (x.detach() for x in draw())
    out, lse, _, _, max_q, max_k, seed, offset, _ = OPERATOR(q, k, v)
    empty = torch.empty(0)
    with pytest.raises(NotImplementedError, match=r"called by itself is not supported.*Differentiate the forward"):
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            out, q, k, v, out, lse, empty, empty, max_q, max_k, 0.0, False, seed, offset
        )


def test_removed_it_is_torchs_again(active):
    active.remove()
    active.remove()  # nothing left to take back
    with pytest.raises(NotImplementedError, match="Could not run 'aten::_scaled_dot_product_flash_attention'"):
        OPERATOR(*draw())
    assert torch_attention._sdpa is torch._C._nn.scaled_dot_product_attention


def test_what_auto_hands_to_torch_does_not_come_back(active):
    """On a CPU torch's flash backend has a name of its own; math is what is left of the others."""

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = set()

        def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
            self.names.add(function.name())
            return function(*arguments, **kwargs or {})

    inputs = [x.detach() for x in draw(head_dim=520)]
    with Seen() as during:
        out = sage_attention(*inputs)
    active.remove()
    with Seen() as after:
        F.scaled_dot_product_attention(*inputs)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in after.names
    assert not any("flash" in name for name in during.names)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*inputs))


def test_torchs_registry_activates_and_restores(registry, caplog):
    register("token")
    assert "sagebwd" in list_flash_attention_impls()
    assert current_flash_attention_impl() is None
    assert not has_kernel(NAME, "AutogradCUDA")
    for _ in range(2):  # a second activation takes back the first
        activate_flash_attention_impl("sagebwd")
        assert current_flash_attention_impl() == "sagebwd"
        assert has_kernel(NAME, "AutogradCUDA")
        assert has_kernel(NAME, "CUDA")
    with caplog.at_level(logging.WARNING):
        restore_flash_attention_impl()
    assert not caplog.records
    assert current_flash_attention_impl() is None
    assert not has_kernel(NAME, "AutogradCUDA")
    assert torch_attention._sdpa is torch._C._nn.scaled_dot_product_attention


def test_activating_another_takes_sagebwd_back(registry):
    class Handle:
        def remove(self):
            pass

    register()
    register_flash_attention_impl("another", register_fn=Handle)
    activate_flash_attention_impl("sagebwd")
    activate_flash_attention_impl("another")
    assert not has_kernel(NAME, "AutogradCUDA")


def test_settings_are_checked_when_they_are_given(registry):
    with pytest.raises(ValueError, match="recipe"):
        register("unknown")
    with pytest.raises(ValueError, match="impl"):
        register(impl="unknown")
    assert "sagebwd" not in list_flash_attention_impls()


def test_a_torch_without_the_registry_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(NotImplementedError, match=r"has no torch.nn.attention.register_flash_attention_impl"):
        register()


@pytest.mark.gpu
def test_on_a_gpu_the_flash_backend_is_sagebwd_until_restored(registry):
    inputs = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in draw(tokens=256, head_dim=64)]

    def run(attention, **options):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = attention(*inputs, is_causal=True, **options)
        return out.detach(), *gradients(out.float(), inputs)

    before = run(F.scaled_dot_product_attention)
    register("token")
    activate_flash_attention_impl("sagebwd")
    for x, e in zip(run(F.scaled_dot_product_attention), run(sage_attention, recipe="token")):
        assert torch.equal(x, e)
    restore_flash_attention_impl()
    assert torch.equal(run(F.scaled_dot_product_attention)[0], before[0])
