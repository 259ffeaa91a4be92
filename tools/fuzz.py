"""Random shapes and options against the emulator: `python -m tools.fuzz --cases 1000` (make fuzz-gpu).

Every case follows from its seed, so a failure is reproduced by `--first SEED --cases 1`. Compiling kernels takes far
longer than running them: so 25 seeds in a row share what they are compiled for (recipe, dtype, head_dim, layout, mask,
whether heads are grouped) and differ in shapes, values, scale and windows, and such groups run in several processes on
one GPU.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing.sharedctypes import Synchronized

import torch
from torch import Tensor

from sagebwd import Recipe, read_block_mask, sage_attention, sage_attention_varlen
from sagebwd.conformance import emulator_error, violation
from sagebwd.mask import Mask
from sagebwd.recipe import FP8
from tests.inputs import KINDS, draw
from tests.masks import KINDS as MASKS
from tests.masks import draw as draw_mask

RECIPES = (
    "token", "token", "token", "paper", "paper", "full", "token(smooth_v=False)", "token(smooth_k=False)",
    "token(s=16bit)", "token(o=16bit)", "token(dv=16bit)", "token(dq=16bit)", "token(dk=16bit)",
    "token(smooth_q=True)", "paper(smooth_v=True)", "token(first_key=int8)", "paper(first_key=16bit)",
)  # fmt: skip


# Seeds in a row that share their kernels.
GROUP = 25
# Seconds after which it says at the latest how far it is.
SAID_EVERY = 10
# How many cases all processes have checked; each begins with it.
_checked: Synchronized


@dataclass(frozen=True)
class Case:
    """One call, drawn from a seed."""

    seed: int
    kind: str
    dtype: torch.dtype
    head_dim: int
    heads: int
    kv_heads: int
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    layout: str  # "dense", "padded", "packed" or "masked"
    mask: str  # of `tests.masks.KINDS`, where it is masked
    is_causal: bool
    window: tuple[int, int] | None
    scale: float
    recipe: str

    @classmethod
    def drawn(cls, seed: int, longest: int, recipe: str | None, impl: str | None = None) -> Case:
        """The case of a seed, no sequence longer than ``longest``.

        A named recipe is drawn at the head_dims of every family, and no mask is where it or ``impl`` takes none.
        """
        kernels, rng = random.Random(-1 - seed // GROUP), random.Random(seed)

        def length() -> int:
            return rng.choice([rng.randint(1, longest), rng.choice((1, 17, 63, 64, 65, 127, 128, 129)), longest])

        layout = kernels.choice(("dense", "dense", "padded", "packed", "masked"))
        fp8 = recipe is not None and FP8 in asdict(Recipe.parse(recipe)).values()
        if layout == "masked" and (fp8 or impl == "hopper"):
            layout = "dense"
        head_dim = kernels.choice((32, 64, 64, 64, 96, 128, 128, 128, 256, 40))
        if recipe is not None:
            head_dim = kernels.choice((64, 128))
        left, right = kernels.choice(((False, False), (False, False), (True, False), (True, True), (False, True)))
        grouped = kernels.random() < 0.5
        batch = rng.randint(1, 3)
        kv_heads = rng.choice((1, 2, 3))
        same = rng.random() < 0.5
        lengths_q = tuple(length() for _ in range(batch)) if layout == "packed" else (length(),) * batch
        lengths_k = lengths_q if same else tuple(length() for _ in range(batch))
        if layout == "packed" and rng.random() < 0.2:
            lengths_k = (*lengths_k[:-1], 0)
        if layout in ("dense", "masked"):
            lengths_k = lengths_k[:1] * batch
        return cls(
            seed=seed,
            kind=rng.choice([kind for kind in KINDS if kind != "near-one-hot"]),
            dtype=kernels.choice((torch.bfloat16, torch.float16)),
            head_dim=head_dim,
            heads=kv_heads * (rng.choice((2, 3, 4)) if grouped else 1),
            kv_heads=kv_heads,
            lengths_q=lengths_q,
            lengths_k=lengths_k,
            layout=layout,
            mask=kernels.choice(MASKS),
            is_causal=kernels.random() < 0.5,
            window=(rng.choice((0, 7, 100)) if left else -1, rng.choice((0, 30)) if right else -1)
            if left or right
            else None,
            scale=rng.choice((1.0, 1.0, 0.5)) * head_dim**-0.5,
            recipe=recipe or kernels.choice(RECIPES),
        )

    def drawn_mask(self) -> Tensor | Mask:
        """The mask of a masked case."""
        shape = len(self.lengths_q), self.heads, max(self.lengths_q), max(self.lengths_k)
        mask = draw_mask(self.mask, shape, self.dtype, self.seed)
        return mask if isinstance(mask, Tensor) else read_block_mask(mask)

    def masks(self, device: str) -> dict[str, Tensor | Mask]:
        """The mask arguments of a dense call."""
        if self.layout == "padded":
            keys = torch.arange(max(self.lengths_k), device=device)
            return {"attn_mask": (keys < torch.tensor(self.lengths_k, device=device)[:, None])[:, None, None]}
        if self.layout == "masked":
            mask = self.drawn_mask().to(device)
            return {"attn_mask" if isinstance(mask, Tensor) else "block_mask": mask}
        return {}

    def inputs(self, device: str) -> list[Tensor]:
        """q, k, v and do in the layout's shape, with strides that a fused projection leaves."""
        tokens_q, tokens_k = max(self.lengths_q), max(self.lengths_k)
        batch = len(self.lengths_q)
        if self.layout == "packed":
            tokens_q, tokens_k, batch = sum(self.lengths_q), sum(self.lengths_k), 1
        first_keys = [0]
        if self.layout == "packed":
            starts = [sum(self.lengths_k[:n]) for n in range(len(self.lengths_k))]
            first_keys = [start for start, length in zip(starts, self.lengths_k) if length]
        drawn = draw(
            self.kind, batch, self.heads, self.kv_heads, tokens_q, tokens_k, self.head_dim, self.seed, torch.float32,
            first_keys,
        )  # fmt: skip
        if self.kind == "huge" and self.dtype == torch.float16:
            drawn = [x.clamp(-6e4, 6e4) for x in drawn]
        # tokens before heads in memory, as after a projection
        strided = [x.transpose(1, 2).contiguous().to(device, self.dtype).transpose(1, 2) for x in drawn]
        return [x[0].transpose(0, 1) for x in strided] if self.layout == "packed" else strided


def attended(case: Case, leaves: list[Tensor], impl: str | None) -> tuple[Tensor, Tensor]:
    """Output and lse of the public function."""
    shared = {
        "is_causal": case.is_causal, "window": case.window, "scale": case.scale, "recipe": case.recipe, "impl": impl,
        "return_lse": True,
    }  # fmt: skip
    device = leaves[0].device
    if case.layout == "packed":
        offsets = [
            torch.tensor([0, *lengths], device=device).cumsum(0).int() for lengths in (case.lengths_q, case.lengths_k)
        ]
        return sage_attention_varlen(*leaves, *offsets, max(case.lengths_q), max(case.lengths_k), **shared)
    return sage_attention(*leaves, **case.masks(device), enable_gqa=True, **shared)


def outcome(
    case: Case, inputs: list[Tensor], impl: str | None, dtype: torch.dtype, o: Tensor | None = None
) -> list[Tensor]:
    """Output, lse and the three gradients, computed from the inputs in ``dtype``; o: what backward is to find.

    lse is 0 where a query sees no key.
    """
    *leaves, do = (x.to(dtype) for x in inputs)
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, lse = attended(case, leaves, impl)
    result = out.detach().clone()
    if o is not None:
        out.data.copy_(o)  # which autograd does not notice
    gradients = torch.autograd.grad(out, leaves, do, retain_graph=True)
    return [result, torch.where(torch.isinf(lse), 0, lse), *gradients]


def _turned(
    case: Case, inputs: list[Tensor], o: Tensor, high: list[Tensor], eps: float
) -> list[list[tuple[float, float]]]:
    """How far the FP64 emulator moves where roundings turn codes of e4m3 over: one may move by an eighth.

    dO's rounding; and that of the kernel's ``o``, which is held to the rule by itself: delta is dO o, and dP - delta,
    a difference of larger terms, has all of what 16 bit change in it. Where one key has most of a row such a step
    shows, and few other draws have one at their largest value.
    """
    found = []
    for scale in (1 + eps / 4, 1 - eps / 4):
        moved = outcome(case, [*inputs[:3], inputs[3].double() * scale], "reference", torch.float64, o)
        found.append([emulator_error(x / (scale if n > 1 else 1), y) for n, (x, y) in enumerate(zip(moved, high))])
    return found


def _overflowed(dk: Tensor, dv: Tensor, noise: float) -> Tensor:
    """dK, infinities as the dtype's largest values where a key is seen and noise alone may exceed these.

    That is so of huge values in FP16: where a query sees one key, dP - delta is 0 in exact arithmetic, and in the
    emulator, whose two sums round alike; in a kernel it is their noise (beside e4m3 also what FP16 lacks of small
    2^-b dO in dP), times Q. dv: the emulator's, 0 for keys that no query sees.
    """
    largest = torch.finfo(dk.dtype).max
    if noise <= largest:
        return dk
    return torch.where((dv != 0).any(-1, keepdim=True), dk.clamp(-largest, largest), dk)  # NaN stays


def emulated(case: Case, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The emulator's results at the kernels' precision and in FP64."""
    return tuple(outcome(case, inputs, "reference", dtype) for dtype in (case.dtype, torch.float64))


def check(case: Case, impl: str | None, device: str) -> str | None:
    """None if the kernels' results are the recipe's, else what is wrong."""
    inputs = case.inputs(device)
    actual = outcome(case, inputs, impl, case.dtype)
    pairs = [
        emulated(other, other.inputs(device))
        for other in (replace(case, seed=case.seed + draw_index * 1_000_000) for draw_index in range(3))
    ]
    return judge(case, inputs, actual, pairs)


def judge(
    case: Case, inputs: list[Tensor], actual: list[Tensor], pairs: list[tuple[list[Tensor], list[Tensor]]]
) -> str | None:
    """None if ``actual`` is the recipe's, else what is wrong.

    pairs: `emulated`, of these inputs and of other draws of the same shape.
    """
    actual, eps = list(actual), torch.finfo(case.dtype).eps
    fp8 = FP8 in asdict(Recipe.parse(case.recipe)).values()
    turned = _turned(case, inputs, actual[0], pairs[0][1], eps) if fp8 else []
    q, k, v, do = (x.abs().max().item() if x.numel() else 0.0 for x in inputs)
    cancelling = 2.0**-23 * case.head_dim**0.5 * do * v * max(q, k) * case.scale
    # where all queries see one key, its dK adds up their noise: of FP32 emulators 0.5 of it at 70, 1 to 3.5 at 700;
    # and as it is where dO, V and Q are much the same for every token
    alone = max(case.lengths_q) * case.heads / case.kv_heads if 1 in case.lengths_k else 1
    noises = {"dq": cancelling, "dk": cancelling * max(1.0, alone / 64) ** (1.0 if case.kind == "coherent" else 0.5)}
    if Recipe.parse(case.recipe).smooth_v:  # of values that are 0, their mean is taken off, scaled and added again
        noises["o"] = 2.0**-23 * v
    for index, name in enumerate(("o", "lse", "dq", "dk", "dv")):
        (low, high), *others = [(low[index], high[index]) for low, high in pairs]
        if not torch.isfinite(low).all():  # the 16-bit output overflows for the emulator too
            continue
        if name == "dk":
            actual[index] = _overflowed(actual[index], pairs[0][1][4], noises[name])
        # what vanishes in exact arithmetic (gradients of one visible key) is FP32 noise of the terms that cancel
        noise = [(noises[name], noises[name])] if name in noises else []
        errors = noise + [emulator_error(*other) for other in others] + [error[index] for error in turned]
        problem = violation(actual[index], low, high, eps, [e for e in errors if math.isfinite(e[0])])
        if problem is not None:
            return f"{name}: {problem}"
    return None


def _begin(checked: Synchronized) -> None:
    """What a process begins with: one thread, as they draw and compile beside each other, and what all count in."""
    global _checked
    torch.set_num_threads(1)
    _checked = checked


def _run(seeds: range, impl: str | None, device: str, longest: int, recipe: str | None) -> list[tuple[int, str]]:
    """(seed, what is wrong) of each case that failed."""
    failures = []
    for seed in seeds:
        case = Case.drawn(seed, longest, recipe, impl)
        try:
            problem = check(case, impl, device)
        except Exception as error:  # a crash is a finding, with its case
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            failures.append((seed, f"{problem}\n    {case}"))
        with _checked:
            _checked.value += 1
    return failures


def main() -> int:
    """Run the cases; exit code 1 where any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--impl", help="the fastest for each call, unless named")
    parser.add_argument("--recipe", help="the same for all cases, not drawn")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--longest", type=int, default=700, help="longest sequence, in tokens")
    parser.add_argument("--processes", type=int, default=8)
    arguments = parser.parse_args()
    last = arguments.first + arguments.cases
    groups, first = [], arguments.first
    while first < last:
        end = min((first // GROUP + 1) * GROUP, last)
        groups.append(range(first, end))
        first = end
    start, failures = time.monotonic(), 0
    context = multiprocessing.get_context("spawn")
    checked = context.Value("i", 0)
    with ProcessPoolExecutor(arguments.processes, mp_context=context, initializer=_begin, initargs=(checked,)) as pool:
        left = {
            pool.submit(_run, group, arguments.impl, arguments.device, arguments.longest, arguments.recipe)
            for group in groups
        }
        while left:
            done, left = wait(left, SAID_EVERY, FIRST_COMPLETED)
            for task in done:
                for seed, problem in task.result():
                    failures += 1
                    print(f"seed {seed}: {problem}", flush=True)
            seconds = time.monotonic() - start
            print(f"{checked.value}/{arguments.cases} cases, {failures} failed, {seconds:.0f} s", flush=True)
    print(f"{arguments.cases - failures} passed, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
