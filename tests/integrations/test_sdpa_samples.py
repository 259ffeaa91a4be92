"""PyTorch's own sample inputs of scaled_dot_product_attention, called directly and through replace_sdpa."""

import collections
import re

import pytest
import torch

from sagebwd.meaning.metrics import relative_l2
from tests.integrations.test_sdpa import ORIGINAL, in_int8, is_original_or_int8

pytestmark = pytest.mark.rounding

REFUSALS = (ValueError, TypeError, NotImplementedError)


def op_samples(dtype):
    pytest.importorskip("expecttest", reason="torch.testing's OpInfo needs it")
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=True))
    assert len(samples) >= 20
    return [((sample.input, *sample.args), sample.kwargs) for sample in samples]


def listed(seen):
    """Counts for the summary that pytest prints."""
    return f"{seen.total()} samples: " + "; ".join(f"{count} {what}" for what, count in seen.most_common())


# relative L2 of the output against SDPA in FP64, measured 2026-11-21 with a margin: 3 queries, 6 keys, values up to 9
SAMPLE_ERROR = {
    "full": {torch.float32: 1e-5, torch.bfloat16: 0.01},
    "token": {torch.float32: 0.1, torch.bfloat16: 0.1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", SAMPLE_ERROR)
def test_opinfo_samples_match_or_are_refused(recipe, dtype, record_property):
    seen, worst = collections.Counter(), 0.0
    for arguments, options in op_samples(dtype):
        if "attn_mask" in options:  # whose own gradient is refused by name
            options = options | {"attn_mask": options["attn_mask"].detach()}
        try:
            out = in_int8(*arguments, **options, recipe=recipe)
        except REFUSALS as error:
            seen[re.sub(r"\d+(, \d+)*", "N", f"{type(error).__name__}: {error}")[:90]] += 1
            continue
        leaves = [x.detach().double().requires_grad_() for x in arguments]
        doubled = {name: x.double() if name == "attn_mask" else x for name, x in options.items()}
        exact = ORIGINAL(*leaves, **doubled)
        worst = max(worst, relative_l2(out, exact))
        seen["matched"] += 1
        if recipe == "full" and dtype == torch.float32:  # sharp enough to hold gradients to as well
            for a, e in zip(torch.autograd.grad(out.sum(), arguments), torch.autograd.grad(exact.sum(), leaves)):
                torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-4)
    record_property("counted", f"worst relative L2 {worst:.1e}; {listed(seen)}")
    assert worst <= SAMPLE_ERROR[recipe][dtype]
    assert all(what == "matched" or "dropout" in what for what in seen)
    assert seen["matched"] >= 13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opinfo_samples_through_the_patch(dtype, record_property):
    seen = collections.Counter(is_original_or_int8(*sample) for sample in op_samples(dtype))
    record_property("counted", listed(seen))
    assert seen["replaced"] >= 4
    assert seen["kept"] >= 4
