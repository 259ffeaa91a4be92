"""The monitor with a Trainer that is not ours."""

import pytest
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from sagebwd.diagnostics.monitor import AttentionMonitor, Monitor
from sagebwd.integrations import transformers as integration

pytestmark = pytest.mark.filterwarnings("ignore:attention monitor")


class Tokens(Dataset):
    """Random sequences, the same every time."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def someone_elses_trainer(folder, attention="sagebwd", **arguments):
    integration.register()
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, use_cache=False, sagebwd={"impl": "reference"},
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    settings = {
        "max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no", "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, **arguments,
    }  # fmt: skip
    return Trainer(model, TrainingArguments(str(folder), **settings), train_dataset=Tokens())


@pytest.mark.rounding
def test_anyones_trainer(tmp_path):
    trainer = someone_elses_trainer(tmp_path / "with")
    ids = Tokens()[0]["input_ids"][None]
    monitor = AttentionMonitor(ids, Monitor(every=2, layers=[1], threshold=1e-6))
    assert monitor.attach(trainer) is monitor
    trainer.train()
    logged = [line for line in trainer.state.log_history if "monitor/share" in line]
    assert [line["step"] for line in logged] == [2, 4]
    assert not any("layer_0" in key for line in logged for key in line)
    assert trainer.model.config.sagebwd == {"impl": "reference"}
    assert (monitor.layers[1].recipe, monitor.layers[1].warned) == ("token", True)
    plain = someone_elses_trainer(tmp_path / "without")
    plain.train()
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (trainer, plain)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_checks_run_in_the_precision_of_training(tmp_path, monkeypatch):
    trainer = someone_elses_trainer(tmp_path, bf16=True, max_steps=1)
    monitor = AttentionMonitor(Tokens()[0]["input_ids"][None], Monitor(every=1)).attach(trainer)
    seen = []
    monkeypatch.setattr(monitor, "_judge", lambda call, step, impl: seen.append(call.q.dtype))
    trainer.train()
    assert seen == [torch.bfloat16] * 2


def test_a_check_that_cannot_be_made_is_left_out(tmp_path):
    trainer = someone_elses_trainer(tmp_path, max_steps=2)
    monitor = AttentionMonitor(torch.full((1, 8), 64), Monitor(every=1)).attach(trainer)
    with pytest.warns(UserWarning, match=r"step 1: no check: ValueError: token_ids: 64 is outside the model's"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert monitor.layers[0].errors == {}
    line = next(line for line in trainer.state.log_history if "monitor/share" in line)
    assert not any("layer" in key for key in line)


@pytest.mark.parametrize(
    ("attention", "settings", "attached", "message"),
    [
        (
            "sdpa",
            Monitor(),
            True,
            "LlamaForCausalLM has another attention; load it with attn_implementation='sagebwd'",
        ),
        ("sagebwd", Monitor(layers=[2]), True, "monitor.layers: 2 is not there; the model has layers 0 to 1"),
        ("sagebwd", Monitor(), False, r"call attach\(trainer\) in place of callbacks"),
    ],
)
def test_what_cannot_be_watched_is_said_as_training_begins(tmp_path, attention, settings, attached, message):
    trainer = someone_elses_trainer(tmp_path, attention)
    monitor = AttentionMonitor(Tokens()[0]["input_ids"][None], settings)
    monitor.attach(trainer) if attached else trainer.add_callback(monitor)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_trainer_has_one_monitor(tmp_path):
    """Regression: a second one's counters took the place of the first one's in checkpoints."""
    trainer, ids = someone_elses_trainer(tmp_path), Tokens()[0]["input_ids"][None]
    first = AttentionMonitor(ids).attach(trainer)
    with pytest.raises(ValueError, match=r"this Trainer has one already.*trainer.remove_callback"):
        AttentionMonitor(ids, Monitor(layers=[1])).attach(trainer)
    trainer.remove_callback(first)
    assert first.attach(trainer) is first


@pytest.mark.parametrize("given", [[[1, 2]], None, "text"], ids=str)
def test_token_ids_are_a_tensor(given):
    """Regression: an AttributeError that named no argument."""
    with pytest.raises(TypeError, match=f"token_ids: expected a tensor, got {type(given).__name__}"):
        AttentionMonitor(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [("every", 2.5), ("heads", "3"), ("tokens", None), ("threshold", "0.1"), ("threshold", None), ("layers", 3)],
)
def test_settings_are_numbers(name, value):
    """Regression: errors of Python's that named no argument, and none of a step that is no integer."""
    with pytest.raises(ValueError, match=rf"monitor\.{name}={value!r} must"):
        Monitor(**{name: value})


def test_token_ids_are_checked():
    with pytest.raises(ValueError, match=r"token_ids: expected \(batch, tokens\) int64, got \(8,\) int64"):
        AttentionMonitor(torch.zeros(8, dtype=torch.long))
    assert AttentionMonitor(torch.zeros(1, 9, dtype=torch.long), Monitor(tokens=4)).token_ids.shape == (1, 4)
