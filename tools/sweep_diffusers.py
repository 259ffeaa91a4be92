"""Diffusers' models with the tiny configs of its own tests, under the backend "sagebwd" beside torch's own attention.

    python -m tools.sweep_diffusers --tests ../diffusers --table benchmarks/results/diffusers-models.md
    python -m tools.sweep_diffusers                        # which models ask for a backend, by their source

``--tests`` names a checkout of Diffusers of about the version that is installed, where ``tests/models`` is. Each model
runs forward and backward in a process of its own, on a CPU, in full precision and with the same random weights. A row
is ``same`` where output and gradients agree within a relative error of 1e-3, ``refused`` where an error of ours names
why, ``no call`` where there is nothing to take over, else ``different`` or ``crash``. A model that does not ask for a
backend runs under `replace_sdpa` instead.

The exit status is 1 where a row is different or a crash.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import warnings
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import diffusers
import torch
from diffusers.models import attention_dispatch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sagebwd.environment import write_whole
from sagebwd.integrations import diffusers as integration
from sagebwd.integrations.sdpa import replace_sdpa
from tools import sweep
from tools.sweep import NEAR, NotRun, failed, judged, kept, table

MEANINGS = {
    "same": "Output and gradients, by the backend.",
    "same by replace_sdpa": "The model does not ask for a backend, and computes as before under it. Under "
    "[`replace_sdpa`](../../docs/integrations/sdpa.md) output and gradients are the same.",
    "refused": "An error names what is not supported.",
    "no call": "The model neither asks for a backend nor calls torch's attention in what was run.",
    "different": "",
    "crash": "",
    "not built": "Its test has no tiny model that runs here: nothing is known of it.",
}


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


def print_answers() -> None:
    """Print the models by answer."""
    found: dict[str, list[str]] = {"all": [], "some": [], "none": [], "no attention": [], "not built": []}
    for name in sorted(dir(diffusers)):
        model_class = getattr(diffusers, name, None)
        is_model = isinstance(model_class, type) and issubclass(model_class, diffusers.ModelMixin)
        if is_model and model_class is not diffusers.ModelMixin:
            found[answers(model_class)].append(name)
    print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
    for answer, names in found.items():
        print(f"\n{answer} ({len(names)}): {', '.join(names)}")


def testers_of(file: Path) -> Iterator[type]:
    """The classes of a file of Diffusers' tests that say how to build a model and what to hand it."""
    module = importlib.import_module(f"tests.models.{file.parent.name}.{file.stem}")
    for tester in list(vars(module).values()):
        if isinstance(tester, type) and tester.__module__ == module.__name__ and hasattr(tester, "get_dummy_inputs"):
            yield tester


def outcome(model: torch.nn.Module, inputs: dict[str, object]) -> Tensor:
    """The output and the gradients of all weights, each of norm 1, as one vector."""
    torch.manual_seed(0)
    out = model(**copy.deepcopy(inputs))
    leaves = tree_leaves(tuple(out.values()) if isinstance(out, dict) else out)
    out = torch.cat([x.flatten().float() for x in leaves if isinstance(x, Tensor) and x.requires_grad])
    model.zero_grad()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))  # a sum of squares may be constant
    (out * weights).mean().backward()
    gradients = torch.cat([weight.grad.flatten().float() for weight in model.parameters() if weight.grad is not None])
    return torch.cat([x / x.norm().clamp(min=1e-12) for x in (out.detach(), gradients)])


def compare(tester: type) -> sweep.Row:
    """(status, words) of one tester's model; raises what torch's own attention raises where that does not run."""
    tester = tester()
    torch.manual_seed(0)
    model = tester.model_class(**tester.get_init_dict()).eval()
    inputs = tester.get_dummy_inputs()
    with attention_dispatch.attention_backend("native"):
        expected, again = outcome(model, inputs), outcome(model, inputs)
    if not torch.isfinite(expected).all() or not torch.equal(expected, again):
        raise NotRun("torch's own output is not finite, or not the same twice")
    calls = 0
    sage_attention = integration.sage_attention

    def counted(*arguments: object, **options: object) -> Tensor:
        nonlocal calls
        calls += 1
        return sage_attention(*arguments, **options)

    integration.sage_attention = counted
    integration.register("full", "reference")
    try:
        with attention_dispatch.attention_backend("sagebwd"):
            actual = outcome(model, inputs)
        status = "same"
        if not calls:
            with replace_sdpa("full", "reference", unsupported="raise") as replacement:
                actual = outcome(model, inputs)
            status, calls = "same by replace_sdpa", replacement.counts["replaced"]
    except Exception as error:
        return judged(error)
    if not calls:
        return "no call", ""
    error = ((actual - expected).norm() / expected.norm()).item()
    return (status, f"{calls} calls") if error < NEAR else ("different", f"{error:.2g}")


def sweep_one(name: str, testers: dict[str, list[type]]) -> sweep.Row:
    """(status, words) of one model: of the first tester of it that runs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    why = []
    for tester in testers[name]:
        try:
            return compare(tester)
        except Exception as error:
            why.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    return "not built", why[0]


def main() -> int:
    """Sweep the models named, or all; exit status 1 where a row is different or a crash."""
    given = sweep.arguments(__doc__, "names of model classes", "Diffusers")
    warnings.simplefilter("ignore")
    if given.tests is None:
        print_answers()
        return 0
    sys.path.insert(0, str(given.tests))
    testers: dict[str, list[type]] = {}
    rows: dict[str, sweep.Row] = {}
    for file in sorted((given.tests / "tests" / "models").glob("*/test_models_*.py")):
        try:
            for tester in testers_of(file):
                model_class = tester().model_class
                if hasattr(diffusers, model_class.__name__):
                    testers.setdefault(model_class.__name__, []).append(tester)
        except ImportError as error:
            rows[file.stem] = ("not built", f"{type(error).__name__}: {error}")
    rows |= sweep.rows_of(given.models or sorted(testers), partial(sweep_one, testers=testers), given.jobs)
    rows = kept(given.rows, rows)
    if given.table:
        command = "python -m tools.sweep_diffusers --tests ../diffusers --table benchmarks/results/diffusers-models.md"
        versions = f"diffusers {diffusers.__version__}, torch {torch.__version__}"
        write_whole(given.table, table("Diffusers' models, one by one", command, versions, rows, MEANINGS))
    return failed(rows)


if __name__ == "__main__":
    sys.exit(main())
