"""Every model of Transformers that builds small, under attn_implementation="sagebwd" in full precision beside SDPA.

    python -m tools.sweep_transformers --tests ../transformers --table benchmarks/results/transformers-models.md
    python -m tools.sweep_transformers llama bert

``--tests`` names a checkout of Transformers of about the version that is installed, whose tests have a tiny model of
nearly every type; without it more types are not built. Each model type, towers of those of several parts among them,
runs in a process of its own: forward and backward as it is, padded right and left, and ``generate`` with a dynamic and
a static cache, on a CPU, with the same random weights. A row is ``same`` where all that SDPA can run agrees within a
relative error of 1e-3, ``refused`` where an error of ours names why, ``no call`` where the model never asks for an
attention function, else ``different`` or ``crash``. A query that sees no key gives zeros under both (docs/masks.md).

The exit status is 1 where a row is different or a crash.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before Transformers reads it: a config may name weights

import torch
import transformers
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sagebwd.environment import write_whole
from sagebwd.integrations import transformers as integration
from sagebwd.masks.mask import HIDDEN_ELSE
from tools import sweep
from tools.sweep import NEAR, NotRun, failed, judged, kept, table
from tools.tiny_models import candidates, use_tests

COMMAND = (
    "python -m tools.sweep_transformers --tests ../transformers --table benchmarks/results/transformers-models.md"
)
MEANINGS = {
    "same": "Forward, gradients, padding on either side and generation with a dynamic and a static cache, as far as "
    "SDPA runs them.",
    "refused": "An error names what is not supported.",
    "no call": "The model does not ask for an attention function in what was run.",
    "different": "",
    "crash": "",
    "no model": "A config that Transformers has no model of.",
    "not built": "SDPA runs no tiny model of it here: nothing is known of it.",
}
# a decoder that sees the encoder's padding, and text that is summed up where a token is largest, padding or not
SEES_PADDING = ("diffusion_gemma", "xclip")


def first_tensor(out):
    """The output that is compared."""
    for name in ("logits", "last_hidden_state", "logits_per_image"):
        if isinstance(getattr(out, name, None), torch.Tensor):
            return getattr(out, name)
    leaves = tree_leaves(tuple(out.values()) if isinstance(out, dict) else out)
    return next(x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point() and x.requires_grad)


def outcome(model, run, tiny):
    """What one run of a model gives, as one vector."""
    torch.manual_seed(0)
    inputs = copy.deepcopy(tiny.inputs)
    if run in ("dynamic", "static"):
        keep = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        kind = {} if run == "dynamic" else {"cache_implementation": "static"}
        ids = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
        out = model.generate(**ids, **keep, **kind, eos_token_id=None, pad_token_id=0)
        return torch.cat([x.flatten() for x in out.logits]).float()
    if tiny.is_text:
        mask = torch.ones_like(inputs["input_ids"])
    if run in ("right", "left"):
        mask[-1, mask.shape[1] * 7 // 12 :] = 0
        mask = mask.flip(1) if run == "left" else mask
        inputs["attention_mask"] = mask
    out = first_tensor(model(**inputs))
    if tiny.is_text and out.shape[:2] == mask.shape:
        out = out[mask == 1]
    model.zero_grad()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))  # a sum of squares may be constant
    (out.float() * weights).mean().backward()
    gradients = torch.cat([weight.grad.flatten().float() for weight in model.parameters() if weight.grad is not None])
    return torch.cat([x / x.norm().clamp(min=1e-12) for x in (out.detach().flatten().float(), gradients)])


def sdpa(module, query, key, value, attention_mask, **options):
    """SDPA, where a mask's least numbers hide as -inf does: a row of them gives zeros, not the mean of V."""
    if isinstance(attention_mask, torch.Tensor) and attention_mask.is_floating_point():
        attention_mask = attention_mask.masked_fill(attention_mask <= HIDDEN_ELSE, float("-inf"))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def beside_sdpa(tiny):
    """The model under SDPA, or in eager mode where it has no SDPA."""
    try:
        model = tiny.model("sdpa")
    except Exception as error:
        if "scaled_dot_product_attention" not in str(error) and "sdpa" not in str(error):
            raise
        model = tiny.model("eager")
    if sum(weight.numel() for weight in model.parameters()) > 5e7:
        raise NotRun("more than 50M weights")
    return model


def compare(tiny):
    """(status, words) of one model; raises what SDPA raises where that does not run."""
    calls = 0

    def counted(*arguments, **options):
        nonlocal calls
        calls += 1
        return integration.attention(*arguments, **options)

    AttentionInterface.register("sagebwd", counted)
    full = beside_sdpa(tiny)
    try:
        model = tiny.model("sagebwd")
    except Exception as error:
        return judged(error)
    outcome(full, "plain", tiny)
    model.config.sagebwd = {"recipe": "full"}
    pads = tiny.is_text and full.config.model_type not in SEES_PADDING
    runs = ["plain", *(("right", "left") if pads else ())]
    if tiny.is_text and full.can_generate():
        runs += ["dynamic", "static"]
    same, refused = [], []
    for run in runs:
        try:
            expected = outcome(full, run, tiny)
            again = outcome(full, run, tiny)
        except Exception:  # what SDPA cannot run either
            continue
        if not torch.isfinite(expected).all() or not torch.equal(expected, again):
            continue
        before = calls
        try:
            actual = outcome(model, run, tiny)
        except Exception as error:
            status, words = judged(error)
            if status == "crash":
                return status, f"{run}: {words}"
            refused.append((run, words))
            continue
        if calls == before and run == "plain":
            return "no call", ""
        error = ((actual - expected).norm() / expected.norm()).item() if actual.shape == expected.shape else 9.0
        if not error < NEAR:
            return "different", f"{run}: {error:.2g}"
        same.append(run)
    if not refused and not same:
        raise NotRun("SDPA's own output is not finite, or not the same twice")
    if not refused:
        return "same", " ".join(same)
    return "refused", f"{refused[0][1]}" + (f" (same: {' '.join(same)})" if same else "")


def sweep_one(model_type, checkout=None):
    """(status, words) of one model type: of the first tiny model of it that runs under SDPA."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    why = []
    integration.register()
    AttentionInterface.register("sdpa", sdpa)
    try:
        for tiny in candidates(model_type, checkout):
            try:
                if isinstance(tiny, Exception):
                    raise tiny
                return compare(tiny)
            except Exception as error:
                why.append(f"{type(error).__name__}: {str(error).strip()[:120]}")
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
    missing = (words for words in why if words.startswith(("ImportError", "ModuleNotFoundError")))
    return ("not built", next(missing, why[-1])) if why else ("no model", "")


def main():
    """Sweep the models named, or all; exit status 1 where a row is different or a crash."""
    given = sweep.arguments(__doc__, "model types", "Transformers")

    if given.tests:
        use_tests(given.tests)
    names = given.models or sorted(CONFIG_MAPPING.keys())
    found = sweep.rows_of(names, partial(sweep_one, checkout=given.tests), given.jobs)
    rows = kept(given.rows, found)
    if given.table:
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        write_whole(given.table, table("Transformers' models, one by one", COMMAND, versions, rows, MEANINGS))
    return failed(rows)


if __name__ == "__main__":
    sys.exit(main())
