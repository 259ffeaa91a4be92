"""Llama and Qwen3 under attn_implementation="sagebwd": as under SDPA, padded and packed batches included."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AutoModel,
    BloomConfig,
    CLIPConfig,
    CLIPModel,
    ColQwen2Config,
    ColQwen2ForRetrieval,
    DataCollatorWithFlattening,
    DebertaV2Config,
    FalconConfig,
    Gemma4AudioConfig,
    Gemma4AudioModel,
    Gemma4Config,
    InformerConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LongformerConfig,
    MptConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTModel,
)

from sagebwd.integrations import transformers as integration
from sagebwd.integrations import transformers_torch
from sagebwd.integrations.transformers_settings import settings
from sagebwd.recipe import Recipe
from sagebwd.reference.metrics import cosine, relative_l2

pytestmark = [pytest.mark.rounding, pytest.mark.usefixtures("registered")]

MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
# relative L2 of logits and of all gradients of a two-layer model against SDPA: measured 2026-11-21, with a margin
FLOORS = {"full": (1e-5, 1e-4), "token": (0.01, 0.03), "paper": (0.015, 0.08)}


# how near a row is to its run alone: other shapes round otherwise, and codes at ties may then fall on the other side,
# which is less than what rounding all of them does; a token that leaks is a tenth
ALONE = {"full": 1e-5, "token": FLOORS["token"][0]}


def build(name, recipe="sdpa", **changes):
    config_class, model_class = MODELS[name]
    config = config_class(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        **{"head_dim": 16, **changes},
    )  # fmt: skip
    torch.manual_seed(0)
    if recipe == "sdpa":
        return model_class._from_config(config, attn_implementation="sdpa")
    config.sagebwd = {"recipe": recipe}
    return model_class._from_config(config, attn_implementation="sagebwd")


def tokens(*shape, seed=0):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))


def padded_batch(side):
    """Lengths 100 and 61."""
    ids, mask = tokens(2, 100), torch.ones(2, 100, dtype=torch.long)
    hidden = slice(61, None) if side == "right" else slice(0, 39)
    mask[1, hidden], ids[1, hidden] = 0, 0
    return ids, mask


def run(model, ids, mask):
    """Logits, zero at padding, and all gradients as one vector."""
    labels = ids.masked_fill(mask == 0, -100)
    outcome = model(input_ids=ids, attention_mask=mask, labels=labels)
    model.zero_grad()
    outcome.loss.backward()
    gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    return outcome.logits.detach() * mask[..., None], gradients


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", FLOORS)
@pytest.mark.parametrize("side", ["right", "left", "none"])
def test_swapping_sdpa_changes_no_more_than_the_recipe_does(name, recipe, side):
    ids, mask = padded_batch(side) if side != "none" else (tokens(2, 100), torch.ones(2, 100, dtype=torch.long))
    expected, actual = (run(build(name, choice), ids, mask) for choice in ("sdpa", recipe))
    for a, e, floor in zip(actual, expected, FLOORS[recipe]):
        assert relative_l2(a, e) < floor
    if recipe != "full":
        assert not torch.equal(actual[0], expected[0])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ALONE)
@pytest.mark.parametrize("given", ["offsets", "position_ids"])
def test_packed_documents_are_their_separate_runs(name, recipe, given):
    documents = [tokens(n, seed=n) for n in (40, 7, 65)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=given == "offsets", return_tensors="pt")(
        [{"input_ids": document.tolist()} for document in documents]
    )
    batch.pop("labels")
    model = build(name, recipe)
    packed = model(**batch).logits[0]
    start = 0
    for document in documents:
        alone = model(input_ids=document[None]).logits[0]
        assert relative_l2(packed[start : start + len(document)], alone) < ALONE[recipe]
        start += len(document)


@pytest.mark.parametrize("window", [1, 16, 50, 80])
def test_a_sliding_window_without_a_mask(window):
    """As wrappers call that divide heads among processes (Ulysses), which cannot make one; 50 tokens see 50.

    Regression: it was refused.
    """
    layer = build("llama", "full").model.layers[0].self_attn
    q, k, v = (torch.randn(2, heads, 50, 16) for heads in (4, 2, 2))
    out, _ = integration.attention(layer, q, k, v, None, sliding_window=window)
    visible = torch.ones(50, 50, dtype=torch.bool).tril().triu(1 - window)
    expected = F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
    assert relative_l2(out, expected.transpose(1, 2)) < 1e-5
    with pytest.raises(NotImplementedError, match=f"sliding_window={window} with 20 queries and 100 keys and without"):
        integration.attention(
            layer, q[:, :, :20], *(x.repeat(1, 1, 2, 1) for x in (k, v)), None, sliding_window=window
        )


OFFSETS = torch.tensor([0, 20, 50], dtype=torch.int32)
PACKED = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 30, "max_length_k": 30}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"cu_seq_lens_k": None, "max_length_k": None},
            ValueError,
            "cu_seq_lens_q without cu_seq_lens_k, max_length_k: packed documents need cu_seq_lens_q",
        ),
        ({"cu_seq_lens_q": None}, ValueError, "cu_seq_lens_k without cu_seq_lens_q: packed documents need"),
        ({"max_length_q": None}, ValueError, "cu_seq_lens_q and cu_seq_lens_k without max_length_q"),
        ({"cu_seq_lens_q": [0, 20, 50]}, TypeError, "cu_seq_lens_q: expected an int32 tensor, got list"),
        ({"cu_seq_lens_q": OFFSETS.long()}, ValueError, "^cu_seq_lens_q: expected int32 of shape"),
        ({"cu_seq_lens_k": OFFSETS[:2]}, ValueError, "^cu_seq_lens_q and cu_seq_lens_k name 2 and 1 sequences"),
        ({"max_length_q": 30.0}, TypeError, "^max_length_q=30.0 must be an integer"),
        ({"max_length_q": 3}, ValueError, "^max_length_q=3 is less than the longest sequence, 30"),
        ({"scaling": "half"}, TypeError, "^scaling='half' must be a number"),
        ({"s_aux": torch.zeros(3)}, ValueError, r"^s_aux: expected shape \(4,\)"),
        ({"s_aux": torch.zeros(4, dtype=torch.long)}, TypeError, "^s_aux: dtype"),
        (
            dict.fromkeys(PACKED) | {"attention_mask": torch.zeros(1, 1, 49, 50)},
            ValueError,
            "^attention_mask: shape .* does not broadcast",
        ),
        (
            {"attention_mask": torch.zeros(1, 1, 50, 50)},
            NotImplementedError,
            "^cu_seq_lens_q beside an attention_mask of four dimensions",
        ),
        ({"sliding_window": (8, 8)}, TypeError, r"^sliding_window=\(8, 8\) must be an integer"),
        ({"sliding_window": 0}, ValueError, "^sliding_window=0 must be at least 1"),
    ],
)
def test_what_is_wrong_is_said_in_the_callers_words(changes, error, message):
    """Regression: a KeyError of offsets that lack a part, and names of `sage_attention`'s arguments."""
    layer = build("llama", "full").model.layers[0].self_attn
    inputs = [torch.randn(1, 4, 50, 16) for _ in range(3)]
    with pytest.raises(error, match=message):
        integration.attention(layer, *inputs, **{"attention_mask": None} | PACKED | changes)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_norms_in_fp32_beside_quantised_weights(dtype):
    """Regression: a StopIteration, and queries in FP8; or beside norms in FP32 all in that."""
    layer = build("qwen3", "full").model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 50, 16) for heads in (4, 2, 2))
    expected, _ = integration.attention(layer, *(x.bfloat16() for x in (q, k, v)), None)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = torch.zeros(2, 2, dtype=dtype)
        getattr(layer, name).weight = torch.nn.Parameter(weight, requires_grad=False)
    assert torch.equal(integration.attention(layer, q, k, v.bfloat16(), None)[0], expected)
    del layer.q_norm, layer.k_norm
    assert torch.equal(integration.attention(layer, q, k, v.bfloat16(), None)[0], expected)


@pytest.mark.parametrize("name", MODELS)
def test_autocast_leaves_q_and_k_in_fp32_and_v_in_bf16(name):
    """The trap of Trainer(bf16=True): three dtypes reach the attention function."""
    model, seen = build(name, "token"), []
    real = integration.sage_attention

    def spy(query, key, value, **arguments):
        seen.append({query.dtype, key.dtype, value.dtype})
        return real(query, key, value, **arguments)

    ids = tokens(2, 40)
    integration.sage_attention = spy
    try:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    finally:
        integration.sage_attention = real
    loss.backward()
    assert seen == [{torch.bfloat16}] * 2
    for projection in ("q_proj", "k_proj", "v_proj"):
        gradient = getattr(model.model.layers[0].self_attn, projection).weight.grad
        assert gradient.abs().sum() > 0
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("targets", [["q_proj"], ["v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]], ids="-".join)
def test_adapters_of_a_frozen_model_have_the_gradients_of_sdpa(targets):
    """PEFT's LoRA: in the first layer what is not adapted needs no gradient."""
    peft, gradients = pytest.importorskip("peft"), []
    ids = tokens(2, 40)
    for recipe in ("sdpa", "full"):
        model = build("llama", recipe)
        lora = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        tuned = peft.get_peft_model(model, lora)
        tuned(input_ids=ids, labels=ids).loss.backward()
        trained = {name: x.grad for name, x in tuned.named_parameters() if x.requires_grad}
        assert len(trained) == 2 * 2 * len(targets)  # of two layers
        gradients.append(torch.cat([x.flatten() for x in trained.values()]))
    assert relative_l2(*reversed(gradients)) < FLOORS["full"][1]


def test_generation_with_a_cache_says_that_it_decodes_with_sdpa(monkeypatch):
    monkeypatch.setattr(transformers_torch, "_said", set())
    ids = tokens(1, 40)
    outcomes = []
    for recipe in ("sdpa", "full"):
        model = build("qwen3", recipe).eval()
        arguments = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
        if recipe == "sdpa":
            outcomes.append(model.generate(ids, **arguments))
        else:
            with pytest.warns(UserWarning, match="decoding with a KV cache"):
                outcomes.append(model.generate(ids, **arguments))
    assert torch.equal(*outcomes)


def test_settings_survive_saving_and_override_by_layer(tmp_path):
    model = build("qwen3", "paper")
    model.config.sagebwd = {"recipe": "paper", "layers": {"1": {"recipe": "full"}}}
    model.save_pretrained(tmp_path)
    again = Qwen3ForCausalLM.from_pretrained(tmp_path, attn_implementation="sagebwd")
    assert settings(again.config, 0) == {"recipe": "paper", "impl": None}
    assert settings(again.config, 1) == {"recipe": "full", "impl": None}
    ids = tokens(1, 80)
    with torch.no_grad():
        mixed = again(input_ids=ids).logits
        pure = build("qwen3", "paper")(input_ids=ids).logits
    assert not torch.equal(mixed, pure)
    assert cosine(mixed, pure) > 0.99


def test_unknown_setting_raises():
    model = build("llama", "token")
    model.config.sagebwd = {"recip": "token"}
    with pytest.raises(ValueError, match="'recip' is not known; accepted: recipe, impl, fuse, layers"):
        model(input_ids=tokens(1, 8))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"2": {}}, r"layers has '2', which is no layer of the model; accepted: 0 to 1"),
        ({-1: {}}, "layers has -1"),
        ({"first": {}}, "layers has 'first'"),
        ({True: {}}, "layers has True"),
        ({0: {}, "0": {}}, "layers has 0 twice"),
        ({"0": {"recip": "full"}}, "'recip' is not known"),
        ({"0": "full"}, r"layers has 'full' for '0'; accepted: a dictionary, as \{'0': \{'recipe': 'full'\}\}"),
        ({"0": {}, "1": None}, "layers has None for '1'; accepted"),
        (["full", "token"], r"layers is \['full', 'token'\]; accepted: a dictionary"),
    ],
)
def test_layers_that_there_are_not(layers, message):
    model = build("llama", "token")
    model.config.sagebwd = {"layers": layers}
    with pytest.raises(ValueError, match=message):
        model(input_ids=tokens(1, 8))


def test_a_recipe_in_a_config_is_a_text():
    """Regression: a Recipe ran, and the config could not be saved once the model was trained."""
    model = build("llama", "token")
    model.config.sagebwd = {"recipe": Recipe.parse("token(o=16bit)")}
    with pytest.raises(ValueError, match=r"recipe is a Recipe, which could not.*its text, 'token\(o=16bit\)'"):
        model(input_ids=tokens(1, 8))


def test_layers_are_numbers_too():
    """Regression: only texts were looked up, and a number was ignored."""
    model, ids = build("llama", "token"), tokens(1, 20)
    outcomes = []
    for key in ("1", 1):
        model.config.sagebwd = {"recipe": "token", "layers": {key: {"recipe": "full"}}}
        outcomes.append(model(input_ids=ids).logits)
    model.config.sagebwd = {"recipe": "token"}
    assert torch.equal(*outcomes)
    assert not torch.equal(outcomes[0], model(input_ids=ids).logits)


def test_layers_of_attentions_that_do_not_know_theirs():
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8)
    config.sagebwd = {"recipe": "full", "layers": {"0": {"recipe": "token"}}}
    model = ViTModel._from_config(config, attn_implementation="sagebwd")
    with pytest.raises(NotImplementedError, match="attentions have no layer_idx"):
        model(pixel_values=torch.zeros(1, 3, 16, 16))


def clip(**changes):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return CLIPConfig(
        text_config=sizes | {"vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 63} | changes,
        vision_config=sizes | {"image_size": 16, "patch_size": 8}, projection_dim=16,
    )  # fmt: skip


def test_a_model_of_several_parts_hands_its_settings_down(tmp_path):
    """Regression: only a part's own config was read."""
    seen = []

    def spy(module, *arguments, **options):
        seen.append(settings(module.config, None)["recipe"])
        return integration.attention(module, *arguments, **options)

    inputs = {"input_ids": tokens(1, 8), "pixel_values": torch.rand(1, 3, 16, 16)}
    AttentionInterface.register("sagebwd", spy)
    try:
        config = clip(sagebwd={"recipe": "paper"})
        config.sagebwd = {"recipe": "full"}
        model = CLIPModel._from_config(config, attn_implementation="sagebwd")
        model(**inputs)
        assert set(seen) == {"full", "paper"}  # the text part has its own
        model.save_pretrained(tmp_path)
        model = CLIPModel.from_pretrained(tmp_path, attn_implementation="sagebwd")
        model.config.text_config.sagebwd, model.config.sagebwd = None, {"recipe": "token"}  # and on a running model
        seen.clear()
        model(**inputs)
        assert set(seen) == {"token"}
        model.config.sagebwd = {"layers": {"0": {}}}
        with pytest.raises(ValueError, match=r"as in config\.\w+\.sagebwd"):
            model(**inputs)
    finally:
        integration.register()


@pytest.mark.parametrize(
    "change", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_parts_that_are_called_past_the_whole_follow_its_settings(change):
    """Regression: set on a running model they were those of the whole's last forward."""
    for recipe in ("full", "token"):
        model = change(CLIPModel._from_config(clip(), attn_implementation="sagebwd"))
        model.config.sagebwd = {"recipe": recipe}
        model.get_image_features(torch.rand(1, 3, 16, 16))
        assert settings(model.config.vision_config, None)["recipe"] == recipe
        model.config.sagebwd = {"recipe": "paper"}
        model.get_text_features(tokens(1, 8))
        assert settings(model.config.text_config, None)["recipe"] == "paper"


@pytest.mark.parametrize("change", ["in place", "anew", "before it is loaded", "of a copy"])
def test_a_saved_models_parts_follow_its_settings(tmp_path, change):
    """Regression: what parts had been handed was saved as their own, whatever became of the whole's."""
    config = clip(sagebwd={"recipe": "paper"})
    config.sagebwd = {"recipe": "full"}
    CLIPModel._from_config(config, attn_implementation="sagebwd").save_pretrained(tmp_path)
    config = CLIPConfig.from_pretrained(tmp_path) if change != "of a copy" else copy.deepcopy(config)
    if change in ("before it is loaded", "of a copy"):
        config.sagebwd = {"recipe": "token"}
    model = CLIPModel.from_pretrained(tmp_path, config=config, attn_implementation="sagebwd")
    if change == "in place":
        model.config.sagebwd["recipe"] = "token"
    elif change == "anew":
        model.config.sagebwd = {"recipe": "token"}
    model(input_ids=tokens(1, 8), pixel_values=torch.rand(1, 3, 16, 16))
    recipes = [settings(part, None)["recipe"] for part in (model.config.vision_config, model.config.text_config)]
    assert recipes == ["token", "paper"]  # the text part has its own


def test_a_parts_settings_that_are_changed_in_place_are_its_own(tmp_path):
    """Regression: they were the whole's, in which a part's ``layers`` are refused."""
    config = clip()
    config.sagebwd = {"recipe": "full"}
    model = CLIPModel._from_config(config, attn_implementation="sagebwd")
    model.config.text_config.sagebwd["layers"] = {"0": {"recipe": "token"}}
    model.save_pretrained(tmp_path)
    config = CLIPModel.from_pretrained(tmp_path, attn_implementation="sagebwd").config
    assert settings(config.text_config, 0)["recipe"] == "token"
    assert settings(config.vision_config, 0)["recipe"] == "full"


def retriever():
    """A model whose part has parts, one of which it calls past that part."""
    text = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64,
        "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    special = {f"{name}_token_id": 63 - n for n, name in enumerate(("image", "video", "vision_start", "vision_end"))}
    return ColQwen2ForRetrieval(
        ColQwen2Config(
            vlm_config={"model_type": "qwen2_vl", "text_config": text, "vision_config": vision, **special},
            embedding_dim=8,
        )
    )


@pytest.mark.parametrize("asked", ["sagebwd", {"vlm_config": "sagebwd"}], ids=str)
@pytest.mark.parametrize("first", [False, True])
def test_settings_reach_parts_of_parts(asked, first, monkeypatch):
    """Regression: not those that are called past the part that has them, nor where the model itself runs another."""
    seen = []

    def spy(module, *arguments, **options):
        seen.append(settings(module.config, None)["recipe"])
        return integration.attention(module, *arguments, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sagebwd", spy)
    model = retriever()
    if first:
        model.config.sagebwd = {"recipe": "full"}
    model.set_attn_implementation(asked)
    model.config.sagebwd = {"recipe": "full"}
    ids = torch.tensor([[5, 63, 63, 63, 63, 7]])
    image = {"pixel_values": torch.rand(1, 16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    model(input_ids=ids, **image)
    parts = model.vlm.visual, model.vlm.language_model  # Transformers 5.17 leaves a part's parts as they are
    assert seen == ["full" for part in parts if part.config._attn_implementation == "sagebwd"]


SELF_MADE = {
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2),
    "deberta-v2": DebertaV2Config(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
    "falcon": FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
    "mpt": MptConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=2),
    "longformer": LongformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
}


@pytest.mark.parametrize("name", SELF_MADE)
def test_models_that_make_no_call_are_refused(name):
    """Regression: a KeyError, or a model that ran as ever."""
    config = SELF_MADE[name]
    with pytest.raises(NotImplementedError, match=r"computes its attention itself.*use attn_implementation='sdpa'"):
        AutoModel.from_config(config, attn_implementation="sagebwd")
    model = AutoModel.from_config(config, attn_implementation="eager")
    model.set_attn_implementation("sagebwd")  # Transformers itself warns
    assert model.config._attn_implementation == "eager"


of_its_own_mask = pytest.mark.skipif(Gemma4AudioModel._supports_sdpa, reason="Transformers 5.17 has it right")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("InformerModel", InformerConfig(prediction_length=4, context_length=8, d_model=32)),
        pytest.param(
            "Gemma4AudioModel",
            Gemma4AudioConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
            marks=of_its_own_mask,
        ),
    ],
)
def test_a_model_that_masks_by_itself_in_some_attentions_is_refused(name, config):
    """Regression: Informer added a boolean mask to its scores, wrong by 1.6%; Gemma 4's audio asked for its finfo."""
    with pytest.raises(NotImplementedError, match=f"{name} computes its attention itself"):
        AutoModel.from_config(config, attn_implementation="sagebwd")


@of_its_own_mask
def test_parts_that_cannot_stay_eager():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = sizes | {"vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8, "hidden_size_per_layer_input": 0}
    text |= {"global_head_dim": 8, "layer_types": ["full_attention"], "num_kv_shared_layers": 0}
    audio = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Gemma4Config(text_config=text, audio_config=audio, vision_config=sizes | {"head_dim": 8})
    with pytest.raises(NotImplementedError, match="Gemma4AudioModel computes its attention itself"):
        AutoModel.from_config(config, attn_implementation="sagebwd")
    parts = {"text_config": "sagebwd", "vision_config": "sagebwd", "audio_config": "eager"}
    model = AutoModel.from_config(config, attn_implementation=parts)
    assert model.audio_tower.config._attn_implementation == "eager"
    assert model.language_model.config._attn_implementation == "sagebwd"
    assert model(input_ids=torch.arange(6)[None]).last_hidden_state.shape == (1, 6, 32)


def test_models_of_ones_own_are_not_refused():
    class OwnAttention(torch.nn.Module):
        pass

    class Own(LlamaForCausalLM):
        pass

    config = build("llama").config
    assert Own._from_config(config, attn_implementation="sagebwd").config._attn_implementation == "sagebwd"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.1}, r"attention dropout 0\.1"),
        ({"softcap": 30.0}, "softcap: soft-capped logits.*use 'eager' or 'flex_attention'"),
        ({"sinks": torch.zeros(1, 4, 8, 1)}, "sinks: a sink for each query"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"indices": torch.zeros(1)}, "indices: attention to chosen keys"),
        ({"block_indices": torch.zeros(1)}, "block_indices: attention to chosen blocks of keys"),
        ({"cache": object()}, "cache: a paged cache"),
        (
            {"sliding_window": 7, "is_causal": False},
            "sliding_window=7 with is_causal=False and without an attention_mask",
        ),
        ({"attention_mask": torch.ones(1, 8)}, r"attention_mask of shape \(1, 8\)"),
        ({"attention_mask": "causal"}, "an attention_mask that is a str"),
    ],
)
def test_refused(arguments, message):
    module = build("llama", "token").model.layers[0].self_attn
    inputs = [torch.randn(1, 4, 8, 16) for _ in range(3)]
    with pytest.raises(NotImplementedError, match=message):
        integration.attention(module, *inputs, **({"attention_mask": None} | arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_compiles_on_a_gpu(name):
    torch._dynamo.reset()
    model, ids = build(name, "token", use_cache=False).to("cuda", torch.bfloat16), tokens(2, 200).cuda()
    eager = model(input_ids=ids, labels=ids).loss
    compiled = torch.compile(model, fullgraph=True)(input_ids=ids, labels=ids).loss
    compiled.backward()
    assert abs(compiled.item() - eager.item()) < 0.02
    assert all(torch.isfinite(weight.grad).all() and weight.grad.abs().sum() > 0 for weight in model.parameters())
