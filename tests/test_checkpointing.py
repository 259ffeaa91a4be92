"""Checkpointing that keeps attention: the same gradients, attention's forward once, and what stays in memory."""

import gc
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition, nop
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from sagebwd import sage_attention
from sagebwd.cache import ALIGNMENT
from sagebwd.checkpointing import keep_attention
from sagebwd.integrations.transformers import register
from sagebwd.planning.plan import Plan

WIDTH, HEADS, HEAD_DIM, TOKENS = 64, 2, 32, 40


class Block(nn.Module):
    def __init__(self, impl: str = "reference", recipe: str = "token") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projections, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.settings = {"impl": impl, "recipe": recipe, "is_causal": True}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
        o = sage_attention(*(x.transpose(1, 2) for x in (q, k, v)), **self.settings)
        return x + torch.tanh(self.mlp(o.transpose(1, 2).flatten(2)))


@pytest.fixture
def forwards(monkeypatch):
    """How often attention's forward ran."""
    real, seen = Plan.forward, []

    def counted(*arguments):
        seen.append(1)
        return real(*arguments)

    monkeypatch.setattr(Plan, "forward", counted)
    return seen


def inputs(dtype=torch.float32) -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def gradients(block: nn.Module, run, dtype=torch.float32) -> list[Tensor]:
    x = inputs(dtype)
    out = run(block, run(block, x))
    return list(torch.autograd.grad(out.float().square().sum(), [x, *block.parameters()]))


def plain(block, x):
    return block(x)


def whole(block, x):
    return checkpoint(block, x, use_reentrant=False)


def keeping(block, x):
    return checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)


@pytest.mark.parametrize("recipe", ["token", "mixed", "full"])
def test_gradients_are_the_same_and_attention_runs_once(recipe, forwards):
    block, counts = Block(recipe=recipe), {}
    expected = gradients(block, plain)
    for run in (plain, whole, keeping):
        forwards.clear()
        for x, e in zip(gradients(block, run), expected):
            assert torch.equal(x, e)
        counts[run] = len(forwards)
    assert counts == {plain: 2, whole: 4, keeping: 2}


def test_kernels_under_the_interpreter(forwards):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    block = Block("triton").to(torch.bfloat16)
    expected = gradients(block, plain, torch.bfloat16)
    forwards.clear()
    for x, e in zip(gradients(block, keeping, torch.bfloat16), expected):
        assert torch.equal(x, e)
    assert len(forwards) == 2


# what decides what Inductor keeps, without its C++, which takes ten seconds and of which other files have tests
@pytest.mark.parametrize(
    "backend", ["aot_eager", "aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled(backend, forwards):
    block = Block()
    expected = gradients(block, plain)
    compiled = torch.compile(keeping, fullgraph=True, backend=backend)
    gradients(block, compiled)
    forwards.clear()
    for x, e in zip(gradients(block, compiled), expected):
        torch.testing.assert_close(x, e)
    assert len(forwards) == 2


def test_torchs_own_attention_is_kept_too():
    """As in layers that are left to it; how often its operator runs."""
    q = torch.randn(1, 2, TOKENS, HEAD_DIM, requires_grad=True)
    counts, found = {}, {}
    for name, options in (("whole", {}), ("keeping", {"context_fn": keep_attention})):
        with Made() as made:
            out = checkpoint(F.scaled_dot_product_attention, q, q, q, use_reentrant=False, **options)
            found[name] = torch.autograd.grad(out.square().sum(), q)[0]
        counts[name] = made.ran["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert counts == {"whole": 2, "keeping": 1}
    assert torch.equal(found["whole"], found["keeping"])


def decoder(layers):
    """A small model of Transformers."""
    register()
    config = Qwen3Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, use_cache=False, sagebwd={"recipe": "token"},
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM._from_config(config, attn_implementation="sagebwd").train()


def test_a_compiled_model_of_wrapped_layers_reads_its_mask():
    """Regression: torch.compile hands a checkpoint's arguments to the mask, which answered with tokens x tokens."""
    model = decoder(2)
    ids, graphs = torch.arange(24).reshape(2, 12), []
    model(input_ids=ids, labels=ids).loss.backward()
    expected = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    for index, layer in enumerate(model.model.layers):  # as Accelerate and torchtitan do
        model.model.layers[index] = checkpoint_wrapper(layer, context_fn=keep_attention)

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_autograd(
            fw_compiler=nop, bw_compiler=nop, partition_fn=min_cut_rematerialization_partition
        )(graph, inputs)  # fmt: skip

    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend=backend)(input_ids=ids, labels=ids).loss.backward()
    (graph,) = graphs
    code = "".join(part.code for part in graph.modules() if hasattr(part, "code"))
    assert code.count("sagebwd.attention") == 2
    assert "mask_blocks" not in code
    for x, e in zip(model.parameters(), expected):
        torch.testing.assert_close(x.grad, e)


class Made(TorchDispatchMode):
    """Which operators ran, and the storages that they made, which may be gone by now, but for those of ``given``."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given = {x.untyped_storage()._cdata for x in given}
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.ran[function.name()] += 1
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata in self.given:
                    continue
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> int:
        """Bytes of those that are still there."""
        gc.collect()
        return sum(size for storage, size in self.seen.values() if not storage.expired())


def kept(run) -> int:
    """Bytes that are alive between one block's forward and its backward, its output aside."""
    pytest.importorskip("triton")
    block, x = Block("triton").to(torch.bfloat16), inputs(torch.bfloat16)
    with Made(x, *block.parameters()) as made:
        out = run(block, x)
    alive = made.alive() - out.untyped_storage().nbytes()
    out.sum().backward()
    return alive


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_what_is_kept_is_the_output_the_codes_and_a_few_numbers_a_token():
    rows = 2 * HEADS * TOKENS
    output, codes, lse, scales = 2 * rows * HEAD_DIM, 2 * rows * HEAD_DIM, 4 * rows, 4 * rows
    means = 2 * 4 * 2 * HEADS * HEAD_DIM  # of K, and of V beside it
    assert codes % (2 * ALIGNMENT) == means % ALIGNMENT == 0
    scales += -scales % ALIGNMENT  # what one workspace holds begins at multiples of so many bytes
    assert kept(whole) == 0
    assert kept(keeping) == output + lse + codes + 2 * scales + means
    assert kept(keeping) < 0.6 * kept(plain)
