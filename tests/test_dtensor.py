"""DTensors of which batch or heads are divided among two processes, over gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sagebwd import qk_norm_rope, qk_norm_rope_attention, sage_attention, sage_attention_varlen
from tests.lab.training.runs import begin, finish

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build")

BATCH, HEADS, KV_HEADS, TOKENS = 2, 4, 2, 40
MASKS = {"none": None, "padding": (BATCH, 1, 1, TOKENS), "matrix": (TOKENS, TOKENS), "all": (BATCH, HEADS, 1, TOKENS)}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows() -> list[Tensor]:
    return [drawn(BATCH, heads, TOKENS, 16, seed=n) for n, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]


def outcome(attention, tensors, **options) -> list[Tensor]:
    """Outputs, and gradients of all that is differentiable."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    found = attention(*leaves, **options)
    loss = sum((x * (1 + torch.arange(x.numel()).view(x.shape) / 999)).sum() for x in found if x.requires_grad)
    return [*found, *torch.autograd.grad(loss, leaves)]


def divided_by_two() -> None:
    """Outputs and gradients are those of the undivided call, whole again; what is not covered is refused."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.experimental import implicit_replication

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    options = {"enable_gqa": True, "recipe": "token", "return_lse": True, "return_max_logits": True, "is_causal": True}
    logits = drawn(HEADS, seed=5)

    def dense(*tensors, attn_mask=None):
        *qkv, sinks = tensors
        found = sage_attention(*qkv, attn_mask, sinks=sinks, **options)
        return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in found]

    for placement, of_sinks in ((Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Replicate())):
        for name, shape in MASKS.items():
            if (name, placement) == ("all", Shard(1)):
                continue
            mask = shape if shape is None else drawn(*shape, seed=9) > -1
            whole = outcome(dense, [*rows(), logits], attn_mask=mask)
            parts = [distribute_tensor(x, mesh, [placement]) for x in rows()]
            if name == "all" or (name, placement) == ("padding", Shard(0)):
                mask = distribute_tensor(mask, mesh, [placement])
            found = outcome(dense, [*parts, distribute_tensor(logits, mesh, [of_sinks])], attn_mask=mask)
            for a, e in zip(found, whole, strict=True):
                torch.testing.assert_close(a.full_tensor() if hasattr(a, "full_tensor") else a, e)

    offsets = torch.tensor([0, 15, 40], dtype=torch.int32)

    def packed(*tensors):
        settings = {"recipe": "token", "return_lse": True, "return_max_logits": True}
        found = sage_attention_varlen(*tensors, offsets, offsets, 25, 25, **settings)
        return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in found]

    of_packed = [x[0].transpose(0, 1).contiguous() for x in rows()]
    found = outcome(packed, [distribute_tensor(x, mesh, [Shard(1)]) for x in of_packed])
    for a, e in zip(found, outcome(packed, of_packed), strict=True):
        torch.testing.assert_close(a.full_tensor() if hasattr(a, "full_tensor") else a, e)

    q, k, v = rows()
    by_heads = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    refused = {
        "tokens": ([distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)], {}),
        "another placement": ([by_heads[0], *(distribute_tensor(x, mesh, [Replicate()]) for x in (k, v))], {}),
        "heads that do not divide": ([distribute_tensor(x[:, :1], mesh, [Shard(1)]) for x in (q, k, v)], {}),
        "a mask of heads": (by_heads, {"attn_mask": drawn(*MASKS["all"]) > -1}),
        "of divided heads": (by_heads, {"attn_mask": distribute_tensor(drawn(*MASKS["all"]) > -1, mesh, [Shard(1)])}),
        "sinks of all heads": (by_heads, {"sinks": logits}),
    }
    for tensors, more in refused.values():
        with pytest.raises(NotImplementedError, match="a DTensor is not supported here; accepted: query, key and"):
            sage_attention(*tensors, enable_gqa=True, recipe="token", **more)
    plain = {"q_weight": drawn(16), "eps": 1e-6, "cos": drawn(TOKENS, 16), "sin": drawn(TOKENS, 16)}
    fused = {n: distribute_tensor(x, mesh, [Replicate()]) if torch.is_tensor(x) else x for n, x in plain.items()}
    for name in ("q_weight", "cos", "sin", "position_ids"):  # regression: an error of torch's, which named none
        given = fused | {name: plain.get(name, torch.arange(TOKENS))}
        with pytest.raises(TypeError, match=rf"{name}: a plain tensor beside .*give distribute_tensor\({name}, qu"):
            qk_norm_rope_attention(*by_heads, enable_gqa=True, **given)
    with implicit_replication():
        qk_norm_rope_attention(*by_heads, enable_gqa=True, **plain)
    with pytest.raises(TypeError, match=r"q_weight: a DTensor beside query, which is none; give q_weight.full_tensor"):
        qk_norm_rope(q, k, **fused)
    for attention in (sage_attention, qk_norm_rope_attention):
        with pytest.raises(TypeError, match="value: a plain tensor beside query"):
            attention(*by_heads[:2], v, enable_gqa=True)
    with pytest.raises(TypeError, match="dropout_p=False must be a number"):
        sage_attention(*by_heads, dropout_p=False, enable_gqa=True, recipe="token")
    dist.destroy_process_group()


def test_two_processes_attend_by_themselves():
    finish(begin(2, "cpu", divided_by_two))
