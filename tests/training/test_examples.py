import json

import pytest

from sagebwd.training import examples

END = 256


def write(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def tokens():
    return examples.tokenizer("bytes", "a checkpoint", pairs=False)


def test_bytes_are_those_of_pre_training(tokens):
    text = "Zoë,\n\t\x00 \x7f日本 " + "".join(map(chr, range(1, 256)))
    assert tokens(text)["input_ids"] == list(text.encode())
    assert len(tokens) == 257
    assert tokens.eos_token_id == END


def test_loss_is_of_the_answer_alone(tmp_path, tokens):
    lines = examples.read(write(tmp_path / "a", [{"prompt": "abc", "answer": "de"}]), "data.train")
    (row,), counts = examples.answer_rows(lines, tokens, 99, end=True, choices=False)
    assert row["input_ids"] == [*b"abcde", END]
    assert row["labels"] == [-100, -100, -100, *b"de", END]
    assert counts == [1]
    (row,), _ = examples.answer_rows(lines, tokens, 99, end=False, choices=False)
    assert row["labels"] == [-100, -100, -100, *b"de"]


def test_a_prompt_too_long_loses_its_beginning_alike_for_all_choices(tmp_path, tokens):
    line = {"prompt": "abcdef", "answer": "xy", "choices": ["q", "xy", "rst"]}
    lines = examples.read(write(tmp_path / "a", [line]), "data.train")
    rows, counts = examples.answer_rows(lines, tokens, 7, end=False, choices=True)
    assert [bytes(row["input_ids"]) for row in rows] == [b"cdefxy", b"cdefq", b"cdefrst"]  # the right one first
    assert counts == [3]
    with pytest.raises(ValueError, match=r"line 1: the answer has 3 tokens, the prompt 6; data.max_tokens=3"):
        examples.answer_rows(lines, tokens, 3, end=False, choices=True)


def test_a_beginning_token_stays_in_front_of_a_cut_prompt(tmp_path, tokens):
    from tokenizers.processors import TemplateProcessing

    tokens.bos_token = "<|endoftext|>"
    tokens.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", END)]
    )
    lines = examples.read(write(tmp_path / "a", [{"prompt": "abcdef", "answer": "xy"}]), "data.train")
    (row,), _ = examples.answer_rows(lines, tokens, 5, end=False, choices=False)
    assert row["input_ids"] == [END, *b"efxy"]


def test_pairs_have_separators_and_types(tmp_path):
    tokens = examples.tokenizer("bytes", None, pairs=True)
    lines = examples.read(
        write(tmp_path / "a", [{"text": "ab", "pair": "c", "label": 1}, {"text": "d", "label": 0}]), "x"
    )
    names = examples.label_names(lines)
    assert names == ["0", "1"]
    first, second = examples.label_rows(lines, tokens, 99, names)
    assert first["input_ids"] == [END, *b"ab", END, *b"c", END]
    assert first["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    assert (first["label"], second["label"]) == (1, 0)
    assert second["input_ids"] == [END, *b"d", END]
    assert len(examples.label_rows(lines, tokens, 5, names)[0]["input_ids"]) == 5
    assert tokens.pad_token_id == 257  # not the separator


GOOD = {"prompt": "a", "answer": "b"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, "", "{not json"], r"line 3: not JSON \(.* column 2\): \{not json"),
        (["[1, 2]"], r"line 1: expected an object with prompt and answer .*; got \[1, 2\]"),
        ([GOOD, {"prompt": "a"}], "line 2: field 'answer' is missing; got prompt"),
        ([{"text": "a"}], "line 1: field 'label' is missing; got text"),
        ([{"question": "a"}], "line 1: expected fields prompt and answer .*; got question"),
        ([{"prompt": "", "answer": "b"}], "line 1: prompt='' must be a text that is not empty"),
        ([{"text": "a", "label": 0.5}], "line 1: label=0.5 must be a text or a whole number"),
        ([GOOD, {"text": "a", "label": 1}], "line 2: it holds labels, the lines before it answers"),
        ([GOOD | {"choices": "bc"}], "line 1: choices=bc must be a list of texts"),
        ([GOOD | {"choices": ["c", "d"]}], "line 1: the answer is not among the choices"),
        ([GOOD | {"choices": ["b", "b"]}], "line 1: choices must be at least two, and no two alike"),
        ([""], "data.train='.*': the file is empty; accepted: JSON lines"),
    ],
)
def test_bad_lines_are_named(tmp_path, lines, message):
    path = write(tmp_path / "lines.jsonl", lines)
    with pytest.raises(ValueError, match=message) as error:
        examples.read(path, "data.train")
    assert "\n" not in str(error.value)


def test_bad_files_and_labels(tmp_path):
    with pytest.raises(ValueError, match=r"data.train='none.jsonl': there is no such file; `sagebwd task` makes some"):
        examples.read("none.jsonl", "data.train")
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match=r"not UTF-8 \(byte 0xe9"):
        examples.read(str(tmp_path / "latin"), "data.train")
    lines = examples.read(write(tmp_path / "a", [{"text": "a", "label": "yes"}]), "data.train")
    with pytest.raises(ValueError, match="all lines have the label 'yes'"):
        examples.label_names(lines)
    tokens = examples.tokenizer("bytes", None, pairs=True)
    with pytest.raises(ValueError, match=r"line 1: label 'yes' is in no line of the training file; there: maybe, no"):
        examples.label_rows(lines, tokens, 9, ["maybe", "no"])


def test_bad_tokenizers(tmp_path):
    with pytest.raises(ValueError, match=r"data.tokenizer is not given; accepted: bytes, a tokenizer.json"):
        examples.tokenizer(None, None, pairs=True)
    with pytest.raises(ValueError, match=r"data.tokenizer='none.json': there is no such file"):
        examples.tokenizer("none.json", None, pairs=True)
    with pytest.raises(ValueError, match=r"has no tokeniser .*; set data.tokenizer to the one it was trained with"):
        examples.tokenizer(None, str(tmp_path), pairs=False)
