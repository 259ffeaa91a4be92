"""A trained model trained on in pairs: the same data, what is kept, what is cut off, and what `gaps` reads."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lab.training import kernel_commit, packed
from lab.training.continued import comparison, tokens, workers
from lab.training.continued import train as one
from lab.training.continued.config import Continued
from lab.training.gaps import gaps
from lab.training.run_dir import COMPARISON, DIVERGED, RESULT, read_metrics
from sagebwd.diagnostics.models import load_model
from tests.diagnostics.test_capture import build

FULL, AGAIN = "full precision", "full precision repeated"
CONFIG = Path(__file__).parents[3] / "configs" / "continued" / "smollm2.yaml"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Two layers, four steps of two sequences of 24 tokens, of which one is computed at once."""
    monkeypatch.setenv("SAGEBWD_COMMIT", "2534d87")
    build().save_pretrained(tmp_path / "model")
    ids = np.random.default_rng(0).integers(0, 60, 24 * 20).astype(np.uint16)
    np.save(tmp_path / "train.npy", ids)
    np.save(tmp_path / "held_out.npy", ids[::-1].copy())
    return Continued(name="tiny").replace(
        {
            "model": str(tmp_path / "model"),
            "data.train": str(tmp_path / "train.npy"),
            "data.held_out": str(tmp_path / "held_out.npy"),
            "data.context": 24,
            "data.held_out_sequences": 3,
            "optimisation.tokens_per_step": 48,
            "optimisation.micro_batch": 1,
            "optimisation.steps": 4,
            "optimisation.warmup_steps": 1,
            "optimisation.precision": "fp32",
            "logging.every": 2,
            "logging.evaluate_every": 2,
            "seeds": [3, 5],
            "stages": [
                {"learning_rate": 1e-3, "variants": [FULL, "mixed"]},
                {"learning_rate": 1e-3, "variants": [AGAIN]},
            ],
            "variants": {
                FULL: {"attention.recipe": "sdpa"},
                AGAIN: {"attention.recipe": "sdpa"},
                "mixed": {"attention.recipe": "mixed"},
            },
        }
    )


@pytest.fixture
def here(monkeypatch):
    """Runs in this process, one after another; ``here`` has their names, and stops when it has ``here.most``."""

    class Here(list):
        most = 100

    names = Here()

    def train(runs, output, baseline, jobs, seconds, ended):
        for name, config in list(runs.items())[: names.most]:
            one.train(one.Trainee(config, "cpu"), config, baseline, output / name)
            names.append(name)
            ended(name)

    monkeypatch.setattr(workers, "train", train)
    return names


def test_runs_in_processes_are_pairs_that_gaps_reads(config, tmp_path, capsys):
    out, kept = tmp_path / "out", tmp_path / "kept"
    assert comparison.train(config, out, jobs=2, results=kept) == []
    pair = [f"lr-0.001/seed-{seed}/{name}" for seed in (3, 5) for name in (FULL, "mixed")]
    again = [f"lr-0.001/seed-{seed}/{AGAIN}" for seed in (3, 5)]
    assert list(config.runs()) == [*pair, *again]
    told = re.findall(r"^(lr-.*): result\.json$", capsys.readouterr().err, re.MULTILINE)
    assert sorted(told) == sorted([*pair, *again])
    lines = {name: read_metrics(out / name) for name in (*pair, *again)}
    for name, found in lines.items():
        assert [line["step"] for line in found if "loss" in line] == [1, 2, 4], name
        assert [line["step"] for line in found if "held_out_loss" in line] == [0, 2, 4]
    first = {name: next(line["loss"] for line in found if "loss" in line) for name, found in lines.items()}
    assert first[pair[0]] == pytest.approx(first[again[0]], abs=1e-5)
    assert first[pair[1]] == pytest.approx(first[pair[0]], abs=5e-3)  # the same sequences
    assert abs(first[pair[2]] - first[pair[0]]) > 2e-2  # those of another seed
    result = json.loads((out / pair[1] / RESULT).read_text())
    assert result["calls"]["mixed on reference"] > 0
    assert any(name.startswith("full precision by ") for name in result["calls"])
    assert result["environment"]["kernels"] == kernel_commit.tree()
    mixed, repeated = sorted(gaps([kept / "lr-0.001"]), key=lambda row: row.variant, reverse=True)
    assert (mixed.variant, mixed.commits, len(mixed.gaps)) == ("mixed", ("2534d87",), 2)
    assert mixed.p is not None
    assert mixed.noise == pytest.approx(0, abs=1e-4)
    assert repeated.gaps == pytest.approx((0, 0), abs=1e-4)
    (exact, _) = sorted(gaps([kept / "lr-0.001"], in_full_precision=True), key=lambda row: row.variant, reverse=True)
    assert exact.gaps != mixed.gaps
    assert len(packed.read(kept / "lr-0.001")) == 6
    assert comparison.train(config, out, jobs=2) == []
    assert "result.json" not in capsys.readouterr().err


def test_data_order_is_of_the_seed_alone(config):
    runs = config.replace({"stages": [{"learning_rate": rate} for rate in (1e-3, 1e-2)]}).runs()
    assert len(runs) == 12
    read = {name: one.order(run, 64) for name, run in runs.items()}
    for name, found in read.items():
        seed = 3 if "seed-3" in name else 5
        assert found.shape == (4, 2, 24)
        assert torch.equal(found, read[f"lr-0.001/seed-{seed}/{FULL}"])
    assert not torch.equal(read[f"lr-0.001/seed-3/{FULL}"], read[f"lr-0.001/seed-5/{FULL}"])


def test_what_is_cut_off_says_so_and_begins_anew(config, tmp_path, here):
    name, run = next(iter(config.runs().items()))
    trainee = one.Trainee(run, "cpu")
    out = tmp_path / "out"
    assert one.train(trainee, run, "sdpa", out / name, stop_at=time.time() - 1) == one.UNFINISHED
    cut = json.loads((out / name / one.UNFINISHED).read_text())
    assert (cut["steps"], cut["unfinished"]) == (1, "time was up at step 1 of 4")
    assert [line["step"] for line in read_metrics(out / name)] == [0, 1]
    here.most = 0
    assert name in comparison.train(config, out)
    assert json.loads((out / "lr-0.001" / COMPARISON).read_text())["unfinished"] == [
        {"seed": 3, "variant": FULL, "steps": 1}
    ]
    here.most = 2
    left = comparison.train(config, out, results=tmp_path / "kept")
    assert (name not in left, len(left)) == (True, 4)
    assert not (out / name / one.UNFINISHED).exists()
    assert json.loads((out / "lr-0.001" / COMPARISON).read_text())["unfinished"] == []
    here.most = 100
    assert comparison.train(config, out) == []
    assert len(here) == 6
    assert len(set(here)) == 6


def test_each_run_begins_with_the_models_own_weights(config):
    run = next(iter(config.runs().values()))
    trainee = one.Trainee(run, "cpu")
    ids = one.held_out(run, 64)
    own = load_model(config.model)
    with torch.no_grad():
        logits = own(input_ids=ids).logits[:, :-1].double()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    with torch.no_grad():
        torch.testing.assert_close(
            trainee.of(ids, "fp32").double(), expected.view(3, -1).mean(1), atol=1e-5, rtol=1e-5
        )
        for weight in trainee.weights:
            weight.add_(1.0)
    trainee.put_back()
    for weight, first in zip(trainee.model.parameters(), own.parameters(), strict=True):
        assert torch.equal(weight, first)


def test_a_loss_that_is_not_finite_ends_its_run_and_has_no_gap(config, tmp_path, here):
    wild = config.replace({"stages": [{"learning_rate": 1e30, "variants": [FULL, "mixed"]}], "seeds": [3]})
    assert comparison.train(wild, tmp_path / "out") == []
    folder = tmp_path / "out" / "lr-1e+30"
    assert "not finite" in json.loads((folder / "seed-3" / FULL / DIVERGED).read_text())["diverged"]
    assert [row["gap"] for row in json.loads((folder / COMPARISON).read_text())["outcomes"]] == [None, None]


def test_a_token_file(tmp_path):
    words = {"<|endoftext|>": 0, "a": 1, "b": 2, "[UNK]": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a b\n<|endoftext|>\nb b a\n<|endoftext|>\n")
    assert tokens.write(tmp_path / "model", tmp_path / "text.txt", tmp_path / "ids.npy") == 7
    read = tokens.read(tmp_path / "ids.npy", 4, "data.train")
    assert (read.dtype, read.tolist()) == (np.uint16, [1, 2, 0, 2, 2, 1, 0])
    assert tokens.write(tmp_path / "model", tmp_path / "text.txt", tmp_path / "few.npy", most=4) == 4
    for use, message in (
        (lambda: tokens.write(tmp_path / "model", tmp_path / "text.txt", tmp_path / "ids.bin"), r"ending is \.npy"),
        (lambda: tokens.read(tmp_path / "none.npy", 4, "data.train"), "data.train=.*no token file"),
        (lambda: tokens.read(tmp_path / "ids.npy", 2, "data.train"), "id 2 is beyond the model's 2"),
    ):
        with pytest.raises(ValueError, match=message):
            use()
