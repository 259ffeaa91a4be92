"""Tasks to fine-tune on, made from any text of long documents. No other data set is needed.

``continuation``, for decoders: a passage and four candidates for what comes next, the same number of words each, from
the beginning of a paragraph. One does come next; the others begin paragraphs elsewhere in the same document. All four
share subject and style, and no candidate gives itself away, so a model has to attend to what the passage says. The
document's first paragraph can never be the answer and is no candidate. Chance is 0.25, and the best accuracy is below
1, since a later paragraph may fit as well; what counts is the difference between attentions on the same questions.
``subject`` is an easier question for small models, which do not learn ``continuation``: the wrong candidates are from
other documents, so it is enough to see what the passage is about.

``order``, for encoders: two neighbouring paragraphs, swapped in every second pair. A model can tell by what the second
one takes up from the first. ``neighbours`` is easier: the second paragraph is the next one, or from another document.

A document is all of it training or all of it held out. One seed gives one set of files.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

from lab.training.config import Data
from lab.training.data import split_documents
from lab.training.run_dir import write_whole

CANDIDATES = 4
PROMPT_WORDS = (200, 800)
"""The fewest words of a passage, and the most."""
ANSWER_WORDS = 64
PARAGRAPH_WORDS = (20, 160)
"""A paragraph with fewer words is a heading or a line of a dialogue, and begins no candidate; of a pair, neither has
more."""
ORDERED, SWAPPED = "ordered", "swapped"
NEIGHBOURS, STRANGERS = "neighbours", "strangers"
POOL = 256
"""As many passages of the latest other documents are kept to draw from."""

Example = dict[str, object]


def make(
    task: str,
    source: str,
    output: Path,
    held_out: str | None = None,
    held_out_share: float = 0.05,
    examples: int = 8000,
    held_out_examples: int = 1000,
    per_document: int = 4,
    seed: int = 0,
    tell: Callable[[str, float], object] = lambda *_: None,
) -> dict[str, int]:
    """Write ``train.jsonl`` and ``held_out.jsonl`` of a task into ``output``; returns how many examples each holds.

    Args:
        task: a name in `TASKS`.
        source: text as a training config's data.source; documents are taken from its beginning.
        held_out: text for the held-out examples, or else ``held_out_share`` of the source's documents. Documents of
            ``source`` that stand in it too are left out of training.
        per_document: the most examples that one document gives.
        tell: is told how many examples there are so far, and which share of all that is.

    Raises ValueError for a task that does not exist, a source that cannot be read, a number below 1, or a source whose
    documents do not give as many examples.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is not known; accepted: {', '.join(TASKS)}")
    wanted = {"train": examples, "held_out": held_out_examples}
    for name, value in (
        ("examples", examples),
        ("held_out_examples", held_out_examples),
        ("per_document", per_document),
    ):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if held_out is None and not 0 < held_out_share < 1:
        raise ValueError(f"held_out_share={held_out_share} must be above 0 and below 1")
    found: dict[str, list[Example]] = {"train": [], "held_out": []}
    pools: dict[str, list[str]] = {"train": [], "held_out": []}
    seen: set[bytes] = set()
    for part, document in split_documents(Data(source=source, held_out=held_out, held_out_share=held_out_share)):
        if all(len(found[name]) >= wanted[name] for name in wanted):
            break
        digest = hashlib.sha256(document.encode()).digest()
        if len(found[part]) >= wanted[part] or digest in seen:
            continue
        seen.add(digest)
        draw = random.Random(f"{seed} {task} {digest.hex()}")
        found[part] += TASKS[task](document, per_document, draw, len(found[part]), pools[part])
        del pools[part][:-POOL]
        counts = {name: min(len(found[name]), count) for name, count in wanted.items()}
        made = ", ".join(f"{counts[name]} of {count} {name}" for name, count in wanted.items())
        tell(f"making {task}: {made}", sum(counts.values()) / sum(wanted.values()))
    for part, count in wanted.items():
        if len(found[part]) < count:
            raise ValueError(
                f"{part.replace('_', '-')} text gives {len(found[part])} examples of {task!r}, not {count}: too "
                "few of its documents are long enough; ask for fewer examples or for more of a document"
            )
    output.mkdir(parents=True, exist_ok=True)
    for part, count in wanted.items():
        lines = (json.dumps(example, ensure_ascii=False) + "\n" for example in found[part][:count])
        write_whole(output / f"{part}.jsonl", "".join(lines))
    return wanted


def continuation(document: str, count: int, draw: random.Random, number: int, pool: list[str]) -> list[Example]:
    """Up to ``count`` lines with prompt, answer and choices; ``prompt + answer`` stands in the document.

    Paragraphs are parted by one empty line. ``number`` is that of the first example in its file: the answer takes the
    four places among the choices in turn. ``pool`` is not needed.
    """
    passages = _Passages(document)

    def wrong(place: int, begin: int) -> list[str]:
        others: list[int] = []
        for other in draw.sample(passages.candidates, len(passages.candidates)):
            elsewhere = other + ANSWER_WORDS <= begin or other >= place + ANSWER_WORDS
            if elsewhere and all(abs(other - one) >= ANSWER_WORDS for one in others):
                others.append(other)
        return [passages.answer(other) for other in others[: CANDIDATES - 1]]

    return passages.questions(count, draw, number, wrong)


def subject(document: str, count: int, draw: random.Random, number: int, pool: list[str]) -> list[Example]:
    """As `continuation`, wrong choices from ``pool``, the passages of documents before this one; adds its own."""
    passages = _Passages(document)
    found: list[Example] = []
    if len(pool) >= CANDIDATES:
        found = passages.questions(count, draw, number, lambda *_: draw.sample(pool, CANDIDATES - 1))
    pool += [passages.answer(place) for place in passages.candidates]
    return found


class _Passages:
    """A document's words, and the places among them where an answer may begin."""

    def __init__(self, document: str) -> None:
        self.text, starts = _paragraphs(document)
        self.words = [(word.start(), word.end()) for word in re.finditer(r"\S+", self.text)]
        index = {start: place for place, (start, _) in enumerate(self.words)}
        places = [index[start] for start in starts]  # of each paragraph's first word
        lengths = [after - place for place, after in zip(places, [*places[1:], len(self.words)])]
        self.candidates = [
            place
            for place, length in list(zip(places, lengths))[1:]
            if length >= PARAGRAPH_WORDS[0] and place + ANSWER_WORDS <= len(self.words)
        ]

    def answer(self, place: int) -> str:
        """ANSWER_WORDS words from a place on."""
        return self.text[self.words[place][0] : self.words[place + ANSWER_WORDS - 1][1]]

    def questions(
        self, count: int, draw: random.Random, number: int, wrong: Callable[[int, int], list[str]]
    ) -> list[Example]:
        """Up to ``count`` of them; ``wrong`` gives other choices for an answer's place and its prompt's beginning."""
        found: list[Example] = []
        for place in draw.sample(self.candidates, len(self.candidates)):
            if len(found) == count:
                break
            begin = max(0, place - PROMPT_WORDS[1])
            answer, choices = self.answer(place), wrong(place, begin)
            if place - begin < PROMPT_WORDS[0] or len({answer, *choices}) < CANDIDATES:
                continue
            choices.insert((number + len(found)) % CANDIDATES, answer)
            prompt = self.text[self.words[begin][0] : self.words[place][0]]
            found.append({"prompt": prompt, "answer": answer, "choices": choices})
        return found


def order(document: str, count: int, draw: random.Random, number: int, pool: list[str]) -> list[Example]:
    """Up to ``count`` lines with text, pair and label, `ORDERED` and `SWAPPED` in turn.

    ``number`` is that of the first example in its file; ``pool`` is not needed.
    """
    found: list[Example] = []
    pairs = _pairs(document)
    for first, second in draw.sample(pairs, min(count, len(pairs))):
        if (number + len(found)) % 2:
            found.append({"text": second, "pair": first, "label": SWAPPED})
        else:
            found.append({"text": first, "pair": second, "label": ORDERED})
    return found


def neighbours(document: str, count: int, draw: random.Random, number: int, pool: list[str]) -> list[Example]:
    """Up to ``count`` lines with text, pair and label, `NEIGHBOURS` and `STRANGERS` in turn.

    Strangers are from ``pool``, the paragraphs of documents before this one; adds its own. ``number`` as in `order`.
    """
    found: list[Example] = []
    pairs = _pairs(document)
    for first, second in draw.sample(pairs, min(count, len(pairs))) if pool else []:
        if (number + len(found)) % 2:
            found.append({"text": first, "pair": draw.choice(pool), "label": STRANGERS})
        else:
            found.append({"text": first, "pair": second, "label": NEIGHBOURS})
    pool += [second for _, second in pairs]
    return found


def _pairs(document: str) -> list[tuple[str, str]]:
    """Neighbouring paragraphs, neither too short nor too long, and not alike."""
    text, starts = _paragraphs(document)
    paragraphs = [text[start:stop].strip() for start, stop in zip(starts, [*starts[1:], len(text)])]
    fits = [PARAGRAPH_WORDS[0] <= len(paragraph.split()) <= PARAGRAPH_WORDS[1] for paragraph in paragraphs]
    return [
        (paragraphs[place], paragraphs[place + 1])
        for place in range(len(paragraphs) - 1)
        if fits[place] and fits[place + 1] and paragraphs[place] != paragraphs[place + 1]
    ]


def _paragraphs(document: str) -> tuple[str, list[int]]:
    """The document with paragraphs parted by one empty line, and where each begins."""
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n", document) if paragraph.strip()]
    starts, place = [], 0
    for paragraph in paragraphs:
        starts.append(place)
        place += len(paragraph) + 2
    return "\n\n".join(paragraphs), starts


TASKS: dict[str, Callable[[str, int, random.Random, int, list[str]], list[Example]]] = {
    "continuation": continuation,
    "subject": subject,
    "order": order,
    "neighbours": neighbours,
}
