"""Families of models, tiny and random: encoders, an encoder and decoder, and gpt-oss with its sinks."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GptOssConfig,
    GptOssForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

from sagebwd.reference.metrics import relative_l2

pytestmark = [pytest.mark.rounding, pytest.mark.usefixtures("registered")]

BATCH, TOKENS, VOCABULARY, HEADS, HEAD_DIM = 8, 64, 64, 2, 32
REAL = torch.arange(TOKENS) < torch.tensor([TOKENS, 40] * (BATCH // 2))[:, None]
WIDTH = HEADS * HEAD_DIM
ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "max_position_embeddings": 128, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
WINDOWED_ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "max_position_embeddings": 128, "local_attention": 16,
    "global_attn_every_n_layers": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    "cls_token_id": None, "sep_token_id": None,
}  # fmt: skip
ENCODER_DECODER = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "max_position_embeddings": 128, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "decoder_start_token_id": 1, "forced_eos_token_id": None, "use_cache": False,
}  # fmt: skip


def tokens(*shape):
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def padded():
    """Labels are every fourth token, which is hidden."""
    ids = tokens(BATCH, TOKENS)
    hole = (torch.arange(TOKENS) % 4 == 1) & REAL
    hidden = ids.where(REAL, 0).masked_fill(hole, 1)
    return {"input_ids": hidden, "attention_mask": REAL.long(), "labels": ids.masked_fill(~hole, -100)}


def translated():
    """The decoder is given start tokens alone: what it knows comes through cross-attention."""
    ids = tokens(BATCH, TOKENS)
    decoder = {"decoder_input_ids": torch.ones_like(ids), "labels": ids}
    return {"input_ids": ids.where(REAL, 0), "attention_mask": REAL.long(), **decoder}


GPT_OSS = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "use_cache": False,
    "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 2,
    "num_experts_per_tok": 1,
}  # fmt: skip
FAMILIES = {
    "gpt_oss": (GptOssForCausalLM, GptOssConfig, GPT_OSS, None),
    "bert": (BertForMaskedLM, BertConfig, ENCODER, padded),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig, WINDOWED_ENCODER, padded),
    "bart": (BartForConditionalGeneration, BartConfig, ENCODER_DECODER, translated),
}


def build(name, implementation, **settings):
    model_class, config_class, arguments, _ = FAMILIES[name]
    torch.manual_seed(0)
    return model_class._from_config(config_class(**arguments, **settings), attn_implementation=implementation)


@pytest.mark.parametrize("name", ["bert", "modernbert", "bart"])
def test_padding_without_a_causal_mask(name):
    """ModernBERT's window counts real tokens. BART's decoder is as long as its source, and all of it attends."""
    inputs = FAMILIES[name][3]()

    def run(model):
        outcome = model(**inputs)
        outcome.loss.backward()
        real = torch.ones_like(REAL) if name == "bart" else REAL
        return outcome.logits[real].detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])

    expected = run(build(name, "sdpa"))
    for a, e in zip(run(build(name, "sagebwd", sagebwd={"recipe": "full"})), expected):
        assert relative_l2(a, e) < 1e-5


def with_sinks(implementation, recipe=None):
    """gpt-oss with sinks that take some of the weight, by Transformers' own class."""
    model = build("gpt_oss", implementation, **({} if recipe is None else {"sagebwd": {"recipe": recipe}}))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([1.0, -1.0]))
    return model.train()


def step_of(model, **inputs):
    """Logits of real tokens, gradients of the sinks, and those of all weights."""
    outcome = model(**inputs)
    outcome.loss.backward()
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else torch.ones_like(REAL)
    sinks = torch.cat([layer.self_attn.sinks.grad for layer in model.model.layers])
    return outcome.logits[real].detach(), sinks, torch.cat([x.grad.flatten() for x in model.parameters()])


@pytest.mark.parametrize("padded", [False, True])
def test_gpt_oss_is_its_own_eager_mode(padded):
    ids = tokens(BATCH, TOKENS)
    inputs = {"input_ids": ids, "labels": ids}
    if padded:
        inputs |= {"attention_mask": REAL.long(), "labels": ids.masked_fill(~REAL, -100)}
    expected = step_of(with_sinks("eager"), **inputs)
    assert expected[1].abs().min() > 0
    for a, e in zip(step_of(with_sinks("sagebwd", "full"), **inputs), expected):
        assert relative_l2(a, e) < 1e-5
    for a, e in zip(step_of(with_sinks("sagebwd", "token"), **inputs), expected):
        assert 0 < relative_l2(a, e) < 0.05


def test_gpt_oss_attention_compiles_whole():
    """Of the layers: what they allocate for experts the tests poison, which cannot be traced."""
    ids = tokens(2, TOKENS)
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    model = with_sinks("sagebwd", "full")
    expected = step_of(model, **inputs)
    model.zero_grad()
    for layer in model.model.layers:
        layer.self_attn.compile(fullgraph=True, backend="aot_eager")
    for a, e in zip(step_of(model, **inputs), expected):
        assert relative_l2(a, e) < 1e-5


@pytest.mark.filterwarnings("ignore:attn_implementation='sagebwd'. decoding")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_gpt_oss_generates_beside_its_sinks(cache):
    """A prompt on sagebwd, and tokens that continue a cache on torch: those see the sinks too."""
    ids = tokens(2, 40)
    padding = torch.arange(40) >= torch.tensor([0, 9])[:, None]
    options = {
        "attention_mask": padding.long(), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None,
        "use_cache": True, "return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0,
    } | ({"cache_implementation": "static"} if cache == "static" else {})  # fmt: skip
    found, expected = (
        torch.stack(with_sinks(name, "full").eval().generate(ids, **options).logits) for name in ("sagebwd", "eager")
    )
    assert relative_l2(found, expected) < 1e-5


def test_a_later_part_of_a_prompt_is_done_in_pieces(monkeypatch):
    from sagebwd.integrations import transformers_torch

    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 30, 8)
    sinks, visible = torch.tensor([0.5, -1, 2, 0]), torch.ones(9, 30).tril(21).bool()[None, None]
    whole = transformers_torch._beside_sinks(q, k, k, visible, None, sinks)
    monkeypatch.setattr(transformers_torch, "MOST_ELEMENTS", 2 * 4 * 31 * 4)
    torch.testing.assert_close(transformers_torch._beside_sinks(q, k, k, visible, None, sinks), whole)
    one_row = transformers_torch._beside_sinks(q, k, k, visible[:, :, -1:], None, sinks)
    torch.testing.assert_close(one_row[:, :, -1], whole[:, :, -1])
