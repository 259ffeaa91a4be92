"""The end of backward in CUDA C++, against the pass behind dQ's own end."""

from __future__ import annotations

import pytest
import torch

from sagebwd.call import Saved
from sagebwd.recipe import SAMPLED_FROM

pytest.importorskip("triton")
from sagebwd.kernels import norm_rope as kernels
from sagebwd.kernels.runtime import nvrtc
from sagebwd.kernels.sm90 import widths
from sagebwd.kernels.sm90.operands import bwd_postprocess, finish_gradients
from sagebwd.kernels.sm90.operands.finish_gradients import Tiles, launch_finish_gradients
from tests.gpus import DEVICE, on_gpu
from tests.kernels import emulated_cuda
from tests.kernels.cubins import stack_bytes
from tests.kernels.test_norm_rope_codes import CASES, Case, in_four

pytestmark = on_gpu
# A thread's local memory, bytes: what does not fit its registers.
STACK_BYTES = 64
# Widths of a thread block, stages, and groups of heads that do not divide the heads.
SMALL, WIDE = Tiles(4, 3, 3, 2), Tiles(16, 4, 2, 1)


@pytest.fixture
def emulated(monkeypatch):
    """Kernels of CUDA C++ on a CPU, where there is no GPU."""
    emulated_cuda.stand_in(monkeypatch, finish_gradients)


class Backward:
    """What attention's backward leaves of a case, drawn."""

    def __init__(self, case: Case) -> None:
        self.q, self.k = case.draw(case.heads[0], 1), case.draw(case.heads[1], 2)
        self.call = call = case.call(self.q, self.k)
        self.case, self.tile = case, widths.width(case.head_dim, case.head_dim).backward
        queries, keys = call.queries, call.keys
        *_, self.q_rms, self.k_rms = case.composed(self.q, self.k, call.prologue)
        columns = queries.blocks(self.tile.queries) * self.tile.queries
        self.summed = torch.randn(queries.heads_in_all * case.head_dim, columns, device=DEVICE).half()
        self.spread = queries.per_token(self.q.device).uniform_(2**-6, 2**-5)
        heads = torch.arange(keys.batch * keys.heads, device=DEVICE)
        self.largest = (448 * 2.0**heads).view(torch.int32)
        self.dk_out = torch.randn(self.k.shape, device=DEVICE).to(case.dtype)

    @property
    def inputs(self) -> tuple:
        """Q and K, which a norm reads."""
        return (self.q, self.k) if self.case.normed else (None, None)

    def found(self, tiles: Tiles | None = None) -> finish_gradients.Gradients:
        packed = bool(self.case.lengths)
        norms = [x if x is None or not packed else x[0] for x in (self.q_rms, self.k_rms)]
        sums = self.summed, self.spread, self.largest, self.dk_out
        saved, dq = Saved(*[None] * 8, *norms), torch.full_like(self.q, torch.nan)
        return launch_finish_gradients(self.call, saved, *sums, *self.inputs, dq, self.tile, tiles)

    def wanted(self) -> tuple:
        """Of dQ in 16 bits and the pass by itself."""
        dq_out = torch.zeros_like(self.q)
        bwd_postprocess.launch_finish_dq(self.call, self.summed, self.spread, self.largest, dq_out, self.tile)
        _, interleaved, *tensors = self.call.prologue
        rows = map(in_four, (dq_out, self.dk_out, *self.inputs))
        given = *rows, self.q_rms, self.k_rms, *tensors, None, None, interleaved
        return kernels.backward(*given, (self.q.dtype, self.k.dtype))


def assert_gradients(found, wanted):
    """But for FP32 sums in another order, so that 16 bits of dQ may be the next number's."""
    for name, a, e in zip(("dq", "dk", "dq_weight", "dk_weight"), found, wanted):
        assert (a is None) == (e is None), name
        if a is None:
            continue
        a, e = (a.sum(0), e.sum(0)) if "weight" in name else (in_four(a), e)
        error = (a.double() - e.double()).abs().max() / e.double().abs().max()
        assert error < (1e-3 if "weight" in name else 2.0**-7), (name, error)
        assert (a.double() - e.double()).norm() <= 1e-3 * e.double().norm(), name


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("case", "tiles"),
    [
        *((case, None) for case in CASES if case.tokens < SAMPLED_FROM),
        (Case(64, 90, heads=(7, 7)), SMALL),
        (Case(128, lengths=(40, 0, 70), heads=(4, 1)), SMALL),
        (Case(64, 150, interleaved=True, dtype=torch.float16), WIDE),
        (Case(64, 20, heads=(1, 1), tables=torch.float32, normed=False, recipe="mixed(rotate=False)"), SMALL),
        (Case(128, lengths=(3,), heads=(5, 5), turned=False, recipe="mixed(rotate=False)"), None),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_pass_behind_dq(case, tiles):
    backward = Backward(case)
    assert_gradients(backward.found(tiles), backward.wanted())


@pytest.mark.usefixtures("emulated")
def test_rows_that_lie_apart():
    """Heads of Q and K are channels of wider rows, whose pitch no 16 bytes divide for K."""
    backward = Backward(Case(64, 30))
    wanted = backward.wanted()
    for name, pad in (("q", 8), ("k", 1)):
        x = getattr(backward, name)
        wide = torch.full((*x.shape[:-1], 64 + pad), torch.nan, dtype=x.dtype, device=DEVICE)
        wide[..., :64] = x
        setattr(backward, name, wide[..., :64])
    assert_gradients(backward.found(), wanted)


@pytest.mark.skipif(DEVICE == "cuda", reason="of the emulation")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("removed", ["", "    wait_for_copies<STAGES - 2>();", "    __syncthreads();  // what all"])
def test_a_wait_that_is_missing_shows(removed, monkeypatch, tmp_path):
    """Copies are under way until they are waited for, by the emulation too."""

    def kernel_of(source, arch):
        *others, file = source.files
        text = file.read_text(encoding="utf-8")
        assert not removed or text.count(removed) == 1
        changed = tmp_path / file.name
        changed.write_text(text.replace(removed, "    //") if removed else text, encoding="utf-8")
        return emulated_cuda.EmulatedKernel(source._replace(files=(*others, changed)))

    monkeypatch.setattr(finish_gradients, "kernel_of", kernel_of)
    found = Backward(Case(64, 70)).found(SMALL)
    assert found.dq.isfinite().all() == (not removed)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("absent", ["q_weight", "k_weight"])
def test_a_weight_of_one_side_alone(absent):
    backward = Backward(Case(64, 20))
    ones = torch.ones_like(backward.call.prologue.q_weight)
    found = []
    for weight in (None, ones):
        prologue = backward.call.prologue._replace(**{absent: weight})
        backward.call = backward.call._replace(prologue=prologue)
        found.append(backward.found())
    assert getattr(found[0], f"d{absent}") is None
    for name in {"dq", "dk", "dq_weight", "dk_weight"} - {f"d{absent}"}:
        assert torch.equal(*(getattr(x, name) for x in found)), name


@pytest.mark.usefixtures("emulated")
def test_rows_behind_the_last_offset_are_in_no_gradient():
    """Regression: those of K entered the gradient of its weight, whatever they held."""
    backward = Backward(Case(64, lengths=(40, 0, 33)))
    offsets = torch.tensor([0, 40, 40, 40], dtype=torch.int32, device=DEVICE)
    sides = (x._replace(cu_seqlens=offsets) for x in (backward.call.queries, backward.call.keys))
    backward.call = backward.call._replace(**dict(zip(("queries", "keys"), sides)))
    found = []
    for behind in (0.0, torch.nan):
        backward.q[40:] = backward.k[40:] = backward.dk_out[40:] = behind
        backward.q_rms[..., 40:] = backward.k_rms[..., 40:] = behind
        found.append(backward.found(SMALL))
    for name in ("dq_weight", "dk_weight"):
        first, second = (getattr(x, name).sum(0) for x in found)
        assert first.isfinite().all()
        assert torch.equal(first, second), name


@pytest.mark.usefixtures("emulated")
def test_keys_that_are_not_finite_make_nan_of_their_queries():
    backward = Backward(Case(64, 20))
    backward.largest[1] = 0x7F800000  # of the second of two key heads: half of four heads' queries
    dq = backward.found().dq
    assert dq[0, 2:].isnan().all()
    assert dq[0, :2].isfinite().all()
    assert dq[1].isfinite().all()


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("turned", [True, False])
def test_compiled_it_spills_next_to_nothing(head_dim, turned, tmp_path):
    case, tiles = Case(head_dim), finish_gradients.TILES[head_dim]
    source = finish_gradients.source(head_dim, turned * head_dim, case.dtype, case.prologue(), tiles)
    assert source.shared_bytes * tiles.blocks_an_sm <= 226 << 10  # beside the 1 KiB of each block
    assert stack_bytes(source, 90, tmp_path) <= STACK_BYTES
