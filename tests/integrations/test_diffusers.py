"""Wan, Flux, Cosmos and LTX under the backend "sagebwd": as under "native", masks and training included."""

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers import (
    CosmosTransformer3DModel,
    FluxTransformer2DModel,
    LTXVideoTransformer3DModel,
    WanTransformer3DModel,
)
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

from sagebwd.integrations import diffusers as integration
from sagebwd.reference.metrics import relative_l2
from tests import programs

REGISTRY = attention_dispatch._AttentionBackendRegistry
NATIVE = attention_dispatch.AttentionBackendName.NATIVE
BATCH, TEXT = 4, 12
# relative L2 of the output and of the gradients of the query, key and value projections against native:
# measured 2026-11-21, the largest of the models, with a margin
FLOORS = {"full": (1e-5, 1e-5), "token": (0.005, 0.03), "paper": (0.005, 0.05)}


@pytest.fixture(autouse=True)
def registered():
    integration.register(impl="reference")
    yield
    REGISTRY.set_active_backend(NATIVE)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def video_inputs():
    """One noise and one time for all, so that only the text tells the samples apart."""
    return {
        "hidden_states": draw(1, 4, 3, 8, 8).expand(BATCH, -1, -1, -1, -1),
        "timestep": torch.full((BATCH,), 500),
        "encoder_hidden_states": draw(BATCH, TEXT, 16, seed=1),
    }


def text_mask():
    lengths = torch.tensor([12, 5, 9, 1])
    return torch.arange(TEXT) < lengths[:, None]


def wan():
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=64, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    return model, video_inputs()


def cosmos():
    model = CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2, mlp_ratio=2,
        text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 32, 32), rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=False, extra_pos_embed_type=None,
    )  # fmt: skip
    return model, video_inputs() | {"attention_mask": text_mask()}


def flux():
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    inputs = {
        "hidden_states": draw(1, 64, 4).expand(BATCH, -1, -1),
        "encoder_hidden_states": draw(BATCH, TEXT, 16, seed=1),
        "pooled_projections": draw(1, 16, seed=2).expand(BATCH, -1),
        "timestep": torch.full((BATCH,), 0.5),
        "img_ids": torch.stack([torch.zeros(8, 8), rows, columns], -1).flatten(0, 1),
        "txt_ids": torch.zeros(TEXT, 3),
    }
    return model, inputs


def ltx():
    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=1, caption_channels=16,
    )  # fmt: skip
    inputs = {
        "hidden_states": draw(BATCH, 48, 4),
        "timestep": torch.full((BATCH,), 500),
        "encoder_hidden_states": draw(BATCH, TEXT, 16, seed=1),
        "encoder_attention_mask": text_mask(),
        "num_frames": 3, "height": 4, "width": 4,
    }  # fmt: skip
    return model, inputs


MODELS = {"wan": wan, "cosmos": cosmos, "flux": flux, "ltx": ltx}


def build(make):
    """The same weights each time; QK-norms that sharpen the softmax, which is nearly flat in an untrained model."""
    torch.manual_seed(0)
    model, inputs = make()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm_q" in name or "norm_k" in name or "norm_added" in name:
                weight.mul_(2)
    return model, inputs


def run(model, inputs):
    """Output, and the gradients of the attention's projections as one vector."""
    model.zero_grad()
    out = model(**inputs)[0]
    (out * draw(*out.shape, seed=3)).sum().backward()
    names = ("to_q", "to_k", "to_v", "add_q", "add_k", "add_v")
    projections = [w.grad.flatten() for name, w in model.named_parameters() if any(part in name for part in names)]
    return out.detach(), torch.cat(projections)


@pytest.mark.parametrize("recipe", FLOORS)
@pytest.mark.parametrize("name", MODELS)
def test_swapping_native_changes_no_more_than_the_recipe_does(name, recipe):
    integration.register(recipe, "reference")
    model, inputs = build(MODELS[name])
    expected = run(model, inputs)
    model.set_attention_backend("sagebwd")
    actual = run(model, inputs)
    for a, e, floor in zip(actual, expected, FLOORS[recipe]):
        assert relative_l2(a, e) < floor
        assert recipe == "full" or not torch.equal(a, e)  # full precision may round as torch does


MASKS = {
    "2D": lambda m: m,
    "4D": lambda m: m[:, None, None],
    "of one sample for all": lambda m: m[1:2, None, None],
    "expanded over queries": lambda m: m[:, None, None].expand(-1, -1, 20, -1),
    "expanded over heads and queries": lambda m: m[:, None, None].expand(-1, 2, 20, -1),
    "copied out": lambda m: m[:, None, None].repeat(1, 1, 20, 1),
    "of queries and keys": lambda m: m[:, None, None] & (torch.arange(20)[:, None] % 3 != torch.arange(TEXT) % 3),
    "additive": lambda m: torch.where(m, 0.0, -10000.0)[:, None, None],
}


def cross_attention(backend, mask, **arguments):
    q, k, v = (draw(BATCH, n, 2, 32, seed=i).requires_grad_() for i, n in enumerate((20, TEXT, TEXT)))
    out = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend, **arguments)
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v))


@pytest.mark.parametrize("kind", MASKS)
def test_masked_cross_attention(kind):
    integration.register("full", "reference")
    mask = MASKS[kind](text_mask())
    for a, e in zip(cross_attention("sagebwd", mask), cross_attention("native", mask)):
        assert relative_l2(a, e) < 1e-5
    integration.register("token", "reference")
    for a, e in zip(cross_attention("sagebwd", mask), cross_attention("native", mask)):
        assert 0 < relative_l2(a, e) < 0.03


def test_grouped_heads_causal_and_scale():
    integration.register("full", "reference")
    q, k, v = (draw(2, 20, heads, 32, seed=i) for i, heads in enumerate((4, 2, 2)))
    options = {"is_causal": True, "scale": 0.3, "enable_gqa": True}
    actual, expected = (dispatch_attention_fn(q, k, v, backend=name, **options) for name in ("sagebwd", "native"))
    assert relative_l2(actual, expected) < 1e-5
    assert actual.shape == q.shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1 is not supported.*accepted: 0.0; set the model's attention dropout"),
        ({"mask": text_mask(), "is_causal": True}, "is_causal=True with an attn_mask.*one of the two"),
        ({"attention_kwargs": {"return_lse": True}}, "return_lse=True.*sage_attention"),
        ({"attention_kwargs": {"return_attn_probs": True}}, "return_attn_probs=True"),
        ({"attention_kwargs": {"window_size": (4, 4)}}, r"window_size=\(4, 4\).*window="),
        ({"attention_kwargs": {"window_size": 4}}, r"window_size=4 is not supported.*window="),
        ({"attention_kwargs": {"window_size": (4, None)}}, r"window_size=\(4, None\).*window="),
        ({"attention_kwargs": {"softcap": 30.0}}, "softcap=30.0"),
        ({"attention_kwargs": {"deterministic": True}}, "deterministic=True.*sagebwd.switches"),
        ({"parallel_config": object()}, "_parallel_config=.*context parallelism"),
    ],
)
def test_unsupported_calls_say_what_to_use(arguments, message):
    with pytest.raises(NotImplementedError, match=message):
        cross_attention("sagebwd", arguments.pop("mask", None), **arguments)


def test_no_window_may_be_said():
    """Regression: a TypeError."""
    integration.register("full", "reference")
    windows = [{"attention_kwargs": {"window_size": none}} for none in (None, (-1, -1), [-1, -1])]
    outs = [cross_attention("sagebwd", None, **given) for given in ({}, *windows)]
    assert all(torch.equal(a, e) for out in outs[1:] for a, e in zip(out, outs[0]))


def test_every_argument_that_a_backend_of_diffusers_takes_is_named():
    known = REGISTRY._supported_arg_names["sagebwd"]
    for backend, names in REGISTRY._supported_arg_names.items():
        assert names <= known, backend


@pytest.mark.parametrize("mask", [text_mask()[:, None], text_mask()[:, :-1]], ids=["3D", "short"])
def test_masks_that_do_not_broadcast(mask):
    with pytest.raises(ValueError, match=r"does not broadcast.*accepted: \(batch or 1, heads or 1"):
        cross_attention("sagebwd", mask)


def test_native_is_left_as_it_was():
    native = REGISTRY._backends["native"]
    model, inputs = build(wan)
    before = run(model, inputs)
    with attention_backend("sagebwd"):
        inside = run(model, inputs)
    after = run(model, inputs)
    model.set_attention_backend("sagebwd")
    chosen = run(model, inputs)
    model.set_attention_backend("native")
    back = run(model, inputs)
    for i in range(2):
        assert torch.equal(after[i], before[i])
        assert torch.equal(back[i], before[i])
        assert torch.equal(chosen[i], inside[i])
        assert not torch.equal(inside[i], before[i])
    assert REGISTRY._backends["native"] is native


def test_registering_again_takes_the_new_settings():
    names = attention_dispatch.AttentionBackendName
    members = list(names)
    model, inputs = build(wan)
    with attention_backend("sagebwd"), torch.no_grad():
        token = model(**inputs)[0]
        integration.register("paper", "reference")
        paper = model(**inputs)[0]
    assert not torch.equal(token, paper)
    assert list(names) == members
    assert names("sagebwd") is names.SAGEBWD is names["SAGEBWD"]
    assert [member.value for member in names].count("sagebwd") == 1


def test_gradient_checkpointing_and_compile(monkeypatch):
    monkeypatch.undo()  # the poison of conftest.py cannot be traced
    # nor what Dynamo noted of torch's functions under it: where another test began a process group it notes them anew
    torch._dynamo.trace_rules.clear_lru_cache()
    model, inputs = build(wan)
    model.set_attention_backend("sagebwd")
    expected = run(model, inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**inputs)[0], expected[0])
    model.enable_gradient_checkpointing()
    model.train()
    for a, e in zip(run(model, inputs), expected):
        assert torch.equal(a, e)


ENVIRONMENT = """
from sagebwd.integrations.diffusers import register
register(impl="reference")
from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend
assert _AttentionBackendRegistry.get_active_backend()[0].value == "sagebwd"
with attention_backend("native"):
    register(impl="reference")
    assert _AttentionBackendRegistry.get_active_backend()[0].value == "native"
"""


def test_environment_variable(tmp_path):
    done = programs.run(ENVIRONMENT, tmp_path, DIFFUSERS_ATTN_BACKEND="sagebwd")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["_AttentionBackendRegistry", "AttentionBackendName"])
def test_other_diffusers_are_refused(monkeypatch, name):
    monkeypatch.delattr(attention_dispatch, name)
    with pytest.raises(NotImplementedError, match=rf"lacks {name}.*tested with diffusers 0\.42\.0, 0\.42\.1"):
        integration.register()
    monkeypatch.setattr(attention_dispatch, name, type("Other", (), {}), raising=False)
    with pytest.raises(NotImplementedError, match=f"lacks {name}"):
        integration.register()


@pytest.mark.parametrize(("settings", "message"), [({"recipe": "int3"}, "int3"), ({"impl": "cuda"}, "impl='cuda'")])
def test_unknown_settings_are_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        integration.register(**settings)
