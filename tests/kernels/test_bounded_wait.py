"""No kernel waits without a bound: a loop that asks memory until another program has written there gives up."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from sagebwd.kernels.sm90.widths import WIDTHS  # noqa: E402 (triton may be missing)
from tests.gpus import HAS_HOPPER  # noqa: E402
from tests.kernels.ptx_loops import loops  # noqa: E402
from tools import machine_code  # noqa: E402

SOURCES = machine_code.ROOT / "src"
# Loops of kernels without a count of rounds: the one that waits, those that take tiles until none is left, searches
# for a packed program's sequence, which of so many look on at a 32nd, and one that doubles a number.
WHILE = {
    "backward/dq_sums.py wait_for", "forward/producer.py load", "forward/producer.py next", "forward/kernel.py attend",
    "common/tile.py owner_of", "backward/key_blocks.py owner_of", "forward/tiles.py owner",
    "common/chunks.py its_chunk",
}  # fmt: skip
# Calls that together launch the kernels of either family: each way to add to dQ (by columns, by rows, after dV's own
# kernel, there in one piece and in three) with the fewest loops, and lists of blocks.
HOPPER = [("hopper", 64, "mixed", "document"), *(("hopper", dim, "mixed", "full") for dim in (96, 192, 256))]
# compiled further, as test_compile.py has it
PORTABLE = (80, 64, "token", "document")
# 192's kernels are 256's, but for pieces; test_compile.py has their layouts chosen in every run. 96 waits by the
# function that 64 and 256 do.
SLOW = HOPPER[1:3]


def _row(call: tuple):
    return pytest.param(call, id=machine_code.name_of(call), marks=pytest.mark.slow if call in SLOW else ())


def check(ptx: str) -> int:
    """Assert that every loop that polls gives up; how many there are."""
    found = [loop for loop in loops(ptx) if loop.polls]
    for loop in found:
        assert loop.gives_up, "\n".join(["a wait without a bound:", *loop.statements])
    return len(found)


WAIT = "$L1:\n ld.volatile.global.b32 { %r1 }, [ %rd1 + 0 ];\n setp.ne.b32 %p1, %r1, %r2;\n @%p1 bra $L1;\n"
IN_A_SCOPE = "{ .reg .pred go; again: ld.acquire.gpu.b32 %r1, [%rd1]; setp.ne.s32 go, %r1, 0; @go bra again; }\n"
PLAIN = "$L1:\n ld.global.b32 %r1, [%rd1];\n setp.ne.b32 %p1, %r1, 0;\n @%p1 bra $L2;\n bra.uni $L1;\n$L2:\n"
SWAP = "$L1:\n atom.global.cas.b32 %r1, [%rd1], 0, 1;\n setp.ne.b32 %p1, %r1, 0;\n @%p1 bra $L1;\n"
TAKE = "$L1:\n atom.global.add.u32 %r1, [%rd1], 1;\n setp.lt.s32 %p1, %r1, %r2;\n @%p1 bra $L1;\n"
WALK = "$L1:\n ld.global.b64 %rd1, [%rd1];\n setp.ne.b64 %p1, %rd1, 0;\n @%p1 bra $L1;\n"
BARRIER = "wait:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%r1], %r2;\n @!done bra.uni wait;\n"
READ_ONCE = "$L1:\n ld.volatile.global.b32 { %r1 }, [%rd1];\n setp.lt.s32 %p1, %r3, %r2;\n @%p1 bra $L1;\n"


@pytest.mark.parametrize("ptx", [WAIT, IN_A_SCOPE, PLAIN, SWAP])
def test_a_wait_is_found(ptx):
    with pytest.raises(AssertionError, match="a wait without a bound"):
        check(ptx)


# the same with a count, of which the branch knows or does not
COUNTED = (
    "$L1:\n ld.volatile.global.b32 { %r1 }, [ %rd1 + 0 ];\n setp.ne.b32 %p1, %r1, %r2;\n setp.ne.b32 %p2, %r3, 0;\n"
    " and.pred %p3, %p1, %p2;\n add.s32 %r3, %r3, 1;\n @%p3 bra $L1;\n"
)
UNUSED = COUNTED.replace("%p3 bra", "%p1 bra")


@pytest.mark.parametrize("trap", ["trap", "brkpt"])
def test_a_wait_that_counts_and_traps_is_bounded(trap):
    assert check(f"{COUNTED} @%p4 {trap};\n") == 1
    for unbounded in (COUNTED, f"{UNUSED} @%p4 {trap};\n", f"{WAIT} @%p4 {trap};\n"):
        with pytest.raises(AssertionError, match="a wait without a bound"):
            check(unbounded)


@pytest.mark.parametrize("ptx", [TAKE, WALK, BARRIER, READ_ONCE])
def test_other_loops_are_no_waits(ptx):
    assert len(list(loops(ptx))) == 1
    assert check(ptx) == 0


@pytest.mark.parametrize("call", [*map(_row, HOPPER), _row(PORTABLE)])
def test_waits_are_bounded(call):
    rows = machine_code.launches(call if call == PORTABLE else (*call, "256", "ptx"))
    waits = {(row["kernel"], row["deterministic"]): check(row["ptx"]) for row in rows}
    # of two warpgroups each waits in its loops and after them
    ordered = {kernel: count for kernel, count in waits.items() if count}
    kernel = "key_query_kernel" if call[1] in (192, 256) else "backward_kernel"
    assert ordered.keys() == (set() if call == PORTABLE else {(kernel, True)})
    assert all(count >= 4 for count in ordered.values())


def test_the_forward_takes_tiles_and_waits_for_none():
    from sagebwd.kernels.sm90.forward import compile as sm90
    from sagebwd.kernels.sm90.forward.variant import Variant

    if sm90.unavailable() is not None:
        pytest.skip(sm90.unavailable())
    with tempfile.TemporaryDirectory() as folder:
        variant = Variant(*WIDTHS[0][:2], "bfloat16", WIDTHS[0].forward, upper=True)
        ptx = sm90.compiled(variant, f"--keep-ptx --dump-dir={folder}").artifacts.PTX
    assert any("atom.global.add" in x for loop in loops(ptx) for x in loop.statements)
    assert check(ptx) == 0


def _is_compiled(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_no_other_kernel_has_a_loop_without_a_count():
    found = {
        f"{path.parent.name}/{path.name} {function.name}"
        for path in SOURCES.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef) and _is_compiled(function)
        if any(isinstance(x, ast.While) for x in ast.walk(function))
    }
    assert found == WHILE, "a loop that may wait: bound it as `dq_sums.wait_for` does, and name it here"


def test_a_breakpoint_is_a_trap(tmp_path):
    """What `dq_sums.trap_unless` counts on, of every ptxas that is here; which barriers to wait for is apart."""
    folders = [Path(triton.__file__).parents[1], *Path(sys.prefix).glob("triton-*")]
    for programs in (folder / "triton/backends/nvidia/bin" for folder in folders):
        code = {}
        for name in ("trap", "brkpt"):
            source, cubin = tmp_path / f"{name}.ptx", tmp_path / f"{name}.cubin"
            source.write_text(f".version 8.0\n.target sm_90a\n.address_size 64\n.entry kernel() {{ {name}; ret; }}\n")
            subprocess.run([programs / "ptxas", "--gpu-name", "sm_90a", source, "-o", cubin], check=True)
            printed = subprocess.run([programs / "nvdisasm", "-c", "-hex", cubin], capture_output=True, check=True)
            code[name] = re.findall(r"BPT\S* .*?;\s+/\* (0x\w+) \*/", printed.stdout.decode())
        assert len(code["trap"]) == 1
        assert code["trap"] == code["brkpt"]


# POLLS: so few that nobody waits for the trap, and more than anyone asks whose turn will come.
PROGRAM = """
import sys, time
import torch
from triton.experimental.gluon import language as gl
from sagebwd import sage_attention
from sagebwd.kernels.runtime import device, launchers
from sagebwd.kernels.sm90.backward import dq_sums
from sagebwd.switches import switches

dq_sums.POLLS = gl.constexpr(2**20)


def clear_to_a_wrong_number(address, size, of, stream):
    # maxima and sums begin at nearly 0, as floating-point numbers, and counters at 16843009
    device.clear(address, size, of, stream)
    assert device.libcuda().cuMemsetD8Async(address, 1, size, stream) == 0


torch.manual_seed(0)
inputs = [torch.randn(1, 2, 512, int(sys.argv[1]), device="cuda", dtype=torch.bfloat16) for _ in range(4)]
*inputs, do = [x.requires_grad_() for x in inputs]
with switches(deterministic=True):
    o = sage_attention(*inputs, recipe="mixed", impl="hopper")
torch.autograd.grad(o, inputs, do, retain_graph=True)
torch.cuda.synchronize()
print("right counters", flush=True)
launchers.clear = clear_to_a_wrong_number
began = time.monotonic()
try:
    torch.autograd.grad(o, inputs, do)
    torch.cuda.synchronize()
    print("no error", flush=True)
finally:
    print(f"{time.monotonic() - began:.1f} seconds", flush=True)
"""


# each way to add to dQ: by columns, by rows, and from the second of two kernels
@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_a_broken_counter_is_an_error(head_dim):
    """A trap ends all that a process may do with its GPU: it has one of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SOURCES), environment.get("PYTHONPATH", "")])
    # most of it for compilers: a kernel that hangs ends with its process, which the time's end kills
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(head_dim)], capture_output=True, text=True, env=environment, timeout=400
    )
    said = f"{done.stdout}\n{done.stderr[-3000:]}"
    assert "right counters" in done.stdout, said
    assert "no error" not in done.stdout, said
    assert done.returncode != 0, said
    assert re.search(r"CUDA error|Error \[CUDA\]|CUDA's error", done.stderr), said
    assert float(re.search(r"([\d.]+) seconds", done.stdout).group(1)) < 60, said
