"""What times kernels and calls: each launch beside its bytes, two source trees by turns."""

import json
import re
import shutil
from typing import NamedTuple

import pytest
import torch

from sagebwd import sage_attention
from sagebwd.cache import PLANS
from sagebwd.kernels.runtime import program
from sagebwd.kernels.sm90 import widths
from sagebwd.kernels.sm90.backward import launch
from tools import beside, passes
from tools.passes import Launch, Row

pytest.importorskip("triton")


def test_a_kernel_of_another_file_takes_the_place(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "backward_kernel", launch.backward_kernel)
    variant = tmp_path / "variant.py"
    variant.write_text("backward_kernel = 'another'\n", encoding="utf-8")
    passes.replace_kernel(f"backward_kernel={variant}")
    assert launch.backward_kernel == "another"
    variant.write_text("unknown_kernel = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="launches no unknown_kernel"):
        passes.replace_kernel(f"unknown_kernel={variant}")


def test_rows_of_widths_change_by_name(monkeypatch):
    monkeypatch.setitem(widths._OF, (64, 64), widths._OF[64, 64])
    passes.change_launch("backward.64.stages=2")
    assert widths.width(64, 64).backward.stages == 2
    with pytest.raises(ValueError, match="backward has queries, stages"):
        passes.change_launch("backward.64.steps=2")


class Pair(NamedTuple):
    first: torch.Tensor | None
    second: int


class Descriptor:
    def __init__(self, base: torch.Tensor) -> None:
        self.base = base


def test_each_memory_counts_once():
    x, y = torch.zeros(10, 4), torch.zeros(8, dtype=torch.int8)
    arguments = x, x[:5], Descriptor(x), Pair(y, 3), Pair(None, 4), torch.empty(0), 7, "name"
    assert passes.bytes_of(arguments) == 160 + 8


def test_launches_are_matched_with_what_ran():
    launches = [Launch("mean_kernel", 100), Launch("kernel_cutlass", 300)]
    one = [("mean_kernel_0d1d", 0, 2), ("Memset (Device)", 3, 4), ("void kernel_cutlass_forward", 6, 11)]
    events = [(name, start + 20 * run, end + 20 * run) for run in range(2) for name, start, end in one]
    rows = passes.rows_of(launches, events, 2)
    assert rows == [
        Row("mean_kernel", 100, 2, 9), Row("Memset (Device)", None, 1, 1), Row("kernel_cutlass", 300, 5, 2)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="not the same each"):
        passes.rows_of(launches, events[:-1], 2)
    text = passes.table("a case", rows)
    assert "| kernel_cutlass | 0.0 | 0.0 | 5.0 | 2.0 |" in text
    assert text.splitlines()[-1] == "| sum | 0.0 | 0.0 | 8.0 | 12.0 |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")
def test_a_call_is_noted_launch_by_launch():
    PLANS.clear()
    x = torch.randn(1, 2, 40, 32, dtype=torch.bfloat16)
    with passes.noted() as launches:
        sage_attention(x, x, x, impl="triton", recipe="token")
    names = [launch.kernel for launch in launches]
    assert names[-1] == "forward_kernel"
    assert names.count("quantize_kernel") == 3  # Q, K and V
    assert all(launch.moved >= x.numel() for launch in launches if launch.kernel == "quantize_kernel")
    assert program.compiled.__module__ == program.__name__


def test_gradients_are_compared_with_full_precision():
    for lengths in ((), (40, 40)):
        case = passes.Case(32, 2, 2, 2, 40, lengths=lengths)
        assert passes.errors(case, "full", "cpu") == [0, 0, 0]
        assert all(0 < error < 0.1 for error in passes.errors(case, "token", "cpu"))


SMALL = {
    "dense": beside.Case(16, 2, 2, 1, 20, value_dim=8),
    "packed": beside.Case(16, heads=2, kv_heads=2, lengths=(5, 12)),
    "padded": beside.Case(16, 3, 2, 2, 20, is_causal=False, hidden=0.5),
    "window": beside.Case(16, 1, 2, 2, 20, window=(4, 0)),
}


def test_every_kind_of_call_is_timed(monkeypatch):
    monkeypatch.setattr(beside, "CASES", SMALL)
    found = beside.measure(list(SMALL), "full", "cpu", 0.1)
    assert set(found) == set(SMALL)
    assert all(set(times) == set(beside.WAYS) and min(times.values()) > 0 for times in found.values())
    assert beside.measure(list(SMALL), "full", "cpu", 0) == {}


def test_padded_keys_are_hidden(monkeypatch):
    given = {}

    def attention(*tensors, attn_mask, **_):
        given["mask"] = attn_mask
        return tensors[0]

    monkeypatch.setattr("sagebwd.sage_attention", attention)
    beside.runs_of(SMALL["padded"], "full", "cpu")
    assert given["mask"].sum(-1).flatten().tolist() == [20, 15, 10]


def test_trees_take_turns(monkeypatch, tmp_path, capsys):
    trees = [tmp_path / name for name in ("old", "new")]
    for tree in trees:
        (tree / "sagebwd").mkdir(parents=True)
    called, slow = [], iter((4.0, 3.0))

    def in_tree(tree, names, given, ms):
        called.append((tree.name, tuple(names), ms))
        time = next(slow) if tree.name == "old" and ms else 2.0
        return {name: dict.fromkeys(beside.WAYS, time) for name in names} if ms else {}

    monkeypatch.setattr(beside, "in_tree", in_tree)
    cases = [text for name in ("128", "64") for text in ("--case", name)]
    beside.main([*map(str, trees), *cases, "--processes", "1", "--json", str(tmp_path / "found.json")])
    assert called[:4] == [(tree, (name,), 0) for tree in ("old", "new") for name in ("128", "64")]
    assert called[4:] == [(tree, ("128", "64"), 40.0) for tree in ("old", "new", "old", "new")]
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| 128 | 3.000 / 3.000 / 3.000 | 1.500 / 1.500 / 1.500 |"
    found = json.loads((tmp_path / "found.json").read_text())
    assert [turn["64"]["both"] for turn in found[str(trees[0])]] == [4.0, 3.0]


def test_a_process_imports_its_trees_package(tmp_path):
    """And says what went wrong there."""
    shutil.copytree(beside.ROOT / "src" / "sagebwd", tmp_path / "sagebwd")
    source = tmp_path / "sagebwd" / "attention.py"
    source.write_text(source.read_text() + '\nraise ValueError("the other tree")\n')
    given = type("Given", (), {"recipe": "full", "device": "cpu"})
    with pytest.raises(RuntimeError, match=r"128: (?s:.*)the other tree"):
        beside.in_tree(tmp_path, ["128"], given, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["."], "holds no package sagebwd"), ([str(beside.ROOT / "src")], "two trees or more, got 1")],
)
def test_trees_that_are_none(arguments, said, capsys):
    with pytest.raises(SystemExit):
        beside.main(arguments)
    assert re.search(said, capsys.readouterr().err)
