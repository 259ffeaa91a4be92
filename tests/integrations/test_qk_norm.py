"""add_qk_norm: a Llama that has it is a Qwen3, in what it computes, learns, saves and loads."""

import copy

import pytest
import torch
from safetensors.torch import load_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sagebwd.integrations.transformers import add_qk_norm
from sagebwd.reference.metrics import relative_l2

pytestmark = [pytest.mark.rounding, pytest.mark.usefixtures("registered")]

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "use_cache": False,
    "sagebwd": {"recipe": "token"},
}  # fmt: skip


class NormedLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        add_qk_norm(self)


class NormedGemma(GemmaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        add_qk_norm(self)


def tokens(*shape):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(0))


def make(model_class, config_class, implementation="sagebwd", **changes):
    torch.manual_seed(0)
    return model_class._from_config(config_class(**SIZES | changes), attn_implementation=implementation)


def normed_llama(implementation="sagebwd", **changes):
    """With gains that are not 1, and differ by layer: q's and k's must not be mistaken for each other."""
    model = add_qk_norm(make(LlamaForCausalLM, LlamaConfig, implementation, **changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                weight.copy_(1 + torch.rand(weight.shape, generator=generator))
    return model


def run(model):
    """Logits, and all gradients as one vector in order of name."""
    ids = tokens(2, 50)
    model.zero_grad()
    outcome = model(input_ids=ids, labels=ids)
    outcome.loss.backward()
    gradients = [weight.grad.flatten() for _, weight in sorted(model.named_parameters())]
    return outcome.logits.detach(), torch.cat(gradients)


def same(first, second):
    """The gains' gradients are summed in another order."""
    return torch.equal(first[0], second[0]) and relative_l2(first[1], second[1]) < 1e-6


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("implementation", ["sagebwd", "sdpa"])
def test_a_llama_with_it_is_a_qwen3(implementation, autocast):
    llama, qwen = normed_llama(implementation), make(Qwen3ForCausalLM, Qwen3Config, implementation)
    qwen.load_state_dict(llama.state_dict())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert same(run(llama), run(qwen))
    assert not torch.equal(run(llama)[0], run(make(LlamaForCausalLM, LlamaConfig, implementation))[0])


@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded(tmp_path, tied):
    model = normed_llama(tie_word_embeddings=tied)
    expected = run(model)
    model.save_pretrained(tmp_path)
    for model_class in (NormedLlama, Qwen3ForCausalLM):
        again, report = model_class.from_pretrained(tmp_path, attn_implementation="sagebwd", output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert same(run(again), expected)
    again.save_pretrained(tmp_path / "qwen")
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen", attn_implementation="sagebwd")
    assert same(run(published), expected)
    by_hand = add_qk_norm(
        LlamaForCausalLM._from_config(LlamaConfig.from_pretrained(tmp_path), attn_implementation="sagebwd")
    )
    load_model(by_hand, tmp_path / "model.safetensors")
    assert same(run(by_hand), expected)
    by_hand = add_qk_norm(make(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=tied))
    by_hand.load_state_dict(model.state_dict())
    assert same(run(by_hand), expected)


@pytest.mark.parametrize(
    ("model_class", "config_class", "normed"),
    [(LlamaForCausalLM, LlamaConfig, NormedLlama), (GemmaForCausalLM, GemmaConfig, NormedGemma)],
)
def test_gains_start_at_one_in_a_checkpoint_without_them(tmp_path, model_class, config_class, normed):
    plain = make(model_class, config_class)
    plain.save_pretrained(tmp_path)
    loaded = normed.from_pretrained(tmp_path, attn_implementation="sagebwd")
    assert same(run(loaded), run(add_qk_norm(plain)))
    norm = loaded.model.layers[1].self_attn.q_norm
    rows = norm(torch.randn(5, 32))
    assert torch.allclose(rows.square().mean(-1), torch.ones(5), atol=1e-3)


def test_a_copy_has_norms_of_its_own():
    model = normed_llama()
    before, copied = run(model), copy.deepcopy(model)
    with torch.no_grad():
        for layer in copied.model.layers:
            layer.self_attn.q_norm.weight.mul_(3)
    assert same(run(model), before)
    assert not same(run(copied), before)


def test_a_norm_that_is_there_is_not_doubled():
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn has a norm already: q_norm, k_norm"):
        add_qk_norm(make(Qwen3ForCausalLM, Qwen3Config))
    with pytest.raises(ValueError, match="has a norm already"):
        add_qk_norm(normed_llama())


def test_models_without_separate_projections_are_refused():
    with pytest.raises(NotImplementedError, match=r"GPT2LMHeadModel has no attention with head_dim.*such as Qwen3"):
        add_qk_norm(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2)))
    with pytest.raises(NotImplementedError, match="Linear has no attention"):
        add_qk_norm(nn.Linear(4, 4))


def test_a_refused_model_is_left_as_it_was():
    model = make(LlamaForCausalLM, LlamaConfig)
    model.model.layers[1].self_attn.head_dim = 48
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn projects to 128.*not a multiple of head_dim 48"):
        add_qk_norm(model)
    assert not any("q_norm" in name for name, _ in model.named_modules())
