"""The ablations of the error study: one change of `token` each, and what dev/log says that it costs.

A cost of "no more" follows from the rule of `sagebwd.recipe`: a scale on an axis that the product does not reduce over
is applied in the same multiplication, as many times. Where the log has a figure for the same change it is quoted; the
rest is "not measured", or counted in products where that is all that is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from lab.studies import variants

NOT_MEASURED = "not measured"
# An INT8 dP as it was before `Recipe.dp` had its steps.
PLAIN_DP = ("token scales",)


@dataclass(frozen=True)
class Ablation:
    """A recipe, or a variant of one.

    Args: recipe, as text; variant, arguments of `lab.studies.variants.Variant`; name, of a variant; cost, over
    `token`'s; no_more, whether that is known to be nothing.
    """

    recipe: str
    cost: str = NOT_MEASURED
    no_more: bool = False
    name: str = ""
    variant: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name or self.recipe


BASES = (
    Ablation("token", "0", True),
    Ablation("paper", "dK/dV 2346 us for `token`'s 2764 at head_dim 64, 3024 for 2739 at 128 (Triton)"),
)

SWITCHES = (
    Ablation("token(smooth_v=False)", "less by a mean, found in the pass that finds V's scales", True),
    Ablation("token(smooth_k=False)", "less by a mean, found in one 75 us pass with V's scales", True),
    Ablation(
        "token(smooth_q=True)",
        f"{NOT_MEASURED}; mean(Q) K^T added to S and a 16-bit sum to dK; not in Hopper's kernels",
    ),
    Ablation("token(q_scale=block)", "no more", True),
    Ablation("token(k_scale=block)", "no more; worth 0 to 2% of the Hopper forward", True),
    Ablation(
        "token(v_scale=block)", "less: forward 1.76 ms for 1.88 at head_dim 64, 1.20 for 1.22 at 128 (Triton)", True
    ),
    Ablation(
        "token(v_scale=sequence)", "less: forward 1449 us for `v_scale=block`'s 1546 at head_dim 64 (Triton)", True
    ),
    Ablation("token(do_scale=channel)", f"{NOT_MEASURED}; a vector for a scalar where dV's sums are rescaled"),
    Ablation("token(p_scale_dv=tile)", "more: a maximum over the whole program, not a quad shuffle"),
    Ablation("token(ds_scale_dq=tile)", "more: a maximum over the whole program, not a quad shuffle"),
    Ablation("token(ds_scale_dk=tile)", "more: a maximum over the whole program, not a quad shuffle"),
    Ablation("token(block_q=32)", f"{NOT_MEASURED}; sums of dV and dK rescaled twice as often"),
    Ablation("token(block_q=128)", "dK/dV 378 TFLOPS for 372 at head_dim 64, 354 for 369 at 128"),
    Ablation("token(block_q=256)"),
    Ablation("token(block_k=32)", f"{NOT_MEASURED}; sums of O and dQ rescaled four times as often"),
    Ablation("token(block_k=64)", "forward 287 TFLOPS for 379 at head_dim 64, 434 for 594 at 128"),
    Ablation(
        "token(block_k=256)",
        "1.4 instructions fewer in the forward at head_dim 128, for 64 registers that are not there",
    ),
    Ablation(
        "token(p_levels=127)", "less: forward 1.51 ms for 1.76 at head_dim 64, 1.04 for 1.20 at 128 (Triton)", True
    ),
    Ablation(
        "token(s=16bit)", f"{NOT_MEASURED}; 2.25 instructions fewer in Hopper's forward by count; S in 16 bit, twice"
    ),
    Ablation("token(o=16bit)", f"{NOT_MEASURED}; one product in 16 bit"),
    Ablation("token(dv=16bit)", f"{NOT_MEASURED}; one product in 16 bit"),
    Ablation("token(dq=16bit)", f"{NOT_MEASURED}; one product in 16 bit"),
    Ablation("token(dk=16bit)", f"{NOT_MEASURED}; one product in 16 bit"),
    Ablation("token(dv=fp8)"),
    Ablation("token(dq=fp8)"),
    Ablation("token(dk=fp8)"),
    Ablation("token(s=16bit, o=16bit)", f"{NOT_MEASURED}; three of seven products in 16 bit: S, O and S once more"),
    Ablation("token(block_q=32, block_k=32)"),
    Ablation("token(block_k=64, do_scale=channel)"),
    Ablation("token(smooth_q=True, do_scale=channel)"),
)

VARIANTS = tuple(
    Ablation("token", cost, no_more, name, variant)
    for name, cost, no_more, variant in (
        (
            "dS and P rounded stochastically",
            f"{NOT_MEASURED}; a random number an element",
            False,
            {"psi": variants.stochastic},
        ),
        ("dS and P clipped at 99%", NOT_MEASURED, False, {"psi": partial(variants.percentile, fraction=0.99)}),
        ("dS and P clipped at 95%", NOT_MEASURED, False, {"psi": partial(variants.percentile, fraction=0.95)}),
        ("dS and P clipped by least squares", NOT_MEASURED, False, {"psi": variants.least_squares}),
        ("S = Q1 K1 + Q2 K1", "a product more, twice", False, {"s_terms": "q"}),
        ("S = Q1 K1 + Q1 K2", "a product more, twice", False, {"s_terms": "k"}),
        ("S = Q1 K1 + Q1 K2 + Q2 K1", "two products more, twice", False, {"s_terms": "qk"}),
        (
            "dO scaled by token, folded into P",
            f"{NOT_MEASURED}; by count none: in P's exponent and in dS's factor a row",
            False,
            {"do_scale": "token"},
        ),
        (
            "dO scaled by channel of the sequence",
            f"{NOT_MEASURED}; by count none in the loop, a pass over dO before it",
            False,
            {"do_scale": "sequence"},
        ),
        ("delta = rowsum(P dP)", "S and dP once more, before dS", False, {"delta": "rebuilt"}),
        ("dP in INT8, a scale a token", f"{NOT_MEASURED}; one product more in INT8", False, {"dp_steps": PLAIN_DP}),
    )
)

ABLATIONS = SWITCHES + VARIANTS
