"""Fine-tuning tasks made from a text, and their examples as tokens."""

import json
import random
from itertools import chain

import pytest

from lab.training import examples, tasks

WORDS = [f"w{n}" for n in range(5000)]


def document(number, paragraphs=40):
    """Paragraphs of 30 words, no two alike, with headings between them."""
    draw = random.Random(number)
    parts = []
    for place in range(paragraphs):
        if place % 5 == 0:
            parts.append(f"Heading {number} {place}")
        parts.append(" ".join(draw.choice(WORDS) for _ in range(30)))
    return "\n\n".join(parts)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"{text}\n<|endoftext|>\n" for text in TEXTS), encoding="utf-8")
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


TEXTS = [document(number) for number in range(30)]


def made(task, corpus, folder):
    """Training and held-out examples of a task."""
    tasks.make(task, str(corpus), folder, held_out_share=0.3, examples=40, held_out_examples=10)
    return lines(folder / "train.jsonl"), lines(folder / "held_out.jsonl")


@pytest.mark.parametrize("task", ["continuation", "subject"])
def test_choices_are_four_of_one_length_and_the_answer_stands_in_each_place_equally_often(task, corpus, tmp_path):
    train, held_out = made(task, corpus, tmp_path)
    for line in train + held_out:
        assert len(set(line["choices"])) == 4
        assert line["answer"] in line["choices"]
        assert all(len(choice.split()) == tasks.ANSWER_WORDS for choice in line["choices"])
    places = [line["choices"].index(line["answer"]) for line in train]
    assert [places.count(place) for place in range(4)] == [10] * 4


def test_the_answer_goes_on_where_the_prompt_ends_and_nothing_else_does(corpus, tmp_path):
    for line in chain(*made("continuation", corpus, tmp_path)):
        (home,) = [text for text in TEXTS if line["prompt"] + line["answer"] in text]
        assert 200 <= len(line["prompt"].split()) <= 800
        for choice in line["choices"]:
            place = home.index(choice)
            assert home[place - 2 : place] == "\n\n"  # it begins a paragraph, not the document
            assert not choice.startswith("Heading")
            assert choice[:100] not in line["prompt"]
            assert (line["prompt"] + choice in home) == (choice == line["answer"])


def test_wrong_subjects_are_other_documents(corpus, tmp_path):
    for line in chain(*made("subject", corpus, tmp_path)):
        (home,) = [text for text in TEXTS if line["prompt"] + line["answer"] in text]
        assert all((choice in home) == (choice == line["answer"]) for choice in line["choices"])


def test_order_is_balanced_and_true(corpus, tmp_path):
    train, _ = made("order", corpus, tmp_path)
    assert [line["label"] for line in train].count("ordered") == 20
    for line in train:
        pair = (line["text"], line["pair"]) if line["label"] == "ordered" else (line["pair"], line["text"])
        assert any("\n\n".join(pair) in text for text in TEXTS)


def test_neighbours_are_balanced_and_true(corpus, tmp_path):
    train, _ = made("neighbours", corpus, tmp_path)
    assert [line["label"] for line in train].count("neighbours") == 20
    for line in train:
        together = any("\n\n".join((line["text"], line["pair"])) in text for text in TEXTS)
        assert together == (line["label"] == "neighbours")
        assert any(line["text"] in text and line["pair"] in text for text in TEXTS) == together


@pytest.mark.parametrize("task", tasks.TASKS)
def test_documents_are_on_one_side_alone(corpus, tmp_path, task):
    key = "answer" if task in ("continuation", "subject") else "text"
    train, held_out = (
        {number for number, text in enumerate(TEXTS) if any(line[key] in text for line in side)}
        for side in made(task, corpus, tmp_path)
    )
    assert train
    assert held_out
    assert not train & held_out


def test_a_document_of_a_held_out_file_is_left_out_of_training(corpus, tmp_path):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("".join(f"{document(number)}\n<|endoftext|>\n" for number in range(3)), encoding="utf-8")
    with pytest.raises(ValueError, match=r"train text gives 108 examples of 'order', not 200"):
        tasks.make("order", str(corpus), tmp_path / "a", str(held_out), examples=200, held_out_examples=12)


def test_one_seed_gives_one_set_of_files(corpus, tmp_path):
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        tasks.make(
            "order", str(corpus), tmp_path / folder, held_out_share=0.3, examples=9, held_out_examples=9, seed=seed
        )
    a, b, c = [(tmp_path / folder / "train.jsonl").read_bytes() for folder in "abc"]
    assert a == b
    assert a != c


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
