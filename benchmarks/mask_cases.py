"""The block masks that `python -m benchmarks masks` times.

A mask is one rule of query and key, which torch evaluates for its BlockMask and FlashAttention-4 compiles into its
kernel, so that all attentions of a case are given the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from benchmarks.shapes import Shape
from sagebwd import block_masks
from sagebwd.masks.band import UNLIMITED, Band

DOCUMENTS, ELEMENTS, CHUNKS = "documents", "elements", "chunks"
"""Documents of several lengths, and the same as a tensor of all pairs; chunks of an eighth. Causal."""
CAUSAL_FRAMES, CAUSAL_FRAMES_14B, TEACHER_FORCING = "causal-frames", "causal-frames-14b", "teacher-forcing"
"""Frames of 480 x 832 pixels in Wan 2.1's latents, of its models of 1.3 and 14 billion parameters."""
IMAGES = "image-blocks"
"""A text with an image in each `IMAGE_EVERY` tokens, as in Gemma 3."""
GPT_OSS, GPT_OSS_WINDOW = BANDS = "gpt-oss", "gpt-oss-window"
"""Its two kinds of layers, causal, of all keys and of the last `SPAN`, with a logit a query head beside the keys."""
PREFIX, WINDOW, RANDOM = "prefix", "window", "random"
"""Causal but for the first quarter, which all see; a causal window of a sixteenth beside the first `KEPT` tokens; half
of the blocks, not causal."""
DEFAULT = TEACHER_FORCING, DOCUMENTS, CAUSAL_FRAMES, GPT_OSS_WINDOW, IMAGES, ELEMENTS, CAUSAL_FRAMES_14B
"""What takes longest last: a run that is cut off has the others."""
KINDS = (*DEFAULT, CHUNKS, PREFIX, WINDOW, RANDOM, GPT_OSS)
PACKABLE = DOCUMENTS, CHUNKS

BLOCK, KEPT, SPAN = 128, 4, 128
IMAGE, IMAGE_EVERY = 256, 1024
FRAME = 1560
FRAMES = {CAUSAL_FRAMES: 21, CAUSAL_FRAMES_14B: 21, TEACHER_FORCING: 20}
"""Of a video; of teacher forcing half of them clean."""
LENGTHS = 4219, 2741, 1893, 1311, 2512, 977, 1650, 1081
"""Of the documents in 16384 tokens; of other numbers in proportion."""

Rule = Callable[[Callable, Tensor, Tensor], Tensor]
"""Whether a query sees a key, by a function that reads the mask's table at an index; of torch's or CuTe's integers."""


class Form(NamedTuple):
    """The call of a kind of mask."""

    head_dim: int = 128
    heads: int = 16
    kv_heads: int = 4
    tokens: int = 16384


FORMS = dict.fromkeys(KINDS, Form()) | {
    ELEMENTS: Form(tokens=8192),
    CAUSAL_FRAMES: Form(128, 12, 12, 21 * FRAME),
    CAUSAL_FRAMES_14B: Form(128, 40, 40, 21 * FRAME),
    TEACHER_FORCING: Form(128, 12, 12, 20 * FRAME),
    IMAGES: Form(256, 8, 4),
    GPT_OSS: Form(64, 64, 8, 8192),
    GPT_OSS_WINDOW: Form(64, 64, 8, 8192),
}


@dataclass(frozen=True)
class Case:
    """A kind of mask at a shape whose ``is_causal`` is False."""

    kind: str
    shape: Shape

    @staticmethod
    def of(kind: str, head_dim: int | None = None, tokens: int | None = None) -> Case:
        """The kind's own call, or of another head_dim and about as many tokens: whole frames of a video.

        Raises ValueError for a kind that there is not.
        """
        if kind not in KINDS:
            raise ValueError(f"mask={kind!r} is not known; accepted: {', '.join(KINDS)}")
        form = FORMS[kind]
        tokens, frames = tokens or form.tokens, FRAMES.get(kind, 1)
        tokens = max(1, tokens // frames) * frames
        return Case(kind, Shape(head_dim or form.head_dim, form.heads, form.kv_heads, 1, tokens, False))

    def __str__(self) -> str:
        shape = self.shape
        return f"{self.kind} D{shape.head_dim} H{shape.heads}/{shape.kv_heads} B{shape.batch} N{shape.tokens}"

    def bounds(self) -> list[int] | None:
        """Where the sequences begin that could be packed in its place, and the last one's end; None of other kinds."""
        if self.kind in PACKABLE:
            return [0, *itertools.accumulate(self._lengths())]
        return None

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

    def rule(self) -> Rule:
        """Which keys a query sees."""
        tokens, frame, blocks = self.shape.tokens, self._frame(), self._blocks()
        half, frames, chunk = tokens // 2, FRAMES.get(self.kind, 1) // 2, self._chunk()
        return {
            DOCUMENTS: lambda at, q, k: (at(q) == at(k)) & (k <= q),
            ELEMENTS: lambda at, q, k: (at(q) == at(k)) & (k <= q),
            CHUNKS: lambda at, q, k: (q // chunk == k // chunk) & (k <= q),
            CAUSAL_FRAMES: lambda at, q, k: k // frame <= q // frame,
            CAUSAL_FRAMES_14B: lambda at, q, k: k // frame <= q // frame,
            TEACHER_FORCING: lambda at, q, k: (
                (k // frame == q // frame)
                | (k // frame < q // frame - frames)
                | ((q < half) & (k // frame < q // frame))
            ),
            IMAGES: lambda at, q, k: k < at(q),
            PREFIX: lambda at, q, k: (k < tokens // 4) | (k <= q),
            WINDOW: lambda at, q, k: (k <= q) & ((q - k < tokens // 16) | (k < KEPT)),
            RANDOM: lambda at, q, k: at(q // BLOCK * blocks + k // BLOCK) == 1,
            GPT_OSS: lambda at, q, k: k <= q,
            GPT_OSS_WINDOW: lambda at, q, k: (k <= q) & (q - k < SPAN),
        }[self.kind]

    def table(self, device: str) -> Tensor | None:
        """What the rule reads, int32: each token's document, behind which key a query sees none, or whether a block is
        seen; all see the diagonal."""
        if self.kind in (DOCUMENTS, ELEMENTS):
            lengths = torch.tensor(self._lengths())
            return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths).to(device)
        if self.kind == IMAGES:
            place = torch.arange(self.shape.tokens, dtype=torch.int32)
            image = place // IMAGE_EVERY * IMAGE_EVERY + IMAGE
            return torch.where(place < image, image.clamp(max=len(place)), place + 1).to(device)
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

    def named(self, device: str) -> BlockMask | None:
        """The same of `sagebwd.block_masks`, where it has a name."""
        if self.kind in (CAUSAL_FRAMES, CAUSAL_FRAMES_14B):
            return block_masks.causal_frames(FRAMES[self.kind], self._frame(), device=device)
        if self.kind == TEACHER_FORCING:
            return block_masks.teacher_forcing(FRAMES[self.kind] // 2, self._frame(), device=device)
        if self.kind == IMAGES:
            return block_masks.image_blocks(torch.arange(self.shape.tokens, device=device) % IMAGE_EVERY < IMAGE)
        return block_masks.prefix_documents(self._lengths(), device=device) if self.kind in PACKABLE else None

    def dense(self, mask_mod: Callable[..., Tensor], device: str) -> Tensor:
        """Each query and key of it, (1, 1, tokens, tokens) bool."""
        return create_mask(mask_mod, None, None, self.shape.tokens, self.shape.tokens, device=device)

    def _lengths(self) -> list[int]:
        """Of the documents or chunks."""
        tokens = self.shape.tokens
        ends = [min(tokens, self._chunk() * i) for i in range(1, 9)]
        if self.kind != CHUNKS:
            ends = [end * tokens // sum(LENGTHS) for end in itertools.accumulate(LENGTHS)]
        return [end - start for start, end in itertools.pairwise([0, *ends])]

    def _chunk(self) -> int:
        return -(-self.shape.tokens // 8)

    def _frame(self) -> int:
        return self.shape.tokens // FRAMES.get(self.kind, 1)

    def _blocks(self) -> int:
        return -(-self.shape.tokens // BLOCK)
