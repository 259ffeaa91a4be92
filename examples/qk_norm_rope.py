"""A decoder's attention in plain PyTorch: norm of queries and keys, rotary embedding and attention in one call.

    python examples/qk_norm_rope.py             # sagebwd.qk_norm_rope_attention
    python examples/qk_norm_rope.py --composed  # torch's norm, rotation and attention, the same weights and data

It learns to repeat a random sequence, which takes attention: without it the loss stays at ln(32) = 3.47. A few seconds
on a CPU, where torch's operations and the recipe's emulator run; on a GPU it takes the kernels.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagebwd import qk_norm_rope_attention

VOCABULARY, LENGTH, WIDTH, HEADS, KV_HEADS, HEAD_DIM, EPS = 32, 8, 64, 4, 2, 16, 1e-6


def angles(tokens: int, base: float = 100.0) -> tuple[Tensor, Tensor]:
    """cos and sin, (tokens, head_dim): channels i and i + head_dim / 2 are a pair that turns by one angle."""
    turns = torch.arange(tokens)[:, None] * base ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turns = torch.cat((turns, turns), -1)
    return turns.cos(), turns.sin()


def composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    **rest: object,
) -> Tensor:
    """What `qk_norm_rope_attention` computes, by torch's operations."""
    q, k = F.rms_norm(q, q.shape[-1:], q_weight, eps), F.rms_norm(k, k.shape[-1:], k_weight, eps)
    q, k = (x * cos + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin for x in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Grouped heads, whose queries and keys are normalised by head and rotated."""

    def __init__(self, attend: object) -> None:
        super().__init__()
        self.attend = attend
        self.norm, self.q_norm, self.k_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)
        self.q, self.kv = (nn.Linear(WIDTH, n * HEAD_DIM, bias=False) for n in (HEADS, 2 * KV_HEADS))
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of (batch, tokens, width), the same."""
        y = self.norm(x)
        # (batch, heads, tokens, head_dim), views of what the projections wrote
        q, kv = (project(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for project in (self.q, self.kv))
        k, v = kv.chunk(2, 1)
        heads = self.attend(
            q, k, v, q_weight=self.q_norm.weight, k_weight=self.k_norm.weight, eps=EPS, cos=cos, sin=sin,
            is_causal=True, enable_gqa=True, recipe="token",
        )  # fmt: skip
        return x + self.out(heads.transpose(1, 2).flatten(2))


def train(steps: int = 60, use_composed: bool = False, device: str = "cpu") -> list[float]:
    """The loss of each step, on the half that can be known."""
    torch.manual_seed(0)
    attend = composed if use_composed else qk_norm_rope_attention
    tokens, layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Attention(attend) for _ in range(2))
    model = nn.ModuleList([tokens, layers, nn.Linear(WIDTH, VOCABULARY, bias=False)])
    model = model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cos, sin = (x.to(device) for x in angles(2 * LENGTH - 1))
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        ids = torch.randint(VOCABULARY, (64, LENGTH), generator=generator).to(device).repeat(1, 2)
        x = tokens(ids[:, :-1])
        for layer in layers:
            x = layer(x, cos, sin)
        loss = F.cross_entropy(model[2](x)[:, LENGTH - 1 :].float().flatten(0, 1), ids[:, LENGTH:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--composed", action="store_true", help="torch's own operations")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    train(arguments.steps, arguments.composed, "cuda" if torch.cuda.is_available() else "cpu")
