import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import DataCollatorForSeq2Seq, EvalPrediction, LlamaConfig, LlamaForCausalLM

from lab.training import config as settings
from lab.training import finetune, finetune_model, finetune_report
from lab.training.finetune_config import Finetuning
from lab.training.run_dir import DIVERGED, METRICS, RESULT
from tests.lab.training.runs import interrupted, lose

pytestmark = pytest.mark.rounding

FULL, TOKEN = {"attention.recipe": "sdpa"}, {"attention.recipe": "token"}


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def decoder(tmp_path):
    """A checkpoint of bytes, without a tokeniser, as `python -m lab pretrain` leaves it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=64, bos_token_id=None, eos_token_id=None, attention_dropout=0.1,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path / "decoder")
    return str(tmp_path / "decoder")


@pytest.fixture
def answers(tmp_path, decoder):
    """The answer follows from the prompt's last letter: a tiny model learns it at once."""
    lines = [
        {"prompt": f"{'.' * (n % 5)}{'ab'[n // 5 % 2]}", "answer": "yn"[n // 5 % 2], "choices": ["y", "n"]}
        for n in range(64)
    ]
    return Finetuning(name="letters").replace(
        {
            "model.path": decoder,
            "attention.recipe": "sdpa",
            "data.train": write(tmp_path / "train.jsonl", lines),
            "data.held_out": write(tmp_path / "held_out.jsonl", lines[:10]),
            "data.tokenizer": "bytes",
            "data.max_tokens": 32,
            "data.end": False,
            "optimisation.batch": 8,
            "optimisation.learning_rate": 3e-2,
            "optimisation.epochs": 2.0,
            "logging.every": 1,
            "logging.checkpoint_every": 8,
            "logging.keep_model": False,
        }
    )


@pytest.fixture
def labels(tmp_path):
    """Are both texts the same letter? A BERT from scratch."""
    lines = [
        {"text": "aaaa" if n % 2 else "bbb", "pair": "aa", "label": "same" if n % 2 else "other"} for n in range(32)
    ]
    return Finetuning(name="same").replace(
        {
            "model.layers": 1,
            "model.width": 32,
            "model.heads": 2,
            "model.mlp_width": 32,
            "attention.recipe": "token",
            "data.train": write(tmp_path / "pairs.jsonl", lines),
            "data.held_out": write(tmp_path / "held_out_pairs.jsonl", lines[:6]),
            "data.tokenizer": "bytes",
            "data.max_tokens": 16,
            "optimisation.learning_rate": 1e-2,
            "optimisation.epochs": 4.0,
            "optimisation.batch": 8,
        }
    )


def scores(model, collator, rows):
    batch = collator(rows)
    with torch.no_grad():
        return finetune.answer_scores(model.eval()(**batch).logits, batch["labels"])


@pytest.mark.parametrize("recipe", ["sdpa", "token", "paper"])
def test_padded_rows_score_as_they_do_alone(answers, recipe):
    config = answers.replace({"attention.recipe": recipe})
    material = finetune._material(config.data, config.model.path)
    model = finetune_model.build(config, material.tokenizer, None)
    assert model.config._attn_implementation == ("sdpa" if recipe == "sdpa" else "sagebwd")
    assert model.config.attention_dropout == 0
    collator = DataCollatorForSeq2Seq(material.tokenizer)
    rows = material.held_out[:9]
    assert len({len(row["input_ids"]) for row in rows}) > 3
    together = scores(model, collator, rows)
    alone = torch.cat([scores(model, collator, [row]) for row in rows])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_scores_are_sums_over_the_answer_alone():
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[-100, -100, 3, 1, -100], [-100, 6, 0, 2, 5]])
    logits[1, :4] = 8 * F.one_hot(labels[1, 1:], 7)
    likelihoods = logits.log_softmax(-1)
    found = finetune.answer_scores((logits, "cache"), labels)
    assert found[0, 0] == pytest.approx(float(likelihoods[0, 1, 3] + likelihoods[0, 2, 1]), rel=1e-5)
    assert found[:, 1].tolist() == [2, 4]
    assert found[:, 2].tolist() == [0, 1]


def test_accuracy_counts_exact_picks():
    rows = [[-3, 2, 0], [-4, 2, 0], [-5, 2, 1],  # the right one, first, is the likeliest
            [-3, 1, 1], [-2, 9, 0],  # another is
            [-1, 5, 1],  # alone: exact
            [-1, 5, 0],  # alone: not
            [math.nan, 1, 0], [-2, 1, 0], [-2, 2, 0], [-2, 2, 0]]  # fmt: skip
    predictions = torch.tensor(rows, dtype=torch.float32).numpy()
    metrics = finetune.answer_metrics(EvalPrediction(predictions[:7], None), [3, 2, 1, 1])
    assert metrics["accuracy"] == 2 / 4
    assert metrics["answer_loss"] == pytest.approx((3 + 3 + 1 + 1) / (2 + 1 + 5 + 5))
    assert finetune.answer_metrics(EvalPrediction(predictions[7:], None), [2, 2])["accuracy"] == 0


def test_variants_and_seeds_in_one_table(answers, tmp_path):
    config = answers.replace({"seeds": [0, 1], "variants": {"token": TOKEN, "full precision": FULL}})
    token, full = finetune.finetune(config, tmp_path / "out")
    assert (token.variant, token.recipe, full.variant) == ("token", "token", "full precision")
    assert full.accuracies == {0: 1.0, 1: 1.0}
    assert full.difference == 0
    assert token.difference == pytest.approx(token.mean - full.mean)
    assert full.before < 1
    results = {path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob(f"*/{RESULT}")}
    assert sorted(results) == [f"{name}-seed-{seed}" for name in ("full precision", "token") for seed in (0, 1)]
    ends = sorted((tmp_path / "out").glob("*/result.json"), key=lambda path: path.stat().st_mtime_ns)
    assert [path.parent.name[-1] for path in ends] == ["0", "0", "1", "1"], "seed by seed"
    losses = {name: result["held_out_loss"] for name, result in results.items()}
    assert len(set(losses.values())) == 4
    assert losses["token-seed-0"] == pytest.approx(losses["full precision-seed-0"], abs=0.1)
    assert not list((tmp_path / "out").glob("*/checkpoint-*"))
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["variant"] for row in content["outcomes"]] == ["token", "full precision"]
    assert content["environment"]["torch"] == torch.__version__
    assert "| full precision | sdpa | 1.0000 ± 0.0000 | +0.0000 ± 0.0000 |" in (
        tmp_path / "out" / "comparison.md"
    ).read_text(encoding="utf-8")
    assert finetune_report.table([token, full]).row_count == 2
    with pytest.raises(ValueError, match="holds 4 of these 4 runs; go on with --resume"):
        finetune.finetune(config, tmp_path / "out")
    assert finetune.finetune(config, tmp_path / "out", resume=True) == [token, full]


def test_differences_are_between_runs_of_one_seed():
    def result(accuracy):
        return {"accuracy": accuracy, "accuracy_before": 0.25, "held_out_loss": 1.0, "examples": 100, "seconds": 1.0}

    baseline = {0: result(0.5), 1: result(0.7)}
    outcome = finetune_report._outcome("token", "token", {1: result(0.6), 2: result(0.9), 3: result(None)}, baseline)
    assert outcome.mean == pytest.approx(0.75)
    assert outcome.deviation == pytest.approx(0.3 / math.sqrt(2))
    assert outcome.difference == pytest.approx(-0.1)  # of seed 1 alone
    assert outcome.difference_deviation is None
    assert outcome.interval is None
    assert outcome.diverged == [3]
    (_, row) = finetune_report._rows([outcome])
    assert row[2:4] == ["0.7500 ± 0.2121", "-0.1000"]
    assert row[7] == "2, 1 diverged"
    assert finetune_report._outcome("token", "token", {2: result(0.9)}, {}).difference is None

    outcome = finetune_report._outcome("token", "token", {0: result(0.6), 1: result(0.9)}, baseline)
    assert outcome.interval == pytest.approx((0.15 - 12.7062 * 0.05, 0.15 + 12.7062 * 0.05), rel=1e-4)
    assert finetune_report._rows([outcome])[1][3:5] == ["+0.1500 ± 0.0707", "-0.4853 to +0.7853"]


@pytest.mark.parametrize("rank", [0, 4])
def test_an_interrupted_run_resumes_to_the_same_result(answers, tmp_path, rank):
    if rank:
        pytest.importorskip("peft")
    variants = {"token": TOKEN} if rank else {"full precision": FULL, "token": TOKEN}
    config = answers.replace({"lora.rank": rank, "lora.dropout": 0.1, "variants": variants})
    whole = finetune.finetune(config, tmp_path / "whole")
    with interrupted(finetune._Record, 10, lambda record: record.output.name.startswith("token")):
        finetune.finetune(config, tmp_path / "broken")
    assert (tmp_path / "broken" / "token-seed-0" / "checkpoint-8" / "complete").exists()
    assert (tmp_path / "broken" / "comparison.md").exists() == (rank == 0)  # full precision's, which had finished
    with pytest.raises(ValueError, match=r"of these . runs; go on with --resume"):
        finetune.finetune(config, tmp_path / "broken")
    resumed = finetune.finetune(config, tmp_path / "broken", resume=True)
    assert [x.held_out_loss for x in resumed] == [x.held_out_loss for x in whole]
    lines = [json.loads(line) for line in (tmp_path / "broken" / "token-seed-0" / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, 17)]


def test_a_run_that_diverges_is_reported_and_the_others_go_on(answers, tmp_path, monkeypatch, capsys):
    lose(monkeypatch, finetune.Trainer, lambda trainer: trainer.model.config._attn_implementation == "sagebwd")
    config = answers.replace({"variants": {"token": TOKEN, "full precision": FULL}})
    token, full = finetune.finetune(config, tmp_path / "out")
    assert "token-seed-0: the loss (nan) is not finite at step 1" in capsys.readouterr().err
    assert (token.mean, token.diverged, full.accuracies) == (None, [0], {0: 1.0})
    assert (tmp_path / "out" / "token-seed-0" / DIVERGED).exists()
    assert finetune.finetune(config, tmp_path / "out", resume=True) == [token, full]


def test_an_encoder_learns_labels_and_is_saved(labels, tmp_path):
    (outcome,) = finetune.finetune(labels, tmp_path / "out")
    assert outcome.variant == "token"
    assert outcome.mean == 1
    assert (outcome.examples, outcome.difference) == (6, None)
    again = labels.replace(
        {
            "model.path": str(tmp_path / "out" / "token-seed-0" / "model"),
            "data.tokenizer": None,
            "attention.recipe": "sdpa",
        }
    )
    material = finetune._material(again.data, again.model.path)
    model = finetune_model.build(again, material.tokenizer, material.labels)
    assert model.config._attn_implementation == "sdpa"
    assert model.config.id2label == {0: "other", 1: "same"}
    rows = material.held_out
    batch = finetune.DataCollatorWithPadding(material.tokenizer)([dict(row) for row in rows])
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    assert finetune.predicted_labels(logits, batch["labels"]).tolist() == [row["label"] for row in rows]


def test_a_seed_gives_one_set_of_new_weights(labels):
    material = finetune._material(labels.data, None)
    first, second, other = (
        finetune_model.build(labels.replace(changes), material.tokenizer, material.labels).state_dict()
        for changes in ({}, FULL, {"seeds": [1]})
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])


def test_lora_trains_adapters_alone_and_saves_them(answers, tmp_path):
    pytest.importorskip("peft")
    config = answers.replace(
        {"lora.rank": 4, "attention.recipe": "token", "optimisation.epochs": 1.0, "logging.keep_model": True}
    )
    finetune.finetune(config, tmp_path / "out")
    folder = tmp_path / "out" / "token-seed-0"
    assert 0 < json.loads((folder / RESULT).read_text())["trained_weights"] < 8000
    losses = [json.loads(line).get("loss") for line in (folder / METRICS).read_text().splitlines()]
    assert sum(losses[4:8]) / 4 < losses[0] - 0.1  # by 0.3 to 0.6 over four seeds; batches differ by less than a tenth
    assert (folder / "model" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.train": "none.jsonl"}, "data.train='none.jsonl': there is no such file"),
        ({"model.path": None}, "lines with prompt and answer need a decoder's checkpoint"),
        (
            {"model.path": "no/such/folder"},
            "model.path='no/such/folder': no folder here; the hub's model of that name cannot be",
        ),
        ({"data.max_tokens": 65}, "data.max_tokens=65 is beyond the model's 64 positions"),
        ({"optimisation.batch": 12}, "optimisation.batch=12 is not a multiple of optimisation.micro_batch=8"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_trained(answers, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        finetune.finetune(answers.replace(changes), tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_configs_that_come_with_it_are_read():
    root = Path(__file__).parents[3] / "configs" / "finetune"
    for path in root.glob("*.yaml"):
        runs = settings.load(path, kind=Finetuning).runs()
        assert list(runs) == ["full precision", "token", "paper", "mixed"]
        assert [run.seeds for run in runs["token"]] == [[0], [1], [2]]
    assert len(list(root.iterdir())) == 2
    with pytest.raises(ValueError, match=r"did you mean data.train"):
        settings.load(root / "neighbours.yaml", ["data.trian=x"], Finetuning)
