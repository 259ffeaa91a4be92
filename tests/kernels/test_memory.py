"""Bytes of a forward and backward at their peak, counted from what the Hopper host makes: no kernel runs."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
from sagebwd.call import Call, Saved, empty_like_rows
from sagebwd.kernels import device, replay
from sagebwd.kernels.gluon.gradients import float8_gradients
from sagebwd.recipe import Recipe

TOKENS, MIB = 16384, 2**20


class Made(TorchDispatchMode):
    """Adds up the bytes of tensors that are made, not viewed: a call made again makes them all at once."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__.removeprefix("new_").startswith(("empty", "zeros")):
            self.total += result.untyped_storage().nbytes()
        return result


def peak(heads: int, kv_heads: int, head_dim: int, by_token: bool, monkeypatch) -> int:
    """Bytes beyond the inputs while the kernel of a backward of ``mixed`` runs."""

    def rows(heads: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        shape = (1, TOKENS, heads) if by_token else (1, heads, TOKENS)
        x = torch.empty(*shape, head_dim, dtype=dtype, device="meta")
        return x.transpose(1, 2) if by_token else x

    q, k = rows(heads), rows(kv_heads)
    call = Call.of(q, k, None, None, None, TOKENS, TOKENS, False, -1, -1, 1.0, Recipe.named("mixed"))
    codes = [torch.empty(x.shape, dtype=torch.int8, device="meta") for x in (q, k)]
    of_query, of_key = (x.per_token(q.device) for x in (call.queries, call.keys))
    k_mean = torch.empty(1, kv_heads, head_dim, device="meta")
    saved = Saved(empty_like_rows(q), of_query, codes[0], of_query, codes[1], of_key, of_query, None, k_mean)
    monkeypatch.setattr(device, "num_sms", lambda device: 132)
    monkeypatch.setattr(replay, "_start", lambda *arguments, **options: None)
    with Made() as made:
        float8_gradients(call, saved, q, None, k)
    return sum(x.nbytes for x in saved if x is not None) + made.total


def flash_attention_4(heads: int, kv_heads: int, head_dim: int) -> int:
    """The same of FlashAttention-4: O, lse, gradients, dQ's sums and two values a query in FP32."""
    return TOKENS * (heads * (2 * head_dim + 4) + (2 * heads + 4 * kv_heads) * head_dim + heads * (4 * head_dim + 8))


@pytest.mark.parametrize("by_token", [False, True], ids=["heads", "tokens"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 16, 128), (16, 4, 128), (32, 32, 64), (32, 8, 64)])
def test_peak_is_within_a_quarter_of_flash_attention_4_s(heads, kv_heads, head_dim, by_token, monkeypatch):
    shape = heads, kv_heads, head_dim
    assert peak(*shape, by_token, monkeypatch) <= 1.25 * flash_attention_4(*shape)
