"""Classes that docs/integrations gives for torchtitan and Axolotl, which are no dependencies, against stand-ins."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from sagebwd.integrations import transformers as integration
from sagebwd.reference.metrics import relative_l2

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "torchtitan.md"


class VarlenMetadata(NamedTuple):
    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    max_q: int
    max_k: int


class VarlenAttention(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        window_size: tuple[int, int] = (-1, 0)

    def __init__(self, config):
        super().__init__()
        self.window_size = config.window_size


@pytest.fixture
def page(monkeypatch):
    """The names that the page's example defines."""
    attention = ModuleType("torchtitan.models.common.attention")
    attention.VarlenAttention, attention.VarlenMetadata = VarlenAttention, VarlenMetadata
    for name in ("torchtitan", "torchtitan.models", "torchtitan.models.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, attention.__name__, attention)
    return example("SageBwdAttention", monkeypatch)


def example(name, monkeypatch, **given):
    """The page's example that defines that class, as a module of its own."""
    blocks = re.findall(r"```(?:python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if f"class {name}(" in block]
    module = ModuleType(f"experiment_{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo looks a traced function's module up by name
    vars(module).update(given)
    exec(compile(block, PAGE.name, "exec"), vars(module))
    return module


def model(inner, layers=3):
    return SimpleNamespace(
        layers=[SimpleNamespace(attention=SimpleNamespace(inner_attention=inner)) for _ in range(layers)]
    )


def draw():
    """Two documents, 40 and 24 tokens, and fewer heads of keys."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, heads, 32, generator=generator).requires_grad_() for heads in (4, 2, 2)]


def causal_by_document(q, k, v, window):
    rows = torch.arange(64)
    document = rows >= 40
    distance = rows[:, None] - rows
    visible = (document[:, None] == document) & (distance >= 0)
    if window >= 0:
        visible &= distance <= window
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("rows", [None, 2], ids=["packed", "rows"])
@pytest.mark.parametrize("window", [-1, 7])
def test_as_varlen_attention(page, window, rows):
    """Packed tokens, as in torchtitan's source of August 2026, or rows of them, as in its release 0.3.0."""
    offsets = torch.tensor([0, 40, 64], dtype=torch.int32)
    metadata = VarlenMetadata(offsets, offsets, 40, 40)
    (layer, *_) = page.use_sagebwd(model(VarlenAttention.Config(window_size=(window, 0)))).layers
    module = page.SageBwdAttention(layer.attention.inner_attention)
    outcomes = []
    shaped = (lambda x: x.unflatten(0, (rows, -1))) if rows else (lambda x: x)

    def ours(*tensors, **kwargs):
        return module(*map(shaped, tensors), attention_masks=metadata, **kwargs)

    for attend in (lambda *x: ours(*x, enable_gqa=True).reshape(64, 4, 32), None):
        tensors = draw()
        out = attend(*tensors) if attend else causal_by_document(*tensors, window)
        outcomes.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    for a, e in zip(*outcomes):
        assert a.dtype == torch.float32
        assert 0 < relative_l2(a, e) < 0.05
    seen = ours(*draw(), out_transform=lambda out, lse: (out, lse))
    assert torch.equal(seen[0], shaped(outcomes[0][0]))
    assert seen[1].shape == seen[0].shape[:-1]


def test_settings_by_layer(page):
    config = page.use_sagebwd(model(VarlenAttention.Config(window_size=(9, 0))), recipe="paper", layers={0, 2})
    kinds = [layer.attention.inner_attention for layer in config.layers]
    assert [type(kind) is page.SageBwdAttention.Config for kind in kinds] == [True, False, True]
    assert (kinds[2].recipe, kinds[2].window_size) == ("paper", (9, 0))


def test_other_attention_is_refused(page):
    with pytest.raises(TypeError, match=r"layer 0 has a SimpleNamespace.*attn_backend='varlen'"):
        page.use_sagebwd(model(SimpleNamespace()))
    with pytest.raises(TypeError, match="accepted: VarlenMetadata"):
        page.SageBwdAttention(page.SageBwdAttention.Config())(*draw(), attention_masks=None)


TRAINERS = Path(__file__).parents[2] / "docs" / "integrations" / "trainers.md"


class BasePlugin:
    def register(self, cfg):
        raise AssertionError("the plugin has its own")


def test_the_plugin_makes_the_name_known_to_axolotl_and_to_transformers(monkeypatch):
    """As in Axolotl 0.19.0: a plugin is registered before the config is checked, and the name goes to Transformers."""
    names = ("axolotl", "axolotl.integrations", "axolotl.integrations.base", "axolotl.utils", "axolotl.utils.schemas")
    modules = {name: ModuleType(name) for name in (*names, "axolotl.utils.schemas.config")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules["axolotl.integrations.base"].BasePlugin = BasePlugin
    config = modules["axolotl.utils.schemas.config"]
    config.CANONICAL_ATTN_IMPLS = frozenset({"eager", "sdpa"})
    config.ATTN_IMPLS_SUPPORTING_PACKING = frozenset({"flash_attention_2"})

    text = TRAINERS.read_text(encoding="utf-8")
    (code,) = re.findall(r"```text\n(class SageBwdPlugin.*?)```", text, re.DOTALL)
    (settings,) = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    known = {"axolotl": modules["axolotl"]}
    exec(code, known)
    known[settings["plugins"][0].rpartition(".")[2]]().register({})

    chosen = settings["attn_implementation"]
    accepted, packing = config.CANONICAL_ATTN_IMPLS, config.ATTN_IMPLS_SUPPORTING_PACKING
    assert accepted == {"eager", "sdpa", chosen}
    assert packing == {"flash_attention_2", chosen}
    assert AttentionInterface()[chosen] is integration.attention
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM._from_config(LlamaConfig(**sizes, num_attention_heads=2), attn_implementation=chosen)
    assert model.config._attn_implementation == "sagebwd"
