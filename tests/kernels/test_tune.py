"""Choosing a launch: what happens where the table's does not fit the GPU."""

import dataclasses
import json
import logging
import os
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from sagebwd.kernels.portable import tune
from sagebwd.kernels.portable.config import Config, candidates, choose, most_warps, smaller
from sagebwd.kernels.runtime import device
from sagebwd.recipe import Recipe
from tests.threads import at_once

TOKEN, PAPER, FULL = map(Recipe.named, ("token", "paper", "full"))


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setattr(tune, "_FITTING", {})
    monkeypatch.setattr(device, "capability", lambda device: 90)
    return SimpleNamespace(head_dim=256, recipe=TOKEN, dtype=torch.bfloat16, device=None, lists=None, packed=False)


def test_smaller_launches_never_combine_tma_with_one_stage_nor_split_a_group():
    config = Config(64, 4, 3, tma=True)
    found = smaller(config, "dkdv", TOKEN, 80)
    assert [(x.rows, x.stages, x.tma) for x in found] == [(64, 2, True), (64, 1, False), (32, 1, False)]
    assert {x.rows for x in smaller(config, "dkdv", PAPER, 80)} == {64}


def test_one_stage_on_hopper_has_a_warp_for_8_rows():
    """Regression: `paper` under a mask at head_dim 256 read beyond shared memory on an H100 and an H200."""
    found = smaller(Config(128, 8, 2), "dq", PAPER, 90)
    assert [(x.rows, x.stages, x.warps) for x in found] == [(128, 1, 16)]
    assert {x.warps for x in smaller(Config(128, 8, 2), "dq", PAPER, 80)} == {8}


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256, 288, 512])
def test_no_warps_divide_the_first_keys_on_hopper(head_dim):
    """Regression: 64 rows by 8 warps were wrong at head_dim 300 on an H200, and read beyond shared memory at 512."""
    config = choose("forward", head_dim, TOKEN, 90)
    most = most_warps("forward", TOKEN, config.rows, 90)
    for found in (config, *smaller(config, "forward", TOKEN, 90), *candidates(config, most)):
        assert found.warps <= max(4, found.rows // 16)
    assert most_warps("forward", FULL, 64, 90) == most_warps("dq", TOKEN, 64, 90) == 16


def test_a_launch_that_does_not_fit_is_shrunk_once(call):
    """Regression: token at head_dim 256 with key blocks of 128 ran out of shared memory on an H200."""
    tried = []

    def run(config):
        tried.append(config)
        if config.stages > 1:
            raise OutOfResources(300_000, 232_448, "shared memory")

    tune.run_best("forward", call, run)
    first = len(tried)
    assert tried[0] == choose("forward", 256, TOKEN, 90)
    assert tried[-1].stages == 1
    assert not tried[-1].tma
    tune.run_best("forward", call, run)
    assert len(tried) == first + 1


@pytest.mark.parametrize("recipe", [None, PAPER])
def test_where_nothing_fits_the_message_names_a_way_out(recipe, call):
    """Regression: `paper`, whose blocks have 64 keys, was told to take blocks of 64 keys."""
    call.recipe = recipe or call.recipe

    def run(config):
        raise OutOfResources(300_000, 101_376, "shared memory")

    with pytest.raises(NotImplementedError, match=r"recipe \w+ needs .*; use recipe token\(block_k=64\), or impl="):
        tune.run_best("dq", call, run)


def test_keys_of_a_step_are_fewer_only_where_no_scale_is_a_group_of_them():
    for kernel in ("forward", "dq"):
        for arch in (86, 89, 120):
            full = choose(kernel, 256, FULL, arch)
            assert full.block_k(FULL) < FULL.block_k
            assert full.block_k(FULL.replace(block_k=16)) == 16
            for recipe in (TOKEN, PAPER, TOKEN.replace(s="16bit")):
                assert choose(kernel, 256, recipe, arch).block_k(recipe) == recipe.block_k
            assert choose(kernel, 128, FULL, arch).block_k(FULL) == FULL.block_k
        assert choose(kernel, 256, FULL, 90).block_k(FULL) == FULL.block_k


@pytest.fixture
def tuning(call, monkeypatch, tmp_path):
    """A call whose launches are timed, by a clock that likes more warps, and kept in a folder of the test."""
    monkeypatch.setenv("SAGEBWD_AUTOTUNE", "1")
    monkeypatch.setattr(tune, "CACHE", tmp_path / "cache" / "launch.json")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(tune, "_time", lambda *given: call.timed.append(given[-1]) or -given[-1].warps)
    call.timed = []
    tune._read.cache_clear()
    yield call
    tune._read.cache_clear()


def launched(call, kernel="forward"):
    """With what a kernel is launched."""
    found = []
    tune.run_best(kernel, call, found.append)
    return found[0]


def test_what_is_tuned_is_kept(tuning):
    best = launched(tuning)
    count = len(tuning.timed)
    tune._read.cache_clear()
    assert launched(tuning) == best
    assert len(tuning.timed) == count > 0
    assert [dataclasses.asdict(best)] == list(json.loads(tune.CACHE.read_text()).values())
    assert os.listdir(tune.CACHE.parent) == [tune.CACHE.name]


def test_where_nothing_can_be_kept_a_process_tunes_once(tuning, monkeypatch, tmp_path, caplog):
    """Regression: FileNotFoundError, NotADirectoryError or PermissionError from a call."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(tune, "CACHE", tmp_path / "file" / "nowhere" / "launch.json")
    best = launched(tuning)
    count = len(tuning.timed)
    assert launched(tuning) == best
    assert len(tuning.timed) == count
    launched(tuning, "dq")
    (said,) = caplog.messages
    assert f"{tune.CACHE.parent} cannot be written (NotADirectoryError: " in said
    assert "SAGEBWD_CACHE_DIR" in said


@pytest.mark.parametrize("text", ["", '{"a": {"rows": 6', "[]", '{"a": {"rows": 64, "cols": 3}}', '{"a": 3}'])
def test_a_malformed_file_is_told_and_written_anew(text, tuning, caplog):
    tune.CACHE.parent.mkdir()
    tune.CACHE.write_text(text)
    with caplog.at_level(logging.WARNING, "sagebwd"):
        best = launched(tuning)
    (said,) = caplog.messages
    assert f"{tune.CACHE}, which keeps tuned launches, is not read" in said
    assert list(json.loads(tune.CACHE.read_text()).values()) == [dataclasses.asdict(best)]


def test_threads_that_tune_at_once_do_not_collide(tuning, caplog):
    """Regression: threads of a process wrote one temporary file, and the second one found it gone."""

    def write(name):
        for n in range(100):
            tune._read()[f"{name} {n}"] = dataclasses.asdict(Config(64, 4, 2))
            tune._write(tune._read())

    tune._read()
    at_once(write, "abc")
    assert not caplog.messages
    assert os.listdir(tune.CACHE.parent) == [tune.CACHE.name]
    assert json.loads(tune.CACHE.read_text())
