"""Which models of Diffusers ask its dispatcher for an attention backend, by their default configs, without weights.

    python -m tools.sweep_diffusers

A model whose attention processors do not call it accepts ``set_attention_backend("sagebwd")`` and computes as before.
"""

from __future__ import annotations

import inspect
import warnings
from functools import cache

import diffusers
import torch


@cache
def asks(processor_class: type) -> bool:
    """Whether a processor calls the dispatcher, by its source."""
    return "dispatch_attention_fn" in inspect.getsource(processor_class.__call__)


def answers(model_class: type) -> str:
    """ "all", "some" or "none" of a model's attentions; "no attention"; or "not built"."""
    try:
        with torch.device("meta"):
            model = model_class()
    except Exception:  # a config without defaults
        return "not built"
    processors = [module.processor for module in model.modules() if getattr(module, "processor", None) is not None]
    asked = sum(asks(type(processor)) for processor in processors)
    if not processors:
        return "no attention"
    return "none" if asked == 0 else "all" if asked == len(processors) else "some"


def main() -> None:
    """Print the models by answer."""
    warnings.simplefilter("ignore")
    found: dict[str, list[str]] = {"all": [], "some": [], "none": [], "no attention": [], "not built": []}
    for name in sorted(dir(diffusers)):
        model_class = getattr(diffusers, name, None)
        is_model = isinstance(model_class, type) and issubclass(model_class, diffusers.ModelMixin)
        if is_model and model_class is not diffusers.ModelMixin:
            found[answers(model_class)].append(name)
    print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
    for answer, names in found.items():
        print(f"\n{answer} ({len(names)}): {', '.join(names)}")


if __name__ == "__main__":
    main()
