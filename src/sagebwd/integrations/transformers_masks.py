"""The masks of Transformers' models, read from the functions that Transformers composes them of.

A mask function says of a batch, head, query and key index whether the query sees the key. `mask` calls it with symbols
for the indices and so finds the band of distances and the documents that the kernels can be given: exactly the mask,
without a tensor of queries x keys, and under torch.compile too. A function that does anything else, and queries that
continue a KV cache, have the boolean mask that SDPA would be given; so has a model that computes with its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from sagebwd.extras import extra
from sagebwd.masks import mask as masks
from sagebwd.planning.mask_argument import read_block_mask, read_mask

with extra("transformers"):
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.utils.import_utils import is_tracing

CALLERS = "a caller's"
"""What is said of a mask that Transformers did not make."""
USE_INSTEAD = "use attn_implementation='sdpa' for this model, or 'eager'"


def refuse(what: str, instead: str = USE_INSTEAD) -> NoReturn:
    """Raise NotImplementedError; instead: the way out."""
    raise NotImplementedError(f"{what} is not supported by attn_implementation='sagebwd'; {instead}")


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read: not in a trace, nor on the meta device."""
    return not is_tracing(tensor) and tensor.device.type != "meta"


class Unreadable(Exception):
    """A mask that is not a band of distances within documents; says why."""


@dataclass(frozen=True, eq=False)
class Visible:
    """What a mask lets through: ``lower <= key - query <= upper``, None for no bound, within a document."""

    lower: int | None = None
    upper: int | None = None
    documents: Tensor | None = None  # (batch, tokens), the same number at the tokens of a document
    positions: Tensor | None = None  # (batch, tokens), between which the bounds are; None for the indices
    nothing: bool = False
    device = None  # Transformers moves each part to the first one's

    @property
    def is_banded(self) -> bool:
        """Whether there is a bound on the distance."""
        return self.lower is not None or self.upper is not None

    def to(self, device: object) -> Visible:
        """The same: there is nothing to move."""
        return self

    def __and__(self, other: Visible) -> Visible:
        if self.documents is not None and other.documents is not None:
            raise Unreadable("it tells documents apart in two ways")
        if self.is_banded and other.is_banded and self.positions is not other.positions:
            raise Unreadable("it measures distances in two ways")
        return Visible(
            _tighter(max, self.lower, other.lower),
            _tighter(min, self.upper, other.upper),
            other.documents if self.documents is None else self.documents,
            self.positions if self.is_banded else other.positions,
            self.nothing or other.nothing,
        )

    def __or__(self, other: Visible) -> Visible:
        if self.nothing or other.nothing:
            return other if self.nothing else self
        raise Unreadable("it is the union of two masks")

    def __bool__(self) -> NoReturn:
        raise Unreadable("it branches on an index")


def _tighter(choose: Callable, a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return choose(a, b)


class _Batch:
    """The symbol of the batch index."""


class _Row:
    """A tensor's number of each row of the batch."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass(frozen=True, eq=False)
class _Index:
    """The symbol ``query * q + key * k + shift``, in terms of positions and less a number a row where there are such.

    ``tokens`` bounds the indices from above.
    """

    tokens: int
    q: int = 0
    k: int = 0
    shift: int = 0
    positions: Tensor | None = None
    start: Tensor | None = None

    def new_ones(self, *_: object, **__: object) -> Visible:
        return Visible()

    def new_zeros(self, *_: object, **__: object) -> Visible:
        return Visible(nothing=True)

    def __add__(self, other: int) -> _Index:
        return replace(self, shift=self.shift + other)

    def __sub__(self, other: int | _Index | _Row) -> _Index:
        if isinstance(other, int):
            return replace(self, shift=self.shift - other)
        if isinstance(other, _Row) and self.start is None:
            return replace(self, start=other.tensor)
        if isinstance(other, _Index) and self.positions is other.positions and self.start is other.start:
            difference = (self.q - other.q, self.k - other.k, self.shift - other.shift)
            return _Index(self.tokens, *difference, self.positions)
        raise Unreadable("it subtracts something else than an index or a number from an index")

    def __neg__(self) -> _Index:
        if self.start is not None:
            raise Unreadable("it negates an index")
        return replace(self, q=-self.q, k=-self.k, shift=-self.shift)

    def __abs__(self) -> _Distance:
        return _Distance(self)

    def __floordiv__(self, size: int) -> _Chunk:
        return _Chunk(self, size)

    def __ge__(self, other: int | _Index) -> Visible:
        return (self - other)._at_least_zero()

    def __gt__(self, other: int | _Index) -> Visible:
        return (self - other - 1)._at_least_zero()

    def __le__(self, other: int | _Index) -> Visible:
        return (-(self - other))._at_least_zero()

    def __lt__(self, other: int | _Index) -> Visible:
        return (-(self - other) - 1)._at_least_zero()

    def __eq__(self, other: object) -> Visible:
        ends = isinstance(other, _Index) and self.positions is not None and self.positions is other.positions
        if ends and self._is_plain() and other._is_plain() and (self.q, self.k) == (other.k, other.q):
            return Visible(documents=self.positions)
        raise Unreadable("it compares indices for being equal")

    __hash__ = None

    def _is_plain(self) -> bool:
        return self.shift == 0 and self.start is None and {self.q, self.k} == {0, 1}

    def _at_least_zero(self) -> Visible:
        if self.positions is not None and 0 in (self.q, self.k):
            return self._of_every_token()
        if self.start is None and (self.q, self.k) == (-1, 1):
            return Visible(lower=-self.shift, positions=self.positions)
        if self.start is None and (self.q, self.k) == (1, -1):
            return Visible(upper=self.shift, positions=self.positions)
        if self.start is None and min(self.q, self.k, self.shift) >= 0:
            return Visible()  # indices count from zero
        raise Unreadable("it compares indices with something else than each other")

    def _of_every_token(self) -> Visible:
        """What a tensor says of each token, where it says the same of all: no image in a batch of text, say."""
        if self.start is None and has_values(self.positions):
            holds = (self.q + self.k) * self.positions + self.shift >= 0
            if holds.all() or not holds.any():
                return Visible(nothing=not holds.any())
        raise Unreadable("it asks a tensor which tokens are special")


@dataclass(frozen=True, eq=False)
class _Distance:
    """The absolute value of a difference of indices."""

    of: _Index

    def __le__(self, other: int) -> Visible:
        return (self.of <= other) & (-self.of <= other)

    def __lt__(self, other: int) -> Visible:
        return (self.of < other) & (-self.of < other)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Which chunk of a row's tokens an index is in, padding before the first not counted."""

    index: _Index
    size: int

    def __eq__(self, other: object) -> Visible:
        whole = isinstance(other, _Chunk) and other.size == self.size and other.index.start is self.index.start
        if whole and self.index.positions is None and self.index.tokens <= self.size:
            return Visible()
        raise Unreadable(f"it cuts the tokens into chunks of {self.size}")

    __hash__ = None


class _Gather(TorchFunctionMode):
    """Where a mask function looks a symbol up in a tensor, the symbol of what it finds."""

    def __torch_function__(
        self, func: Callable, types: tuple, args: tuple = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func is torch.Tensor.__getitem__ and isinstance(args[1], _Batch):
            return _Row(args[0])
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple) and isinstance(args[1][-1], _Index):
            batch, index = args[1]
            if not isinstance(batch, _Batch) or not index._is_plain() or index.positions is not None:
                raise Unreadable("it looks something else than a token up in a tensor")
            return replace(index, positions=args[0])
        return func(*args, **(kwargs or {}))


def read(mask_function: Callable, tokens: int) -> Visible:
    """What a mask function of Transformers lets through, of indices below ``tokens``.

    Raises Unreadable where that is no band of distances within documents.
    """
    try:
        with _Gather():
            visible = mask_function(_Batch(), _Index(tokens), _Index(tokens, q=1), _Index(tokens, k=1))
    except Unreadable:
        raise
    except Exception as error:  # whatever a function does that symbols cannot
        raise Unreadable(f"it computes with its indices: {error}") from error
    if not isinstance(visible, Visible) or visible.nothing:
        raise Unreadable(f"it gives a {type(visible).__name__} whatever the indices")
    return visible


class Mask(BlockMask):
    """A mask on its way through a model to its attentions; to Transformers a BlockMask, which it leaves alone.

    Whatever else is done with it is done with `dense`.

    Args: shape (batch, 1, tokens, kv_tokens); visible, or why it could not be read, and then there must be dense;
    padding (batch, kv_tokens) bool, True where a token counts, None where all do; dense, the boolean mask in
    ``shape``, or what makes it; continues, whether the queries continue a KV cache; is_own, whether dense was made
    for this forward, and not by the model's caller; elements, what was read of a mask.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        visible: Visible | str,
        padding: Tensor | None = None,
        dense: Tensor | Callable[[], Tensor] | None = None,
        continues: bool = False,
        is_own: bool = False,
        elements: masks.Mask | None = None,
    ) -> None:
        self._shape, self.visible, self.padding, self._dense = shape, visible, padding, dense
        self.is_left_out, self.continues, self._is_own = False, continues, is_own
        self._elements = elements
        self._read: tuple[Tensor, int | None, tuple[Tensor, int] | None] | None = None
        self._joins: tuple[Tensor, int | None, Tensor | bool] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, 1, tokens, kv_tokens), as Transformers made it."""
        return self._shape

    @property
    def dense(self) -> Tensor:
        """The mask that SDPA would be given. Who has it may write to it."""
        if not isinstance(self._dense, Tensor) and callable(self._dense):
            self._dense = self._dense()
        if self._is_own:
            self._is_own, self._elements = False, None
        return self._dense

    def argument(self, device: torch.device) -> dict[str, Tensor | BlockMask | masks.Mask]:
        """The argument of `sage_attention` that stands for a mask that could not be read, on a device.

        Layers share one `sagebwd.read_mask` as long as nobody else has the tensor.
        """
        if self._elements is None:
            dense = self._dense.to(device)
            if not isinstance(dense, Tensor):
                return {"block_mask": dense}
            if not self._is_own or not has_values(dense):
                return {"attn_mask": dense}
            self._elements = read_mask(dense)
        elif self._elements.elements.device != device:
            self._elements = self._elements.to(device)
        return {"block_mask": self._elements}

    @cached_property
    def real(self) -> tuple[Tensor, Tensor]:
        """Of padding: where in (batch * kv_tokens) real tokens are, and the offsets of each row's among them."""
        offsets = F.pad(self.padding.sum(1).cumsum(0), (1, 0)).to(torch.int32)
        return self.padding.flatten().nonzero().flatten(), offsets

    @cached_property
    def has_holes(self) -> bool:
        """Whether any row has padding between real tokens."""
        runs = F.pad(self.padding, (1, 0)).diff(dim=1) & self.padding
        return bool((runs.sum(1) > 1).any())

    @cached_property
    def ends(self) -> tuple[Tensor | None, Tensor | None]:
        """Padding after a row's last real token, and that with what is before its first; None where there is none."""
        last = self.padding.flip(1).cumsum(1).flip(1) == 0
        both = last | (self.padding.cumsum(1) == 0)
        return tuple(x if found else None for x, found in zip((last, both), (bool(last.any()), bool(both.any()))))

    @cached_property
    def documents(self) -> tuple[Tensor, int]:
        """See `_offsets_of`."""
        return _offsets_of(self.visible.documents)

    def documents_of(self, position_ids: Tensor) -> tuple[Tensor, int] | None:
        """`documents` by (batch or 1, tokens) position_ids, read once: one begins where they fall; None of one each.

        Positions that jump or repeat are those of one document. Where Transformers looks for documents itself, it
        starts another there too, and `documents` are its.
        """
        if not _is_of(self._read, position_ids):
            ids = documents_by(position_ids).expand(self._shape[0], -1)
            found = _offsets_of(ids) if bool((ids > 0).any()) else None
            self._read = position_ids, _writes_to(position_ids), found
        return self._read[2]

    def joins(self, of: Tensor, documents: Callable[[], Tensor]) -> Tensor | bool:
        """Whether a mask that could not be read shows a token one of another document.

        Args: of, the tensor that says so, for which it is read once; documents (batch or 1, tokens), a number each.
        """
        if not _is_of(self._joins, of):
            numbers = documents().to(self._dense.device)
            keys = F.pad(numbers, (0, self._shape[3] - self._shape[2]), value=-1)  # a static cache that is empty still
            found = (self._dense & (numbers[:, None, :, None] != keys[:, None, None])).any()
            self._joins = of, _writes_to(of), bool(found) if has_values(found) else found
        return self._joins[2]

    @property
    def ndim(self) -> int:
        """4: Transformers takes such masks as finished."""
        return len(self._shape)

    def dim(self) -> int:
        """As ``ndim``."""
        return len(self._shape)

    def contiguous(self) -> Mask:
        """The same mask."""
        return self

    def to(self, device: torch.device | str | int | torch.dtype | Tensor, **options: object) -> Mask | Tensor:
        """The same mask: attentions take its tensors to their own device; of another dtype, a tensor."""
        return self.dense.to(device, **options) if isinstance(device, (torch.dtype, Tensor)) else self

    def __repr__(self) -> str:
        return f"Mask(shape={self._shape}, visible={self.visible})"

    __str__ = __repr__

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.dense, name)

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is checkpoint:  # by torch.compile alone; what it calls wants the mask as it is
            carried = {name: x for name, x in kwargs.items() if isinstance(x, Mask)}
            kwargs = {name: x for name, x in kwargs.items() if name not in carried}
            args = (partial(args[0], **carried), *args[1:])
        return func(*tree_map(_as_tensor, args), **tree_map(_as_tensor, kwargs))


def read_attention_mask(attention_mask: Tensor | BlockMask) -> Mask:
    """A mask for ``model(attention_mask=...)``, read once for all layers and all calls that it is given to.

    A tensor or a BlockMask that a model is given is read in every layer, which of a BlockMask takes milliseconds.
    Written to, or given another mask_mod, afterwards, the result shows what it showed.

    Args: attention_mask, (batch or 1, heads or 1, tokens, kv_tokens), boolean, True where a query sees a key, or
    added to the scores; or a BlockMask.

    Raises TypeError and ValueError for anything else.
    """
    if isinstance(attention_mask, BlockMask):
        elements = read_block_mask(attention_mask)
    else:
        elements = read_mask(attention_mask)
        attention_mask = elements.elements
    return Mask(tuple(attention_mask.shape), CALLERS, dense=attention_mask, is_own=True, elements=elements)


def _writes_to(tensor: Tensor) -> int | None:
    """How often a tensor was written to, which one of inference mode or a trace does not say."""
    return tensor._version if has_values(tensor) and not tensor.is_inference() else None


def _is_of(read: tuple | None, tensor: Tensor) -> bool:
    """Whether what was read is of a tensor as it is now."""
    return read is not None and read[0] is tensor and read[1] == _writes_to(tensor)


def _as_tensor(x: object) -> object:
    return x.dense if isinstance(x, Mask) else x


def _operator(name: str) -> Callable:
    def compute(self: Mask, *others: object) -> Tensor:
        return getattr(self.dense, name)(*tree_map(_as_tensor, others))

    return compute


_ARITHMETIC = ("add", "sub", "mul", "truediv", "and", "or", "xor")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OPERATORS = (*_ARITHMETIC, *("r" + name for name in _ARITHMETIC), *_COMPARISONS, "getitem", "invert", "neg")
for _name in _OPERATORS:
    setattr(Mask, f"__{_name}__", _operator(f"__{_name}__"))


def documents_by(position_ids: Tensor) -> Tensor:
    """A number for each token's document, of (batch or 1, tokens) position_ids: one begins where they fall."""
    return F.pad((position_ids.diff(dim=1) < 0).cumsum(1), (1, 0))


def _offsets_of(documents: Tensor) -> tuple[Tensor, int]:
    """Offsets in (batch * tokens) of documents that are numbered by token, and the longest one's tokens."""
    starts = F.pad(documents.diff(dim=1) != 0, (1, 0), value=True).flatten().nonzero().flatten()
    offsets = F.pad(starts, (0, 1), value=documents.numel()).to(torch.int32)
    return offsets, int(offsets.diff().max())


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: object,
) -> Mask:
    """The mask function that Transformers calls, once a forward and kind of layer, with the arguments of `sdpa_mask`.

    Where `sdpa_mask` leaves the mask out, and trusts the attention's ``is_causal``, it says so in `Mask.is_left_out`.
    """
    shape = (batch_size, 1, q_length, kv_length)
    try:
        visible = _limit(read(mask_function, kv_offset + kv_length), max(q_length, kv_length))
    except Unreadable as error:
        visible = error.args[0]
    dense = partial(
        sdpa_mask, batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        allow_is_causal_skip=False, **kwargs,
    )  # fmt: skip
    everything = isinstance(visible, Visible) and not visible.is_banded
    if not everything and not _start_together(q_offset, kv_offset):
        return Mask(shape, visible, dense=dense(), continues=True, is_own=True)
    if isinstance(visible, str):
        return Mask(shape, visible, _padding(attention_mask, kv_offset, kv_length), dense(), is_own=True)
    if visible.upper == 0 and q_length < kv_length:  # a static cache that is empty still
        kv_length = q_length
    if attention_mask is not None and attention_mask.shape[0] != 1 and attention_mask.shape[0] != batch_size:
        raise ValueError(
            f"attention_mask: got {attention_mask.shape[0]} rows for a batch of {batch_size}; accepted: as many, or 1"
        )
    made = Mask(shape, visible, _padding(attention_mask, kv_offset, kv_length), dense)
    may_be = allow_is_bidirectional_skip if everything else allow_is_causal_skip and visible.lower is None
    made.is_left_out = may_be and made.padding is None and visible.documents is None
    return made


def _start_together(q_offset: int | Tensor, kv_offset: int | Tensor) -> bool:
    """Whether the first query is the first key; the offset of a static cache is a tensor, which traces do not read."""
    if isinstance(q_offset, Tensor) and not has_values(q_offset):
        return False
    return int(q_offset) == int(kv_offset)


def _padding(attention_mask: Tensor | None, start: int, tokens: int) -> Tensor | None:
    """(batch, tokens) of a 2D mask that may be shorter or longer; None where nothing is padding."""
    if attention_mask is None:
        return None
    padding = F.pad(attention_mask, (0, max(0, start + tokens - attention_mask.shape[1])))[:, start : start + tokens]
    return None if has_values(padding) and bool(padding.all()) else padding.bool()


def _limit(visible: Visible, tokens: int) -> Visible:
    """The same with bounds that no distance within ``tokens`` reaches left open, and documents checked.

    Raises Unreadable for what a band of the kernels is not.
    """
    lower, upper = visible.lower, visible.upper
    if lower is not None and lower <= 1 - tokens:
        lower = None
    if upper is not None and upper >= tokens - 1:
        upper = None
    if (lower or 0) > 0 or (upper or 0) < 0:
        raise Unreadable("a token does not see itself")
    ids, positions = visible.documents, None if lower is None and upper is None else visible.positions
    visible = Visible(lower, upper, ids, positions)
    if ids is None and positions is None:
        return visible
    if ids is None:
        raise Unreadable("it measures distances between position_ids")
    if not has_values(ids):
        return visible
    new = ids.diff(dim=1) != 0
    rising = (ids.diff(dim=1) >= 0).all()
    steps = torch.ones_like(rising) if positions is None else ((positions.diff(dim=1) == 1) | new).all()
    if not bool(rising & steps):
        raise Unreadable("its documents are not runs of consecutive tokens")
    return visible if bool(new.any()) else Visible(lower, upper)
