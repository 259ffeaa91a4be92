"""Hopper's kernels, in CuTe DSL and Gluon: of `mixed`."""

from __future__ import annotations

from sagebwd.kernels.capabilities import BACKWARD, FORWARD, KERNEL_DTYPES, Family, Row
from sagebwd.kernels.sm90 import widths
from sagebwd.masks.kinds import WORDS, WORDS_BY_KEY
from sagebwd.recipe import FP8, INT8, SIXTEEN_BIT

NAME = "hopper"
_WIDTHS = f"1 to {max(widths.HEAD_DIMS)}"

FAMILY = Family(
    NAME,
    Row(
        FORWARD, NAME, "sagebwd.kernels.sm90.forward.launch", KERNEL_DTYPES,
        {
            "s": (INT8,), "o": (SIXTEEN_BIT,), "q_scale": ("token",), "k_scale": ("lane",), "block_k": (128,),
            "smooth_k": (True,),
        },
        widths.of_call, _WIDTHS, needs="sagebwd.kernels.sm90.forward.compile", mask_form=WORDS, prologue=(64, 128),
    ),
    Row(
        BACKWARD, NAME, "sagebwd.kernels.sm90.backward.launch", KERNEL_DTYPES,
        {
            "s": (INT8,), "o": (SIXTEEN_BIT,), **dict.fromkeys(("dv", "dq", "dk"), (FP8,)), "dp": (SIXTEEN_BIT,),
            "k_scale": ("lane",), "block_q": (64,), "block_k": (128,), "smooth_v": (False,),
        },
        widths.of_call, _WIDTHS, mask_form=WORDS_BY_KEY, prologue=(64, 128),
        instead={"dp": "; name 'mixed', whose dP is 16 bit, or 'token(dp=int8)'"},
    ),
    auto="mixed",
    gpu="a GPU of compute capability 9.0 (H100, H200)",
    runs_on=lambda capability: capability == 90,
    first_on=(90,),
    falls_back="triton",
    needs="extra hopper",
)  # fmt: skip
