"""Families of kernels: a folder and a record are all that one takes, as dev/adding.md says."""

import importlib
import re

import pytest
import torch

from sagebwd import Recipe, dispatch, sage_attention
from sagebwd.call import Ask
from sagebwd.kernels import families
from sagebwd.reference.metrics import relative_l2
from tests.documents import ROOT
from tests.gpus import DEVICE

pytest.importorskip("triton")


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """The record of the family that dev/adding.md prints, in a folder of its own, among the others."""
    text = (ROOT / "dev" / "adding.md").read_text(encoding="utf-8")
    printed = re.findall(r"```python\n(.*?)```", text.partition("## To add a family")[2], re.DOTALL)
    folder = tmp_path / "toy_of_adding"
    folder.mkdir()
    for name, code in zip(("family", "launch"), printed, strict=True):
        (folder / f"{name}.py").write_text(code.replace("sagebwd.kernels.toy", folder.name), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    record = importlib.import_module(f"{folder.name}.family").FAMILY
    monkeypatch.setitem(families.FAMILIES, record.name, record)
    dispatch._choose.cache_clear()
    yield record
    dispatch._choose.cache_clear()


@pytest.mark.skipif(DEVICE == "cuda", reason="of no GPU that there is; the interpreter runs it")
@pytest.mark.parametrize(("width", "is_causal"), [(64, False), (40, False), (64, True)])
def test_a_family_is_a_folder_and_a_record(toy, width, is_causal):
    """Its forward, with a backward that another family runs, to the same recipe."""
    leaves = [
        torch.randn(2, heads, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        for heads, tokens in ((4, 20), (2, 37), (2, 37))
    ]
    do = torch.randn(2, 4, 20, width, dtype=torch.bfloat16)

    def outcome(impl):
        out = sage_attention(*leaves, is_causal=is_causal, enable_gqa=True, recipe="full", impl=impl)
        return out, *torch.autograd.grad(out, leaves, do)

    ran = []
    launch = importlib.import_module(toy.forward.module)
    real, launch.launch = launch.launch, lambda *given, **options: ran.append(1) or real(*given, **options)
    try:
        found = outcome(toy.name)
    finally:
        launch.launch = real
    assert bool(ran) != is_causal, "which the portable kernels run"
    for actual, expected in zip(found, outcome("reference"), strict=True):
        assert relative_l2(actual, expected) < 0.01


def test_who_runs_a_call_follows_from_the_record(toy, monkeypatch):
    ask = Ask("auto", 64, 64, torch.bfloat16, torch.device("cuda", 0))

    def chosen(arch, **changes):
        choice = dispatch._choose.__wrapped__(ask._replace(**changes), arch, False, True)
        return str(choice.recipe), choice.name

    assert chosen(100) == ("full", "toy/triton")
    assert chosen(100, head_dim=65) == ("token", "triton/triton"), "which is too wide for it"
    assert chosen(100, recipe=Recipe.named("token"))[1] == "triton/triton"
    assert chosen(90)[1] == "hopper/hopper"
    with pytest.raises(
        ValueError, match=r"impl='toy' needs a GPU of compute capability 10\.0, got cuda:0; use impl='triton'"
    ):
        chosen(90, impl="toy")
    with pytest.raises(NotImplementedError, match="head_dim 65 is not one of 1 to 64"):
        chosen(100, impl="toy", head_dim=65, value_dim=65)
    monkeypatch.setitem(families.FAMILIES, "toy", toy._replace(falls_back=None))
    with pytest.raises(NotImplementedError, match="toy has no backward"):
        chosen(100, impl="toy")
    with pytest.raises(ValueError, match="accepted: None, 'reference', 'triton', 'mma_sync', 'hopper', 'toy'"):
        chosen(100, impl="top")


def test_every_record_names_modules_and_families_that_are_there():
    for name, family in families.FAMILIES.items():
        assert name == family.name
        assert family.falls_back is None or family.falls_back in families.FAMILIES
        assert set(family.first_on) <= {x for x in range(200) if family.runs_on(x)}
        for row in filter(None, (family.forward, family.backward)):
            assert row.impl == name
            assert importlib.util.find_spec(row.module)
            assert row.needs is None or importlib.util.find_spec(row.needs)
