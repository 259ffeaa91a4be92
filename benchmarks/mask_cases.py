"""The block masks that `python -m benchmarks masks` times, and the attentions that compute under them.

A mask is one rule of query and key, which torch evaluates for its BlockMask and FlashAttention-4 compiles into its
kernel, so that all attentions of a case are given the same. Layers of gpt-oss, with their sinks, need no such mask but
in FlexAttention: all others take the band itself.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    FlexKernelOptions,
    create_block_mask,
    create_mask,
    flex_attention,
)

from benchmarks.baselines import FLASH_ATTENTION_4
from benchmarks.shapes import Shape
from sagebwd.attention import sage_attention, sage_attention_varlen
from sagebwd.masks.band import UNLIMITED, Band
from sagebwd.recipe import Recipe

DOCUMENTS, CHUNKS, PREFIX, WINDOW, RANDOM = MASKS = ("documents", "chunks", "prefix", "window", "random")
"""Documents of several lengths, chunks of an eighth and all but RANDOM are causal; PREFIX: but for the first quarter,
which all see; WINDOW: of a sixteenth, beside the first `KEPT` tokens; RANDOM: half of the blocks, not causal."""
GPT_OSS, GPT_OSS_WINDOW = BANDS = ("gpt-oss", "gpt-oss-window")
"""Its two kinds of layers, causal, of all keys and of the last `SPAN`, with a logit a query head beside the keys."""
KINDS = MASKS + BANDS
HEADS, KV_HEADS, TOKENS, BLOCK, KEPT = 16, 4, 16384, 128, 4
GPT_OSS_HEADS, GPT_OSS_KV_HEADS, SPAN = 64, 8, 128
LENGTHS = 4219, 2741, 1893, 1311, 2512, 977, 1650, 1081
"""Of the documents in `TOKENS`; of other lengths in proportion."""

FLEX, FLEX_FLASH, DENSE = "flex", "flex-flash", "sdpa"
PEERS = FLEX, FLEX_FLASH, FLASH_ATTENTION_4, DENSE
"""Compiled FlexAttention; the same with FlashAttention-4 as its backend; FlashAttention-4's own function; SDPA with a
boolean mask of all queries and keys."""
PACKED = "packed "
"""Before a recipe: `sage_attention_varlen` of the documents or chunks."""
DEFAULT = "mixed", "token", PACKED + "mixed", PACKED + "token", FLEX, FLEX_FLASH, FLASH_ATTENTION_4

Attention = Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]
Rule = Callable[[Callable, Tensor, Tensor], Tensor]
"""Whether a query sees a key, by a function that reads the mask's table at an index; of torch's or CuTe's integers."""


@dataclass(frozen=True)
class Case:
    """A kind of mask at a shape whose ``is_causal`` is False."""

    kind: str
    shape: Shape

    @staticmethod
    def of(kind: str, head_dim: int, tokens: int = TOKENS) -> Case:
        """Raises ValueError for a kind that there is not."""
        if kind not in KINDS:
            raise ValueError(f"mask={kind!r} is not known; accepted: {', '.join(KINDS)}")
        heads = (GPT_OSS_HEADS, GPT_OSS_KV_HEADS) if kind in BANDS else (HEADS, KV_HEADS)
        return Case(kind, Shape(head_dim, *heads, 1, tokens, False))

    def __str__(self) -> str:
        shape = self.shape
        return f"{self.kind} D{shape.head_dim} H{shape.heads}/{shape.kv_heads} B{shape.batch} N{shape.tokens}"

    def bounds(self) -> list[int] | None:
        """Where the sequences begin that could be packed in its place, and the last one's end; None of other kinds."""
        tokens = self.shape.tokens
        if self.kind == DOCUMENTS:
            return [0, *(end * tokens // TOKENS for end in itertools.accumulate(LENGTHS))]
        return [min(tokens, self._chunk() * i) for i in range(9)] if self.kind == CHUNKS else None

    def band(self) -> Band | None:
        """The mask of a layer of gpt-oss."""
        window = SPAN - 1 if self.kind == GPT_OSS_WINDOW else UNLIMITED
        return Band.of(True, window) if self.kind in BANDS else None

    def sinks(self, device: str) -> Tensor | None:
        """A logit a query head, for which gradients are wanted, of a layer of gpt-oss."""
        if self.kind not in BANDS:
            return None
        drawn = torch.randn(self.shape.heads, generator=torch.Generator().manual_seed(0))
        return drawn.to(device, torch.bfloat16).requires_grad_()

    def _chunk(self) -> int:
        return -(-self.shape.tokens // 8)

    def _blocks(self) -> int:
        return -(-self.shape.tokens // BLOCK)

    def rule(self) -> Rule:
        """Which keys a query sees."""
        chunk, blocks = self._chunk(), self._blocks()
        prefix, window = self.shape.tokens // 4, self.shape.tokens // 16
        return {
            DOCUMENTS: lambda at, q, k: (at(q) == at(k)) & (k <= q),
            CHUNKS: lambda at, q, k: (q // chunk == k // chunk) & (k <= q),
            PREFIX: lambda at, q, k: (k < prefix) | (k <= q),
            WINDOW: lambda at, q, k: (k <= q) & ((q - k < window) | (k < KEPT)),
            RANDOM: lambda at, q, k: at(q // BLOCK * blocks + k // BLOCK) == 1,
            GPT_OSS: lambda at, q, k: k <= q,
            GPT_OSS_WINDOW: lambda at, q, k: (k <= q) & (q - k < SPAN),
        }[self.kind]

    def table(self, device: str) -> Tensor | None:
        """What the rule reads, int32: each token's document, or whether a block is seen; all see the diagonal."""
        if self.kind == DOCUMENTS:
            lengths = torch.tensor(self.bounds()).diff()
            return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths).to(device)
        if self.kind != RANDOM:
            return None
        drawn = torch.rand(self._blocks(), self._blocks(), generator=torch.Generator().manual_seed(0)) < 0.5
        return drawn.fill_diagonal_(True).flatten().int().to(device)

    def mask_mod(self, device: str) -> Callable[..., Tensor]:
        """The rule as FlexAttention takes it."""
        rule, table = self.rule(), self.table(device)
        return lambda b, h, q, k: rule(lambda index: table[index], q, k)

    def block_mask(self, mask_mod: Callable[..., Tensor], device: str) -> BlockMask:
        """What users of FlexAttention make of it once, in blocks of 128."""
        tokens = self.shape.tokens
        return create_block_mask(mask_mod, None, None, tokens, tokens, device=device, BLOCK_SIZE=BLOCK)

    def dense(self, mask_mod: Callable[..., Tensor], device: str) -> Tensor:
        """Each query and key of it, (1, 1, tokens, tokens) bool."""
        return create_mask(mask_mod, None, None, self.shape.tokens, self.shape.tokens, device=device)


def check_name(name: str) -> None:
    """Raises ValueError for the name of no attention: neither a peer nor a recipe, packed or not."""
    if name not in PEERS:
        Recipe.parse(name.removeprefix(PACKED))


def attentions(
    case: Case, names: Iterable[str], device: str, impl: str | None = None, sinks: Tensor | None = None
) -> dict[str, Attention]:
    """Those that the case has: packed ones only of what can be packed, and of layers with sinks those that take these.

    sinks: the case's. A peer that is not here raises when called.
    """
    torch._dynamo.reset()  # or all masks' graphs are one function's, and beyond eight of these none is compiled
    if sinks is not None:
        made = {
            FLEX: lambda: partial(_flex_beside(device), sinks),
            FLASH_ATTENTION_4: lambda: partial(_flash_attention_4_beside, sinks, case.band()),
        }
        found = {name: made[name]() for name in names if name in made}
        ours = (name for name in names if name not in PEERS and not name.startswith(PACKED))
        return found | {name: partial(_ours_beside, name, impl, sinks, case.band()) for name in ours}
    made = {
        FLEX: lambda: _flex(device),
        FLEX_FLASH: lambda: _flex_flash(device),
        FLASH_ATTENTION_4: lambda: partial(_flash_attention_4, _cute_mask_mod(case), case.table(device)),
        DENSE: lambda: partial(_dense, case.dense(case.mask_mod(device), device)),
    }
    found: dict[str, Attention] = {}
    for name in names:
        if name in made:
            found[name] = made[name]()
        elif not name.startswith(PACKED):
            found[name] = partial(_ours, name, impl)
        elif case.bounds() is not None:
            offsets = torch.tensor(case.bounds(), dtype=torch.int32, device=device)
            longest = int(offsets.diff().max())
            found[name] = partial(_packed, name.removeprefix(PACKED), impl, offsets, longest)
    return found


def _ours(recipe: str, impl: str | None, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    return sage_attention(q, k, v, block_mask=mask, enable_gqa=True, recipe=recipe, impl=impl)


def _window(band: Band) -> tuple[int, int]:
    """Of a causal call."""
    return UNLIMITED if band.lower is None else -band.lower, UNLIMITED


def _ours_beside(
    recipe: str, impl: str | None, sinks: Tensor, band: Band, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask
) -> Tensor:
    settings = {"is_causal": True, "window": _window(band), "enable_gqa": True}
    return sage_attention(q, k, v, sinks=sinks, **settings, recipe=recipe, impl=impl)


def _packed(recipe: str, impl: str | None, offsets: Tensor, longest: int, *call: Tensor | BlockMask) -> Tensor:
    rows = (x[0].transpose(0, 1) for x in call[:3])
    out = sage_attention_varlen(*rows, offsets, offsets, longest, longest, is_causal=True, recipe=recipe, impl=impl)
    return out.transpose(0, 1)[None]


def _dense(elements: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=elements, enable_gqa=True)


def _flex(device: str, **options: object) -> Attention:
    """Compiled but on a CPU, where no time is a claim."""
    run = torch.compile(flex_attention, dynamic=False) if device.startswith("cuda") else flex_attention
    return lambda q, k, v, mask: run(q, k, v, block_mask=mask, enable_gqa=True, **options)


def _flex_beside(device: str) -> Attention:
    """With sinks as Transformers gives them to FlexAttention: O is weighed by what lse says, in the compiled graph."""

    def weighed(sinks: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        out, lse = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
        return (out * torch.sigmoid(lse - sinks[:, None].float())[..., None]).to(out.dtype)

    return torch.compile(weighed, dynamic=False) if device.startswith("cuda") else weighed


def _flex_flash(device: str) -> Attention:
    if device.startswith("cuda") and "BACKEND" in FlexKernelOptions.__annotations__:
        return _flex(device, kernel_options={"BACKEND": "FLASH"})

    def refuses(*call: Tensor | BlockMask) -> Tensor:
        raise NotImplementedError(f"torch {torch.__version__} has no such backend on {device}")

    return refuses


def _flash_attention_4(
    mask_mod: Callable, table: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask
) -> Tensor:
    """By its own lists of blocks, which are the BlockMask's: keys of a query tile, and the reverse for backward."""
    lists = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    of_queries = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    of_keys = mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices
    return _by_flash_attention_4(
        q, k, v, mask_mod=mask_mod, aux_tensors=None if table is None else [table],
        block_sparse_tensors=lists(*of_queries, block_size=mask.BLOCK_SIZE),
        block_sparse_tensors_bwd=lists(*of_keys, block_size=mask.BLOCK_SIZE),
    )  # fmt: skip


def _flash_attention_4_beside(sinks: Tensor, band: Band, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    window = tuple(None if size == UNLIMITED else size for size in _window(band))
    return _by_flash_attention_4(q, k, v, causal=True, window_size=window, learnable_sink=sinks)


def _by_flash_attention_4(*call: Tensor, **settings: object) -> Tensor:
    """Its own function, of tensors as SDPA has them."""
    out = importlib.import_module("flash_attn.cute").flash_attn_func(*(x.transpose(1, 2) for x in call), **settings)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def _cute_mask_mod(case: Case) -> Callable:
    """The rule as FlashAttention-4 takes it, of integers that are vectors of one."""
    rule = case.rule()

    def mask_mod(batch, head, q, k, seqlen_info, aux_tensors):
        utils = importlib.import_module("flash_attn.cute.utils")
        int32 = importlib.import_module("cutlass").Int32
        return rule(lambda index: utils.scalar_to_ssa(aux_tensors[0][index[0]], int32), q, k)

    mask_mod.__cute_hash__ = f"sagebwd {case.kind} {case.shape.tokens}"  # by which compiled kernels are found again
    return mask_mod
