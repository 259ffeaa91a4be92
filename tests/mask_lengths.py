"""Which kernels calls of several lengths would compile for sm_90, under masks too. Needs no GPU; compiles nothing.

`python -m tests.mask_lengths` prints a JSON line for each kind of kernel: the call's, the kernel's name and the length
that asked for it first. It runs in a process of its own, as kernels of a process with TRITON_INTERPRET=1 are others.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from triton.runtime.jit import JITFunction

from sagebwd import dispatch, sage_attention, sage_attention_varlen
from sagebwd.auto import choice as auto_choice
from sagebwd.kernels.masks import blocks
from sagebwd.kernels.portable import launch as portable
from sagebwd.kernels.runtime import device
from sagebwd.kernels.runtime.parts import Part
from sagebwd.kernels.sm90.forward import launch as forward
from sagebwd.masks.tiles import tiles_of
from sagebwd.recipe import Recipe
from tools.cross_compile import Unstarted, binder

# Two of no multiple; then one of 16, one of tiles, and others.
FIRST = 301, 333
LENGTHS = *FIRST, 336, 512, 50, 77, 192, 384, 880, 901, 1000
# Batch, query heads, key heads, head_dim; of wide heads, which backward has in parts, as many as LEAST says.
NARROW, WIDE, WIDE_BATCH, LEAST = (1, 2, 2, 128), (1, 16, 2, 512), (3, 2, 2, 512), 2**21
ODD, ODD_WIDE = (1, 2, 2, 100), (1, 16, 2, 300)  # of no multiple of 8
MASKS = {
    "causal": lambda n: {"is_causal": True},
    "bias": lambda n: {"attn_mask": torch.empty(1, 2, n, n, dtype=torch.bfloat16)},
    "elements": lambda n: {"attn_mask": torch.ones(1, 16, n, n, dtype=torch.bool)},
    "keys": lambda n: {"attn_mask": torch.ones(3, 1, 1, n, dtype=torch.bool)},
    "BlockMask": lambda n: {"block_mask": tiles_of(_of_documents(n)).kept()},
    "BlockMask, unread": lambda n: {"block_mask": _of_documents(n)},
}
PACKED, PART = "packed", "part"
CALLS = (
    ("token", "triton", "causal", NARROW), ("token", "triton", PACKED, NARROW), ("token", "triton", "bias", NARROW),
    ("token", "triton", "BlockMask", NARROW), ("mixed", "hopper", "causal", NARROW),
    ("mixed", "hopper", PACKED, NARROW), ("mixed", "hopper", "bias", NARROW),
    ("mixed", "hopper", "BlockMask, unread", NARROW), ("token", "triton", "causal", WIDE),
    ("token", "triton", PACKED, WIDE), ("token", "triton", "elements", WIDE), ("token", "triton", "keys", WIDE_BATCH),
    ("token", "triton", "causal", ODD), ("token", "triton", "causal", ODD_WIDE),
)  # fmt: skip
known = set()
made: dict[tuple, Unstarted] = {}
now: tuple[Any, ...] = ()


def _of_documents(tokens: int) -> BlockMask:
    numbers = torch.arange(tokens) // 100
    return create_block_mask(lambda b, h, i, j: numbers[i] == numbers[j], None, None, tokens, tokens, device="cpu")


def _note(name: str, kind: object) -> None:
    *call, length = now
    if (*call, name, kind) not in known:
        known.add((*call, name, kind))
        print(json.dumps({"call": call, "kernel": name, "length": length}), flush=True)


def record(fn: JITFunction, *args, grid, warmup=False, **kwargs) -> Unstarted:
    """In place of a launch."""
    _, specialization, options = binder(fn, 90)(*args, **kwargs)
    kind = str(specialization), str(options)
    _note(fn.__name__, kind)
    return made.setdefault((fn.__name__, kind), Unstarted())


def launch_all_but_cute(started, kernel, *args, **kwargs) -> None:
    """A launch, but of what `forward_kernel` gave."""
    if kernel is not None:
        started(kernel, *args, **kwargs)


def parts_of(divide: Callable[..., Iterator[Part]], *args: object) -> Iterator[Part]:
    """Parts of a backward, each kind of which is noted as kernels are."""
    for part in divide(*args):
        keys = part.call.keys
        _note(PART, (keys.batch, keys.heads))
        yield part


def attend(q: Tensor, k: Tensor, v: Tensor, length: int, name: str, **settings: str) -> Tensor:
    """Under a mask, or packed: two sequences."""
    if name != PACKED:
        return sage_attention(q, k, v, **MASKS[name](length), enable_gqa=True, **settings)
    offsets = torch.tensor([0, length // 3, length], dtype=torch.int32)
    packing = offsets, offsets, length, length
    return sage_attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), *packing, is_causal=True, **settings)


if __name__ == "__main__":
    JITFunction.run = record
    device.capability, device.num_sms = (lambda _: 90), (lambda _: 132)
    blocks.by_kernels = lambda _: True
    forward.forward_kernel = lambda variant: _note("CuTe's forward", variant)
    started = forward.launch
    forward.launch = lambda kernel, *args, **kwargs: launch_all_but_cute(started, kernel, *args, **kwargs)
    portable.LEAST_OPERANDS, portable.parts_of = LEAST, partial(parts_of, portable.parts_of)
    for recipe, impl, name, (batch, heads, key_heads, head_dim) in CALLS:
        choice = dispatch.named(Recipe.named(recipe), f"{impl}/{impl}")
        auto_choice.choose = lambda *_, choice=choice: choice
        for length in LENGTHS:
            now = recipe, name, head_dim, length
            q, k, v = (
                torch.empty(batch, n, length, head_dim, dtype=torch.bfloat16, requires_grad=True)
                for n in (heads, key_heads, key_heads)
            )
            out = attend(q, k, v, length, name, recipe=recipe, impl=impl)
            torch.autograd.grad(out, (q, k, v), out)
