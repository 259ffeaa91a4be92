"""Sequences of calls: what is drawn, what is compared, that masks are ordered among streams, and that faults show."""

import contextlib
import itertools
import json
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from sagebwd.planning import mask_argument
from sagebwd.switches import current
from tools import call_sequences
from tools.call_sequences import BLOCKS, BY, FAMILIES, Call, Planner, Round, Runner, Step

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


def test_threads_write_no_mask_and_graphs_keep_theirs_in_place():
    captured, met, first = [], set(), 0
    for each in drawn(2000, 1, "cuda", True)[0]:
        assert not (each.threads == 2 and any(step.write or step.graph >= 0 for step in each.steps))
        for step in each.steps:
            if step.how.startswith("capture"):
                captured.append(step.call.kind)
                first += step.how == "capture-first" and step.call.kind not in met
            if step.call and step.call.is_rewritten and step.call.kind in captured:
                assert step.write not in call_sequences.MOVING
            met.add(step.call and step.call.kind)
    assert first > 5
    assert captured[0].window
    assert captured[0].recipe == "auto"


def test_each_fault_of_a_gpu_that_was_found_has_its_chances():
    """Of masks and windows' masks on two streams, of counters that deterministic calls and captures leave behind."""
    chances = Counter()
    calls, captured, met = Counter(), set(), set()
    for each in drawn(2000, 0, "cuda", True)[0]:
        for number, step in enumerate(each.steps):
            if step.call is None:
                met.clear()
                continue
            kind, trains, mode = step.call.kind, step.call.trains, step.call.deterministic
            others = [x for x in each.steps[number + 1 :] if x.graph < 0 and x.call.kind == kind and not x.write]
            if step.sleeps and each.threads == 1 and any(x.stream != step.stream for x in others):
                chances["mask"] += step.call.has_mask
                chances["window"] += kind.recipe == "auto" and kind.window is not None and kind not in met
            if mode and trains and step.call.mask:
                calls[kind, mode] += 1
                chances["fourth call"] += calls[kind, mode] == 4
                chances["call after capture"] += step.graph < 0 and (kind, mode) in captured
                captured |= {(kind, mode)} if step.how == "capture-first" else set()
            met.add(kind)
    assert min(chances[name] for name in ("mask", "window", "fourth call", "call after capture")) > 2, chances


def test_a_process_of_the_oracle_meets_a_kind_once():
    _, calls = drawn(1000, 0, "cuda", True)
    found = call_sequences.batches(calls, 16)
    assert sorted(map(str, itertools.chain(*found))) == sorted(map(str, calls))
    assert len(found) >= 16
    assert all(len({call.kind for call in batch}) == len(batch) for batch in found)
    assert len({batch[0].kind for batch in found}) > len(found) // 2  # they compile different kernels first
    assert call_sequences.batches(calls[:1], 16) == [calls[:1]]


@pytest.mark.parametrize("mask", FORMS)
def test_contents_differ(mask):
    call = form(mask, batch=2)
    masks = [replace(call, contents=n).mask_of("cpu") for n in range(call_sequences.CONTENTS)]
    if mask in BLOCKS:
        at = torch.meshgrid(*(torch.arange(n) for n in (1, 1, 40, 40)), indexing="ij")
        masks = [mask.mask_mod(*at) for mask in masks]
    else:
        assert {x.dim() for x in masks} == {1 if mask == "packed" else int(mask[-1])}
        assert all(x.is_contiguous() for x in masks)
    assert not any(torch.equal(x, y) for n, x in enumerate(masks) for y in masks[:n])


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


@pytest.mark.parametrize("name", BY)
def test_a_writer_writes(name):
    if name == "kernel":
        pytest.importorskip("triton")
    for mask in ("block",) if name == "mask_mod=" else ("bool4", "bias2", "pad3", "packed"):
        call = form(mask)
        there, new = (replace(call, contents=n).mask_of("cpu") for n in (0, 1))
        version = 0 if mask == "block" else there._version
        BY[name](there, new)
        if mask == "block":
            assert there.mask_mod is new.mask_mod
        else:
            assert torch.equal(there, new)
            assert (there._version > version) == (name == "copy_")


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


# A GPU's part, on a CPU: streams that note what they wait for, and graphs that run their work again


class Stream:
    """A stream with the work that is known to be done before its next."""

    here = threading.local()

    def __init__(self) -> None:
        self.given, self.before = 0, {}

    def wait_stream(self, other) -> None:
        for stream, count in {**other.before, other: other.given}.items():
            self.before[stream] = max(self.before.get(stream, 0), count)

    def is_behind(self, work) -> bool:
        stream, count = work
        return stream is self or self.before.get(stream, 0) >= count


class Streams:
    """In place of torch.cuda; checks that readers of a mask are behind its writer, and writers behind all."""

    def __init__(self, monkeypatch) -> None:
        self.default, self.all, self.written, self.read = Stream(), [], {}, {}
        self.all.append(self.default)
        for name in ("current_stream", "stream", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", self.new)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)

    def new(self) -> Stream:
        self.all.append(Stream())
        return self.all[-1]

    def current_stream(self) -> Stream:
        return getattr(Stream.here, "stream", self.default)

    @contextlib.contextmanager
    def stream(self, stream):
        before, Stream.here.stream = self.current_stream(), stream
        yield
        Stream.here.stream = before

    def synchronize(self) -> None:
        for stream in self.all:
            for other in self.all:
                stream.wait_stream(other)

    def note(self, mask, writes: bool) -> None:
        stream = self.current_stream()
        stream.given += 1
        before = [self.written[id(mask)]] if id(mask) in self.written else []
        if writes:
            before += self.read.pop(id(mask), [])
            self.written[id(mask)] = stream, stream.given
        else:
            self.read.setdefault(id(mask), []).append((stream, stream.given))
        assert all(map(stream.is_behind, before)), "is not ordered"


class Graph:
    def replay(self) -> None:
        for name, x in self.work().items():
            self.found[name].copy_(x)


@pytest.fixture
def streams(monkeypatch):
    def record(self, graph, work):
        graph.work, graph.found = work, {name: x.clone() for name, x in work().items()}
        return graph.found

    def noting(mask, writes: bool, function, *given):
        if isinstance(mask, torch.Tensor):
            streams.note(mask, writes)
        return function(*given)

    streams, run = Streams(monkeypatch), Call.run
    monkeypatch.setattr(Runner, "record", record)
    monkeypatch.setattr(Call, "run", lambda self, given, mask, *how: noting(mask, False, run, self, given, mask, *how))
    for name, write in BY.items():
        noted = lambda mask, new, write=write: noting(mask, True, write, mask, new)  # noqa: E731
        monkeypatch.setitem(BY, name, noted)
    return streams


def test_steps_on_streams_and_in_graphs(streams):
    """Each is what the call gives by itself, and masks are ordered among streams."""
    rounds, _ = drawn(100, 4, "cpu", True)
    runner = Runner("cpu", True, 3)
    seen = set()
    for each in rounds:
        for step, result in zip(each.steps, runner.run(each)):
            call = step.call
            if call is None:
                assert result == {}
                continue
            with call_sequences.deterministic(call.deterministic):
                mask = call.read_of(call.mask_of("cpu")) if call.has_mask else None
                assert call_sequences.differs(call, result, call.run(call.inputs("cpu"), mask)) == "", step
            seen |= {(step.how, call.is_rewritten), step.write}
    assert {("replay", True), ("replay", False), ("capture", True), ("capture-first", True), "reborn"} <= seen


def test_what_is_not_ordered_is_noticed(streams, monkeypatch):
    monkeypatch.setattr(Runner, "alone_on", Runner.on)
    runner = Runner("cpu", True, 3)
    steps = [Step("eager", form("bool2"), stream=1), Step("eager", form("bool2", contents=1), "copy_", stream=2)]
    found = runner.run(Round(steps))
    assert [isinstance(x, str) and "is not ordered" in x for x in found] == [False, True]


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


def test_results_of_other_inputs_and_errors_are_found(walked, monkeypatch):
    made, padded, attention = {}, [], call_sequences.sage_attention

    def stale(q, k, v, attn_mask=None, **options):
        if attn_mask is not None and attn_mask.dim() == 2:
            padded.append(q)
            if len(padded) > 2:
                raise IndexError("from the third call on")
        outputs = attention(q, k, v, attn_mask, **options)
        return outputs if q.requires_grad else made.setdefault((q.shape, attn_mask, *options.values()), outputs)

    monkeypatch.setattr(call_sequences, "sage_attention", stale)
    what = [line["what"] for line in walked()[0]["differences"]]
    assert any("o is " in text for text in what)
    assert "raises IndexError: from the third call on" in what


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


def test_a_pool_that_disagrees_with_a_process_of_its_own_is_found(tmp_path):
    one = SMALL.run(SMALL.inputs("cpu"), None)
    torch.save({SMALL: one}, tmp_path / "0.pt")
    torch.save({SMALL: one | {"o": one["o"] + 1}}, tmp_path / "1.pt")
    expected, (difference,) = call_sequences.expected_of(tmp_path)
    assert torch.equal(expected[SMALL]["o"], one["o"])
    assert difference["what"].startswith("alone in a process: o is ")


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
