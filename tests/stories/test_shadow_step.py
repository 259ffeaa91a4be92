"""The shadow step that docs/safety.md prints, under what trainers do to a model."""

import re

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.documents import ROOT, text_of
from tests.lab.training.runs import begin, finish


def page():
    """The names that the first block of the page makes."""
    names = {}
    block = re.search(r"```python\n(.*?)^```$", text_of(ROOT / "docs" / "safety.md"), re.DOTALL | re.MULTILINE)
    exec(compile(block[1], "docs/safety.md", "exec"), names)
    return names


def test_it_tells_low_precision_from_16_bit_and_leaves_no_gradient():
    names = page()
    model, shadow, held_out = (names[name] for name in ("model", "shadow", "held_out"))
    before = [weight.clone() for weight in model.parameters()]
    assert 0.001 < shadow(held_out)["error"] < 0.2
    model[1].recipe = model[2].recipe = "full"
    assert shadow(held_out) == {"loss": 0, "error": 0}
    assert all(map(torch.equal, before, model.parameters()))
    assert all(weight.grad is None for weight in model.parameters())


def test_a_compiled_model_has_the_same_and_compiles_once_more():
    names = page()
    plain = names["shadow"](names["held_out"])
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    names["model"] = torch.compile(names["model"], backend=counter, fullgraph=True)
    found = [names["shadow"](names["held_out"]) for _ in range(3)]
    torch._dynamo.reset()
    for one in found:
        assert one["error"] == pytest.approx(plain["error"], rel=1e-3)
    assert counter.frame_count == 2


def under_ddp_and_fsdp2():
    names = page()
    model, shadow, held_out = (names[name] for name in ("model", "shadow", "held_out"))
    whole = shadow(held_out)["error"]  # each process has the whole batch, so means over processes are its own
    dist.init_process_group("gloo")
    names["model"] = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    assert shadow(held_out)["error"] == pytest.approx(whole, rel=1e-3)
    names["model"] = model
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert shadow(held_out)["error"] == pytest.approx(whole, rel=1e-3)
    dist.destroy_process_group()


def test_on_two_processes():
    finish(begin(2, "cpu", under_ddp_and_fsdp2))
