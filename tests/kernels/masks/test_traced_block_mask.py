"""BlockMasks whose mask_mod a kernel computes, interpreted where there is no GPU, against what torch computes."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, noop_mask, or_masks

from sagebwd import read_block_mask, sage_attention
from sagebwd.cache import PLANS
from sagebwd.kernels.masks import blocks, sm90_block_lists, traced_block_mask
from sagebwd.kernels.masks.traced_block_mask import TracedBlockMask
from sagebwd.kernels.runtime.program import Program
from sagebwd.masks.kinds import ELEMENTS, WORDS, WORDS_BY_KEY
from sagebwd.masks.mask import Mask
from sagebwd.masks.tiles import tiles_of
from sagebwd.masks.trace_mask_mod import traced
from sagebwd.planning.mask_argument import keys_of
from tests.attention_case import outcome

pytest.importorskip("triton")
from tests.gpus import DEVICE, on_gpu

# interpreted where there is no GPU, and of the GPU's tests where there is one
pytestmark = on_gpu
TOKENS, KEYS = 150, 270
# Of which no keys are apart, as they are of "token": programs of a call read the mask.
RECIPE = "token(first_keys=0)"
CPU = torch.device("cpu")
documents = (torch.arange(KEYS) // 70).to(DEVICE)
rows_of_documents = torch.stack([documents, torch.arange(KEYS, device=DEVICE) // 50])
few, seen = torch.tensor(7, device=DEVICE), (torch.arange(TOKENS * KEYS, device=DEVICE) % 3 < 1).view(TOKENS, KEYS)
small, fractions = documents.to(torch.uint8), torch.arange(KEYS, device=DEVICE) / KEYS


def causal(b, h, q, k):
    return q >= k


def added_in_place(q, k):
    shown, at = q >= k, q + 0
    kept = shown
    at += 7
    shown |= k == at
    return kept & (k != 3)


MODS = {
    "causal": causal,
    "documents": lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k),
    "of rows": lambda b, h, q, k: (rows_of_documents[b, q] == rows_of_documents[b][k]) & (q >= k),
    "chunks": lambda b, h, q, k: (q // 5 == k // 5) | (k < few) | (few > q),
    "all": noop_mask,
    "none": lambda b, h, q, k: b.new_zeros((), dtype=torch.bool),
    "of several": and_masks(causal, or_masks(lambda b, h, q, k: q - k < 5, lambda b, h, q, k: k < 4)),
    "where": lambda b, h, q, k: torch.where(q < k, documents[q] > 2, documents[k] % 3 == 1),
    "functions": lambda b, h, q, k: torch.logical_and(torch.ge(q, k), torch.maximum(q - k, few) < 40),
    "a batch further": lambda b, h, q, k: q + torch.full_like(b, 3) >= k,
    "a table of pairs": lambda b, h, q, k: seen[q, k],
    "below zero": lambda b, h, q, k: (((q - k) // 7) % 3 == 1) & ((k - q) % -5 < -2),
    "from the end": lambda b, h, q, k: documents[k - 1] < 3,
    "bytes": lambda b, h, q, k: small[q] >= small[k],
    "fractions": lambda b, h, q, k: fractions[k] > 0.5,
    "of heads": lambda b, h, q, k: q - k < 20 * (h + 1) + b,
    "signs": lambda b, h, q, k: (abs(q - k) < 30) & ~(q == k) & (-q < -3),
    "the method where": lambda b, h, q, k: (q >= k).where(q < 5, k == 0),
    "in place": lambda b, h, q, k: added_in_place(q, k),
    "whole numbers": lambda b, h, q, k: (q.int() // 1 == (k + 1 - 1).to(torch.int64)) + 1 > 1,
    "of two widths": lambda b, h, q, k: (q.int() >= k) & (q.int() != k + 2**32) & (documents.int()[k] + 2**20 > k),
    "the largest numbers": lambda b, h, q, k: (q < 2**61 - 1) & (k - q > -(2**61)) & (q >= k),
}
WITH_BATCH, WITH_HEADS = ("of rows", "of heads"), ("of heads",)


def drawn(name: str, sizes: int | tuple[int, int] = 128):
    batch, heads = 2 if name in WITH_BATCH else None, 2 if name in WITH_HEADS else None
    return create_block_mask(MODS[name], batch, heads, TOKENS, KEYS, device=DEVICE, BLOCK_SIZE=sizes)


@pytest.fixture
def by_kernels(monkeypatch):
    """A CPU is a device whose masks kernels read."""
    monkeypatch.setattr(blocks, "by_kernels", lambda x: True)


def pairs(mask: Mask) -> Tensor:
    return mask.part(*(slice(0, n) for n in mask.shape[2:]))


def assert_reads(block_mask, monkeypatch) -> None:
    """That all forms show what torch reads of a BlockMask."""
    expected = tiles_of(block_mask)
    words = [sm90_block_lists.words_of(expected.elements[:, None], by_key)[0] for by_key in (False, True)]
    monkeypatch.setattr(blocks, "by_kernels", lambda x: True)
    traced = TracedBlockMask.of(block_mask, expected.blocks.device)
    found = [traced.read(2, form) for form in (ELEMENTS, WORDS, WORDS_BY_KEY)]
    counted = traced.counted()
    for mask in (*found, counted):
        assert torch.equal(mask.blocks, expected.blocks)
    for mask in found:
        assert torch.equal(mask.keys, expected.keys.expand(2, -1))
        assert mask.keys_beside(keys_of(mask, 2, expected.shape[3])) is None  # so that lists need not read them
    assert torch.equal(counted.keys, expected.keys)
    assert torch.equal(pairs(found[0]), pairs(expected))
    assert torch.equal(pairs(counted), pairs(expected))
    assert counted.elements.shape == expected.elements.shape
    for by_key, mask in enumerate(found[1:]):
        bits, tiles = mask.parts.known(("bits", expected.shape[2:], bool(by_key)))
        assert torch.equal(bits[tiles.long()], words[by_key][expected.tiles.long()])


@pytest.mark.parametrize("name", MODS)
def test_what_is_read_is_what_torch_reads(name, monkeypatch):
    assert_reads(drawn(name), monkeypatch)


@pytest.mark.parametrize("sizes", [(256, 128), 64, 96], ids=str)
def test_blocks_of_other_sizes(sizes, monkeypatch):
    assert_reads(drawn("of several", sizes), monkeypatch)


@pytest.mark.parametrize("size", [64, 128])
def test_keys_that_whole_tiles_alone_show(size, monkeypatch):
    sizes = {"device": DEVICE, "BLOCK_SIZE": size}
    assert_reads(
        create_block_mask(lambda b, h, q, k: q // 128 >= k // 128, None, None, 384, 300, **sizes), monkeypatch
    )


def test_lists_without_whole_blocks(monkeypatch):
    made = create_block_mask(causal, None, None, TOKENS, KEYS, device=DEVICE)
    made.full_kv_num_blocks = made.full_kv_indices = None
    assert_reads(made, monkeypatch)


OTHER_LISTS = {
    "fewer columns": [[[0], [2]]],
    "more columns": [[[0, 1, 2, 3, 4], [2, 0, 1, 4, 3]]] * 2,
    "more rows": [[[0], [0], [2]]],
}


@pytest.mark.parametrize("name", OTHER_LISTS)
def test_lists_of_other_sizes_than_there_are_blocks(name, monkeypatch):
    """Regression: what lies beyond the last column had its state, and what more columns and rows list counted."""
    indices = torch.tensor(OTHER_LISTS[name], dtype=torch.int32, device=DEVICE)[:, None]
    counts = torch.full(indices.shape[:3], indices.shape[3], dtype=torch.int32, device=DEVICE)
    full = torch.zeros_like(counts), torch.zeros_like(indices)
    assert_reads(
        BlockMask((TOKENS, KEYS), counts, indices, *full, None, None, None, None, (128, 128), causal), monkeypatch
    )


def test_lists_of_fewer_rows_than_blocks_are_refused():
    counts, indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 3, dtype=torch.int32)
    lists = counts.to(DEVICE), indices.to(DEVICE)
    mask = BlockMask((TOKENS, KEYS), *lists, None, None, None, None, None, None, (128, 128), noop_mask)
    for read in (read_block_mask, lambda mask: sage_attention(*inputs()[:3], block_mask=mask, recipe="full")):
        with pytest.raises(ValueError, match="1 rows of blocks of 128 queries for 150 queries"):
            read(mask)


def counting(b, h, q, k):
    count, found = torch.zeros((), dtype=torch.int64, device=DEVICE), q < 0
    for _ in range(3):
        count += 1
        found = found | (q == count)
    return found


class Table(Tensor):
    """A tensor whose indexing may be of its own."""


def wider_in_place(q):
    found = documents.int()[q]
    found += q
    return found


def caught(at, b, h, q, k):
    try:
        q = at(q)
    except Exception:
        return q < k
    return q >= k


UNTRACEABLE = {
    "a tensor that is written after it was read": counting,
    "what is caught": partial(caught, lambda q: torch.clamp(q, min=3)),
    "a branch that is caught": partial(caught, lambda q: q if q > 3 else q + 1),
    "numbers alone that are caught": partial(caught, lambda q: torch.where(q > 3, 1, 2)),
    "an operation's option": lambda b, h, q, k: torch.add(q, k, alpha=2) > 9,
    "an operation of two that kernels lack": lambda b, h, q, k: torch.pow(q, 2) > k,
    "the sign of a fraction": lambda b, h, q, k: -fractions[k] < -0.5,
    "what is no number": lambda b, h, q, k: q > None,
    "a sum in place that is wider": lambda b, h, q, k: wider_in_place(q) > k,
    "a tensor's own where": partial(caught, lambda q: seen[0, 0].where(q < 5, q)),
    "where by numbers": lambda b, h, q, k: torch.where(small[q], q, k) > 3,
    "a fraction beside an index": lambda b, h, q, k: fractions[k] > k,
    "a number beside fractions": lambda b, h, q, k: fractions[k] > 0,
    "a number that UINT8 lacks": lambda b, h, q, k: small[k] < 256,
    "a tensor of another dtype": lambda b, h, q, k: q > few.to(torch.uint16),
    "a table of halves": lambda b, h, q, k: fractions.half()[k] > 0.5,
    "a table of five dimensions": lambda b, h, q, k: documents[None, None, None, None][b, 0, 0, 0, k] > 2,
    "a table of a subclass": lambda b, h, q, k: documents.as_subclass(Table)[k] > 2,
    "a table of zeros": lambda b, h, q, k: torch._efficientzerotensor((KEYS,), device=DEVICE)[k] > 0.5,
    "a write to an index": lambda b, h, q, k: (q.add_(1), q >= k)[1],
    "true as an index": lambda b, h, q, k: seen[True, k],
    "false as an index": lambda b, h, q, k: seen[False, k],
    "bytes as an index": lambda b, h, q, k: documents[small[k]] > 2,
    "flags as an index": lambda b, h, q, k: seen[q > k][k] > 2,
    "more indices than dimensions": lambda b, h, q, k: documents[q, k] > 2,
    "another device's copy": lambda b, h, q, k: q.to("meta") > k,
    "fractions of an index": lambda b, h, q, k: k.to(torch.float32) > 3.0,
    "whole numbers of fractions": lambda b, h, q, k: fractions[k].to(torch.int32) == 0,
    "ones of a dimension": lambda b, h, q, k: b.new_ones(1, dtype=torch.bool),
    "ones of a size": lambda b, h, q, k: b.new_ones((1,), dtype=torch.bool),
    "a number above those of kernels": lambda b, h, q, k: q < 2**61,
    "a number below those of kernels": lambda b, h, q, k: q > -(2**61) - 1,
    "an attribute of tensors": lambda b, h, q, k: q >= k if q.is_nested else q < k,
    "a scalar of a wider dtype": lambda b, h, q, k: small[q] >= few,
    "a fraction that FP32 lacks": lambda b, h, q, k: fractions.double()[k] >= 0.1,
    "a number that INT32 lacks": lambda b, h, q, k: torch.where(q < k, documents.int()[k], 2**31) > 0,
    "a negated view": lambda b, h, q, k: torch._neg_view(documents)[k] > -2,
    "a branch": lambda b, h, q, k: q >= k if q > 3 else q < k,
    "a sum of fractions": lambda b, h, q, k: fractions[q] + fractions[k] > 1,
    "fractions of both axes": lambda b, h, q, k: fractions[q] > fractions[k],
    "numbers of another kind": lambda b, h, q, k: q > 3.5,
    "a slice": lambda b, h, q, k: seen[q].sum() > k,
    "another device": lambda b, h, q, k: torch.zeros(KEYS, device="meta").long()[k] == q,
    "an error": lambda b, h, q, k: q.nobody_knows() > k,
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_has_no_trace(name):
    assert traced(UNTRACEABLE[name], torch.device(DEVICE)) is None


def test_a_mask_that_changes_has_the_same_text():
    """So nothing is compiled anew: numbers and tensors that a mask_mod captures stand beside the text."""

    def made(width: int, table: Tensor):
        return traced(lambda b, h, q, k: (q - k < width) & (table[q] == table[k]), CPU)

    one, other = made(3, torch.zeros(5)), made(700, torch.ones(9))
    assert one is None is other  # of fractions
    one, other = made(3, torch.zeros(5).int()), made(700, torch.ones(9).int())
    assert one.text == other.text
    assert (one.numbers, other.numbers) == ((3,), (700,))
    assert [x.numel() for x in (*one.tables, *other.tables)] == [5, 9]


def test_a_mask_of_other_tiles_has_the_same_programs(by_kernels):
    """Regression: each number of tiles that are shown in part had a program of its own, half a ms of the host's."""
    counts, programs = [], []
    for table in (torch.zeros(KEYS, device=DEVICE).int(), torch.arange(KEYS, device=DEVICE).int()):
        mask_mod = partial(lambda table, b, h, q, k: (table[q] == table[k]) & (q >= k), table)
        mask = read_block_mask(create_block_mask(mask_mod, None, None, TOKENS, KEYS, device=DEVICE))
        for by_key in (False, True):
            sm90_block_lists.words_of(mask.elements[:, None], by_key)
        counts.append(len(mask.elements) - 2)
        programs.append(len(PLANS))
    assert counts == [3, 2]
    assert programs[0] == programs[1]


def test_a_mask_of_other_numbers_has_the_same_programs(by_kernels, monkeypatch):
    """Regression: each number that a mask_mod captured had programs of its own, 25 ms of the host's a call."""
    described, of = [], Program.of
    monkeypatch.setattr(Program, "of", lambda *given: described.append(given[0]) or of(*given))
    for width in (5, -1, 0, 32, 200):
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, TOKENS, KEYS, device=DEVICE)
        mask.mask_mod = partial(lambda width, b, h, q, k: (q - k < width) & (q + 3 >= k), width)
        assert_equal(results(mask), results(tiles_of(mask).kept()))
        assert torch.equal(pairs(read_block_mask(mask)), pairs(tiles_of(mask)))
        if width == 5:
            before = len(described)
    assert len(described) == before


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = TOKENS, KEYS, KEYS, TOKENS
    return [torch.randn(2, 2, n, 16, generator=generator).to(DEVICE, torch.bfloat16) for n in lengths]


def results(block_mask, recipe: str = RECIPE) -> list[Tensor]:
    *tensors, do = inputs()
    return outcome(sage_attention, tensors, do, block_mask=block_mask, recipe=recipe, impl="triton")


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(x, e) for x, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("recipe", [RECIPE, "token"])
def test_a_call_gives_what_it_gives_of_a_mask_that_was_read(recipe, by_kernels, monkeypatch):
    mask = drawn("of heads")
    expected = results(read_block_mask(mask), recipe)
    with monkeypatch.context() as patch:
        patch.setattr(TracedBlockMask, "counted", None)
        assert_equal(results(mask, recipe), expected)
    monkeypatch.setattr(traced_block_mask, "MOST_BYTES", 0)  # no room: tiles are counted
    assert_equal(results(mask, recipe), expected)


def test_other_calls_read_it_too(by_kernels):
    """Of the reference, and of no tokens."""
    mask, (q, k, v, do) = drawn("of heads"), inputs()
    options = {"recipe": "full", "impl": "reference"}
    expected = outcome(sage_attention, (q, k, v), do, block_mask=tiles_of(mask).kept(), **options)
    assert_equal(outcome(sage_attention, (q, k, v), do, block_mask=mask, **options), expected)
    empty = create_block_mask(causal, None, None, TOKENS, KEYS, device=DEVICE)
    found = outcome(sage_attention, (q[:0], k[:0], v[:0]), do[:0], block_mask=empty, recipe=RECIPE, impl="triton")
    assert [x.shape for x in found] == [x[:0].shape for x in (q, q, k, v)]


def test_nothing_of_a_mask_is_remembered(by_kernels):
    """Of a mask_mod that is replaced, of what it captures and of lists that are rewritten a call sees what is now."""
    width, table = [3], torch.arange(KEYS, device=DEVICE) // 70
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, TOKENS, KEYS, device=DEVICE)
    mask.mask_mod = lambda b, h, q, k: (table[q] == table[k]) & (q + width[0] >= k)

    def shown() -> list[Tensor]:
        return results(tiles_of(mask).kept())

    before = shown()
    assert_equal(results(mask), before)
    for change in (
        lambda: width.__setitem__(0, 9),
        lambda: table.copy_(torch.arange(KEYS, device=DEVICE) // 40),
        lambda: setattr(mask, "mask_mod", causal),
        lambda: mask.kv_num_blocks.fill_(1),
        lambda: mask.kv_num_blocks.fill_(0),
    ):
        change()
        expected = shown()
        assert not torch.equal(expected[0], before[0])
        assert_equal(results(mask), expected)
        before = expected


def test_a_table_that_is_written_before_backward_is_told(by_kernels):
    """Backward reads the mask again."""
    table = torch.arange(KEYS, device=DEVICE) // 70
    mask = create_block_mask(lambda b, h, q, k: table[q] == table[k], None, None, TOKENS, KEYS, device=DEVICE)
    *tensors, do = inputs()
    out = sage_attention(*(x.requires_grad_() for x in tensors), block_mask=mask, recipe=RECIPE, impl="triton")
    table.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(do)


def test_it_is_refused_as_one_that_was_read_is(by_kernels):
    mask, (q, k, v, _) = drawn("of heads"), inputs()
    with pytest.raises(ValueError, match=r"made for \(150, 270\) queries and keys, called with \(149, 270\)"):
        sage_attention(q[:, :, 1:], k, v, block_mask=mask, recipe=RECIPE, impl="triton")
    with pytest.raises(ValueError, match="made for batch 2 and 2 heads, called with batch 1"):
        sage_attention(q[:1], k[:1], v[:1], block_mask=mask, recipe=RECIPE, impl="triton")
