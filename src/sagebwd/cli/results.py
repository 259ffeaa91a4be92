"""Results files of `sagebwd doctor --measure`, of benchmarks and of tools: what was measured, on what GPU, driver,
versions and commit."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from sagebwd.cli.hardware import command_output
from sagebwd.environment import COMMIT, write_whole


def commit() -> str | None:
    """SAGEBWD_COMMIT, or else the commit of the checkout that the package lies in, "-dirty" where it has changes to
    it; None without either."""
    here = str(Path(__file__).parent)
    return os.environ.get(COMMIT) or command_output("git", "-C", here, "describe", "--always", "--dirty")


def environment(device: str, commit: str | None = None) -> dict[str, object]:
    """What a result depends on: GPU, driver, versions, commit and whether the tree was clean.

    ``commit`` names the commit where the code runs outside its git checkout; whether it was clean is then unknown.
    """
    import triton

    cuda = device.startswith("cuda")
    return {
        "gpu": torch.cuda.get_device_name() if cuda else "cpu",
        "driver": command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if cuda
        else None,
        **{package.__name__: package.__version__ for package in (torch, triton)},
        "flash_attn_4": installed_version("flash-attn-4"),
        "flash_attn_3": installed_version("flash-attn-3"),
        "commit": commit or command_output("git", "rev-parse", "--short", "HEAD"),
        "dirty": None if commit else bool(command_output("git", "status", "--porcelain")),
        "date": date.today().isoformat(),
    }


def installed_version(distribution: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def path_of(facts: dict[str, object], folder: Path, name: str) -> Path:
    """<name>_<gpu>_<date>_<commit>.json in a folder."""
    gpu = str(facts["gpu"]).removeprefix("NVIDIA ").replace(" ", "-").lower()
    return folder / f"{name}_{gpu}_{facts['date']}_{facts['commit']}.json"


def save(rows: list, facts: dict[str, object], folder: Path, name: str = "attention") -> Path:
    """Write <name>_<gpu>_<date>_<commit>.json into a folder, which is made; its path.

    Args: rows, dataclasses or dictionaries, of which each gets a line; facts, from `environment`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(facts, folder, name)
    lines = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items()]
    found = (row if isinstance(row, dict) else asdict(row) for row in rows)
    text = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in found)
    write_whole(path, "{\n" + "".join(lines) + ' "rows": [\n' + text + "\n ]\n}\n")
    return path
