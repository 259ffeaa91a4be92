"""Fine-tuning tasks made from a text, and their examples as tokens."""

import json
import random

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
    texts = [document(number) for number in range(30)]
    path.write_text("".join(f"{text}\n<|endoftext|>\n" for text in texts), encoding="utf-8")
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_answer_goes_on_where_the_prompt_ends_and_nothing_else_does(corpus, tmp_path):
    tasks.make("continuation", str(corpus), tmp_path, held_out_share=0.3, examples=40, held_out_examples=10)
    for line in lines(tmp_path / "train.jsonl") + lines(tmp_path / "held_out.jsonl"):
        homes = [text for text in map(document, range(30)) if line["prompt"] + line["answer"] in text]
        assert len(homes) == 1
        assert len(line["choices"]) == 4
        assert line["choices"].count(line["answer"]) == 1
        assert 200 <= len(line["prompt"].split()) <= 800
        for choice in line["choices"]:
            assert len(choice.split()) == tasks.ANSWER_WORDS
            place = homes[0].index(choice)
            assert homes[0][place - 2 : place] == "\n\n"  # it begins a paragraph, not the document
            assert not choice.startswith("Heading")
            assert choice[:100] not in line["prompt"]
            if choice != line["answer"]:
                assert line["prompt"] + choice not in homes[0]


def test_answers_stand_in_each_place_equally_often(corpus, tmp_path):
    tasks.make("continuation", str(corpus), tmp_path, held_out_share=0.3, examples=40, held_out_examples=8)
    places = [line["choices"].index(line["answer"]) for line in lines(tmp_path / "train.jsonl")]
    assert [places.count(place) for place in range(4)] == [10] * 4


def test_order_is_balanced_and_true(corpus, tmp_path):
    tasks.make("order", str(corpus), tmp_path, held_out_share=0.3, examples=40, held_out_examples=10)
    made = lines(tmp_path / "train.jsonl")
    assert [line["label"] for line in made].count("ordered") == 20
    texts = [document(number) for number in range(30)]
    for line in made:
        pair = (line["text"], line["pair"]) if line["label"] == "ordered" else (line["pair"], line["text"])
        assert any("\n\n".join(pair) in text for text in texts)


def test_wrong_subjects_are_other_documents(corpus, tmp_path):
    tasks.make("subject", str(corpus), tmp_path, held_out_share=0.3, examples=40, held_out_examples=10)
    texts = [document(number) for number in range(30)]
    for line in lines(tmp_path / "train.jsonl") + lines(tmp_path / "held_out.jsonl"):
        (home,) = [number for number, text in enumerate(texts) if line["prompt"] + line["answer"] in text]
        assert len(set(line["choices"])) == 4
        assert line["answer"] in line["choices"]
        for choice in line["choices"]:
            assert len(choice.split()) == tasks.ANSWER_WORDS
            assert (choice in texts[home]) == (choice == line["answer"])
    places = [line["choices"].index(line["answer"]) for line in lines(tmp_path / "train.jsonl")]
    assert [places.count(place) for place in range(4)] == [10] * 4


def test_neighbours_are_balanced_and_true(corpus, tmp_path):
    tasks.make("neighbours", str(corpus), tmp_path, held_out_share=0.3, examples=40, held_out_examples=10)
    made = lines(tmp_path / "train.jsonl")
    assert [line["label"] for line in made].count("neighbours") == 20
    texts = [document(number) for number in range(30)]
    for line in made:
        together = any("\n\n".join((line["text"], line["pair"])) in text for text in texts)
        assert together == (line["label"] == "neighbours")
        assert any(line["text"] in text and line["pair"] in text for text in texts) == together


@pytest.mark.parametrize("task", tasks.TASKS)
def test_documents_are_on_one_side_alone(corpus, tmp_path, task):
    tasks.make(task, str(corpus), tmp_path, held_out_share=0.3, examples=40, held_out_examples=10)
    texts = [document(number) for number in range(30)]
    key = "answer" if task in ("continuation", "subject") else "text"
    sides = []
    for part in ("train", "held_out"):
        parts = [line[key] for line in lines(tmp_path / f"{part}.jsonl")]
        sides.append({number for number, text in enumerate(texts) if any(part in text for part in parts)})
    assert all(sides)
    assert not sides[0] & sides[1]


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
