"""A small decoder in plain PyTorch, trained with INT8 attention: the one line that differs is marked.

    python examples/plain_pytorch.py           # sagebwd
    python examples/plain_pytorch.py --sdpa    # torch's own attention, the same weights and data

It learns to repeat a random sequence, which takes attention: without it the second half stays at ln(32) = 3.47.
A few seconds on a CPU, where the reference emulates the recipe; on a GPU it takes the kernels. Without a recipe the
call is torch's own wherever that is faster, as on a CPU.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagebwd import sage_attention

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 32, 8, 64, 2, 2
HEAD_DIM = WIDTH // HEADS


class Block(nn.Module):
    """Attention and MLP, with norms before each and a norm of queries and keys, which INT8 attention wants."""

    def __init__(self, use_sdpa: bool) -> None:
        super().__init__()
        # the line that differs
        self.attention = F.scaled_dot_product_attention if use_sdpa else partial(sage_attention, recipe="token")
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, tokens, width), the same."""
        # (batch, heads, tokens, head_dim) each: views, which need not be contiguous
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        heads = self.attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, use_sdpa: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(use_sdpa) for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (batch, tokens, vocabulary) of token ids (batch, tokens)."""
        return self.head(self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]]))


def train(steps: int = 60, use_sdpa: bool = False, device: str = "cpu") -> list[float]:
    """The loss of each step, on the half that can be known. The kernels take BF16 and FP16, the reference FP32 too."""
    torch.manual_seed(0)
    model = Decoder(use_sdpa).to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        ids = torch.randint(VOCABULARY, (64, LENGTH), generator=generator).to(device).repeat(1, 2)
        logits = model(ids[:, :-1])[:, LENGTH - 1 :]
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, LENGTH:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdpa", action="store_true", help="torch's own attention")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    train(arguments.steps, arguments.sdpa, "cuda" if torch.cuda.is_available() else "cpu")
