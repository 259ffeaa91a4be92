"""``config.sagebwd = {"fuse": True}`` on Hopper: where norm, rotary embedding and attention are one operator."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from sagebwd.cache import PLANS
from sagebwd.integrations import transformers as integration
from sagebwd.integrations import transformers_fusion as fusion
from sagebwd.reference.metrics import relative_l2
from tests.gpus import HAS_HOPPER, OF_PROJECTIONS, OF_ROWS, kernels_of
from tests.integrations.test_transformers import tokens
from tests.integrations.test_transformers_fusion import build

pytest.importorskip("triton")
from tests.kernels import test_norm_rope_codes as codes
from tests.kernels.test_norm_rope_codes import stand_in  # noqa: F401, a fixture
from tests.norm_rope.test_plan import BACKWARD, DEVICE, OPERATOR, Seen, traces_of_2_11  # noqa: F401, a fixture

pytestmark = [
    pytest.mark.usefixtures("registered"), *([pytest.mark.gpu] if DEVICE == "cuda" else [])
]  # fmt: skip
# What stands in a graph in the operator's place where a call is composed.
COMPOSED = {torch.ops.sagebwd.qk_norm_rope.default, torch.ops.sagebwd.attention.default}
FORMS = "dense", "batch", "positions of each row", "packed"


def given_of(form, n=40):
    """What a model of a form's n tokens is called with."""
    ids = tokens(2 if form in ("batch", "positions of each row") else 1, n)
    if form == "positions of each row":
        return {"input_ids": ids, "position_ids": torch.stack((torch.arange(n), torch.arange(n) + 7))}
    if form != "packed":
        return {"input_ids": ids}
    ends = torch.tensor([0, n - 16, n], dtype=torch.int32)
    longest = max(n - 16, 16)
    return {
        "input_ids": ids, "position_ids": torch.cat((torch.arange(n - 16), torch.arange(16)))[None],
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def model_of(fuse, name="Qwen3", dtype=torch.float32, **changes):
    model = build(name, fuse=fuse, recipe="mixed", **{"head_dim": 64, "num_key_value_heads": 4, **changes})
    return model.train().to(dtype)


def step(call, model, given):
    """Logits, and all gradients as one vector, under BF16 autocast where weights are FP32."""
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=model.dtype == torch.float32):
        logits = call(**given).logits
    logits.float().square().mean().backward()
    return logits.detach(), torch.cat([x.grad.flatten() for x in model.parameters()])


WEIGHTS = [
    ("Qwen3", torch.float32),
    ("Qwen3", torch.bfloat16),
    ("Llama", torch.float32),
    ("Gemma3Text", torch.float32),
]
# each compiles a model: the rest in test-all
QUICK = {
    ("dense", *WEIGHTS[0]),
    ("positions of each row", *WEIGHTS[1]),
    ("batch", *WEIGHTS[2]),
    ("packed", *WEIGHTS[3]),
}
CALLS = [
    pytest.param(form, *given, marks=[] if (form, *given) in QUICK else pytest.mark.slow)
    for given in WEIGHTS
    for form in FORMS
]


@pytest.mark.parametrize(("form", "name", "dtype"), CALLS)
def test_a_compiled_layer_has_the_operator(stand_in, traces_of_2_11, form, name, dtype):  # noqa: F811
    """In one graph, with what runs outside of torch.compile within rounding of norms that are compiled otherwise.

    Regression: torch 2.11 took every trace for an export's, which is composed.
    """
    torch._dynamo.reset()
    given, model, seen = given_of(form), model_of(True, name, dtype), Seen()
    wanted = step(model, model, given)
    found = step(torch.compile(model, fullgraph=True, backend=seen), model, given)
    assert [seen.operators.count(x) for x in (OPERATOR, BACKWARD)] == [2, 2]
    assert COMPOSED.isdisjoint(seen.operators)
    for a, e in zip(found, wanted):
        assert relative_l2(a, e) < 1e-2


def test_around_the_operator_no_rows_are_copied(stand_in, traces_of_2_11, monkeypatch):  # noqa: F811
    """Of a model that leaves `fuse` to the library.

    Regression: dK and dV lay by head, and were copied for their projections' gradients.
    """
    monkeypatch.setattr(fusion, "_has_passes", lambda device: True)
    torch._dynamo.reset()
    seen, model = Seen(), model_of(None, "Llama", torch.bfloat16)
    step(torch.compile(model, fullgraph=True, backend=seen), model, given_of("batch"))
    assert [seen.operators.count(x) for x in (OPERATOR, BACKWARD)] == [2, 2]
    assert not seen.copies


@pytest.mark.slow
@pytest.mark.parametrize("form", ["batch", "positions of each row", "packed"])
def test_other_lengths_keep_the_operator(stand_in, traces_of_2_11, form):  # noqa: F811
    """In a layer's graph of the first length, and in one of all others."""
    torch._dynamo.reset()
    seen, model = Seen(), model_of(True)
    for layer in model.model.layers:
        layer.compile(backend=seen, fullgraph=True)
    for n in (40, 56, 72):
        step(model, model, given_of(form, n))
    assert [seen.operators.count(x) for x in (OPERATOR, BACKWARD)] == [2, 2]
    assert COMPOSED.isdisjoint(seen.operators)


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


def changed(what, model):
    """The model as people train it, and what is called for a step."""
    if what == "LoRA":
        peft = pytest.importorskip("peft")
        targets = [f"{side}_proj" for side in "qkvo"]
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    if what == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif what == "FSDP2":
        for part in (*model.model.layers, model):
            fully_shard(part)
    return model


@pytest.fixture
def process_group(tmp_path):
    """Of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["LoRA", "FSDP2", "checkpointing"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_left_to_the_library_training_is_fused(stand_in, monkeypatch, process_group, what, compiled):  # noqa: F811
    """Gradients are those of the unfused within its rounding, and both directions have norm and rotation within."""
    monkeypatch.setattr(fusion, "_has_passes", lambda device: True)
    forward, prologues, found = codes.Family.forward, [], []

    def noted(call, *given):
        prologues.append(call.prologue)
        return forward(call, *given)

    monkeypatch.setattr(codes.Family, "forward", staticmethod(noted))
    for fuse in (False, None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        PLANS.clear()
        prologues.clear()
        model = changed(what, model_of(fuse, "Qwen3", torch.bfloat16, num_hidden_layers=1))
        if compiled:
            for layer in model.get_decoder().layers:
                layer.compile(backend="aot_eager")
        model(input_ids=tokens(2, 40)).logits.float().square().mean().backward()
        assert {x is not None for x in prologues} == {fuse is None}
        gradients = [x.grad for x in model.parameters() if x.grad is not None]
        found.append(torch.cat([getattr(x, "to_local", lambda x=x: x)().flatten().float() for x in gradients]))
    assert relative_l2(*reversed(found)) < 2e-2


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


def on_gpu(form, n):
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in given_of(form, n).items()}


def check_on_hopper(call, model, form, lengths=(200,), steps=1):
    """Assert that steps are the unfused within its rounding, and which kernels ran.

    Norms round twice in the unfused, and rotary embedding in 16 bit.
    """
    plain = model_of(False, dtype=model.dtype, head_dim=model.config.head_dim, num_key_value_heads=2).cuda()
    for n in lengths:
        given = on_gpu(form, n)
        found = []

        def run(given=given, found=found):
            for _ in range(steps):
                torch.compiler.cudagraph_mark_step_begin()
                found[:] = [x.clone() for x in step(call, model, given)]

        run()
        ran = kernels_of(run)
        assert ran >= OF_PROJECTIONS, n
        assert ran.isdisjoint(OF_ROWS), n
        for a, e in zip(found, step(plain, plain, given)):
            assert relative_l2(a, e) < 8e-2, n
    assert kernels_of(lambda: step(plain, plain, given)) >= OF_ROWS


@pytest.mark.skipif(not HAS_HOPPER, reason="of Hopper's kernels")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("way", ["eager", "compiled", "compiled of BF16 weights"])
def test_a_fused_step_is_the_unfused_on_hopper(form, head_dim, way):
    torch._dynamo.reset()
    dtype = torch.bfloat16 if way == "compiled of BF16 weights" else torch.float32
    model = model_of(None, dtype=dtype, head_dim=head_dim, num_key_value_heads=2).cuda()
    check_on_hopper(model if way == "eager" else torch.compile(model, fullgraph=True), model, form)


@pytest.mark.skipif(not HAS_HOPPER, reason="of Hopper's kernels")
@pytest.mark.parametrize("form", FORMS)
def test_fused_layers_of_other_lengths_on_hopper(form):
    torch._dynamo.reset()
    model = model_of(True, head_dim=128, num_key_value_heads=2).cuda()
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    check_on_hopper(model, model, form, (200, 256, 233))


@pytest.mark.skipif(not HAS_HOPPER, reason="of Hopper's kernels")
@pytest.mark.parametrize("form", FORMS)
def test_fused_steps_as_cuda_graphs_on_hopper(form):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = model_of(True, head_dim=128, num_key_value_heads=2).cuda()
    call = torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead")
    check_on_hopper(call, model, form, steps=3)
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
