"""Models at their real head_dims, on the meta device, and layers of wide heads."""

import warnings

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, Gemma4ForCausalLM, Gemma4TextConfig

from sagebwd.auto import choice as auto_choice
from sagebwd.counts import counts
from sagebwd.integrations import transformers_torch
from sagebwd.reference.metrics import relative_l2
from tests.gpus import DEVICE, on_gpu

TOKEN, TORCH = "token on reference", "full precision on torch"
# Of the model that the default config is of.
LAYERS = {
    "bert": 12, "cohere2": 40, "deepseek_v3": 61, "gemma": 28, "gemma3_text": 26, "gemma4_text": 30,
    "gemma4_unified_text": 30, "glm4": 40, "llama": 32, "mistral": 32, "modernbert": 22, "olmo2": 32, "phi3": 32,
    "qwen2": 32, "qwen3": 32, "qwen3_moe": 24,
}  # fmt: skip
IDS = torch.randint(1, 64, (1, 96), generator=torch.Generator().manual_seed(0))
with torch.device("meta"):
    torch.empty(0)  # here torch remembers its functions that allocate, before a fixture replaces some


@pytest.fixture(autouse=True)
def fresh(registered):
    """No calls counted and nothing said yet; counts of other tests are left alone."""
    before = counts.copy()
    counts.clear()
    transformers_torch._said.clear()
    yield
    counts.clear()
    counts.update(before)


def gemma4(implementation="sagebwd", global_head_dim=512, **settings):
    """A sliding layer of 256 channels a head and a global one of 512, as in Gemma 4, and little else."""
    config = Gemma4TextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=64, hidden_size_per_layer_input=8,
        intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, sliding_window=32,
        layer_types=["sliding_attention", "full_attention"], head_dim=256, global_head_dim=global_head_dim,
        pad_token_id=0,
        bos_token_id=None, eos_token_id=None, use_cache=False, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma4ForCausalLM._from_config(config, attn_implementation=implementation).train()
    with torch.no_grad():
        for layer in model.model.layers:  # logits are not scaled: without training they would be those of a maximum
            layer.self_attn.q_norm.weight.fill_(1 / 16)
    return model


def outcome(model, **inputs):
    """Logits, and all gradients as one vector."""
    inputs = {"input_ids": IDS, "labels": IDS} | inputs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model(**inputs)
    out.loss.backward()
    return out.logits.detach(), torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_of_a_real_model_is_served(name, monkeypatch):
    monkeypatch.setattr(auto_choice, "_costs", lambda card, planned, *asked: False)  # torch has what it alone takes
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = CONFIG_MAPPING[name]()
        model = AutoModel.from_config(config, attn_implementation="sagebwd", dtype=torch.bfloat16).eval()
        ids = torch.zeros(1, 64, dtype=torch.long)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    assert counts == {"full on reference": LAYERS[name]}


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("width", "kind", "on_torch"),
    [
        (512, "plain", 1), (512, "padded", 0), (512, "position_ids", 0), (512, "offsets", 0),
        (512, "rows of documents", 0), (520, "plain", 1), (520, "padded", 1),
    ],
)  # fmt: skip
def test_a_wide_layer_computes_as_sdpa_does(width, kind, on_torch):
    """In a model whose other layer runs by "full", what is left is rounding in FP32.

    Torch has nothing for packed sequences on a CPU, as which padded rows run, but in heads that no kernel takes.
    """
    places = torch.cat([torch.arange(40), torch.arange(56)])[None]
    inputs = {}
    if kind == "padded":
        mask = torch.ones_like(IDS)
        mask[:, 80:] = 0
        inputs = {"attention_mask": mask, "labels": IDS.masked_fill(mask == 0, -100)}
    elif kind != "plain":
        inputs = {"position_ids": places}
    if kind == "rows of documents":
        ids = IDS.reshape(2, 48)
        inputs = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(24).repeat(2, 2)}
    expected = outcome(gemma4("sdpa", width), **inputs)
    if kind == "offsets":
        offsets = torch.tensor([0, 40, 96], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 56, "max_length_k": 56}
    actual = outcome(gemma4(global_head_dim=width, sagebwd={"layers": {"0": {"recipe": "full"}}}), **inputs)
    real = slice(0, 80 if kind == "padded" else None)
    assert relative_l2(actual[0][:, real], expected[0][:, real]) < 1e-4
    assert relative_l2(actual[1], expected[1]) < 1e-4
    assert (counts["full on reference"], counts[TORCH]) == (2 - on_torch, on_torch)


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("settings", "ran"),
    [({"layers": {"0": {"recipe": "token"}}}, {TOKEN: 1, TORCH: 1}), ({"recipe": "token"}, {TOKEN: 2})],
)
def test_layers_run_in_low_precision_where_a_recipe_is_named(settings, ran):
    models = gemma4(sagebwd=settings), gemma4("sdpa")
    (_, gradients), (_, exact) = map(outcome, models)
    assert counts == ran
    assert 0 < relative_l2(gradients, exact) < 0.1


@pytest.mark.rounding
@pytest.mark.parametrize("device", [pytest.param(DEVICE, marks=on_gpu)])
def test_a_model_of_heads_of_512_trains_by_kernels(device):
    """Gradients of all weights are as far from FP32's as the emulator's, and the loss falls as under SDPA."""

    def trained(implementation: str, dtype: torch.dtype, **settings) -> tuple[torch.Tensor, float]:
        model = gemma4(implementation, **settings).to(device, dtype)
        optimizer, gradients = torch.optim.SGD(model.parameters(), lr=0.02), None
        for _ in range(2 if device == "cpu" else 20):
            optimizer.zero_grad()
            loss = model(IDS.to(device), labels=IDS.to(device)).loss
            loss.backward()
            if gradients is None:
                gradients = torch.cat([x.grad.flatten().float() for x in model.parameters() if x.grad is not None])
            optimizer.step()
        return gradients, loss.item()

    exact, loss = trained("sdpa", torch.float32)
    counts.clear()
    ours, our_loss = trained("sagebwd", torch.bfloat16, sagebwd={"recipe": "token", "impl": "triton"})
    assert set(counts) == {"token on triton"}
    emulated, _ = trained("sagebwd", torch.bfloat16, sagebwd={"recipe": "token", "impl": "reference"})
    assert 0 < relative_l2(ours, exact) < 1.25 * relative_l2(emulated, exact)
    assert our_loss == pytest.approx(loss, rel=0.02)


def test_what_runs_on_torch_is_said_once_by_name():
    model = gemma4(global_head_dim=520)
    with pytest.warns(UserWarning, match=r"layers of Gemma4TextAttention with head_dim 520 run on torch's"):
        model(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS)
        gemma4(global_head_dim=520)(IDS)
        transformers_torch._said.clear()
        gemma4()(IDS)


@pytest.mark.parametrize("settings", [{"recipe": "token"}, {"impl": "reference"}])
def test_a_named_recipe_refuses_and_says_how_to_name_one_for_the_others(settings):
    match = r"""Gemma4TextAttention, layer 1: head_dim 520 is not supported.*\["layers"\] = \{"1": \{"recipe": "auto"""
    with pytest.raises(ValueError, match=match):
        outcome(gemma4(sagebwd=settings, global_head_dim=520))
    counts.clear()
    outcome(gemma4(sagebwd=settings | {"layers": {"1": {"recipe": "auto", "impl": None}}}))
    assert counts == {TOKEN: 1, TORCH: 1}


def test_packed_documents_that_no_kernel_takes_are_refused():
    places = torch.cat([torch.arange(40), torch.arange(56)])[None]
    with pytest.raises(NotImplementedError, match="packed documents at head_dim 520, over 512"):
        outcome(gemma4(global_head_dim=520), position_ids=places)


def test_compiled():
    expected = outcome(gemma4())
    torch._dynamo.reset()
    model = gemma4()
    compiled = torch.compile(model, backend="aot_eager")
    actual = outcome(compiled)[0], torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
    for a, e in zip(actual, expected):
        assert relative_l2(a, e) < 1e-3
