"""The attention backend "sagebwd" for Hugging Face Diffusers (docs/integrations/diffusers.md).

Diffusers has no public way to add a backend: its names are a closed Enum, and its registry is private. `register`
adds a member to the one and a function to the other, and refuses where they do not look as in the versions tested. It
drops without a word what the function does not name, so every argument that any of its backends knows is named here,
and refused where it is not supported.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from enum import Enum
from operator import attrgetter
from types import ModuleType

from torch import Tensor

from sagebwd import counts
from sagebwd.attention import sage_attention
from sagebwd.dispatch import check_known
from sagebwd.extras import extra
from sagebwd.recipe import AUTO, Recipe

with extra("diffusers"):
    import diffusers
    from diffusers.utils import constants

NAME = "sagebwd"
TESTED = ("0.42.0", "0.42.1")
_MODULE = "diffusers.models.attention_dispatch"
_REGISTRY = "_AttentionBackendRegistry"
_NAMES = _REGISTRY, f"{_REGISTRY}.register", f"{_REGISTRY}.set_active_backend", "AttentionBackendName"


def register(recipe: str | Recipe = AUTO, impl: str | None = None) -> None:
    """Make the attention backend "sagebwd" known to Diffusers: by model, by context manager and by environment.

    Calling again takes the new settings, for all models of the process. With DIFFUSERS_ATTN_BACKEND=sagebwd in the
    environment call it before a model class is imported, or Diffusers stops at a name that it does not know yet.

    Args:
        recipe, impl: as in `sage_attention`, for every call.

    Raises:
        ValueError, TypeError: an unknown recipe or impl.
        NotImplementedError: this version of Diffusers lacks the private names that are needed.
    """
    parsed = Recipe.parse_or_auto(recipe)
    check_known(impl)
    from_environment = constants.DIFFUSERS_ATTN_BACKEND == NAME and _MODULE not in sys.modules
    dispatch = _import_dispatch(from_environment)
    registry = dispatch._AttentionBackendRegistry
    member = _enum_member(dispatch.AttentionBackendName)
    registry.register(member)(_backend(parsed, impl))
    counts.log_at_exit()
    if from_environment:
        registry.set_active_backend(member)


def _import_dispatch(from_environment: bool) -> ModuleType:
    """Diffusers' dispatcher, checked for the names that are needed."""
    known = constants.DIFFUSERS_ATTN_BACKEND
    try:
        if from_environment:
            # the import itself looks the environment's name up in the Enum, where it is not yet
            constants.DIFFUSERS_ATTN_BACKEND = "native"
        dispatch = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if error.name != _MODULE:
            raise
        raise _unknown_diffusers(_MODULE) from error
    finally:
        constants.DIFFUSERS_ATTN_BACKEND = known
    for name in _NAMES:
        try:
            attrgetter(name)(dispatch)
        except AttributeError:
            raise _unknown_diffusers(name) from None
    if "backend" not in inspect.signature(dispatch._AttentionBackendRegistry.register).parameters:
        raise _unknown_diffusers("the argument backend of _AttentionBackendRegistry.register")
    names = dispatch.AttentionBackendName
    if not (isinstance(names, type) and issubclass(names, Enum) and issubclass(names, str)):
        raise _unknown_diffusers("AttentionBackendName, an Enum of strings")
    return dispatch


def _unknown_diffusers(missing: str) -> NotImplementedError:
    return NotImplementedError(
        f"diffusers {diffusers.__version__} lacks {missing}, which the backend 'sagebwd' needs; "
        f"tested with diffusers {', '.join(TESTED)}"
    )


def _enum_member(names: type[Enum]) -> Enum:
    """The member of the Enum of backends, added at the first call."""
    if NAME in names._value2member_map_:
        return names._value2member_map_[NAME]
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    # before the maps know it: an Enum refuses to assign to a member
    setattr(names, NAME.upper(), member)
    names._member_names_.append(NAME.upper())
    names._member_map_[NAME.upper()] = member
    names._value2member_map_[NAME] = member
    return member


def _backend(recipe: Recipe | str, impl: str | None) -> Callable[..., Tensor]:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        return_attn_probs: bool = False,
        window_size: tuple[int, int] | None = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
        _parallel_config: object | None = None,
    ) -> Tensor:
        """The backend that Diffusers calls.

        Args: query (batch, tokens, heads, head_dim); key, value (batch, kv_tokens, kv_heads, head_dim); attn_mask,
        (batch, kv_tokens), or as in `sage_attention`, as scale, enable_gqa and is_causal are.

        Returns: (batch, tokens, heads, head_dim) in query's dtype.

        Raises NotImplementedError for dropout, a mask with is_causal, and each other argument that is not at its
        default, and as `sage_attention`.
        """
        _refuse("dropout_p", dropout_p, 0.0, "set the model's attention dropout to 0, or use 'native'")
        _refuse("return_lse", return_lse, False, "call sagebwd.sage_attention(..., return_lse=True)")
        _refuse("return_attn_probs", return_attn_probs, False, "the weights are never formed")
        window = (-1, -1) if window_size in (None, [-1, -1]) else window_size
        _refuse("window_size", window, (-1, -1), "call sagebwd.sage_attention(..., window=...)")
        _refuse("softcap", softcap, 0.0, "use a flash-attention backend")
        _refuse("deterministic", deterministic, False, "use sagebwd.switches(deterministic=True)")
        _refuse("_parallel_config", _parallel_config, None, "it is context parallelism; use 'native'")
        if attn_mask is not None and is_causal:
            raise NotImplementedError(
                "is_causal=True with an attn_mask is not supported by the attention backend 'sagebwd'; "
                "accepted: one of the two"
            )
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]  # two dimensions are (batch, kv_tokens), as the native backend has it
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = sage_attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, recipe=recipe, impl=impl)
        return out.transpose(1, 2)

    return attention


def _refuse(name: str, value: object, accepted: object, advice: str) -> None:
    if value != accepted:
        raise NotImplementedError(
            f"{name}={value} is not supported by the attention backend 'sagebwd'; accepted: {accepted}; {advice}"
        )
