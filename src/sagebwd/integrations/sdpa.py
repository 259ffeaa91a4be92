"""INT8 attention for code that calls ``torch.nn.functional.scaled_dot_product_attention``, without editing it.

    from sagebwd import replace_sdpa
    with replace_sdpa() as sdpa:
        model(x).sum().backward()
    print(sdpa.counts)   # {"replaced": 24, "kept": {"head_dim 512": 2}}

The patch reaches calls through the module (``F.scaled_dot_product_attention(...)``), not names that were bound by
``from torch.nn.functional import ...`` before. Activation checkpointing calls forward again in backward: run backward
inside the context too (docs/integrations/sdpa.md).
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from sagebwd import checks, dispatch
from sagebwd.arguments import autocast, choice_of
from sagebwd.attention import sage_attention
from sagebwd.auto.contenders import PEERS
from sagebwd.cache import Cache
from sagebwd.kernels import capabilities
from sagebwd.planning.specification import kind_of
from sagebwd.recipe import AUTO, Recipe
from sagebwd.tracing import assume_constant

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

_LEFT = "after the context was left"
_SHORT = "fewer keys than min_tokens"
_FASTER = "faster in full precision"
_ASKED_FOR = (_LEFT, _SHORT, _FASTER)
"""Reasons that send a call to the original whatever ``unsupported`` says."""

_OUTSIDE = "make this call outside of replace_sdpa, or use replace_sdpa(unsupported='original')"
_NEVER_REACHED = (
    "no call of torch.nn.functional.scaled_dot_product_attention reached it; nn.MultiheadAttention makes none with "
    "need_weights=True, nor where torch takes its fused path in evaluation, and a name that was imported from "
    "torch.nn.functional before stays the original"
)
_is_traced = False  # whether torch.compile has traced a replaced call: those are not counted

_lock = threading.RLock()
_active: list[SdpaReplacement] = []
_installed: SdpaReplacement | None = None


class SdpaCall(NamedTuple):
    """The arguments of one call, as scaled_dot_product_attention and `sage_attention` order them."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


class SdpaReplacement:
    """One replacement of scaled_dot_product_attention: a context manager or decorator, and counts of what ran where.

    In another process, as pickle takes it to one, it is one with the same settings that is not in use.
    """

    def __init__(
        self, recipe: str | Recipe, impl: str | None, min_tokens: int, unsupported: Literal["original", "raise"]
    ) -> None:
        if inspect.isfunction(recipe):
            raise TypeError(f"recipe: got the function {recipe.__name__}; to decorate it write @replace_sdpa()")
        dispatch.check_known(impl)
        tokens = checks.index(min_tokens)
        if tokens is None:
            raise TypeError(f"min_tokens={min_tokens!r} must be an integer")
        if tokens < 0:
            raise ValueError(f"min_tokens={min_tokens} must be at least 0")
        if unsupported not in ("original", "raise"):
            raise ValueError(f"unsupported={unsupported!r} is not known; accepted: 'original', 'raise'")
        self.recipe = Recipe.parse_or_auto(recipe)
        self.impl = impl
        self.min_tokens = tokens
        self.unsupported = unsupported
        self._entered = False
        self._is_used = False  # by a refused call, or a replacement entered inside: neither is counted
        self._original: Callable = F.scaled_dot_product_attention
        self._previous: Callable = self._original
        self._function = _function_of(self)
        self._calls: Counter[str | None] = Counter()  # by why they were kept, None for those replaced
        self._reasons = Cache()  # `_reason_in_implementation` in a tuple, by a call's specification
        self._count_lock = threading.Lock()

    @property
    def counts(self) -> dict[str, int | dict[str, int]]:
        """Calls so far: ``{"replaced": n, "kept": {reason: n}}``, a copy. Compiled calls are not counted."""
        with self._count_lock:
            kept = {reason: count for reason, count in self._calls.items() if reason is not None}
            return {"replaced": self._calls[None], "kept": kept}

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, inside this replacement whenever it is called; ``counts`` are those of all calls."""
        kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isclass
        if not callable(function) or any(is_one(function) for is_one in kinds):
            raise TypeError(
                f"replace_sdpa: {function!r} cannot be decorated; accepted: functions that run when they are called. "
                "In others, as generators and async ones, write `with replace_sdpa():` inside"
            )

        @wraps(function)
        def inside(*args: object, **kwargs: object) -> object:
            with _lock:
                # a call inside a call, or of another thread meanwhile, has an object of its own
                one = self._again() if self._entered else self
                one.__enter__()
            try:
                result = function(*args, **kwargs)
            except BaseException:
                one._leave()
                raise
            one._leave()
            one._warn_of_nothing()
            return result

        return inside

    def __reduce__(self) -> tuple[type[SdpaReplacement], tuple[object, ...]]:
        return SdpaReplacement, self._settings

    @property
    def _settings(self) -> tuple[str | Recipe, str | None, int, str]:
        return self.recipe, self.impl, self.min_tokens, self.unsupported

    def _again(self) -> SdpaReplacement:
        """Another with the same settings, which counts where this one does."""
        other = SdpaReplacement(*self._settings)
        other._calls, other._count_lock, other._reasons = self._calls, self._count_lock, self._reasons
        return other

    def __enter__(self) -> SdpaReplacement:
        with _lock:
            if self._entered:
                raise ValueError("replace_sdpa: this object is in use already; make another with replace_sdpa(...)")
            checks.refuse_divided()
            current = F.scaled_dot_product_attention
            for other in _active:
                other._is_used = True
            outer = next((other for other in _active if other._function is current), None)
            # the innermost decides alone: what it keeps does not go to the settings around it
            self._original = outer._original if outer else current
            self._previous = current
            self._entered = True
            _active.append(self)
            F.scaled_dot_product_attention = self._function
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        installed = self._leave()
        if kind is None and not installed:
            self._warn_of_nothing()

    def _leave(self) -> bool:
        """Take the patch back; whether it was that of `install_sdpa`, which is then taken back, whoever leaves it."""
        global _installed
        with _lock:
            if not self._entered:
                raise ValueError("replace_sdpa: this object is not in use; enter it first")
            self._entered = False
            _active.remove(self)
            # threads may leave in another order than they entered
            if F.scaled_dot_product_attention is self._function:
                F.scaled_dot_product_attention = self._previous
            for other in _active:
                if other._previous is self._function:
                    other._previous = self._previous
            installed = self is _installed
            if installed:
                _installed = None
        return installed

    def __repr__(self) -> str:
        counts, state = self.counts, "in use" if self._entered else "not in use"
        recipe = "auto" if self.recipe == AUTO else str(self.recipe)
        return (
            f"<replace_sdpa(recipe={recipe!r}, impl={self.impl!r}, min_tokens={self.min_tokens}, "
            f"unsupported={self.unsupported!r}), {state}: replaced {counts['replaced']}, kept {counts['kept']}>"
        )

    def _warn_of_nothing(self) -> None:
        counts = self.counts
        if counts["replaced"] or self._is_used or _is_traced or any(reason in counts["kept"] for reason in _ASKED_FOR):
            return
        reason = f"all calls were kept: {counts['kept']}" if counts["kept"] else _NEVER_REACHED
        warnings.warn(f"replace_sdpa replaced nothing: {reason}", stacklevel=3)

    def _count(self, reason: str | None) -> None:
        with self._count_lock:
            self._calls[reason] += 1


def replace_sdpa(
    recipe: str | Recipe = AUTO,
    impl: str | None = None,
    min_tokens: int = 0,
    unsupported: Literal["original", "raise"] = "original",
) -> SdpaReplacement:
    """A context manager or decorator inside which ``F.scaled_dot_product_attention`` runs in INT8 where it can.

    Replaced are calls that `sage_attention` takes, with its errors, and no dropout: query (batch, heads, tokens,
    head_dim), key and value (batch, kv_heads, kv_tokens, head_dim), or any other number of dimensions before tokens,
    of one dtype that the implementation takes (after autocast), head_dim up to 512, and no mask, a CausalBias, or a
    mask that needs no gradient. All others go to the function that was there before, with the very arguments that came
    in (docs/integrations/sdpa.md#what-is-kept-on-the-original).

    Args:
        recipe, impl: as in `sage_attention`.
        min_tokens: calls with fewer key tokens stay on the original; short sequences do not gain from INT8.
        unsupported: what becomes of calls that cannot run in INT8: "original" hands them on; "raise" raises what
            `sage_attention` raises for them. Calls below min_tokens go to the original under both.

    Returns:
        An object to enter with ``with``, which yields itself, or to decorate functions with. Its ``counts`` are
        ``{"replaced": n, "kept": {reason: n}}``; calls inside torch.compile are not counted, nor are calls that are
        refused. Leaving warns where no call was replaced, unless all that reached it were kept as you asked.

    Process-wide, whichever thread enters. Where several are entered the last decides alone, and leaving in any order
    is safe. Entering one object twice raises ValueError; make two.

    Raises:
        ValueError, TypeError: an unknown recipe, impl or unsupported, or min_tokens that is not an integer of at least
            0.
    """
    return SdpaReplacement(recipe, impl, min_tokens, unsupported)


def install_sdpa(
    recipe: str | Recipe = AUTO,
    impl: str | None = None,
    min_tokens: int = 0,
    unsupported: Literal["original", "raise"] = "original",
) -> SdpaReplacement:
    """`replace_sdpa` until `uninstall_sdpa`; installing again takes the new settings.

    Args, returns and raises: as `replace_sdpa`; what is returned holds the counts.
    """
    global _installed
    replacement = SdpaReplacement(recipe, impl, min_tokens, unsupported)
    with _lock:
        uninstall_sdpa()
        _installed = replacement.__enter__()
    return replacement


def uninstall_sdpa() -> None:
    """Take back `install_sdpa`; nothing happens where nothing is installed."""
    with _lock:
        if _installed is not None:
            _installed._leave()


def _function_of(replacement: SdpaReplacement) -> Callable:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0,  # as `sage_attention`
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        window = None
        if _is_causal_bias(attn_mask):  # which asks whether it is F.scaled_dot_product_attention that was called
            if is_causal:
                raise ValueError("CausalBias should not be used with causal=True")
            attn_mask, is_causal, window = _of_bias(attn_mask, query, key)
        call = SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        reason = _reason_to_keep(replacement, call)
        if reason is None:
            call = SdpaCall(*autocast(query, key, value), attn_mask, 0.0, is_causal, scale, enable_gqa)
            reason = _reason_of_kind(call, window, replacement)
        if reason is not None and reason not in _ASKED_FOR and replacement.unsupported == "raise":
            if not torch.compiler.is_compiling():
                replacement._is_used = True
            _refuse(reason, replacement, call)
        # a graph cannot hold the side effect of counting
        if torch.compiler.is_compiling():
            _note_trace()
        else:
            replacement._count(reason)
        if reason is not None:
            if window is not None:
                attn_mask = _lower_right(query.shape[-2], key.shape[-2], query.device)
            return replacement._original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return sage_attention(*call, window=window, recipe=replacement.recipe, impl=replacement.impl)

    # by which pickle finds it, as it does the original: the function that the other process has there
    scaled_dot_product_attention.__module__ = F.__name__
    scaled_dot_product_attention.__qualname__ = scaled_dot_product_attention.__name__
    return scaled_dot_product_attention


@assume_constant
def _note_trace() -> None:
    global _is_traced
    _is_traced = True


def _is_causal_bias(mask: Tensor | None) -> bool:
    """Whether a mask is torch's CausalBias, whose module takes seconds to import: imported where a mask may be one."""
    if mask is None or type(mask) is Tensor:
        return False
    from torch.nn.attention.bias import CausalBias

    return isinstance(mask, CausalBias)


def _of_bias(bias: CausalBias, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool, tuple[int, int] | None]:
    """(attn_mask, is_causal, window) that mean a CausalBias."""
    from torch.nn.attention.bias import CausalVariant

    tokens_q, tokens_k = bias.seq_len_q, bias.seq_len_kv
    if bias.variant == CausalVariant.UPPER_LEFT or tokens_q == tokens_k:
        return None, True, None
    if tokens_q < tokens_k and (tokens_q, tokens_k) == (query.shape[-2], key.shape[-2]):
        return None, False, (-1, tokens_k - tokens_q)
    # some queries see no key, or the original is to say that lengths differ
    return _lower_right(tokens_q, tokens_k, query.device), False, None


def _lower_right(tokens_q: int, tokens_k: int, device: torch.device) -> Tensor:
    return torch.ones(tokens_q, tokens_k, dtype=torch.bool, device=device).tril(tokens_k - tokens_q)


def _refuse(reason: str, settings: SdpaReplacement, call: SdpaCall) -> NoReturn:
    """Raise what `sage_attention` raises for a call; NotImplementedError where it has no check of its own."""
    checked = _reason_in_kind(*call[:3]) is None and not (call.attn_mask is not None and call.is_causal)
    only_torch = reason in ("dropout", "attn_mask needs a gradient") or reason.startswith("head_dim ")
    of_torch = call.query, call.value, call.attn_mask, call.dropout_p
    if checked and only_torch and checks.only_torch(*of_torch) is not None:
        checks.refuse_only_torch(*of_torch, _OUTSIDE)
    if checked:
        recipe = "token" if settings.recipe == AUTO else settings.recipe
        sage_attention(*call, recipe=recipe, impl=settings.impl)
    raise NotImplementedError(
        f"scaled_dot_product_attention: {reason}: not supported under replace_sdpa(unsupported='raise'); {_OUTSIDE}"
    )


def _reason_to_keep(settings: SdpaReplacement, call: SdpaCall) -> str | None:
    """Why a call stays on the original, in a few words; None where `sage_attention` has a place for it."""
    # code that took hold of the function, such as another patch, may call it later
    if not settings._entered:
        return _LEFT
    key = call.key
    if isinstance(key, Tensor) and not key.is_nested and key.dim() >= 2 and key.shape[-2] < settings.min_tokens:
        return _SHORT
    return _reason_in_kind(*call[:3]) or _reason_in_shapes(*call[:3], call.enable_gqa) or _reason_in_options(call)


def _reason_in_kind(*tensors: Tensor) -> str | None:
    for tensor in tensors:
        # DTensor and the like bring their own attention
        if type(tensor) not in (Tensor, nn.Parameter):
            return f"a {type(tensor).__name__}"
        if tensor.is_nested:
            return "a nested tensor"
        if tensor.layout is not torch.strided:
            return f"layout {str(tensor.layout).removeprefix('torch.')}"
    if torch.compiler.is_compiling():
        return None
    # the operators have no rules for these, and forward-mode would lose its tangents without a word
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return "torch.func or forward-mode differentiation"
    return None


def _reason_in_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    if not query.dim() == key.dim() == value.dim() >= 2:
        return "dimensions differ"
    for head_dim in (query.shape[-1], value.shape[-1]):
        if not 1 <= head_dim <= capabilities.MAX_HEAD_DIM:
            return f"head_dim {head_dim}"
    if query.shape[-1] != key.shape[-1]:
        return "head_dims differ"
    if key.shape[:-1] != value.shape[:-1] or key.shape[:-3] != query.shape[:-3]:
        return "shapes differ"
    heads, kv_heads = (1, 1) if query.dim() == 2 else (query.shape[-3], key.shape[-3])
    if heads != kv_heads and (not enable_gqa or kv_heads == 0 or heads % kv_heads):
        return "heads differ"
    if not query.device == key.device == value.device:
        return "devices differ"
    return None


def _reason_in_options(call: SdpaCall) -> str | None:
    if call.dropout_p != 0.0:
        return "dropout"
    if not isinstance(call.is_causal, bool):
        return "is_causal is not a bool"
    if call.scale is not None and not (checks.is_number(call.scale) and checks.is_finite(call.scale)):
        return "scale is not a finite number"
    if call.attn_mask is None:
        return None
    # the original refuses or combines the two as its backend likes
    if call.is_causal:
        return "attn_mask with is_causal"
    return _reason_in_mask(call.query, call.key, call.attn_mask)


def _reason_in_mask(query: Tensor, key: Tensor, mask: Tensor) -> str | None:
    if type(mask) not in (Tensor, nn.Parameter):
        return f"attn_mask is a {type(mask).__name__}"
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return f"attn_mask dtype {str(mask.dtype).removeprefix('torch.')}"
    if mask.requires_grad and torch.is_grad_enabled():
        return "attn_mask needs a gradient"
    if mask.device != key.device:
        return "devices differ"
    full = *query.shape[:-1], key.shape[-2]
    fits = 2 <= mask.dim() <= query.dim() and all(n in (1, size) for n, size in zip(mask.shape[::-1], full[::-1]))
    return None if fits else "attn_mask does not broadcast"


def _reason_of_kind(call: SdpaCall, window: tuple[int, int] | None, settings: SdpaReplacement) -> str | None:
    """`_reason_in_implementation`, worked out once for calls that differ in what tensors hold alone."""
    kind = kind_of((*call[:4], None, None, None), None, settings.recipe, window, call[4:])
    if kind is None:  # a trace must not look at what is cached: dynamo would compile anew whenever there is more
        return _reason_in_implementation(call, window, settings)
    found = settings._reasons.get(kind)
    if found is None:
        found = (_reason_in_implementation(call, window, settings),)
        settings._reasons.put(kind, found)
    return found[0]


def _reason_in_implementation(call: SdpaCall, window: tuple[int, int] | None, settings: SdpaReplacement) -> str | None:
    """Likewise, of tensors that autocast has seen: whether the implementation that would run takes them."""
    query, key, value = call[:3]
    if not query.dtype == key.dtype == value.dtype:
        return "dtypes differ"
    dtype = str(query.dtype).removeprefix("torch.")
    if query.dtype not in checks.REFERENCE_DTYPES:
        return f"dtype {dtype}"
    try:
        if torch.compiler.is_compiling():
            dispatch.check_traced(settings.impl, query.device, query.dtype)
        else:
            choice, _ = choice_of(sage_attention, *call, window=window, recipe=settings.recipe, impl=settings.impl)
            return None if choice.contender in (None, *PEERS) else _FASTER  # a peer runs by sagebwd's function
    except TypeError:
        return f"dtype {dtype}"
    except NotImplementedError:
        return "recipe is not in this implementation"
    except ValueError:
        return f"device {query.device.type}"
    return None
