"""Ranks of a job that may choose differently under "auto" hear of it, and training goes on whatever the store does."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from sagebwd import dispatch
from sagebwd.auto import agreement, timings
from sagebwd.auto import choice as auto_choice
from sagebwd.auto.model import FORWARD, Size
from sagebwd.cli import timings as command
from sagebwd.masks.kinds import CAUSAL
from tests.auto.calls import ASK, FASTER, times
from tests.lab.training.runs import begin, finish

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build")
CARD = "NVIDIA H100 80GB HBM3"
ROW = {
    "kind": CAUSAL, "head_dim": 128, "value_dim": 128, "batch": 1, "heads": 16, "tokens": 4096, "direction": FORWARD,
    "recipe": "mixed", "impl": "hopper/hopper", "ms": 1.0, "host_ms": 0.1, "torch_ms": 2.0, "torch_host_ms": 0.1,
}  # fmt: skip


def warned_in_a_call() -> list[str]:
    """What a call of "auto" on a GPU that is not there warns of; a trace asks by the same function."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        auto_choice.contender_of(ASK, Size(4096, 4096, 16, 16))
        auto_choice.check_agreement(ASK.device)  # as a call that has a plan already
    return [str(warning.message) for warning in caught]


def worker(folder: Path, differ: bool) -> None:
    """Two groups one after the other; rank 1 calls after rank 0, which has no file of its own.

    Between them rank 1 has a group of its own: it has asked once more than rank 0 when they are compared again.
    """
    auto_choice.card_of = lambda device: CARD
    dispatch.arch_of = lambda device: 90
    dispatch.missing = lambda row: None
    rank = int(os.environ["RANK"])
    os.environ["SAGEBWD_CACHE_DIR"] = str(folder / str(rank))
    if differ and rank:
        path = timings.kept_at(CARD, torch.__version__)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"rows": [ROW]}), encoding="utf-8")
    heard = []
    for group in range(2):
        dist.init_process_group("gloo")
        if rank:
            dist.barrier()
        heard.append(warned_in_a_call())
        if not rank:
            dist.barrier()
        assert warned_in_a_call() == [], "once a group"
        dist.barrier()
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        assert warned_in_a_call() == [], "without a group"
        if rank:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            assert warned_in_a_call() == [], "alone"
            dist.destroy_process_group()
        assert len(heard) == group + 1
    (folder / f"{rank}.json").write_text(json.dumps(heard), encoding="utf-8")


@pytest.mark.parametrize("differ", [True, False])
def test_a_measured_table_on_one_host_is_warned_of_in_each_group(tmp_path, differ):
    finish(begin(2, "cpu", worker, tmp_path, differ))
    first, later = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    assert first == [[], []]
    assert [len(heard) for heard in later] == [differ, differ]
    for (message,) in later if differ else ():
        assert "on rank 1 (" in message
        assert "on rank 0 (" in message
        differing = message.split("): ", 1)[1].split(". Ranks")[0].split("; ")
        assert [part.split(":")[0] for part in differing] == ["measured times"]


def unmet_rank(folder: Path) -> None:
    """Rank 0 alone calls: pipelines have stages without attention."""
    auto_choice.card_of = lambda device: CARD
    dispatch.arch_of = lambda device: 90
    dispatch.missing = lambda row: None
    dist.init_process_group("gloo")
    if not dist.get_rank():
        begun = time.monotonic()
        assert warned_in_a_call() == []
        assert time.monotonic() - begun < 60  # the store's own limit is minutes
    dist.barrier()
    dist.destroy_process_group()


def test_a_call_waits_for_no_other_rank(tmp_path):
    finish(begin(2, "cpu", unmet_rank, tmp_path))


@pytest.fixture
def alone(tmp_path):
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_error_of_the_store_changes_nothing(measured, alone, monkeypatch, caplog):
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: 1 / 0)
    with caplog.at_level(logging.INFO, "sagebwd"):
        assert warned_in_a_call() == []
    assert [record.getMessage() for record in caplog.records] == [
        "sagebwd: processes were not compared: ZeroDivisionError: division by zero"
    ]


def test_a_store_that_holds_something_else_changes_nothing(measured, alone):
    dist.distributed_c10d._get_default_store().set(agreement.KEY.format(1), "1")
    assert warned_in_a_call() == []


def test_a_store_that_gives_no_answer_is_not_waited_for(measured, alone, monkeypatch, caplog):
    gone = threading.Event()  # such as a connection to a host that is gone
    store = SimpleNamespace(timeout=timedelta(minutes=5), clone=gone.wait)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(agreement, "PATIENCE", 0.05)
    with caplog.at_level(logging.INFO, "sagebwd"):
        assert warned_in_a_call() == []
    gone.set()
    assert caplog.messages == [
        "sagebwd: processes were not compared: TimeoutError: the store of the process group gave no answer within "
        "0.05 s"
    ]


def test_what_was_compared_is_logged(measured, alone, caplog):
    store = dist.distributed_c10d._get_default_store()
    other = {"rank": "1", "host": "there", "facts": auto_choice.facts_of(ASK.device)}
    store.set(agreement.KEY.format(1), json.dumps(other))
    with caplog.at_level(logging.INFO, "sagebwd"):
        assert warned_in_a_call() == []
    (message,) = caplog.messages
    assert "as on rank 1 (there): compared were card, sagebwd, torch, measured times, " in message


def test_of_cards_of_mma_sync_whether_its_kernels_compile_is_a_fact(measured, monkeypatch):
    monkeypatch.setattr(dispatch, "arch_of", lambda device: 89)
    there = auto_choice.facts_of(ASK.device)
    monkeypatch.setattr(dispatch, "missing", lambda row: "NVRTC is not found")
    absent = auto_choice.facts_of(ASK.device)
    assert {name for name in there if there[name] != absent[name]} == {"NVRTC"}


def test_a_choice_for_a_card_that_is_elsewhere_compares_nothing(measured, monkeypatch):
    asked = []
    monkeypatch.setattr(agreement, "check", lambda facts_of, device: asked.append(device))
    for card, expected in (("NVIDIA H200", []), (None, [ASK.device])):
        auto_choice.choose(ASK, Size(2048, 2048, 16, 16), card)
        assert asked == expected


def test_a_digest_is_of_every_fact_and_doctor_prints_it(measured, capsys, monkeypatch):
    facts = auto_choice.facts_of(ASK.device)
    assert set(facts) == {"card", "sagebwd", "torch", "measured times", "extra hopper", "peers", "switches"}
    digests = {agreement.digest(facts | {name: "other"}) for name in facts} | {agreement.digest(facts)}
    assert len(digests) == len(facts) + 1
    assert {len(x) for x in digests} == {12}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Card", (), {"name": "a card"}))
    monkeypatch.setattr(command, "known_of", lambda device: ())
    command.show(ASK)
    assert agreement.digest(facts) in capsys.readouterr().out


def test_doctor_says_that_a_width_was_not_timed(measured, capsys, monkeypatch):
    measured.append(times(FASTER))
    monkeypatch.setattr(command, "known_of", lambda device: measured)
    for width, is_timed in ((128, True), (64, False), (320, False)):
        command.show(ASK._replace(head_dim=width, value_dim=width))
        assert ("not timed for head_dim" in capsys.readouterr().out) != is_timed
