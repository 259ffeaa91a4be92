"""`tools.turns` on a CPU: the same tree twice, and one whose numbers are others."""

import shutil

from tests.documents import ROOT
from tools import turns


def test_trees_are_compared(tmp_path, capsys):
    other = tmp_path / "other"
    for folder in ("src", "benchmarks", "lab"):
        shutil.copytree(ROOT / folder, other / folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    emulator = other / "src/sagebwd/reference/emulator.py"
    text = emulator.read_text(encoding="utf-8")
    assert "    def backward(" in text
    emulator.write_text(text.replace("    def backward(", "    def _backward(", 1) + PLANTED, encoding="utf-8")
    given = [str(ROOT), str(other), "--device", "cpu", "--case", "dense:64"]
    assert turns.main([*given, "--case", "unknown"]) == 0
    _, dense, unknown = capsys.readouterr().out.splitlines()
    first, second = dense.split(" | ")
    assert "(1.000 1.000) same o dq dk dv" in first
    assert second.partition(",")[0].endswith("same o dq dk")
    assert "ValueError: " in unknown


PLANTED = """

def _backward_with_another_dv(self, *given):
    dq, dk, dv = self._backward(*given)
    return dq, dk, 2 * dv


Emulator.backward = _backward_with_another_dv
"""
