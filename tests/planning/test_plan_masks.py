"""Plans under masks of any shape: a call sees its mask as it is now, and a mask object as it was when it was read.

The kernels of the second half are stand-ins of a few lines. With n(i) the keys that query i sees, which they read of
the mask's elements, and t the number of all pairs, which is made of the mask before they are launched:
o = q k n + v + t, dq = do k n + t.
"""

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from sagebwd import dispatch, ops, read_block_mask, read_mask, sage_attention
from sagebwd.auto import choice as auto_choice
from sagebwd.cache import PLANS
from sagebwd.call import Call, Saved, empty_gradients, empty_like_rows
from sagebwd.kernels.capabilities import BACKWARD, FORWARD
from sagebwd.kernels.masks.lists import Listed, Lists
from sagebwd.masks.mask import TILE
from sagebwd.masks.parts import MOST
from sagebwd.planning import mask_argument
from sagebwd.planning.plan import Plan
from sagebwd.planning.specification import kind_of, laid_out
from sagebwd.recipe import Recipe
from sagebwd.reference.metrics import relative_l2

pytest.importorskip("triton")
from sagebwd.kernels.runtime import program
from tests.attention_case import leaves as leaves_of
from tests.attention_case import outcome, tensors_in
from tests.gpus import as_if_on_hopper
from tests.planning.test_plan import DEVICE, SHAPE, Kernel, draw
from tests.threads import at_once

BATCH, HEADS, TOKENS, WIDTH = SHAPE
LENGTH = 96


# masks that are written to, against torch's own attention


class Form(NamedTuple):
    """A kind of mask: the tensor that says what it shows, drawn from a seed, and the arguments made of that."""

    contents: Callable[[int], Tensor]
    arguments: Callable[[Tensor], dict]


def pairs(seed: int, tokens: int = LENGTH) -> Tensor:
    """Which queries see which keys; each sees its own."""
    shown = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(seed)) < 0.4
    return shown | torch.eye(tokens, dtype=torch.bool)


def bias(seed: int) -> Tensor:
    numbers = torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(seed))
    return numbers.masked_fill(~pairs(seed), -torch.inf)


def padding(seed: int) -> Tensor:
    return (torch.arange(LENGTH) < torch.tensor([LENGTH - 7 * seed, 20 + seed])[:, None])[:, None, None]


def of_table(table: Tensor) -> BlockMask:
    """A BlockMask whose mask_mod reads a table."""
    return create_block_mask(lambda b, h, q, k: table[q, k], None, None, *table.shape, device=str(table.device))


FORMS = {
    "boolean": Form(pairs, lambda mask: {"attn_mask": mask}),
    "bias": Form(bias, lambda mask: {"attn_mask": mask}),
    "padding": Form(padding, lambda mask: {"attn_mask": mask}),
    "BlockMask": Form(pairs, lambda table: {"block_mask": of_table(table)}),
}


def inputs(seed: int, batch: int = 2, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 2, LENGTH, 16, generator=generator).to(device, dtype) for _ in range(4)]


def assert_sdpa(mask: Tensor, seed: int = 0, batch: int = 2, **arguments) -> None:
    """That a call gives what torch's own attention gives under a mask."""
    given = inputs(seed, batch)
    expected = outcome(F.scaled_dot_product_attention, given[:3], given[3], attn_mask=mask)
    found = outcome(sage_attention, given[:3], given[3], recipe="full", **arguments)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def write_data(x: Tensor, new: Tensor) -> None:
    x.data = new.clone()


def write_memory(x: Tensor, new: Tensor) -> None:
    """As a hand-written kernel does."""
    ctypes.memmove(x.data_ptr(), new.data_ptr(), x.nbytes)


WRITERS = {
    "data.copy_": lambda x, new: x.data.copy_(new),
    "data =": write_data,
    "numpy": lambda x, new: x.numpy().__setitem__(..., new.numpy()),
    "memmove": write_memory,
}


def check_written(form: str, write: Callable[[Tensor, Tensor], object]) -> None:
    """That calls are right before a mask is written to in a way that counts no version, and behind."""
    made = FORMS[form]
    mask = made.contents(0)
    arguments, before = made.arguments(mask), mask.clone()
    for seed in range(2):
        assert_sdpa(mask, seed, **arguments)
    version = mask._version
    for step in (1, 2):
        write(mask, made.contents(step))
        assert mask._version == version
        assert not torch.equal(mask, before)
        before = mask.clone()
        for seed in range(2):
            assert_sdpa(mask, seed, **arguments)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_without_a_version_is_seen(form, writer):
    check_written(form, WRITERS[writer])


@pytest.mark.parametrize("form", FORMS)
def test_kernels_see_what_is_written_without_a_version(form):
    """And what is made of a mask for them: lists of blocks, and which keys count."""
    made = FORMS[form]
    mask = made.contents(0).to(DEVICE)
    arguments = made.arguments(mask)
    for seed in range(2):
        mask.data.copy_(made.contents(seed))
        given = inputs(seed, dtype=torch.bfloat16, device=DEVICE)
        expected = outcome(
            F.scaled_dot_product_attention, [x.float() for x in given[:3]], given[3].float(), attn_mask=mask
        )
        found = outcome(sage_attention, given[:3], given[3], recipe="full", impl="triton", **arguments)
        assert max(relative_l2(x, e) for x, e in zip(found, expected, strict=True)) < 0.02


@pytest.mark.parametrize("shape", [(1, LENGTH), (1, 1, LENGTH), (1, 1, 1, LENGTH)], ids=str)
def test_key_padding_of_few_dimensions(shape):
    """Regression: IndexError in the third call of a batch of one."""
    for seed in range(5):
        mask = (torch.arange(LENGTH) < LENGTH - seed).view(shape)
        assert_sdpa(mask, seed, batch=1, attn_mask=mask)


def test_key_padding_beside_no_queries():
    q, k, v, _ = inputs(0)
    mask = torch.ones(LENGTH, dtype=torch.bool).expand(2, 1, 0, LENGTH)
    for _ in range(2):
        assert sage_attention(q[:, :, :0], k, v, mask, recipe="full").shape == (2, 2, 0, 16)


READ = {
    "boolean": read_mask,
    "bias": read_mask,
    "BlockMask": lambda table: read_block_mask(of_table(table)),
}


@pytest.mark.parametrize("form", READ)
def test_a_mask_object_holds_a_copy(form):
    mask = FORMS[form].contents(0)
    kept, made = mask.clone(), READ[form](mask)
    for seed in range(2):
        mask.copy_(FORMS[form].contents(seed))
        assert_sdpa(kept, seed, block_mask=made)


@pytest.mark.parametrize("form", READ)
def test_a_mask_object_is_read_once(form, monkeypatch):
    read = []
    for module, name in ((mask_argument, "of_tensor"), (mask_argument, "tiles_of"), (ops, "blocks_of")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda x, real=real: read.append(1) or real(x))
    mask = FORMS[form].contents(0)
    made = READ[form](mask)
    for seed in range(3):
        assert_sdpa(mask, seed, block_mask=made)
    assert len(read) == 1


@pytest.mark.parametrize(
    ("impl", "direction", "change"),
    [
        ("triton", FORWARD, "batch"),
        ("triton", BACKWARD, "batch"),
        ("hopper", FORWARD, "batch"),
        ("hopper", BACKWARD, "batch"),
        ("triton", FORWARD, "queries"),
    ],
)
def test_what_is_made_of_a_mask_object_is_of_the_calls_own_shape(impl, direction, change, monkeypatch):
    """As where a last batch is smaller; kernels would read beyond the end of what has another shape."""
    as_if_on_hopper(monkeypatch)
    recipe = Recipe.parse("mixed" if impl == "hopper" else "token")
    choice = dispatch.named(recipe, f"{impl}/{impl}")
    elements = bias(0)[None, None, :1] if change == "queries" else pairs(0)[None, None]

    def lists(mask, batch: int, tokens: int) -> list[Tensor]:
        q, k = (torch.empty(batch, 2, n, 64, dtype=torch.bfloat16) for n in (tokens, LENGTH))
        keys = mask.keys.expand(batch, LENGTH).contiguous()
        settings = None, None, tokens, LENGTH, False, -1, -1, 0.125, recipe, False, mask
        return tensors_in(dispatch.prepared(direction, choice, Call.of(q, k, (64, 64), keys, *settings)).lists)

    shared = read_mask(elements)
    for batch, tokens in ((2, 96), (3, 96)) if change == "batch" else ((2, 40), (2, 96)):
        found, expected = lists(shared, batch, tokens), lists(read_mask(elements), batch, tokens)
        assert [x.shape for x in found] == [x.shape for x in expected]
        assert all(torch.equal(x, e) for x, e in zip(found, expected))


# stand-ins


def forward_kernel(q, k, v, mask, key_mask, o, lse, codes, scale, k_mean):
    o.copy_(q * k * seen(mask, key_mask) + v + mask.lists[0])
    lse.copy_(q.sum(-1))
    codes.copy_(2 * k)
    scale.fill_(0.5)
    k_mean.zero_()


def backward_kernel(do, codes, scale, mask, key_mask, dq, dk, dv):
    dq.copy_(do * codes * scale[..., None] * seen(mask, key_mask) + mask.lists[0])
    dk.zero_()
    dv.copy_(do)


def seen(mask: Listed, key_mask: Tensor) -> Tensor:
    """n of each query, (batch, 1, tokens, 1)."""
    shown = mask.elements[int(mask.lists[1])] if mask.is_tiled else mask.elements[0, 0]
    return (shown[:TOKENS, :TOKENS] & key_mask[:, None]).sum(-1).float()[:, None, :, None]


class Family:
    """A module of kernels that has something made of a mask before they are launched."""

    def __init__(self) -> None:
        self.made: list[weakref.ref] = []

    def prepare(self, direction: str, call: Call) -> Call:
        def total() -> Tensor:
            shown = call.mask.part(slice(0, TOKENS), slice(0, TOKENS)) & call.key_mask[:, None, None]
            tile = 0 if call.mask.tiles is None else int(call.mask.tiles[0, 0, 0, 0])
            made = torch.tensor([int(shown.sum()), tile], dtype=torch.int32)
            self.made.append(weakref.ref(made))
            return made

        lists = call.mask.made((direction, call.scale), total)
        listed = Listed(call.mask.elements, lists, TILE, call.mask.tiles is not None, True)
        return call._replace(lists=Lists(listed, listed if direction == BACKWARD else None))

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
        o, rows = empty_like_rows(q), q.shape[:-1]
        lse, q_scale, k_scale = (q.new_empty(rows, dtype=torch.float32) for _ in range(3))
        q_int8, k_int8 = (q.new_empty(q.shape, dtype=torch.int8) for _ in range(2))
        mean = q.new_empty((BATCH, HEADS, WIDTH), dtype=torch.float32)
        read = call.lists.by_query, call.key_mask
        program.launch(Kernel(forward_kernel), (1,), q, k, v, *read, o, lse, k_int8, k_scale, mean)
        return Saved(o, lse, q_int8, q_scale, k_int8, k_scale, None, mean)

    def backward(self, call, saved, do, dlse, q, k, v):
        gradients = empty_gradients(call.head_dim, saved.o, v)
        read = call.lists.by_key, call.key_mask
        program.launch(Kernel(backward_kernel), (1,), do, saved.k_int8, saved.k_scale, *read, *gradients)
        return tuple(gradients)


@pytest.fixture
def stand_ins(monkeypatch):
    """The kernels of all calls."""
    family = Family()
    monkeypatch.setattr(dispatch, "module_of", lambda name: family)
    monkeypatch.setattr(auto_choice, "choose", lambda *_: dispatch.named(Recipe.named("token"), "triton/triton"))
    return family


def check(shown: Tensor, seed: int = 0, scale: float = 1.0, **masks) -> None:
    """Results and gradients of a call whose queries see ``shown``, (batch or 1, tokens, tokens)."""
    *tensors, do = draw(seed=seed)
    q, k, v = leaves = leaves_of(*tensors)
    shown = shown.expand(BATCH, -1, -1)
    keys, total = shown.sum(-1).float()[:, None, :, None], shown.sum().float()
    o = sage_attention(q, k, v, recipe="token", scale=scale, **masks)
    torch.testing.assert_close(o, q * k * keys + v + total)
    dq, _, dv = torch.autograd.grad(o, leaves, do)
    torch.testing.assert_close(dq, do * k * keys + total)
    torch.testing.assert_close(dv, do)


def small(seed: int = 0) -> Tensor:
    return pairs(seed, TOKENS)


EACH_CALL = {
    "tensor": lambda shown: {"attn_mask": shown},
    "four dimensions": lambda shown: {"attn_mask": shown[None, None]},
    "BlockMask": lambda shown: {"block_mask": of_table(shown)},
}
ONCE = {
    "read tensor": lambda shown: {"block_mask": read_mask(shown)},
    "read BlockMask": lambda shown: {"block_mask": read_block_mask(of_table(shown))},
}
ALL = EACH_CALL | ONCE


@pytest.mark.parametrize("form", ALL)
def test_masks_of_a_kind_share_a_plan(form, stand_ins, monkeypatch):
    """Whatever they show; what is made of one is made in each call, or once a direction of a mask object."""
    described, of = [], program.Program.of
    monkeypatch.setattr(program.Program, "of", lambda *given: described.append(1) or of(*given))
    for mask in range(3):
        shown = small(mask)
        masks = ALL[form](shown)
        for seed in range(3):
            check(shown, seed, **masks)
    assert len(PLANS) == 1
    assert len(described) == 2
    assert len(stand_ins.made) == 3 * 2 * (1 if form in ONCE else 3)


@pytest.mark.parametrize("form", ["BlockMask", *ONCE])
def test_padding_beside_a_block_mask(form, stand_ins):
    """It belongs to the call: a mask object's own parts are as they were."""
    shown, real = small(), torch.arange(TOKENS) < torch.tensor([TOKENS, 5])[:, None]
    masks = ALL[form](shown)
    for seed in range(3):
        check(shown & real[:, None], seed, attn_mask=real[:, None, None], **masks)
        check(shown, seed, **masks)
        real.data.copy_(real.flip(0))


def test_a_mask_that_is_written_to_before_backward_raises(stand_ins):
    shown = small()
    for _ in range(2):
        q, k, v, _ = draw()
        o = sage_attention(q.requires_grad_(), k, v, recipe="token", attn_mask=shown)
        shown[0] = True
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


@pytest.mark.parametrize("form", ALL)
def test_masks_are_freed(form, stand_ins):
    """And with them what was made of them, though their plan stays, behind the last backward."""
    shown = small()
    masks = ALL[form](shown.clone())
    check(shown, **masks)
    q, k, v, _ = draw()
    o = sage_attention(q.requires_grad_(), k, v, recipe="token", scale=1.0, **masks)
    (mask,) = masks.values()
    kept = weakref.ref(mask.elements if form in ONCE else mask)
    del masks, mask
    o.sum().backward()
    torch.testing.assert_close(q.grad[0, 0], k[0, 0] * shown.sum(-1, keepdim=True) + 2 * shown.sum())
    del o
    gc.collect()
    assert [x() for x in (kept, *stand_ins.made)] == [None] * (1 + len(stand_ins.made))
    assert len(PLANS) == 1


def test_what_forward_reads_of_a_mask_is_kept_for_nobody(stand_ins, monkeypatch):
    """No backward reads it."""
    masks, read = [], Plan._read
    monkeypatch.setattr(Plan, "_read", lambda *given: masks.append(given[2]) or read(*given))
    q, k, v, _ = draw()
    o = sage_attention(q.requires_grad_(), k, v, recipe="token", attn_mask=small())
    (mask,), (plan,) = masks, PLANS.values()
    assert o.requires_grad
    assert not [settings for settings in mask.parts._made if plan in settings]


def test_a_mask_object_under_many_settings(stand_ins):
    """Of which it keeps some, and makes the others anew."""
    shown = small()
    mask = read_mask(shown)
    for _ in range(2):
        for number in range(MOST):
            check(shown, scale=1.0 + number, block_mask=mask)
    assert 2 * MOST < len(stand_ins.made) < 4 * MOST


def test_threads_share_a_mask_object(stand_ins):
    shown = small()
    mask = read_mask(shown)

    def work(number: int) -> None:
        for seed in range(10):
            check(shown, seed, scale=1.0 + (seed + number) % 3, block_mask=mask)

    at_once(work, range(4))


def test_masks_of_inference_mode(stand_ins):
    """They count no versions."""
    with torch.inference_mode():
        shown = small()
    q, k, v, _ = draw()
    for _ in range(2):
        o = sage_attention(q, k, v, recipe="token", attn_mask=shown)
        torch.testing.assert_close(o, q * k * shown.sum(-1, keepdim=True) + v + 2 * shown.sum())
        with torch.inference_mode():
            shown ^= ~torch.eye(TOKENS, dtype=torch.bool)


def test_a_mask_object_of_inference_mode_trains(stand_ins):
    shown = small()
    with torch.inference_mode():
        mask = read_mask(shown)
    for seed in range(2):
        check(shown, seed, block_mask=mask)


def test_a_bias_that_needs_a_gradient_is_refused_in_every_call(stand_ins):
    bias = torch.zeros(TOKENS, TOKENS)
    specs = set()
    for needs in (False, True):
        given = *draw(3), bias.requires_grad_(needs), *(None,) * 3
        specs.add(laid_out(kind_of(given, None, "token", None, ()), given))
    assert len(specs) == 2
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="gradients of an additive mask"):
            sage_attention(*draw(3), recipe="token", attn_mask=bias)


@pytest.mark.parametrize("mask", ["causal", 3, [1], torch.ones(1)], ids=lambda x: type(x).__name__)
def test_what_is_no_block_mask_is_refused(mask):
    for _ in range(2):
        with pytest.raises(TypeError, match="block_mask: expected a BlockMask"):
            sage_attention(*draw(3), recipe="token", block_mask=mask)
