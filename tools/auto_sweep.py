"""Whether `auto` is right: `python -m tools.auto_sweep --seed 1 --cases 200`, on a GPU, or small on a CPU.

It draws calls by a seed: masks, widths, lengths, groups, dtypes, scales of either sign and 0, and how q, k, v, dO and
a bias lie in memory: strides, pitches, first bytes. Each is called by `auto` twice, so that the second has a plan, and
some compiled too; outputs and gradients are compared with attention in FP64. Exit code 1 where `auto` is wrong or
raises.

With ``--others`` torch, each of its backends and the peers that are installed are called as they are, without what
`auto` does for them (`sagebwd.auto.operands`). `KNOWN` has what they get wrong, and where that was seen: the table
says which of it this machine shows, and who is wrong beside. What may end the process is left out.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from sagebwd import explain, explain_varlen, sage_attention, sage_attention_varlen
from sagebwd.auto import peers
from sagebwd.auto.contenders import CUDNN, EFFICIENT, FA3, FA4, FLASH, PEERS, TORCH
from sagebwd.auto.model import Size
from sagebwd.auto.operands import over_zero
from sagebwd.auto.torch_attention import BACKENDS
from sagebwd.cli.contenders import by_backend
from sagebwd.cli.hardware import check_device
from sagebwd.masks.kinds import CAUSAL, FULL, MASK, PACKED, PADDING, WINDOW

BIAS = "bias"
KINDS = FULL, CAUSAL, WINDOW, PADDING, MASK, BIAS, PACKED
SIDES = 60, 0
NAMES = "o", "dq", "dk", "dv"
# Relative L2 of the output and of gradients: of 16 bit, of FP32, and of low precision.
BOUNDS = {"full": (0.02, 0.03), "float32": (1e-4, 1e-3), "low": (0.06, 0.15)}
# Of the norm of dV, what a gradient counts as at least: under a scale of 0 those of Q and K are 0.
LEAST_NORM = 1e-3
# One of so many calls is compiled too.
COMPILED = 12


def _off(x: Tensor, begin: int = 1) -> Tensor:
    return x.new_empty(x.numel() + begin)[begin:].view(x.shape).copy_(x)


def _pitched(x: Tensor, more: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] + more)[..., : x.shape[-1]].copy_(x)


def _by_token(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


# How a tensor lies; of the last, `IN_PLACE`, rows begin at multiples of 16 bytes.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "2 bytes off": _off, "6 bytes off": partial(_off, begin=3), "pitch of 1 more": partial(_pitched, more=1),
    "pitch of 4 more": partial(_pitched, more=4),
    "every other": lambda x: x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2].copy_(x),
    "turned": lambda x: x.mT.contiguous().mT,
    "heads side by side, off": lambda x: _off(x.transpose(-3, -2)).transpose(-3, -2),
    "as it is": lambda x: x, "heads side by side": _by_token, "pitch of 8 more": partial(_pitched, more=8),
    "one of three": lambda x: torch.stack([x] * 3, 1)[:, 1],
}  # fmt: skip
IN_PLACE = "as it is", "heads side by side", "pitch of 8 more", "one of three"


@dataclass(frozen=True)
class Case:
    """A call; layouts: of q, k, v, dO and a bias; scale: in units of the default, or None for that."""

    kind: str
    head_dim: int
    value_dim: int
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dtype: torch.dtype
    scale: float | None
    layouts: tuple[str, ...]
    seed: int

    @classmethod
    def drawn(cls, seed: int, longest: int, device: str) -> Case:
        """The case of a seed."""
        of = random.Random(seed)
        kind, group = of.choice(KINDS), of.choice((1, 1, 2, 4))
        widths = [(128, 128)] * 4 + [(64, 64)] * 3 + [(n, n) for n in (72, 80, 96, 256, 20)] + [(192, 128), (64, 20)]
        head_dim, value_dim = of.choice([*widths, (320, 320)])
        queries = of.choice((longest, longest // 2, longest // 2 - 64, of.randint(1, longest)))
        queries = max(1, queries)
        keys = of.randint(queries, longest) if kind in (CAUSAL, FULL, PADDING) and of.random() < 0.4 else queries
        kv_heads = of.choice((1, 2))
        dtype = of.choice((torch.bfloat16, torch.bfloat16, torch.float16))
        if device == "cpu" and of.random() < 0.5:
            dtype = torch.float32
        scale = of.choice((None, None, None, 2.0, 0.5, 0.0, -1.0, -2.0, -0.01, 1e-42))
        layouts = tuple(of.choice([*LAYOUTS] if of.random() < 0.4 else IN_PLACE) for _ in range(5))
        sizes = of.choice((1, 2)), kv_heads * group, kv_heads, queries, keys
        return cls(kind, head_dim, value_dim, *sizes, dtype, scale, layouts, seed)

    @property
    def factor(self) -> float | None:
        """The scale as functions take it."""
        return None if self.scale is None else self.scale * self.head_dim**-0.5

    @property
    def is_over_0(self) -> bool:
        """Whether the scale is."""
        return self.scale is None or over_zero(self.factor)[0] is None

    @property
    def is_in_place(self) -> bool:
        """Whether q, k, v, dO and a bias that there is have rows that begin at multiples of 16 bytes."""
        return all(name in IN_PLACE for name in self.layouts[: 5 if self.kind == BIAS else 4])

    @property
    def lengths(self) -> list[int]:
        """Of packed sequences, of which one is empty."""
        first = self.queries // 3
        return [first, 0, self.queries - first]

    def tensors(self, device: str) -> list[Tensor]:
        """q, k, v, dO as they lie; packed ones have heads behind tokens."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = (self.heads, self.queries, self.head_dim), (self.kv_heads, self.keys, self.head_dim)
        sizes += (self.kv_heads, self.keys, self.value_dim), (self.heads, self.queries, self.value_dim)
        found = []
        for (heads, tokens, width), layout in zip(sizes, self.layouts):
            shape = (tokens, heads, width) if self.kind == PACKED else (self.batch, heads, tokens, width)
            drawn = torch.randn(shape, generator=generator).to(device, self.dtype)
            found.append(LAYOUTS[layout](drawn))
        return found

    def mask(self, device: str) -> Tensor | None:
        """attn_mask, as it lies."""
        generator = torch.Generator().manual_seed(self.seed)
        if self.kind == BIAS:
            shape = [
                (self.queries, self.keys),
                (1, self.heads, self.queries, self.keys),
                (self.batch, 1, 1, self.keys),
            ]
            bias = torch.randn(shape[self.seed % 3], generator=generator).to(device, self.dtype)
            has_heads = bias.dim() > 2 or not self.layouts[4].startswith("heads")
            return LAYOUTS[self.layouts[4] if has_heads else "as it is"](bias)
        if self.kind == MASK:
            seen = torch.rand(self.batch, 1, self.queries, self.keys, generator=generator) < 0.5
            return (seen | torch.eye(self.queries, self.keys, dtype=torch.bool)).to(device)
        if self.kind == PADDING:
            lengths = torch.randint(1, self.keys + 1, (self.batch, 1, 1, 1), generator=generator)
            return (torch.arange(self.keys) < lengths).to(device)
        return None

    def added(self, device: str) -> Tensor:
        """What is added to the scores, in FP64."""
        i, j = (torch.arange(n, device=device) for n in (self.queries, self.keys))
        seen = torch.ones(self.queries, self.keys, dtype=torch.bool, device=device)
        if self.kind in (CAUSAL, WINDOW, PACKED):
            seen = j <= i[:, None]
        if self.kind == WINDOW:
            seen &= j >= i[:, None] - SIDES[0]
        if self.kind == PACKED:
            of = torch.repeat_interleave(torch.arange(3), torch.tensor(self.lengths)).to(device)
            seen &= of == of[:, None]
        hidden = torch.zeros(1, 1, *seen.shape, dtype=torch.float64, device=device).masked_fill(~seen, -math.inf)
        mask = self.mask(device)
        if mask is None:
            return hidden
        return hidden + mask.double() if self.kind == BIAS else hidden.masked_fill(~mask, -math.inf)


Outcome = list[Tensor]


def exact(case: Case, tensors: list[Tensor]) -> Outcome:
    """The output and gradients in FP64."""
    packed = case.kind == PACKED
    q, k, v, do = (x.double().transpose(0, 1)[None] if packed else x.double() for x in tensors)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    group = case.heads // case.kv_heads
    scale = case.head_dim**-0.5 if case.scale is None else case.factor
    k, v = (x.repeat_interleave(group, 1) for x in leaves[1:])
    out = (leaves[0] @ k.mT * scale + case.added(q.device.type)).softmax(-1) @ v
    found = [out.detach(), *torch.autograd.grad(out, leaves, do)]
    return [x[0].transpose(0, 1) for x in found] if packed else found


def outcome(attend: Callable[..., Tensor], tensors: list[Tensor]) -> Outcome:
    """The output and gradients of q, k and v, which lie as they are given."""
    *inputs, do = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


def auto_of(case: Case, device: str) -> tuple[Callable[..., Tensor], Callable]:
    """`auto` of q, k and v, and what explains it."""
    if case.kind == PACKED:
        offsets = torch.tensor([0, *case.lengths], device=device).cumsum(0).int()
        longest = max(case.lengths)

        def packed(of: Callable, q: Tensor, k: Tensor, v: Tensor) -> object:
            return of(q, k, v, offsets, offsets, longest, longest, is_causal=True, scale=case.factor)

        return partial(packed, sage_attention_varlen), partial(packed, explain_varlen)
    options = {"is_causal": case.kind in (CAUSAL, WINDOW), "scale": case.factor, "attn_mask": case.mask(device)}
    options |= {"enable_gqa": case.heads != case.kv_heads, "window": SIDES if case.kind == WINDOW else None}
    return partial(sage_attention, **options), partial(explain, **options)


def others_of(case: Case, device: str) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Torch's function as it picks, by each backend, and peers, of dense calls; but for what may end the process."""
    if case.kind in (PACKED, WINDOW):
        return
    options = {"attn_mask": case.mask(device), "is_causal": case.kind == CAUSAL, "scale": case.factor}
    theirs = partial(F.scaled_dot_product_attention, enable_gqa=case.heads != case.kv_heads, **options)
    if device == "cpu":
        yield TORCH, theirs
        return
    backends = {name: SDPBackend(int(backend)) for name, backend in BACKENDS.items()}
    if case.is_in_place:
        yield TORCH, theirs
    for name in backends if case.is_in_place else (CUDNN,):  # a misaligned address ends CUDA's context
        yield name, partial(by_backend, backends[name], theirs)
    size = Size(case.queries, case.keys, case.heads, case.kv_heads)
    for peer in peers.installed():
        if case.kind in (FULL, CAUSAL) and peers.fits(case.kind, size) and case.queries == case.keys:
            scale = case.head_dim**-0.5 if case.scale is None else case.factor
            yield peer, peers.dense(peer, case.kind == CAUSAL, (-1, -1), None, scale)


@dataclass(frozen=True)
class Known:
    """What others get wrong: of whom, of which cases, and in which versions it was seen."""

    what: str
    who: tuple[str, ...]
    seen: str
    of: Callable[[Case], bool]


KNOWN = (
    Known(
        "a scale of 0 or less: NaN, or wrong under a causal mask", (TORCH, CUDNN, FLASH, EFFICIENT, *PEERS),
        "torch 2.11 on an H200, torch 2.13 on a CPU", lambda case: not case.is_over_0,
    ),
    Known(
        "rows that begin at no multiple of 16 bytes: NaN, 1e17, or an error", (CUDNN, FLASH, *PEERS),
        "torch 2.11 on an H200", lambda case: not case.is_in_place,
    ),
    Known(
        "keys 64 more than a multiple of 128 under a mask: NaN in dQ (torch's issue 196678)", (TORCH, CUDNN),
        "torch 2.11 on an H100", lambda case: case.kind in (MASK, BIAS, PADDING) and case.keys % 128 == 64,
    ),
    Known(
        "dQ at head_dim 72, 80 and 112", (FA4,), "flash-attn-4 4.0.0b36 on an H100",
        lambda case: case.head_dim % 32 > 0,
    ),
    Known("no backward", (FA3,), "tokenspeed-fa3 3.0.0", lambda case: peers.lacks_backward(FA3)),
)  # fmt: skip


def errors_of(found: Outcome, wanted: Outcome) -> list[float]:
    """Relative L2 of each; NaN where something is not finite."""
    norms = [x.double().norm().item() for x in wanted]
    least = LEAST_NORM * norms[3]
    return [
        (x.double() - y.double()).norm().item() / max(norm, least, 1e-300)
        for x, y, norm in zip(found, wanted, norms)
    ]  # fmt: skip


def problem(found: Outcome, wanted: Outcome, bounds: tuple[float, float]) -> str | None:
    """What is wrong, or None."""
    errors = errors_of(found, wanted)
    if all(error <= bounds[min(n, 1)] for n, error in enumerate(errors)):
        return None
    return ", ".join(f"{name} {error:.3g}" for name, error in zip(NAMES, errors))


def attempted(attend: Callable[..., Tensor], tensors: list[Tensor], wanted: Outcome, bounds: tuple) -> str | None:
    """The same of a call, which may raise."""
    try:
        return problem(outcome(attend, tensors), wanted, bounds)
    except Exception as error:  # whatever torch or a peer raises is a finding
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"


def check(case: Case, device: str, with_others: bool) -> tuple[str, list[str], dict[str, str | None]]:
    """Who ran a case under `auto`, what was wrong with that, and with others by name."""
    tensors = case.tensors(device)
    wanted = exact(case, tensors)
    auto, asked = auto_of(case, device)
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    try:
        answer = asked(*leaves)
    except Exception as error:
        return "nobody", [f"explain: {type(error).__name__}: {error}"], {}
    is_full = answer.recipe == "full"
    bounds = BOUNDS["low" if not is_full else "float32" if case.dtype == torch.float32 else "full"]
    runs = {"first": auto, "planned": auto}
    if case.seed % COMPILED == 0:
        torch._dynamo.reset()
        runs["compiled"] = torch.compile(auto, fullgraph=True, backend="aot_eager")
        if is_full and device != "cpu":
            bounds = BOUNDS["low"] if answer.forward in PEERS else bounds  # a trace may run low precision there
    wrong = []
    for name, run in runs.items():
        found = attempted(run, tensors, wanted, bounds)
        if found is not None:
            wrong.append(f"{name}: {found}")
    others = {}
    if with_others:
        others = {name: attempted(run, tensors, wanted, BOUNDS["full"]) for name, run in others_of(case, device)}
    return f"{answer.recipe} on {answer.forward}", wrong, others


def main(arguments: list[str] | None = None) -> int:
    """Check the cases; 1 where `auto` is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next has the next")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop in time")
    parser.add_argument("--longest", type=int, help="tokens, at most [default: 2048; on a CPU 160]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--others", action="store_true", help="call torch, its backends and peers too")
    given = parser.parse_args(arguments)
    check_device(given.device)
    longest = given.longest or (160 if given.device == "cpu" else 2048)
    until, ran, shown, beside, count, failed = time.monotonic() + given.seconds, Counter(), Counter(), [], 0, 0
    for seed in range(given.seed, given.seed + given.cases):
        if time.monotonic() > until:
            break
        case = Case.drawn(seed, longest, given.device)
        who, wrong, others = check(case, given.device, given.others)
        count, failed = count + 1, failed + bool(wrong)
        ran[who] += 1
        for text in wrong:
            print(f"WRONG {seed}: {who}: {text}\n    {case}", flush=True)
        for name, text in others.items():
            if text is None or "No available kernel" in text:
                continue
            causes = [known for known in KNOWN if name in known.who and known.of(case)]
            shown.update(causes[:1])
            if not causes:
                beside.append(f"not known: {name}: {text}\n    {case}")
        lost = [text for text in (*wrong, *others.values()) if text is not None and "CUDA error" in text]
        if lost:
            print(f"stopped: CUDA's context is lost by {'auto' if wrong else 'another'}: {lost[0]}\n    {case}")
            break
    print(f"auto: {count - failed} of {count} right; " + ", ".join(f"{n} {who}" for who, n in ran.most_common()))
    if given.others:
        print(f"others, with torch {torch.__version__}:")
        for known in KNOWN:
            print(f"  {shown[known]:4} calls: {known.what}; seen with {known.seen}")
        print("\n".join(beside))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
