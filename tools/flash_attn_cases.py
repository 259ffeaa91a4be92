"""Cases of flash-attn's own tests on sagebwd's functions: `python -m tools.flash_attn_cases PATH --cases 20`.

PATH is a checkout of flash-attn 2. Nothing of it is imported or run: the grid of parameters of each test is read from
tests/test_flash_attn.py, and the calls are made here by `sagebwd.integrations.flash_attn`. Those that have nothing to
refuse are drawn at random, ``--cases`` of each test, with 2 sequences and 6 heads. A case is right where

- the relative L2 error of o, lse, dq, dk and dv against FP32 is within the matrix's bounds of the recipe
  (`tools.matrix.check`), where its data are of standard deviation 1, as they are in all tests but those of overflow;
- that error is at most twice the emulator's, and what BF16 rounds, as flash-attn holds its own to twice that of
  attention in 16 bit;
- a second call gives the same bits, but for dq where ``deterministic`` is off.

Of cases with an argument that sagebwd does not take, one for each test and argument is called, and must be refused by
that name; the others are counted. Tests of a KV cache and those without a head_dim are left out. Without a GPU:
``--device cpu --longest 128 --cases 2``.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from sagebwd.integrations import flash_attn
from tools.matrix.check import BOUNDS, TENSORS, errors
from tools.matrix.exact import attention, band

FILE = "tests/test_flash_attn.py"
SEQUENCES, HEADS = 2, 6
KV_HEADS = {"mha": HEADS, "gqa": 2, "mqa": 1}
# A test's parameter that asks for what is refused, and the argument that the refusal names
REFUSED = {
    "dropout_p": "dropout_p", "softcap": "softcap", "alibi": "alibi_slopes", "paged_kv_block_size": "block_table",
}  # fmt: skip
ROUNDED = 0.008  # twice what BF16 rounds by


def grids(source: str) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """Of a file of tests: the name of each that is not left out, and the parameters of all its cases."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or "kvcache" in node.name:
            continue
        axes = []
        for decorator in node.decorator_list:
            if decorator.func.attr != "parametrize":
                continue
            names, values = decorator.args
            names = [name.strip() for name in names.value.split(",")]
            values = [x if len(names) > 1 else (x,) for x in _values(names, values)]
            axes.append([dict(zip(names, value)) for value in values])
        if not any("d" in axis[0] for axis in axes):
            continue
        cases = ({k: v for part in parts for k, v in part.items()} for parts in itertools.product(*axes))
        yield node.name, list(cases)


def _values(names: list[str], node: ast.expr) -> list[object]:
    """Of dtypes, which depend on the GPU there, all that are named."""
    if names == ["dtype"]:
        return sorted({x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)})
    return ast.literal_eval(node)


@dataclass(frozen=True)
class Case:
    """One call: what a test's parameters say, and its name where they say nothing."""

    test: str
    parameters: tuple[tuple[str, object], ...]
    seed: int = 0

    @cached_property
    def given(self) -> dict[str, object]:
        """The parameters by name."""
        return dict(self.parameters)

    @property
    def refused(self) -> str | None:
        """The argument that is not taken."""
        return next((argument for name, argument in REFUSED.items() if self.given.get(name)), None)

    @property
    def packed(self) -> bool:
        """Whether sequences are packed."""
        return "varlen" in self.test

    @property
    def is_causal(self) -> bool:
        """Whether the mask is causal, which two tests have in their names alone."""
        return self.given.get("causal", "causal" in self.test)

    @property
    def deterministic(self) -> bool:
        """Likewise."""
        return self.given.get("deterministic", "deterministic" in self.test)

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of queries and keys; of the test that has no such parameters its own."""
        given = self.given
        if "seqlen" in given:
            return (given["seqlen"],) * 2
        lengths = given.get("seqlen_q", 146), given.get("seqlen_k", 1)
        return lengths[::-1] if given.get("swap_sq_sk") else lengths

    @cached_property
    def lengths(self) -> tuple[list[int], list[int]]:
        """Of each sequence; packed ones are up to 20 tokens shorter, of one tensor alike."""
        rng = random.Random(self.seed)
        queries, keys = (
            [rng.randint(max(1, n - 20), n) if self.packed else n for _ in range(SEQUENCES)] for n in self.longest
        )
        return queries, queries if "qkvpacked" in self.test else keys

    @property
    def lengths_k(self) -> list[int]:
        """As `tools.matrix.check.errors` asks for it, like the next two."""
        return self.lengths[1]

    @property
    def value_dim(self) -> int:
        """Of the values too."""
        return self.given["d"]

    @property
    def scale(self) -> float:
        """The default."""
        return self.value_dim**-0.5

    @property
    def window(self) -> tuple[int, int]:
        """Drawn where the test is of a local mask."""
        rng, most = random.Random(self.seed), self.longest[1] - 1
        return (rng.randint(0, most), rng.randint(0, most)) if self.given.get("local") else (-1, -1)

    def inputs(self, device: str) -> list[Tensor]:
        """q, k, v and do, (total, heads, head_dim)."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype, kv_heads = getattr(torch, self.given["dtype"]), KV_HEADS[self.given.get("mha_type", "mha")]
        large = (5, 3, 3, 1) if "overflow" in self.test else (1, 1, 1, 1)
        sizes = [(sum(self.lengths[0]), HEADS), *[(sum(self.lengths[1]), kv_heads)] * 2, (sum(self.lengths[0]), HEADS)]
        drawn = [torch.randn(*size, self.value_dim, generator=generator) * x for size, x in zip(sizes, large)]
        return [x.to(device, dtype) for x in drawn]

    def options(self, device: str) -> dict[str, object]:
        """The keywords of the call."""
        found = {"causal": self.is_causal, "window_size": self.window, "deterministic": self.deterministic}
        found |= {name: self.given[name] for name in ("dropout_p", "softcap") if name in self.given}
        if self.given.get("alibi"):
            found["alibi_slopes"] = torch.rand(SEQUENCES, HEADS, device=device)
        if self.given.get("paged_kv_block_size"):
            found["block_table"] = torch.zeros(SEQUENCES, 1, dtype=torch.int32, device=device)
        return found


def attended(case: Case, q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """o, (total, heads, head_dim), and lse, (heads, total), by the function that the test calls."""
    if "qkvpacked" in case.test:
        kind, tensors = "qkvpacked_", [torch.stack((q, k, v), 1)]
    elif case.given.get("kvpacked"):
        kind, tensors = "kvpacked_", [q, torch.stack((k, v), 1)]
    else:
        kind, tensors = "", [q, k, v]
    options |= case.options(q.device.type) | {"return_attn_probs": True}
    if case.packed:
        offsets = [torch.tensor([0, *x], device=q.device).cumsum(0).int() for x in case.lengths]
        places = [*offsets, *(max(x) for x in case.lengths)]
        places = places[::2] if "qkvpacked" in case.test else places
        return getattr(flash_attn, f"flash_attn_varlen_{kind}func")(*tensors, *places, **options)[:2]
    tensors = [x.unflatten(0, (SEQUENCES, -1)) for x in tensors]
    o, lse, _ = getattr(flash_attn, f"flash_attn_{kind}func")(*tensors, **options)
    return o.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def outcome(case: Case, inputs: list[Tensor], **options: object) -> list[Tensor]:
    """o, lse and the gradients of q, k and v."""
    *leaves, do = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    o, lse = attended(case, *leaves, **options)
    if "transpose" in case.test:  # which is of dO that is not contiguous
        do = do.repeat_interleave(2, 1)[:, ::2]
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)]


def exact(case: Case, inputs: list[Tensor]) -> list[Tensor]:
    """The same in FP32, each sequence by itself with its mask spelt out."""
    queries, keys = case.lengths
    found = []
    for n, m, *parts in zip(queries, keys, *(x.split(y) for x, y in zip(inputs, (queries, keys, keys, queries)))):
        visible = band(torch.arange(m - n, m), torch.arange(m), case.is_causal, case.window).to(inputs[0].device)
        found.append(attention(*(x.transpose(0, 1)[None] for x in parts), case.scale, visible))
    o, lse, *gradients = (torch.cat([x[0] for x in column], 1) for column in zip(*found))
    o, dq, dk, dv = (x.transpose(0, 1) for x in (o, *gradients))
    return [o, lse, dq, dk, dv]


def check(case: Case, recipe: str, impl: str | None, device: str) -> tuple[str | None, list[float]]:
    """What is wrong, or None, and the error of each tensor."""
    inputs = case.inputs(device)
    first, second = (outcome(case, inputs, recipe=recipe, impl=impl) for _ in range(2))
    right = exact(case, inputs)
    found = errors(case, inputs, first, right)
    emulated = errors(case, inputs, outcome(case, inputs, recipe=recipe, impl="reference"), right)
    for name, x, y, error, of_emulator, bound in zip(TENSORS, first, second, found, emulated, BOUNDS[recipe]):
        if not torch.equal(x, y) and (name != "dq" or case.deterministic):
            return f"{name}: a second call gives other bits", found
        if not error <= bound and "overflow" not in case.test:
            return f"{name}: relative L2 {error:.3g} over {bound}", found
        if not error <= 2 * of_emulator + ROUNDED:
            return f"{name}: relative L2 {error:.3g}, the emulator has {of_emulator:.3g}", found
    return None, found


def refusal(case: Case, device: str) -> str | None:
    """What is wrong with the refusal of a case, or None."""
    try:
        attended(case, *case.inputs(device)[:3])
    except NotImplementedError as error:
        return None if case.refused in str(error) else f"the refusal does not name {case.refused}: {error}"
    return f"{case.refused} was not refused"


def main(arguments: list[str] | None = None) -> int:
    """Run, print a line a test and the refused, and return 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--test", action="append", help="a test by its name, repeated; without it all")
    parser.add_argument("--cases", type=int, default=20, help="of each test")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--recipe", choices=list(BOUNDS), default="token")
    parser.add_argument("--impl")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(arguments)
    wrong, ran, untaken = 0, 0, Counter()
    found_tests = dict(grids((given.path / FILE).read_text(encoding="utf-8")))
    if unknown := set(given.test or ()) - set(found_tests):
        parser.error(f"--test {', '.join(sorted(unknown))}: the file has {', '.join(found_tests)}")
    for test in given.test or found_tests:
        parameters = found_tests[test]
        cases = [Case(test, tuple(x.items()), seed) for seed, x in enumerate(parameters)]
        refused = [case for case in cases if case.refused]
        taken = [case for case in cases if not case.refused and max(case.longest) <= given.longest]
        untaken.update(case.refused for case in refused)
        chosen = random.Random(0).sample(taken, min(given.cases, len(taken)))
        largest, problems = [0.0] * len(TENSORS), []
        for case in chosen:
            problem, found = check(case, given.recipe, given.impl, given.device)
            largest = [max(pair) for pair in zip(largest, found)]
            problems += [(case, problem)] if problem else []
        tried = {case.refused: case for case in refused}.values()
        problems += [(case, problem) for case in tried if (problem := refusal(case, given.device))]
        numbers = " / ".join(f"{x:.4f}" for x in largest) if chosen else "-"
        print(f"{test}: {len(chosen)} of {len(cases) - len(refused)} ran; largest error {numbers}", flush=True)
        for case, problem in problems:
            print(f"  WRONG {problem}: {case.given}")
        wrong, ran = wrong + len(problems), ran + len(chosen)
    for argument, count in untaken.items():
        print(f"refused: {argument}, in {count} cases")
    print(f"{ran} cases ran under {given.recipe} on {given.device}, {wrong} wrong")
    return 1 if wrong or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
