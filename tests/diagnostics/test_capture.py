"""Captured tensors are the model's own: its attention output, its gradients, its masks; and a file keeps every bit."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sagebwd.diagnostics import capture as study
from sagebwd.diagnostics.capture import capture
from sagebwd.diagnostics.trace import Exact
from sagebwd.masks.band import Band
from sagebwd.reference.metrics import relative_l2

MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
FP32 = 2e-5  # two FP32 computations of one thing in another order, through two layers


def build(name="llama", seed=0, **changes):
    """Two layers of four query and two key heads of 16."""
    config_class, model_class = MODELS[name]
    config = config_class(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
        pad_token_id=0, initializer_range=0.2, **changes,
    )  # fmt: skip
    torch.manual_seed(seed)
    return model_class._from_config(config, attn_implementation="sdpa")


def tokens(*shape, seed=0):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))


def observed(model, ids, modules):
    """The value and gradient of the output of each module, or of o_proj's input, in the model's own run."""
    values = {}

    def keep(name, value):
        value.retain_grad()
        values[name] = value

    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: keep(name, inputs[0]))
        if name == "o"
        else module.register_forward_hook(lambda _, inputs, output, name=name: keep(name, output))
        for name, module in modules.items()
    ]
    model.eval()(input_ids=ids, labels=ids).loss.backward()
    for hook in hooks:
        hook.remove()
    return {name: (value.detach(), value.grad) for name, value in values.items()}


def heads_of(x, head_dim=16):
    """(batch, tokens, ...) to (batch, heads, tokens, head_dim)."""
    return x.reshape(*x.shape[:2], -1, head_dim).transpose(1, 2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layer", [0, 1])
def test_captured_tensors_reproduce_the_models_own_output_and_gradients(name, layer):
    model, ids = build(name), tokens(2, 50)
    attention = model.model.layers[layer].self_attn
    before_rotation = ("q_norm", "k_norm") if name == "qwen3" else ("q_proj", "k_proj")
    modules = dict(zip(("q", "k"), (getattr(attention, part) for part in before_rotation)))
    own = observed(model, ids, modules | {"v": attention.v_proj, "o": attention.o_proj})
    model.zero_grad()

    found = capture(model, ids)[layer]
    assert (found.layer, found.scale, found.is_causal, found.window) == (layer, 0.25, True, None)
    assert found.q.shape == found.do.shape == (2, 4, 50, 16)
    assert found.k.shape == found.v.shape == (2, 2, 50, 16)

    cos, sin = model.model.rotary_emb(found.q, torch.arange(50)[None])
    q, k = apply_rotary_pos_emb(heads_of(own["q"][0]), heads_of(own["k"][0]), cos, sin)
    expected = {"q": q, "k": k, "v": heads_of(own["v"][0]), "do": heads_of(own["o"][1])}
    for tensor in study.TENSORS:
        assert relative_l2(getattr(found, tensor), expected[tensor]) < FP32, tensor

    exact = [Exact(*found.head(head), found.scale, Band.of(True)).values for head in found.heads]
    o, dq = (torch.cat([values[part] for values in exact], 1) for part in ("o", "dq"))
    dk, dv = (torch.cat([exact[2 * i][part] + exact[2 * i + 1][part] for i in (0, 1)], 1) for part in ("dk", "dv"))
    dq, dk = apply_rotary_pos_emb(dq.float(), dk.float(), cos, -sin)  # a rotation's transpose is its inverse
    assert relative_l2(o, heads_of(own["o"][0])) < FP32
    for actual, part in ((dq, "q"), (dk, "k"), (dv, "v")):
        assert relative_l2(actual, heads_of(own[part][1])) < FP32, part


@pytest.mark.parametrize(
    ("config_class", "model_class", "changes", "projection", "window"),
    [
        (MistralConfig, MistralForCausalLM, {"num_key_value_heads": 2, "sliding_window": 8},
         "model.layers.1.self_attn.o_proj", (7, -1)),
        (BertConfig, BertForMaskedLM, {}, "bert.encoder.layer.1.attention.output.dense", None),
    ],
)  # fmt: skip
def test_a_window_and_an_encoder_that_is_not_causal_are_the_models(
    config_class, model_class, changes, projection, window
):
    config = config_class(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        max_position_embeddings=128, initializer_range=0.2, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = model_class._from_config(config, attn_implementation="sdpa"), tokens(1, 40)
    own = observed(model, ids, {"o": model.get_submodule(projection)})["o"]
    (found,) = capture(model.train(), ids, layers=[1])  # with its dropout off
    assert (found.is_causal, found.window) == (window is not None, window)
    band = Band.of(found.is_causal, *(window or (-1, -1)))
    o = torch.cat([Exact(*found.head(h), found.scale, band).values["o"] for h in found.heads], 1)
    assert relative_l2(o, heads_of(own[0])) < FP32
    assert relative_l2(found.do, heads_of(own[1])) < FP32


@pytest.mark.parametrize("outcome", ["success", "failure"])
def test_the_model_is_left_as_it_was(outcome):
    model = build("qwen3").train()
    model.model.layers[0].eval()  # regression: what was frozen trained afterwards
    modes = [part.training for part in model.modules()]
    expected = model(input_ids=tokens(1, 20)).logits
    if outcome == "success":
        capture(model, tokens(1, 20))
    else:
        with pytest.raises(ValueError, match="layers: 7"):
            capture(model, tokens(1, 20), layers=[7])
    assert model.config._attn_implementation == "sdpa"
    assert [part.training for part in model.modules()] == modes
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(model(input_ids=tokens(1, 20)).logits, expected)


def test_frozen_weights_make_no_difference():
    model, ids = build(), tokens(1, 20)
    expected = capture(model, ids)
    model.requires_grad_(False)
    for actual, own in zip(capture(model, ids), expected, strict=True):
        assert torch.equal(actual.do, own.do)
        assert own.do.abs().max() > 0


def test_chosen_layers_and_heads():
    model, ids = build(), tokens(1, 20)
    whole = capture(model, ids)
    assert [call.layer for call in whole] == [0, 1]
    (call,) = capture(model, ids, layers=[1])
    chosen = call.select([3, 2])
    assert (chosen.layer, chosen.heads, chosen.kv_heads) == (1, (2, 3), (1,))
    assert chosen.k.shape == (1, 1, 20, 16)
    for actual, expected in zip(chosen.head(3), whole[1].head(3), strict=True):
        assert torch.equal(actual, expected)
    assert not torch.equal(whole[1].head(1)[1], whole[1].head(3)[1])
    with pytest.raises(ValueError, match="heads: 0 is not in layer 1, which has 2, 3"):
        chosen.head(0)
    with pytest.raises(ValueError, match="heads: 4 is not in layer 1, which has 0 to 3"):
        call.select([4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_keeps_every_bit(tmp_path, dtype):
    captured = [call.select([1, 2]) for call in capture(build("qwen3").to(dtype), tokens(2, 20))]
    path = tmp_path / "new" / "x.safetensors"
    study.save(captured, path)
    for actual, expected in zip(study.load(path), captured, strict=True):
        for name in study.TENSORS:
            assert getattr(actual, name).dtype == dtype
            assert torch.equal(getattr(actual, name), getattr(expected, name))
        for name in ("layer", "scale", "is_causal", "window", "heads", "kv_heads", "group"):
            assert getattr(actual, name) == getattr(expected, name)
            assert type(getattr(actual, name)) is type(getattr(expected, name))
    assert [call.layer for call in study.load(path, [1])] == [1]
    with pytest.raises(ValueError, match="layers: 5"):
        study.load(path, [5])


def test_files_of_another_kind(tmp_path):
    from safetensors.torch import save_file

    other, broken = tmp_path / "other.safetensors", tmp_path / "broken.safetensors"
    save_file({"x": torch.zeros(1)}, other)
    broken.write_bytes(b"not this")
    for path, message in ((other, "not a file of captured"), (broken, "cut off"), (tmp_path / "none", "no such file")):
        with pytest.raises(ValueError, match=message):
            study.load(path)


@pytest.mark.parametrize(
    ("ids", "arguments", "message"),
    [
        (tokens(20), {}, r"expected \(batch, tokens\) int64, got \(20,\)"),
        (tokens(1, 20).float(), {}, "got .* float32"),
        (tokens(1, 200), {}, "200 tokens, and the model has 128 positions"),
        (tokens(1, 20) + 60, {}, "outside the model's vocabulary of 64"),
        (tokens(1, 20), {"layers": [0, 2]}, "layers: 2 is not an attention layer here; there are 0, 1"),
    ],
)
def test_bad_arguments(ids, arguments, message):
    with pytest.raises(ValueError, match=message):
        capture(build(), ids, **arguments)


def test_a_sequence_that_does_not_fit_is_one_line(monkeypatch):
    def full(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(study.F, "scaled_dot_product_attention", full)
    with pytest.raises(ValueError, match="20 tokens do not fit in this machine's memory"):
        capture(build(), tokens(1, 20))
