"""Masks of elements that a plan's own programs read, interpreted where there is no GPU, against those read before."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sagebwd import dispatch, sage_attention
from sagebwd.cache import PLANS
from sagebwd.call import Call
from sagebwd.kernels.capabilities import BACKWARD, FORWARD
from sagebwd.kernels.masks import blocks, sm90_block_lists
from sagebwd.masks.kinds import ELEMENTS, WORDS, WORDS_BY_KEY
from sagebwd.masks.mask import Mask
from sagebwd.planning import mask_argument
from sagebwd.planning.mask_elements import Elements, Left
from sagebwd.planning.plan import Plan
from sagebwd.recipe import Recipe
from tests.attention_case import outcome

pytest.importorskip("triton")
from sagebwd.kernels.runtime import program
from tests.gpus import DEVICE, as_if_on_hopper

BATCH, HEADS, TOKENS, KEYS, WIDTH = 2, 2, 40, 90, 16
# Of which no keys are apart, as they are of "token".
RECIPE = "token(first_keys=0)"


def shown(seed: int, *shape: int) -> Tensor:
    """Which queries see which keys, of some heads and batch elements; some keys are no query's, a block is whole."""
    found = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    found[..., 70:80] = False
    found[..., :32, 32:64] = True
    return found


def bias(seed: int, *shape: int) -> Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return numbers.masked_fill(~shown(seed, *shape), -torch.inf)


def misaligned(seed: int) -> Tensor:
    """As a part of a larger mask, which begins at an odd byte and whose rows are apart."""
    return shown(seed, BATCH, HEADS, TOKENS + 3, KEYS + 7)[..., 3:, 7:]


# Masks by what they are drawn from.
DRAWN = {
    "boolean": lambda seed: shown(seed, TOKENS, KEYS),
    "of batch elements": lambda seed: shown(seed, BATCH, 1, TOKENS, KEYS),
    "misaligned": misaligned,
    "expanded": lambda seed: shown(seed, 1, 1, TOKENS, KEYS).expand(BATCH, HEADS, -1, -1),
    "by key": lambda seed: shown(seed, TOKENS, KEYS).mT.contiguous().mT,
    "bias": lambda seed: bias(seed, HEADS, TOKENS, KEYS),
    "of one query": lambda seed: bias(seed, HEADS, TOKENS, KEYS)[:, 35:36].to(torch.bfloat16),
}


def inputs(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = TOKENS, KEYS, KEYS, TOKENS
    drawn = (torch.randn(BATCH, HEADS, n, WIDTH, generator=generator) for n in lengths)
    return [x.to(DEVICE, torch.bfloat16) for x in drawn]


def results(seed: int, mask: Tensor, **options: object) -> list[Tensor]:
    *tensors, do = inputs(seed)
    return outcome(sage_attention, tensors, do, attn_mask=mask, recipe=RECIPE, impl="triton", **options)


def read_before(seed: int, mask: Tensor, monkeypatch: pytest.MonkeyPatch, **options: object) -> list[Tensor]:
    """The same by a plan whose programs do not read the mask."""
    with monkeypatch.context() as patch:
        patch.setattr(Elements, "of", lambda *_: None)
        PLANS.clear()
        found = results(seed, mask, **options)
    PLANS.clear()
    return found


@pytest.fixture
def never_before(monkeypatch):
    """Kernels read masks, and no call does so before its program."""
    monkeypatch.setattr(blocks, "by_kernels", lambda x: True)
    PLANS.clear()
    yield lambda: monkeypatch.setattr(mask_argument, "read", _refuse)
    PLANS.clear()


@pytest.fixture
def two_blocks_of_keys(monkeypatch):
    """Of Hopper's 128; the portable kernels', of 64, are two without."""
    monkeypatch.setitem(globals(), "KEYS", 150)


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("a mask was read before its program")


@pytest.mark.parametrize("form", DRAWN)
def test_programs_read_what_was_read_before(form, never_before, monkeypatch):
    """To the last bit; each call sees the mask as it is then, though all share a plan."""
    expected = [read_before(seed, DRAWN[form](seed).to(DEVICE), monkeypatch) for seed in range(2)]
    never_before()
    mask = DRAWN[form](0).to(DEVICE)
    for seed in (1, 0):
        of_memory = tuple(slice(1) if stride == 0 else slice(None) for stride in mask.stride())
        mask.data[of_memory].copy_(DRAWN[form](seed)[of_memory])
        found = results(seed, mask)
        assert all(torch.equal(x, e) for x, e in zip(found, expected[seed], strict=True))
    assert len(PLANS) == 1


def test_a_call_without_gradients_leaves_nothing_for_backward(never_before, monkeypatch):
    mask = DRAWN["boolean"](0).to(DEVICE)
    expected = read_before(0, mask, monkeypatch)[0]
    never_before()
    q, k, v, _ = inputs(0)
    for _ in range(2):
        found = sage_attention(q, k, v, attn_mask=mask, recipe=RECIPE, impl="triton")
        assert torch.equal(found, expected)
    (plan,) = PLANS.values()
    (program,) = plan.programs.values()
    assert len([x for x in program.outputs if x[0] is not None]) == 2, "O and lse"


def test_backwards_of_several_calls_read_each_its_own(never_before, monkeypatch):
    """In the other order, and one of them twice."""
    drawn = [DRAWN["boolean"](seed).to(DEVICE) for seed in range(2)]
    expected = [read_before(seed, mask, monkeypatch) for seed, mask in enumerate(drawn)]
    never_before()
    calls = []
    for seed, mask in enumerate(drawn):
        *leaves, do = inputs(seed)
        leaves = [x.requires_grad_() for x in leaves]
        calls.append((sage_attention(*leaves, attn_mask=mask, recipe=RECIPE, impl="triton"), leaves, do))
    for number in (1, 0, 1):
        found = torch.autograd.grad(*calls[number], retain_graph=True)
        assert all(torch.equal(x, e) for x, e in zip(found, expected[number][1:], strict=True))


def test_what_programs_do_not_read_as_it_lies_is_read_before(monkeypatch):
    """A bias of one key for all, one by key, and first keys, which are found by operators of torch."""
    monkeypatch.setattr(blocks, "by_kernels", lambda x: True)
    read, real = [], mask_argument.read
    monkeypatch.setattr(mask_argument, "read", lambda *given, **more: read.append(1) or real(*given, **more))
    numbers = bias(0, TOKENS, KEYS).to(DEVICE)
    q, k, v, _ = inputs(0)
    for mask, recipe in (
        (numbers[:, :1], RECIPE), (numbers.mT.contiguous().mT, RECIPE), (numbers.isfinite(), "token"),
    ):  # fmt: skip
        read.clear()
        sage_attention(q, k, v, attn_mask=mask, recipe=recipe, impl="triton")
        assert read == [1]


@pytest.mark.parametrize("form", ["of batch elements", "misaligned", "bias", "of one query"])
def test_hoppers_kernels_are_given_what_was_read_before(form, never_before, two_blocks_of_keys, monkeypatch):
    """Lists, bits, and which keys count, of both directions, by stand-ins that copy what they are given."""
    pytest.importorskip("sagebwd.kernels.sm90.forward.launch")
    as_if_on_hopper(monkeypatch)
    choice = dispatch.named(Recipe.named("mixed"), "hopper/hopper")
    q, k = (torch.randn(BATCH, HEADS, n, 64).to(DEVICE, torch.bfloat16) for n in (TOKENS, KEYS))
    elements = DRAWN[form](0).to(DEVICE)
    elements = elements[(None,) * (4 - elements.dim())]
    elements = mask_argument._once_where_expanded(elements)
    call = Call.of(q, k, (64, 64), *(None,) * 3, TOKENS, KEYS, False, -1, -1, 0.125, choice.recipe)
    plan = Plan(choice, call, q, k, sinks=False, elements=elements)
    assert plan.elements is not None

    def given(call: Call) -> list[Tensor]:
        lists = call.lists
        return [call.key_mask, *(x for x in (lists.lists, lists.tiles, lists.work_splits) if x is not None)]

    def copied(family: object, form: object, call: Call, *_: object) -> tuple[Tensor, ...]:
        return tuple(program.copy(torch.empty_like(x), x) for x in given(call))

    monkeypatch.setattr(dispatch.runtime().driver, "forward", copied)
    monkeypatch.setattr(dispatch.runtime().driver, "backward", copied)
    monkeypatch.setattr(plan, "pieces", {})
    before = sm90_block_lists.read(elements, BATCH, (TOKENS, KEYS), by_query=True, by_key=True)
    of_elements = call._replace(key_mask=before.keys, mask=before)
    forward = plan._forward_program(elements, None, True, plan.call, q).run([elements, q])
    found, left = forward[:-4], forward[-4:]
    expected = given(dispatch.prepared(FORWARD, choice, of_elements))
    assert all(torch.equal(x, e) for x, e in zip(found, expected, strict=True))
    bits = before.parts.known(("bits", (TOKENS, KEYS), True))
    assert all(torch.equal(x, e) for x, e in zip(left, (before.blocks, before.keys, *bits), strict=True))
    backward = plan._backward_program(elements, Left(*left), None, plan.call, q, q, q).run([elements, *left, q, q, q])
    expected = given(dispatch.prepared(BACKWARD, choice, of_elements))
    assert all(torch.equal(x, e) for x, e in zip(backward, expected, strict=True))


def test_a_bias_that_a_hook_gives_back_in_other_strides(never_before, two_blocks_of_keys, monkeypatch):
    """Regression: Hopper's backward read memory that nobody had written, since no program copies by torch."""
    pytest.importorskip("sagebwd.kernels.sm90.forward.launch")
    as_if_on_hopper(monkeypatch)
    choice = dispatch.named(Recipe.named("mixed"), "hopper/hopper")
    q, k = (torch.randn(BATCH, HEADS, n, 64).to(DEVICE, torch.bfloat16) for n in (TOKENS, KEYS))
    lse = torch.zeros(BATCH, HEADS, TOKENS, device=DEVICE)
    elements = bias(0, 1, HEADS, TOKENS, KEYS).to(DEVICE)
    call = Call.of(q, k, (64, 64), *(None,) * 3, TOKENS, KEYS, False, -1, -1, 0.125, choice.recipe)
    plan = Plan(choice, call, q, k, sinks=False, elements=elements)
    unread = plan.elements.unread(elements)
    before = sm90_block_lists.read(elements, BATCH, (TOKENS, KEYS), by_query=True, by_key=True)
    bits = before.parts.known(("bits", (TOKENS, KEYS), True))
    unread.parts.keep("left", Left(before.blocks, before.keys, *bits))

    def copied(family: object, form: object, call: Call, *_: object) -> tuple[Tensor | None, ...]:
        return program.copy(torch.empty_like(call.lists.bias), call.lists.bias), None

    monkeypatch.setattr(dispatch.runtime().driver, "backward", copied)
    workspace = torch.empty(plan.bytes, dtype=torch.uint8, device=DEVICE)
    for given in (elements, elements.mT.contiguous().mT):
        mask = unread.with_tensors(given, *unread.tensors[1:], unread.parts)
        found, _ = plan.backward(q, None, None, None, q, q, lse, workspace, None, mask, None, None)
        assert torch.equal(found, elements)


HOPPER, PORTABLE = "hopper", "triton"


@pytest.mark.parametrize("forward", [HOPPER, PORTABLE])
@pytest.mark.parametrize("backward", [HOPPER, PORTABLE])
def test_a_mask_is_read_in_the_form_of_each_direction(forward, backward, monkeypatch):
    """Words of a direction that reads none would be made for nobody, and those that one lacks in each call."""
    choice, elements, asked = dispatch.named(Recipe.named("mixed"), f"{forward}/{backward}"), DRAWN["boolean"](0), []
    q, k = (torch.zeros(BATCH, HEADS, n, 64) for n in (TOKENS, KEYS))

    def read(elements: Tensor, *_: object, by_query: bool, by_key: bool) -> Mask:
        asked.append((by_query, by_key))
        return blocks.of_tensor(elements)

    monkeypatch.setattr(sm90_block_lists, "read", read)
    expected = []
    for trains in (True, False):
        mask_argument.read(elements, elements[None, None], None, q, k, by_key=trains, choice=choice)
        by_words = forward == HOPPER, backward == HOPPER
        expected += [(by_words[0], by_words[1] and trains)] if any(by_words) else []
    assert asked == expected
    call = Call.of(q, k, (64, 64), *(None,) * 3, TOKENS, KEYS, False, -1, -1, 0.125, choice.recipe)
    plan = Plan(choice, call, q, k, sinks=False)
    block_mask = SimpleNamespace(has_room=lambda form: False, read=lambda batch, form: form)
    forms = tuple(plan._as_read(direction, block_mask)[1] for direction in (FORWARD, BACKWARD))
    assert forms == (WORDS if forward == HOPPER else ELEMENTS, WORDS_BY_KEY if backward == HOPPER else ELEMENTS)
