"""Choosing a launch: what happens where the table's does not fit the GPU."""

from types import SimpleNamespace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from sagebwd.kernels.host import device
from sagebwd.kernels.portable import tune
from sagebwd.kernels.portable.config import Config, choose, smaller
from sagebwd.recipe import Recipe

TOKEN, PAPER = Recipe.named("token"), Recipe.named("paper")


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setattr(tune, "_FITTING", {})
    monkeypatch.setattr(device, "capability", lambda device: 90)
    return SimpleNamespace(head_dim=256, recipe=TOKEN, dtype=torch.bfloat16, device=None, mask=None)


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


def test_where_nothing_fits_the_message_names_a_way_out(call):
    def run(config):
        raise OutOfResources(300_000, 101_376, "shared memory")

    with pytest.raises(NotImplementedError, match=r"use recipe token\(block_k=64\), or impl='reference'"):
        tune.run_best("dq", call, run)
