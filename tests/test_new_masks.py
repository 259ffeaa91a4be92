"""What a mask that was not seen before costs: operators and waits for the device, and mask_mods of every kind."""

import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.mask_cases import KINDS, Case
from sagebwd.kernels.masks.blocks import of_tensor
from sagebwd.kernels.masks.sm90_block_lists import of_keys, of_queries
from sagebwd.masks.band import Band
from sagebwd.masks.tiles import tiles_of

# Operators that wait for the device, for a number or for how many there are.
WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim", "_unique2")
VIEWS = (
    "view", "unsqueeze", "expand", "alias", "slice", "select", "transpose", "unbind", "split", "detach",
    "_unsafe_view", "lift_fresh",
)  # fmt: skip


class Counted(TorchDispatchMode):
    """Operators by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @property
    def launches(self):
        return len([name for name in self.names if name not in VIEWS])

    @property
    def waits(self):
        return len([name for name in self.names if name in WAITS])


def read_and_listed(read, tokens):
    """Reading a mask, and what both directions on Hopper's kernels make of it: operators and waits of each."""
    found = []
    with Counted() as counted:
        mask = read()
    found.append((counted.launches, counted.waits))
    keys = mask.keys.expand(1, tokens).contiguous()
    for lists in (
        lambda: of_queries(mask, keys, (tokens, tokens), Band(), (192, 128)),
        lambda: of_keys(mask, keys, (tokens, tokens), Band(), (64, 128), 4),
    ):
        with Counted() as counted:
            lists()
        found.append((counted.launches, counted.waits))
    return found


def of_blocks(mask_mod, tokens):
    """A BlockMask that asks in blocks on the diagonal and before it, and shows the first block of keys."""
    number = torch.arange(tokens // 128, dtype=torch.int32)
    indices = (number[:, None] - number) % len(number)
    asked, whole = (number + 1).clamp(max=2), (number > 1).int()
    lists = (x[None, None] for x in (asked, indices, whole, number.expand(len(number), -1).contiguous()))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=128, mask_mod=mask_mod, seq_lengths=(tokens, tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_block_mask_takes_as_few_operators_at_16384_tokens(kind):
    counts = []
    for tokens in (2048, 16384):
        mask_mod = Case.of(kind, 128, tokens).mask_mod("cpu")
        mask = of_blocks(mask_mod, tokens)
        counts.append(read_and_listed(lambda mask=mask: tiles_of(mask), tokens))
    assert counts[0] == counts[1]
    (read, waits), (queries, none), (keys, nothing) = counts[1]
    assert (waits, none, nothing) == (1, 0, 0)
    with Counted() as own:
        mask_mod(*torch.zeros(4, 1, dtype=torch.int64).unbind())
    assert read <= 70 + own.launches
    assert queries <= 60
    assert keys <= 80


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
def test_a_new_tensor_is_not_waited_for(dtype):
    """On a CPU operators grow with its rows by `ROWS`; a GPU has passes of its own."""
    counts = []
    for tokens in (512, 1024):
        mask = torch.zeros(1, 1, tokens, tokens, dtype=dtype)
        counts.append(read_and_listed(lambda mask=mask: of_tensor(mask), tokens))
    assert counts[0] == counts[1]
    assert [waits for _, waits in counts[0]] == [0, 0, 0]
    assert sum(launches for launches, _ in counts[0]) <= 170


TABLE = torch.arange(300) // 70
PAIRS = (torch.arange(300)[:, None] * 7 + torch.arange(300) * 3) % 11 < 5
LIMIT, NARROW = torch.tensor(50.1), (torch.arange(300) / 3).bfloat16()
MASK_MODS = {
    "noop": noop_mask,
    "and": and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: TABLE[q] == TABLE[k]),
    "or": or_masks(lambda b, h, q, k: q - k > LIMIT, lambda b, h, q, k: TABLE[q] == 2),
    "heads": lambda b, h, q, k: (q - k).abs() < 40 * (h + 1),
    "table of pairs": lambda b, h, q, k: PAIRS[q, k],
    "a row of it": lambda b, h, q, k: PAIRS[17, k] | (q // 3 % 2 == 0),
    "minimum": lambda b, h, q, k: torch.where(q < 30, k < 30, torch.minimum(q, k) > 20),
    "casts": lambda b, h, q, k: q.float() * 0.1 > k.to(torch.int32),
    "a scalar of more bits": lambda b, h, q, k: NARROW[q] < LIMIT,
    "a row, then a place": lambda b, h, q, k: PAIRS[q][k],
    "reduced": lambda b, h, q, k: (PAIRS[q] & PAIRS[k]).sum() > 60,
    "reduced by dimension": lambda b, h, q, k: (torch.stack([q, k]) > 50).all(0),
    "selected": lambda b, h, q, k: TABLE.index_select(0, q.view(1))[0] == TABLE[k],
    "in place": lambda b, h, q, k: (q >= k).logical_or_(TABLE[q] == 1),
}


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mods_of_every_kind(name):
    """Bit for bit what torch makes of them."""
    mask_mod = MASK_MODS[name]
    expected = create_mask(mask_mod, 2, 3, 300, 270, device="cpu")
    mask = tiles_of(create_block_mask(mask_mod, 2, 3, 300, 270, device="cpu"))
    assert torch.equal(mask.part(slice(0, 300), slice(0, 270)), expected)


@pytest.mark.parametrize(
    "mask_mod",
    [lambda b, h, q, k: q >= k if h == 0 else q < k, lambda b, h, q, k: q.item() > 3, lambda b, h, q, k: 1 / 0],
)
def test_what_vmap_refuses_is_refused(mask_mod):
    """Not taken for what a batch of one would make of it."""
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        tiles_of(of_blocks(mask_mod, 128))
