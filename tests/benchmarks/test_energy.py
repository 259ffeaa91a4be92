"""python -m benchmarks energy: joules of a simulated GPU, whose counter stands still between its updates."""

import json
import re
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import attention, energy, energy_command, energy_passes, energy_products, meter
from benchmarks.shapes import Shape
from sagebwd import sage_attention
from tests.commands import runner

SHAPE = Shape(head_dim=16, heads=2, kv_heads=1, batch=1, tokens=32, is_causal=True)
REST = 100.0


class Gpu:
    """A GPU and its NVML on a clock of their own: a run takes seconds at some watts, and all else rests."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    NVMLError = RuntimeError

    def __init__(self, update: float = 0.05, has_counter: bool = True) -> None:
        self.update, self.has_counter = update, has_counter
        self.now = self.taken = self.shown = 0.0
        self.watts, self.read = REST, None

    def spend(self, seconds: float, watts: float = REST) -> None:
        """A meter that is watched is read every 3 ms."""
        while self.read is not None and seconds > 0.003:
            self._spend(0.003, watts)
            self.read()
            seconds -= 0.003
        self._spend(seconds, watts)
        if self.read is not None:
            self.read()

    @contextmanager
    def watched(self, one):
        """As `meter.watched`, on this clock."""
        seen = meter.Seen([], [])

        def read():
            seen.readings.append(meter.Reading(self.now, one.joules()))
            seen.states.append(one.state())

        self.read = read
        try:
            yield seen
        finally:
            self.read = None

    def _spend(self, seconds: float, watts: float) -> None:
        """The counter shows what was taken at the last multiple of its update."""
        end, self.watts = self.now + seconds, watts
        last = int(end / self.update + 1e-9) * self.update
        if last > self.now:
            self.shown = self.taken + (last - self.now) * watts
        self.now, self.taken = end, self.taken + seconds * watts

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-7"
        return self

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if not self.has_counter:
            raise self.NVMLError("Not Supported")
        return round(self.shown * 1e3)

    def nvmlDeviceGetPowerUsage(self, handle):
        return round(self.watts * 1e3)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 1980 if self.watts < 500 else 1500

    def nvmlDeviceGetTemperature(self, handle, kind):
        return 40


@pytest.fixture
def gpu(monkeypatch):
    """A simulated GPU, and the time that is told there."""
    one = Gpu()
    monkeypatch.setitem(sys.modules, "pynvml", one)
    monkeypatch.setattr(meter, "_uuid", lambda device: "GPU-7")
    monkeypatch.setattr(time, "perf_counter", lambda: one.now)
    monkeypatch.setattr(time, "sleep", one.spend)
    for module in (meter, energy):
        monkeypatch.setattr(module, "watched", one.watched)
    return one


def readings(*pairs):
    return [meter.Reading(*pair) for pair in pairs]


def test_power_is_of_the_time_between_updates_of_the_counter():
    """From the first reading to the last it would be 24 of .8 seconds."""
    steps = readings((0, 5), (0.1, 5), (0.2, 20), (0.3, 20), (0.4, 28), (0.5, 28), (0.6, 32), (0.8, 32))
    power = meter.power_of(steps)
    assert power.watts == pytest.approx(12 / 0.4)
    assert power.updates == 3
    assert power.resolution == pytest.approx(0.1 / 0.4)


def test_a_counter_that_hardly_moves_gives_no_power():
    with pytest.raises(RuntimeError, match=r"changed 2 times in 0.30 s .* \(--window\)"):
        meter.power_of(readings((0, 1), (0.1, 2), (0.2, 2), (0.3, 3)))


@pytest.mark.parametrize("has_counter", [True, False])
def test_a_steady_load_by_the_counter_or_by_power_that_is_read(gpu, has_counter):
    """The lead is not measured, though more is taken there."""
    gpu.has_counter = has_counter
    one = meter.Meter("cuda")
    assert one.source == (meter.COUNTER if has_counter else meter.SAMPLED)

    def run():
        gpu.spend(0.002, 700 if gpu.now < 0.4 else 500)

    load = energy.steady(run, one, "cpu", 0.5, 1.0)
    assert load.ms == pytest.approx(2.0)
    assert load.watts == pytest.approx(500, rel=load.resolution)
    assert load.joules == pytest.approx(load.watts * 0.002)
    assert (load.mhz, load.celsius) == (1500, 40)
    assert load.resolution < 0.01
    assert load.slower == pytest.approx(0)
    assert meter.at_rest(one, 0.5) == pytest.approx(REST, rel=0.02)


def test_a_call_that_is_slower_under_the_meter_says_so(gpu):
    def run():
        gpu.spend(0.001 if gpu.read is None else 0.0012, 500)

    load = energy.steady(run, meter.Meter("cuda"), "cpu", 0.1, 0.5)
    assert load.slower == pytest.approx(0.2)
    assert load.ms == pytest.approx(1.2)


def test_the_command_warns_of_loads_that_the_meter_slows():
    rows = [SimpleNamespace(slower=slower) for slower in (None, 0.05, 0.12)]
    assert energy_command._slowed(rows).startswith(
        "1 of 3 loads take over 5% longer while the meter is read, at most 12%"
    )
    assert energy_command._slowed(rows[:2]) == ""


def counting(reading):
    """A meter that changes at each reading, which does something first."""
    taken = iter(range(1000))

    def joules():
        reading()
        return next(taken)

    return SimpleNamespace(joules=joules, state=lambda: meter.State(100.0, 1000.0, 40.0))


def test_a_slow_driver_does_not_slow_the_calls_that_it_measures():
    """Readings of 20 ms beside calls of 1 ms, in time that passes; in one thread a call would take thrice as long."""
    load = energy.steady(lambda: time.sleep(1e-3), counting(lambda: time.sleep(0.02)), "cpu", 0.02, 0.3)
    assert load.slower < 0.5
    assert load.updates >= 3


def test_the_thread_that_reads_ends_and_its_error_is_the_callers():
    with pytest.raises(IndexError), meter.watched(counting(lambda: [][0])):
        pass
    with pytest.raises(KeyError), meter.watched(counting(lambda: None)):
        raise KeyError
    assert "meter" not in [thread.name for thread in threading.enumerate()]


def test_what_has_no_meter_is_told(monkeypatch):
    with pytest.raises(ValueError, match="device='cpu' has no meter of energy; accepted: cuda"):
        meter.Meter("cpu")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ValueError, match="pip install nvidia-ml-py"):
        meter.Meter("cuda")


def test_rounds_take_turns_and_their_spread_is_kept(gpu):
    """A run that takes 500, 550 and 600 watts in three rounds; the other is always the same."""
    began, order = iter((500, 550, 600)), []
    steady = energy.steady

    def loaded(run, *settings):
        watts = next(began) if run == "a" else 300
        order.append(run)
        return steady(lambda: gpu.spend(0.001, watts), *settings)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(energy, "steady", loaded)
        loads = energy.by_turns({"a": "a", "b": "b"}, meter.Meter("cuda"), "cpu", 3, 0.1, 0.5)
    assert sorted(order) == ["a"] * 3 + ["b"] * 3
    assert loads["a"].joules == pytest.approx(0.55, rel=1e-2)
    assert loads["a"].spread == pytest.approx(0.1 / 0.55, rel=5e-2)
    assert loads["b"].spread < 1e-3


def simulated(monkeypatch, gpu, **costs):
    """Calls take milliseconds and watts by who makes them, beside what they compute; others 1 ms at 200 W."""
    real = energy.directions

    def directions(call, inputs):
        ms, watts = costs.get(names[id(call)], (1.0, 200.0))
        runs = real(call, inputs)

        def run(way):
            runs.pop(way, lambda: None)()  # once, for it to be called at all
            gpu.spend(ms * (1 if way == "fwd" else 3) * 1e-3, watts)

        return {way: lambda way=way: run(way) for way in energy.DIRECTIONS}

    names, checked = {}, energy.checked

    def noted(*arguments, **options):
        found = checked(*arguments, **options)
        names.update({id(call): "_".join(key) for key, call in found.attentions.items()})
        return found

    for module in (energy, energy_passes):
        monkeypatch.setattr(module, "directions", directions)
        monkeypatch.setattr(module, "checked", noted)


@pytest.mark.rounding
def test_rows_of_one_shape(gpu, monkeypatch):
    """The best peer is the one that takes the least energy, not the fastest; FlashAttention-2 is not asked."""
    sdpa = attention.candidates(SHAPE, "cpu")["sdpa"]
    peers = {name: lambda *tensors: sdpa(*tensors) for name in ("sdpa", "fa2", "fa4")}
    monkeypatch.setattr(attention, "candidates", lambda shape, device: dict(peers))
    simulated(monkeypatch, gpu, reference_token=(2.0, 400.0), sdpa_bf16=(2.5, 600.0), fa4_bf16=(2.4, 700.0))
    one = meter.Meter("cuda")
    rows = energy.measure_shape(SHAPE, ["token"], None, None, one, "cpu", 2, 0.1, 0.4)
    by_call = {(row.impl, row.direction): row for row in rows}
    assert set(by_call) == {(name, way) for name in ("reference", "sdpa", "fa4") for way in energy.DIRECTIONS}
    forward, both = by_call["reference", "fwd"], by_call["reference", "fwd+bwd"]
    assert forward.ms == pytest.approx(2.0)
    assert forward.joules == pytest.approx(0.8, rel=1e-2)
    assert forward.above_rest == pytest.approx(0.6, rel=1e-2)
    assert forward.rest_watts == pytest.approx([REST, REST], rel=0.02)
    assert both.joules == pytest.approx(2.4, rel=1e-2)
    assert both.joules_per_tflop == pytest.approx(both.joules / SHAPE.flops("fwd+bwd") * 1e12)
    assert forward.peer == "sdpa"
    assert forward.energy_over == pytest.approx(1.5 / 0.8, rel=1e-2)
    assert forward.time_over == pytest.approx(1.25)
    assert by_call["sdpa", "fwd"].energy_over == 1
    assert {row.gate for row in rows} == {"ok"}


@pytest.mark.rounding
def test_a_wrong_kernel_has_no_figure_and_a_wrong_peer_is_not_compared_with(gpu, monkeypatch):
    checked = energy.checked

    def wrong(*arguments, **options):
        found = checked(*arguments, **options)
        found.gates["reference", "paper"] = dict.fromkeys(("fwd", "bwd", "fwd+bwd"), "FAILED")
        found.gates["sdpa", "bf16"] = {"fwd": "wrong: o 1.00", "bwd": "wrong", "fwd+bwd": "does not run: no"}
        return found

    monkeypatch.setattr(energy, "checked", wrong)
    simulated(monkeypatch, gpu)
    one = meter.Meter("cuda")
    rows = energy.measure_shape(SHAPE, ["token", "paper"], None, None, one, "cpu", 1, 0.1, 0.4)
    measured = {(row.recipe, row.direction): row.joules is not None for row in rows}
    assert measured == {
        ("token", "fwd"): True, ("token", "fwd+bwd"): True, ("paper", "fwd"): False, ("paper", "fwd+bwd"): False,
        ("bf16", "fwd"): True, ("bf16", "fwd+bwd"): False,
    }  # fmt: skip
    assert {row.peer for row in rows} == {None}


@pytest.mark.rounding
def test_launches_of_a_call_compute_it_again():
    q, k, v, do = SHAPE.inputs("cpu", torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    call = {"is_causal": True, "enable_gqa": True, "recipe": "token", "impl": "triton"}
    with energy_passes.launches() as forward:
        out = sage_attention(*leaves, **call)
    with energy_passes.launches() as backward:
        gradients = torch.autograd.grad(out, leaves, do)
    names = [note.name for note in (*forward, *backward)]
    sage_attention(*leaves, **call)  # outside nothing is noted
    assert "forward_kernel" in [note.name for note in forward]
    assert {"dq_kernel", "dkdv_kernel"} <= {note.name for note in backward}
    expected = [x.detach().clone() for x in (out, *gradients)]
    with torch.no_grad():
        for x in (out, *gradients):
            x.detach().zero_()
    for note in (*forward, *backward):
        note.start()
    assert names == [note.name for note in (*forward, *backward)]
    for x, before in zip((out, *gradients), expected):
        assert torch.equal(x, before)


@pytest.mark.rounding
def test_each_launch_has_a_row_behind_those_that_it_needs(gpu, monkeypatch):
    """Launches of 2 ms by the counter's clock, of a call of 3 times 1 ms."""
    started = []

    def timed(self):
        started.append(self.name)
        gpu.spend(0.002, 300)

    monkeypatch.setattr(energy_passes.Note, "start", timed)
    simulated(monkeypatch, gpu)
    rows = energy_passes.measure_shape(SHAPE, "token", ["triton"], meter.Meter("cuda"), "cpu", 1, 0.05, 0.25)
    *launches, call = rows
    assert [row.number for row in launches] == list(range(len(launches)))
    assert (call.kernel, call.number, call.direction) == ("the call", None, "fwd+bwd")
    assert call.ms == pytest.approx(3.0)
    order = [row.kernel for row in launches]
    while started[-1] == order[-1]:
        started.pop()
    assert started[1 - len(order) :] == order[:-1]
    assert started[-len(order)] == order[-2]  # which was measured before
    assert [row.direction for row in launches] == sorted((row.direction for row in launches), reverse=True)
    for row in launches:
        assert row.ms == pytest.approx(2.0)
        assert row.joules == pytest.approx(0.6, rel=1e-2)
    assert {(row.impl, row.gate) for row in rows} == {("triton", "ok")}


def test_a_call_without_kernels_has_no_passes(gpu, monkeypatch):
    simulated(monkeypatch, gpu)
    with pytest.raises(ValueError, match="run here by reference, which launches no kernels of this project"):
        energy_passes.measure_shape(SHAPE, "token", None, meter.Meter("cuda"), "cpu", 1, 0.1, 0.4)


def test_joules_of_a_product_and_of_a_byte(gpu, monkeypatch):
    loads = energy_products.microloads("cpu", size=16, far=1 << 20, near=1 << 10)
    assert list(loads) == ["INT8", "e4m3", "BF16", "copy", "copy in cache"]
    assert [load.count for load in loads.values()] == [4096.0] * 3 + [2.0**21, 2.0**11]
    codes = loads["INT8"].run()
    assert codes.dtype == torch.int32
    assert codes.abs().max() > 1000
    for load in loads.values():
        load.run()
    slow = {
        name: load._replace(run=lambda: gpu.spend(0.001, 600), count=1e12 if name == "BF16" else 1e9)
        for name, load in list(loads.items())[2:4]
    }
    monkeypatch.setattr(energy_products, "_longest", lambda run, device: "nvjet")
    rows = {row.name: row for row in energy_products.measure(slow, meter.Meter("cuda"), "cpu", 1, 0.1, 0.4)}
    assert rows["BF16"].picojoules == pytest.approx(0.6, rel=1e-2)
    assert rows["BF16"].picojoules_above_rest == pytest.approx(0.5, rel=1e-2)
    assert rows["BF16"].rate == pytest.approx(1000)
    assert rows["copy"].picojoules == pytest.approx(600, rel=1e-2)
    assert {(row.kernel, row.source) for row in rows.values()} == {("nvjet", "counter")}


def test_a_run_that_repeats_within_another_is_counted_once(gpu):
    """A copy that a thousandth of the counter's step would hold is repeated a hundred times a run."""
    load = energy_products.Microload(lambda: gpu.spend(1e-4, 600), "byte", 2e6)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(energy_products, "_longest", lambda run, device: "")
    (row,) = energy_products.measure({"copy in cache": load}, meter.Meter("cuda"), "cpu", 1, 0.1, 0.4)
    monkey.undo()
    assert row.ms == pytest.approx(0.1)
    assert row.joules == pytest.approx(0.06, rel=1e-2)
    assert row.picojoules == pytest.approx(0.06 / 2e6 * 1e12, rel=1e-2)


@pytest.fixture
def command(monkeypatch, capsys):
    return runner(cli.main, monkeypatch, capsys)


@pytest.mark.parametrize("has_counter", [True, False])
def test_the_command(command, gpu, monkeypatch, tmp_path, has_counter):
    gpu.has_counter = has_counter
    simulated(monkeypatch, gpu, reference_token=(2.0, 400.0), sdpa_bf16=(2.5, 600.0))
    monkeypatch.setattr("benchmarks.shapes.TOTAL_TOKENS", 32)
    monkeypatch.setattr("benchmarks.shapes.MODEL_WIDTH", 64)
    real = meter.Meter
    monkeypatch.setattr(meter, "Meter", lambda device: real("cuda"))
    call = "energy", "--device", "cpu", "--head-dim", 64, "--tokens", 32, "--rounds", 2, "--output", tmp_path
    settings = "--lead", 0.05, "--window", 0.3, "--commit", "abc"
    for causal in ("--causal", "--no-causal"):
        code, out, _ = command(*call, *settings, "--recipe", "token", causal)
        assert code == 0
        assert re.search(r"1\.8[5-9]x sdpa 1\.25x", out)
        assert ("counter is not readable" in out) != has_counter
        assert "slower" in out
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith("energy_cpu_")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * 2 * 2
    assert {row["source"] for row in rows} == {"counter" if has_counter else "sampled power"}


@pytest.mark.rounding
def test_the_command_of_passes_and_of_products(command, gpu, monkeypatch, tmp_path):
    simulated(monkeypatch, gpu)
    monkeypatch.setattr(energy_passes.Note, "start", lambda self: gpu.spend(0.002, 300))
    monkeypatch.setattr("benchmarks.shapes.TOTAL_TOKENS", 32)
    monkeypatch.setattr("benchmarks.shapes.MODEL_WIDTH", 16)
    monkeypatch.setattr("benchmarks.shapes.WIDTHS", {"16": (16, 16)})
    monkeypatch.setattr(energy_products, "_longest", lambda run, device: "nvjet")
    load = energy_products.Microload(lambda: gpu.spend(0.001, 600), "byte", 1e9)
    monkeypatch.setattr(energy_products, "microloads", lambda device: {"copy": load})
    real = meter.Meter
    monkeypatch.setattr(meter, "Meter", lambda device: real("cuda"))
    settings = "--device", "cpu", "--rounds", 1, "--lead", 0.05, "--window", 0.2, "--output", tmp_path, "--commit", "a"
    code, out, _ = command(
        "energy", "--passes", "--impl", "triton", "--recipe", "token", "--head-dim", 16, "--tokens", 32, "--causal",
        *settings,
    )  # fmt: skip
    assert code == 0
    assert "dkdv_kernel" in out
    assert "all launches" in out
    code, out, _ = command("energy", "--products", *settings)
    assert code == 0
    assert "nvjet" in out
    assert {path.name.rpartition("_cpu_")[0] for path in tmp_path.iterdir()} == {"energy-passes", "energy-products"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cpu"), "device='cpu' has no meter of energy; accepted: cuda"),
        (("--window", 0), "window=0 must be more than 0 seconds"),
        (("--passes", "--products"), "--passes or --products, not both"),
        (("--products", "--tokens", "4K"), "--products measures no calls"),
        (("--passes", "--peer", "fa4"), "no --peer beside it"),
        (("--nvidia", "--head-dim", 64), "no --head-dim beside it"),
        (("--peer", "fa5"), "peer='fa5' is not known; accepted: cudnn"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, arguments, message):
    code, _, err = command("energy", *arguments)
    assert code == 2
    assert message in err


def test_a_fence_and_a_graph_stand_for_loops_on_a_cpu():
    from benchmarks.timer import Fence, captured

    done = []
    captured(lambda: done.append(1), 5, "cpu")()
    assert len(done) == 6  # one of them to warm up
    before = Fence("cpu")
    before.wait()
    assert Fence("cpu").ms_since(before) >= 0
