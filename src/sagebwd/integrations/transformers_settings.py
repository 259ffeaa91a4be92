"""Which recipe a layer of a Transformers model runs, by ``config.sagebwd``, and which models can have one."""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache

from torch import nn

from sagebwd.extras import extra
from sagebwd.integrations.transformers_masks import USE_INSTEAD
from sagebwd.recipe import AUTO, Recipe

with extra("transformers"):
    from transformers import PreTrainedModel

NAME = "sagebwd"
_SETTINGS = ("recipe", "impl")
_EXAMPLE = {"0": {"recipe": "full"}}
# Of settings that a part was handed, these once more: so a saved or copied config says that they are not its own.
_INHERITED = "inherited"
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers")


def settings(config: object, layer: int | None) -> dict[str, object]:
    """The recipe and impl of one layer, from ``config.sagebwd``.

    Raises ValueError for a key that is not one of recipe, impl, fuse and layers, for a fuse that is not True or False,
    for a recipe that is no text and for layers that the model does not have; NotImplementedError for layers where an
    attention does not know its own.
    """
    given = getattr(config, NAME, None) or {}
    if not isinstance(given, dict):
        raise ValueError(f"config.sagebwd: got a {type(given).__name__}; accepted: a dictionary")
    if not isinstance(given.get("fuse", False), bool):
        raise ValueError(f"config.sagebwd: fuse is {given['fuse']!r}; accepted: True or False")
    chosen = {key: value for key, value in given.items() if key not in ("layers", "fuse", _INHERITED)}
    layers = given.get("layers")
    if layers:
        counts = [getattr(config, name, None) for name in _LAYER_COUNTS]
        chosen |= _layer(layers, layer, max((count for count in counts if isinstance(count, int)), default=None))
    unknown = [key for key in chosen if key not in _SETTINGS]
    if unknown:
        raise ValueError(f"config.sagebwd: {unknown[0]!r} is not known; accepted: recipe, impl, fuse, layers")
    recipe = chosen.get("recipe", AUTO)
    if isinstance(recipe, Recipe):
        raise ValueError(
            "config.sagebwd: recipe is a Recipe, which could not be saved in config.json; give its text, "
            f"{str(recipe)!r}"
        )
    return {"recipe": recipe, "impl": chosen.get("impl")}


def settings_of(module: nn.Module) -> dict[str, object]:
    """`settings` of an attention layer."""
    config = getattr(module, "config", None)
    given = getattr(config, NAME, None)
    has_layers = isinstance(given, dict) and bool(given.get("layers"))
    # read in vain it would be guarded: a layer that is compiled by itself could not stand for all
    return settings(config, getattr(module, "layer_idx", None) if has_layers else None)


def fuse_of(config: object) -> bool | None:
    """Whether ``config.sagebwd`` has its layers normalise and rotate with attention; None where it does not say."""
    if getattr(config, "_attn_implementation", None) != NAME:
        return False
    given = getattr(config, NAME, None)
    return given.get("fuse") if isinstance(given, dict) else None


def _layer(layers: dict[str | int, dict[str, object]], layer: int | None, count: int | None) -> dict[str, object]:
    """One layer's own settings, of keys that are numbers or, as JSON has them, texts."""
    if not isinstance(layers, dict):
        raise ValueError(f"config.sagebwd: layers is {layers!r}; accepted: a dictionary, as {_EXAMPLE}")
    numbered = {}
    for key, value in layers.items():
        if not isinstance(value, dict):
            raise ValueError(
                f"config.sagebwd: layers has {value!r} for {key!r}; accepted: a dictionary, as {_EXAMPLE}"
            )
        number = int(key) if isinstance(key, int) or (isinstance(key, str) and key.isdecimal()) else -1
        if isinstance(key, bool) or number < 0 or (count is not None and number >= count):
            known = "a layer's index" if count is None else f"0 to {count - 1}"
            raise ValueError(f"config.sagebwd: layers has {key!r}, which is no layer of the model; accepted: {known}")
        if number in numbered:
            raise ValueError(f"config.sagebwd: layers has {number} twice, as a number and as a text")
        numbered[number] = value
    if layer is None:
        raise NotImplementedError(
            "config.sagebwd: layers is not supported for this model, whose attentions have no layer_idx; "
            "give one recipe and impl for all"
        )
    return numbered.get(layer, {})


def check_model(model: PreTrainedModel) -> None:
    """Raises NotImplementedError for a model that computes attention itself, and so would make no call."""
    parts = model.config.sub_configs
    attends = not parts or hasattr(model.config, "num_attention_heads")  # and not its parts alone
    if attends and not _calls_attention(type(model)):
        raise NotImplementedError(
            f"{type(model).__name__} computes its attention itself and cannot run under "
            f"attn_implementation='sagebwd'; {USE_INSTEAD}, for one part of a model as in "
            "attn_implementation={'text_config': 'sagebwd', 'vision_config': 'eager'}"
        )


def have_handed_down(model: PreTrainedModel) -> None:
    """Have a model of which a part, or it itself, runs "sagebwd" hand its settings down at every forward.

    At those of its parts too, which it may call past its own, as in ``get_image_features`` and ``generate``.
    """
    if not _runs_in(model.config):
        return
    hooks = model._forward_pre_hooks.values()
    hook = next((x for x in hooks if isinstance(x, _HandDown) and x.config is model.config), _HandDown(model.config))
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and hook not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(hook)
    hook()


def _runs_in(config: object) -> bool:
    """Whether a part of a config of several, or of such a part, has "sagebwd" for its attention."""
    return any(getattr(x, "_attn_implementation", None) == NAME or _runs_in(x) for x in _parts(config))


def _parts(config: object) -> list[object]:
    found = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    return [x for x in found if x is not None]


@cache
def _calls_attention(model_class: type) -> bool:
    """False where a model's module has attentions and none asks for a function, or chooses from a table.

    Also where one in use adds its mask itself and the model has no SDPA: it expects numbers, and gets a boolean.
    """
    names = [base.__module__ for base in model_class.__mro__ if ".modeling_" in base.__module__]
    try:
        source = inspect.getsource(sys.modules[names[0]])
    except (IndexError, KeyError, OSError, TypeError):
        return True
    attentions = re.findall(r"^class (\w*Attention\w*)\((.*?)(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)
    masks = re.compile(r"\+ \w*mask\b|\bmasked_fill\(\w*mask\b")
    itself = (name for name, code in attentions if "ALL_ATTENTION" not in code and masks.search(code))
    if not model_class._supports_sdpa and any(source.count(f"{name}(") > 1 for name in itself):
        return False
    own_table = re.search(r"ATTENTION_CLASSES\[[\w.]*config\._attn_implementation\]", source)
    return not own_table and ("ALL_ATTENTION_FUNCTIONS" in source or not attentions)


class _HandDown:
    """Gives ``config.sagebwd`` of a model of several parts to those, and their parts, that have none of their own.

    A hook has the config and not the model, which a part's hook would keep alive.
    """

    def __init__(self, config: object) -> None:
        self.config, self.before = config, None

    def __call__(self, _part: nn.Module | None = None, _inputs: object = None) -> None:
        given = getattr(self.config, NAME, None)
        if given == self.before:
            return
        if isinstance(given, dict) and "layers" in given:
            raise ValueError(
                "config.sagebwd: layers is not known in a config of several parts; accepted: in that of one, as in "
                f"config.{next(iter(self.config.sub_configs))}.sagebwd"
            )
        settings(self.config, None)  # raises for what is none
        _give(self.config, given)
        self.before = None if given is None else dict(given)  # which may be changed in place


def _give(config: object, given: dict[str, object] | None) -> None:
    """Parts that have none of their own: a model may call those of its parts past these."""
    for part in _parts(config):
        own = getattr(part, NAME, None)
        if own is None or (isinstance(own, dict) and _INHERITED in own and own == _handed(own[_INHERITED])):
            setattr(part, NAME, None if given is None else _handed(given))
            _give(part, given)


def _handed(given: dict[str, object]) -> dict[str, object]:
    """Settings as a part is handed them."""
    plain = {key: value for key, value in given.items() if key != _INHERITED}
    return {**plain, _INHERITED: plain}
