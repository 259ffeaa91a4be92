"""Transformers' small models under sagebwd and under SDPA, and where they come from."""

import os

import pytest
import torch
from transformers import CLIPVisionConfig, Qwen2VLConfig

from sagebwd.integrations import transformers as integration
from tools.sweep import rows_of
from tools.sweep_transformers import sweep_one
from tools.tiny_models import candidates, from_default, from_tests, use_tests

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def registered():
    yield
    integration.register()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "status"),
    [("llama", "same"), ("bart", "same"), ("vit", "same"), ("bloom", "refused"), ("llama4_text", "same"),
     ("convnext", "no call"), ("axk2", "refused"), ("t5gemma2", "same"), ("minicpm3", "same")],
)  # fmt: skip
def test_rows(model_type, status):
    assert sweep_one(model_type)[0] == status


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_number_and_an_unclear_error_show(monkeypatch):
    right = integration.attention

    def wrong(*arguments, **options):
        out, weights = right(*arguments, **options)
        return out * 1.01, weights

    def unclear(*arguments, **options):
        raise KeyError("sagebwd")

    for attention, status in ((wrong, "different"), (unclear, "crash")):
        monkeypatch.setattr(integration, "attention", attention)
        assert sweep_one("llama")[0] == status


MODEL_TEST = '''
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel


class LlamaTester:
    def prepare_config_and_inputs_for_common(self):
        ids = torch.ones(3, 5, dtype=torch.long)
        config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        return config, {"input_ids": ids, "attention_mask": torch.zeros(3, 5), "labels": None}


class LlamaModelTest:
    all_model_classes = (LlamaModel, LlamaForCausalLM)

    def setUp(self):
        self.model_tester = LlamaTester()

    def _prepare_for_class(self, inputs, model_class):
        return inputs


class BrokenModelTest(LlamaModelTest):
    def setUp(self):
        raise RuntimeError("needs a network")
'''  # fmt: skip


def test_the_librarys_tests_are_where_a_checkout_has_them(tmp_path):
    """In a process of its own: a checkout's package is called "tests", as ours is."""
    folder = tmp_path / "tests" / "models" / "llama"
    folder.mkdir(parents=True)
    for parent in (folder, folder.parent, folder.parent.parent):
        (parent / "__init__.py").touch()
    (folder / "test_modeling_llama.py").write_text(MODEL_TEST)
    for name in ("test_modeling_common", "causal_lm_tester", "vlm_tester"):
        (tmp_path / "tests" / f"{name}.py").touch()

    def run(_):
        use_tests(tmp_path)
        generates, plain, broken = from_tests("llama", tmp_path)
        names = generates.model_class.__name__, plain.model_class.__name__, str(broken)
        assert sorted(generates.inputs) == ["attention_mask", "input_ids"]
        assert generates.inputs["attention_mask"].all()
        assert generates.is_text
        return "found", " ".join(names)

    assert rows_of(["llama"], run, jobs=1) == {"llama": ("found", "LlamaForCausalLM LlamaModel needs a network")}


def test_a_checkout_without_tests_is_named(tmp_path):
    def run(_):
        use_tests(tmp_path)

    assert "SystemExit: --tests" in rows_of(["llama"], run, jobs=1)["llama"][1]


def test_a_class_that_no_auto_class_knows_is_found():
    (tiny, *_) = from_default("clip_vision_model")
    assert isinstance(tiny.config, CLIPVisionConfig)
    assert not tiny.is_text
    assert tiny.model("sdpa")(**tiny.inputs).last_hidden_state.shape[0] == 2


def test_a_part_is_handed_what_its_whole_hands_it():
    """Qwen2-VL's text model, whose position_ids have three rows."""
    tiny = [x for x in candidates("qwen2_vl_text") if not isinstance(x, Exception)][-1]
    assert isinstance(tiny.config, type(Qwen2VLConfig().text_config))
    assert torch.is_tensor(tiny.inputs["inputs_embeds"])
    assert tiny.model("sdpa")(**tiny.inputs).last_hidden_state.isfinite().all()


def case(name):
    if name == "raises":
        raise KeyError("why")
    if name == "dies":
        os._exit(1)
    return "same", name


def test_an_error_and_a_death_are_rows():
    rows = rows_of(["well", "raises", "dies"], case, jobs=2)
    assert rows["well"] == ("same", "well")
    assert rows["raises"] == ("crash", "KeyError: 'why'")
    assert rows["dies"][0] == "not built"
    assert list(rows) == ["dies", "raises", "well"]
