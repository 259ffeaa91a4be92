"""The monitor measures what `sagebwd trace` does, disturbs nothing, warns once, and under auto moves recipes."""

import json
import math
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from sagebwd import dispatch
from sagebwd.analysis.capture import capture
from sagebwd.analysis.trace import measure
from sagebwd.recipe import RECIPES, Recipe
from sagebwd.training import monitor as monitoring
from sagebwd.training import pretrain, report
from sagebwd.training.config import Monitor
from sagebwd.training.model import build
from sagebwd.training.monitor import AttentionMonitor, choose_heads, ladder, worst_head

pytestmark = [pytest.mark.rounding, pytest.mark.filterwarnings("ignore:attention monitor")]
FINER, BOTH = "token(s=16bit)", "token(s=16bit, o=16bit)"


@pytest.fixture
def watched(tiny):
    """A check every other step, by the emulator."""
    return tiny.replace({"monitor.every": 2, "attention.impl": "reference"})


@pytest.fixture
def outlier(monkeypatch):
    """Every model is built with the keys of layer 1 scaled by 30."""

    def build_with_outlier(config, vocabulary):
        model = build(config, vocabulary)
        with torch.no_grad():
            model.model.layers[1].self_attn.k_norm.weight.mul_(30)
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


def model_and_ids(tiny, **overrides):
    model = build(tiny.replace({"attention.impl": "reference", **overrides}), 257)
    return model, torch.randint(0, 257, (1, 32), generator=torch.Generator().manual_seed(0))


class Tokens(Dataset):
    """Random sequences, the same every time."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def someone_elses_trainer(folder, attention="sagebwd", **arguments):
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


class Script:
    """Errors of dQ and dK by recipe, in place of measuring them."""

    def __init__(self, monkeypatch):
        self.errors = {}
        monkeypatch.setattr(monitoring, "measure", self)

    def __call__(self, calls, recipes):
        errors = {str(recipe): dict.fromkeys(monitoring.TENSORS, self.errors[str(recipe)]) for recipe in recipes}
        return [SimpleNamespace(recipe=recipe, head=0, relative_l2=error) for recipe, error in errors.items()]


@pytest.fixture
def judged(tiny, monkeypatch):
    """A function: errors by recipe in, what layer 0's check announces out."""
    model, ids = model_and_ids(tiny)
    call = capture(model, ids, layers=[0])[0]
    script = Script(monkeypatch)

    def start(**settings):
        monitor = AttentionMonitor(ids, Monitor(**settings))
        monitor.trainer = type("Trainer", (), {"is_world_process_zero": lambda self: True})()
        monitor.layers = {0: monitoring.Layer("token", "token")}

        def check(**errors):
            names = {"token": "token", "output": "token(o=16bit)", "scores": FINER, "both": BOTH, "full": "full"}
            script.errors = {names[key]: error for key, error in errors.items()}
            before = len(monitor.events)
            monitor._judge(call, 1, "reference")
            return [event["message"] for event in monitor.events[before:]]

        return monitor.layers[0], check

    return start


def test_losses_are_the_same_bit_for_bit_with_and_without(watched, tmp_path):
    pretrain.run(watched.replace({"monitor.every": 0}), tmp_path / "without")
    pretrain.run(watched, tmp_path / "with")
    assert len(checks(tmp_path / "with")) == 4
    lines = [line for line in numbers(tmp_path / "with") if "monitor/layer_0/dq" not in line]
    assert lines == numbers(tmp_path / "without")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("with", "without")]
    assert weights[0] == weights[1]
    assert result(tmp_path / "without")["monitor"] is None


def test_a_check_leaves_modes_gradients_random_numbers_and_attention_as_they_were(tiny):
    model, ids = model_and_ids(tiny)
    model.train()
    model.model.layers[0].mlp.eval()  # as a frozen part would be
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = [weight.grad.clone() for weight in model.parameters()]
    modes = [part.training for part in model.modules()]
    random = torch.get_rng_state()
    monitor = AttentionMonitor(ids)
    monitor.layers = {0: monitoring.Layer("token", "token")}
    captured = monitor._capture(model)
    assert [call.layer for call in captured] == [0]
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(weight.grad, before) for weight, before in zip(model.parameters(), gradients))
    assert torch.equal(torch.get_rng_state(), random)
    assert model.config._attn_implementation == "sagebwd"


def test_errors_are_those_of_trace_at_the_worst_head(tiny):
    model, ids = model_and_ids(tiny)
    call = capture(model, ids, layers=[1])[0]
    rows = measure([call], ["paper"])
    monitor = AttentionMonitor(ids)
    monitor.layers = {1: monitoring.Layer("paper", "paper")}
    monitor._judge(call, 1, "reference")
    found = monitor.layers[1]
    assert found.errors == {name: max(row.relative_l2[name] for row in rows) for name in monitoring.TENSORS}
    assert found.head == max(rows, key=lambda row: max(row.relative_l2["dq"], row.relative_l2["dk"])).head
    rows[0].relative_l2["dq"] = math.nan
    assert math.isnan(worst_head(rows)["dq"])


def test_heads_checked_are_the_worst_the_largest_logits_and_others_in_turn(tiny):
    model, ids = model_and_ids(tiny, **{"model.heads": 4, "model.kv_heads": 2})
    call = capture(model, ids, layers=[0])[0]
    call.q[:, 2] *= 5
    call.k[:, 0] += 100  # heads 0 and 1 read it; smoothing takes it out
    assert choose_heads(call, 1, None, 0) == [2]
    assert choose_heads(call, 2, 3, 0) == [2, 3]
    assert [choose_heads(call, 3, 3, turn) for turn in range(4)] == [[0, 2, 3], [1, 2, 3], [0, 2, 3], [0, 2, 3]]
    assert choose_heads(call, 9, 1, 7) == [0, 1, 2, 3]


def test_every_check_is_logged_with_its_time_and_share(watched, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pretrain.run(watched, tmp_path / "run")
    lines = checks(tmp_path / "run")
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    for line in lines:
        assert 0 < line["monitor/share"] < 1
        assert line["monitor/seconds"] > 0
        assert all(0 < line[f"monitor/layer_{layer}/{name}"] < 1 for layer in (0, 1) for name in ("dq", "dk", "o"))
    summary = result(tmp_path / "run")["monitor"]
    assert summary["checks"] == 4
    assert summary["seconds"] == pytest.approx(sum(line["monitor/seconds"] for line in lines))
    assert 0 < summary["share"] <= summary["seconds"] / sum(line["monitor/seconds"] for line in lines)
    assert [layer["recipe"] for layer in summary["layers"].values()] == ["token", "token"]
    (folder,) = {path.parent for path in (tmp_path / "run" / "tensorboard").rglob("events*")}
    board = EventAccumulator(str(folder)).Reload()
    points = {point.step: point.value for point in board.Scalars("train/monitor/layer_1/dq")}
    assert points == pytest.approx({line["step"]: line["monitor/layer_1/dq"] for line in lines})
    assert "train/monitor/share" in board.Tags()["scalars"]


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


def test_full_precision_and_no_checks_have_no_monitor(watched, tmp_path):
    pretrain.run(watched.replace({"attention.recipe": "sdpa"}), tmp_path / "run")
    assert checks(tmp_path / "run") == []
    assert result(tmp_path / "run")["monitor"] is None


def test_a_key_outlier_warns_of_its_layer_and_names_a_recipe(watched, tmp_path, outlier):
    with pytest.warns(UserWarning, match="attention monitor") as caught:
        pretrain.run(watched, tmp_path / "run")
    messages = [str(one.message) for one in caught if "layer" in str(one.message)]
    assert len(messages) == 1
    assert re.match(r"attention monitor, step [24]: layer 1: relative L2 error of dQ 0\.", messages[0])
    recipe, error = re.search(r"; (token\(.*?\)) has (\S+): set config", messages[0]).groups()
    assert Recipe.parse(recipe) in ladder(Recipe.named("token"))[1:]
    assert float(error) < 0.15
    assert f'config.sagebwd["layers"]["1"] = {{"recipe": "{recipe}"}}, or monitor.precision=auto' in messages[0]
    assert result(tmp_path / "run")["monitor"]["layers"]["1"]["recipe"] == "token"


def test_under_auto_an_injected_outlier_moves_its_layer_and_training_goes_on(watched, tmp_path, monkeypatch):
    real = pretrain._Trainer.training_step

    def training_step(self, model, *args, **kwargs):
        if self.state.global_step == 3 and not getattr(self, "injected", False):
            self.injected = True
            with torch.no_grad():
                model.model.layers[1].self_attn.k_norm.weight.mul_(30)
        return real(self, model, *args, **kwargs)

    monkeypatch.setattr(pretrain._Trainer, "training_step", training_step)
    overrides = {"monitor.precision": "auto", "monitor.checks": 1}
    pretrain.run(watched.replace({**overrides, "optimisation.steps": 12}), tmp_path / "run")
    events = result(tmp_path / "run")["monitor"]["events"]
    # layer 0 may have events too; and what comes after is training's, and differs between seeds and processors
    warned, moved, *_ = (event for event in events if event["layer"] == 1)
    assert (warned["step"], moved["step"]) == (4, 4)
    assert "the layer moves if that lasts" in warned["message"]
    recipe = re.match(r"layer 1: moved from token to (.*): relative L2 error of dQ \d", moved["message"]).group(1)
    steps = [str(step) for step in ladder(Recipe.named("token"))]
    assert recipe in steps[1:]
    rungs = [[line[f"monitor/layer_{layer}/rung"] for line in checks(tmp_path / "run")] for layer in (0, 1)]
    assert rungs[1][:2] == [0, float(steps.index(recipe))]
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    layers = {"0": {"recipe": "token"}} | saved["sagebwd"]["layers"]
    assert layers == {str(layer): {"recipe": steps[int(rungs[layer][-1])]} for layer in (0, 1)}
    losses = [line["loss"] for line in pretrain.read_metrics(tmp_path / "run") if "loss" in line]
    assert len(losses) == 12
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] - 0.5


def test_a_move_changes_what_the_layer_computes(tiny):
    model, ids = model_and_ids(tiny)
    before = model(input_ids=ids).logits
    monitoring._set_recipe(model.config, 1, "full")
    assert model.config.sagebwd == {"recipe": "token", "impl": "reference", "layers": {"1": {"recipe": "full"}}}
    moved = model(input_ids=ids).logits
    assert not torch.equal(moved, before)
    monitoring._set_recipe(model.config, 1, "token")
    assert torch.equal(model(input_ids=ids).logits, before)


def test_recipes_survive_a_checkpoint_and_a_resumed_run_is_one_never_stopped(watched, tmp_path, monkeypatch, outlier):
    config = watched.replace({"monitor.precision": "auto", "monitor.checks": 1})
    pretrain.run(config, tmp_path / "whole")
    real = pretrain._Record.on_log

    def stop(self, args, state, control, **kwargs):
        real(self, args, state, control, **kwargs)
        if state.global_step == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(pretrain._Record, "on_log", stop)
    with pytest.raises(KeyboardInterrupt):
        pretrain.run(config, tmp_path / "broken")
    monkeypatch.setattr(pretrain._Record, "on_log", real)
    state = json.loads((tmp_path / "broken" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"][monitoring.STATE]["layers"]["1"]["recipe"] != "token"
    pretrain.run(config, tmp_path / "broken", resume=True)
    assert numbers(tmp_path / "broken") == numbers(tmp_path / "whole")
    ends = [result(tmp_path / name)["monitor"] for name in ("broken", "whole")]
    assert ends[0]["layers"] == ends[1]["layers"]
    assert ends[0]["checks"] == ends[1]["checks"] == 4
    moves = [[event for event in end["events"] if "moved" in event["message"]] for end in ends]
    assert moves[0] == moves[1] != []


def test_a_layer_is_warned_of_once_until_it_falls(judged):
    layer, check = judged(threshold=0.1)
    finer = {"output": 0.15, "scores": 0.05}
    assert check(token=0.09) == []
    assert len(check(token=0.2, **finer)) == 1
    assert check(token=0.3) == check(token=0.2) == []  # nothing else is measured either
    assert check(token=0.1) == []
    assert not layer.warned
    assert len(check(token=0.2, **finer)) == 1
    assert (layer.recipe, layer.highest) == ("token", 0.3)


def test_auto_moves_up_after_k_checks_in_a_row(judged):
    layer, check = judged(threshold=0.1, precision="auto", checks=3)
    finer = {"output": 0.15, "scores": 0.05}
    check(token=0.2, **finer)
    check(token=0.2)
    assert check(token=0.05) == []  # the row is broken
    check(token=0.2, **finer)
    assert check(token=0.2) == []
    assert layer.recipe == "token"
    (message,) = check(token=0.2, **finer)
    assert message.startswith(f"layer 0: moved from token to {FINER}: relative L2 error of dQ 0.200, dK 0.200, above")
    assert layer.recipe == FINER


@pytest.mark.parametrize(
    ("finer", "expected"),
    [
        ({"output": 0.05}, "token(o=16bit)"),
        ({"output": 0.15, "scores": 0.1}, FINER),
        ({"output": 0.19, "scores": 0.15, "both": 0.09}, BOTH),
        ({"output": 0.19, "scores": 0.15, "both": 0.12, "full": 0.11}, "full"),
        ({"output": 0.19, "scores": 0.15, "both": 0.12, "full": 0.13}, BOTH),
        ({"output": 0.3, "scores": 0.3, "both": 0.3, "full": 0.2}, "token"),
        ({"output": math.nan, "scores": math.nan, "both": math.nan, "full": 0.01}, "full"),
    ],
)
def test_auto_takes_the_coarsest_recipe_that_helps(judged, finer, expected):
    layer, check = judged(threshold=0.1, precision="auto", checks=1)
    messages = check(token=0.2, **finer)
    assert layer.recipe == expected
    if expected == "token":
        assert "no finer recipe has less, full precision included" in messages[0]


def test_auto_moves_back_when_the_coarser_recipe_would_stay_well_under(judged):
    layer, check = judged(threshold=0.1, precision="auto", checks=2)
    layer.recipe = FINER
    check(scores=0.001, output=0.04)
    check(scores=0.001, output=0.06)  # under the threshold, but not well under: the row is broken
    assert check(scores=0.001, output=0.04) == []
    (message,) = check(scores=0.001, output=0.05)
    assert message.startswith(f"layer 0: moved from {FINER} to token(o=16bit): it would have stayed at or below 0.05,")
    check(output=0.01, token=0.2)
    check(output=0.01, token=0.01)
    check(output=0.01, token=0.01)
    assert layer.recipe == "token"
    assert check(token=0.01) == []


def test_an_error_that_is_not_a_number_is_above(judged):
    layer, check = judged(threshold=0.1)
    check(token=math.nan, output=0.01)
    assert layer.warned


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_run_every_rung(name, head_dim):
    pytest.importorskip("triton")
    for recipe in ladder(Recipe.named(name)):
        reasons = [dispatch.unsupported(impl, recipe, head_dim, torch.bfloat16) for impl in ("hopper", "triton")]
        assert None in reasons, (str(recipe), reasons)


def test_ladders_end_in_full_precision_and_repeat_nothing():
    assert list(map(str, ladder(Recipe.named("token")))) == ["token", "token(o=16bit)", FINER, BOTH, "full"]
    assert list(map(str, ladder(Recipe.parse(BOTH)))) == [BOTH, "full"]
    assert str(ladder(Recipe.named("paper"))[1]) == "paper(first_key=16bit)"
    assert str(ladder(Recipe.parse("paper(o=16bit)"))[1]) == "paper(s=16bit, o=16bit)"
    assert list(map(str, ladder(Recipe.named("full")))) == ["full"]


def test_rungs_that_the_implementation_lacks_are_left_out(judged, monkeypatch):
    def refuse(query, recipe, impl):
        if recipe != Recipe.named("token"):
            raise NotImplementedError(f"{impl} has no {recipe}")

    monkeypatch.setattr(monitoring, "choose_implementation", refuse)
    layer, check = judged(threshold=0.1, precision="auto", checks=1)
    assert "no finer recipe" in check(token=0.2)[0]
    assert layer.recipe == "token"


def test_anyones_trainer(tmp_path):
    trainer = someone_elses_trainer(tmp_path / "with")
    ids = Tokens()[0]["input_ids"][None]
    monitor = AttentionMonitor(ids, Monitor(every=2, layers=[1], threshold=1e-6, precision="auto", checks=2))
    assert monitor.attach(trainer) is monitor
    trainer.train()
    logged = [line for line in trainer.state.log_history if "monitor/share" in line]
    assert [line["step"] for line in logged] == [2, 4]
    assert not any("layer_0" in key for line in logged for key in line)
    assert trainer.model.config.sagebwd["layers"] == {"1": {"recipe": monitor.layers[1].recipe}}
    assert monitor.layers[1].recipe != "token"
    plain = someone_elses_trainer(tmp_path / "without")
    plain.train()
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (trainer, plain)]
    assert losses[0] == losses[1]  # the move came after the last step
    assert len(losses[0]) == 4


def test_checks_run_in_the_precision_of_training(tmp_path, monkeypatch):
    trainer = someone_elses_trainer(tmp_path, bf16=True, max_steps=1)
    monitor = AttentionMonitor(Tokens()[0]["input_ids"][None], Monitor(every=1)).attach(trainer)
    seen = []
    monkeypatch.setattr(monitor, "_judge", lambda call, step, impl: seen.append(call.q.dtype))
    trainer.train()
    assert seen == [torch.bfloat16] * 2


def test_a_compiled_model_follows_a_move(tmp_path):
    losses = {}
    for compiled in (False, True):
        options = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
        trainer = someone_elses_trainer(tmp_path / str(compiled), learning_rate=1e-2, **options)
        settings = Monitor(every=2, threshold=1e-6, precision="auto", checks=1)
        AttentionMonitor(Tokens()[0]["input_ids"][None], settings).attach(trainer)
        trainer.train()
        losses[compiled] = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        assert set(trainer.model.config.sagebwd["layers"]) == {"0", "1"}
    assert losses[True] == losses[False]


def test_a_check_that_cannot_be_made_is_left_out(tmp_path):
    trainer = someone_elses_trainer(tmp_path, max_steps=2)
    monitor = AttentionMonitor(torch.full((1, 8), 64), Monitor(every=1)).attach(trainer)
    with pytest.warns(UserWarning, match=r"step 1: no check: token_ids: 64 is outside the model's vocabulary of 64"):
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


def test_token_ids_are_checked():
    with pytest.raises(ValueError, match=r"token_ids: expected \(batch, tokens\) int64, got \(8,\) int64"):
        AttentionMonitor(torch.zeros(8, dtype=torch.long))
    assert AttentionMonitor(torch.zeros(1, 9, dtype=torch.long), Monitor(tokens=4)).token_ids.shape == (1, 4)


def test_the_report_has_a_row_a_layer_and_the_events():
    errors = dict.fromkeys(monitoring.TENSORS, 0.0123)
    summary = {
        "checks": 3, "seconds": 1.0, "share": 0.011,
        "layers": {"0": {"recipe": "token", "errors": errors, "highest": 0.05},
                   "1": {"recipe": FINER, "errors": {}, "highest": 0.5}},
        "events": [{"step": 200, "layer": 1, "message": "layer 1: moved <up>"}],
    }  # fmt: skip
    runs = [report.Run(name, {}, "token", [], {"monitor": found}) for name, found in (("a", None), ("b", summary))]
    section = report._attention_error(runs)
    assert f"<td>b</td><td>{FINER}</td><td>1</td>" in section
    assert "0.0123" in section
    assert "b: 3 checks, 1.10% of the time" in section
    assert "b, step 200: layer 1: moved &lt;up&gt;" in section
    assert report._attention_error(runs[:1]) == ""


def test_only_the_first_process_warns(judged):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, check = judged(threshold=0.1)
        check(token=0.2, output=0.05)
    assert [str(one.message).startswith("attention monitor, step 1: layer 0") for one in caught] == [True]
