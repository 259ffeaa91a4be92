"""The portable kernels under masks of any shape, against the recipe emulator."""

import dataclasses

import pytest
import torch

from tests.attention_case import AttentionCase
from tests.gpus import DEVICE, on_gpu

pytest.importorskip("triton")

pytestmark = on_gpu

CALLS = {
    "bool-all-gqa": AttentionCase(mask="bool-all", batch=2, heads=2),
    "bool-rows": AttentionCase(mask="bool-rows", heads=1),
    "bool-columns": AttentionCase(mask="bool-columns", heads=1, tokens_k=40),
    "bool-heads-causal": AttentionCase(mask="bool-heads", tokens_q=140, tokens_k=140, is_causal=True),
    "bool-batch-band": AttentionCase(mask="bool-batch", batch=2, heads=1, tokens_q=150, tokens_k=70, window=(60, 20)),
    "bool-matrix-key-mask": AttentionCase(mask="bool-matrix", batch=2, heads=1, masked=True, with_dlse=True),
    "bias-all-gqa": AttentionCase(mask="bias-all", batch=2, heads=4, kv_heads=2, tokens_k=70, with_dlse=True),
    "bias-rows": AttentionCase(mask="bias-rows", heads=1, tokens_k=40),
    "bias-columns": AttentionCase(mask="bias-columns", heads=1, tokens_k=40),
    "bias-matrix-key-mask": AttentionCase(mask="bias-matrix", heads=1, tokens_q=130, is_causal=True, masked=True),
    "bias-float32-window": AttentionCase(mask="bias-float32", window=(50, 5)),
    "bool-window-without-end": AttentionCase(mask="bool-all", heads=1, tokens_q=140, window=(2**31 - 1, 5)),
    "bias-window-without-end": AttentionCase(mask="bias-all", heads=1, tokens_q=140, window=(20, 2**40)),
    "bias-fp16": AttentionCase(mask="bias-all", dtype=torch.float16, heads=1),
    "one-token": AttentionCase(mask="bias-none", tokens_q=1, tokens_k=1),
    "document": AttentionCase(mask="document", tokens_q=270, tokens_k=270, heads=1),
    "one-block-of-documents": AttentionCase(mask="document", batch=2, tokens_q=40, tokens_k=40, heads=1),
    "prefix-batch": AttentionCase(mask="prefix", batch=2, tokens_q=70, tokens_k=140, heads=1, masked=True),
    "chunked": AttentionCase(mask="chunked", tokens_q=130, tokens_k=130, head_dim=128, heads=1),
    "sinks-heads": AttentionCase(mask="sinks", tokens_q=140, tokens_k=140, sink=12),
    "paper": AttentionCase(mask="bool-all", recipe="paper", tokens_q=140, heads=1),
    "paper-bias": AttentionCase(mask="bias-heads", recipe="paper", tokens_q=130, is_causal=True),
    "paper-document": AttentionCase(mask="document", recipe="paper", tokens_q=270, tokens_k=270, heads=1),
    "paper-head-dim-256": AttentionCase(mask="bool-all", recipe="paper", head_dim=256, tokens_q=140, heads=1),
    "paper-head-dim-192-document": AttentionCase(mask="document", recipe="paper", head_dim=192, tokens_k=65, heads=1),
    "full": AttentionCase(mask="bool-all", recipe="full", heads=1),
    "full-128-keys-head-dim-256": AttentionCase(mask="bool-all", recipe="full(block_k=128)", head_dim=256, heads=1),
    "full-bias": AttentionCase(mask="bias-all", recipe="full", heads=1),
    "no-first-keys": AttentionCase(mask="bias-all", recipe="token(first_keys=0)", heads=1),
    "16bit-o": AttentionCase(mask="bool-all", recipe="token(o=16bit)", heads=1),
    "16bit-gradients": AttentionCase(mask="bias-all", recipe="token(dv=16bit, dq=16bit, dk=16bit)", heads=1),
    "blocks-32-128": AttentionCase(mask="bool-all", recipe="token(block_q=32, block_k=128)", heads=1),
    "blocks-128-32": AttentionCase(mask="bias-all", recipe="token(block_q=128, block_k=32)", heads=1),
    "head-dim-96": AttentionCase(mask="bool-all", head_dim=96, heads=1),
    "head-dim-256": AttentionCase(mask="bias-matrix", head_dim=256, tokens_k=70, heads=1),
    "first-16-bool-gqa": AttentionCase(mask="bool-all", batch=2, sink=12, place=5),
    "first-16-bias-key-mask": AttentionCase(
        mask="bias-matrix", heads=1, tokens_q=130, is_causal=True, masked=True, every=4
    ),
    "first-16-bias-columns-of-few-keys": AttentionCase(mask="bias-columns", heads=1, tokens_k=9),
    "first-16-tiles-far-apart": AttentionCase(
        mask="prefix",
        recipe="token(block_k=32)",
        batch=2,
        tokens_q=70,
        tokens_k=300,
        heads=1,
        masked=True,
        every=9,
    ),
    "first-16-sinks-heads": AttentionCase(mask="sinks", tokens_q=140, tokens_k=140, sink=12, place=2),
}


@pytest.mark.parametrize("name", CALLS)
def test_is_the_recipe(name):
    dataclasses.replace(CALLS[name], device=DEVICE).check("triton")
