"""Calls at widths that no kernels have: what forward leaves at the call's own fits the workspace of its plan."""

import pytest
import torch
from torch import Tensor

from tests.attention_case import AttentionCase, outcome
from tests.gpus import DEVICE, as_if_on_hopper, on_gpu

pytest.importorskip("triton")
from sagebwd import dispatch, sage_attention, sage_attention_varlen
from sagebwd.kernels.mma_sync import launch as mma_sync
from sagebwd.kernels.runtime import program
from sagebwd.kernels.sm90.forward import launch as sm90
from sagebwd.planning.plan import Plan
from sagebwd.recipe import Recipe
from sagebwd.reference.metrics import relative_l2

# Widths of head_dim and value, one wider than the other, and neither of any kernel; one that needs no filling.
DIMS = [(59, 128), (128, 59), (59, 59), (8, 24), (164, 164), (203, 80), (64, 64)]
FAMILIES = [
    ("triton/triton", "token"), ("triton/triton", "token(dp=int8)"), ("triton/triton", "full"),
    ("triton/triton", "token(smooth_k=False)"), ("mma_sync/triton", "token"), ("mma_sync/mma_sync", "token(dp=int8)"),
    ("hopper/hopper", "mixed"), ("triton/hopper", "mixed"),
]  # fmt: skip


def fits(impl: str, dims: tuple[int, int]) -> bool:
    """Whether a choice's kernels run at these widths, backward at forward's."""
    choice = dispatch.named(Recipe.named("token"), impl)
    form = choice.forward.form(*dims)
    return form is not None and choice.backward.form(*form) is not None


DESCRIBED = [(impl, recipe, dims) for impl, recipe in FAMILIES for dims in DIMS if fits(impl, dims)]
# One head of keys of one sequence has one row of K's mean, whose first columns are contiguous as they lie.
LAYOUTS = {
    "dense": {},
    "batch": {"batch": 2},
    "padded": {"masked": True, "padding": True},
    "packed": {"lengths_q": [33], "lengths_k": [17]},
    "sequences": {"lengths_q": [33, 5], "lengths_k": [17, 1]},
}


class Kernel:
    """Stands for one that is compiled elsewhere."""

    arg_names = ()


@pytest.fixture
def uncompiled(monkeypatch):
    """Forwards of all families are described as on an H200, and compiled by nothing."""
    as_if_on_hopper(monkeypatch)
    monkeypatch.setattr(program, "compiled", lambda *_: Kernel())
    monkeypatch.setattr(mma_sync, "kernel_of", lambda source, arch: Kernel())
    monkeypatch.setattr(sm90, "forward_kernel", lambda variant: Kernel())


@pytest.mark.parametrize(("impl", "recipe", "dims"), DESCRIBED)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (2, 2)], ids=str)
def test_a_workspace_has_room_for_what_forward_leaves(impl, recipe, dims, heads, uncompiled):
    choice = dispatch.named(Recipe.parse(recipe), impl)
    for layout in LAYOUTS.values():
        case = AttentionCase(
            recipe=recipe, heads=heads[0], kv_heads=heads[1], head_dim=dims[0], value_dim=dims[1], tokens_q=33,
            tokens_k=17, **layout,
        )  # fmt: skip
        q, k, v, *_ = case.inputs()
        call = case.call(q, k)
        plan = Plan(choice, call, q, k, sinks=False)
        # raises where a tensor has too little room
        made = plan._forward_program(None, None, False, call, q, k, v, None)
        assert made.has_workspace
        assert made.launches


@pytest.mark.parametrize("dims", [(24, 40), (40, 24)], ids=str)
@pytest.mark.parametrize("recipe", ["token", "token(dp=int8)"])
@pytest.mark.parametrize("layout", ["dense", "padded", "packed", "bias"])
@pytest.mark.parametrize("on", [pytest.param(DEVICE, marks=on_gpu)])
def test_one_head_of_keys_at_widths_apart(dims, recipe, layout, on):
    """The public function's results and gradients are the reference's."""
    lengths = {"lengths_q": [33], "lengths_k": [17]} if layout == "packed" else {}
    case = AttentionCase(
        recipe=recipe, heads=2, kv_heads=1, head_dim=dims[0], value_dim=dims[1], tokens_q=33, tokens_k=17, device=on,
        **lengths,
    )  # fmt: skip
    *tensors, do, _ = case.inputs()

    def run(impl: str) -> tuple[Tensor, ...]:
        options = {"recipe": recipe, "impl": impl, "return_lse": True}
        if layout == "packed":
            offsets = (torch.tensor([0, tokens], dtype=torch.int32, device=on) for tokens in (33, 17))
            return outcome(lambda *x: sage_attention_varlen(*x, *offsets, 33, 17, **options), tensors, do)
        if layout == "padded":
            options["attn_mask"] = (torch.arange(17, device=on) < 11)[None, None, None]
        if layout == "bias":
            options["attn_mask"] = torch.linspace(-2, 2, 33 * 17, device=on).view(33, 17)
        return outcome(sage_attention, tensors, do, enable_gqa=True, **options)

    for found, expected in zip(run("triton"), run("reference"), strict=True):
        assert relative_l2(found, expected) < 0.02
