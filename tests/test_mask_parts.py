"""What kernels read of a mask, where another stream than that of its making, or a CUDA graph, reads it."""

from types import SimpleNamespace

import pytest
import torch

from sagebwd.masks.parts import _Part

PENDING, DONE, KNOWN = "pending", "done", "known to be done"


@pytest.mark.parametrize(
    ("is_same", "made", "captures", "arrives", "waits"),
    [
        (True, PENDING, False, True, False),
        (True, PENDING, True, False, False),
        (True, KNOWN, True, True, False),
        (False, PENDING, False, True, True),
        (False, DONE, False, True, False),
        (False, PENDING, True, False, False),
        (False, DONE, True, False, False),
        (False, KNOWN, True, True, False),
    ],
)
def test_a_part_is_waited_for_where_it_may_not_be_there(is_same, made, captures, arrives, waits, monkeypatch):
    """By stand-ins of streams: a capture can wait for nothing that was begun before it."""
    waited, marked = [], []
    event = SimpleNamespace(query=lambda: made == DONE)
    stream = SimpleNamespace(wait_event=waited.append)
    part = _Part(())
    part.on_gpu = [SimpleNamespace(device="cuda", record_stream=marked.append)]
    part.stream, part.event = stream if is_same else None, None if made == KNOWN else event
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    assert part.arrive() == arrives
    assert waited == [event] * waits
    assert marked == [stream] * (arrives and not is_same)
    if made == DONE and not captures:
        assert part.event is None
