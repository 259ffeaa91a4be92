import json
import random

import pytest

from sagebwd.training import tasks

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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "sorting"}, "task='sorting' is not known; accepted: continuation, subject, order, neighbours"),
        ({"examples": 0}, "examples=0 must be at least 1"),
        ({"source": "none.txt"}, "there is no such file"),
        ({"examples": 10**6}, "not 1000000: too few of its documents are long enough"),
    ],
)
def test_bad_requests(corpus, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        tasks.make(**{"task": "order", "source": str(corpus), "output": tmp_path / "out"} | changes)
    assert not (tmp_path / "out").exists()
