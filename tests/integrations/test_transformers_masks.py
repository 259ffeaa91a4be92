"""Masks and caches of Transformers' models under attn_implementation="sagebwd": SDPA's numbers, or refused by name."""

import inspect
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import (
    Aimv2TextConfig,
    Aimv2TextModel,
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    DogeConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LayoutLMConfig,
    LayoutLMModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    ModernBertConfig,
    ModernBertModel,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen3Config,
    masking_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sagebwd.attention import sage_attention_varlen
from sagebwd.integrations import transformers as integration
from sagebwd.integrations import transformers_torch
from sagebwd.integrations.transformers_masks import Mask, Unreadable, mask, read, read_attention_mask
from sagebwd.reference.metrics import relative_l2

pytestmark = pytest.mark.usefixtures("registered")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
DECODERS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gemma": lambda: GemmaConfig(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=6),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=2, sliding_window=None),
    "gpt2": lambda: GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=None),
}
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
MODERN_BERT = ModernBertConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    local_attention=8, global_attn_every_n_layers=2, pad_token_id=0,
)  # fmt: skip


def pair(config, model_class=None, exact="sdpa"):
    """One random model under SDPA and under "sagebwd" in full precision."""
    models = []
    for implementation in (exact, "sagebwd"):
        torch.manual_seed(0)
        build = AutoModelForCausalLM.from_config if model_class is None else model_class._from_config
        models.append(build(config, attn_implementation=implementation).eval())
        models[-1].config.sagebwd = {"recipe": "full"}
        config = type(config)(**config.to_dict())
    return models


def tokens(*shape, seed=0):
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


def padded(side, lengths=(11, 7)):
    ids, attention_mask = tokens(len(lengths), max(lengths)), torch.ones(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        attention_mask[row, length:] = 0
    if side == "left":
        attention_mask = attention_mask.flip(1)
    return ids.where(attention_mask == 1, 0), attention_mask


def assert_same(models, attention_mask=None, real=None, **inputs):
    """Logits or hidden states at real tokens, and the gradients of a loss on them."""
    outcomes = []
    for model in models:
        out = model(**inputs, attention_mask=attention_mask)
        out = out.logits if "logits" in out else out.last_hidden_state
        keep = real if real is not None else torch.ones_like(out[..., 0]) if attention_mask is None else attention_mask
        kept = out[keep.bool()]
        model.zero_grad()
        kept.square().mean().backward()
        gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
        outcomes.append((kept.detach(), torch.cat(gradients)))
    for a, e in zip(outcomes[1], outcomes[0]):
        assert relative_l2(a, e) < 1e-4


# caches


def generated(models, cache, **inputs):
    settings = {
        "max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "return_dict_in_generate": True,
        "output_logits": True, "pad_token_id": 0,
    }  # fmt: skip
    outcomes = [model.generate(**inputs, **settings) for model in models]
    for a, e in zip(outcomes[1].logits, outcomes[0].logits):
        assert relative_l2(a, e) < 1e-4
    assert torch.equal(outcomes[1].sequences, outcomes[0].sequences)


@pytest.mark.filterwarnings("ignore:attn_implementation='sagebwd'. decoding")
@pytest.mark.parametrize(("padding", "cache"), [("none", "static"), ("left", "dynamic"), ("ones", "static")])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_is_sdpas(name, padding, cache):
    ids, attention_mask = padded("left") if padding == "left" else (tokens(2, 11), torch.ones(2, 11, dtype=torch.long))
    inputs = {"input_ids": ids} | ({} if padding == "none" else {"attention_mask": attention_mask})
    generated(pair(DECODERS[name]()), cache, **inputs)


@pytest.mark.filterwarnings("ignore:attn_implementation='sagebwd'. decoding")
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_generation_of_an_encoder_and_decoder_is_sdpas(cache):
    ids, attention_mask = padded("right")
    models = pair(BartConfig(**BART), BartForConditionalGeneration)
    generated(models, cache, input_ids=ids, attention_mask=attention_mask)


@pytest.mark.filterwarnings("ignore:attn_implementation='sagebwd'. decoding")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_prompt_in_parts_is_sdpas(name):
    ids, outcomes = tokens(2, 20), []
    for model in pair(DECODERS[name]()):
        with torch.no_grad():
            first = model(input_ids=ids[:, :9], use_cache=True)
            outcomes.append(model(input_ids=ids[:, 9:], past_key_values=first.past_key_values).logits)
    assert relative_l2(*outcomes) < 1e-4


# masks


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_sdpas(name, side):
    ids, attention_mask = padded(side)
    assert_same(pair(DECODERS[name]()), attention_mask, input_ids=ids)


HOLES = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 1, 1, 0, 0]])


def loss_and_gradients(model, attention_mask, **inputs):
    """Logits, the loss of shifted labels at all real tokens, and all gradients as one vector."""
    labels = inputs["labels"].masked_fill(attention_mask[:, -inputs["labels"].shape[1] :] == 0, -100)
    model.zero_grad()
    out = model(attention_mask=attention_mask, **inputs | {"labels": labels})
    out.loss.backward()
    gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return out.logits.detach(), out.loss.detach(), torch.cat(gradients)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_query_of_padding_in_a_hole_is_sdpas(name):
    """Regression: it gave zeros, and shifted labels score the next real token by it."""
    ids = tokens(3, 8)
    exact, ours = (loss_and_gradients(x, HOLES, input_ids=ids, labels=ids) for x in pair(DECODERS[name]()))
    for a, e in zip(ours[1:], exact[1:]):
        assert relative_l2(a, e) < 1e-4
    # zeros stand after the last real token alone, of which docs/integrations/transformers.md speaks
    differs = (exact[0] - ours[0]).abs().amax(-1) > 1e-3
    assert differs[2].tolist() == [False] * 6 + [True] * 2
    assert not differs[:2].any()


@pytest.fixture
def nothing_said(monkeypatch):
    monkeypatch.setattr(transformers_torch, "_said", set())


def train(model, ids, attention_mask, labels):
    model.zero_grad()
    model(input_ids=ids, attention_mask=attention_mask, labels=labels).loss.backward()


LABELS = {
    # side, labels of -100 where padding is, whether zeros reach the loss
    "all": ("right", False, True),
    "real": ("right", True, False),
    "all behind left padding": ("left", False, False),
}


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_loss_at_padding_after_the_last_real_token_is_said_once(name, kind, nothing_said):
    side, is_masked, differs = LABELS[kind]
    ids, attention_mask = padded(side)
    labels = ids.masked_fill(attention_mask == 0, -100) if is_masked else ids
    exact, ours = pair(DECODERS[name]())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            train(ours, ids, attention_mask, labels)
    said = [str(x.message) for x in caught if "queries of padding" in str(x.message)]
    assert len(said) == differs
    assert all("after a row's last real token, which give zeros" in x and "labels -100" in x for x in said)
    train(exact, ids, attention_mask, labels)
    gradients = (torch.cat([w.grad.flatten() for w in model.parameters()]) for model in (ours, exact))
    assert (relative_l2(*gradients) > 1e-3) == differs


def test_neither_left_padding_nor_an_overflow_is_the_last_word(nothing_said):
    """Of a row with a hole the padding at its end is looked at too."""
    model, ids = pair(DECODERS["llama"]())[1], tokens(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, *padded("left"), tokens(2, 11))
        logits = model(input_ids=ids, attention_mask=HOLES).logits
        (logits.sum(-1) * HOLES * float("inf")).sum().backward()
    with pytest.warns(UserWarning, match="queries of padding after a row's last real token"):
        train(model, ids, HOLES, ids)


def test_padding_is_looked_at_once_a_forward_by_all_layers(monkeypatch):
    """The host waits for a GPU to read it."""
    model = pair(DECODERS["llama"]())[1]
    assert model.config.num_hidden_layers > 1
    looks, ends = [], Mask.ends.func
    monkeypatch.setattr(Mask.ends, "func", lambda mask: looks.append(1) or ends(mask))
    for step in range(1, 3):
        train(model, *padded("left"), tokens(2, 11))
        assert len(looks) == step


def test_a_loss_at_padding_of_a_window_on_both_sides_is_said(nothing_said):
    ids, attention_mask = padded("left", (20, 12))
    model = pair(MODERN_BERT, ModernBertModel)[1]
    with pytest.warns(UserWarning, match="before or after a row's real tokens"):
        model(ids, attention_mask).last_hidden_state.square().sum().backward()


@pytest.mark.parametrize("recipe", ["token", "paper"])
def test_padding_is_nothing_to_real_tokens_beside_holes(recipe):
    """Scales of several queries, as `paper` has, are of real ones."""
    model, ids = pair(DECODERS["llama"]())[1], tokens(3, 8)
    model.config.sagebwd = {"recipe": recipe}
    other = ids.clone()
    other[1, :2], other[2, -2:] = 3, 4  # no hole: before the first real token, and after the last one
    assert not torch.equal(ids, other)
    first, second = (model(input_ids=x, attention_mask=HOLES).logits[HOLES == 1] for x in (ids, other))
    assert torch.equal(first, second)


def check_tuning(kind, name, ids, attention_mask):
    """Gradients of three virtual tokens of a PEFT configuration, beside SDPA's."""
    peft = pytest.importorskip("peft")
    outcomes = []
    for model in pair(DECODERS[name]()):
        torch.manual_seed(0)
        tuned = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3))
        outcomes.append(loss_and_gradients(tuned, attention_mask, input_ids=ids, labels=ids)[1:])
    for a, e in zip(outcomes[1], outcomes[0]):
        assert relative_l2(a, e) < 1e-4


@pytest.mark.filterwarnings("ignore:attn_implementation='sagebwd'. decoding")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("side", ["left", "holes"])
def test_prefix_tuning_beside_padding_is_sdpas(side, name):
    """Its prefix is a KV cache, through which gradients go."""
    check_tuning("PrefixTuningConfig", name, *(padded("left") if side == "left" else (tokens(3, 8), HOLES)))


@pytest.mark.filterwarnings("ignore:attn_implementation='sagebwd'. decoding")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_training_through_a_cache_is_sdpas(name):
    """A batch in two parts, padded on the left, at positions that stride."""
    ids, attention_mask = padded("left", (20, 14))
    positions, outcomes = (3 * torch.arange(20))[None], []
    for model in pair(DECODERS[name]()):
        first = model(ids[:, :9], attention_mask[:, :9], position_ids=positions[:, :9], use_cache=True)
        outcomes.append(
            loss_and_gradients(
                model, attention_mask, input_ids=ids[:, 9:], labels=ids[:, 9:], position_ids=positions[:, 9:],
                past_key_values=first.past_key_values,
            )
        )  # fmt: skip
    for a, e in zip(outcomes[1], outcomes[0]):
        assert relative_l2(a, e) < 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["PoSE", "interpolated", "repeated", "strided"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_positions_of_a_padded_batch_are_sdpas(name, kind, side):
    ids, attention_mask = padded(side, (20, 13))
    positions = JUMPING[kind](20).expand(2, -1)
    assert_same(pair(DECODERS[name]()), attention_mask, input_ids=ids, position_ids=positions)


@pytest.mark.parametrize("side", ["left", "right"])
def test_axes_of_positions_beside_padding_are_sdpas(side):
    config = Qwen2_5_VLTextConfig(**SIZES, rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]})
    ids, attention_mask = padded(side, (20, 13))
    axes = torch.stack([torch.arange(20) % n for n in (20, 5, 7)])[:, None].expand(3, 2, 20)
    assert_same(pair(config, Qwen2_5_VLTextModel), attention_mask, input_ids=ids, position_ids=axes)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_without_holes_is_packed(side, monkeypatch):
    """No token of padding reaches a kernel."""
    seen = []

    def packed(*tensors, **options):
        seen.append(tensors[0].shape[0])
        return sage_attention_varlen(*tensors, **options)

    monkeypatch.setattr(integration, "sage_attention_varlen", packed)
    ids, attention_mask = padded(side)
    model = pair(DECODERS["llama"]())[1]
    model(ids, attention_mask)
    assert seen == [18] * model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama"])
def test_a_window_spans_holes_of_padding(name):
    """Regression: distances were counted over real tokens alone."""
    ids, attention_mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    attention_mask[0, 5:9], attention_mask[1, 3], attention_mask[1, 12:15] = 0, 0, 0
    assert_same(pair(DECODERS[name]()), attention_mask, input_ids=ids)


def test_a_window_that_only_the_mask_knows_of():
    """Phimoe's attention is not told of its window."""
    config = PhimoeConfig(**SIZES, sliding_window=5, num_local_experts=2, num_experts_per_tok=2)
    assert_same(pair(config, PhimoeForCausalLM), input_ids=tokens(2, 20))


def test_a_causal_mask_where_the_attention_says_otherwise():
    """AIMv2's text attention says that it is not causal; its mask is."""
    config = Aimv2TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, eos_token_id=63,
    )  # fmt: skip
    ids, attention_mask = padded("right")
    assert_same(pair(config, Aimv2TextModel), attention_mask, input_ids=ids)


def llama4(chunk):
    return Llama4TextConfig(
        **SIZES, attention_chunk_size=chunk, intermediate_size_mlp=48, num_local_experts=2, no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"],
    )  # fmt: skip


chunks_in_static_caches = pytest.mark.skipif(
    "block_sequence_ids" not in inspect.signature(masking_utils.create_chunked_causal_mask).parameters,
    reason="Transformers 5.17 raises a TypeError",
)


@pytest.mark.parametrize("side", ["right", "left", "none"])
def test_chunks_are_sdpas(side):
    """Regression: the registered mask function dropped them."""
    ids, attention_mask = padded(side, (20, 20 if side == "none" else 12))
    assert_same(pair(llama4(8), Llama4ForCausalLM), attention_mask, input_ids=ids)


@pytest.mark.filterwarnings("ignore:attn_implementation='sagebwd'. decoding")
@pytest.mark.parametrize("cache", [pytest.param("static", marks=chunks_in_static_caches), "dynamic"])
def test_generation_in_chunks_is_sdpas(cache):
    generated(pair(llama4(8), Llama4ForCausalLM), cache, input_ids=tokens(2, 11))


OFFSETS = torch.tensor([0, 11, 20], dtype=torch.int32)
PACKED = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 11, "max_length_k": 11}


def test_packed_documents_in_chunks_are_sdpas_or_refused():
    """Regression: Transformers' mask leaves out those of offsets alone, and all with a cache; they saw each other."""
    positions, ids = torch.cat((torch.arange(11), torch.arange(9)))[None], tokens(1, 20)
    models = pair(llama4(8), Llama4ForCausalLM)
    for given in ({}, PACKED):
        assert_same(models, input_ids=ids, position_ids=positions, use_cache=False, **given)
    for given in ({"use_cache": False}, {"use_cache": True, "position_ids": positions}):
        with pytest.raises(NotImplementedError, match=r"leaves packed documents out .*; give position_ids"):
            models[1](input_ids=ids, **PACKED, **given)


def test_packed_documents_that_a_carried_mask_leaves_out_are_refused():
    """Regression: position_ids beside it were dropped."""
    blocks = torch.tensor([[-1, 0, 0, -1, -1, -1, 1, 1, 1, -1, -1]])
    function = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(blocks))
    model, ids, positions = pair(DECODERS["llama"]())[1], tokens(1, 11), torch.arange(11)[None]
    made = mask(1, 11, 11, mask_function=function, allow_is_causal_skip=False)
    model(input_ids=ids, attention_mask=made, position_ids=positions)
    for packed in (positions.remainder_(5), positions.clone()):  # written anew, and another tensor
        with pytest.raises(NotImplementedError, match=r"leaves packed documents out .*; give position_ids"):
            model(input_ids=ids, attention_mask=made, position_ids=packed)


def test_positions_that_are_written_anew_are_read_anew():
    """Regression: a mask that was made once kept the documents of the same tensor's earlier numbers."""
    model, ids, positions = pair(DECODERS["llama"]())[1], tokens(1, 11), torch.arange(11)[None]
    made, given = mask(1, 11, 11), {"input_ids": ids, "use_cache": False}
    model(**given, attention_mask=made, position_ids=positions)
    positions.remainder_(5)
    expected = model(**given, attention_mask=mask(1, 11, 11), position_ids=positions.clone()).logits
    assert torch.equal(model(**given, attention_mask=made, position_ids=positions).logits, expected)


def test_packed_documents_that_continue_a_cache_are_refused():
    """Regression: the offsets were dropped."""
    model, ids = pair(DECODERS["llama"]())[1], tokens(1, 20)
    cache = model(input_ids=ids).past_key_values
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q with a KV cache that is not empty"):
        model(input_ids=ids, past_key_values=cache, **PACKED)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_blocks_of_image_tokens_are_sdpas(name):
    """What Gemma 3 and PaliGemma make of images and prefixes."""
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1, -1, -1], [-1] * 5 + [0] * 6])
    function = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(blocks))
    ids, outcomes = tokens(2, 11), []
    for model, make in zip(pair(DECODERS[name]()), (masking_utils.sdpa_mask, mask)):
        made = make(2, 11, 11, mask_function=function, allow_is_causal_skip=False)
        outcomes.append(model(input_ids=ids, attention_mask=made).logits)
    assert relative_l2(*outcomes) < 1e-4


@pytest.mark.parametrize("rows", [1, 2])
def test_packed_documents_of_every_row(rows):
    """Regression: position_ids of one row for two was a ValueError."""
    positions = torch.cat((torch.arange(8), torch.arange(12))).expand(rows, -1)
    for name in ("llama", "mistral"):
        for cache in (False, True):
            models = pair(DECODERS[name]())
            ids = tokens(2, 20)
            models[0].config.use_cache = False  # with one, SDPA's mask leaves documents out
            models[1].config.use_cache = cache
            assert_same(models, input_ids=ids, position_ids=positions)


JUMPING = {
    "PoSE": lambda n: torch.arange(n) + 30 * (torch.arange(n) >= n // 2),
    "strided": lambda n: 3 * torch.arange(n),
    "repeated": lambda n: torch.arange(n) // 2,
    "interpolated": lambda n: torch.arange(n) / 4,
    "constant": lambda n: torch.zeros(n, dtype=torch.long),
}


@pytest.mark.parametrize("kind", JUMPING)
@pytest.mark.parametrize("beside", ["nothing", "cache", "mask"])
def test_positions_that_do_not_fall_are_sdpas(kind, beside):
    """Regression: beside an all-ones mask or a cache they were cut into documents, logits .39 to .93 off."""
    name = "llama" if kind in ("strided", "constant") else "mistral"
    models, ids = pair(DECODERS[name]()), tokens(2, 20)
    inputs = {"attention_mask": torch.ones_like(ids)} if beside == "mask" else {"use_cache": beside == "cache"}
    for rows in (1, 2):
        assert_same(models, input_ids=ids, position_ids=JUMPING[kind](20).expand(rows, -1), **inputs)


def test_documents_begin_where_positions_fall():
    """Also where they stride, in one of the rows alone."""
    models, ids = pair(DECODERS["llama"]()), tokens(2, 20)
    positions = torch.stack((3 * torch.arange(20) % 36, 3 * torch.arange(20)))
    documents = torch.stack((torch.arange(20) // 12, torch.zeros(20, dtype=torch.long)))
    visible = (documents[:, :, None] == documents[:, None]).tril()[:, None]
    expected = models[0](input_ids=ids, position_ids=positions, attention_mask=visible).logits
    for beside in ({"attention_mask": torch.ones_like(ids)}, {"use_cache": True}):
        assert relative_l2(models[1](input_ids=ids, position_ids=positions, **beside).logits, expected) < 1e-5


@pytest.mark.parametrize("side", ["right", "left"])
def test_positions_of_padding_are_no_documents(side):
    """Of zeros or ones, as Transformers' generation and collators have them."""
    models = pair(DECODERS["llama"]())
    ids, attention_mask = padded(side)
    for value in (0, 1):
        positions = (attention_mask.cumsum(1) - 1).masked_fill(attention_mask == 0, value)
        inputs = {"input_ids": ids, "attention_mask": attention_mask, "position_ids": positions}
        ours, theirs = (model(**inputs).logits[attention_mask == 1] for model in models)
        assert relative_l2(ours, theirs) < 1e-5


def test_positions_of_several_axes_are_no_documents():
    """M-RoPE: of images they repeat and fall; Qwen-VL's fourth row, of text, tells documents apart."""
    config = Qwen2_5_VLTextConfig(**SIZES, rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]})
    models, ids = pair(config, Qwen2_5_VLTextModel), tokens(2, 20)
    axes = torch.stack([torch.arange(20) % n for n in (20, 5, 7)])[:, None].expand(3, 2, 20)
    packed = torch.cat((torch.arange(8), torch.arange(12))).expand(1, 2, 20)
    for positions in (axes, torch.cat((packed, axes))):
        ours, theirs = (model(ids, position_ids=positions, use_cache=False)[0] for model in models)
        assert relative_l2(theirs, ours) < 1e-5


def test_an_attention_that_contradicts_its_mask_is_refused():
    """SDPA goes by the one and eager by the other: PaliGemma without token types, BigBird-Pegasus' decoder."""
    model = pair(DECODERS["llama"]())[1]
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(NotImplementedError, match="is_causal=False contradicts the model's attention mask"):
        model(input_ids=tokens(2, 6))
    ids, attention_mask = padded("right")
    model(input_ids=ids, attention_mask=attention_mask)  # the mask is there under both


def test_a_mask_of_another_batch_is_refused():
    """Regression: MusicGen's decoder, given a row for every codebook, stopped at an expand."""
    model = pair(DECODERS["llama"]())[1]
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]] * 4)
    with pytest.raises(ValueError, match="attention_mask: got 4 rows for a batch of 2; accepted: as many, or 1"):
        model(input_ids=tokens(2, 6), attention_mask=mask)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_mask_of_one_row_is_every_rows(side):
    model, ids, row = pair(DECODERS["llama"]())[1], tokens(2, 11), padded(side)[1][1:]
    one, each = (model(input_ids=ids, attention_mask=x).logits for x in (row, row.expand(2, -1)))
    assert torch.equal(one, each)


def layout():
    return LayoutLMConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_2d_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_as_an_older_model_adds_it(side):
    ids, attention_mask = padded(side)
    assert_same(pair(layout(), LayoutLMModel, "eager"), attention_mask, input_ids=ids)


@pytest.mark.parametrize("value", [-1.0, 0.5, -float("inf"), False])
def test_what_a_mask_of_keys_says_is_sdpas(value):
    outcomes = []
    for model in pair(DECODERS["llama"]()):
        module = model.model.layers[0].self_attn
        q, k, v = (torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
        made = torch.ones(2, 1, 1, 6, dtype=torch.bool) if value is False else torch.zeros(2, 1, 1, 6)
        made[0, ..., 2:] = value
        call = integration.attention if model.config._attn_implementation == "sagebwd" else sdpa_attention_forward
        outcomes.append(call(module, q, k[:, :2], v[:, :2], made)[0])
    assert relative_l2(*outcomes) < 1e-5


@pytest.mark.parametrize("kind", ["boolean", "additive", "block"])
def test_masks_that_a_caller_makes_are_sdpas(kind):
    prefix = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    prefix[1, ..., :3] = True
    made = prefix if kind == "boolean" else torch.where(prefix, 0.0, torch.finfo(torch.float32).min)
    exact, model = pair(DECODERS["llama"]())
    expected = exact(input_ids=tokens(2, 6), attention_mask=made).logits
    if kind == "block":
        made = create_block_mask(lambda b, h, q, k: prefix[b, 0, q, k], 2, None, 6, 6, device="cpu")
    assert relative_l2(model(input_ids=tokens(2, 6), attention_mask=made).logits, expected) < 1e-5


def test_a_block_mask_is_read_once_for_all_layers():
    asked = []

    def causal(b, h, q, k):
        asked.append(1)
        return q >= k

    model = pair(DECODERS["llama"]())[1]
    made = create_block_mask(causal, None, None, 6, 6, device="cpu")
    asked.clear()
    once = read_attention_mask(made)
    outcomes = [model(input_ids=tokens(2, 6), attention_mask=once).logits for _ in range(2)]
    assert len(model.model.layers) > 1
    assert len(asked) == 1
    made.mask_mod = lambda b, h, q, k: q >= 0 * k
    assert torch.equal(outcomes[0], model(input_ids=tokens(2, 6), attention_mask=once).logits)
    assert not torch.equal(outcomes[0], model(input_ids=tokens(2, 6), attention_mask=made).logits)


@pytest.mark.parametrize("change", ["copy_", "data"])
def test_a_mask_of_the_callers_is_read_in_every_forward(change):
    exact, model = pair(DECODERS["llama"]())
    made = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    model(input_ids=tokens(2, 6), attention_mask=made)
    (made.data if change == "data" else made).copy_(torch.ones(6, 6, dtype=torch.bool).tril().triu(-2))
    expected = exact(input_ids=tokens(2, 6), attention_mask=made).logits
    assert relative_l2(model(input_ids=tokens(2, 6), attention_mask=made).logits, expected) < 1e-5


def test_layers_share_what_is_read_of_a_mask_until_somebody_has_it():
    made = mask(1, 6, 6, mask_function=lambda b, h, q, k: (q >= k) | (k < 2))
    first = made.argument(torch.device("cpu"))["block_mask"]
    assert made.argument(torch.device("cpu"))["block_mask"] is first
    made.dense.fill_(True)
    assert made.argument(torch.device("cpu"))["attn_mask"].all()


def test_a_model_that_leaves_our_masks_out_is_refused():
    """Doge: its own masking sees tensors alone."""
    config = DogeConfig(**{name: value for name, value in SIZES.items() if name != "head_dim"})
    with pytest.raises(NotImplementedError, match="DogeAttention makes its mask of tensors and leaves others out"):
        pair(config)[1](input_ids=tokens(2, 6))


def test_a_mask_that_needs_a_gradient_is_refused():
    model = pair(DECODERS["llama"]())[1]
    with pytest.raises(NotImplementedError, match="an attention_mask that needs a gradient"):
        model(input_ids=tokens(2, 6), attention_mask=torch.zeros(2, 1, 6, 6, requires_grad=True))


def test_a_model_that_computes_with_its_mask_has_sdpas():
    made = mask(2, 6, 6, attention_mask=torch.tensor([[True] * 5 + [False]] * 2))
    exact = masking_utils.sdpa_mask(2, 6, 6, attention_mask=torch.tensor([[True] * 5 + [False]] * 2))
    for compute in (
        lambda m: torch.cat((m, m)), lambda m: m[:, :, :3], lambda m: m & m, lambda m: torch.ones(2, 1, 6, 6) * m,
        lambda m: m.unsqueeze(1), lambda m: 1 - m.int(), lambda m: m == 0, lambda m: m.to(torch.float32), lambda m: ~m,
        lambda m: torch.where(m, 1.0, 0.0),
    ):  # fmt: skip
        assert torch.equal(compute(made), compute(exact))
    assert made.dtype == torch.bool
    assert made.contiguous() is made


# reading mask functions


def expected_of(function, size, rows=2):
    return masking_utils.sdpa_mask(rows, size, size, mask_function=function, allow_is_causal_skip=False)


def shown(visible, size, rows=2):
    distance = torch.arange(size) - torch.arange(size)[:, None]
    seen = torch.ones(rows, 1, size, size, dtype=torch.bool)
    if visible.lower is not None:
        seen = seen & (distance >= visible.lower)
    if visible.upper is not None:
        seen = seen & (distance <= visible.upper)
    if visible.documents is not None:
        seen = seen & (visible.documents[:, None, :, None] == visible.documents[:, None, None, :])
    return seen


def packed(function, positions, documents):
    """What Transformers makes of packed documents, from 5.18 on."""
    return masking_utils.and_masks(
        masking_utils.packed_sequence_mask_function(documents),
        lambda b, h, q, k: function(b, h, positions[b, q], positions[b, k]),
    )


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1, 2]])
READABLE = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "both-sides": masking_utils.sliding_window_bidirectional_mask_function(3),
    "documents": masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(DOCUMENTS)
    ),
    "positions": packed(masking_utils.sliding_window_causal_mask_function(3), POSITIONS, DOCUMENTS),
    "one-chunk": masking_utils.chunked_causal_mask_function(9, torch.zeros(2, dtype=torch.long)),
    "a user's": lambda b, h, q, k: (k - q <= 1) & (q < k + 4),
    "no image": masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.blockwise_overlay(torch.full((2, 9), -1))
    ),
    "nothing-or": masking_utils.or_masks(masking_utils.causal_mask_function),
}


@pytest.mark.parametrize("name", READABLE)
def test_a_mask_function_is_read_for_what_it_is(name):
    assert torch.equal(shown(read(READABLE[name], 9), 9), expected_of(READABLE[name], 9))


UNREADABLE = {
    "chunks": masking_utils.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)),
    "union": masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 3),
    "blocks": masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(DOCUMENTS)),
    "prefix": lambda b, h, q, k: k < 3,
    "table": lambda b, h, q, k: torch.ones(9, 9, dtype=torch.bool)[q, k],
    "diagonal": lambda b, h, q, k: q == k,
    "every second": lambda b, h, q, k: (q - k) % 2 == 0,
    "twice": lambda b, h, q, k: q + q >= k,
    "heads": lambda b, h, q, k: h > 1,
    "branch": lambda b, h, q, k: (k <= q) and (k > q - 3),
    "tensor": lambda b, h, q, k: torch.ones((), dtype=torch.bool),
    "two kinds of documents": masking_utils.and_masks(
        masking_utils.packed_sequence_mask_function(DOCUMENTS), masking_utils.packed_sequence_mask_function(POSITIONS)
    ),
    "a row's start": lambda b, h, q, k: k >= torch.tensor([1, 2])[b],
    "ids": lambda b, h, q, k: DOCUMENTS[b, k] >= 1,
    "no id": lambda b, h, q, k: DOCUMENTS[b, k] < 0,
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_any_other_mask_function_is_unreadable(name):
    with pytest.raises(Unreadable):
        read(UNREADABLE[name], 9)


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.packed_sequence_mask_function(torch.tensor([[0, 1, 0]])),  # a document in two pieces
        packed(masking_utils.causal_mask_function, torch.tensor([[0, 2, 1]]), torch.tensor([[0, 0, 0]])),
        lambda b, h, q, k: k < q,
    ],
)
def test_what_is_no_band_is_carried(function):
    made = mask(1, 3, 3, mask_function=function)
    assert isinstance(made, Mask)
    assert isinstance(made.visible, str)
    assert torch.equal(made.dense, expected_of(function, 3, 1))


def test_a_model_on_the_meta_device_has_shapes():
    model = pair(DECODERS["mistral"]())[1].to("meta")
    ids, attention_mask = (x.to("meta") for x in padded("left"))
    out = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
    out.sum().backward()
    assert out.shape == (2, 11, 64)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_masks_pass_through_checkpointing(use_reentrant):
    ids, attention_mask = padded("left")
    outcomes = []
    for recomputed in (False, True):
        model = pair(DECODERS["mistral"]())[1].train()
        model.config.use_cache = False
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        train(model, ids, attention_mask, ids.masked_fill(attention_mask == 0, -100))
        outcomes.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert torch.equal(*outcomes)
