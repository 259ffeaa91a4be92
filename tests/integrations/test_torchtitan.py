"""The class that docs/integrations/torchtitan.md gives, against stand-ins for torchtitan: it is not a dependency."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sagebwd.metrics import relative_l2


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
    path = Path(__file__).parents[2] / "docs" / "integrations" / "torchtitan.md"
    (example,) = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    names = {"__name__": "experiment"}
    exec(compile(example, path.name, "exec"), names)
    return SimpleNamespace(**names)


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


@pytest.mark.parametrize("window", [-1, 7])
def test_as_varlen_attention(page, window):
    offsets = torch.tensor([0, 40, 64], dtype=torch.int32)
    metadata = VarlenMetadata(offsets, offsets, 40, 40)
    (layer, *_) = page.use_sagebwd(model(VarlenAttention.Config(window_size=(window, 0)))).layers
    module = page.SageBwdAttention(layer.attention.inner_attention)
    outcomes = []
    for attend in (lambda *x: module(*x, attention_masks=metadata, enable_gqa=True), None):
        tensors = draw()
        out = attend(*tensors) if attend else causal_by_document(*tensors, window)
        outcomes.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    for a, e in zip(*outcomes):
        assert a.dtype == torch.float32
        assert 0 < relative_l2(a, e) < 0.05
    tensors = draw()
    seen = module(*tensors, attention_masks=metadata, out_transform=lambda out, lse: (out, lse))
    assert torch.equal(seen[0], outcomes[0][0])
    assert seen[1].shape == (64, 4)


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
