import json
import os
import re

import numpy as np
import pytest
import torch

from lab.training import data as text
from lab.training.config import Config


def config(tmp_path, **changes):
    base = {"data.cache": str(tmp_path / "cache"), "optimisation.steps": 2}
    return Config("x").replace(base | {f"data.{key}": value for key, value in changes.items()})


def decoded(tokens):
    return bytes(int(t) for t in tokens if t < 256).decode()


def test_bytes_of_a_file_round_trip(tmp_path, corpus):
    tokens = text.load(config(tmp_path, source=str(corpus), held_out_share=0.1))
    documents = corpus.read_text().split("\n<|endoftext|>\n")[:-1]
    together = decoded(np.concatenate((tokens.train, tokens.held_out)))
    assert len(together.replace("\n", "")) == sum(len(d.replace("\n", "")) for d in documents)
    assert (tokens.train == 256).sum() + (tokens.held_out == 256).sum() == len(documents)
    assert 0.02 < len(tokens.held_out) / len(tokens.train) < 0.3
    assert tokens.vocabulary == 257
    assert tokens.train.dtype == np.uint16


def test_held_out_documents_are_not_trained_on(tmp_path, corpus):
    tokens = text.load(config(tmp_path, source=str(corpus), held_out_share=0.2))
    numbers = [
        {line.split(".")[0] for line in decoded(part).split("\n") if line.startswith("Document")}
        for part in (tokens.train, tokens.held_out)
    ]
    assert numbers[1]
    assert not numbers[0] & numbers[1]


def test_a_held_out_file_of_its_own(tmp_path, corpus):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("Something else entirely, several times over. " * 20, encoding="utf-8")
    tokens = text.load(config(tmp_path, source=str(corpus), held_out=str(held_out)))
    assert "Something else" in decoded(tokens.held_out)
    assert "Something else" not in decoded(tokens.train)


def test_hub_dataset_streams_from_a_local_folder(tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    rows = [{"text": f"row {n} " + "words and more words " * 5} for n in range(200)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokens = text.load(config(tmp_path, source=f"hf:{folder}", held_out_share=0.1))
    assert "words and more" in decoded(tokens.train[:200])
    (folder / "train.jsonl").write_text(json.dumps({"body": "x"}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no column 'text', only body"):
        text.load(config(tmp_path, source=f"hf:{folder}", held_out_share=0.2))


def test_the_cache_is_used_and_knows_when_a_file_changed(tmp_path, corpus, monkeypatch):
    chosen = config(tmp_path, source=str(corpus))
    first = text.load(chosen)
    monkeypatch.setattr(text, "_tokenise", lambda *_: pytest.fail("tokenised again"))
    assert np.array_equal(text.load(chosen).train, first.train)
    monkeypatch.undo()
    corpus.write_text(corpus.read_text() * 2, encoding="utf-8")
    assert len(text.load(chosen).train) > 1.5 * len(first.train)


def test_a_failure_leaves_no_token_files(tmp_path, corpus, monkeypatch):
    chosen = config(tmp_path, source=str(corpus))
    monkeypatch.setattr(text, "_write_parts", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        text.load(chosen)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "content", "message"),
    [
        ({"source": "missing.txt"}, None, "there is no such file"),
        ({}, b"", "the file is empty"),
        ({}, b"caf\xe9 au lait " * 9, "not UTF-8 (byte 0xe9)"),
        ({"tokenizer": "none.json"}, b"text " * 100, "there is no such file; accepted: bytes, bpe:SIZE"),
        ({"tokenizer": "bpe:12"}, b"text " * 100, "a size of at least 258"),
        ({"held_out_share": 1e-12}, b"text " * 100, "no held-out text in it"),
        ({"source": "hf:/nowhere/at/all"}, None, "cannot be loaded"),
    ],
)
def test_bad_data_is_one_clear_line(tmp_path, changes, content, message):
    path = tmp_path / "file.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        text.load(config(tmp_path, **({"source": str(path)} | changes)))
    assert "\n" not in str(caught.value)


def test_blocks_visit_every_sequence_once_an_epoch_in_an_order_set_by_the_seed():
    tokens = np.arange(1000, dtype=np.uint16)
    blocks = text.Blocks(tokens, 32, count=62, seed=5)
    starts = [int(blocks[i]["input_ids"][0]) // 32 for i in range(62)]
    assert sorted(starts[:31]) == sorted(starts[31:]) == list(range(31))
    assert starts[:31] != starts[31:]
    again = text.Blocks(tokens, 32, count=62, seed=5)
    assert torch.equal(again[40]["input_ids"], blocks[40]["input_ids"])
    assert [int(text.Blocks(tokens, 32, 62, seed=6)[i]["input_ids"][0]) // 32 for i in range(31)] != starts[:31]
    assert torch.equal(blocks[3]["labels"], blocks[3]["input_ids"])


def rewrite(path, text):
    """Of the same length as before, perhaps, but later."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(before + 10**9,) * 2)


@pytest.mark.parametrize("name", ["source", "held_out"])
def test_a_file_in_the_home_that_is_rewritten_is_read_again(name, tmp_path, corpus, monkeypatch):
    """Regression: under ~ neither size nor time was looked at, and training went on with the old text."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = tmp_path / "home" / "text.txt"
    chosen = config(tmp_path, **{"source": str(corpus), name: "~/text.txt"}, held_out_share=0.3)
    found = []
    for word in ("before", "during", "latest"):
        rewrite(path, "".join(f"{word} {n}\n{text.END_OF_TEXT}\n" for n in range(50)))
        tokens = text.load(chosen)
        found.append(decoded(np.concatenate((tokens.train, tokens.held_out))))
    assert [word in part for word, part in zip(("before", "during", "latest"), found)] == [True] * 3


@pytest.mark.parametrize("tilde", [False, True])
def test_a_folder_of_which_a_file_changes_is_read_again(tilde, tmp_path, monkeypatch):
    """Regression: of a dataset's folder nothing but its name was looked at."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HOME", str(tmp_path))
    files = [tmp_path / "dataset" / name for name in ("train_1.jsonl", "train_2.jsonl")]
    chosen = config(tmp_path, source="hf:~/dataset" if tilde else f"hf:{tmp_path / 'dataset'}", held_out_share=0.3)
    words = dict.fromkeys(files, "before")
    found = []
    for changed, word in ((files[0], "before"), (files[1], "during"), (files[0], "latest")):
        words[changed] = word
        for file in files:
            if file == changed or not file.exists():
                rows = (json.dumps({"text": f"{words[file]} {n}"}) + "\n" for n in range(60))
                rewrite(file, "".join(rows))
        tokens = text.load(chosen)
        found.append(decoded(np.concatenate((tokens.train, tokens.held_out))))
    assert [word in part for word, part in zip(("before", "during", "latest"), found)] == [True] * 3
