"""One sequence over several processes, by `sagebwd.integrations.context_parallel`: a ring of keys and values.

    python examples/context_parallel.py                         # one process
    torchrun --nproc-per-node 2 examples/context_parallel.py    # the same losses on two: NCCL on GPUs, else gloo
    torchrun --nproc-per-node 8 examples/context_parallel.py --tokens 262144 --width 1024 --heads 8 --batch 1

`shard` gives each process its tokens, their labels and their places; `ring_attention` lets them see all others. It
learns to repeat a random sequence, of which every process holds parts: without the ring the second half stays at
ln(32) = 3.47.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch._dynamo  # imported after a process group is made, it keeps the group's threads past the program's end
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sagebwd.integrations.context_parallel import ring_attention, shard

VOCABULARY = 32


class Block(nn.Module):
    """Attention and MLP, with norms before each and a norm of queries and keys, which 8-bit attention wants."""

    def __init__(self, width: int, heads: int, recipe: str) -> None:
        super().__init__()
        self.heads, self.recipe = heads, recipe
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_norm, self.k_norm = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, tokens, width), the same."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = ring_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True, recipe=self.recipe)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, tokens: int, width: int, heads: int, layers: int, recipe: str) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads, recipe) for _ in range(layers)))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False))

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """Logits (batch, tokens, vocabulary) of token ids and their places in the sequence, (batch, tokens) each."""
        return self.head(self.blocks(self.tokens(ids) + self.places(places)))


def train(
    steps: int = 60, tokens: int = 16, width: int = 64, heads: int = 2, layers: int = 2, batch: int = 64,
    recipe: str = "token", device: str = "cpu",
) -> list[float]:  # fmt: skip
    """The loss of each step, of all processes together; on a GPU under BF16 autocast."""
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = Decoder(tokens, width, heads, layers, recipe).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    places = shard(torch.arange(tokens).expand(batch, -1), 1).to(device)
    losses, began = [], time.perf_counter()
    for step in range(steps):
        if step == 2:
            began = time.perf_counter()
        ids = torch.randint(VOCABULARY, (batch, tokens // 2), generator=generator).repeat(1, 2)
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        labels[:, : tokens // 2 - 1] = -100  # the first half cannot be known
        with torch.autocast("cuda", torch.bfloat16, enabled=device != "cpu"):
            logits = model(shard(ids, 1).to(device), places)
        loss = F.cross_entropy(logits.float().flatten(0, 1), shard(labels, 1).flatten().to(device), reduction="sum")
        loss = loss / (labels != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if count > 1:
            for shared in (loss, *(weight.grad for weight in model.parameters())):
                dist.all_reduce(shared)
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and (step % 10 == 0 or step == steps - 1):
            print(f"step {step:3d}  loss {losses[-1]:.4f}", flush=True)
    if rank == 0 and steps > 2:
        spent = time.perf_counter() - began
        line = f"{(steps - 2) * batch * tokens / spent:,.0f} tokens/s on {count} processes"
        peak = "" if device == "cpu" else f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB each"
        print(line + peak)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 60), ("tokens", 16), ("width", 64), ("heads", 2), ("layers", 2), ("batch", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", default="token")
    on = "cpu"
    if torch.cuda.is_available():
        on = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(on)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if on != "cpu" else "gloo")
    train(**vars(parser.parse_args()), device=on)
    if dist.is_initialized():
        dist.destroy_process_group()
