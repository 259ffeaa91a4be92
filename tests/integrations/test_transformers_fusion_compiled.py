"""``config.sagebwd = {"fuse": True}`` on Hopper: where norm, rotary embedding and attention are one operator."""

import pytest
import torch

from sagebwd.integrations import transformers as integration
from sagebwd.reference.metrics import relative_l2
from tests.gpus import HAS_HOPPER
from tests.integrations.test_transformers import tokens
from tests.integrations.test_transformers_fusion import build

pytest.importorskip("triton")
from tests.kernels.test_norm_rope_codes import stand_in  # noqa: F401, a fixture
from tests.test_norm_rope_attention_ops import BACKWARD, DEVICE, OPERATOR, Seen

pytestmark = [
    pytest.mark.rounding, pytest.mark.usefixtures("registered"), *([pytest.mark.gpu] if DEVICE == "cuda" else [])
]  # fmt: skip
ENDS = torch.tensor([0, 24, 40], dtype=torch.int32)
PACKED = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 24, "max_length_k": 24}
FORMS = {
    "dense": {},
    "batch": {"input_ids": tokens(2, 40)},
    "positions of each row": {
        "input_ids": tokens(2, 40), "position_ids": torch.stack((torch.arange(40), torch.arange(40) + 7))
    },
    "packed": {"position_ids": torch.cat([torch.arange(n) for n in (24, 16)])[None], **PACKED},
}  # fmt: skip


def model_of(fuse, name="Qwen3", **changes):
    model = build(name, fuse=fuse, recipe="mixed", **{"head_dim": 64, "num_key_value_heads": 4, **changes})
    return model.train()


def step(call, model, given):
    """Logits, and all gradients as one vector, under BF16 autocast of FP32 weights."""
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16):
        logits = call(**given).logits
    logits.float().square().mean().backward()
    return logits.detach(), torch.cat([x.grad.flatten() for x in model.parameters()])


# each compiles a model: the rest in test-all
QUICK = {("Qwen3", "dense"), ("Llama", "batch"), ("Gemma3Text", "packed")}
CALLS = [
    pytest.param(form, name, marks=[] if (name, form) in QUICK else pytest.mark.slow)
    for name in ("Qwen3", "Llama", "Gemma3Text")
    for form in FORMS
]


@pytest.mark.parametrize(("form", "name"), CALLS)
def test_a_compiled_layer_has_the_operator(stand_in, form, name):  # noqa: F811
    """In one graph, with what runs outside of torch.compile within rounding of norms that are compiled otherwise."""
    torch._dynamo.reset()
    given = {"input_ids": tokens(1, 40)} | FORMS[form]
    model, seen = model_of(True, name), Seen()
    wanted = step(model, model, given)
    found = step(torch.compile(model, fullgraph=True, backend=seen), model, given)
    assert [seen.operators.count(x) for x in (OPERATOR, BACKWARD)] == [2, 2]
    for a, e in zip(found, wanted):
        assert relative_l2(a, e) < 1e-2


def test_outside_of_a_trace_a_plan_runs(stand_in):  # noqa: F811
    """And one autograd function stands for norm, rotary embedding and attention."""
    found = []
    model = model_of(True)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    step(model, model, {"input_ids": tokens(1, 40)})
    for x in found:
        names, node = [], x.grad_fn
        while node is not None and len(names) < 12:
            names.append(node.name())
            node = node.next_functions[0][0] if node.next_functions else None
        assert "SageAttentionBackward" in names
        assert not any("Norm" in name or "Rope" in name for name in names)


def test_one_graph_of_a_layer_stands_for_all(stand_in):  # noqa: F811
    torch._dynamo.reset()
    seen, model = Seen(), model_of(True, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    wanted = step(model, model, {"input_ids": tokens(1, 40)})
    for layer in model.model.layers:
        layer.compile(backend=seen, fullgraph=True, dynamic=False)
    found = step(model, model, {"input_ids": tokens(1, 40)})
    assert [seen.operators.count(x) for x in (OPERATOR, BACKWARD)] == [1, 1]
    assert all(relative_l2(a, e) < 1e-2 for a, e in zip(found, wanted))


def test_padding_is_composed_in_a_trace(stand_in, monkeypatch):  # noqa: F811
    """Rows are what it hides."""
    torch._dynamo.reset()
    attends, model = [], model_of(True)
    monkeypatch.setattr(integration, "_masked", lambda q, *_: attends.append(1) or q.transpose(1, 2).contiguous())
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 30:] = 0
    seen = Seen()
    torch.compile(model, backend=seen)(input_ids=tokens(2, 40), attention_mask=mask)
    assert attends
    assert OPERATOR not in seen.operators


@pytest.mark.skipif(not HAS_HOPPER, reason="of Hopper's kernels")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_fused_step_is_the_unfused_on_hopper(form, head_dim, compiled):
    """Within what the unfused one's rounding is of: norms round twice there, and rotary embedding in 16 bit."""
    given = {"input_ids": tokens(1, 40)} | FORMS[form]
    given = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    outcomes = []
    for fuse in (True, False):
        torch._dynamo.reset()
        model = model_of(fuse, head_dim=head_dim, num_key_value_heads=2).cuda()
        outcomes.append(step(torch.compile(model, fullgraph=True) if compiled else model, model, given))
    for a, e in zip(*outcomes):
        assert relative_l2(a, e) < 5e-2
