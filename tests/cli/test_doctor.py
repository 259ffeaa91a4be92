import sys
from types import SimpleNamespace

import pytest
import torch

from sagebwd import Recipe, dispatch
from sagebwd.cli import doctor
from sagebwd.kernels.families import FAMILIES


def test_facts_name_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreted" in doctor.facts()["TRITON_INTERPRET"]
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET" not in doctor.facts()


@pytest.mark.parametrize("error", ['ImportError("libcuda.so.1: no such file")', 'RuntimeError("of its own")'])
def test_facts_say_that_triton_is_broken(monkeypatch, tmp_path, error):
    """Regression: a traceback, or a name that was None, where a person asks what is wrong."""
    (tmp_path / "triton.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    why = error.replace('("', ": ").removesuffix('")')
    assert doctor.facts()["Triton"] == f"cannot be imported ({why}): the kernels need it (pip install triton)"


def test_facts_name_the_kernel_of_mixed_on_hopper(monkeypatch):
    compile_ = pytest.importorskip("sagebwd.kernels.sm90.forward.compile")
    card = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(compile_, "unavailable", lambda: "nvidia-cutlass-dsl is not installed")
    assert doctor.facts()["mixed on Hopper"].endswith("slower: nvidia-cutlass-dsl is not installed")
    monkeypatch.setattr(compile_, "unavailable", lambda: None)
    monkeypatch.setattr(compile_, "broken_compiler", lambda: "nvidia-cutlass-dsl is broken")
    assert doctor.facts()["mixed on Hopper"].endswith("where it is compiled already: nvidia-cutlass-dsl is broken")
    monkeypatch.setattr(compile_, "broken_compiler", lambda: None)
    assert doctor.facts()["mixed on Hopper"] == "forward in CuTe DSL"
    card.major = 8
    assert "mixed on Hopper" not in doctor.facts()


def test_answers_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    answers = {a.impl: a for a in doctor.answers("cpu", torch.bfloat16, (64, 64), Recipe.named("token"))}
    assert set(answers) == set(FAMILIES)
    assert answers["reference"].chosen
    assert not answers["triton"].takes
    assert "needs a GPU of compute capability 8.0 or more" in answers["triton"].reason


def test_answers_say_whose_backward_runs(monkeypatch):
    pytest.importorskip("triton")

    def reasons(forward: str, backward: str) -> set[str]:
        choice = dispatch.named(Recipe.named("mixed"), f"{forward}/{backward}")
        monkeypatch.setattr(dispatch, "choose", lambda *_: choice)
        return {a.impl: a.reason for a in doctor.answers("cpu", torch.bfloat16, (64, 64), choice.recipe)}

    assert reasons("hopper", "hopper")["hopper"] == "fastest that takes the call"
    for forward, backward, direction in (("hopper", "triton", "backward"), ("triton", "hopper", "forward")):
        assert reasons(forward, backward)["hopper"] == (
            f"fastest that takes the call; {direction} runs triton's kernels, as hopper has none here for this recipe"
        )


def test_on_a_card_of_mma_sync_auto_is_settled_by_the_width(monkeypatch):
    ask_of = doctor.ask_of
    monkeypatch.setattr(dispatch, "arch_of", lambda device: 89)
    monkeypatch.setattr(dispatch, "missing", lambda row: None)
    monkeypatch.setattr(doctor, "ask_of", lambda *call: ask_of(*call)._replace(device=torch.device("cuda", 0)))
    dispatch._choose.cache_clear()
    for width, recipe in ((128, "token(dp=int8)"), (64, "token")):
        call = "meta", torch.bfloat16, (width, width)
        settled = doctor.recipe_of(*call, "auto")
        assert str(settled) == recipe
        assert [answer.impl for answer in doctor.answers(*call, settled) if answer.chosen] == ["mma_sync"]
    dispatch._choose.cache_clear()


def test_self_test_compares_with_the_reference(monkeypatch):
    assert doctor.self_test("cpu", torch.bfloat16, (64, 64), Recipe.named("token")) == 0
    calls = []
    real = doctor.sage_attention

    def broken(*inputs, impl, **arguments):
        calls.append(impl)
        out = real(*inputs, impl="reference", **arguments)
        return out if impl == "reference" else 1.1 * out

    monkeypatch.setattr(doctor, "sage_attention", broken)
    assert doctor.self_test("cpu", torch.bfloat16, (64, 64), Recipe.named("token")) == pytest.approx(0.1, rel=0.1)
    assert calls == [None, "reference"]
