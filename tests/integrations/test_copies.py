"""What a model copies around the operator, by counting operators of PyTorch, beside SDPA's in the same layer."""

import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from sagebwd.integrations.transformers import register

WIDTH, HEADS, HEAD_DIM, TOKENS = 64, 4, 16, 24


class Copies(TorchDispatchMode):
    """Counts copies and casts of tensors of four dimensions, or that are made of one, by what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("clone", "copy_", "_to_copy", "contiguous") and args[0].dim() == 4:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


def layer(kind: str, attention: str, recipe: str = "token", kv_heads: int = HEADS) -> tuple[nn.Module, nn.Module]:
    register()
    config_class, attention_class, rotary_class = {
        "llama": (LlamaConfig, LlamaAttention, LlamaRotaryEmbedding),
        "qwen3": (Qwen3Config, Qwen3Attention, Qwen3RotaryEmbedding),
    }[kind]
    config = config_class(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=kv_heads, head_dim=HEAD_DIM,
        num_hidden_layers=1,
    )  # fmt: skip
    config._attn_implementation = attention
    config.sagebwd = {"recipe": recipe}
    torch.manual_seed(0)
    return attention_class(config, 0), rotary_class(config)


def copies(kind: str, attention: str, recipe: str = "token", autocast: bool = False, kv_heads: int = HEADS) -> Counter:
    """Of one layer's forward and backward."""
    module, rotary = layer(kind, attention, recipe, kv_heads)
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    embedding = rotary(x, torch.arange(TOKENS)[None].expand(2, -1))
    with Copies() as counted:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), warnings.catch_warnings():
            out, _ = module(x, embedding, None)
        out.float().square().sum().backward()
    return counted.seen


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_layer_of_transformers_copies_what_it_does_beside_torchs_attention(kind, autocast):
    """The rotary embedding's gradients, which lie by head, and under autocast Q and K, which it leaves in FP32."""
    theirs = copies(kind, "sdpa", autocast=autocast)
    assert theirs["clone"] == 2
    assert copies(kind, "sagebwd", autocast=autocast) == theirs


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_e4m3_gradients_lie_as_what_they_are_of(kind):
    """Regression: dK and dV of e4m3 products lay by head, and dV was copied for its projection."""
    assert copies(kind, "sagebwd", "mixed") == copies(kind, "sdpa")


def test_grouped_heads_are_not_repeated():
    """As torch's are on a CPU."""
    assert copies("llama", "sagebwd", kv_heads=2) == copies("llama", "sagebwd") == {"clone": 2}


def test_the_count_sees_a_copy():
    """Of the same layer with its output by head, as it was before."""
    with Copies() as counted:
        x = torch.randn(2, HEADS, TOKENS, HEAD_DIM)
        x.transpose(1, 2).contiguous()
        x.transpose(1, 2).reshape(2, TOKENS, -1)
        x.to(torch.bfloat16)
    assert counted.seen == {"clone": 2, "_to_copy": 1}


def test_diffusers_tensors_are_written_as_they_lie():
    pytest.importorskip("diffusers")
    from sagebwd.integrations.diffusers import _backend
    from sagebwd.recipe import Recipe

    projected = [torch.randn(2, TOKENS, HEADS * HEAD_DIM, requires_grad=True) for _ in range(3)]
    with Copies() as counted:
        rows = [x.unflatten(-1, (HEADS, HEAD_DIM)) for x in projected]
        out = _backend(Recipe.named("token"), None)(*rows)
        out.flatten(2, 3).square().sum().backward()
    assert counted.seen == Counter()
    assert out.is_contiguous()
