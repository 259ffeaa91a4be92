"""The model that a config describes, and full precision by torch's attention: Transformers' own numbers."""

import pytest
import torch

from lab.training.model import build
from sagebwd.integrations import transformers_fusion as fusion


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


FORMS = {
    "heads": {},
    "grouped": {"model.kv_heads": 1},
    "latent": {"model.heads": 2, "model.head_dim": 48, "model.value_dim": 32, "model.qk_norm": False},
}


@pytest.mark.rounding
@pytest.mark.parametrize("form", FORMS)
def test_it_is_transformers_own(tiny, form):
    model = build(tiny.replace({"attention.recipe": "sdpa", **FORMS[form]}), 257)
    ids = torch.arange(40).reshape(2, 20)
    ours = logits(model, ids)
    model.config._attn_implementation = "sdpa"
    torch.testing.assert_close(ours, logits(model, ids))
    if form == "latent":
        assert not any("expert" in name for name, _ in model.named_parameters())
        assert model.model.layers[0].self_attn.kv_b_proj.in_features == 4 * 32


@pytest.mark.rounding
def test_a_fused_model_is_the_unfused(tiny, monkeypatch):
    seen, real = [], fusion.attend
    monkeypatch.setattr(fusion, "attend", lambda *given: seen.append(1) or real(*given))
    ids, found = torch.arange(40).reshape(2, 20), []
    for fuse in (False, True):
        model = build(tiny.replace({"attention.recipe": "full", "attention.fuse": fuse}), 257)
        found.append(logits(model, ids))
        assert len(seen) == fuse * len(model.model.layers)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_control_has_a_small_dv_alone(tiny, compiled):
    ids, losses, gradients = torch.arange(20)[None], [], []
    for name in ("sdpa", "sdpa-small-dv"):
        model = build(tiny.replace({"attention.recipe": name, "model.layers": 1}), 257)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: x.grad for name, x in model.named_parameters() if "self_attn" in name})
    torch.testing.assert_close(*losses)
    own, faulty = gradients
    for name, x in own.items():
        torch.testing.assert_close(faulty[name], x * (0.92 if "v_proj" in name else 1), msg=name)


@pytest.mark.rounding
@pytest.mark.skipif(torch.cuda.is_available(), reason="there it runs")
def test_cudnn_without_a_gpu(tiny):
    with pytest.raises(ValueError, match=r"attention\.recipe='cudnn' needs a CUDA GPU; expected 'sdpa'"):
        build(tiny.replace({"attention.recipe": "cudnn"}), 257)
