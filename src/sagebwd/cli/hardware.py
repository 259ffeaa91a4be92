"""The peak rates of GPUs, and which devices are here."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PeakRates:
    """Dense tensor-core peaks in TFLOP/s (TOP/s for INT8) and memory bandwidth in TB/s, from the data sheet named."""

    bf16_tflops: float
    int8_tops: float
    memory_tb_per_s: float
    source: str


PEAK_RATES: dict[str, PeakRates] = {
    "NVIDIA A100": PeakRates(312, 624, 2.0, "NVIDIA A100 datasheet, SXM 80 GB"),
    "NVIDIA H100": PeakRates(989, 1979, 3.35, "NVIDIA H100 datasheet, SXM"),
    "NVIDIA H200": PeakRates(989, 1979, 4.8, "NVIDIA H200 datasheet, SXM"),
    "NVIDIA GeForce RTX 3090": PeakRates(71, 284, 0.936, "GA102 whitepaper; BF16 with FP32 accumulation"),
    "NVIDIA GeForce RTX 4090": PeakRates(165, 660, 1.008, "Ada whitepaper; BF16 with FP32 accumulation"),
    "NVIDIA GeForce RTX 5090": PeakRates(210, 838, 1.792, "Blackwell whitepaper; BF16 with FP32 accumulation"),
}


def check_device(device: str) -> None:
    """Raises ValueError unless it names a CPU, or a CUDA device that torch sees."""
    kind, _, index = device.partition(":")
    if device not in ("cpu", "cuda") and not (kind == "cuda" and index.isdecimal()):
        raise ValueError(f"device={device!r} is not known; accepted: cpu, cuda, cuda:N")
    count = torch.cuda.device_count()
    if kind == "cuda" and count == 0:
        raise ValueError(f"device={device!r}: torch sees no GPU; accepted here: cpu")
    if kind == "cuda" and int(index or 0) >= count:
        raise ValueError(
            f"device={device!r}: torch sees {count} of them; accepted here: cpu, cuda:0 to cuda:{count - 1}"
        )


def peak_rates(device_name: str) -> PeakRates | None:
    """The peaks of a GPU by the name that CUDA reports, or None where we know none."""
    matches = [name for name in PEAK_RATES if device_name.startswith(name)]
    return PEAK_RATES[max(matches, key=len)] if matches else None


def command_output(*command: str) -> str | None:
    """What a command prints, or None where it is not there or fails: for facts that a record can do without."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
