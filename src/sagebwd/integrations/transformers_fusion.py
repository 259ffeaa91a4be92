"""``fuse`` of ``config.sagebwd``: a layer's norms, rotary embedding and attention in one, `sagebwd.norm_rope`.

Transformers calls an attention function with queries and keys that are normalised and rotated already. Here a layer's
own forward runs, whatever its source says, and is given three stand-ins: for itself (`Layer`), whose norms of heads
put their work off; for cos and sin (`Table`), by which its module's ``apply_rotary_pos_emb`` puts its work off; and,
from these two, for queries and keys (`Rows`), which reach the attention function with the work that is left to do.

Nothing else can be done with a stand-in: a layer that scales, cuts or mixes rows in between, or computes with cos and
sin itself, raises NotImplementedError. What a norm and a rotary embedding compute is not read either, but found by
numbers, once a class and once a function: a norm that is not known runs as it is, a rotary embedding is refused.

A config that does not say has layers of `FASTER` do so on Hopper, and their own functions run where attention's plan
has neither within. Every other layer stays as it is.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from itertools import product
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from sagebwd.dispatch import arch_of
from sagebwd.extras import extra
from sagebwd.integrations.transformers_settings import NAME, fuse_of
from sagebwd.integrations.transformers_torch import say
from sagebwd.norm_rope.composed import HALF, ROPES, norm_rope
from sagebwd.norm_rope.functions import attend, qk_norm_rope
from sagebwd.tracing import assume_constant

with extra("transformers"):
    import transformers
    from transformers import Cache, PreTrainedModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TESTED = "5.17", "5.23", "5.24"
"""Releases of Transformers that the tests have run with."""
_ROTARY = "apply_rotary_pos_emb"
_CACHES = "past_key_values", "cache"
"""Arguments of a layer that are a KV cache, of whatever class: until 5.23 and since 5.24."""
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
FASTER = {
    "transformers.models.llama.modeling_llama.LlamaAttention": "step_h200_2026-11-29_7fc77049.json",
    "transformers.models.qwen3.modeling_qwen3.Qwen3Attention": "training_h200_2026-11-28_614c2a6.json",
}
"""Layers of which whole steps were faster with ``fuse``, and the results file; none but a class itself is meant."""


class Norm(NamedTuple):
    """What a class of norms computes, of its ``weight``: an RMS norm times that, or times 1 + that."""

    over_one: bool
    eps: str  # the attribute's name


class _StandIn:
    """A tensor that a layer may hand on, and may not compute with.

    Args: layer, the name of its class; tensor.
    """

    def __init__(self, layer: str, tensor: Tensor) -> None:
        self.layer, self.tensor = layer, tensor

    def __getattr__(self, name: str) -> object:
        if name in ("shape", "dtype", "device"):
            return getattr(self.tensor, name)
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict[str, object] | None = None
    ) -> NoReturn:
        given = next(x for x in _flat((*args, *(kwargs or {}).values())) if isinstance(x, _StandIn))
        given._refuse(func.__name__)

    def _refuse(self, operation: str) -> NoReturn:
        refuse(self.layer, f"does more to {self.called} than norm and rotary embedding: {operation.strip('_')}")


def _operator(name: str) -> Callable:
    def compute(self: _StandIn, *_: object) -> NoReturn:
        self._refuse(name)

    return compute


for _name in ("getitem", "neg", *(side + x for side in ("", "r") for x in ("add", "sub", "mul", "truediv", "matmul"))):
    setattr(_StandIn, f"__{_name}__", _operator(f"__{_name}__"))


class Table(_StandIn):
    """cos or sin, (batch or 1, tokens, R)."""

    called = "cos or sin"


class NormPutOff(NamedTuple):
    """A norm of heads: its weight, eps and itself."""

    weight: Tensor
    eps: float
    run: Callable[[Tensor], Tensor]


class RotationPutOff(NamedTuple):
    """A rotary embedding: its arguments of `qk_norm_rope`, and itself, a function of query, key, cos and sin."""

    arguments: dict[str, object]
    run: Callable[..., tuple[Tensor, Tensor]]


class Rows(_StandIn):
    """Queries or keys whose norm and rotary embedding are left to do: their heads may change places, and no more.

    Args: norm, of heads, and rotation, a rotary embedding, of which queries and keys share one, or None.
    """

    called = "queries or keys"

    def __init__(
        self, layer: str, tensor: Tensor, norm: NormPutOff | None = None, rotation: RotationPutOff | None = None
    ) -> None:
        super().__init__(layer, tensor)
        self.norm, self.rotation = norm, rotation

    def transpose(self, first: int, second: int) -> Rows:
        """The same rows in other places, before they are rotated."""
        last = self.tensor.dim() - 1
        if self.rotation is not None or {first % (last + 1), second % (last + 1)} & {last}:
            refuse(self.layer, "transposes channels, or rows that are rotated")
        return Rows(self.layer, self.tensor.transpose(first, second), self.norm)


class Layer:
    """An attention layer as its own forward sees it, whose norms of queries and keys are put off."""

    def __init__(self, module: nn.Module, norms: dict[str, Callable]) -> None:
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "norms", norms)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        refuse(type(self.module).__name__, f"sets {name} of its layer in forward")

    def __getattr__(self, name: str) -> object:
        return self.norms[name] if name in self.norms else getattr(self.module, name)


def refuse(layer: str, reason: str) -> NoReturn:
    """Raise NotImplementedError for a layer."""
    raise NotImplementedError(
        f"config.sagebwd: fuse is not supported for {layer}, which {reason}; leave fuse out, or in a model of several "
        "parts give it to others, as in config.text_config.sagebwd (Transformers "
        f"{transformers.__version__}; tested with {', '.join(TESTED)})"
    )


def install(model_class: type[PreTrainedModel]) -> None:
    """Have attention layers of a model's module follow ``fuse`` of their config, read at every call.

    Those that are not given cos and sin stay as they are, and so does every layer whose config does not ask.
    """
    for base in model_class.__mro__:
        if ".modeling_" not in base.__module__:
            continue
        for found in list(vars(sys.modules[base.__module__]).values()):
            if inspect.isclass(found) and issubclass(found, nn.Module) and found.__name__.endswith("Attention"):
                _install(found)


class Left(NamedTuple):
    """What is left to do to queries and keys at the attention function.

    arguments: by keyword, of `qk_norm_rope`. norms, rotary: the layer's own functions. runs_own: these make rows where
    attention does not, in place of `qk_norm_rope`.
    """

    arguments: dict[str, object]
    norms: tuple[Callable[[Tensor], Tensor], ...]
    rotary: Callable[..., tuple[Tensor, Tensor]] | None
    runs_own: bool

    def rows(self, query: Tensor, key: Tensor, impl: str | None = None) -> tuple[Tensor, Tensor]:
        """Query and key normalised and rotated, dense or packed."""
        if not self.runs_own:
            return qk_norm_rope(query, key, impl=impl, **self.arguments)
        packed = query.dim() == 3
        rows = [x[None] if packed else x.transpose(1, 2) for x in (query, key)]
        if self.norms:
            rows = [norm(x) for norm, x in zip(self.norms, rows)]
        rows = [x.transpose(1, 2) for x in rows]
        if self.rotary is not None:
            tables = (self.arguments[name] for name in ("cos", "sin"))
            rows = self.rotary(*rows, *(x[None] if packed else x for x in tables))
        return tuple(x[0].transpose(0, 1) if packed else x for x in rows)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **attention: object) -> Tensor:
        """`qk_norm_rope_attention`."""
        given = tuple(self.arguments.get(name, default) for name, default in _DEFAULTS.items())

        def own(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
            return tuple(x.to(value.dtype) for x in self.rows(query, key))  # FP32, of weights or tables that are

        return attend(query, key, value, given, attention, own if self.runs_own else None)

    def of_packed(self, batch: int, real: Tensor | None = None) -> Left:
        """The same of (batch * tokens, heads, head_dim), or of its rows ``real``; cos is (batch or 1, tokens, R)."""
        tables = {
            name: self.arguments[name].expand(batch, -1, -1).flatten(0, 1)
            for name in ("cos", "sin") if name in self.arguments
        }  # fmt: skip
        rows = {name: x if real is None else x[real] for name, x in tables.items()}
        return self._replace(arguments=self.arguments | rows)


_DEFAULTS = {
    "q_weight": None, "k_weight": None, "eps": None, "cos": None, "sin": None, "rope": HALF, "position_ids": None
}  # fmt: skip


def put_off(
    module: nn.Module | Layer, query: Tensor | Rows, key: Tensor | Rows, value: Tensor
) -> tuple[nn.Module, Tensor, Tensor, Left | None]:
    """The layer, query and key of a call of the attention function, and what is left to do to the two.

    Raises NotImplementedError for a layer whose config asks for ``fuse`` and that does not follow it.
    """
    if not isinstance(module, Layer):
        if fuse_of(getattr(module, "config", None)):
            refuse(type(module).__name__, "has a forward without position_embeddings, or another library's")
        return module, query, key, None
    module, name = module.module, type(module.module).__name__
    rows = [isinstance(x, Rows) for x in (query, key)]
    if isinstance(value, Rows) or rows[0] != rows[1]:
        refuse(name, "attends to rows of which some are normalised and rotated")
    if not rows[0]:
        return module, query, key, None
    if query.rotation is not key.rotation or (query.norm is None) != (key.norm is None):
        refuse(name, "normalises and rotates queries and keys differently")
    arguments, norms, rotary = {}, (), None
    if query.norm is not None:
        arguments = {"q_weight": query.norm.weight, "k_weight": key.norm.weight, "eps": query.norm.eps}
        norms = query.norm.run, key.norm.run
    if query.rotation is not None:
        rotary = query.rotation.run
        arguments |= query.rotation.arguments
    return module, query.tensor, key.tensor, Left(arguments, norms, rotary, fuse_of(module.config) is None)


def _install(layer_class: type[nn.Module]) -> None:
    original = layer_class.forward
    names = list(inspect.signature(original).parameters)
    if hasattr(original, "norms") or "position_embeddings" not in names:
        return
    written_in = inspect.unwrap(original).__globals__
    rotary = written_in.get(_ROTARY)
    if rotary is not None and not hasattr(rotary, "rotations"):
        written_in[_ROTARY] = _rotary(rotary)
    candidates = (x for x in vars(sys.modules[layer_class.__module__]).values() if inspect.isclass(x))
    found = {x: norm_of(x) for x in (nn.RMSNorm, *candidates) if issubclass(x, nn.Module) and "Norm" in x.__name__}
    norms = {x: (norm, x.forward) for x, norm in found.items() if norm is not None}
    place = names.index("position_embeddings") - 1
    module = layer_class.__module__
    # and no forward that another library has put there
    is_faster = f"{module}.{layer_class.__qualname__}" in FASTER and original.__module__ == module
    left_out = "runs so on Hopper" if is_faster else "stays as it is, since no step was timed with it"
    logging.getLogger("sagebwd").info(f"{layer_class.__name__} {left_out}, where config.sagebwd has no fuse")

    @wraps(original)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        fuse = fuse_of(getattr(self, "config", None))
        given = (*zip(names[1:], args), *kwargs.items())
        keeps_rows = any(isinstance(x, Cache) or (name in _CACHES and x is not None) for name, x in given)
        if fuse is None:
            tables = kwargs.get("position_embeddings", args[place] if len(args) > place else None)
            fuse = is_faster and type(self) is layer_class and not keeps_rows and _follows(self, tables)
        if not fuse:
            return original(self, *args, **kwargs)
        if keeps_rows:
            if self.training and torch.is_grad_enabled():
                say(
                    f"config.sagebwd: fuse: norm and rotary embedding of {type(self).__name__} run as they are and "
                    "not with attention, for the KV cache that use_cache=True keeps; give use_cache=False in "
                    f"training, in the call or in {type(self.config).__name__}"
                )
            return original(Layer(self, {}), *args, **kwargs)
        if "position_embeddings" in kwargs:
            kwargs["position_embeddings"] = _tables(self, kwargs["position_embeddings"])
        elif len(args) > place:
            args = (*args[:place], _tables(self, args[place]), *args[place + 1 :])
        return original(Layer(self, _norms_put_off(self, norms)), *args, **kwargs)

    forward.norms = norms
    layer_class.forward = forward


def _follows(module: nn.Module, tables: object) -> bool:
    """Whether a layer of `FASTER` is on a GPU with the passes, its rotary embedding and attention as they were."""
    rotary = getattr(sys.modules[type(module).__module__], _ROTARY, None)
    if getattr(rotary, "rotations", {}).get(True) != (HALF, _as_they_are):
        return False
    if ALL_ATTENTION_FUNCTIONS.get_interface(NAME, None) is not sys.modules[f"{__package__}.transformers"].attention:
        return False
    if not isinstance(tables, tuple) or [isinstance(x, Tensor) for x in tables] != [True, True]:
        return False
    whole, learned = tables[0].shape[-1] == module.head_dim, any(x.requires_grad for x in tables)
    return whole and not learned and _has_passes(tables[0].device)


@assume_constant
def _has_passes(device: torch.device) -> bool:
    return arch_of(device) == 90


def _tables(module: nn.Module, given: tuple[Tensor, Tensor] | None) -> tuple[Table, Table] | None:
    if given is None:
        return None
    name = type(module).__name__
    if not isinstance(given, (tuple, list)) or [isinstance(x, Tensor) for x in given] != [True, True]:
        refuse(name, "has position_embeddings that are not cos and sin")
    return Table(name, given[0]), Table(name, given[1])


def _norms_put_off(module: nn.Module, norms: dict[type, tuple[Norm, Callable]]) -> dict[str, Callable]:
    """q_norm and k_norm of a layer, each to give `Rows`; neither where one is no norm of heads that is known."""
    names = "q_norm", "k_norm"
    found = [_known_norm(module, getattr(module, name, None), norms) for name in names]
    if None in found or found[0].eps != found[1].eps:
        return {}
    return {name: partial(_put_norm_off, type(module).__name__, norm) for name, norm in zip(names, found)}


def _put_norm_off(layer: str, norm: NormPutOff, x: Tensor) -> Rows:
    if not isinstance(x, Tensor) or x.shape[-1:] != norm.weight.shape:
        refuse(layer, "normalises queries or keys twice, after their rotation, or not by heads")
    return Rows(layer, x, norm)


def _known_norm(
    module: nn.Module, norm: nn.Module | None, norms: dict[type, tuple[Norm, Callable]]
) -> NormPutOff | None:
    """A norm of heads; None of another, one that is more than its class, or one whose class was changed since."""
    known, forward = norms.get(type(norm), (None, None))
    if known is None or type(norm).forward is not forward or "forward" in norm.__dict__:
        return None
    if any(getattr(norm, hooks) for hooks in _HOOKS) or torch.nn.modules.module._has_any_global_hook():
        return None
    eps, weight = getattr(norm, known.eps), norm.weight
    if eps is None or weight is None or tuple(weight.shape) != (getattr(module, "head_dim", None),):
        return None
    return NormPutOff(1 + weight.float() if known.over_one else weight, eps, norm)


@cache
def norm_of(norm_class: type[nn.Module]) -> Norm | None:
    """What a class of norms computes; None of one that is no RMS norm, or that takes more than channels and eps."""
    with _apart():
        x, weight = _numbers(0, 3, _CHANNELS), _numbers(1, _CHANNELS)
        try:
            if norm_class is not nn.RMSNorm and len(inspect.signature(norm_class).parameters) != 2:
                return None
            norm = norm_class(_CHANNELS, eps=_EPS).float()
            norm.weight.copy_(weight)
            made = norm.forward(x)
        except Exception:  # whatever a class does that is no norm
            return None
        names = [name for name, value in vars(norm).items() if isinstance(value, float) and value == _EPS]
        for over_one in (False, True):
            if len(names) == 1 and _is_close(made, norm_rope(x, weight + over_one, _EPS, None, None)):
                return Norm(over_one, names[0])
    return None


def rotations_of(rotary: Callable) -> dict[bool, tuple[str, Callable]]:
    """What an ``apply_rotary_pos_emb`` does, by whether its tables have as many channels as a head, or fewer.

    That is the kind of pairs, and what makes of its tables those of `qk_norm_rope`; nothing where it is another
    function of (query, key, cos, sin).
    """
    found = {}
    with _apart():
        rows = _numbers(0, 2, 3, 5, _CHANNELS), _numbers(1, 2, 1, 5, _CHANNELS)
        for whole, channels in ((True, _CHANNELS), (False, _CHANNELS // 2)):
            tables = _numbers(2, 2, 5, channels), _numbers(3, 2, 5, channels)
            try:
                made = tuple(rotary(*rows, *tables))
            except Exception:  # whatever a function does that takes other arguments
                continue
            for rope, change in product(ROPES, (_as_they_are, _repeated, *(() if whole else (_doubled,)))):
                wanted = [norm_rope(x, None, None, *map(change, tables), rope) for x in rows]
                if len(made) == 2 and all(map(_is_close, made, wanted)):
                    found[whole] = rope, change
    return found


def _rotary(original: Callable) -> Callable:
    """A module's rotary embedding, which puts its work off where it is given `Table`."""
    rotations = rotations_of(original)

    @wraps(original, updated=())  # which may be a module
    def apply_rotary_pos_emb(*args: object, **kwargs: object) -> object:
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Table)), None)
        if given is None:
            return original(*args, **kwargs)
        if len(args) != 4 or kwargs or not isinstance(args[2], Table) or not isinstance(args[3], Table):
            refuse(given.layer, f"calls {_ROTARY} with other arguments than query, key, cos, sin")
        query, key, cos, sin = args
        known = rotations.get(cos.shape[-1] == query.shape[-1])
        if known is None:
            refuse(given.layer, f"has an {_ROTARY} that is not known")
        rope, change = known
        arguments = {"cos": change(cos.tensor), "sin": change(sin.tensor), "rope": rope}
        rotation = RotationPutOff(arguments, original)
        return _rotated(given.layer, query, rotation), _rotated(given.layer, key, rotation)

    apply_rotary_pos_emb.rotations = rotations
    return apply_rotary_pos_emb


def _rotated(layer: str, x: Tensor | Rows, rotation: RotationPutOff) -> Rows:
    if not isinstance(x, Rows):
        return Rows(layer, x, None, rotation)
    if x.rotation is not None:
        refuse(layer, "rotates queries or keys twice")
    return Rows(layer, x.tensor, x.norm, rotation)


def _as_they_are(table: Tensor) -> Tensor:
    return table


def _repeated(table: Tensor) -> Tensor:
    """Of the first half, for pairs side by side."""
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


def _doubled(table: Tensor) -> Tensor:
    return torch.cat((table, table), -1)


_CHANNELS, _EPS = 16, 0.5


@contextmanager
def _apart() -> Iterator[None]:
    """On the CPU, whatever is traced, counted or put on another device where a model is made."""
    with _disable_current_modes(), torch.device("cpu"), torch.no_grad():
        yield


def _numbers(seed: int, *shape: int) -> Tensor:
    # a model is made under its own default dtype
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def _is_close(found: object, wanted: Tensor) -> bool:
    return (
        isinstance(found, Tensor) and found.shape == wanted.shape and torch.allclose(found.float(), wanted, 1e-4, 1e-5)
    )


def _flat(given: object) -> list[object]:
    return [y for x in given for y in _flat(x)] if isinstance(given, (tuple, list)) else [given]
