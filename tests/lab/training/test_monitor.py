"""The monitor in `pretrain`: measures what `sagebwd trace` does, disturbs nothing, warns."""

import json
import math
import re

import pytest
import torch

from lab.training import pretrain
from lab.training.model import build
from sagebwd.diagnostics import monitor as monitoring
from sagebwd.diagnostics.capture import capture
from sagebwd.diagnostics.monitor import AttentionMonitor, choose_heads, worst_head
from sagebwd.diagnostics.trace import measure
from sagebwd.recipe import Recipe
from tests.lab.training.faults import interrupted

pytestmark = [pytest.mark.rounding, pytest.mark.filterwarnings("ignore:attention monitor")]


@pytest.fixture
def watched(tiny):
    """A check every other step, by the emulator."""
    return tiny.replace({"monitor.every": 2, "attention.impl": "reference"})


@pytest.fixture
def outlier(monkeypatch):
    """Every model is built with the keys of layer 1 scaled by 60."""

    def build_with_outlier(config, vocabulary):
        model = build(config, vocabulary)
        with torch.no_grad():
            model.model.layers[1].self_attn.k_norm.weight.mul_(60)
        return model

    monkeypatch.setattr(pretrain, "build", build_with_outlier)


def checks(folder):
    return [line for line in pretrain.read_metrics(folder) if "monitor/share" in line]


def numbers(folder):
    """Every metric that does not depend on the clock."""
    timed = ("seconds", "tokens_per_s", "monitor/seconds", "monitor/share")
    return [{k: v for k, v in line.items() if k not in timed} for line in pretrain.read_metrics(folder)]


def result(folder):
    return json.loads((folder / pretrain.RESULT).read_text())


def test_a_check_leaves_modes_gradients_random_numbers_and_attention_as_they_were(model_and_ids):
    model, ids = model_and_ids()
    model.train()
    model.model.layers[0].mlp.eval()  # as a frozen part would be
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = [weight.grad.clone() for weight in model.parameters()]
    modes = [part.training for part in model.modules()]
    random = torch.get_rng_state()
    monitor = AttentionMonitor(ids)
    monitor.layers = {0: monitoring.Layer()}
    captured = monitor._capture(model)
    assert [call.layer for call in captured] == [0]
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(weight.grad, before) for weight, before in zip(model.parameters(), gradients))
    assert torch.equal(torch.get_rng_state(), random)
    assert model.config._attn_implementation == "sagebwd"


def test_errors_are_those_of_trace_at_the_worst_head(model_and_ids):
    model, ids = model_and_ids()
    call = capture(model, ids, layers=[1])[0]
    rows = measure([call], ["paper"])
    monitor = AttentionMonitor(ids)
    monitor.layers = {1: monitoring.Layer()}
    monitor._judge(call, 1, Recipe.named("paper"))
    found = monitor.layers[1]
    assert found.errors == {name: max(row.relative_l2[name] for row in rows) for name in monitoring.TENSORS}
    assert found.head == max(rows, key=lambda row: max(row.relative_l2["dq"], row.relative_l2["dk"])).head
    rows[0].relative_l2["dq"] = math.nan
    assert math.isnan(worst_head(rows)["dq"])


def test_heads_checked_are_the_worst_the_largest_logits_and_others_in_turn(model_and_ids):
    model, ids = model_and_ids(**{"model.heads": 4, "model.kv_heads": 2})
    call = capture(model, ids, layers=[0])[0]
    call.q[:, 2] *= 5
    call.k[:, 0] += 100  # heads 0 and 1 read it; smoothing takes it out
    assert choose_heads(call, 1, None, 0) == [2]
    assert choose_heads(call, 2, 3, 0) == [2, 3]
    assert [choose_heads(call, 3, 3, turn) for turn in range(4)] == [[0, 2, 3], [1, 2, 3], [0, 2, 3], [0, 2, 3]]
    assert choose_heads(call, 9, 1, 7) == [0, 1, 2, 3]


def test_the_share_is_the_checks_part_of_the_time_and_too_much_is_said_once(watched, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(monitoring.time, "monotonic", lambda: clock[0])
    real_capture, real_step = AttentionMonitor._capture, pretrain._Trainer.training_step

    def slow_capture(self, model):
        clock[0] += 1
        return real_capture(self, model)

    def slow_step(self, *args, **kwargs):
        clock[0] += 2  # two micro-batches a step: four seconds
        return real_step(self, *args, **kwargs)

    monkeypatch.setattr(AttentionMonitor, "_capture", slow_capture)
    monkeypatch.setattr(pretrain._Trainer, "training_step", slow_step)
    pretrain.run(watched, tmp_path / "run")
    lines = checks(tmp_path / "run")
    assert [line["monitor/seconds"] for line in lines] == [1.0] * 4
    assert [line["monitor/share"] for line in lines] == pytest.approx([1 / 9] * 4)
    events = result(tmp_path / "run")["monitor"]["events"]
    assert [event["message"] for event in events if event["layer"] is None] == [
        "checks take 11.1% of the time, above 2%; monitor.every=12 would not"
    ]


def test_a_key_outlier_warns_of_its_layer_and_changes_nothing(watched, tmp_path, outlier):
    with pytest.warns(UserWarning, match="attention monitor") as caught:
        pretrain.run(watched, tmp_path / "run")
    messages = [str(one.message) for one in caught if "layer" in str(one.message)]
    # again where training takes it below the threshold in between, which processors differ in
    assert re.match(r"attention monitor, step [24]: layer 1: relative L2 error of dQ 0\.", messages[0])
    assert '; a finer recipe, as config.sagebwd["layers"]["1"] = ' in messages[0]
    assert result(tmp_path / "run")["monitor"]["layers"]["1"]["recipe"] == "token"
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert saved["sagebwd"] == {"recipe": "token", "impl": "reference", "fuse": False}


def test_counters_survive_a_checkpoint_and_a_resumed_run_is_one_never_stopped(watched, tmp_path, outlier):
    pretrain.run(watched, tmp_path / "whole")
    with interrupted(5):
        pretrain.run(watched, tmp_path / "broken")
    state = json.loads((tmp_path / "broken" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"][monitoring.STATE]["layers"]["1"]["highest"] > 0.15
    pretrain.run(watched, tmp_path / "broken", resume=True)
    assert numbers(tmp_path / "broken") == numbers(tmp_path / "whole")
    ends = [result(tmp_path / name)["monitor"] for name in ("broken", "whole")]
    assert ends[0]["layers"] == ends[1]["layers"]
    assert ends[0]["checks"] == ends[1]["checks"] == 4
