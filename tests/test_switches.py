"""Switches of several threads at once: each block takes back its own, in whatever order blocks end."""

from __future__ import annotations

import dataclasses
import sys
import threading
from contextlib import ExitStack

import pytest
import torch

from sagebwd import sage_attention, switches
from sagebwd.integrations import flash_attn
from sagebwd.integrations.flash_attn import flash_attn_func
from sagebwd.switches import current
from tests.threads import at_once

SWITCHES = sys.modules["sagebwd.switches"]
NAMES = [field.name for field in dataclasses.fields(current)]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert SWITCHES.current is current
    assert not SWITCHES._given
    assert not any(getattr(current, name) for name in NAMES)


class Thread:
    """A thread that does one thing after another, each when it is told to."""

    def __init__(self):
        self.stack = ExitStack()

    def enters(self, **given):
        at_once(self.stack.enter_context, [switches(**given)])

    def leaves(self):
        at_once(lambda stack: stack.close(), [self.stack.pop_all()])


@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_overlap_leave_nothing_on(name):
    """Regression: the second thread found the first one's switch on, and left it so."""
    a, b = Thread(), Thread()
    a.enters(**{name: True})
    b.enters(**{name: True})
    a.leaves()
    assert getattr(current, name)  # within the second block
    b.leaves()
    assert not getattr(current, name)


def test_the_block_that_was_entered_last_decides():
    a, b, c = Thread(), Thread(), Thread()
    a.enters(deterministic=True)
    b.enters(deterministic=False, disabled=True)
    assert (current.deterministic, current.disabled) == (False, True)
    c.enters(backward_16bit=True, deterministic=None)
    b.leaves()
    assert (current.deterministic, current.disabled, current.backward_16bit) == (True, False, True)
    a.leaves()
    assert (current.deterministic, current.backward_16bit) == (False, True)
    c.leaves()


def test_blocks_within_one_another():
    with switches(disabled=True):
        with switches(disabled=False), switches(deterministic=True):
            assert (current.disabled, current.deterministic) == (False, True)
        assert (current.disabled, current.deterministic) == (True, False)
        with pytest.raises(KeyError), switches(disabled=False):
            raise KeyError
        assert current.disabled


def test_many_threads_leave_nothing_on():
    def enter_and_leave(_):
        for n in range(300):
            with switches(deterministic=True, disabled=bool(n % 2)):
                assert current.deterministic

    at_once(enter_and_leave, range(4))


def test_deterministic_calls_of_two_threads_leave_nothing_on(monkeypatch):
    """Regression: `flash_attn_func(deterministic=True)` of two threads left the switch on in the whole process."""
    q = torch.randn(1, 4, 1, 8)
    is_in = {name: threading.Event() for name in "ab"}
    may_leave = {name: threading.Event() for name in "ab"}
    seen = []

    def watched(*arguments, **options):
        name = threading.current_thread().name
        seen.append(current.deterministic)
        is_in[name].set()
        assert may_leave[name].wait(60)
        return sage_attention(*arguments, **options)

    monkeypatch.setattr(flash_attn, "sage_attention", watched)
    threads = {
        name: threading.Thread(target=flash_attn_func, args=(q, q, q), kwargs={"deterministic": True}, name=name)
        for name in "ab"
    }
    for name in "ab":
        threads[name].start()
        assert is_in[name].wait(60)
    for name in "ab":
        may_leave[name].set()
        threads[name].join()
    assert seen == [True, True]
    assert not current.deterministic


def test_an_export_leaves_other_threads_blocks_alone():
    """Regression: it ran the block in Python, and what another thread entered meanwhile was lost."""
    other = Thread()

    class Module(torch.nn.Module):
        def forward(self, x):
            with switches(deterministic=True):
                other.enters(disabled=True)
                return sage_attention(x, x, x)

    torch.export.export(Module(), (torch.randn(1, 1, 4, 8),), strict=False)
    assert (current.disabled, current.deterministic) == (True, False)
    other.leaves()


@pytest.mark.parametrize("is_on", [False, True])
def test_compiled_blocks_touch_no_other_threads(is_on):
    """Regression: what a compiled block had found when it was traced was written back after each of its calls."""
    other = Thread()

    def backend(module, inputs):
        def run(*given):
            if is_on:
                other.leaves()
            else:
                other.enters(deterministic=True)
            return module(*given)

        (node,) = [node for node in module.graph.nodes if "sagebwd" in str(node.target)]
        names = [argument.name for argument in node.target._schema.arguments]
        assert node.args[names.index("deterministic")] is True
        return run

    if is_on:
        other.enters(deterministic=True)
    x = torch.randn(1, 4, 1, 8)
    torch.compile(lambda x: flash_attn_func(x, x, x, deterministic=True), fullgraph=True, backend=backend)(x)
    assert current.deterministic is not is_on
    other.leaves()
