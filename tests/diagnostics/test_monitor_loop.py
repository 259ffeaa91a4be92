"""The monitor in a loop without a Trainer, and what it says of a saturated softmax."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sagebwd import counts
from sagebwd.auto import choice as auto_choice
from sagebwd.diagnostics.capture import Captured
from sagebwd.diagnostics.monitor import AttentionMonitor, Monitor, recipe_of
from sagebwd.integrations.transformers import register
from sagebwd.integrations.transformers_settings import settings

TOKEN = {"recipe": "token", "impl": "reference"}
CUDA = torch.device("cuda", 0)
TOKENS = torch.randint(0, 64, (1, 48), generator=torch.Generator().manual_seed(0))


def build(attention="sagebwd", sharp=1.0, sagebwd=TOKEN):
    """A tiny model, queries of whose second layer are ``sharp`` times as large."""
    register()
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, use_cache=False, **({} if sagebwd is None else {"sagebwd": sagebwd}),
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
def test_counters_come_back_from_a_checkpoint():
    """Also one of a version whose layers had more."""
    chosen = Monitor(every=1, layers=[0], threshold=1e-6)
    monitor = AttentionMonitor(TOKENS, chosen).watch(torch.compile(build(), backend="eager"))
    train(monitor.model, 1, monitor)
    state = monitor.state_dict()
    state["layers"]["0"] |= {"base": "token", "above": 1}
    resumed = AttentionMonitor(TOKENS, chosen).watch(build())
    resumed.load_state_dict(state)
    assert (resumed.steps, resumed.layers) == (1, monitor.layers)
    assert resumed.layers[0].warned


@pytest.mark.filterwarnings("ignore:attention monitor")
def test_a_state_stays_what_it_was():
    """Regression: later events came into a state that was saved."""
    monitor = AttentionMonitor(TOKENS, Monitor(every=1, threshold=1e-6)).watch(build())
    state = monitor.state_dict()
    monitor.step()
    assert monitor.events
    assert state["events"] == []


@pytest.mark.filterwarnings("ignore:attention monitor, step 1. checks take")
@pytest.mark.parametrize("error", [NotImplementedError, IndexError, torch.OutOfMemoryError])
def test_an_error_of_a_check_is_no_error_of_training(error, monkeypatch):
    """Regression: but for a ValueError it ended the run, as that of attention sinks did at the first check, and no
    memory for FP64."""
    model = build()
    monitor = AttentionMonitor(TOKENS, Monitor(every=1)).watch(model)

    def fail(*_, **__):
        raise error("what is wrong")

    with monkeypatch.context() as patch:
        if error is torch.OutOfMemoryError:
            patch.setattr(monitor, "_judge", fail)
        else:
            patch.setattr(model.model.layers[1], "forward", fail)
        with pytest.warns(UserWarning, match=f"step 1: no check: {error.__name__}: what is wrong"):
            monitor.step()
    assert model.config._attn_implementation == "sagebwd"
    assert model.model.layers[0].training
    assert "monitor/layer_0/dq" in monitor.step()


@pytest.mark.filterwarnings("ignore:attention monitor, step 1. checks take")
def test_an_adapted_model_is_watched_in_a_loop():
    """Regression: it was refused as no model of Transformers."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(build(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    monitor = AttentionMonitor(TOKENS, Monitor(every=1)).watch(adapted)
    assert 0 < monitor.step()["monitor/layer_1/dq"] < 0.15
    assert all(x.grad is None for x in adapted.parameters())


@pytest.mark.filterwarnings("ignore:attention monitor")
@pytest.mark.parametrize(("impl", "measured"), [(None, "full"), ("reference", "token")])
def test_auto_stays_auto(tmp_path, impl, measured):
    """Regression: a watched model ran a fixed recipe in place of "auto", and its saved config kept it."""
    given = {} if impl is None else {"sagebwd": {"impl": impl}}
    model, plain = build(sagebwd=given.get("sagebwd")), build(sagebwd=given.get("sagebwd"))
    before = copy.deepcopy(model.config.to_dict())
    monitor = AttentionMonitor(TOKENS, Monitor(every=1, threshold=1e-9)).watch(model)
    torch_ran = counts.counts[counts.TORCH]
    losses, _ = train(model, 2, monitor)
    assert (counts.counts[counts.TORCH] > torch_ran) == (impl is None)
    assert losses == train(plain, 2)[0]
    assert [layer.recipe for layer in monitor.layers.values()] == [measured] * 2
    model.save_pretrained(tmp_path)
    assert LlamaConfig.from_pretrained(tmp_path).to_dict().get("sagebwd") == before.get("sagebwd")
    assert settings(model.config, 0) == {"recipe": "auto", "impl": impl}


@pytest.mark.parametrize("card", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_auto_is_measured_by_its_low_precision_on_a_card_that_was_timed(monkeypatch, card):
    """And by full precision on one that was not, where torch runs every call."""
    call = Captured(
        0, *torch.zeros(4, 1, 2, 8, 64, dtype=torch.bfloat16), 0.125, True, None, (0, 1), (0, 1), 1
    )  # fmt: skip
    choose = auto_choice.choose
    monkeypatch.setattr(auto_choice, "choose", lambda ask, size: choose(ask._replace(device=CUDA), size, card))
    assert str(recipe_of(LlamaConfig(), call)) == "mixed"
    monkeypatch.setattr(auto_choice, "times_of", lambda *_: None)
    assert str(recipe_of(LlamaConfig(), call)) == "full"


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
