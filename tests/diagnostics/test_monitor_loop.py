"""The monitor in a loop without a Trainer, and what it says of a saturated softmax."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sagebwd.diagnostics.monitor import AttentionMonitor, Monitor
from sagebwd.integrations.transformers import register
from sagebwd.integrations.transformers_settings import settings

TOKENS = torch.randint(0, 64, (1, 48), generator=torch.Generator().manual_seed(0))


def build(attention="sagebwd", sharp=1.0):
    """A tiny model, queries of whose second layer are ``sharp`` times as large."""
    register()
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, use_cache=False, sagebwd={"recipe": "token", "impl": "reference"},
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(sharp)
    return model


def train(model, steps, monitor=None, forward=None):
    """Losses, and what the monitor returned, step by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses, found = [], []
    for step in range(steps):
        ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(step))
        loss = (forward or model)(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        found.append(None if monitor is None else monitor.step())
    return losses, found


@pytest.mark.filterwarnings("ignore:attention monitor")
def test_a_loop_is_watched_and_goes_on_as_without():
    model = build()
    monitor = AttentionMonitor(TOKENS, Monitor(every=2, layers=[1])).watch(model)
    losses, found = train(model, 5, monitor)
    assert [step for step, logs in enumerate(found, 1) if logs] == [2, 4]
    names = {f"monitor/layer_1/{name}" for name in ("ds", "dq", "dk", "dv", "o", "saturated")}
    assert set(found[1]) == names | {"monitor/seconds", "monitor/share"}
    assert 0 < found[1]["monitor/layer_1/dq"] < 0.15
    assert losses == train(build(), 5)[0]
    assert monitor.summary()["checks"] == 2


@pytest.mark.filterwarnings("ignore:attention monitor")
def test_recipes_move_in_a_loop_and_come_back_from_a_checkpoint():
    model, chosen = build(), Monitor(every=1, layers=[0], threshold=1e-6, precision="auto", checks=1)
    monitor = AttentionMonitor(TOKENS, chosen).watch(torch.compile(model, backend="eager"))
    train(model, 1, monitor)
    moved = settings(model.config, 0)["recipe"]
    assert str(moved) != "token"
    other = build()
    resumed = AttentionMonitor(TOKENS, chosen).watch(other)
    resumed.load_state_dict(monitor.state_dict())
    assert settings(other.config, 0)["recipe"] == moved
    assert (resumed.steps, resumed.layers) == (1, monitor.layers)


@pytest.mark.filterwarnings("ignore:attention monitor")
@pytest.mark.parametrize("around", [False, True])
def test_checks_of_a_loop_run_under_its_autocast(around, monkeypatch):
    """And emulate outside of it, also where step is called inside."""
    monitor = AttentionMonitor(TOKENS, Monitor(every=1)).watch(build(), torch.bfloat16)
    seen = []
    monkeypatch.setattr(
        monitor, "_judge", lambda call, *_: seen.append((call.q.dtype, torch.is_autocast_enabled("cpu")))
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        monitor.step()
    assert seen == [(torch.bfloat16, False)] * 2


def test_a_saturated_softmax_is_named():
    monitor = AttentionMonitor(TOKENS, Monitor(every=1)).watch(build(sharp=1e6))
    with pytest.warns(
        UserWarning, match=r"layer 1: .*saturated softmax: \d+% of the queries of head [01] give one key"
    ):
        logs = monitor.step()
    assert logs["monitor/layer_1/saturated"] > 0.9
    assert logs["monitor/layer_0/saturated"] < 0.1
    assert not any("layer 0" in event["message"] for event in monitor.events)


@pytest.mark.filterwarnings("ignore:attention monitor, step 1. checks take")
def test_a_softmax_that_is_not_saturated_is_not_named():
    """Also where a layer is warned of for its error."""
    monitor = AttentionMonitor(TOKENS, Monitor(every=1, threshold=1e-6)).watch(build())
    with pytest.warns(UserWarning, match="layer 1: relative L2 error of dQ") as caught:
        logs = monitor.step()
    # the first query alone sees one key
    assert logs["monitor/layer_1/saturated"] == pytest.approx(1 / 48)
    assert not any("saturated" in str(warning.message) for warning in caught)


def test_what_a_loop_cannot_have_is_said():
    monitor = AttentionMonitor(TOKENS)
    for method in (monitor.step, lambda: monitor.load_state_dict({})):
        with pytest.raises(ValueError, match=r"call watch\(model\) before"):
            method()
    with pytest.raises(ValueError, match="LlamaForCausalLM has another attention"):
        monitor.watch(build("sdpa"))
    with pytest.raises(ValueError, match="model: Linear is no model of Transformers"):
        monitor.watch(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"autocast=torch.float16: accepted: None, torch.bfloat16"):
        monitor.watch(build(), torch.float16)
    assert math.isfinite(monitor.share)
