"""Masks of elements that a call's programs read themselves, so that reading costs the host a few launches.

Forward's program reads the elements by one pass and makes forward's lists; what backward needs it leaves, a tensor
each, and backward's program makes its lists of these. All of it belongs to the one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from sagebwd.kernels.masks import sm90_block_lists
from sagebwd.masks.kinds import WORDS, WORDS_BY_KEY
from sagebwd.masks.mask import Mask
from sagebwd.masks.parts import PartsOfCall
from sagebwd.recipe import INT8

if TYPE_CHECKING:
    from sagebwd.call import Call
    from sagebwd.dispatch import Choice


class Left(NamedTuple):
    """What forward's program leaves: blocks and keys as of `Mask`, words and tiles as of `BlockLists`, of keys.

    The latter are None where no kernel of backward reads bits.
    """

    blocks: Tensor
    keys: Tensor
    words: Tensor | None
    tiles: Tensor | None


class Elements(NamedTuple):
    """How an attn_mask is seen in four dimensions, and whether forward and backward read bits."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    by_query: bool
    by_key: bool

    @classmethod
    def of(cls, elements: Tensor, choice: Choice, call: Call) -> Elements | None:
        """Of a mask in four dimensions; None where it is read before: by torch, or copied, or for keys apart."""
        by_query, by_key = choice.forward.mask_form == WORDS, choice.backward.mask_form == WORDS_BY_KEY
        apart = are_first_keys_apart(choice, call)
        lies = sm90_block_lists.reads_as_it_lies(elements, call.keys.tokens)
        if choice.forward.in_torch or choice.backward.in_torch or apart or not lies:
            return None
        return cls(elements.shape, elements.stride(), by_query, by_key)

    def unread(self, attn_mask: Tensor) -> Mask:
        """The mask of a call, which its programs will read."""
        return Mask(attn_mask.as_strided(self.shape, self.stride), None, None, None, PartsOfCall())

    def given_back(self, elements: Tensor) -> Tensor:
        """Elements that were saved for backward, of which hooks may have made others, in strides that kernels read."""
        return elements if elements.stride() == self.stride else elements.contiguous()

    def read(self, elements: Tensor, call: Call, trains: bool) -> tuple[Call, Left]:
        """The call with its mask, and what is left of that if it trains; in a description of forward."""
        tokens, by_key = (call.queries.tokens, call.keys.tokens), trains and self.by_key
        mask = sm90_block_lists.read(elements, call.queries.batch, tokens, by_query=self.by_query, by_key=by_key)
        bits = mask.parts.known(("bits", tokens, True)) if by_key else (None, None)
        return call._replace(key_mask=mask.keys, mask=mask), Left(mask.blocks, mask.keys, *bits)


def are_first_keys_apart(choice: Choice, call: Call) -> bool:
    """Whether kernels read a mask's elements of the first keys apart, which operators of torch find."""
    return bool(call.recipe.first_keys and call.recipe.o == INT8)


def restored(elements: Tensor, left: Left, call: Call) -> Call:
    """The call with its mask, of what forward left; in a description of backward."""
    parts = PartsOfCall()
    if left.words is not None:
        parts.keep(("bits", (call.queries.tokens, call.keys.tokens), True), (left.words, left.tiles))
    return call._replace(key_mask=left.keys, mask=Mask(elements, None, left.blocks, left.keys, parts))
