"""Models that others trained, and texts as they read them."""

import lzma

import pytest
import torch

from sagebwd.diagnostics import models, text
from tests.diagnostics.test_capture import build, tokens


def as_bytes(text):
    return [*text.encode(), 256]


def test_models_and_tokenisers_by_folder(tmp_path, monkeypatch):
    run = tmp_path / "run"
    build("qwen3").save_pretrained(run / "model")
    ids = tokens(1, 20)
    with torch.no_grad():
        assert torch.equal(models.load_model(run / "model")(ids).logits, build("qwen3")(ids).logits)
    assert models.load_model(run / "model", dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="no tokeniser there"):
        models.encode(run / "model", "text")
    others = [lambda path: None, lambda path: as_bytes if path == run / "model" else None]
    monkeypatch.setattr(models, "ENCODERS", others)
    assert models.encode(run / "model", "ab").tolist() == [[97, 98, 256]]
    with pytest.raises(ValueError, match="text: it is empty"):
        models.encode(run / "model", "")
    with pytest.raises(ValueError, match=r"no config\.json there"):
        models.load_model(run)


def test_windows_are_spread_over_the_text():
    ids = torch.arange(100)[None]
    assert [window.tolist()[0] for window in models.windows(ids, 3, 2)] == [[0, 1, 2], [97, 98, 99]]
    (one,) = models.windows(ids, 7)
    assert one.tolist() == [list(range(7))]
    assert len(models.windows(ids, 25, 4)) == 4
    for tokens_wanted, count, message in (
        (26, 4, "4 windows of 26 need 104; the text has 100"), (101, 1, "tokens=101: the text has 100"),
        (0, 1, "tokens=0"), (5, 0, "windows=0 must be at least 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            models.windows(ids, tokens_wanted, count)


def test_a_text_of_a_model(tmp_path, monkeypatch):
    run = tmp_path / "run"
    build().save_pretrained(run / "model")
    monkeypatch.setattr(models, "ENCODERS", [lambda path: as_bytes])
    (tmp_path / "text.txt").write_text("abc" * 200)
    with lzma.open(tmp_path / "text.txt.xz", "wt") as file:
        file.write("abc" * 200)
    model = models.load_model(run / "model")
    plain = models.text_windows(model, run / "model", tmp_path / "text.txt", count=2)
    assert [window.shape for window in plain] == [(1, 128), (1, 128)]  # its positions
    packed = models.text_windows(model, run / "model", tmp_path / "text.txt.xz", count=2)
    assert all(torch.equal(one, other) for one, other in zip(plain, packed, strict=True))
    with pytest.raises(ValueError, match="windows=9999: 9999 windows of 1 need 9999; the text has"):
        models.text_windows(model, run / "model", tmp_path / "text.txt", count=9999)
    (sample,) = models.text_windows(model, run / "model", None, tokens=12)
    assert sample.shape == (1, 12)
    assert len(text.SAMPLE_TEXT.read_text(encoding="utf-8")) > 4000


def test_a_gguf_file_needs_its_package_and_itself(tmp_path, monkeypatch):
    path = tmp_path / "x.gguf"
    for use in (models.load_model, lambda path: models.encode(path, "text")):
        with pytest.raises(ValueError, match="there is no such file"):
            use(path)
    path.touch()
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    for use in (models.load_model, lambda path: models.encode(path, "text")):
        with pytest.raises(ValueError, match="needs the package gguf: pip install gguf"):
            use(path)
