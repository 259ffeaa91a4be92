"""What `tools.sanitize` makes of the sanitizers' output; the sanitizers themselves need a GPU."""

import pytest

from tools import sanitize

# A file of kernels as the package's are: a partition's own code, then the kernel that starts partitions.
SOURCE = """\
@gluon.jit
def accumulate(sums, tile):
    return sums + tile


@gluon.jit
def dkdv_kernel(out, CONSUMERS: gl.constexpr):
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize([(accumulate, (out, 1))], [4], [24])
    else:
        gl.warp_specialize([(accumulate, (out, 2))], [4], [24])
"""
ACCUMULATE, KERNEL, FENCE, CALL = (SOURCE[: SOURCE.index(text)].count("\n") + 1 for text in (
    "def accumulate", "def dkdv_kernel", "fence_async", "if CONSUMERS"))  # fmt: skip
HANDED_OVER = {"dkdv.py": {KERNEL, CALL, CALL + 1, CALL + 2, CALL + 3}}
LINES = sanitize.Lines(HANDED_OVER, {"producer.py": {20, 21}, "kernel.py": {30}, "tiles.py": {40}})
CLEAN = (
    "========= COMPUTE-SANITIZER\n1/1 cases, 0 failed, 33 s\n1 passed, 0 failed\n========= ERROR SUMMARY: 0 errors\n"
)


def race(*accesses: tuple[str, int] | tuple[str, int, str]) -> str:
    """A report as compute-sanitizer 2025.3 prints it; of (kind, line, file) each."""
    (kind, first, *file), *others = accesses
    text = (
        f"========= Error: Race reported between {kind} access at a_kernel+0x1e0 in {(*file, 'dkdv.py')[0]}:{first}\n"
    )
    for kind, other, *file in others:
        text += f"=========     and {kind} access at a_kernel+0xdef0 in {(*file, 'dkdv.py')[0]}:{other} [5 hazards]\n"
    return text + "========= \n"


def racecheck(*reports: str) -> str:
    many = f"{len(reports)} hazards displayed ({len(reports)} errors, 0 warnings)"
    return "".join(reports) + f"1 passed, 0 failed\n========= RACECHECK SUMMARY: {many}\n"


HANDOVER = race(("Read", KERNEL), ("Write", KERNEL), ("Write", CALL))
STAGED = race(("Write", 20, "/src/producer.py"), ("Read", 30, "/src/kernel.py"), ("Read", 40, "/src/tiles.py"))
STAGED = STAGED.replace("a_kernel", f"kernel_cutlass_{sanitize.CUTE}")


def test_hand_over_is_at_the_kernel_and_where_it_starts_partitions(tmp_path):
    (tmp_path / "dkdv.py").write_text(SOURCE, encoding="utf-8")
    assert sanitize.handover_lines(tmp_path / "dkdv.py") == HANDED_OVER["dkdv.py"]
    (tmp_path / "tile.py").write_text(SOURCE[: SOURCE.index("@gluon.jit\ndef dkdv")], encoding="utf-8")
    assert sanitize.handover_lines(tmp_path / "tile.py") == set()
    assert sanitize.handover_lines(sanitize.HANDOVER)


def test_clean_and_handed_over():
    assert sanitize.judge(CLEAN, 0, LINES) == sanitize.Finding(0, None)
    assert sanitize.judge(racecheck(HANDOVER, HANDOVER), 0, LINES) == sanitize.Finding(2, None)
    assert sanitize.judge(racecheck(HANDOVER, STAGED), 0, LINES) == sanitize.Finding(2, None)


@pytest.mark.parametrize(
    ("text", "code", "problem"),
    [
        (racecheck(HANDOVER, race(("Read", ACCUMULATE + 1), ("Write", KERNEL))), 0, "1 races: Read a_kernel dkdv"),
        (racecheck(race(("Read", FENCE), ("Write", CALL))), 0, "1 races"),
        (racecheck(race(("Read", KERNEL))), 0, "1 races"),
        (racecheck(race(("Write", 20, "producer.py"), ("Write", 21, "producer.py"))), 0, "1 races"),
        (racecheck(race(("Read", 30, "kernel.py"), ("Read", 40, "tiles.py"))), 0, "1 races"),
        (racecheck(race(("Write", 20, "producer.py"), ("Read", 31, "kernel.py"))), 0, "kernel.py:31"),
        (racecheck(STAGED.replace(sanitize.CUTE, "backward")), 0, "1 races"),
        (racecheck(STAGED.replace(":40", ":41")), 0, "tiles.py:41"),
        (racecheck(HANDOVER.replace("a_kernel", sanitize.CUTE)), 0, "1 races"),
        (racecheck("========= Error: Race reported between Read access at dkdv_kernel+0x1e0\n"), 0, "no source line"),
        (CLEAN.replace("0 errors", "3 errors"), 0, "3 errors"),
        (CLEAN.replace("1 passed, 0 failed", "0 passed, 1 failed"), 1, "exit code 1"),
        ("compute-sanitizer: not found", 127, "no summary, exit code 127"),
    ],
    ids=[
        "ours", "beside the call", "one end", "two writes", "two reads", "beside a stage's masks",
        "a stage's of the backward", "a stage's beside it", "a hand-over of the forward", "no line", "memory",
        "wrong", "no tool",
    ],
)  # fmt: skip
def test_anything_else_is_a_finding(text, code, problem):
    assert problem in sanitize.judge(text, code, LINES).problem
