"""Trainable low-bit attention for PyTorch: forward and backward on INT8 and FP8 tensor cores.

from sagebwd import sage_attention
out = sage_attention(query, key, value, is_causal=True)   # as scaled_dot_product_attention
out.sum().backward()
"""

import warnings

with warnings.catch_warnings():
    # without NumPy, which sagebwd does not use, some versions of torch say so where their tracing is first imported
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    from sagebwd.attention import sage_attention, sage_attention_varlen
    from sagebwd.counts import summary
    from sagebwd.explain import explain, explain_varlen
    from sagebwd.integrations.sdpa import install_sdpa, replace_sdpa, uninstall_sdpa
    from sagebwd.norm_rope import qk_norm_rope, qk_norm_rope_attention
    from sagebwd.planning.mask_argument import read_block_mask, read_mask
    from sagebwd.recipe import RECIPES, Recipe
    from sagebwd.switches import switches
    from sagebwd.version import __version__

__all__ = [
    "RECIPES",
    "Recipe",
    "__version__",
    "explain",
    "explain_varlen",
    "install_sdpa",
    "qk_norm_rope",
    "qk_norm_rope_attention",
    "read_block_mask",
    "read_mask",
    "replace_sdpa",
    "sage_attention",
    "sage_attention_varlen",
    "summary",
    "switches",
    "uninstall_sdpa",
]


def __getattr__(name: str) -> object:
    """Raises AttributeError: of ``register``, which three integrations have, with the modules that it is in."""
    if name == "register":
        parts = ", ".join(f"sagebwd.integrations.{part}" for part in ("transformers", "diffusers", "torch_registry"))
        raise AttributeError(f"module 'sagebwd' has no attribute 'register'; import it from one of {parts}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
