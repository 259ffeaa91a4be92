"""The attentions that `python -m benchmarks masks` times under a mask: ours, torch's and FlashAttention's.

Layers of gpt-oss, with their sinks, need no BlockMask but in FlexAttention: FlashAttention-4 takes the band itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from benchmarks import baselines
from benchmarks.baselines import FLASH_ATTENTION_3, FLASH_ATTENTION_4, FLEX, VARLEN, Attention, flex
from benchmarks.mask_cases import ELEMENTS, Case
from benchmarks.packed import Packed
from sagebwd import read_block_mask, read_mask
from sagebwd.attention import sage_attention, sage_attention_varlen
from sagebwd.masks.band import UNLIMITED, Band
from sagebwd.masks.mask import Mask
from sagebwd.recipe import Recipe

READ, PACKED, BAND = FORMS = "read ", "packed ", "band "
"""Before a recipe: the mask read once, outside of what is timed; `sage_attention_varlen` of the documents or chunks;
gpt-oss's layers by ``is_causal`` and ``window``. Without: the BlockMask, or the tensor of elements, in each call."""
FLEX_FLASH, DENSE = "flex-flash", "sdpa"
PACKED_PEERS = tuple(PACKED + name for name in (VARLEN, FLASH_ATTENTION_4, FLASH_ATTENTION_3))
PEERS = FLEX, FLEX_FLASH, FLASH_ATTENTION_4, DENSE, *PACKED_PEERS
"""Compiled FlexAttention; the same with FlashAttention-4 as its backend; FlashAttention-4's own function; SDPA with a
boolean mask of all queries and keys; torch's FlashAttention-2, and FlashAttention-4 and -3, of packed sequences."""
DEFAULT = (
    "mixed", READ + "mixed", PACKED + "mixed", BAND + "mixed", FLEX, FLASH_ATTENTION_4, DENSE, *PACKED_PEERS,
)  # fmt: skip


class Given(NamedTuple):
    """A case as its attentions are given it: its masks, and a logit a query head of layers with sinks."""

    case: Case
    block_mask: BlockMask
    elements: Tensor  # (1, 1, tokens, tokens) bool
    sinks: Tensor | None
    device: str

    def read(self) -> Mask:
        """The mask as our users read it once."""
        return read_mask(self.elements) if self.case.kind == ELEMENTS else read_block_mask(self.block_mask)

    def packing(self) -> tuple[Tensor, int]:
        """Offsets of the sequences that can be packed, and the longest's tokens."""
        offsets = torch.tensor(self.case.bounds(), dtype=torch.int32, device=self.device)
        return offsets, int(offsets.diff().max())


def recipe_of(name: str) -> Recipe | None:
    """The recipe of an attention of ours; None of a peer. Raises ValueError for the name of no attention."""
    if name in PEERS:
        return None
    for form in FORMS:
        name = name.removeprefix(form)
    return Recipe.parse(name)


def attentions(given: Given, names: Iterable[str], impl: str | None = None) -> dict[str, Attention]:
    """Those that the case has: packed ones only of what can be packed, and of layers with sinks those that take these.

    A peer that is not here raises when called.
    """
    torch._dynamo.reset()  # or all masks' graphs are one function's, and beyond eight of these none is compiled
    found = {name: _attention(given, name, impl) for name in names}
    return {name: run for name, run in found.items() if run is not None}


def _attention(given: Given, name: str, impl: str | None) -> Attention | None:
    """One by its name; None where the case has none."""
    case, mask, sinks, device = given.case, given.block_mask, given.sinks, given.device
    if name.startswith(PACKED) and case.bounds() is None:
        return None
    if name.startswith(BAND) and case.band() is None:
        return None
    if name in PEERS and sinks is not None:
        beside = {
            FLEX: lambda: _flex_beside(sinks, mask, device),
            FLASH_ATTENTION_4: lambda: partial(_flash_attention_4_beside, sinks, case.band()),
        }
        return beside[name]() if name in beside else None
    if name in PACKED_PEERS:
        return _packed_peer(given, name)
    if name in PEERS:
        return {
            FLEX: lambda: flex(mask, device),
            FLEX_FLASH: lambda: _flex_flash(mask, device),
            FLASH_ATTENTION_4: lambda: partial(_flash_attention_4, _cute_mask_mod(case), case.table(device), mask),
            DENSE: lambda: partial(_dense, given.elements),
        }[name]()
    settings = {"recipe": str(recipe_of(name)), "impl": impl}
    if name.startswith(PACKED):
        return partial(_packed, *given.packing(), settings)
    masks = {"block_mask": mask}
    if name.startswith(READ):
        masks = {"block_mask": given.read()}
    elif name.startswith(BAND):
        masks = {"is_causal": True, "window": _window(case.band())}
    elif case.kind == ELEMENTS:
        masks = {"attn_mask": given.elements}
    return partial(_ours, masks | {"sinks": sinks} | settings)


def _ours(settings: dict[str, object], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sage_attention(q, k, v, enable_gqa=True, **settings)


def _window(band: Band) -> tuple[int, int]:
    """Of a causal call."""
    return UNLIMITED if band.lower is None else -band.lower, UNLIMITED


def _packed(offsets: Tensor, longest: int, settings: dict[str, object], *call: Tensor) -> Tensor:
    packing = offsets, offsets, longest, longest
    return _of_rows(lambda *rows: sage_attention_varlen(*rows, *packing, is_causal=True, **settings), *call)


def _packed_peer(given: Given, name: str) -> Attention:
    shape = given.case.shape
    lengths = given.packing()[0].diff().tolist()
    packed = Packed.of(shape.head_dim, shape.heads, shape.kv_heads, lengths, shape.value_dim)
    found = baselines.candidates(packed, given.device).get(name.removeprefix(PACKED))
    return _refusing(f"{name} is not installed here") if found is None else partial(_of_rows, found)


def _of_rows(attention: Attention, *call: Tensor) -> Tensor:
    """An attention of (tokens, heads, head_dim), of tensors as SDPA has them."""
    return attention(*(x[0].transpose(0, 1) for x in call)).transpose(0, 1)[None]


def _refusing(why: str) -> Attention:
    def refuses(*call: Tensor) -> Tensor:
        raise NotImplementedError(why)

    return refuses


def _dense(elements: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Key heads are repeated, as Transformers does: with grouped ones torch holds all scores in memory."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=elements)


def _flex_beside(sinks: Tensor, mask: BlockMask, device: str) -> Attention:
    """With sinks as Transformers gives them to FlexAttention: O is weighed by what lse says, in the compiled graph."""

    def weighed(sinks: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        out, lse = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
        return (out * torch.sigmoid(lse - sinks[:, None].float())[..., None]).to(out.dtype)

    run = torch.compile(weighed, dynamic=False) if device.startswith("cuda") else weighed
    return lambda q, k, v: run(sinks, q, k, v, mask)


def _flex_flash(mask: BlockMask, device: str) -> Attention:
    if device.startswith("cuda") and "BACKEND" in FlexKernelOptions.__annotations__:
        return flex(mask, device, kernel_options={"BACKEND": "FLASH"})
    return _refusing(f"torch {torch.__version__} has no such backend on {device}")


def _flash_attention_4(
    mask_mod: Callable, table: Tensor | None, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor
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


def _flash_attention_4_beside(sinks: Tensor, band: Band, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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
