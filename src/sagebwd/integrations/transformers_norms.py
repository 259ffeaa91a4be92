"""A norm of queries and keys for models of Transformers that have none, which INT8 pre-training wants."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from sagebwd.extras import extra

with extra("transformers"):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


def add_qk_norm(model: nn.Module) -> nn.Module:
    """Give every attention of a model an RMS norm of queries and keys: per head, with a gain, before rotary embedding.

    It is what Qwen3 has, under the same names, ``q_norm`` and ``k_norm``, and bounds the logits. For models that are
    still to be trained. eps is the config's rms_norm_eps, or else 1e-6. The weights are saved with the others, but a
    plain ``from_pretrained`` has no place for them: docs/integrations/transformers.md#qk-norm has three ways to load
    them.

    Args:
        model: of Transformers, changed in place, before it is compiled or sharded. Its attentions are the modules with
            ``q_proj`` and ``k_proj``, both nn.Linear to (batch, tokens, heads * head_dim), and ``head_dim``; with more
            than one tower, give the one that is meant.

    Returns:
        The model.

    Raises:
        ValueError: it has a norm of queries and keys already; or a projection is not of whole heads.
        NotImplementedError: there are no such attentions (one fused projection of q, k and v, LoRA's layers).
    """
    attentions = {name: module for name, module in model.named_modules() if _projects(module)}
    if not attentions:
        raise NotImplementedError(
            f"add_qk_norm: {type(model).__name__} has no attention with head_dim and with q_proj and k_proj of type "
            "nn.Linear; use a model that has QK-norm of its own, such as Qwen3"
        )
    for name, attention_module in attentions.items():
        present = [child for child, _ in attention_module.named_children() if "norm" in child]
        if present:
            raise ValueError(f"add_qk_norm: {name} has a norm already: {', '.join(present)}")
        for projection in (attention_module.q_proj, attention_module.k_proj):
            if projection.out_features % attention_module.head_dim:
                raise ValueError(
                    f"add_qk_norm: {name} projects to {projection.out_features}, "
                    f"which is not a multiple of head_dim {attention_module.head_dim}"
                )
    # the model's own kind, which its _init_weights knows how to start: Gemma's gain is 1 + weight
    own = next((type(module) for module in model.modules() if type(module).__name__.endswith("RMSNorm")), Qwen3RMSNorm)
    for attention_module in attentions.values():
        head_dim = attention_module.head_dim
        eps = getattr(getattr(attention_module, "config", None), "rms_norm_eps", 1e-6)
        for name, projection in (("q_norm", attention_module.q_proj), ("k_norm", attention_module.k_proj)):
            with projection.weight.device:
                norm = own(head_dim, eps=eps).to(projection.weight.dtype)
            attention_module.add_module(name, norm)
            projection.register_forward_hook(partial(_normalise_heads, norm, head_dim))
    return model


def _projects(module: nn.Module) -> bool:
    projections = (getattr(module, "q_proj", None), getattr(module, "k_proj", None))
    return isinstance(getattr(module, "head_dim", None), int) and all(isinstance(x, nn.Linear) for x in projections)


def _normalise_heads(
    norm: nn.Module, head_dim: int, projection: nn.Module, inputs: tuple, projected: Tensor
) -> Tensor:
    return norm(projected.unflatten(-1, (-1, head_dim))).flatten(-2)
