"""``config.sagebwd = {"fuse": True}``: the model that it was, within rounding."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers import CohereConfig, CohereForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from sagebwd.integrations import transformers as integration
from sagebwd.integrations import transformers_fusion as fusion
from sagebwd.integrations import transformers_torch
from sagebwd.integrations.transformers import add_qk_norm
from sagebwd.reference.metrics import relative_l2
from tests.integrations.test_transformers import padded_batch, run, tokens

pytestmark = [pytest.mark.rounding, pytest.mark.usefixtures("registered")]

# Each with what sets it apart.
MODELS = {
    "Llama": {},
    "Qwen3": {},
    "Qwen2": {},
    "Mistral": {"sliding_window": 20},
    "Gemma3Text": {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    "Olmo3": {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    "Glm": {"partial_rotary_factor": 0.5},
    "Glm4Moe": {"use_qk_norm": True, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def build(name, fuse, recipe="full", implementation="sagebwd", **changes):
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_attention_heads=4, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, use_cache=False,
        **{"head_dim": 16, "num_hidden_layers": 2, "num_key_value_heads": 2, **MODELS.get(name, {}), **changes},
    )  # fmt: skip
    if implementation == "sagebwd":
        config.sagebwd = {"recipe": recipe, "fuse": fuse}
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    model = model_class._from_config(config, attn_implementation=implementation)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:  # of ones, or of zeros, that 1 is added to
                parameter += 0.3 * torch.randn(parameter.shape, generator=drawn)
    return model


def calls(monkeypatch):
    """Calls by layers: their eps, or None; how many of the pass that gives rows, and of attention with it within."""
    seen = SimpleNamespace(eps=[], rows=0, whole=0)

    def counted(name, real):
        def run(*tensors, **settings):
            seen.eps.append(settings.get("eps"))
            setattr(seen, name, getattr(seen, name) + 1)
            return real(*tensors, **settings)

        return run

    monkeypatch.setattr(integration, "qk_norm_rope", counted("rows", integration.qk_norm_rope))
    whole = counted("whole", integration.qk_norm_rope_attention)
    monkeypatch.setattr(integration, "qk_norm_rope_attention", whole)
    return seen


@pytest.mark.parametrize("padding", ["none", "right", "left", "hole"])
@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_is_the_unfused(name, padding, monkeypatch):
    """Norm and rotary embedding are attention's but where a row with a hole has queries of padding hidden."""
    ids, mask = padded_batch("left" if padding == "left" else "right")
    if padding in ("none", "hole"):
        mask = torch.ones_like(mask)
    if padding == "hole":
        mask[1, 30:40] = 0
    seen = calls(monkeypatch)
    plain = run(build(name, fuse=False), ids, mask)
    assert not seen.eps
    fused = run(build(name, fuse=True), ids, mask)
    assert (seen.rows, seen.whole) == ((2, 0) if padding == "hole" else (0, 2))
    assert [eps is not None for eps in seen.eps] == [name in ("Qwen3", "Gemma3Text", "Glm4Moe")] * 2
    for a, e in zip(fused, plain):
        assert relative_l2(a, e) < 1e-5


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3Text"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_no_farther_from_full_precision(name, dtype):
    ids, mask = padded_batch("left")
    exact = run(build(name, fuse=False), ids, mask)
    errors = []
    for fuse in (False, True):
        model = build(name, fuse=fuse)
        with torch.autocast("cpu", dtype):
            found = run(model, ids, mask)
        errors.append([relative_l2(a, e) for a, e in zip(found, exact)])
    plain, fused = errors
    assert all(a < 1.5 * e for a, e in zip(fused, plain)), errors


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("given", ["position_ids", "offsets"])
def test_packed_documents_have_positions_of_their_own(given, batch, monkeypatch):
    seen, lengths = calls(monkeypatch), (30, 50)
    model = build("Qwen3", fuse=True)
    ids = tokens(batch, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(batch, -1)
    packing = {}
    if given == "offsets":
        ends = torch.tensor([0, *lengths * batch]).cumsum(0, dtype=torch.int32)
        packing = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 50, "max_length_k": 50}
    together = model(input_ids=ids, position_ids=positions, **packing).logits
    assert (seen.rows, seen.whole) == (0, 2)
    alone = torch.cat([model(input_ids=x).logits for x in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_with_a_cache_attention_is_given_rows(monkeypatch):
    """Which the cache keeps, and training hears of; a mask that is carried needs them too."""
    seen, ids = calls(monkeypatch), tokens(1, 12)
    model = build("Qwen3", fuse=True).train()
    monkeypatch.setattr(transformers_torch, "_said", set())
    with pytest.warns(UserWarning, match="give use_cache=False in training"):
        model(input_ids=ids, use_cache=True)
    seen.rows = 0
    logits = [model(input_ids=ids, use_cache=use_cache).logits for use_cache in (True, False)]
    assert (seen.rows, seen.whole) == (2, 2)
    carried = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    logits.append(model(input_ids=ids, attention_mask=carried, use_cache=False).logits)
    assert (seen.rows, seen.whole) == (4, 2)
    for x in logits[1:]:
        torch.testing.assert_close(x, logits[0], rtol=1e-4, atol=1e-4)


def test_layers_have_recipes_of_their_own_beside_it(monkeypatch):
    seen, ids = calls(monkeypatch), tokens(1, 40)
    outcomes = []
    for fuse in (False, True):
        model = build("Llama", fuse=fuse, recipe="token")
        model.config.sagebwd["layers"] = {"1": {"recipe": "full"}}
        outcomes.append(model(input_ids=ids).logits)
    assert len(seen.eps) == 2
    assert relative_l2(outcomes[1], outcomes[0]) < 0.01


def test_checkpointing_and_a_trace_change_nothing():
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    model = build("Qwen3", fuse=True)
    model.train()
    wanted = run(model, ids, mask)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(torch.equal(a, e) for a, e in zip(run(model, ids, mask), wanted))
    model.gradient_checkpointing_disable()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = compiled(input_ids=ids).logits
    torch.testing.assert_close(logits, model(input_ids=ids).logits)


@pytest.mark.filterwarnings("ignore:.*decoding with a KV cache")
def test_generation_goes_on_from_a_cache():
    ids = tokens(1, 12)
    fused, plain = (
        build("Qwen3", fuse=fuse).generate(ids, max_new_tokens=6, do_sample=False, use_cache=True)
        for fuse in (True, False)
    )
    assert torch.equal(fused, plain)


def test_it_survives_saving(tmp_path, monkeypatch):
    build("Llama", fuse=True).save_pretrained(tmp_path)
    seen = calls(monkeypatch)
    LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sagebwd")(input_ids=tokens(1, 8))
    assert len(seen.eps) == 2


def test_other_attentions_of_the_class_are_left_alone(monkeypatch):
    model = build("Llama", fuse=True)
    seen, ids = calls(monkeypatch), tokens(1, 8)
    build("Llama", fuse=False, implementation="sdpa")(input_ids=ids)
    model.set_attn_implementation("sdpa")
    model(input_ids=ids)
    assert not seen.eps
    model.set_attn_implementation("sagebwd")
    model(input_ids=ids)
    assert len(seen.eps) == 2


def test_a_norm_that_was_added_stays():
    ids, mask = tokens(2, 24), torch.ones(2, 24, dtype=torch.long)
    plain, fused = (run(add_qk_norm(build("Llama", fuse=fuse)), ids, mask) for fuse in (False, True))
    assert all(relative_l2(a, e) < 1e-5 for a, e in zip(fused, plain))


def test_what_is_not_known_is_refused():
    config = CohereConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config.sagebwd = {"fuse": True}
    model = CohereForCausalLM._from_config(config, attn_implementation="sagebwd")
    with pytest.raises(NotImplementedError, match=r"config\.sagebwd: fuse is not supported for CohereAttention"):
        model(input_ids=tokens(1, 8))
    model = build("Qwen3", fuse=True)
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(16)
    with pytest.raises(NotImplementedError, match="q_norm of Qwen3Attention is a LayerNorm that is not known"):
        model(input_ids=tokens(1, 8))
    model.model.layers[0].self_attn.q_norm = model.model.layers[0].self_attn.k_norm
    model.model.layers[0].self_attn.k_norm.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="or has hooks"):
        model(input_ids=tokens(1, 8))
    model = build("Llama", fuse=False)
    model.config.sagebwd = {"fuse": 1}
    with pytest.raises(ValueError, match="fuse is 1; accepted: True or False"):
        model(input_ids=tokens(1, 8))


def test_it_is_read_at_every_call(monkeypatch):
    seen, ids = calls(monkeypatch), tokens(1, 8)
    model = build("Llama", fuse=False)
    for fuse, count in ((True, 2), (False, 2), (True, 4)):
        model.config.sagebwd = {"fuse": fuse}
        model(input_ids=ids)
        assert len(seen.eps) == count


def test_a_forward_that_another_library_replaced_is_refused(monkeypatch):
    model = build("Llama", fuse=True)
    attention_class = type(model.model.layers[0].self_attn)
    original = attention_class.forward.__wrapped__
    monkeypatch.setattr(attention_class, "forward", lambda self, *given, **kwargs: original(self, *given, **kwargs))
    with pytest.raises(
        NotImplementedError, match="fuse is not supported for LlamaAttention, whose forward is not one"
    ):
        model(input_ids=tokens(1, 8))
    assert fusion.form_of(attention_class) is None


def test_forms_are_read_from_the_source():
    llama = LlamaForCausalLM._from_config(build_config(LlamaConfig)).model.layers[0].self_attn
    qwen = Qwen3ForCausalLM._from_config(build_config(Qwen3Config)).model.layers[0].self_attn
    forms = [getattr(type(x).forward, "form", None) or fusion.form_of(type(x)) for x in (llama, qwen)]
    assert [form.norms for form in forms] == [fusion.NONE, fusion.HEADS]
    assert fusion.form_of(nn.Linear) is None


def build_config(config_class):
    return config_class(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
