"""Transformers' small models under sagebwd and under SDPA, and where they come from."""

import os

import pytest

from sagebwd.integrations import transformers as integration
from tools.sweep import rows_of
from tools.sweep_transformers import sweep_one

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
