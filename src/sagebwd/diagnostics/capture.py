"""What a model hands to attention: q, k, v and the gradient of its output, on real text.

One forward and one backward of a Transformers model, with an attention function of its own name that computes full
precision and keeps its inputs, after rotary embedding and QK-norm. The gradient is that of the model's own loss, a
mean over tokens, with the text as its labels: next-token prediction for a decoder, for a masked-language model the
reconstruction of the text as given.

Shapes: B batch, H query heads kept, G key heads kept, N tokens, D head_dim.
"""

from __future__ import annotations

import dataclasses
import errno
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagebwd.checks import REFERENCE_DTYPES, is_finite, tensor
from sagebwd.diagnostics.models import context
from sagebwd.environment import write_whole
from sagebwd.extras import extra
from sagebwd.masks.band import Band

with extra("diagnostics"):
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

NAME = "sagebwd_capture"
TENSORS = ("q", "k", "v", "do")
_FORMAT = "sagebwd.capture.1"
_UNSUPPORTED = {"softcap": "soft-capped logits", "s_aux": "attention sinks", "position_bias": "a position bias"}


@dataclass(frozen=True)
class Captured:
    """One layer's attention call, in the dtype that the model computes in.

    q, do (B, H, N, D) and k, v (B, G, N, D); heads and kv_heads, the index in the model of each head kept; group, how
    many query heads share a key head; scale, the softmax scale; window, as in `sagebwd.sage_attention`.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    scale: float
    is_causal: bool
    window: tuple[int, int] | None
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    group: int

    def head(self, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and do of one query head, each (B, 1, N, D). Raises ValueError if it was not captured."""
        self._check([head])
        own, shared = self.heads.index(head), self.kv_heads.index(head // self.group)
        return self.q[:, own, None], self.k[:, shared, None], self.v[:, shared, None], self.do[:, own, None]

    def select(self, heads: Sequence[int] | None) -> Captured:
        """These query heads and the key heads they read; all for None. Raises ValueError for one that is not there."""
        if heads is None:
            return self
        self._check(heads)
        heads = tuple(sorted(set(heads)))
        kv_heads = tuple(sorted({head // self.group for head in heads}))
        own, shared = [self.heads.index(h) for h in heads], [self.kv_heads.index(h) for h in kv_heads]
        return dataclasses.replace(
            self, q=self.q[:, own], do=self.do[:, own], k=self.k[:, shared], v=self.v[:, shared],
            heads=heads, kv_heads=kv_heads,
        )  # fmt: skip

    def to(self, dtype: torch.dtype | None) -> Captured:
        """Tensors rounded to a dtype, as one that kernels take; as they are for None."""
        if dtype is None:
            return self
        return dataclasses.replace(self, **{name: getattr(self, name).to(dtype) for name in TENSORS})

    def _check(self, heads: Sequence[int]) -> None:
        for head in heads:
            if head not in self.heads:
                raise ValueError(f"heads: {head} is not in layer {self.layer}, which has {_listed(self.heads)}")


def capture(model: PreTrainedModel, token_ids: Tensor, *, layers: Sequence[int] | None = None) -> list[Captured]:
    """One forward and backward of a model; what chosen layers hand to attention, layer by layer.

    Args: token_ids (batch, tokens) int64, without padding; layers by index, all for None. Dropout is off.

    Raises ValueError for token ids of another shape or outside the vocabulary, more tokens than the model has
    positions or memory allows, a layer that is not there, and a model whose attention does not go through
    Transformers' AttentionInterface; NotImplementedError for encoder-decoders, soft-capping, sinks, position biases.
    """
    check_token_ids(token_ids)
    _check_fits(model, token_ids)
    token_ids = token_ids.to(model.device)
    optional = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    modes = [(part, part.training) for part in model.modules()]  # of which some may be frozen
    with _recording(model) as calls, torch.enable_grad():
        try:
            model.eval()
            loss = model(input_ids=token_ids, labels=token_ids, **optional).loss
            chosen = _choose(list(calls), layers)
            gradients = torch.autograd.grad(loss, [calls[layer][-1] for layer in chosen])
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise ValueError(
                    f"token_ids: {token_ids.shape[1]} tokens do not fit in this machine's memory; take fewer"
                ) from None
            raise
        finally:
            for part, mode in modes:
                part.training = mode
        return [_captured(layer, *calls[layer][:-1], do) for layer, do in zip(chosen, gradients)]


def _captured(layer: int, q: Tensor, k: Tensor, v: Tensor, settings: dict, do: Tensor) -> Captured:
    q, k, v, do = (x.detach().contiguous() for x in (q, k, v, do))
    heads, kv_heads = q.shape[1], k.shape[1]
    return Captured(
        layer, q, k, v, do, **settings, heads=tuple(range(heads)), kv_heads=tuple(range(kv_heads)),
        group=heads // kv_heads,
    )  # fmt: skip


@contextmanager
def _recording(model: PreTrainedModel) -> Iterator[dict[int, tuple]]:
    """While it is open, each attention call of the model is kept: layer to q, k, v, settings and output."""
    calls: dict[int, tuple] = {}
    configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    before = [(config, config._attn_implementation) for config in configs.values()]
    AttentionInterface.register(NAME, _recorder(calls))
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # no mask at all without padding
    try:
        model.set_attn_implementation(NAME)
        yield calls
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
        calls.clear()  # the registered function would keep every activation alive


def _recorder(calls: dict[int, tuple]) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        for name, meaning in _UNSUPPORTED.items():
            if kwargs.get(name) is not None:
                raise NotImplementedError(f"{name}: {meaning} cannot be traced; accepted: plain softmax attention")
        query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embedding leaves FP32 under BF16 autocast
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # a window of w tokens holds the query's own and w - 1 before it; the other side is open without a causal mask
        window = None if sliding_window is None else (sliding_window - 1, -1 if is_causal else sliding_window - 1)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        if window is None:
            mask = {"is_causal": is_causal}
        else:
            tokens = torch.arange(query.shape[2], device=query.device)
            mask = {"attn_mask": Band.of(is_causal, *window).mask(tokens, tokens)}
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, **mask, scale=scale, enable_gqa=grouped)
        if not out.requires_grad:  # nothing before this layer is trained: its output starts the graph
            out.requires_grad_()
        layer = getattr(module, "layer_idx", None)
        layer = len(calls) if layer is None or layer in calls else layer
        calls[layer] = query, key, value, {"scale": scale, "is_causal": is_causal, "window": window}, out
        return out.transpose(1, 2).contiguous(), None

    return attention


def _choose(found: list[int], layers: Sequence[int] | None) -> list[int]:
    if not found:
        raise ValueError("model: its attention does not go through Transformers' AttentionInterface; nothing to trace")
    for layer in layers or ():
        if layer not in found:
            raise ValueError(f"layers: {layer} is not an attention layer here; there are {_listed(found)}")
    return found if layers is None else sorted(set(layers))


def check_token_ids(token_ids: Tensor) -> None:
    """Raises TypeError for what is no tensor, and ValueError unless it is (batch, tokens) int64."""
    tensor("token_ids", token_ids)
    if token_ids.dim() != 2 or token_ids.dtype != torch.long or token_ids.numel() == 0:
        raise ValueError(
            f"token_ids: expected (batch, tokens) int64, got {tuple(token_ids.shape)} {str(token_ids.dtype)[6:]}"
        )


def _check_fits(model: PreTrainedModel, token_ids: Tensor) -> None:
    if model.config.is_encoder_decoder:
        raise NotImplementedError(
            f"model: {type(model).__name__} is an encoder-decoder; accepted: one stack of layers"
        )
    limit, vocabulary = context(model), model.get_input_embeddings().num_embeddings
    if limit is not None and token_ids.shape[1] > limit:
        raise ValueError(f"token_ids: {token_ids.shape[1]} tokens, and the model has {limit} positions; take fewer")
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocabulary:
        raise ValueError(f"token_ids: {int(token_ids.max())} is outside the model's vocabulary of {vocabulary}")


def _listed(numbers: Sequence[int]) -> str:
    numbers = list(numbers)
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def save(captured: Sequence[Captured], path: str | Path) -> None:
    """Write captured layers to one safetensors file: ``layer.3.q`` and so on, the rest as JSON in its metadata.

    It is written whole or not at all. Raises OSError, which names it, where it cannot be written.
    """
    tensors = {f"layer.{c.layer}.{name}": getattr(c, name).cpu().contiguous() for c in captured for name in TENSORS}
    fields = [field.name for field in dataclasses.fields(Captured) if field.name not in TENSORS]
    settings = [{name: getattr(c, name) for name in fields} for c in captured]

    def write(temporary: Path) -> None:
        try:
            save_file(tensors, temporary, {"format": _FORMAT, "layers": json.dumps(settings)})
        except SafetensorError as error:  # of a full disk too
            raise OSError(errno.EIO, str(error)) from error

    write_whole(Path(path), write)


def load(path: str | Path, layers: Sequence[int] | None = None, device: str = "cpu") -> list[Captured]:
    """Layers from a file that `save` wrote, bit for bit; all for None.

    Raises ValueError for a file that is missing, damaged or another's, and for a layer that it does not hold.
    """
    if not Path(path).is_file():
        what = "a folder" if Path(path).is_dir() else "there is no such file"
        raise ValueError(f"{path}: {what}; accepted: a file that `sagebwd trace --save` wrote")
    try:
        with safe_open(path, "pt", device=device) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"{path}: not a file of captured tensors, which `sagebwd trace --save` writes")
            captured = [_read(file, entry) for entry in _described(path, metadata, layers)]
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file, or cut off ({error})") from None
    for call in captured:
        if not _fits(call):
            raise ValueError(
                f"{path}: tensors of layer {call.layer} are not those of the heads that it names; write it anew by "
                "`sagebwd trace --save`"
            )
    return captured


def _described(path: str | Path, metadata: dict[str, str], layers: Sequence[int] | None) -> list[dict[str, Any]]:
    """What a file of `save` says of its layers, of those that are chosen."""
    names = {field.name for field in dataclasses.fields(Captured)} - set(TENSORS)
    try:
        entries = {entry["layer"]: entry for entry in json.loads(metadata["layers"]) if set(entry) == names}
    except (KeyError, TypeError, ValueError):
        entries = {}
    if not entries:
        raise ValueError(f"{path}: it does not say which layers it holds; write it anew by `sagebwd trace --save`")
    return [entries[layer] for layer in _choose(list(entries), layers)]


def _read(file: safe_open, entry: dict[str, Any]) -> Captured:
    settings = {key: tuple(x) if isinstance(x, list) else x for key, x in entry.items()}
    return Captured(**settings, **{name: file.get_tensor(f"layer.{entry['layer']}.{name}") for name in TENSORS})


def _fits(call: Captured) -> bool:
    """Whether tensors and settings of a file are of one attention call."""
    q, k, v, _ = tensors = [getattr(call, name) for name in TENSORS]
    window = (0, 0) if call.window is None else call.window
    listed = call.heads, call.kv_heads, (call.group,), window
    if not all(isinstance(x, tuple) and all(type(number) is int for number in x) for x in listed):
        return False
    if call.group < 1 or len(window) != 2 or min(window) < -1:
        return False
    if any(x.dim() != 4 or x.dtype not in REFERENCE_DTYPES for x in tensors):
        return False
    of_queries, of_keys = (q.shape[0], len(call.heads), q.shape[2]), (q.shape[0], len(call.kv_heads), k.shape[2])
    expected = [(*of_queries, q.shape[3]), (*of_keys, q.shape[3]), (*of_keys, v.shape[3]), (*of_queries, v.shape[3])]
    read = {head // call.group for head in call.heads}
    is_set = isinstance(call.scale, (int, float)) and is_finite(call.scale) and isinstance(call.is_causal, bool)
    return is_set and [tuple(x.shape) for x in tensors] == expected and read <= set(call.kv_heads)
