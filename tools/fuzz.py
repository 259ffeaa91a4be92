"""Random shapes and options against the emulator: `python -m tools.fuzz --cases 1000` (make fuzz-gpu).

Every case follows from its seed, so a failure is reproduced by `--first SEED --cases 1`. Compiling kernels takes far
longer than running them: so 25 seeds in a row share what they are compiled for (recipe, dtype, both head_dims, layout,
mask, whether heads are grouped) and differ in shapes, values, scale and windows, and such groups run in several
processes on one GPU.

Some cases are repeated until heads times batch exceeds 65535, as far as a dimension of a grid may count; not on a CPU.
Others are called again with a NaN or an infinity in a head of one sequence or batch element, which no other may feel.
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

from benchmarks.conformance import emulator_error, moved, violation
from sagebwd import Recipe, read_block_mask, sage_attention, sage_attention_varlen
from sagebwd.kernels.capabilities import MAX_HEAD_DIM, WIDE
from sagebwd.masks.mask import Mask
from sagebwd.recipe import FP8, INT8
from tests.inputs import KINDS, draw
from tests.masks import KINDS as MASKS
from tests.masks import MODS
from tests.masks import draw as draw_mask

RECIPES = (
    "token", "token", "token(v_scale=sequence)", "paper", "paper", "full", "token(smooth_v=False)",
    "token(smooth_k=False)", "token(s=16bit)", "token(o=16bit)", "token(dv=16bit)", "token(dq=16bit)",
    "token(dk=16bit)", "token(block_k=64)", "paper(smooth_v=True)", "token(first_keys=0)", "paper(first_keys=16)",
    "token(dp=int8)", "paper(dp=int8)", "full(dp=int8)",
)  # fmt: skip
WIDE_RECIPES = tuple(recipe for recipe in RECIPES if "dp=int8" not in recipe)


# What `outcome` returns.
RESULTS = ("o", "lse", "dq", "dk", "dv")
# Programs that two of a grid's dimensions count at most, and tokens of a sequence in cases that exceed it.
GRID, FEW_TOKENS = 65535, 8
# Seeds in a row that share their kernels.
GROUP = 25
# Seconds after which it says at the latest how far it is.
SAID_EVERY = 10
# How many cases all processes have checked; each begins with it.
_checked: Synchronized


@dataclass(frozen=True)
class Case:
    """One call, drawn from a seed.

    repeats: how often its batch, or its sequences, come after one another. spoilt: which input of it is called again
    with ``poison`` in one head of one batch element or sequence, or "".
    """

    seed: int
    kind: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
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
    repeats: int = 1
    spoilt: str = ""
    poison: float = math.nan

    @classmethod
    def drawn(
        cls, seed: int, longest: int, recipe: str | None, impl: str | None = None, *, wide: bool = False
    ) -> Case:
        """The case of a seed, no sequence longer than ``longest``; wide: of a head_dim over 256."""
        kernels, rng = random.Random(-1 - seed // GROUP), random.Random(seed)
        repeated, spoilt = rng.random() < 0.01, rng.random() < 0.2
        if repeated:
            longest = min(longest, FEW_TOKENS)

        def length() -> int:
            if repeated:
                return rng.randint(1, longest)
            return rng.choice([rng.randint(1, longest), rng.choice((1, 17, 63, 64, 65, 127, 128, 129)), longest])

        layout = kernels.choice(("dense", "dense", "padded", "packed", "masked"))
        head_dim, value_dim = _wide_widths(kernels) if wide else _widths(kernels)
        left, right = kernels.choice(((False, False), (False, False), (True, False), (True, True), (False, True)))
        grouped = kernels.random() < 0.5
        batch = rng.randint(1, 3)
        kv_heads = rng.choice((1, 2, 3))
        heads = kv_heads * (rng.choice((2, 3, 4)) if grouped else 1)
        same = rng.random() < 0.5
        lengths_q = tuple(length() for _ in range(batch)) if layout == "packed" else (length(),) * batch
        lengths_k = lengths_q if same else tuple(length() for _ in range(batch))
        if layout == "packed" and rng.random() < 0.2:
            lengths_k = (*lengths_k[:-1], 0)
        if layout in ("dense", "masked"):
            lengths_k = lengths_k[:1] * batch
        mask = kernels.choice(MASKS)
        if layout == "masked" and mask in MODS:  # of each batch element its own
            repeated = False
        return cls(
            seed=seed,
            kind=rng.choice([kind for kind in KINDS if kind != "near-one-hot"]),
            dtype=kernels.choice((torch.bfloat16, torch.float16)),
            head_dim=head_dim,
            value_dim=value_dim,
            heads=heads,
            kv_heads=kv_heads,
            lengths_q=lengths_q,
            lengths_k=lengths_k,
            layout=layout,
            mask=mask,
            is_causal=kernels.random() < 0.5,
            window=(rng.choice((0, 7, 100)) if left else -1, rng.choice((0, 30)) if right else -1)
            if left or right
            else None,
            scale=rng.choice((1.0, 1.0, 0.5)) * head_dim**-0.5,
            recipe=recipe or ("mixed" if impl == "hopper" else kernels.choice(WIDE_RECIPES if wide else RECIPES)),
            repeats=GRID // (batch * heads) + 1 if repeated else 1,
            spoilt=rng.choice(("q", "k", "v", "do")) if spoilt and not repeated else "",
            poison=rng.choice((math.nan, math.nan, math.inf)),
        )

    def drawn_mask(self) -> Tensor | Mask:
        """The mask of a masked case."""
        shape = len(self.lengths_q), self.heads, max(self.lengths_q), max(self.lengths_k)
        mask = draw_mask(self.mask, shape, self.dtype, self.seed)
        if not isinstance(mask, Tensor):
            return read_block_mask(mask)
        return mask.repeat(self.repeats, 1, 1, 1) if len(mask) > 1 else mask

    def masks(self, device: str) -> dict[str, Tensor | Mask]:
        """The mask arguments of a dense call."""
        if self.layout == "padded":
            keys = torch.arange(max(self.lengths_k), device=device)
            lengths = torch.tensor(self.lengths_k * self.repeats, device=device)
            return {"attn_mask": (keys < lengths[:, None])[:, None, None]}
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
        starts = [0]
        if self.layout == "packed":
            starts = [sum(self.lengths_k[:n]) for n, length in enumerate(self.lengths_k) if length]

        def drawn(width: int) -> tuple[Tensor, ...]:
            return draw(
                self.kind, batch, self.heads, self.kv_heads, tokens_q, tokens_k, width, self.seed, torch.float32,
                starts,
            )  # fmt: skip

        q, k, v, do = drawn(self.head_dim)
        if self.value_dim != self.head_dim:
            *_, v, do = drawn(self.value_dim)
        if self.kind == "huge" and self.dtype == torch.float16:
            q, k, v, do = (x.clamp(-6e4, 6e4) for x in (q, k, v, do))
        # tokens before heads in memory, as after a projection
        by_token = [x.transpose(1, 2).contiguous().to(device, self.dtype) for x in (q, k, v, do)]
        if self.layout == "packed":
            return [x[0].repeat(self.repeats, 1, 1) for x in by_token]
        return [x.repeat(self.repeats, 1, 1, 1).transpose(1, 2) for x in by_token]

    def part(self, name: str, element: int, kv_head: int) -> tuple[int | slice, slice]:
        """Where a tensor has what belongs to a head of keys of one batch element or sequence."""
        of_keys, group = name in ("k", "v", "dk", "dv"), self.heads // self.kv_heads
        heads = slice(kv_head, kv_head + 1) if of_keys else slice(kv_head * group, (kv_head + 1) * group)
        if self.layout != "packed":
            return element, heads
        lengths = self.lengths_k if of_keys else self.lengths_q
        tokens = slice(sum(lengths[:element]), sum(lengths[: element + 1]))
        return (heads, tokens) if name == "lse" else (tokens, heads)


def _wide_widths(kernels: random.Random) -> tuple[int, int]:
    """The same of wide heads."""
    head_dim = kernels.choice((512, 512, 8 * kernels.randint(33, 64), kernels.randint(WIDE + 1, MAX_HEAD_DIM)))
    return (head_dim, head_dim) if kernels.random() < 0.75 else (head_dim, kernels.randint(1, MAX_HEAD_DIM))


def _widths(kernels: random.Random) -> tuple[int, int]:
    """head_dim, and value's."""

    def any_width() -> int:
        return kernels.choice(
            (64, 128, 64, 128, 8 * kernels.randint(1, 32), 8 * kernels.randint(1, 32), kernels.randint(1, 256))
        )

    head_dim = any_width()
    return (head_dim, head_dim) if kernels.random() < 0.75 else (head_dim, any_width())


def attended(case: Case, leaves: list[Tensor], impl: str | None) -> tuple[Tensor, Tensor]:
    """Output and lse of the public function."""
    shared = {
        "is_causal": case.is_causal, "window": case.window, "scale": case.scale, "recipe": case.recipe, "impl": impl,
        "return_lse": True,
    }  # fmt: skip
    device = leaves[0].device
    if case.layout == "packed":
        offsets = [
            torch.tensor([0, *lengths], device=device).cumsum(0).int()
            for lengths in (case.lengths_q * case.repeats, case.lengths_k * case.repeats)
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

    Of an INT8 dP dS' is in units of dO's scales (`sagebwd.reference.float8`), and stays where dO moves: there V moves
    too, and O with it.
    """
    found = []
    q, k, v, do = inputs
    for scale in (1 + eps / 4, 1 - eps / 4):
        of_v = scale if Recipe.parse(case.recipe).dp == INT8 else 1.0
        scaled = [q, k, v.double() * of_v, do.double() * scale]
        moved = outcome(case, scaled, "reference", torch.float64, o.double() * of_v)
        factors = of_v, 1.0, scale * of_v, scale * of_v, scale
        found.append([emulator_error(x / factor, y) for x, factor, y in zip(moved, factors, high)])
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
    once, inputs = replace(case, repeats=1), case.inputs(device)
    actual = outcome(case, inputs, impl, case.dtype)
    pairs = [
        emulated(other, other.inputs(device))
        for other in (replace(once, seed=case.seed + draw_index * 1_000_000) for draw_index in range(3))
    ]
    problem = judge(case, inputs, actual, pairs)
    if problem is not None or not case.spoilt:
        return problem
    healed, problem = isolation(case, inputs, actual, repeated(case, pairs[0][0]), impl)
    return problem or judge(case, inputs, healed, pairs)


def repeated(case: Case, results: list[Tensor]) -> list[Tensor]:
    """The emulator's results of a case once, as the case has them again and again."""
    axes = (1 if name == "lse" and case.layout == "packed" else 0 for name in RESULTS)
    return [torch.cat([x] * case.repeats, axis) for x, axis in zip(results, axes)]


def judge(
    case: Case, inputs: list[Tensor], actual: list[Tensor], pairs: list[tuple[list[Tensor], list[Tensor]]]
) -> str | None:
    """None if ``actual`` is the recipe's, else what is wrong.

    pairs: `emulated`, of these inputs once and of other draws of the same shape.
    """
    once, eps = replace(case, repeats=1), torch.finfo(case.dtype).eps
    low, high = pairs[0]
    fp8 = FP8 in asdict(Recipe.parse(case.recipe)).values()
    turned, inputs_once = [], [x[: len(x) // case.repeats] for x in inputs]
    if fp8:
        turned = _turned(once, inputs_once, actual[0][: len(high[0])], high, eps)
    if Recipe.parse(case.recipe).rotate:
        nearby = outcome(once, [*moved(*inputs_once[:2]), *inputs_once[2:]], "reference", torch.float64)
        turned.append([emulator_error(*sides) for sides in zip(nearby, high)])
    q, k, v, do = (x.abs().max().item() if x.numel() else 0.0 for x in inputs)
    cancelling = 2.0**-23 * max(case.head_dim, case.value_dim) ** 0.5 * do * v * max(q, k) * case.scale
    # where all queries see one key, its dK adds up their noise: of FP32 emulators 0.5 of it at 70, 1 to 3.5 at 700;
    # and as it is where dO, V and Q are much the same for every token
    alone = max(case.lengths_q) * case.heads / case.kv_heads if 1 in case.lengths_k else 1
    noises = {"dq": cancelling, "dk": cancelling * max(1.0, alone / 64) ** (1.0 if case.kind == "coherent" else 0.5)}
    recipe, turned_o = Recipe.parse(case.recipe), []
    if recipe.smooth_v:  # of values that are 0, their mean is taken off, scaled and added again
        noises["o"] = 2.0**-23 * v
        if recipe.o == INT8:  # a sum in another order turns a code over that lies between two: all of a row of one key
            turned_o = [(v / 254, 0.0)]
    low, high = repeated(case, low), repeated(case, high)
    for index, name in enumerate(RESULTS):
        found = actual[index]
        if not torch.isfinite(low[index]).all():  # the 16-bit output overflows for the emulator too
            continue
        if name == "dk":
            found = _overflowed(found, high[4], noises[name])
        # what vanishes in exact arithmetic (gradients of one visible key) is FP32 noise of the terms that cancel
        noise = [(noises[name], noises[name])] if name in noises else []
        others = [emulator_error(other_low[index], other_high[index]) for other_low, other_high in pairs[1:]]
        errors = noise + others + [error[index] for error in turned] + (turned_o if name == "o" else [])
        problem = violation(found, low[index], high[index], eps, [e for e in errors if math.isfinite(e[0])])
        if problem is not None:
            return f"{name}: {problem}"
    return None


def isolation(
    case: Case, inputs: list[Tensor], clean: list[Tensor], low: list[Tensor], impl: str | None
) -> tuple[list[Tensor], str | None]:
    """Results beside a NaN or an infinity, with those of what it belongs to as they were; and what of it went wrong.

    clean, low: results without it, the kernels' and the emulator's.
    """
    rng = random.Random(case.seed)
    place = rng.randrange(len(case.lengths_q)), rng.randrange(case.kv_heads)
    inputs = [x.clone() for x in inputs]
    its_part = inputs[("q", "k", "v", "do").index(case.spoilt)][case.part(case.spoilt, *place)]
    if not its_part.numel():
        return clean, None
    at = tuple(rng.randrange(size) for size in its_part.shape)
    its_part[at] = case.poison
    results = outcome(case, inputs, impl, case.dtype)
    expected = outcome(case, inputs, "reference", case.dtype)
    # the emulator multiplies it by 0 where the query sees no key, or no query the key; kernels may leave that out
    of_row = "dv" if case.spoilt in ("k", "v") else "o"
    seen = low[RESULTS.index(of_row)][case.part(of_row, *place)][at[:-1]].any()
    added_in_any_order = {"dq"} if FP8 in asdict(Recipe.parse(case.recipe)).values() else set()
    for name, found, should, before, usual in zip(RESULTS, results, expected, clean, low):
        part = case.part(name, *place)
        shown = should[part].isfinite().all() or not found[part].isfinite().all()
        if seen and usual[part].isfinite().all() and not shown:
            return results, f"{name}: finite in spite of {case.poison} in {case.spoilt}"
        found[part] = before[part]
        if name not in added_in_any_order and not torch.equal(found.nan_to_num(), before.nan_to_num()):
            return results, f"{name}: {case.poison} in {case.spoilt} of {place} reaches others"
    return results, None


def _begin(checked: Synchronized) -> None:
    """What a process begins with: one thread, as they draw and compile beside each other, and what all count in."""
    global _checked
    torch.set_num_threads(1)
    _checked = checked


def _run(
    seeds: range, impl: str | None, device: str, longest: int, recipe: str | None, wide: bool
) -> list[tuple[int, str]]:
    """(seed, what is wrong) of each case that failed."""
    failures = []
    for seed in seeds:
        case = Case.drawn(seed, longest, recipe, impl, wide=wide)
        if device == "cpu":  # which would take hours
            case = replace(case, repeats=1)
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
    parser.add_argument("--recipe", help="the same for all cases; else drawn, but `mixed` with --impl hopper")
    parser.add_argument("--wide", action="store_true", help="head_dims of 257 to 512")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--longest", type=int, default=700, help="longest sequence, in tokens")
    parser.add_argument("--processes", type=int, default=8)
    arguments = parser.parse_args()
    settings = arguments.impl, arguments.device, arguments.longest, arguments.recipe, arguments.wide
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
        left = {pool.submit(_run, group, *settings) for group in groups}
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
