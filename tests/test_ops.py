"""The operators among PyTorch's own machinery: opcheck, compile, export."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from sagebwd import RECIPES, Recipe, dispatch, ops, sage_attention
from tests.attention_case import leaves
from tests.inputs import draw
from tests.masks import draw as draw_mask
from tests.masks import read

OFFSETS = torch.tensor([0, 30, 70], dtype=torch.int32)


def dense(recipe="token"):
    q, k, v, _ = draw(batch=2, heads=4, kv_heads=2, tokens=70, head_dim=16)
    mask = (torch.arange(70) < torch.tensor([70, 50])[:, None]).contiguous()
    masks = mask, *(None,) * 5
    return *leaves(q, k, v), None, *masks, 70, 70, True, -1, -1, 0.25, recipe, "reference", False


def packed(recipe="token"):
    q, k, v, _ = (x[0].transpose(0, 1) for x in draw(heads=4, kv_heads=2, tokens=70, head_dim=16))
    masks = *(None,) * 4, OFFSETS, OFFSETS
    return *leaves(q, k, v), None, *masks, 40, 40, True, 12, -1, 0.25, recipe, "reference", False


def masked(recipe="token"):
    """`dense` under an additive mask."""
    mask = read(draw_mask("bias-all", (2, 4, 70, 70), torch.float32, 0))
    return *dense(recipe)[:4], mask.keys, mask.elements, None, mask.blocks, *dense(recipe)[8:]


def tiled(recipe="token"):
    """`dense` under a BlockMask."""
    mask = read(draw_mask("prefix", (2, 4, 70, 70), torch.float32, 0))
    return *dense(recipe)[:4], mask.keys, mask.elements, mask.tiles, mask.blocks, *dense(recipe)[8:]


def beside_sinks(recipe="token", form=dense):
    """`dense`, or another, with sinks in BF16."""
    q, k, v, _, *rest = form(recipe)
    return q, k, v, torch.tensor([0.5, -1, 2, -30], dtype=torch.bfloat16, requires_grad=True), *rest


def packed_beside_sinks(recipe="token"):
    """`packed` with sinks."""
    return beside_sinks(recipe, packed)


@pytest.mark.parametrize("recipe", ["token", "paper", "full"])
@pytest.mark.parametrize("arguments", [dense, packed, masked, tiled, beside_sinks, packed_beside_sinks])
def test_opcheck_forward(recipe, arguments):
    outcome = torch.library.opcheck(torch.ops.sagebwd.attention.default, arguments(recipe))
    assert set(outcome.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kind", ["bool-heads", "bias-rows"])
def test_opcheck_of_a_map(kind):
    mask = draw_mask(kind, (2, 4, 70, 70), torch.float32, 0)
    assert set(torch.library.opcheck(torch.ops.sagebwd.mask_blocks.default, (mask,)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("form", [dense, masked, tiled, beside_sinks])
@pytest.mark.parametrize("with_lse", [False, True])
def test_opcheck_backward(form, with_lse):
    q, k, v, sinks, mask, *settings = form()
    q, k, v, sinks = (None if x is None else x.detach() for x in (q, k, v, sinks))
    o, lse, workspace = ops.attention(q, k, v, sinks, mask, *settings)
    dlse = torch.ones_like(lse) if with_lse else None
    saved, masks, numbers = (o, lse, workspace, sinks), (mask, *settings[:5]), (q.shape[-1], *settings[5:])
    outcome = torch.library.opcheck(
        torch.ops.sagebwd.attention_backward.default,
        (torch.ones_like(o), dlse, q, k, v, *saved, *masks, *numbers),
    )
    assert set(outcome.values()) == {"SUCCESS"}


def attend(q, k, v, recipe="token", **arguments):
    return sage_attention(q, k, v, is_causal=True, enable_gqa=True, recipe=recipe, **arguments)


@pytest.mark.parametrize("form", [dense, packed])
def test_opcheck_of_what_else_is_returned(form):
    """Of rows that need no gradient, as it is called."""
    given = form()
    q, k, v = (x.detach() for x in given[:3])
    *_, workspace = torch.ops.sagebwd.attention.default(q, k, v, *given[3:], True)
    arguments = workspace, q, k, v, given[9], False, True, "token", "reference"
    outcome = torch.library.opcheck(torch.ops.sagebwd.attention_pieces.default, arguments)
    assert set(outcome.values()) == {"SUCCESS"}


def test_an_exported_program_runs_where_others_are_chosen(monkeypatch):
    """Regression: of lse and the largest logits it kept where they lie in what the first GPU's kernels return."""

    class Module(torch.nn.Module):
        def forward(self, x):
            return sage_attention(x, x, x, recipe="token", return_lse=True, return_max_logits=True)

    x = torch.randn(1, 2, 70, 16, generator=torch.Generator().manual_seed(0)) + 1
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(ops, "_chosen_in_a_trace", lambda *_: dispatch.named(Recipe.named("token"), "triton/triton"))
        program = torch.export.export(Module(), (x,)).module()
    for a, e in zip(program(x), Module()(x), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("recipe", ["paper", "token(smooth_v=False, block_k=64)", Recipe(smooth_k=False)])
def test_compile_reads_recipes(recipe):
    compiled = torch.compile(lambda *x: attend(*x, recipe=recipe), fullgraph=True, backend="aot_eager")
    inputs = [x.detach() for x in dense()[:3]]
    assert torch.equal(compiled(*inputs), attend(*inputs, recipe=recipe))


def test_each_recipe_gets_a_graph_of_its_own():
    """Regression: a Recipe in another's place ran by that one's graph, and numbers in its text were symbols."""
    compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=True)
    inputs = [x.detach() for x in dense()[:3]]
    for recipe in (RECIPES["full"], RECIPES["token"], Recipe(first_keys=4), Recipe(first_keys=0, smooth_k=False)):
        assert torch.equal(compiled(*inputs, recipe=recipe), attend(*inputs, recipe=recipe)), recipe


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_a_mask_under_vmap_is_refused(compiled):
    """Regression: vmap's tensors need none, and it was missing without a word."""
    rows, bias = torch.randn(2, 1, 1, 4, 8), torch.zeros(2, 4, 4, requires_grad=True)
    of_batch = torch.vmap(lambda x, bias: attend(x, x, x, attn_mask=bias))
    if compiled:
        of_batch = torch.compile(of_batch, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="attn_mask: its gradient is not supported"):
        of_batch(rows, bias)
    of_batch(rows, bias.detach())


def test_gradients_by_transforms_are_refused_in_a_trace():
    """Regression: by an error of torch's, about how an autograd.Function is to be written."""
    compiled = torch.compile(torch.func.grad(lambda x: attend(x, x, x).sum()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"gradients of torch\.func .*are not supported"):
        compiled(torch.randn(1, 1, 4, 8))


def test_compile_with_a_kernel_family_and_what_it_refuses():
    """Regression: importing the family broke the graph, on GPUs alone, where it is the default."""
    program = """
import torch
from sagebwd import sage_attention
q = torch.randn(1, 2, 40, 32, dtype=torch.bfloat16, requires_grad=True)
attend = lambda x, **k: sage_attention(x, x, x, impl="triton", **k)
compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
assert torch.equal(compiled(q), attend(q))
compiled(q).sum().backward()
try:
    compiled(q, recipe="token(first_keys=4)")
except NotImplementedError as error:
    assert "first_keys=4" in str(error)
else:
    raise AssertionError("not refused")
"""
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr


def test_compile_checks_arguments():
    attention = partial(sage_attention, dropout_p=0.5, recipe="token")
    compiled = torch.compile(attention, backend="aot_eager")
    with pytest.raises(NotImplementedError, match=r"dropout_p=0\.5"):
        compiled(*(torch.zeros(1, 1, 4, 8) for _ in range(3)))


def test_nothing_of_size_queries_times_keys_is_kept():
    tokens = 1024
    q, k, v = leaves(*draw(heads=1, tokens=tokens, head_dim=16)[:3])
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        sage_attention(q, k, v, recipe="token")
    assert max(sizes) <= tokens * 16


def test_import_loads_no_kernel_and_no_extra():
    """`import sagebwd` needs torch and triton alone; it loads no compiler of kernels, of integrations SDPA's."""
    program = """
import sys, torch
blocked = {"transformers", "diffusers", "typer", "rich", "matplotlib", "yaml", "datasets", "accelerate"}
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
before = set(sys.modules)
import sagebwd
packages = {name.split(".")[0] for name in set(sys.modules) - before}
assert packages - sys.stdlib_module_names == {"sagebwd"}, packages
x = torch.randn(1, 1, 4, 8, requires_grad=True)
sagebwd.sage_attention(x, x, x).sum().backward()
assert not {"triton", "cutlass"} & set(sys.modules)
assert not [name for name in sys.modules if name.startswith("sagebwd.integrations.") and not name.endswith(".sdpa")]
"""
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
