"""Masked models of Transformers under torch.compile: no graph break, and SDPA's numbers."""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    Gemma3ForCausalLM,
    Llama4ForCausalLM,
    LlamaConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from sagebwd.reference.metrics import relative_l2
from tests.integrations.test_transformers_masks import (
    BART,
    DECODERS,
    HOLES,
    SIZES,
    llama4,
    loss_and_gradients,
    padded,
    pair,
    tokens,
)

pytestmark = pytest.mark.usefixtures("registered")
# every layer is traced: of one kind one is enough, where no test is of what layers share
ONE_LAYER = SIZES | {"num_hidden_layers": 1}
SIX_LAYERS = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def run(model, ids, attention_mask):
    """Logits of real tokens; their gradients are in the weights."""
    labels = ids.masked_fill(attention_mask == 0, -100)
    out = model(input_ids=ids, attention_mask=attention_mask, labels=labels)
    out.loss.backward()
    return out.logits.detach()[attention_mask == 1]


def test_chunks_compile_without_a_graph_break():
    torch._dynamo.reset()
    exact, model = pair(llama4(8), Llama4ForCausalLM)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = tokens(2, 20)
    assert relative_l2(compiled(input_ids=ids, use_cache=False).logits, exact(input_ids=ids).logits) < 1e-5


@pytest.mark.parametrize(
    ("model_class", "side"), [(MistralForCausalLM, "left"), (MistralForCausalLM, "none"), (Gemma3ForCausalLM, "right")]
)
def test_a_padded_training_step_compiles_without_a_graph_break(model_class, side):
    torch._dynamo.reset()
    name = model_class.__name__.removesuffix("ForCausalLM").lower()
    ids, attention_mask = padded(side, (20, 20 if side == "none" else 12))
    exact, model = pair(DECODERS[name](), model_class)
    exact.config.use_cache = model.config.use_cache = False
    compiled = torch.compile(model.train(), fullgraph=True, backend="aot_eager")
    assert relative_l2(run(compiled, ids, attention_mask), run(exact.train(), ids, attention_mask)) < 1e-4
    gradients = [torch.cat([weight.grad.flatten() for weight in x.parameters()]) for x in (model, exact)]
    assert relative_l2(*gradients) < 1e-4


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_compiled_step_with_holes_of_padding_is_sdpas(name):
    """And as outside of a trace, zeros after a row's last real token alone."""
    torch._dynamo.reset()
    ids, models, outcomes = tokens(3, 8), pair(DECODERS[name]()), []
    for model in models:
        model.config.use_cache = False
    for model in (models[0], models[1], torch.compile(models[1], fullgraph=True, backend="aot_eager")):
        outcomes.append(loss_and_gradients(model, HOLES, input_ids=ids, labels=ids))
    for actual in outcomes[1:]:
        for a, e in zip(actual[1:], outcomes[0][1:]):
            assert relative_l2(a, e) < 1e-4
    torch.testing.assert_close(outcomes[2][0], outcomes[1][0])


def test_encoders_and_cross_attention_compile_without_a_graph_break():
    ids, attention_mask = padded("left", (20, 12))
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    )  # fmt: skip
    of_bart = BartConfig(**BART | {"encoder_layers": 1, "decoder_layers": 1})
    bert, bart = pair(config, BertModel), pair(of_bart, BartForConditionalGeneration)
    for (exact, model), options in ((bert, {}), (bart, {"decoder_input_ids": tokens(2, 9), "use_cache": False})):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        real = slice(None) if options else attention_mask == 1
        actual, expected = (x(ids, attention_mask, **options)[0][real] for x in (compiled, exact))
        assert relative_l2(actual, expected) < 1e-5


@pytest.mark.parametrize("padding", [False, True])
def test_compiled_decoding_with_a_static_cache_is_sdpas(padding):
    torch._dynamo.reset()
    outcomes = []
    for model in pair(LlamaConfig(**ONE_LAYER)):
        ids, attention_mask = padded("left", (20, 12))
        inputs, cache = {"attention_mask": attention_mask} if padding else {}, StaticCache(model.config, 32)
        with torch.no_grad():
            logits = [model(ids, past_key_values=cache, **inputs).logits[:, -1:]]
            step = model
            if model.config._attn_implementation == "sagebwd":
                step = torch.compile(model, fullgraph=True, backend="aot_eager")
            for _ in range(3):
                if padding:
                    inputs["attention_mask"] = F.pad(inputs["attention_mask"], (0, 1), value=1)
                logits.append(step(logits[-1].argmax(-1), past_key_values=cache, **inputs).logits)
        outcomes.append(torch.cat(logits, 1))
    assert relative_l2(*outcomes) < 1e-5


def test_compiled_positions_are_sdpas_and_packing_that_is_not_seen_is_an_error():
    """Regression: positions that jump were an error. Without a mask and a cache they are documents, as under SDPA."""
    torch._dynamo.reset()
    theirs, ours = pair(LlamaConfig(**ONE_LAYER))
    compiled, ids = torch.compile(ours, fullgraph=True, backend="aot_eager"), tokens(2, 20)
    places = torch.arange(20)[None]
    plain, cached, masked = (
        {"use_cache": False}, {"use_cache": True}, {"use_cache": False, "attention_mask": torch.ones_like(ids)}
    )  # fmt: skip

    def same(positions, **beside):
        inputs = {"input_ids": ids, "position_ids": positions, **beside}
        assert relative_l2(compiled(**inputs).logits, theirs(**inputs).logits) < 1e-5

    def refused(positions, **beside):
        with pytest.raises(RuntimeError, match="packed documents are not seen"):
            compiled(input_ids=ids, position_ids=positions, **beside)

    for beside in (plain, cached):
        same(places, **beside)
        refused(places % 8, **beside)
    for jumping in (3 * places, places // 2):
        same(jumping, **cached)
        same(jumping, **masked)
        refused(jumping, **plain)


def elements_in_the_graph_of(model, **inputs):
    """Shapes of values in the compiled forward of a causal training step that have an element a query and key."""
    torch._dynamo.reset()
    shapes = []

    def record(graph, _):
        values = (node.meta.get("example_value") for node in graph.graph.nodes)
        shapes.extend(x.shape for x in values if isinstance(x, torch.Tensor))
        return graph

    compiled = torch.compile(model.train(), fullgraph=True, backend=record)
    assert compiled(input_ids=tokens(2, 20), use_cache=False, **inputs).logits.requires_grad
    assert shapes
    return [tuple(shape) for shape in shapes if shape[-2:] == (20, 20)]


def test_a_compiled_causal_step_has_no_mask_of_elements(monkeypatch):
    """Where SDPA's does, which makes its kernels slower: a trace cannot rule out packed sequences."""
    theirs, ours = pair(LlamaConfig(**ONE_LAYER))
    assert elements_in_the_graph_of(theirs)
    for settings in ({"recipe": "auto"}, {"recipe": "token"}, {"recipe": "auto", "fuse": True}):
        ours.config.sagebwd = settings
        assert elements_in_the_graph_of(ours) == []
    monkeypatch.setitem(
        AttentionMaskInterface._global_mapping, "sdpa", flash_attention_mask
    )  # as docs/steps.md has it
    assert elements_in_the_graph_of(theirs) == []


def test_layers_that_are_compiled_by_themselves_share_what_is_compiled():
    """Regression: under torch 2.11 the index of a layer was guarded, and the eleventh layer ran uncompiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = pair(Qwen3Config(**SIX_LAYERS), Qwen3ForCausalLM)[1].train()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    model(input_ids=tokens(2, 20), use_cache=False).logits.sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("layers", [None, {"1": {"recipe": "full"}}])
def test_a_layers_index_is_read_where_layers_have_settings(layers):
    model = pair(Qwen3Config(**SIX_LAYERS), Qwen3ForCausalLM)[1]
    model.config.sagebwd = {"layers": layers} if layers else {"recipe": "token"}
    read = []

    class Watched(type(model.model.layers[0].self_attn)):
        def __getattribute__(self, name):
            if name == "layer_idx":
                read.append(name)
            return super().__getattribute__(name)

    for layer in model.model.layers:
        layer.self_attn.__class__ = Watched
    model(input_ids=tokens(2, 20), use_cache=False)
    assert bool(read) == bool(layers)
