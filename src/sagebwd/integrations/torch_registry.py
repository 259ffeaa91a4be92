"""torch's own registry of flash-attention kernels: scaled_dot_product_attention's flash backend in low precision.

    register()
    activate_flash_attention_impl("sagebwd")     # CUDA tensors; until restore_flash_attention_impl()

What is taken over is ``aten::_scaled_dot_product_flash_attention``, above autograd: its gradient is that of sagebwd's
own operator, which keeps the codes that backward reads. torch's backward operator by itself is given no codes, and so
is refused. What torch gives to another backend (masks, FP32, head_dim over 256) does not come here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagebwd import counts, dispatch
from sagebwd.attention import sage_attention
from sagebwd.auto import torch_attention
from sagebwd.recipe import AUTO, Recipe

NAME = "sagebwd"
_FORWARD, _BACKWARD = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"
_OTHERS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def register(recipe: str | Recipe = AUTO, impl: str | None = None) -> None:
    """Make ``activate_flash_attention_impl("sagebwd")`` known to torch; nothing is active yet.

    Args: recipe, impl: as in `sage_attention`, of all calls while active. "auto" is `mixed` on compute capability 9.0
    and `token` elsewhere, on some cards with dP in INT8, at every length: torch has chosen its flash backend already.
    Again, with others, they hold from the next activation on.

    Raises ValueError for an unknown recipe or impl; NotImplementedError where this torch has no such registry.
    """
    Recipe.parse_or_auto(recipe)
    dispatch.check_known(impl)
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise NotImplementedError(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; tested with torch "
            "2.13. sagebwd.replace_sdpa needs none"
        ) from error
    counts.log_at_exit()
    register_flash_attention_impl(NAME, register_fn=lambda: activate(recipe, impl))


class Activation:
    """What torch's registry holds while sagebwd is active; `remove` takes it back."""

    def __init__(self, library: Library, previous: Callable) -> None:
        self._library: Library | None = library
        self._previous = previous

    def remove(self) -> None:
        """Give torch's operators their own kernels again."""
        if self._library is not None:
            self._library._destroy()
            self._library = None
            torch_attention._sdpa = self._previous


def activate(recipe: str | Recipe = AUTO, impl: str | None = None, device: str = "CUDA") -> Activation:
    """Put sagebwd under torch's operators for a device, by its dispatch key.

    torch's registry calls it for "CUDA". With "CPU" torch's operator, called itself, runs the reference.
    """

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor | int | None, ...]:
        _refuse(query, key, dropout_p, is_causal, return_debug_mask)
        grouped = query.shape[1] != key.shape[1]
        out, lse = sage_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=grouped, recipe=recipe, impl=impl,
            return_lse=True,
        )  # fmt: skip
        seeds = (torch.zeros(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
        return out, lse, None, None, query.shape[2], key.shape[2], *seeds, query.new_empty(0)

    library = Library("aten", "IMPL")
    for key in (f"Autograd{device}", device):  # the latter alone in torch.inference_mode
        library.impl(_FORWARD, forward, key)
    library.impl(_BACKWARD, _refuse_backward, device)
    # what "auto" hands to torch in full precision must not come back here
    previous = torch_attention._sdpa
    torch_attention._sdpa = _without_flash
    return Activation(library, previous)


def _without_flash(*arguments: object, **options: object) -> Tensor:
    with sdpa_kernel(_OTHERS):
        return torch._C._nn.scaled_dot_product_attention(*arguments, **options)


def _refuse(query: Tensor, key: Tensor, dropout_p: float, is_causal: bool, return_debug_mask: bool) -> None:
    """Raises NotImplementedError for what sagebwd's kernels do not compute as torch's flash backend does."""
    if dropout_p:
        reason = f"dropout_p={dropout_p}, which each of its kernels would draw again; set it to 0"
    elif return_debug_mask:
        reason = "return_debug_mask=True; its kernels never form the weights"
    elif is_causal and query.shape[2] != key.shape[2]:
        reason = (
            f"is_causal with {query.shape[2]} queries and {key.shape[2]} keys, which torch's kernels align bottom "
            "right; use sagebwd.sage_attention_varlen"
        )
    elif type(query).__module__.startswith("torch.distributed"):
        reason = (
            f"{type(query).__name__}, as in torch's context_parallel; use "
            "sagebwd.integrations.context_parallel.ring_attention"
        )
    else:
        return
    raise NotImplementedError(
        f"activate_flash_attention_impl('sagebwd') does not support {reason}, or call restore_flash_attention_impl()"
    )


def _refuse_backward(*arguments: object, **options: object) -> tuple[Tensor, ...]:
    raise NotImplementedError(
        f"aten::{_BACKWARD} called by itself is not supported by activate_flash_attention_impl('sagebwd'): it is "
        "given no codes of the forward. Differentiate the forward by autograd, or call restore_flash_attention_impl()"
    )
