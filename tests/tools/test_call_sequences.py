"""Sequences of calls: what is drawn, what is compared, that masks are ordered among streams, and that faults show."""

import contextlib
import json
import time
from dataclasses import replace

import pytest
import torch

from sagebwd.planning import mask_argument
from sagebwd.switches import current
from tools import call_sequences
from tools.call_sequences import FAMILIES, Call, Planner, Round, Runner, Step

pytest.importorskip("numpy")
SMALL = Call("full", impl="reference", head_dim=8, tokens=40)
FORMS = [*dict.fromkeys(call.mask for call in FAMILIES if call.mask), "packed"]


def form(mask: str, **changed) -> Call:
    return replace(SMALL, **({"sequences": 3} if mask == "packed" else {"mask": mask}), **changed)


def drawn(steps: int, seed: int, device: str, graphs: bool) -> tuple[list[Round], list[Call]]:
    rounds = Planner(seed, device, graphs).rounds(steps)
    return rounds, list(dict.fromkeys(step.call for each in rounds for step in each.steps if step.call))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_steps_follow_from_their_seed_and_have_everything(device):
    rounds, calls = drawn(2000, 5, device, device == "cuda")
    assert rounds == drawn(2000, 5, device, device == "cuda")[0] != drawn(2000, 6, device, device == "cuda")[0]
    steps = [step for each in rounds for step in each.steps]
    assert len(steps) == 2000
    writers = {"", *call_sequences.WRITERS[device], *call_sequences.MOVING, *call_sequences.WRITERS_OF_BLOCKS}
    assert {step.write for step in steps} == writers
    hows = {"eager", "checkpoint", "reentrant", "no_grad", "inference", "others"}
    graphs = {"capture", "capture-first", "replay"} if device == "cuda" else set()
    assert {step.how for step in steps} == hows | graphs
    assert sum(step.how == "others" for step in steps) == 2
    assert {each.mode for each in rounds} == {"", "torch", "switch"}
    assert {each.threads for each in rounds} == {1, 2}
    assert {call.kind for call in calls} >= {replace(kind, grad="plain") for kind in Planner(5, device, True).kinds}
    assert {call.grad for call in calls} == {"plain", "strided", "zero"}
    assert len(calls) < 1800


@pytest.mark.parametrize(
    "call", [replace(SMALL, returns_lse=True), form("packed"), form("read2", has_sinks=True, batch=2)]
)
def test_a_call_has_every_part_however_it_is_run(call):
    for grad in ("plain", "strided", "zero"):
        call = replace(call, grad=grad)
        mask = call.read_of(call.mask_of("cpu")) if call.has_mask else None
        expected = call.run(call.inputs("cpu"), mask)
        parts = ["o", *["lse"] * call.returns_lse, "dq", "dk", "dv", *["dsinks"] * call.has_sinks]
        assert list(expected) == parts
        for how in ("checkpoint", "reentrant"):
            assert call_sequences.differs(call, call.run(call.inputs("cpu"), mask, how), expected) == ""
    plain = replace(call, trains=False).run(call.inputs("cpu"), mask)
    assert torch.equal(plain.pop("o"), expected["o"])


def test_what_differs():
    exact, other = replace(SMALL), Call("mixed")
    a = torch.randn(50)
    near, far, nan, infinite = (a.clone() for _ in range(4))
    near[3] += 1e-4
    far[3] += 1
    nan[3], infinite[3] = float("nan"), float("inf")

    def differs(call, name, found, expected):
        return call_sequences.differs(call, {name: found}, {name: expected})

    for name in ("o", "lse", "dq", "dsinks"):
        assert differs(other, name, a.clone(), a) == differs(other, name, nan, nan.clone()) == ""
        assert differs(other, name, infinite, infinite.clone()) == ""
        assert (differs(other, name, near, a) == "") == name.startswith("d")
        assert f"{name} is " in differs(exact, name, near, a)
        for x, y in ((far, a), (nan, a), (a, nan), (infinite, a), (a, infinite), (a * 1e-9, a * 0), (a[:3], a)):
            assert f"{name} is " in differs(other, name, x, y)
    assert Call("mixed", deterministic="torch").is_exact
    assert not Call("auto", deterministic="torch").is_exact
    assert call_sequences.differs(None, {}, {}) == ""
    assert call_sequences.differs(other, {}, {"o": a}) == "has [], not ['o']"
    assert call_sequences.differs(other, "raises E: x", {}) == "raises E: x"
    assert call_sequences.differs(other, {}, "raises E: x") == "a fresh process raises E: x"


# Faults, beside what fresh processes compute


@pytest.fixture(scope="module")
def sequence(tmp_path_factory):
    """Rounds, and a folder with what the oracle says of their calls."""
    rounds, calls = drawn(70, 1, "cpu", False)
    folder = tmp_path_factory.mktemp("oracle")
    batches = [*call_sequences.batches(calls, 2), calls[:1], calls[1:2]]
    call_sequences.run([(call_sequences.oracle, (x, "cpu"), folder / f"{n}.pt") for n, x in enumerate(batches)], 2)
    return rounds, folder


@pytest.fixture
def walked(sequence, monkeypatch):
    """A walk in this process: the record, and what the watchdog was told."""
    rounds, folder = sequence

    def walk(until: float = float("inf")) -> tuple[dict, list[str]]:
        said, path = [], folder / "steps.json"
        call_sequences.walk(rounds, "cpu", 30, until, path, lambda what, patience: said.append(what))
        return json.loads(path.read_text()), said

    yield walk
    torch.use_deterministic_algorithms(False)


def test_nothing_differs(walked, sequence):
    record, said = walked()
    assert record == {"steps": 70, "differ": 0, "differences": []}
    assert len(said) == len(sequence[0]) + 2
    assert said[1].startswith("steps 1 to ")
    assert "recipe=" in said[1]


def test_masks_that_are_remembered_by_their_identity_are_found(walked, monkeypatch, capsys):
    made, read = {}, mask_argument.read

    def stale(attn_mask, elements, *rest, **options):
        if attn_mask is None:
            return read(attn_mask, elements, *rest, **options)
        return made.setdefault(id(attn_mask), read(attn_mask, elements.clone(), *rest, **options))

    monkeypatch.setattr(mask_argument, "read", stale)
    record, _ = walked()
    steps = [line["steps"][-1] for line in record["differences"]]
    assert record["differ"] == len(steps) > 3
    assert all("mask=bool" in step or "mask=bias" in step for step in steps)
    assert len({step.split("write=")[1].split()[0] for step in steps if "write=" in step}) > 1
    assert f"step {record['differences'][0]['step']} differs: o is " in capsys.readouterr().out


def test_a_mask_mod_that_is_not_seen_is_found(walked, monkeypatch):
    made, read = {}, mask_argument._read_block_mask

    def stale(block_mask):
        return made.setdefault(id(block_mask), (read(block_mask), block_mask))[0]

    monkeypatch.setattr(mask_argument, "_read_block_mask", stale)
    record, _ = walked()
    assert record["differ"] > 0
    assert all("block" in line["steps"][-1] for line in record["differences"])


def test_a_switch_that_is_left_on_is_found(monkeypatch):
    @contextlib.contextmanager
    def left_on(deterministic):
        current.deterministic = deterministic or current.deterministic
        yield

    monkeypatch.setattr(current, "deterministic", False)
    runner, steps = Runner("cpu", False, 3), [Step("eager", SMALL)] * 2
    assert [type(x) for x in runner.run(Round(steps, "switch", 2))] == [dict, dict]
    monkeypatch.setattr(call_sequences, "switches", left_on)
    assert runner.run(Round(steps, "switch", 2))[-1] == "leaves sagebwd's switch on"


# Processes


def hang(path, watch) -> None:
    watch("step 7", 0.2)
    time.sleep(60)


def crash(path, watch) -> None:
    watch("step 8", 60)
    raise ValueError("for a reason")


@pytest.mark.parametrize(("job", "texts"), [(hang, ("step 7", "Timeout")), (crash, ("step 8", "for a reason"))])
def test_a_process_that_hangs_or_crashes_is_named(job, texts, tmp_path):
    with pytest.raises(RuntimeError, match="ended with status 1 at step") as raised:
        call_sequences.run([(job, (), tmp_path / "0.pt")], 1)
    assert all(text in str(raised.value) for text in texts)


def test_the_command(tmp_path, capfd):
    arguments = ["--device", "cpu", "--steps", "12", "--seed", "4", "--alone", "1", "--others", "20"]
    output = tmp_path / "record" / "found.json"
    assert call_sequences.main([*arguments, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert {name: record[name] for name in ("asked", "steps", "differ", "failed", "alone")} == {
        "asked": 12, "steps": 12, "differ": 0, "failed": "", "alone": 1,
    }  # fmt: skip
    assert "12 steps, 0 differ" in capfd.readouterr().out
    assert call_sequences.main([*arguments, "--seconds", "0"]) == 3
