"""Every model of Transformers that builds small, under attn_implementation="sagebwd" in full precision beside SDPA.

    python -m tools.sweep_transformers --table docs/integrations/models.md
    python -m tools.sweep_transformers llama bert --jobs 1

Each model type, towers of those of several parts among them, runs in a process of its own: forward and backward as it
is, padded right and left, and ``generate`` with a dynamic and a static cache, on a CPU, with the same random weights.
A row is ``same`` where all that SDPA can run agrees within a relative error of 1e-3, ``refused`` where an error of
ours names why, ``no call`` where the model never asks for an attention function, else ``different`` or ``crash``.

The exit status is 1 where a row is different or a crash.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
)
from transformers.models.auto import modeling_auto

from sagebwd.integrations import transformers as integration

NEAR = 1e-3
SECONDS = 150
BATCH, TOKENS, REAL, VOCABULARY, PIXELS = 2, 12, 7, 99, 32

OTHERS = [mapping for name, mapping in vars(modeling_auto).items() if name.startswith("MODEL_FOR_")]
OTHERS = [mapping for mapping in OTHERS if isinstance(mapping, type(MODEL_MAPPING))]

# what default configs are made small by, where they have the attribute
SMALL = {
    2: (
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers depth "
        "num_decoder_layers num_key_value_heads num_kv_heads n_kv_heads num_local_experts num_experts n_routed_experts"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "encoder_num_attention_heads decoder_num_attention_heads"
    ),
    8: (
        "patch_size head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim sliding_window attention_chunk_size "
        "local_attention rotary_dim index_block_size"
    ),
    16: "q_lora_rank kv_lora_rank index_head_dim",
    32: (
        "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim encoder_hidden_size image_size "
        "projection_dim model_dim out_hidden_size projection_size cross_attention_hidden_size"
    ),
    64: (
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner moe_intermediate_size "
        "shared_expert_intermediate_size intermediate_size_mlp dense_intermediate_size shared_intermediate_size"
    ),
    VOCABULARY: "vocab_size text_vocab_size vocab_size_per_layer_input",
    128: "max_position_embeddings n_positions max_source_positions max_target_positions",
}  # fmt: skip
SIZES = {name: value for value, names in SMALL.items() for name in names.split()}
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def shrunk(config):
    """The config with small sizes, without dropout, and its parts likewise."""
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            shrunk(getattr(config, name))
    for name, value in list(vars(config).items()):
        if name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, SIZES[name]))
        elif name in SIZES and isinstance(value, (list, tuple)) and len(value) == 2 and name.endswith("_size"):
            setattr(config, name, type(value)([SIZES[name]] * 2))
        elif ("drop" in name or name == "layerdrop") and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name in TOKEN_IDS and value is not None:
            setattr(config, name, TOKEN_IDS[name])
    if getattr(config, "kv_lora_rank", None) and getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = config.num_attention_heads
    for name, value in (
        ("num_experts_per_tok", 2),
        ("top_k_experts", 2),
        ("moe_topk", 2),
        ("n_group", 1),
        ("topk_group", 1),
    ):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), value))
    rope = getattr(config, "rope_parameters", None) or {}
    known = getattr(type(config), "ignore_keys_at_rope_validation", None) or ()
    if isinstance(rope, dict) and "mrope_section" in {*rope, *known} and hasattr(config, "num_attention_heads"):
        heads = config.hidden_size // config.num_attention_heads
        half = (getattr(config, "head_dim", None) or heads) // 2
        rope["mrope_section"] = [half // 2, half // 4, half - half // 2 - half // 4]
    layers = getattr(config, "num_hidden_layers", None)
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_types", "layers_block_type"):
        value = getattr(config, name, None)
        if isinstance(value, list) and isinstance(layers, int) and len(value) > layers:
            setattr(config, name, [value[0], value[-1]][:layers])
    return config


def models_of(config):
    """The class to build: a causal language model where there is one, else the bare model, else any."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_MAPPING, *OTHERS):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
    return None


def anywhere(config, name, default):
    """An attribute of a config or of one of its parts."""
    places = (config, *(getattr(config, part, None) for part in config.sub_configs))
    return next((found for place in places if (found := getattr(place, name, None)) is not None), default)


def inputs_of(model):
    """Random inputs by the name of the model's main one, and whether they are tokens."""
    generator = torch.Generator().manual_seed(0)
    config, name = model.config, model.main_input_name
    if name == "pixel_values":
        size = anywhere(config, "image_size", PIXELS)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = anywhere(config, "num_channels", 3)
        return {name: torch.rand(BATCH, channels, height, width, generator=generator)}, False
    if name == "input_values":
        return {name: torch.randn(BATCH, 4000, generator=generator)}, False
    if name == "input_features":
        bins, frames = anywhere(config, "num_mel_bins", 80), 2 * anywhere(config, "max_source_positions", 64)
        shape = (BATCH, bins, frames) if hasattr(config, "max_source_positions") else (BATCH, frames, bins)
        return {name: torch.randn(shape, generator=generator)}, False
    ids = {"input_ids": torch.randint(3, 60, (BATCH, TOKENS), generator=generator)}
    if model.config.is_encoder_decoder:
        ids["decoder_input_ids"] = torch.randint(3, 60, (BATCH, TOKENS), generator=generator)
    return ids, True


def with_an_image(model, inputs, is_text):
    """The inputs with random pixels beside the tokens, for models that cannot do without."""
    vision = getattr(model.config, "vision_config", None)
    if not is_text or vision is None:
        return inputs
    size = getattr(vision, "image_size", PIXELS)
    size = size if isinstance(size, int) else size[0]
    pixels = torch.rand(BATCH, 3, size, size, generator=torch.Generator().manual_seed(1))
    return inputs | {"pixel_values": pixels}


def first_tensor(out):
    """The output that is compared."""
    for name in ("logits", "last_hidden_state", "logits_per_image"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    return next(value for value in out.values() if isinstance(value, torch.Tensor) and value.is_floating_point())


def outcome(model, run, inputs, is_text):
    """What one run of a model gives, as one vector."""
    torch.manual_seed(0)
    if run in ("dynamic", "static"):
        keep = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        kind = {} if run == "dynamic" else {"cache_implementation": "static"}
        ids = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
        out = model.generate(**ids, **keep, **kind, eos_token_id=None, pad_token_id=0)
        return torch.cat([x.flatten() for x in out.logits]).float()
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    if run in ("right", "left"):
        mask[1, REAL:] = 0
        mask = mask.flip(1) if run == "left" else mask
        inputs = inputs | {"attention_mask": mask}
    out = first_tensor(model(**inputs))
    if is_text and not model.config.is_encoder_decoder and out.shape[:2] == mask.shape:
        out = out[mask == 1]
    model.zero_grad()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))  # a sum of squares may be constant
    (out.float() * weights).mean().backward()
    gradients = torch.cat([weight.grad.flatten().float() for weight in model.parameters() if weight.grad is not None])
    return torch.cat([x / x.norm().clamp(min=1e-12) for x in (out.detach().flatten().float(), gradients)])


def sweep_one(model_type):
    """(status, words) of one model type."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    calls = 0

    def counted(*arguments, **options):
        nonlocal calls
        calls += 1
        return integration.attention(*arguments, **options)

    integration.register()
    integration.AttentionInterface.register("sagebwd", counted)
    try:
        models = {}
        for implementation in ("sdpa", "sagebwd"):
            config = shrunk(CONFIG_MAPPING[model_type]())
            model_class = models_of(config)
            if model_class is None:
                return "no model", ""
            if "CausalLM" in model_class.__name__ or "LMHead" in model_class.__name__:
                config.is_decoder = True  # a BERT that generates, say
            torch.manual_seed(0)
            try:
                models[implementation] = model_class._from_config(config, attn_implementation=implementation).eval()
            except Exception as error:
                if implementation == "sagebwd":
                    return judged(error)
                if "scaled_dot_product_attention" not in str(error) and "sdpa" not in str(error):
                    raise
                config = shrunk(CONFIG_MAPPING[model_type]())
                torch.manual_seed(0)
                models["sdpa"] = model_class._from_config(config, attn_implementation="eager").eval()
        models["sagebwd"].config.sagebwd = {"recipe": "full"}
        if sum(weight.numel() for weight in models["sdpa"].parameters()) > 5e7:
            return "not built", "more than 50M weights"
        inputs, is_text = inputs_of(models["sdpa"])
        try:
            outcome(models["sdpa"], "plain", inputs, is_text)
        except Exception as error:
            seen = with_an_image(models["sdpa"], inputs, is_text)
            if seen is inputs:
                raise
            inputs = seen
            try:
                outcome(models["sdpa"], "plain", inputs, is_text)
            except Exception:
                raise error from None
    except Exception as error:
        return "not built", f"{type(error).__name__}: {str(error)[:100]}"
    runs = ["plain", *(("right", "left") if is_text else ())]
    if is_text and models["sdpa"].can_generate():
        runs += ["dynamic", "static"]
    same, refused = [], []
    for run in runs:
        try:
            expected = outcome(models["sdpa"], run, inputs, is_text)
            again = outcome(models["sdpa"], run, inputs, is_text)
        except Exception:  # what SDPA cannot run either
            continue
        if not torch.isfinite(expected).all() or not torch.equal(expected, again):
            continue
        before = calls
        try:
            actual = outcome(models["sagebwd"], run, inputs, is_text)
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
    if not refused:
        return "same", " ".join(same)
    return "refused", f"{refused[0][1]}" + (f" (same: {' '.join(same)})" if same else "")


def judged(error):
    """Whether an error is a refusal by name: one that sagebwd raises, of the kinds that say what is accepted."""
    text = str(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, (NotImplementedError, ValueError, TypeError)) and "/sagebwd/" in where.filename:
        return "refused", text
    return "crash", f"{type(error).__name__}: {text[:120]} ({Path(where.filename).name}:{where.lineno})"


def worker(model_type, pipe):
    """Sweep one model type in a process of its own, and send the row."""
    signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        pipe.send(sweep_one(model_type))
    except BaseException as error:  # the parent reports it
        pipe.send(("crash", f"{type(error).__name__}: {str(error)[:120]}"))


def sweep(names, jobs, report):
    """Run every case, ``jobs`` at a time, each forked from here where Transformers is imported."""
    context, rows, waiting, running = multiprocessing.get_context("fork"), {}, list(names), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=worker, args=(name, theirs))
            process.start()
            theirs.close()
            running[name] = (process, ours)
        for name, (process, pipe) in list(running.items()):
            if pipe.poll(0.05):
                try:
                    rows[name] = pipe.recv()
                except EOFError:
                    rows[name] = ("not built", f"took more than {SECONDS} s or died")
                process.join()
                del running[name]
                report(name, rows[name], len(rows), len(names))
        time.sleep(0.02)
    return rows


def reason(words):
    """A refusal's own words, without what differs from model to model."""
    words = " ".join(words.split()).replace("|", "/")
    words = re.sub(r" \(same: .*\)$", "", words)
    words = re.sub(r"\(\d+(, \d+)*\)", "(...)", re.sub(r"^\w+ computes its", "the model computes its", words))
    if "packed documents: " in words:
        return "the model's attention mask: " + words.split("packed documents: ")[1].split(";")[0]
    return re.split(r"[,;]? (?:and cannot run|which is|is|which has|\bnot) (?:under|not|supported|causal)", words)[0]


def table(rows):
    """The page of the documentation."""
    count = collections.Counter(status for status, _ in rows.values())
    lines = [
        "# Transformers' models, one by one", "",
        "Printed by `python -m tools.sweep_transformers --table docs/integrations/models.md`, which says what is run: "
        f"transformers {transformers.__version__}, torch {torch.__version__}, a CPU, recipe `full` beside SDPA.", "",
        f"{len(rows)} model types: " + ", ".join(f"{n} {status}" for status, n in count.most_common()) + ".", "",
    ]  # fmt: skip
    meanings = {
        "same": "Forward, gradients, padding on either side and generation with a dynamic and a static cache, "
        "as far as SDPA runs them.",
        "refused": "An error names what is not supported.",
        "no call": "The model does not ask for an attention function in what was run.",
        "different": "", "crash": "",
        "no model": "A config that no auto class builds a model of: part of another, or the same by another name.",
        "not built": "Not built small from its default config, or SDPA does not run it with random inputs: "
        "nothing is known of it.",
    }  # fmt: skip
    for status, meaning in meanings.items():
        chosen = {name: words for name, (kind, words) in rows.items() if kind == status}
        if not chosen:
            continue
        lines += [f"## {status.capitalize()} ({len(chosen)})", "", *([meaning, ""] if meaning else [])]
        if status in ("same", "no call", "no model", "not built"):
            lines += [", ".join(f"`{name}`" for name in chosen) + ".", ""]
            continue
        grouped = collections.defaultdict(list)
        for name, words in chosen.items():
            grouped[reason(words)].append(f"`{name}`")
        lines += ["| why | model types |", "| --- | --- |"]
        lines += [f"| {why} | {', '.join(names)} |" for why, names in sorted(grouped.items())] + [""]
    return "\n".join(lines)


def main():
    """Sweep the models named, or all; exit status 1 where a row is different or a crash."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="model types; all by default")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rows", type=Path, help="a file to write the rows to, as JSON")
    parser.add_argument("--table", type=Path, help="a file to write the page to")
    arguments = parser.parse_args()

    def report(name, row, done, total):
        print(f"[{done}/{total}] {name}: {row[0]}  {' '.join(row[1].split())[:150]}", flush=True)

    rows = sweep(arguments.models or sorted(CONFIG_MAPPING.keys()), arguments.jobs, report)
    rows = dict(sorted(rows.items()))
    if arguments.rows:
        arguments.rows.write_text(json.dumps(rows, indent=1))
    if arguments.table:
        arguments.table.write_text(table(rows))
    print(dict(collections.Counter(status for status, _ in rows.values())))
    return int(any(status in ("different", "crash") for status, _ in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
