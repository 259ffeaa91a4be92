"""Autotune: off unless SAGEBWD_AUTOTUNE=1. Times a few launches of a kernel once and keeps the best on disk.

Every candidate gives the same numbers up to the order of FP32 additions inside a tensor-core product: scale groups
belong to the recipe. A key holds no sequence length, so that a new length never tunes again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from functools import cache

import torch
import triton
from triton.runtime.errors import OutOfResources

from sagebwd.call import Call
from sagebwd.environment import cache_folder, is_on, warn_of_unwritable, write_whole
from sagebwd.kernels.portable.config import Config, candidates, choose, most_warps, smaller
from sagebwd.kernels.runtime import device
from sagebwd.kernels.runtime.program import Program
from sagebwd.recipe import Recipe

CACHE = cache_folder() / "launch.json"

_FITTING: dict[tuple, Config] = {}
"""What was found to fit where the table's launch does not."""


def run_best(kernel: str, call: Call, run: Callable[[Config], None]) -> None:
    """Run a kernel with the table's launch, or with the tuned one where autotune is on.

    Raises NotImplementedError where no launch fits this GPU's shared memory.
    """
    arch = device.capability(call.device)
    config = choose(kernel, call.head_dim, call.recipe, arch, masked=call.lists is not None)
    if call.lists is not None:
        config = config.under_a_mask()
    if is_on("SAGEBWD_AUTOTUNE") and arch and call.lists is None:
        config = _tuned(kernel, call, run, config)
    key = (kernel, call.head_dim, call.recipe, call.dtype, call.lists is None, arch)
    config = _FITTING.get(key, config)
    for fitting in (config, *smaller(config, kernel, call.recipe, arch)):
        try:
            run(fitting)
        except OutOfResources:
            continue
        if fitting != config:
            _FITTING[key] = fitting
        return
    other = call.recipe.replace(block_k=64) if call.recipe.block_k > 64 else Recipe.named("token").replace(block_k=64)
    raise NotImplementedError(
        f"impl='triton': head_dim {call.head_dim} with recipe {call.recipe} needs more shared memory than this GPU "
        f"has; use recipe {other}, or impl='reference'"
    )


def _tuned(kernel: str, call: Call, run: Callable[[Config], None], default: Config) -> Config:
    key = f"{torch.cuda.get_device_name()} triton {triton.__version__} {kernel} {call.head_dim} {call.recipe}"
    known = _read()
    if key not in known and call.packed:  # a trial's bytes are no offsets
        return default
    if key not in known:
        most = most_warps(kernel, call.recipe, default.rows, device.capability(call.device))
        times = {config: _time(call, run, config) for config in candidates(default, most)}
        known[key] = dataclasses.asdict(min(times, key=times.get))
        _write(known)
    return Config(**known[key])


@cache
def _read() -> dict[str, dict]:
    """The launches of the cache file, read once; what this process tunes is added to it.

    None of them where the file cannot be read, which tuning then writes anew.
    """
    try:
        found = json.loads(CACHE.read_text(encoding="utf-8"))
        for launch in found.values():
            Config(**launch)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logging.getLogger("sagebwd").warning(
            f"sagebwd: {CACHE}, which keeps tuned launches, is not read, and they are tuned anew: "
            f"{type(error).__name__}: {error}"
        )
        return {}
    return found


def _write(known: dict[str, dict]) -> None:
    """Keep launches for later processes, where they can be kept."""
    try:
        write_whole(CACHE, json.dumps(dict(known), indent=1))  # a copy: other threads tune meanwhile
    except OSError as error:
        warn_of_unwritable(CACHE.parent, error)


def _time(call: Call, run: Callable[[Config], None], config: Config) -> float:
    """Milliseconds; infinite for a launch that does not fit this GPU."""
    try:
        trial = Program.alone(lambda: run(config), call.device)
        return triton.testing.do_bench(lambda: trial.run([]), warmup=5, rep=20, return_mode="median")
    except OutOfResources:
        return float("inf")
