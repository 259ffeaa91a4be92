"""The kernels of mma.sync, in CUDA C++: for Ampere, Ada and GeForce Blackwell, of `token`."""

from __future__ import annotations

from sagebwd.kernels.capabilities import BACKWARD, FORWARD, KERNEL_DTYPES, Family, Row
from sagebwd.kernels.mma_sync import variant
from sagebwd.recipe import INT8, SIXTEEN_BIT

NAME, MODULE, NVRTC = "mma_sync", "sagebwd.kernels.mma_sync.launch", "sagebwd.kernels.runtime.nvrtc"
_FIELDS = {
    **dict.fromkeys(("s", "o", "dv", "dq", "dk"), (INT8,)), "dp": (SIXTEEN_BIT, INT8), "q_scale": ("token",),
    "k_scale": ("token",), "v_scale": ("channel",), "p_scale_dv": ("key",), "ds_scale_dq": ("query",),
    "ds_scale_dk": ("key",), "p_levels": (254,), "first_keys": (0, 16), "block_q": (64,), "block_k": (128,),
}  # fmt: skip
_WIDEST = max(variant.HEAD_DIMS)

FAMILY = Family(
    NAME,
    Row(FORWARD, NAME, MODULE, KERNEL_DTYPES, _FIELDS, variant.forward_form, f"1 to {_WIDEST}", needs=NVRTC, means=2),
    Row(BACKWARD, NAME, MODULE, KERNEL_DTYPES, _FIELDS, variant.backward_form, f"65 to {_WIDEST}", needs=NVRTC),
    auto="token",
    auto_of_own_backward="token(dp=int8)",  # which INT8 makes faster; Triton's, at 64, it does not
    gpu="a GPU of compute capability 8.0 or more",
    runs_on=lambda capability: capability >= 80,
    first_on=(80, 86, 89, 120),  # which tests compile it for
    falls_back="triton",
    needs="NVRTC",
)
