"""The FLOP count of attention, the peak rates of GPUs, and which of them are here."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

import torch

from sagebwd.masks.band import Band


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


def flops(
    batch: int,
    heads: int,
    tokens_q: int,
    tokens_k: int,
    head_dim: int,
    *,
    is_causal: bool = False,
    value_dim: int | None = None,
    window: tuple[int, int] | None = None,
    direction: str = "fwd",
) -> float:
    """Useful floating-point operations of one attention call.

    Each product is 2 x batch x heads x width x visible pairs, pairs counted exactly. Forward is S and O; backward is
    five, S again, dP, dV, dQ and dK, as FlashAttention's benchmarks count: 2.5 times forward where both widths are
    one. Nothing is credited for other recomputation, softmax or quantisation.

    Args: value_dim, head_dim unless given; direction, "fwd", "bwd" or "fwd+bwd"; is_causal and window, aligned top
    left. Raises ValueError for another direction.
    """
    value_dim = head_dim if value_dim is None else value_dim
    widths = {"fwd": head_dim + value_dim, "bwd": 3 * head_dim + 2 * value_dim}
    widths["fwd+bwd"] = widths["fwd"] + widths["bwd"]
    if direction not in widths:
        raise ValueError(f"direction={direction!r} is not known; accepted: {', '.join(widths)}")
    pairs = Band.of(is_causal, *(window or (-1, -1))).pairs(tokens_q, tokens_k)
    return 2.0 * batch * heads * widths[direction] * pairs


def check_device(device: str) -> None:
    """Raises ValueError unless it names a CPU, or a CUDA device that torch sees."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or not (index.isdecimal() or device == kind):
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


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    return [str(index) for index in range(torch.cuda.device_count())]
