"""The sweep over Diffusers' models tells what is the same from what is not."""

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers import WanTransformer3DModel
from diffusers.models import attention_dispatch

from sagebwd.integrations import diffusers as integration
from tools.sweep_diffusers import compare


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(integration, "sage_attention", integration.sage_attention)
    yield
    registry = attention_dispatch._AttentionBackendRegistry
    registry.set_active_backend(attention_dispatch.AttentionBackendName.NATIVE)


class Wan:
    model_class = WanTransformer3DModel

    def get_init_dict(self):
        return {
            "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
            "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "num_layers": 1, "rope_max_seq_len": 32,
        }  # fmt: skip

    def get_dummy_inputs(self):
        video, text = torch.randn(1, 4, 2, 8, 8), torch.randn(1, 6, 16)
        return {"hidden_states": video, "encoder_hidden_states": text, "timestep": torch.tensor([5])}


def test_rows():
    assert compare(Wan)[0] == "same"


def test_a_wrong_number_and_an_unclear_error_show(monkeypatch):
    right = integration.sage_attention

    def wrong(*arguments, **options):
        return right(*arguments, **options) * 1.01

    def unclear(*arguments, **options):
        raise KeyError("sagebwd")

    def refused(*arguments, **options):
        return right(*arguments, **options | {"recipe": "none such"})

    for attention, status in ((wrong, "different"), (unclear, "crash"), (refused, "refused")):
        monkeypatch.setattr(integration, "sage_attention", attention)
        assert compare(Wan)[0] == status
