"""Two source trees timed by turns: the calls, the turns, and whose package a process imports."""

import json
import shutil

import pytest

from tools import beside

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
