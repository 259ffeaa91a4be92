"""PTX of sinks' kernels for sm_90: a barrier of all threads lies between reads and writes of memory in place.

A program's warps load the same rows, so without it one may read what another has overwritten.
"""

import importlib
import json
import re
import sys

import pytest

from tests import programs

pytest.importorskip("triton")

ARCH = 90
# Of each kernel, the buffers that a program reads and then overwrites.
IN_PLACE = {"weigh_kernel": ("lse", "o"), "gradient_kernel": ("dq",)}
FORMS = [
    (dim, value_dim, dtype, smooth, packed)
    for dim, value_dim in ((64, 64), (24, 40))
    for dtype, smooth, packed in (
        ("bfloat16", True, False), ("bfloat16", False, False), ("float16", True, True), ("float16", False, True),
    )
]  # fmt: skip

ENTRY = re.compile(r"\.entry \w+\((.*?)\)", re.DOTALL)
REGISTER = re.compile(r"%\w+")


class Ptx:
    """Global accesses, barriers and branches of one kernel by line, addresses traced back to pointer parameters."""

    def __init__(self, text: str, pointers: list[str]) -> None:
        """pointers: names of the pointer parameters, in order."""
        entry = ENTRY.search(text)
        # the last two that triton adds are scratch
        names = re.findall(r"\.param \.u64 \.ptr \.global [^,\n]*?(\w+_param_\d+)", entry.group(1))
        assert len(names) >= len(pointers), (names, pointers)
        of_param = dict(zip(names, pointers))
        self.lines = [line.strip() for line in text[entry.end() :].splitlines()]
        came_from: dict[str, frozenset[str]] = {}
        for _ in range(3):  # a register may be set behind where it is read, in text
            for line in self.lines:
                body = re.sub(r"^@!?%\w+\s+", "", line)
                if not body.endswith(";") or not body.startswith(
                    ("ld.param", "add", "mad", "mov", "cvta", "selp", "sub")
                ):
                    continue
                to, *given = body.split(None, 1)[1].split(",", 1)
                found = frozenset().union(*(came_from.get(x, frozenset()) for x in REGISTER.findall("".join(given))))
                found |= {of_param[x] for x in re.findall(r"\w+_param_\d+", body) if x in of_param}
                for register in REGISTER.findall(to):
                    came_from[register] = came_from.get(register, frozenset()) | found
        self.loads: list[tuple[int, frozenset[str]]] = []
        self.stores: list[tuple[int, frozenset[str]]] = []
        self.barriers: list[int] = []
        labels = {m.group(1): n for n, line in enumerate(self.lines) if (m := re.match(r"(\$\w+):", line))}
        self.branches_back = []
        for n, line in enumerate(self.lines):
            access = re.search(r"\b(ld|st)\.(?:\w+\.)*?global\b[^\[]*\[\s*(%\w+)", line)
            if access:
                owners = came_from.get(access.group(2), frozenset())
                assert len(owners) == 1, (line, owners)
                (self.loads if access.group(1) == "ld" else self.stores).append((n, owners))
            if re.match(
                r"(bar\.sync|barrier\.sync|barrier\.cta\.sync(\.aligned)?)\s+0\s*;", line
            ):  # nobody is left out
                self.barriers.append(n)
            branch = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)
            if branch and labels[branch.group(1)] < n:
                self.branches_back.append(n)

    def unordered(self, name: str) -> str | None:
        """What is wrong with a buffer that is read and then overwritten; None if a barrier lies in between."""
        loads = [n for n, owners in self.loads if name in owners]
        stores = [n for n, owners in self.stores if name in owners]
        assert loads, f"no load of {name}"
        assert stores, f"no store to {name}"
        if max(loads) > min(stores):
            return f"{name}: a load, line {max(loads)}, follows a store, line {min(stores)}"
        if not any(max(loads) < n < min(stores) for n in self.barriers):
            return f"{name}: no barrier between line {max(loads)} and line {min(stores)}"
        return None


def ptx_of(kernel: str, form: tuple, without_barrier: bool) -> list[str]:
    """What is wrong with a kernel's buffers, in a process without TRITON_INTERPRET."""
    import torch

    from sagebwd.call import Packing, padded_head_dim
    from sagebwd.kernels import sinks
    from sagebwd.kernels.common.strided import Strided
    from tools.cross_compile import Launch

    dim, value_dim, dtype, smooth, packed = form
    dtype, fn = getattr(torch, dtype), getattr(importlib.reload(sinks), kernel)
    if without_barrier:
        assert fn.src.count("tl.debug_barrier()") == 1, fn.src
        fn._unsafe_update_src(fn.src.replace("tl.debug_barrier()", "pass"))
    batch, heads, tokens = 2, 4, 512
    rows = (tokens, heads) if packed else (batch, heads, tokens)
    offsets = torch.zeros(batch + 1, dtype=torch.int32, device="meta") if packed else None

    def of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, o = of(*rows, dim, dtype=dtype), of(*rows, value_dim, dtype=dtype)
    do, dq = torch.empty_like(o), torch.empty_like(q)
    packing = Packing.of(q, offsets, tokens)
    lse = of(*(rows[::-1] if packed else rows))
    weight, dlse, of_sinks, found = torch.empty_like(lse), torch.empty_like(lse), of(heads), of(batch * heads, 8)
    k_mean = of(batch, heads // 2, dim) if smooth else None
    grid = packing.blocks(sinks.BLOCK)
    if kernel == "weigh_kernel":
        given = {
            "o": Strided.of(o, packing), "lse": lse, "weight": weight, "q": Strided.of(q, packing), "k_mean": k_mean,
            "sinks": of_sinks, "cu_seqlens": offsets, "scale": 0.3,
        }  # fmt: skip
    else:
        given = {
            "do": Strided.of(do, packing), "dlse": dlse, "o": Strided.of(o, packing), "weight": weight,
            "dq": Strided.of(dq, packing), "k_mean": k_mean, "found": found, "cu_seqlens": offsets, "scale": 0.3,
        }  # fmt: skip
    assert fn.arg_names[: len(given)] == list(given)
    group = packing.heads // k_mean.shape[1] if smooth else 1
    launch = Launch.of(
        fn, ARCH, *given.values(), packing.heads, group, packing.extent, packing.total, grid, head_dim=dim,
        value_dim=value_dim, VARLEN=packed, BLOCK=sinks.BLOCK, BLOCK_D=padded_head_dim(dim),
        BLOCK_V=padded_head_dim(value_dim),
    )  # fmt: skip
    pointers = [name for name, x in given.items() if isinstance(x, (torch.Tensor, Strided))]
    text = launch.text("ptx")
    ptx = Ptx(text, pointers)
    names = [x for x in IN_PLACE[kernel] if x != "dq" or smooth]
    # a packed program searches for its sequence in a loop, before it reads any of them
    begun = min(n for n, owners in ptx.loads if owners & set(names))
    loops = [n for n in ptx.branches_back if n > begun]
    wrong = [f"a loop, lines {loops}"] if loops else []
    return wrong + [x for x in map(ptx.unordered, names) if x is not None]


def asked(without_barrier: bool) -> dict:
    """Of both kernels, what is wrong in each form, or in the first two."""
    (found,) = programs.compiled("tests.kernels.test_sinks_barrier", str(int(without_barrier)))
    assert set(found) == set(IN_PLACE)
    return found


def test_a_barrier_lies_between_reads_and_writes_in_place():
    for kernel, forms in asked(without_barrier=False).items():
        for form, wrong in forms.items():
            assert not wrong, (kernel, form, wrong)


def test_the_check_sees_that_a_barrier_is_missing():
    for kernel, forms in asked(without_barrier=True).items():
        assert any(forms.values()), kernel  # a form's reduction may have a barrier of its own


if __name__ == "__main__":
    taken_out = sys.argv[1] == "1"
    print(json.dumps({
        kernel: {
            str(form): ptx_of(kernel, form, taken_out)
            for form in (FORMS[:2] if taken_out else FORMS)
            if kernel == "weigh_kernel" or form[3]  # else dq is not read
        }
        for kernel in IN_PLACE
    }))  # fmt: skip
