"""One of two processes is killed, the other ends, and the run that is resumed has the losses of one never killed."""

import json

import pytest
import torch
import yaml

from lab.training import run_dir
from tests.lab.training.runs import command
from tools import kill_one

pytestmark = pytest.mark.rounding

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.\n"
CONFIG = {
    "name": "tiny",
    "model": {"layers": 1, "width": 32, "heads": 2, "mlp_width": 32},
    "attention": {"recipe": "full"},
    "data": {"context": 32},
    "optimisation": {
        "tokens_per_step": 256, "micro_batch": 4, "steps": 120, "warmup_steps": 2, "learning_rate": 0.01,
    },
    "logging": {"every": 1, "evaluate_every": 40, "evaluate_sequences": 8, "checkpoint_every": 4},
}  # fmt: skip


class Forked:
    """`kill_one.Launched` without torchrun: the process that is left ends by itself."""

    def __init__(self, arguments, count, log):
        self.started = command(arguments, count, log)

    def worker(self, rank):
        return self.started[rank].pid

    def ended(self):
        return all(process.exitcode is not None for process in self.started)

    def wait(self):
        for process in self.started:
            process.join(kill_one.SECONDS)
        return max(abs(process.exitcode) for process in self.started)

    def stop(self):
        for process in self.started:
            process.kill()


@pytest.fixture
def arguments(tmp_path):
    corpus, config = tmp_path / "corpus.txt", tmp_path / "tiny.yaml"
    corpus.write_text("".join(f"Document {n}. {TEXT * 3}\n<|endoftext|>\n" for n in range(200)), encoding="utf-8")
    config.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    settings = f"--set data.source={corpus} --set data.cache={tmp_path / 'cache'}"
    return f"--config {config} {settings} --step 5 --output {tmp_path / 'runs'} --commit abc".split()


def test_the_loss_goes_on_as_it_would_have(arguments, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kill_one, "Launched", Forked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kill_one.main(arguments)
    printed = capsys.readouterr().out
    assert "killed-none: process 1 killed at step" in printed
    (path,) = (tmp_path / "runs").glob("kill_one_2-processes_cpu_*_abc.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    whole, again, killed = content["rows"]
    assert [row["run"] for row in content["rows"]] == ["whole", "again", "killed-none"]
    assert killed["resumed_from"] <= killed["killed_at"] < CONFIG["optimisation"]["steps"]
    assert len(whole["losses"]) == 123
    assert killed["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    assert again["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    assert (content["processes"], content["config"]["optimisation"]["steps"]) == (2, 120)
    # it did stop in between
    times = run_dir.read_metrics(tmp_path / "runs" / "killed-none")
    assert max(line["step"] for line in times) == 120


def test_a_run_that_goes_on_otherwise_is_told():
    losses = {"1 loss": 5.0, "2 loss": 4.0, "3 loss": 3.0}
    rows = [
        {"losses": losses},
        {"losses": losses | {"1 loss": 9.0}},
        {"run": "killed-none", "killed_at": 2, "resumed_from": 1, "losses": losses | {"3 loss": 3.3}},
    ]
    ((line, good),) = kill_one.verdicts(rows)
    assert not good
    assert "differ by 1.00e-01 from the unbroken run's, which repeats within 0.00e+00" in line
    rows[1]["losses"] = losses | {"2 loss": 4.4}  # the noise is as large
    assert [good for _, good in kill_one.verdicts(rows)] == [True]
    del rows[2]["losses"]["3 loss"]
    with pytest.raises(ValueError, match="3 loss"):
        list(kill_one.verdicts(rows))


def test_a_run_that_ends_too_soon_is_told(tmp_path):
    class Ended:
        def ended(self):
            return True

    with pytest.raises(RuntimeError, match="before step 3"):
        kill_one._kill({"killed-none": Ended()}, tmp_path, 1, 3)
