"""``config.sagebwd = {"fuse": True}``: the model that it was, within rounding."""

import json
import re
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AttentionInterface,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    Ministral3Config,
    Ministral3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm import modeling_glm
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

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
    "Cohere": {},
    "Glm4Moe": {"use_qk_norm": True, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def build(name, fuse, recipe="full", implementation="sagebwd", **changes):
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_attention_heads=4, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, use_cache=False,
        **{"head_dim": 16, "num_hidden_layers": 2, "num_key_value_heads": 2, **MODELS.get(name, {}), **changes},
    )  # fmt: skip
    if implementation == "sagebwd":
        config.sagebwd = {"recipe": recipe} | ({} if fuse is None else {"fuse": fuse})
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
    pass_of_rows, attend = fusion.qk_norm_rope, fusion.attend

    def rows(*tensors, **settings):
        seen.eps.append(settings.get("eps"))
        seen.rows += 1
        return pass_of_rows(*tensors, **settings)

    def whole(query, key, value, given, *rest):
        seen.eps.append(given[2])
        seen.whole += 1
        return attend(query, key, value, given, *rest)

    monkeypatch.setattr(fusion, "qk_norm_rope", rows)
    monkeypatch.setattr(fusion, "attend", whole)
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


def test_with_a_cache_a_layer_runs_as_it_is(monkeypatch):
    """Training hears of it; a mask that is carried needs rows too, which one pass gives."""
    seen, ids = calls(monkeypatch), tokens(1, 12)
    model = build("Qwen3", fuse=True).train()
    monkeypatch.setattr(transformers_torch, "_said", set())
    with pytest.warns(
        UserWarning, match="of Qwen3Attention .*use_cache=False in training, in the call or in Qwen3Config"
    ):
        logits = [model(input_ids=ids, use_cache=True).logits]
    assert not seen.eps
    logits.append(model(input_ids=ids, use_cache=False).logits)
    assert (seen.rows, seen.whole) == (0, 2)
    carried = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    logits.append(model(input_ids=ids, attention_mask=carried, use_cache=False).logits)
    assert (seen.rows, seen.whole) == (2, 2)
    for x in logits[1:]:
        torch.testing.assert_close(x, logits[0], rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    "kind", ["layer norm", "hook", "hook of backward", "two eps", "forward", "forward of its class", "hook of all"]
)
def test_a_norm_that_is_not_known_runs_as_it_is(monkeypatch, request, kind):
    """Before the rest, which is rotary embedding and attention.

    Regression: what was changed of a class, or of all modules, once a model was made was left out.
    """
    if kind == "forward of its class":
        its = build("Qwen3", fuse=True).model.layers[0].self_attn.q_norm.__class__
        before = its.forward
        monkeypatch.setattr(its, "forward", lambda self, x: 3 * before(self, x))
    elif kind == "hook of all":
        twice = nn.modules.module.register_module_forward_hook(
            lambda module, given, out: 2 * out if type(module).__name__ == "Qwen3RMSNorm" else None
        )
        request.addfinalizer(twice.remove)

    def built(fuse):
        model = build("Qwen3", fuse=fuse)
        layer = model.model.layers[0].self_attn
        if kind == "layer norm":
            layer.q_norm = nn.LayerNorm(16)
        elif kind == "hook":
            layer.k_norm.register_forward_hook(lambda module, given, out: 2 * out)
        elif kind == "hook of backward":
            layer.k_norm.register_full_backward_hook(lambda module, given, out: None)
        elif kind == "two eps":
            layer.k_norm.variance_epsilon = 0.5
        elif kind == "forward":
            own = layer.q_norm.forward
            layer.q_norm.forward = lambda x: 3 * own(x)
        return model

    ids, mask = tokens(2, 24), torch.ones(2, 24, dtype=torch.long)
    plain, seen = run(built(fuse=False), ids, mask), calls(monkeypatch)
    fused = run(built(fuse=True), ids, mask)
    assert [eps is None for eps in seen.eps] == [True, " of " in kind and kind != "hook of backward"]
    assert all(relative_l2(a, e) < 1e-5 for a, e in zip(fused, plain))


class Layer(LlamaAttention):
    """A layer that does something of its own between projections and attention."""

    keeps = False

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        rows = (getattr(self, f"{side}_proj")(hidden_states).view(shape).transpose(1, 2) for side in "qkv")
        if self.training and self.keeps:
            self.kept = True
        query, key, value = self.between(*rows, *position_embeddings)
        attend = AttentionInterface()[self.config._attn_implementation]
        out, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*shape[:-2], -1)), weights


def rotated(q, k, v, cos, sin):
    return *apply_rotary_pos_emb(q, k, cos, sin), v


def change(q, k, v, of_q=lambda x: x, of_k=lambda x: x):
    return of_q(q), of_k(k), v


BETWEEN = {
    "scales the projections": (None, lambda self, q, k, v, cos, sin: rotated(2 * q, k, v, cos, sin)),
    "reads shapes": (None, lambda self, q, k, v, cos, sin: rotated(q, k, v, cos, sin)[: len(cos.shape)]),
    "has no positions": (None, lambda self, q, k, v, cos, sin: (q, k, v)),
    "scales what is rotated": (
        "does more to queries or keys than norm and rotary embedding: rmul",
        lambda self, *given: change(*rotated(*given), lambda x: 2 * x),
    ),
    "casts": (
        "does more to queries or keys .*: float",
        lambda self, *given: change(*rotated(*given), of_k=lambda x: x.float()),
    ),
    "cuts": (
        "does more to queries or keys .*: getitem",
        lambda self, *given: change(*rotated(*given), lambda x: x[..., :8]),
    ),
    "transposes": (
        "transposes channels, or rows that are rotated",
        lambda self, *given: change(*rotated(*given), lambda x: x.transpose(1, 2)),
    ),
    "rotates twice": (
        "rotates queries or keys twice",
        lambda self, q, k, v, cos, sin: rotated(*rotated(q, k, v, cos, sin), cos, sin),
    ),
    "rotates by other angles": (
        "does more to cos or sin .*: neg",
        lambda self, q, k, v, cos, sin: rotated(q, k, v, cos, -sin),
    ),
    "rotates otherwise": (
        "does more to cos or sin .*: unsqueeze",
        lambda self, q, k, v, cos, sin: (q * cos.unsqueeze(1), k, v),
    ),
    "rotates queries alone": (
        "attends to rows of which some are normalised and rotated",
        lambda self, q, k, v, cos, sin: (rotated(q, k, v, cos, sin)[0], k, v),
    ),
    "attends to keys": (
        "attends to rows of which some are normalised and rotated",
        lambda self, *given: (*rotated(*given)[:2], rotated(*given)[1]),
    ),
    "rotates the two apart": (
        "normalises and rotates queries and keys differently",
        lambda self, *given: (rotated(*given)[0], rotated(*given)[1], given[2]),
    ),
    "calls it otherwise": (
        "calls apply_rotary_pos_emb with other arguments",
        lambda self, q, k, v, cos, sin: (*apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2), v),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BETWEEN)
def test_a_layer_that_does_something_else_is_right_or_refused(what):
    """By what it does, whatever its source says."""
    fusion._install(Layer)
    refusal, between = BETWEEN[what]
    outcomes = []
    for fuse in (False, True):
        model = build("Llama", fuse=fuse)
        for layer in model.model.layers:
            layer.self_attn.__class__ = type("Own", (Layer,), {"between": between})
        ids, mask = tokens(2, 24), torch.ones(2, 24, dtype=torch.long)
        if fuse and refusal is not None:
            with pytest.raises(NotImplementedError, match=f"fuse is not supported for Own, which {refusal}"):
                run(model, ids, mask)
            return
        outcomes.append(run(model, ids, mask) if refusal is None else None)
    assert all(relative_l2(a, e) < 1e-5 for a, e in zip(*outcomes))


def test_a_layer_that_keeps_something_is_refused():
    """Its stand-in would, and be gone."""
    fusion._install(Layer)
    model = build("Llama", fuse=True).train()
    model.model.layers[0].self_attn.__class__ = type("Own", (Layer,), {"keeps": True})
    with pytest.raises(NotImplementedError, match="Own, which sets kept of its layer in forward"):
        model(input_ids=tokens(1, 8))


@pytest.mark.parametrize(
    ("config_class", "model_class", "changes", "refusal"),
    [
        (GPT2Config, GPT2LMHeadModel, {}, "GPT2Attention, which has a forward without position_embeddings"),
        (PhiConfig, PhiForCausalLM, {"num_key_value_heads": 2}, "PhiAttention, which does more to queries .*: cat"),
        (Ministral3Config, Ministral3ForCausalLM, {"num_key_value_heads": 2}, "Ministral3Attention, which does more"),
    ],
)  # fmt: skip
def test_families_that_do_something_else_are_refused(config_class, model_class, changes, refusal):
    config = config_class(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, use_cache=False, pad_token_id=0,
        bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, attn_pdrop=0.0, **changes,
    )  # fmt: skip
    config.sagebwd = {"fuse": True}
    model = model_class._from_config(config, attn_implementation="sagebwd")
    with pytest.raises(NotImplementedError, match=rf"fuse is not supported for {refusal}.*tested with 5\.17"):
        model(input_ids=tokens(1, 8))


@pytest.fixture
def passes(monkeypatch):
    """Where a config leaves `fuse` to the library, a CPU is for a GPU whose passes have norm and rotation within."""
    monkeypatch.setattr(fusion, "_has_passes", lambda device: True)


@pytest.mark.parametrize("name", MODELS)
def test_left_to_the_library_known_layers_are_fused(name, passes, monkeypatch):
    """And where attention's plan has nothing within, as here, numbers are the layer's own, bit for bit; gradients of
    weights of norms are sums of as many rows, or without those of padding."""
    ids = tokens(2, 40)
    for padding in (0, 7):
        mask = torch.ones(2, 40, dtype=torch.long)
        mask[1, 40 - padding :] = 0
        plain = run(build(name, fuse=False), ids, mask)
        with monkeypatch.context() as patch:
            seen = calls(patch)
            found = run(build(name, fuse=None), ids, mask)
        assert (seen.whole, seen.rows) == (2 if name in ("Llama", "Qwen3") else 0, 0)
        for a, e in zip(found, plain):
            assert relative_l2(a, e) < 1e-6 if padding else torch.equal(a, e)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_left_to_the_library_packed_documents_have_their_own_rows(name, passes, monkeypatch):
    given = {"input_ids": tokens(1, 40), "position_ids": torch.cat((torch.arange(24), torch.arange(16)))[None]}
    plain, seen = build(name, fuse=False)(**given).logits, calls(monkeypatch)
    assert torch.equal(build(name, fuse=None)(**given).logits, plain)
    assert seen.whole == 2


@pytest.mark.parametrize("what", ["norms", "tables"])
def test_left_to_the_library_rows_of_fp32_are_values_dtype(what, passes):
    """Regression: TypeError, where norms of queries and keys, or tables, stay FP32 in a model of 16 bits."""
    found = []
    for fuse in (False, None):
        model = build("Qwen3", fuse=fuse).to(torch.bfloat16)
        rotary = model.model.rotary_emb.forward
        if what == "tables":
            model.model.rotary_emb.forward = lambda *x, rotary=rotary: tuple(y.float() for y in rotary(*x))
        for layer in model.model.layers if what == "norms" else ():
            layer.self_attn.q_norm.float()
            layer.self_attn.k_norm.float()
        found.append(model(input_ids=tokens(1, 8)).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "what", ["no passes", "cache", "own cache", "rotary", "forward", "attention", "subclass", "learned", "sdpa"]
)
def test_left_to_the_library_other_layers_stay_as_they_are(what, monkeypatch, recwarn):
    model, given = build("Llama", fuse=None), {"input_ids": tokens(1, 8)}
    if what != "no passes":
        monkeypatch.setattr(fusion, "_has_passes", lambda device: True)
    if what == "cache":
        model.train()
        given["use_cache"] = True
    elif what == "own cache":  # no Cache of Transformers
        cache = DynamicCache()
        names = "update", "get_seq_length", "get_query_offset", "get_mask_sizes", "is_sliding", "is_compileable"
        given["past_key_values"] = SimpleNamespace(**{x: getattr(cache, x) for x in names if hasattr(cache, x)})
    elif what == "rotary":
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * cos[:, None], k))
    elif what == "forward":
        original = LlamaAttention.forward.__wrapped__
        monkeypatch.setattr(LlamaAttention, "forward", lambda self, *x, **more: original(self, *x, **more))
    elif what == "attention":
        attend, functions = AttentionInterface()["sagebwd"], AttentionInterface._global_mapping
        watched = lambda module, q, *x, **more: attend(module, q.abs(), *x, **more)  # noqa: E731
        monkeypatch.setitem(functions, "sagebwd", watched)
    elif what == "subclass":
        for layer in model.model.layers:
            layer.self_attn.__class__ = type("Own", (LlamaAttention,), {})
    elif what == "learned":
        rotary = model.model.rotary_emb.forward
        learned = lambda *x, **more: tuple(x.requires_grad_() for x in rotary(*x, **more))  # noqa: E731
        monkeypatch.setattr(model.model.rotary_emb, "forward", learned)
    elif what == "sdpa":
        model.set_attn_implementation("sdpa")
    seen = calls(monkeypatch)
    model(**given)
    assert not seen.eps
    assert not [x for x in recwarn if "fuse" in str(x.message)]


def test_layers_that_are_faster_were_timed():
    """The results files that `FASTER` names have steps that are faster with ``fuse`` than without."""
    folder = Path(__file__).parents[2] / "benchmarks/results"
    for name in fusion.FASTER.values():
        rows = json.loads((folder / name).read_text(encoding="utf-8"))["rows"]
        case = "attention", "model", "tokens", "context", "compiled"
        steps = {tuple(x.get(key) for key in case): x.get("ms", x.get("step_ms")) for x in rows}
        fused = [key for key in steps if "+fuse" in key[0]]
        assert fused
        for attention, *of in fused:
            plain = re.sub(r"\+fused?", "", attention), *of
            assert steps[attention, *of] < steps[plain], (name, attention, of)


def test_fuse_is_true_or_false():
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
    with pytest.raises(NotImplementedError, match=r"LlamaAttention, which has a forward .* or another library's"):
        model(input_ids=tokens(1, 8))


class Flagged(Qwen3RMSNorm):
    def __init__(self, dim, eps=1e-6, centred=False):
        super().__init__(dim, eps)


class Centred(Qwen3RMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class Upper(Qwen3RMSNorm):
    def forward(self, x):
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon).reciprocal()


@contextmanager
def of_16_bit():
    """Where a model of BF16 weights is made."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake", "inference", "bfloat16"])
def test_a_norm_is_known_by_its_numbers(where):
    """Wherever a model is made."""
    contexts = {"meta": torch.device("meta"), "fake": FakeTensorMode(), "inference": torch.inference_mode()}
    contexts["bfloat16"] = of_16_bit()
    fusion.norm_of.cache_clear()
    with contexts.get(where, nullcontext()):
        assert fusion.norm_of(Qwen3RMSNorm) == fusion.Norm(False, "variance_epsilon")
        assert fusion.norm_of(Gemma3RMSNorm) == fusion.Norm(True, "eps")
        assert fusion.norm_of(nn.RMSNorm) == fusion.Norm(False, "eps")
        for other in (nn.LayerNorm, nn.Linear, Flagged, Centred, Upper):
            assert fusion.norm_of(other) is None
        assert set(fusion.rotations_of(modeling_llama.apply_rotary_pos_emb)) == {True}


def test_a_rotary_embedding_is_known_by_its_numbers():
    def backwards(q, k, cos, sin):
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, -sin)

    def of_queries(q, k, cos, sin):
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)[0], k

    def shown(function):
        return {whole: (rope, change.__name__) for whole, (rope, change) in fusion.rotations_of(function).items()}

    assert shown(modeling_llama.apply_rotary_pos_emb) == {True: ("half", "_as_they_are")}
    assert shown(modeling_glm.apply_rotary_pos_emb) == dict.fromkeys((True, False), ("interleaved", "_repeated"))
    assert shown(modeling_cohere.apply_rotary_pos_emb) == {True: ("interleaved", "_as_they_are")}
    assert shown(modeling_glm4_moe.apply_rotary_pos_emb) == dict.fromkeys((True, False), ("half", "_as_they_are"))
    assert shown(modeling_gpt_oss.apply_rotary_pos_emb) == {False: ("half", "_doubled")}
    for other in (backwards, of_queries, torch.add, lambda q, k, cos, sin: q):
        assert shown(other) == {}
