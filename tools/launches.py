"""Write the tables of dev/launches.md: what forward and backward launch, in order, with shapes and bytes.

The tables are what the families themselves describe (`sagebwd.kernels.runtime.program`), on tensors without memory, as
if there were the card of each family: no GPU is needed, and a test finds that writing them again changes nothing. A
tensor is made by the launch in which its memory first appears, and read by the others.

    python -m tools.launches            writes the tables
    python -m tools.launches --print    prints them
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from sagebwd.call import Call, Saved, empty_like_rows
from sagebwd.kernels.mma_sync import launch as mma_sync
from sagebwd.kernels.portable import launch as portable
from sagebwd.kernels.runtime import device, program
from sagebwd.kernels.sm90.backward import launch as hopper_backward
from sagebwd.kernels.sm90.forward import launch as hopper_forward
from sagebwd.kernels.sm90.forward.variant import Arguments
from sagebwd.recipe import Recipe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "dev/launches.md"
CUDA = ROOT / "src/sagebwd/kernels/mma_sync/cuda"
META = torch.device("meta")
# The call of the page: a causal one.
BATCH, HEADS, KV_HEADS, TOKENS, HEAD_DIM = 1, 16, 4, 4096, 128
# Of each family: forward and backward, the recipe, the compute capability, the head_dim.
FAMILIES = {
    "hopper": (hopper_forward.forward, hopper_backward.backward, "mixed", 90, HEAD_DIM),
    "hopper-256": (hopper_forward.forward, hopper_backward.backward, "mixed", 90, 256),
    "mma_sync": (mma_sync.forward, mma_sync.backward, "token", 80, HEAD_DIM),
    "portable": (portable.forward, portable.backward, "token", 100, HEAD_DIM),
}
# What each kernel computes.
PURPOSE = {
    "statistics_kernel": "sums of K and V over chunks of tokens; V of the first keys apart",
    "finish_kernel": "means of K and V from the sums",
    "quantize_kernel": "INT8 codes and scales of psi, of tokens less their mean, times R",
    "sum_keys_kernel": "sums of K, and of K R, over chunks of a sample of the tokens",
    "key_codes_kernel": "K's mean from the sums; codes of (K less it) R, a scale a lane; the largest norm of a key",
    "quantize": "codes of Q R, (K less its mean) R and V less its mean, each with its scales",
    "forward": "S = Q K^T, P = exp2(S - m), O = P V / l, lse; on Hopper also Q's codes",
    "forward_kernel": "S = Q K^T, P = exp2(S - m), O = P V / l, lse",
    "channel_maxima_kernel": "the largest magnitude of each of V's channels; R's signs",
    "row_values_kernel": "delta, lse, Q's scales by row; e4m3 copies of dO and Q, transposed; dO scaled; zeros for dQ",
    "backward_kernel": "steps 1 to 7: dV and dK of 128 keys, and their share of dQ",
    "value_kernel": "steps 1, 3 and 5: dV of 128 keys",
    "key_query_kernel": "steps 1 to 4, 6 and 7: dK of 128 keys, and their share of dQ",
    "finish_dq_kernel": "dQ from its FP16 sums: scaled, transposed, turned back by R",
    "transpose_kernel": "K's codes transposed, an operand of dQ",
    "grad_out_kernel": "delta, lse and scales by row; codes of dO, transposed, and of Q",
    "row_values": "delta, lse and scales by row; codes of dO, transposed, and of Q",
    "dq_kernel": "steps 1 to 4 and 7: dQ of a block of queries; maxima of P and dS where they are shared",
    "dkdv_kernel": "steps 1 to 6: dV and dK of a block of keys",
    "backward": "steps 1 to 7: dV and dK of 128 keys, and their share of dQ",
    "finish": "dQ from its FP32 sums: turned back by R",
}
# What is returned in memory that had something else first.
REUSED = {"dq"}
SHORT = {
    torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32", torch.int8: "INT8", torch.int32: "INT32",
    torch.float8_e4m3fn: "e4m3",
}  # fmt: skip


class Named:
    """In the place of a kernel that is not Triton's: its name, and names of its parameters."""

    def __init__(self, name: str, arg_names: tuple[str, ...]) -> None:
        self.__name__, self.arg_names = name, arg_names


class Launch(NamedTuple):
    """A kernel's name, and its tensors by the names of their parameters."""

    kernel: str
    tensors: list[tuple[str, Tensor]]


class Direction(NamedTuple):
    """What a direction launches; names by memory of what it is given and returns, and memory that is zeros before."""

    launches: list[Launch]
    given: dict[int, str]
    returned: dict[int, str]
    zeroed: set[int]


def parameters(name: str) -> tuple[str, ...]:
    """Of a kernel in CUDA C++, in order."""
    for file in sorted(CUDA.glob("*.cu")):
        found = re.search(rf"KERNEL {name}\((.*?)\) {{", file.read_text(encoding="utf-8"), re.DOTALL)
        if found:
            text = re.sub(r"#.*|//.*", ",", found[1])
            return tuple(x.split()[-1].lstrip("*") for x in text.split(",") if x.strip())
    raise ValueError(f"no kernel {name} in {CUDA}")


def tensors_of(name: str, x: object) -> Iterator[tuple[str, Tensor]]:
    """An argument's tensors."""
    if isinstance(x, Tensor) and x.numel():
        yield name, x
    elif isinstance(getattr(x, "base", None), Tensor):
        yield name, x.base
    elif isinstance(x, tuple):
        for field, value in zip(getattr(x, "_fields", [""] * len(x)), x):
            yield from tensors_of(name if field in ("at", "") else f"{name}.{field}", value)


def memory_of(x: Tensor) -> int:
    """By which memory without an address is told from other."""
    return x.untyped_storage()._cdata


def described(function: Callable, call: Call, given: tuple, returned: tuple[str, ...], capability: int) -> Direction:
    """What a family's function launches; given: named tuples, whose fields' names are those of the page."""

    def of_source(source: object, arch: int) -> Named:
        return Named(source.name, parameters(source.name))

    with ExitStack() as stack:
        for module, name, value in (
            (program, "compiled", lambda *_: None), (device, "num_sms", lambda device: 132),
            (hopper_forward, "num_sms", lambda device: 132), (device, "capability", lambda device: capability),
            (mma_sync, "capability", lambda device: capability), (mma_sync, "kernel_of", of_source),
            (hopper_forward, "forward_kernel", lambda variant: Named("forward", Arguments._fields)),
        ):  # fmt: skip
            stack.enter_context(patch.object(module, name, value))
        builder = stack.enter_context(program._describing())
        given = program._described(given, [])
        outputs = function(call, *given)
    launches = [
        Launch(kernel.__name__, [x for pair in zip(kernel.arg_names, arguments) for x in tensors_of(*pair)])
        for _, kernel, _, arguments, _ in builder.steps
    ]
    names = {memory_of(x): name.partition(".")[2] for one in given for name, x in tensors_of("", one)}
    return Direction(
        launches, names, {memory_of(x): name for name, x in zip(returned, outputs) if x is not None},
        set(builder.zeroed),
    )  # fmt: skip


class Rows(NamedTuple):
    """What forward is given."""

    q: Tensor
    k: Tensor
    v: Tensor


def of_family(family: str) -> dict[str, Direction]:
    """Both directions of a family."""
    forward, backward, recipe, capability, head_dim = FAMILIES[family]
    rows = Rows(*(
        torch.empty(BATCH, n, TOKENS, head_dim, dtype=torch.bfloat16, device=META) for n in (HEADS, KV_HEADS, KV_HEADS)
    ))  # fmt: skip
    q, k, _ = rows
    call = Call.of(
        q, k, (head_dim, head_dim), None, None, None, TOKENS, TOKENS, True, -1, -1, 0.1, Recipe.parse(recipe)
    )  # fmt: skip
    queries, keys = call.queries, call.keys
    saved = Saved(
        empty_like_rows(q), queries.per_token(META), torch.empty_like(q, dtype=torch.int8), queries.per_token(META),
        torch.empty_like(k, dtype=torch.int8), keys.per_token(META), queries.per_token(META),
        torch.empty(BATCH, KV_HEADS, head_dim, device=META),
    )  # fmt: skip
    return {
        "forward": described(lambda call, rows: forward(call, *rows), call, (rows,), Saved._fields, capability),
        "backward": described(
            lambda call, saved, do, rows: backward(call, saved, do, None, *rows), call,
            (saved, torch.empty_like(q), rows), ("dq", "dk", "dv"), capability,
        ),
    }  # fmt: skip


def size(count: int) -> str:
    """Bytes as one reads them."""
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.3g} {unit}"
    return f"{count} B"


def table(direction: Direction) -> str:
    """Markdown: a row a launch."""
    made: dict[int, str] = {}
    lines = ["| | kernel | what it computes | reads | makes |", "| --- | --- | --- | --- | --- |"]
    for number, (kernel, tensors) in enumerate(direction.launches, 1):
        reads, makes = [], []
        for name, x in tensors:
            memory = memory_of(x)
            returned = direction.returned.get(memory)
            if memory in direction.given:
                reads.append(direction.given[memory] or "do")
            elif memory in made and (name not in REUSED or made[memory].startswith(f"`{name}`")):
                reads.append(made[memory])
            else:
                made[memory] = f"`{name}` of {number}"
                zeros = ", zeros before" if memory in direction.zeroed else ""
                becomes = f" → **{returned}**" if returned and returned != name else ""
                shown = f"**{name}**" if returned == name else f"`{name}`"
                shape = " x ".join(map(str, x.shape))
                makes.append(f"{shown}{becomes} {shape} {SHORT[x.dtype]}, {size(x.nbytes)}{zeros}")
        reads = ", ".join(dict.fromkeys(x for x in reads if not x.endswith(f" of {number}")))
        lines.append(f"| {number} | `{kernel}` | {PURPOSE[kernel]} | {reads} | {'; '.join(makes)} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with its tables as they are now."""
    for family in FAMILIES:
        for name, direction in of_family(family).items():
            begin, end = f"<!-- launches: {family} {name} -->\n", "<!-- end -->\n"
            before, found, rest = page.partition(begin)
            if found:
                page = before + begin + table(direction) + end + rest.partition(end)[2]
    return page


def main(arguments: list[str]) -> None:
    """Write the page's tables, or print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print the page and leave it as it is")
    page = written(PAGE.read_text(encoding="utf-8"))
    if parser.parse_args(arguments).print:
        print(page)
    else:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
