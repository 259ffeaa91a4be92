"""`tools.auto_shapes` on small calls, by a clock that makes times up."""

import json

import pytest
import torch

from sagebwd.masks.kinds import CAUSAL, FULL, KINDS, WINDOW
from tools import auto_shapes
from tools.auto_shapes import Call

SMALL = [Call(kind, 16, 16, 2, 2, 2, 64) for kind in KINDS]


def clock(auto):
    """A timer by which `auto` takes so many ms, and torch's ways 1."""
    return lambda runs, device: {name: (auto if name == "auto" else 1.0, 0.1) for name in runs}


@pytest.mark.parametrize("kind", [CAUSAL, WINDOW])
def test_both_compute_the_same(kind):
    call = Call(kind, 16, 8, 1, 4, 2, 64)
    *tensors, _ = call.inputs("cpu")
    ours, theirs, _ = auto_shapes.attentions(call, tensors)
    torch.testing.assert_close(ours(*tensors), theirs["torch"](*tensors))


def test_the_command_says_what_has_lost(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(auto_shapes, "CALLS", (SMALL[0], Call(FULL, 16, 16, 1, 2, 2, 32, kv_tokens=8, trains=False)))
    times = iter([0.9, 1.1])
    monkeypatch.setattr(auto_shapes, "time_interleaved", lambda runs, device: clock(next(times))(runs, device))
    command = ["--device", "cpu", "--results", str(tmp_path), "--commit", "abc"]
    assert auto_shapes.main(command) == 1
    said = capsys.readouterr()
    assert "lost: full, 1 x 2 heads of 16, 32 tokens on 8, no gradients" in said.err
    assert "1.11" in said.out
    (path,) = tmp_path.iterdir()
    assert [row["ms"] for row in json.loads(path.read_text())["rows"]] == [0.9, 1.1]
    times = iter([1.02])
    assert auto_shapes.main(["--device", "cpu", "--only", "64 tokens"]) == 0, "within what timings differ by"
    with pytest.raises(SystemExit):
        auto_shapes.main(["--device", "cpu", "--only", "nothing"])
