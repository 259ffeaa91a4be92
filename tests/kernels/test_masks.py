"""The portable kernels under masks of any shape, against the recipe emulator."""

import dataclasses

import pytest
import torch

from tests.kernels.calls import KernelCall

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []

CALLS = {
    "bool-all-gqa": KernelCall(mask="bool-all", batch=2, heads=2),
    "bool-rows": KernelCall(mask="bool-rows", heads=1),
    "bool-columns": KernelCall(mask="bool-columns", heads=1, tokens_k=40),
    "bool-heads-causal": KernelCall(mask="bool-heads", tokens_q=140, tokens_k=140, is_causal=True),
    "bool-batch-window": KernelCall(mask="bool-batch", batch=2, heads=1, tokens_q=150, tokens_k=70, window=(60, 20)),
    "bool-matrix-key-mask": KernelCall(mask="bool-matrix", batch=2, heads=1, masked=True, with_dlse=True),
    "bias-all-gqa": KernelCall(mask="bias-all", batch=2, heads=4, kv_heads=2, tokens_k=70, with_dlse=True),
    "bias-rows": KernelCall(mask="bias-rows", heads=1, tokens_k=40),
    "bias-columns": KernelCall(mask="bias-columns", heads=1, tokens_k=40),
    "bias-matrix-causal-key-mask": KernelCall(mask="bias-matrix", heads=1, tokens_q=130, is_causal=True, masked=True),
    "bias-float32-window": KernelCall(mask="bias-float32", window=(50, 5)),
    "bias-fp16": KernelCall(mask="bias-all", dtype=torch.float16, heads=1),
    "one-token": KernelCall(mask="bias-none", tokens_q=1, tokens_k=1),
    "document": KernelCall(mask="document", tokens_q=270, tokens_k=270, heads=1),
    "one-block-of-documents": KernelCall(mask="document", batch=2, tokens_q=40, tokens_k=40, heads=1),
    "prefix-batch": KernelCall(mask="prefix", batch=2, tokens_q=70, tokens_k=140, heads=1, masked=True),
    "chunked": KernelCall(mask="chunked", tokens_q=130, tokens_k=130, head_dim=128, heads=1),
    "sinks-heads": KernelCall(mask="sinks", tokens_q=140, tokens_k=140, sink=12),
    "paper": KernelCall(mask="bool-all", recipe="paper", tokens_q=140, heads=1),
    "paper-bias": KernelCall(mask="bias-heads", recipe="paper", tokens_q=130, is_causal=True),
    "paper-document": KernelCall(mask="document", recipe="paper", tokens_q=270, tokens_k=270, heads=1),
    "paper-head-dim-256": KernelCall(mask="bool-all", recipe="paper", head_dim=256, tokens_q=140, heads=1),
    "paper-head-dim-192-document": KernelCall(mask="document", recipe="paper", head_dim=192, tokens_k=65, heads=1),
    "full": KernelCall(mask="bool-all", recipe="full", heads=1),
    "full-128-keys-head-dim-256": KernelCall(mask="bool-all", recipe="full(block_k=128)", head_dim=256, heads=1),
    "full-bias": KernelCall(mask="bias-all", recipe="full", heads=1),
    "smooth-q-bias": KernelCall(mask="bias-all", recipe="token(smooth_q=True)", heads=1),
    "first-key-int8": KernelCall(mask="bias-all", recipe="token(first_keys=0)", heads=1),
    "first-16-bool-gqa": KernelCall(mask="bool-all", recipe="token(first_keys=16)", batch=2, sink=12, place=5),
    "first-16-bias-key-mask": KernelCall(
        mask="bias-matrix", recipe="token(first_keys=16)", heads=1, tokens_q=130, is_causal=True, masked=True, every=4
    ),
    "first-16-bias-columns-of-few-keys": KernelCall(
        mask="bias-columns", recipe="token(first_keys=16)", heads=1, tokens_k=9
    ),
    "first-16-bias-rows": KernelCall(mask="bias-rows", recipe="token(first_keys=16)", heads=1, tokens_k=40),
    "first-16-bias-fp16": KernelCall(
        mask="bias-all", recipe="token(first_keys=16, smooth_q=True)", dtype=torch.float16, heads=1
    ),
    "first-16-document": KernelCall(
        mask="document", recipe="token(first_keys=16)", tokens_q=270, tokens_k=270, heads=1
    ),
    "first-16-tiles-far-apart": KernelCall(
        mask="prefix",
        recipe="token(first_keys=16, block_k=32)",
        batch=2,
        tokens_q=70,
        tokens_k=300,
        heads=1,
        masked=True,
        every=9,
    ),
    "first-16-sinks-heads": KernelCall(
        mask="sinks", recipe="token(first_keys=16)", tokens_q=140, tokens_k=140, sink=12, place=2
    ),
    "16bit-o": KernelCall(mask="bool-all", recipe="token(o=16bit)", heads=1),
    "16bit-gradients": KernelCall(mask="bias-all", recipe="token(dv=16bit, dq=16bit, dk=16bit)", heads=1),
    "blocks-32-128": KernelCall(mask="bool-all", recipe="token(block_q=32, block_k=128)", heads=1),
    "blocks-128-32": KernelCall(mask="bias-all", recipe="token(block_q=128, block_k=32)", heads=1),
    "head-dim-96": KernelCall(mask="bool-all", head_dim=96, heads=1),
    "head-dim-256": KernelCall(mask="bias-matrix", head_dim=256, tokens_k=70, heads=1),
}


@pytest.mark.parametrize("name", CALLS)
def test_is_the_recipe(name):
    dataclasses.replace(CALLS[name], device=DEVICE).check("triton")
