"""Pairs of runs over seeds: what is trained, what is kept when time is up, and what counts."""

import pytest

from lab.commands import seeds as command
from lab.training import packed, parallel_runs, seeds
from lab.training.gaps import gaps
from lab.training.run_dir import COMPARISON
from tests.lab.training.runs import write_run

LOSSES = {"sdpa": 2.0, "mixed": 2.01}


@pytest.fixture
def config(tiny):
    variants = {"full precision": {"attention.recipe": "sdpa"}, "mixed": {"attention.recipe": "mixed"}, "token": {}}
    return tiny.replace({"variants": variants})


@pytest.fixture
def trained(monkeypatch):
    """In place of processes: each run ends at once, until there have been ``trained.most``; their names in order."""
    monkeypatch.setenv("SAGEBWD_COMMIT", "2534d87")

    class Trained(list):
        most = 100

    names = Trained()

    def train(runs, output, jobs, seconds, ended):
        for name, config in list(runs.items())[: names.most]:
            write_run(output / name, config, LOSSES[config.attention.recipe] + config.seed, {"commit": "2534d87"})
            names.append(name)
            ended(name)

    monkeypatch.setattr(parallel_runs, "train", train)
    return names


PAIR = ["full precision", "mixed"]


def test_pairs_end_together_and_are_counted(config, trained, tmp_path):
    left = seeds.train(config, [3, 4], tmp_path / "out", PAIR, results=tmp_path / "kept")
    assert left == []
    assert trained == [f"seed-{seed}/{name}" for seed in (3, 4) for name in PAIR]
    (row,) = gaps([tmp_path / "kept"])
    assert (row.variant, row.commits) == ("mixed", ("2534d87",))
    assert row.gaps == pytest.approx([0.01, 0.01])
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [COMPARISON, "runs.jsonl.xz"]
    assert [run["run"] for run in packed.read(tmp_path / "kept")] == trained


def test_what_has_ended_when_time_is_up_counts_and_the_same_command_goes_on(config, trained, tmp_path):
    trained.most = 3
    left = seeds.train(config, [3, 4], tmp_path / "out", PAIR, results=tmp_path / "kept")
    assert left == ["seed-4/mixed"]
    (row,) = gaps([tmp_path / "kept"])
    assert len(row.gaps) == 1
    with pytest.raises(ValueError, match=r"1 runs have not ended: seed-4/mixed\. .* or say --unfinished"):
        command.gaps([tmp_path / "kept"])
    trained.most = 100
    assert seeds.train(config, [7], tmp_path / "out", PAIR, results=tmp_path / "kept") == []
    with pytest.raises(ValueError, match="1 runs have not ended: seed-4/mixed"):
        command.gaps([tmp_path / "kept"])  # though all of the last command have
    assert seeds.train(config, [3, 4, 5], tmp_path / "out", PAIR, results=tmp_path / "kept") == []
    assert trained[5:] == ["seed-4/mixed", "seed-5/full precision", "seed-5/mixed"]
    seeds.train(config, [6], tmp_path / "out", PAIR, results=tmp_path / "kept")
    (row,) = gaps([tmp_path / "kept"])
    assert len(row.gaps) == 5
    command.gaps([tmp_path / "kept"])


def test_what_would_not_count_is_not_trained(config, trained, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="the gap is to 'full precision', which is none of them"):
        seeds.train(config, [3], tmp_path, ["mixed"])
    with pytest.raises(ValueError, match="expected at least one seed"):
        seeds.train(config, [], tmp_path, PAIR)
    monkeypatch.setenv("SAGEBWD_COMMIT", "a9c0339")
    with pytest.raises(ValueError, match=r"runs of mixed would not count: the kernels of a9c0339 .* set SAGEBWD_COM"):
        seeds.train(config, [3], tmp_path, PAIR)
    assert trained == []
