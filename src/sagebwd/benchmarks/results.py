"""Result files of the benchmarks: what was measured, and on what."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, fields
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from sagebwd.hardware import command_output


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
        "torch": torch.__version__,
        "triton": triton.__version__,
        "flash_attn_4": _version("flash-attn-4"),
        "commit": commit or command_output("git", "rev-parse", "--short", "HEAD"),
        "dirty": None if commit else bool(command_output("git", "status", "--porcelain")),
        "date": date.today().isoformat(),
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def save(rows: list, facts: dict[str, object], folder: Path, name: str = "attention") -> Path:
    """Write <name>_<gpu>_<date>_<commit>.json: ``facts`` from `environment`, and the rows, dataclasses; its path."""
    path = _path(facts, folder, name)
    path.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")
    return path


def save_lines(rows: list[dict], facts: dict[str, object], folder: Path, name: str) -> Path:
    """As `save`, of thousands of rows that are dictionaries: a line for each."""
    path = _path(facts, folder, name)
    lines = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items()]
    text = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("{\n" + "".join(lines) + ' "rows": [\n' + text + "\n ]\n}\n", encoding="utf-8")
    return path


def _path(facts: dict[str, object], folder: Path, name: str) -> Path:
    gpu = str(facts["gpu"]).removeprefix("NVIDIA ").replace(" ", "-").lower()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}_{gpu}_{facts['date']}_{facts['commit']}.json"


def save_csv(rows: list, path: Path) -> Path:
    """Write the rows beside ``path``, the JSON that `save` wrote, as .csv; its path. What is None there is empty."""
    path = path.with_suffix(".csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])] if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    return path
