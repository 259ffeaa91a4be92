"""The sweep over Transformers' models tells what is the same from what is not."""

import pytest

pytest.importorskip("transformers")

from sagebwd.integrations import transformers as integration
from tools.sweep_page import reason, table
from tools.sweep_transformers import MEANINGS, sweep_one


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


def test_the_page_groups_refusals_by_reason():
    words = "{} computes its attention itself and cannot run under attn_implementation='sagebwd'; use 'sdpa'"
    rows = {
        "a": ("same", "plain"),
        "b": ("refused", words.format("BForCausalLM")),
        "c": ("refused", words.format("CModel")),
        "d": ("refused", "attention_mask of shape (2, 1, 6, 6) is not supported by attn_implementation='sagebwd'"),
    }
    assert reason(rows["d"][1]) == "attention_mask of shape (...)"
    page = table("Models", "a command", "versions", rows, MEANINGS)
    assert "| the model computes its attention itself | `b`, `c` |" in page
    assert "## Same (1)" in page
