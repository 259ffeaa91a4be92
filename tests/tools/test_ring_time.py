"""sagebwd's ring beside PyTorch's: both attend to the whole sequence, and what is wrong or does not run is no peer."""

import json
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch.nn import attention

if not dist.is_available():
    pytest.skip("torch.distributed is not in this build", allow_module_level=True)

from torch.distributed.tensor import DTensor, Shard

from tests.lab.training.runs import begin, finish
from tools import fa4_in_torch, ring_time

ARGUMENTS = "--device cpu --impl reference --heads 2 --rounds 1 --commit abc"


def with_a_kernel_for_cpus():
    """PyTorch's ring has none: its template around torch's own FlashAttention for CPUs."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward

    def handled(operation, given, options):
        mesh = given[0].device_mesh
        local = [x.to_local() if isinstance(x, DTensor) else x for x in given]
        if operation is forward.default:
            *tensors, _, is_causal = local
            found = ring._templated_ring_attention(
                mesh.get_group(), 2, forward, *tensors, dropout_p=0.0, is_causal=is_causal, **options
            )
        else:
            do, *tensors, _, is_causal = local
            found = ring._templated_ring_attention_backward(
                mesh.get_group(), 2, backward.default, do, "grad_out", *tensors, is_causal, dropout_p=0.0, **options
            )
        return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in found)

    ring.custom_ops |= {forward.default: handled, backward.default: handled}


def beside_torch(output):
    with_a_kernel_for_cpus()
    ring_time.main([*ARGUMENTS.split(), "--shape", "16x64", "--shape", "16x128", "--output", str(output)])


def as_it_is(output):
    ring_time.ERRORS_TO = 32
    ring_time.main([*ARGUMENTS.split(), "--shape", "16x64", "--output", str(output)])


def rows_of(output):
    (path,) = output.glob("ring_2-processes_cpu_*_abc.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (content["processes"], content["recipe"]) == (2, "mixed")
    return content["rows"]


def test_both_rings_are_attention_on_one_process(tmp_path):
    finish(begin(2, "cpu", beside_torch, tmp_path))
    rows = rows_of(tmp_path)
    assert [row["attention"] for row in rows] == 2 * [
        "one process, full precision", "one process, mixed", "sagebwd mixed", "torch cpu allgather",
        "torch cpu alltoall",
    ]  # fmt: skip
    assert {row["tokens"] for row in rows} == {64, 128}
    for row in rows:
        assert 0 < row["ms"]["forward"] < row["ms"]["both"]
        ring = not row["attention"].startswith("one")
        assert row["processes"] == 1 + ring
        if ring:
            assert row["gate"] == "ok"
        if row["attention"].startswith("torch"):
            assert max(row["errors"].values()) < 0.01
    assert ring_time.compared(rows[:5]).startswith("forward ")


def test_without_a_kernel_or_a_whole_sequence_nothing_is_claimed(tmp_path):
    finish(begin(2, "cpu", as_it_is, tmp_path))
    own, *peers = rows_of(tmp_path)
    assert own["gate"] == "not checked"
    assert own["ms"]["both"] > 0
    assert len(peers) == 2
    assert all("sharding strategy" in row["refusal"] and "ms" not in row for row in peers)
    assert ring_time.compared([own, *peers]).startswith("nothing to compare with")


def test_a_peer_that_is_wrong_does_not_count():
    single = dict.fromkeys(ring_time.TENSORS, 0.03)
    rows = [{"errors": single}]
    peer, own = ring_time.Ring(kernel="cudnn", rotation="alltoall"), ring_time.Ring("mixed")
    assert ring_time._gate(peer, single, rows) == "ok"
    assert ring_time._gate(peer, single | {"dk": 0.3}, rows) == "FAILED"
    assert ring_time._gate(peer, single | {"dk": float("nan")}, rows) == "FAILED"
    assert ring_time._gate(own, single | {"dv": 0.05}, rows) == "ok"
    assert ring_time._gate(own, single | {"dv": 0.06}, rows) == "FAILED"

    def row(name, forward, both, gate):
        return {"attention": name, "gate": gate, "ms": {"forward": forward, "both": both}}

    text = ring_time.compared(
        [row("sagebwd mixed", 2, 8, "ok"), row("torch a", 1, 5, "FAILED"), row("torch b", 4, 10, "ok"),
         row("torch c", 5, 9, "ok")]
    )  # fmt: skip
    assert text == "forward 2.0 ms, 0.500 of torch b; both 8.0 ms, 0.889 of torch c"


def test_torch_takes_two_tensors_of_flash_attention_4(monkeypatch):
    def interface(count):
        return lambda *tensors, **_: tuple(tensors[:1]) * count

    package = types.ModuleType("flash_attn.cute.interface")
    package._flash_attn_fwd, package._flash_attn_bwd = interface(5), interface(4)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", package)
    x = torch.zeros(1)
    assert fa4_in_torch._flash_attn_fwd(x, x, x) == (x, x)
    assert fa4_in_torch._flash_attn_bwd(x, x, x) == (x, x, x)
    with fa4_in_torch.active():
        assert attention.current_flash_attention_impl() == fa4_in_torch.NAME
    assert attention.current_flash_attention_impl() is None
