"""Sinks beside kernels: interpreted on a CPU, compiled where there is a GPU."""

import math

import pytest
import torch
from torch import Tensor

from sagebwd import sinks as epilogue
from sagebwd.reference.metrics import relative_l2
from tests.attention_case import outcome
from tests.gpus import DEVICE, HAS_HOPPER, on_gpu
from tests.test_sinks import attend, exact, inputs

pytest.importorskip("triton")
from sagebwd.kernels import sinks as kernels

pytestmark = on_gpu


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 3, 3, 90], dtype=torch.int32)])
def test_the_passes_are_the_epilogue(offsets, smooth):
    """Of 100 packed tokens 10 lie past the last sequence, and are anything."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads, groups, dim, value_dim, tokens, packed = 4, 2, 24, 40, 100, offsets is not None
    shape, of_lse, count = ((tokens, heads), (heads, tokens), 3) if packed else ((2, heads, tokens),) * 2 + (2,)
    q, o, do, dq = (drawn(*shape, width).bfloat16() for width in (dim, value_dim, value_dim, dim))
    lse, dlse = 3 * drawn(*of_lse), drawn(*of_lse)
    lse[..., 1], lse[..., 2] = -math.inf, -300
    k_mean = drawn(count, groups, dim) if smooth else None
    sinks = torch.tensor([0.5, -2, -math.inf, 90])
    real = slice(90 if packed else None)

    def both(module, device, with_dlse):
        def there(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.clone().to(device)

        found_o, found_lse, found_dq = map(there, (o, lse, dq))
        settings = (0.3, there(offsets), 87)[: 2 if module is epilogue else 3]
        weight = module.weigh(found_o, found_lse, there(q), there(k_mean), there(sinks), *settings)
        if packed:
            weight[..., real.stop :] = 0
        # of O as it was: the interpreter cuts off what BF16 does not hold
        given = there(do), there(dlse) if with_dlse else None, there(o), weight, found_dq, there(k_mean)
        if module is epilogue:
            dsinks = epilogue.gradient(*given, *settings)
        else:
            dsinks = kernels.sum_of_blocks(kernels.gradient_by_block(*given, *settings), heads)
        rows = [x.movedim(0 if packed else 2, 0)[real] for x in (found_o, found_dq)]
        return [x.cpu() for x in (*rows, *(x.movedim(-1, 0)[real] for x in (found_lse, weight)), dsinks)]

    for with_dlse in (False, True):
        for a, e in zip(both(kernels, DEVICE, with_dlse), both(epilogue, "cpu", with_dlse)):
            torch.testing.assert_close(a, e, atol=1e-4, rtol=1e-3 if a.dtype == torch.float32 else 2e-2)


CASES = [
    ("token", "triton"),
    ("token(dp=int8)", "triton"),
    ("full", "triton"),
    *([("mixed", "hopper")] if HAS_HOPPER else []),
]


@pytest.mark.parametrize(("recipe", "impl"), CASES)
@pytest.mark.parametrize("form", [{"is_causal": True}, {"window": (7, 0)}, {"attn_mask": True}], ids=str)
def test_kernels_are_as_accurate_as_the_emulator(form, recipe, impl):
    """Their backward is not told of sinks, but given what is beside them."""
    if "attn_mask" in form:
        form = {"attn_mask": torch.rand(45, 45, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.7}
    leaves, *given = inputs(torch.bfloat16, torch.float32, "normal")
    leaves, given = [x.detach().to(DEVICE).requires_grad_() for x in leaves], [x.to(DEVICE) for x in given]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    plain = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in form.items()}
    wanted = outcome(
        lambda *x: exact(*x, **plain), [x.detach().cpu().requires_grad_() for x in doubles], *(x.cpu() for x in given)
    )
    errors = {
        name: [
            relative_l2(a.cpu(), e)
            for a, e in zip(outcome(lambda *x: attend(*x, recipe, impl=name, **form), leaves, *given), wanted)  # noqa: B023
        ]
        for name in (impl, "reference")
    }
    assert all(a < 1.5 * e + 1e-3 for a, e in zip(errors[impl], errors["reference"])), errors
