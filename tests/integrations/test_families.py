"""Families of models, tiny and random: one step's gradients are SDPA's but for the recipe's error, and 50 steps learn.

Each learns one fixed batch by heart. Without attention it could not get below a loss that is known; each run has to,
and has to end where SDPA's runs from several seeds do. Nothing is asked of the steps between: a sum in another order
puts codes at ties on their other side, which training makes more of, and that is another run on every processor.
T5 itself is refused, for its position bias: BART stands in for it, an encoder-decoder with padded cross-attention.
"""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from sagebwd.integrations import transformers as integration
from sagebwd.reference.metrics import relative_l2

pytestmark = pytest.mark.rounding

BATCH, TOKENS, VOCABULARY, HEADS, HEAD_DIM, STEPS = 8, 64, 64, 2, 32, 50
REAL = torch.arange(TOKENS) < torch.tensor([TOKENS, 40] * (BATCH // 2))[:, None]
WIDTH = HEADS * HEAD_DIM
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "use_cache": False,
}  # fmt: skip
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


@pytest.fixture(autouse=True)
def registered():
    integration.register()


def tokens(*shape):
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def text():
    """Rotary models know places through attention alone: without it they see the token at hand."""
    ids = tokens(BATCH, TOKENS)
    return {"input_ids": ids, "labels": ids}, entropy(ids[:, 1:], ids[:, :-1])


def text_with_holes():
    """Padded rows, every fourth token to be told from the others: without attention a model sees a hole's place."""
    ids, place = tokens(BATCH, TOKENS), torch.arange(TOKENS)
    hole = (place % 4 == 1) & REAL
    inputs = {
        "input_ids": ids.where(REAL, 0).masked_fill(hole, 1),
        "attention_mask": REAL.long(),
        "labels": ids.masked_fill(~hole, -100),
    }
    return inputs, entropy(inputs["labels"], place.expand_as(ids))


def copying():
    """The decoder is given start tokens alone: without cross-attention it sees a place."""
    ids = tokens(BATCH, TOKENS)
    inputs = {
        "input_ids": ids.where(REAL, 0),
        "attention_mask": REAL.long(),
        "decoder_input_ids": torch.ones_like(ids),
        "labels": ids.masked_fill(~REAL, -100),
    }
    return inputs, entropy(inputs["labels"], torch.arange(TOKENS).expand_as(ids))


def entropy(labels, seen):
    """The least loss of a model that knows of each token's label what is seen alone."""
    counts = torch.zeros(VOCABULARY, VOCABULARY)
    known = labels != -100
    counts.index_put_((seen[known], labels[known]), torch.ones(()), accumulate=True)
    return -torch.special.xlogy(counts, counts / counts.sum(1, keepdim=True).clamp(min=1)).sum() / counts.sum()


GEMMA = DECODER | {
    "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": HEAD_DIM,
}  # fmt: skip
GPT_OSS = DECODER | {
    "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 2,
    "num_experts_per_tok": 1,
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, DECODER, text),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, DECODER, text),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA, text),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig, GPT_OSS, text),
    "bert": (BertForMaskedLM, BertConfig, ENCODER, text_with_holes),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig, WINDOWED_ENCODER, text_with_holes),
    "bart": (BartForConditionalGeneration, BartConfig, ENCODER_DECODER, copying),
}
# learning rates at which a run has learnt much and not all: 0.2 to 1.5 of 4.2 is left
RATES = {"llama": 2e-3, "qwen3": 1e-3, "gemma3": 1.5e-3, "bert": 1.5e-3, "bart": 2e-3}
# relative L2 of all gradients of the first step against SDPA's: measured 2026-11-22 at three seeds, and half as much
# again
ERRORS = {"llama": 0.011, "qwen3": 0.017, "gemma3": 0.029, "bert": 0.0006, "bart": 0.0004, "wan": 0.0013}
# by how much the last losses of SDPA's runs differ over the seeds 0 to 3, which no processor's rounding moves by 1e-4
SPREADS = {"llama": 0.020, "qwen3": 0.029, "gemma3": 0.053, "bert": 0.060, "bart": 0.082, "wan": 0.029}


def build(name, implementation, **settings):
    model_class, config_class, arguments, _ = FAMILIES[name]
    torch.manual_seed(0)
    return model_class._from_config(config_class(**arguments, **settings), attn_implementation=implementation)


def train(model, loss_of, rate, steps=STEPS):
    """The losses, and all gradients of the first step as one vector."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    losses, first = [], None
    for _ in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        if first is None:
            first = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
        optimizer.step()
        losses.append(loss.item())
    return losses, first


def assert_trains_as(expected, actual, name, blind, learnt):
    assert abs(actual[-1] - expected[-1]) < 2 * SPREADS[name]
    assert actual[-1] < blind - learnt
    assert actual[0] > blind + 2 * learnt


def assert_gradients(expected, actual, name):
    assert 0 < relative_l2(actual, expected) < ERRORS[name]


def by_both(name, steps):
    """What SDPA's model and ours come to, and the loss of one without attention."""
    inputs, blind = FAMILIES[name][3]()
    models = (build(name, choice, sagebwd={"recipe": "token"}).train() for choice in ("sdpa", "sagebwd"))
    return *(train(model, lambda model: model(**inputs).loss, RATES[name], steps) for model in models), blind


@pytest.mark.parametrize("name", RATES)
def test_gradients_of_a_step_are_sdpas(name):
    (_, expected), (_, actual), _ = by_both(name, 1)
    assert_gradients(expected, actual, name)


# Gemma 3 has causal masks and a window, BERT padding, and Wan cross-attention below: of others `make test` has a step.
SLOW = "llama", "qwen3", "bart"


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in RATES])
def test_trains_as_sdpa_does(name):
    (expected, _), (actual, _), blind = by_both(name, STEPS)
    assert_trains_as(expected, actual, name, blind, learnt=0.3)


def test_a_video_transformer_trains_as_native_does():
    """A Wan of 64 video tokens; noise, time and place are the same in each sample: only cross-attention tells them."""
    diffusers = pytest.importorskip("diffusers")
    from sagebwd.integrations.diffusers import register

    register(impl="reference")
    generator = torch.Generator().manual_seed(0)
    noise, target = (torch.randn(n, 4, 4, 8, 8, generator=generator) for n in (1, 4))
    inputs = {
        "hidden_states": noise.expand(4, -1, -1, -1, -1),
        "timestep": torch.full((4,), 500),
        "encoder_hidden_states": torch.randn(4, 12, 16, generator=generator),
    }

    def run(backend):
        torch.manual_seed(0)
        model = diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, in_channels=4,
            out_channels=4, text_dim=16, freq_dim=32, ffn_dim=96, num_layers=2, rope_max_seq_len=32,
        )  # fmt: skip
        model.set_attention_backend(backend)
        return train(model, lambda model: (model(**inputs).sample - target).square().mean(), 1e-3)

    try:
        (actual, gradients), (expected, exact) = run("sagebwd"), run("native")
    finally:
        # the backend that was set last is the process's too
        diffusers.models.attention_dispatch._AttentionBackendRegistry.set_active_backend(
            diffusers.models.attention_dispatch.AttentionBackendName.NATIVE
        )
    assert_gradients(exact, gradients, "wan")
    assert_trains_as(expected, actual, "wan", (target - target.mean(0)).square().mean(), learnt=0.1)


def test_t5_is_refused_for_its_position_bias():
    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=HEAD_DIM, d_ff=96, num_layers=2, num_heads=HEADS, dropout_rate=0.0
    )  # fmt: skip
    model = T5ForConditionalGeneration._from_config(config, attn_implementation="sagebwd")
    with pytest.raises(NotImplementedError, match=r"position_bias: a position bias is not supported.*use 'sdpa'"):
        model(input_ids=tokens(1, 8), labels=tokens(1, 8))


@pytest.mark.parametrize("name", ["bert", "modernbert", "bart"])
def test_padding_without_a_causal_mask(name):
    """ModernBERT's window counts real tokens. BART's decoder is as long as its source, and all of it attends."""
    inputs, _ = FAMILIES[name][3]()
    if name == "bart":
        inputs["labels"] = tokens(BATCH, TOKENS)

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


def test_gpt_oss_is_loaded_with_its_sinks(tmp_path):
    saved = with_sinks("eager").eval()
    saved.save_pretrained(tmp_path)
    model = GptOssForCausalLM.from_pretrained(tmp_path, attn_implementation="sagebwd")
    model.config.sagebwd = {"recipe": "full"}
    ids = tokens(2, TOKENS)
    assert relative_l2(model(input_ids=ids).logits, saved(input_ids=ids).logits) < 1e-5


def test_gpt_oss_learns():
    inputs, blind = text()
    losses, _ = train(with_sinks("sagebwd"), lambda model: model(**inputs).loss, 2e-3)
    assert losses[-1] < blind - 0.3


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
