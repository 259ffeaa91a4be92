"""Forward and backward as CUDA graphs: captured by hand, and by torch.compile(mode="reduce-overhead")."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import Qwen3Config, Qwen3ForCausalLM

from sagebwd import read_block_mask, sage_attention
from sagebwd.integrations.transformers import register
from sagebwd.switches import switches
from tests.attention_case import outcome
from tests.gpus import HAS_HOPPER

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
BATCH, TOKENS, HEADS, HEAD_DIM, WIDTH = 2, 256, 4, 64, 256


def recipes() -> list[str]:
    return ["mixed", "token"] if HAS_HOPPER else ["token"]


def draw(seed: int) -> list[Tensor]:
    """q, k, v and do, with the heads of a token side by side."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = BATCH, TOKENS, HEADS, HEAD_DIM
    return [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    ]


def check_captured(run: Callable[..., tuple[Tensor, ...]]) -> None:
    """Assert that o, dq, dk and dv of a graph are those of calls, for other inputs too."""
    static = draw(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # which compiles
        run(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*static)
    for seed in (1, 2):
        given = draw(seed)
        for x, new in zip(static, given):
            x.copy_(new)
        graph.replay()
        for name, x, e in zip(("o", "dq", "dk", "dv"), captured, run(*given)):
            assert torch.equal(x, e), name


@pytest.mark.parametrize("recipe", recipes())
def test_forward_and_backward_in_a_cuda_graph(recipe):
    def run(q, k, v, do):
        return outcome(sage_attention, (q, k, v), do, is_causal=True, recipe=recipe)

    with switches(deterministic=True):
        check_captured(run)


def same_document() -> BlockMask:
    document = torch.arange(TOKENS, device="cuda") // 100
    return create_block_mask(lambda b, h, q, k: document[q] == document[k], None, None, TOKENS, TOKENS, device="cuda")


def test_a_block_mask_that_kernels_do_not_compute_is_not_read_while_a_graph_is_captured():
    q, mask = torch.randn(1, HEADS, TOKENS, 64, device="cuda", dtype=torch.bfloat16), same_document()
    mask.mask_mod = lambda b, h, q, k: q >= k if q > 3 else q < k
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side), pytest.raises(NotImplementedError, match=r"block_mask: .* captured"):
        sage_attention(q, q, q, block_mask=mask, recipe="token")


@pytest.mark.parametrize("form", ["boolean", "BlockMask", "BlockMask, unread", "sinks"])
def test_masks_and_sinks_in_a_cuda_graph(form):
    document = torch.arange(TOKENS, device="cuda") // 100
    masks = {
        "boolean": {"attn_mask": document[:, None] == document},
        "BlockMask": {"block_mask": read_block_mask(same_document())},
        "BlockMask, unread": {"block_mask": same_document()},
        "sinks": {"sinks": torch.linspace(-1, 1, HEADS, device="cuda")},
    }[form]

    def run(q, k, v, do):
        return outcome(sage_attention, (q, k, v), do, is_causal=True, recipe="token", **masks)

    check_captured(run)


@pytest.mark.parametrize("recipe", recipes())
def test_a_model_trains_with_its_kernels_launched_as_graphs(recipe):
    register()
    config = Qwen3Config(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=HEAD_DIM, use_cache=False,
    )  # fmt: skip
    config.sagebwd = {"recipe": recipe}
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(64, (BATCH, TOKENS), generator=generator).cuda() for _ in range(6)]
    losses = {}
    for mode in (None, "reduce-overhead"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="sagebwd").cuda().train()
        compiled = torch.compile(model, fullgraph=True, mode=mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[mode] = []
        for ids in batches:
            torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast("cuda", torch.bfloat16), switches(deterministic=True):
                loss = compiled(input_ids=ids, labels=ids).loss
            loss.backward()
            losses[mode].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert losses["reduce-overhead"] == pytest.approx(losses[None], rel=1e-3)
    assert losses[None][-1] < losses[None][0]
