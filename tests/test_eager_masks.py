"""Calls under masks of any shape that are replayed without operators: of the mask that is there, as it is now.

The kernels are stand-ins that a CPU runs. With n(i) the keys that query i sees, read of the mask, and t what
was made of the mask before, a tensor with the number of all of them: o = q k n + v + t, lse = sum(q) of rows,
dq = do k n + t.
"""

import ctypes
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from sagebwd import dispatch, eager, mask_argument, read_block_mask, sage_attention
from sagebwd.call import Call, Saved, empty_gradients, empty_like_rows
from sagebwd.kernels.table import BACKWARD
from sagebwd.masks.lists import Listed, Lists
from sagebwd.masks.mask import TILE
from sagebwd.masks.remember import MOST, Memory
from sagebwd.recipe import Recipe

numpy = pytest.importorskip("numpy")
pytest.importorskip("triton")
from sagebwd.kernels.host import replay  # noqa: E402
from tests.test_eager import SHAPE, Kernel, address_of, draw, floats  # noqa: E402

BATCH, HEADS, TOKENS, WIDTH = SHAPE
_made_once = Memory()


def seen_of(elements, tiles, key_mask):
    """n of each query, as numbers of o."""
    if tiles is None:
        shown = numpy.frombuffer((ctypes.c_uint8 * TOKENS**2).from_address(address_of(elements)), dtype=numpy.uint8)
        shown = shown.reshape(TOKENS, TOKENS)
    else:
        tile = numpy.frombuffer((ctypes.c_int32 * 1).from_address(address_of(tiles)), dtype=numpy.int32)[0]
        at = address_of(elements) + int(tile) * TILE**2
        shown = numpy.frombuffer((ctypes.c_uint8 * TILE**2).from_address(at), dtype=numpy.uint8)
        shown = shown.reshape(TILE, TILE)[:TOKENS, :TOKENS]
    kept = numpy.frombuffer((ctypes.c_uint8 * (BATCH * TOKENS)).from_address(address_of(key_mask)), dtype=numpy.uint8)
    seen = shown.astype("f4") @ kept.reshape(BATCH, TOKENS).T.astype("f4")  # (tokens, batch)
    return numpy.broadcast_to(seen.T[:, None, :, None], SHAPE).reshape(-1)


def forward_kernel(q, k, v, elements, tiles, key_mask, total, o, lse, mean, kept):
    assert floats(total, 1)[0] >= 0
    floats(kept)[:] = floats(k)
    floats(o)[:] = floats(q) * floats(k) * seen_of(elements, tiles, key_mask) + floats(v) + floats(total, 1)[0]
    floats(lse, BATCH * HEADS * TOKENS)[:] = floats(q).reshape(-1, WIDTH).sum(1)
    floats(mean, BATCH * HEADS * WIDTH)[:] = 0


def backward_kernel(do, kept, elements, tiles, key_mask, total, dq, dk, dv):
    floats(dq)[:] = floats(do) * floats(kept) * seen_of(elements, tiles, key_mask) + floats(total, 1)[0]
    floats(dk)[:], floats(dv)[:] = 0, floats(do)


class Kernels:
    """A module of kernels that has something made of a mask before they are launched."""

    def __init__(self) -> None:
        self.first, self.second, self.made = Kernel(forward_kernel), Kernel(backward_kernel), 0

    def prepare(self, direction: str, call: Call) -> Call:
        def total() -> Tensor:
            self.made += 1
            return self.shown(call).sum().float()[None]

        made = _made_once.get((call.mask.blocks, call.key_mask), (direction, id(self)), total)
        listed = Listed(call.mask.elements, made, 1, call.mask.tiles is not None, True)
        return call._replace(lists=Lists(listed, listed if direction == BACKWARD else None))

    @staticmethod
    def shown(call: Call) -> Tensor:
        whole = call.mask.part(slice(0, TOKENS), slice(0, TOKENS))
        return whole & call.key_mask[:, None, None]

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
        o, lse, kept = empty_like_rows(q), torch.empty(q.shape[:-1]), torch.empty(q.shape)
        mean = torch.empty(BATCH, HEADS, WIDTH)
        read = call.mask.elements, call.mask.tiles, call.key_mask, call.lists.by_query.lists
        replay.launch(self.first, (1,), q, k, v, *read, o, lse, mean, kept)
        return Saved(o, lse, None, None, None, kept, None, mean)

    def backward(self, call, saved, do, dlse, q, k, v):
        gradients = empty_gradients(call.recipe, call.head_dim, saved.o, v)
        read = call.mask.elements, call.mask.tiles, call.key_mask, call.lists.by_key.lists
        replay.launch(self.second, (1,), do, saved.k_scale, *read, *gradients)
        return tuple(gradients)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The kernels of ``impl="triton"``, and nothing remembered of masks."""
    made = Kernels()
    monkeypatch.setattr(dispatch, "_module", lambda name: made)
    monkeypatch.setattr(dispatch, "choose", lambda *_: dispatch.named(Recipe.named("token"), "triton/triton"))
    monkeypatch.setattr(eager, "_masks", Memory())
    monkeypatch.setattr(mask_argument, "_memory", Memory())
    return made


@pytest.fixture
def operators(monkeypatch):
    """How often the operator ran a forward."""
    calls, real = [], dispatch.forward
    monkeypatch.setattr(dispatch, "forward", lambda *arguments: calls.append(1) or real(*arguments))
    return calls


def check(seen: Tensor, seed: int = 0, **masks) -> None:
    """Results and gradients of a call whose queries see ``seen``, (batch or 1, tokens, tokens)."""
    *inputs, do = draw(seed=seed)
    q, k, v = (x.requires_grad_() for x in inputs)
    seen = seen.expand(BATCH, -1, -1)
    counts, total = seen.sum(-1).float()[:, None, :, None], seen.sum().float()
    o = sage_attention(q, k, v, recipe="token", **masks)
    torch.testing.assert_close(o, q * k * counts + v + total)
    dq, _, dv = torch.autograd.grad(o, (q, k, v), do)
    torch.testing.assert_close(dq, do * k * counts + total)
    torch.testing.assert_close(dv, do)


def boolean(seed: int = 0) -> Tensor:
    mask = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(seed)) < 0.5
    return mask | torch.eye(TOKENS, dtype=torch.bool)


def block_mask_of(seen: Tensor):
    return create_block_mask(lambda b, h, q, k: seen[q, k], None, None, TOKENS, TOKENS, device="cpu")


FORMS: dict[str, Callable[[Tensor], dict]] = {
    "tensor": lambda seen: {"attn_mask": seen},
    "four-dimensions": lambda seen: {"attn_mask": seen[None, None]},
    "BlockMask": lambda seen: {"block_mask": block_mask_of(seen)},
    "read": lambda seen: {"block_mask": read_block_mask(block_mask_of(seen))},
}


@pytest.mark.parametrize("form", FORMS)
def test_later_calls_are_replayed(form, kernels, operators):
    seen = boolean()
    masks = FORMS[form](seen)
    for seed in range(7):
        check(seen, seed, **masks)
    assert len(operators) == 2
    assert kernels.made == 2  # of forward and of backward
    assert kernels.first.launched == 2
    assert kernels.second.launched <= 3


@pytest.mark.parametrize("form", ["BlockMask", "read"])
def test_padding_beside_blocks(form, operators):
    seen, real = boolean(), torch.arange(TOKENS) < torch.tensor([TOKENS, 5])[:, None]
    masks = FORMS[form](seen) | {"attn_mask": real[:, None, None].contiguous()}
    for seed in range(6):
        check(seen & real[:, None], seed, **masks)
    assert len(operators) == 2
    masks["attn_mask"][1] = True
    check(seen, **masks)
    check(seen, **masks)
    assert len(operators) == 3


@pytest.mark.parametrize("form", FORMS)
def test_another_mask_of_a_kind_is_read_and_replayed_at_once(form, kernels, operators):
    for number in range(4):
        seen = boolean(number)
        masks = FORMS[form](seen)
        for seed in range(4):
            check(seen, seed, **masks)
        assert len(operators) == 2 + number


def test_a_mask_that_is_written_to_is_read_again(operators):
    seen = boolean()
    for number in range(1, 5):
        for seed in range(4):
            check(seen, seed, attn_mask=seen)
        assert len(operators) == 1 + number
        if number == 2:
            seen.view(-1)[5:20] ^= True  # through a view, which counts the same versions
        else:
            seen.copy_(boolean(number))


def test_what_was_read_of_blocks_and_is_written_to_is_read_again(operators):
    seen, other = boolean(), boolean(1)
    mask, theirs = (read_block_mask(block_mask_of(x)) for x in (seen, other))
    for _ in range(4):
        check(seen, block_mask=mask)
    for x, new in zip(mask, theirs):
        x.copy_(new)
    for _ in range(3):
        check(other, block_mask=mask)
    assert len(operators) == 3


def test_a_mask_that_is_written_to_before_backward_raises():
    seen = boolean()
    for _ in range(4):
        check(seen, attn_mask=seen)
    q, k, v, _ = draw()
    o = sage_attention(q.requires_grad_(), k, v, recipe="token", attn_mask=seen)
    seen[0] = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_a_mask_at_the_address_of_one_that_was_freed_is_read(operators):
    """Memory for all is the same; each is a tensor of its own, as another would be that took a freed one's place."""
    memory = torch.empty(TOKENS, TOKENS, dtype=torch.bool)
    for number in range(4):
        seen = memory.detach()
        seen.set_(memory.untyped_storage(), 0, memory.shape)
        memory.numpy()[:] = boolean(number).numpy()  # which counts no version
        for seed in range(3):
            check(boolean(number), seed, attn_mask=seen)
        assert seen.data_ptr() == memory.data_ptr()
        freed = weakref.ref(seen)
        del seen
        gc.collect()
        assert freed() is None


@pytest.mark.parametrize("form", FORMS)
def test_masks_are_freed(form):
    """And with them what was made of them, also where a graph of theirs is still there for a while."""
    seen = boolean()
    masks = FORMS[form](seen.clone())
    for _ in range(4):
        check(seen, **masks)
    q, k, v, _ = draw()
    o = sage_attention(q.requires_grad_(), k, v, recipe="token", **masks)
    given = next(iter(masks.values()))
    held = weakref.ref(given.blocks if form == "read" else given)
    del masks, given
    o.sum().backward()
    torch.testing.assert_close(q.grad[0, 0], k[0, 0] * seen.sum(-1, keepdim=True) + 2 * seen.sum())
    del o
    gc.collect()
    assert held() is None
    assert len(eager._masks._entries) == 0


def test_many_kinds_under_one_mask(operators):
    seen = boolean()
    for _ in range(3):
        for number in range(MOST + 4):
            q, k, v, _ = draw()
            o = sage_attention(q, k, v, recipe="token", attn_mask=seen, scale=1.0 + number)
            torch.testing.assert_close(o, q * k * seen.sum(-1, keepdim=True) + v + 2 * seen.sum())


def test_kinds_of_a_mask_are_apart(operators):
    """By what is asked beside it: lse, no gradient, a sink."""
    seen = boolean()
    q, k, v, _ = draw()
    for _ in range(4):
        wanted = q * k * seen.sum(-1, keepdim=True) + v + 2 * seen.sum()
        o, lse = sage_attention(q, k, v, recipe="token", attn_mask=seen, return_lse=True)
        torch.testing.assert_close((o, lse), (wanted, q.sum(-1)))
        torch.testing.assert_close(sage_attention(q, k, v, recipe="token", attn_mask=seen), wanted)
        o = sage_attention(q, k, v, recipe="token", attn_mask=seen, sinks=torch.zeros(HEADS))
        torch.testing.assert_close(o, wanted * torch.sigmoid(q.sum(-1, keepdim=True)))
    assert len(operators) == 4


def test_masks_of_inference_mode_are_read_each_time(operators):
    """They count no versions."""
    with torch.inference_mode():
        seen = boolean()
    q, k, v, _ = draw()
    for _ in range(2):
        for _ in range(3):
            o = sage_attention(q, k, v, recipe="token", attn_mask=seen)
            torch.testing.assert_close(o, q * k * seen.sum(-1, keepdim=True) + v + 2 * seen.sum())
        with torch.inference_mode():
            seen ^= True
            seen |= torch.eye(TOKENS, dtype=torch.bool)
    assert len(operators) == 6


def test_a_bias_that_needs_a_gradient_is_refused_still():
    bias, kinds = torch.zeros(TOKENS, TOKENS), []
    for needs in (False, True):
        bias.requires_grad_(needs)
        kinds.append(eager.kind_of((*draw(3), bias, None, None, None), "token", None))
    assert kinds[0] != kinds[1]
    with pytest.raises(NotImplementedError, match="gradients of an additive mask"):
        sage_attention(*draw(3), recipe="token", attn_mask=bias)


def test_what_is_no_mask_is_refused():
    for mask in ("causal", 3, [1], torch.ones(1)):
        with pytest.raises(TypeError, match="block_mask: expected a BlockMask"):
            sage_attention(*draw(3), recipe="token", block_mask=mask)
