"""Tasks to fine-tune on, made from any text of long documents; no data set is needed beside it.

``continuation``, for decoders: a passage, and four candidates for what comes next, each the same number of words from
the beginning of a paragraph. One does come next; three begin paragraphs elsewhere in the same document. So there is a
right answer, the author's; subject and style do not give it away, as all four share them, and neither does a
candidate by itself: it takes attention to what the passage says. Only the document's first paragraph, which can never
be the answer, is no candidate either. Some questions cannot be answered, two paragraphs later may fit as well: the
best accuracy is below 1, chance is 0.25, and what counts is one attention against another on the same questions.

``order``, for encoders: two neighbouring paragraphs, as they stand or swapped, every second pair. What tells is what
the second one takes up from the first.

A document is all of it training or all of it held out. One seed gives one set of files.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

from sagebwd.training.config import Data
from sagebwd.training.data import split_documents
from sagebwd.training.folder import write_whole

CANDIDATES = 4
PROMPT_WORDS = (200, 800)
"""The fewest words of a passage, and the most."""
ANSWER_WORDS = 64
PARAGRAPH_WORDS = (20, 160)
"""A paragraph with fewer words is a heading or a line of a dialogue, and begins no candidate; of a pair, neither has
more."""
ORDERED, SWAPPED = "ordered", "swapped"

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
) -> dict[str, int]:
    """Write ``train.jsonl`` and ``held_out.jsonl`` of a task into ``output``; returns how many examples each holds.

    Args:
        task: a name in `TASKS`.
        source: text as a training config's data.source; documents are taken from its beginning.
        held_out: text for the held-out examples, or else ``held_out_share`` of the source's documents. Documents of
            ``source`` that stand in it too are left out of training.
        per_document: the most examples that one document gives.

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
    found: dict[str, list[Example]] = {"train": [], "held_out": []}
    seen: set[bytes] = set()
    for part, document in split_documents(Data(source=source, held_out=held_out, held_out_share=held_out_share)):
        if all(len(found[name]) >= wanted[name] for name in wanted):
            break
        digest = hashlib.sha256(document.encode()).digest()
        if len(found[part]) >= wanted[part] or digest in seen:
            continue
        seen.add(digest)
        draw = random.Random(f"{seed} {task} {digest.hex()}")
        found[part] += TASKS[task](document, per_document, draw, len(found[part]))
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


def continuation(document: str, count: int, draw: random.Random, number: int = 0) -> list[Example]:
    """Up to ``count`` lines with prompt, answer and choices; ``prompt + answer`` stands in the document.

    Paragraphs are parted by one empty line. ``number`` is that of the first example in its file: the answer takes the
    four places among the choices in turn.
    """
    text, starts = _paragraphs(document)
    words = [(word.start(), word.end()) for word in re.finditer(r"\S+", text)]
    index = {start: place for place, (start, _) in enumerate(words)}
    places = [index[start] for start in starts]  # of each paragraph's first word
    lengths = [after - place for place, after in zip(places, [*places[1:], len(words)])]
    candidates = [
        place
        for place, length in list(zip(places, lengths))[1:]
        if length >= PARAGRAPH_WORDS[0] and place + ANSWER_WORDS <= len(words)
    ]

    def passage(place: int) -> str:
        return text[words[place][0] : words[place + ANSWER_WORDS - 1][1]]

    found: list[Example] = []
    for place in draw.sample(candidates, len(candidates)):
        if len(found) == count:
            break
        begin = max(0, place - PROMPT_WORDS[1])
        others: list[int] = []
        for other in draw.sample(candidates, len(candidates)):
            elsewhere = other + ANSWER_WORDS <= begin or other >= place + ANSWER_WORDS
            if elsewhere and all(abs(other - one) >= ANSWER_WORDS for one in others):
                others.append(other)
        answer, choices = passage(place), [passage(other) for other in others[: CANDIDATES - 1]]
        if place - begin < PROMPT_WORDS[0] or len({answer, *choices}) < CANDIDATES:
            continue
        choices.insert((number + len(found)) % CANDIDATES, answer)
        found.append({"prompt": text[words[begin][0] : words[place][0]], "answer": answer, "choices": choices})
    return found


def order(document: str, count: int, draw: random.Random, number: int = 0) -> list[Example]:
    """Up to ``count`` lines with text, pair and label, `ORDERED` and `SWAPPED` in turn.

    ``number`` is that of the first example in its file.
    """
    text, starts = _paragraphs(document)
    paragraphs = [text[start:stop].strip() for start, stop in zip(starts, [*starts[1:], len(text)])]
    fits = [PARAGRAPH_WORDS[0] <= len(paragraph.split()) <= PARAGRAPH_WORDS[1] for paragraph in paragraphs]
    pairs = [place for place in range(len(paragraphs) - 1) if fits[place] and fits[place + 1]]
    pairs = [place for place in pairs if paragraphs[place] != paragraphs[place + 1]]
    found: list[Example] = []
    for place in draw.sample(pairs, min(count, len(pairs))):
        first, second = paragraphs[place : place + 2]
        if (number + len(found)) % 2:
            found.append({"text": second, "pair": first, "label": SWAPPED})
        else:
            found.append({"text": first, "pair": second, "label": ORDERED})
    return found


def _paragraphs(document: str) -> tuple[str, list[int]]:
    """The document with paragraphs parted by one empty line, and where each begins."""
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n", document) if paragraph.strip()]
    starts, place = [], 0
    for paragraph in paragraphs:
        starts.append(place)
        place += len(paragraph) + 2
    return "\n\n".join(paragraphs), starts


TASKS: dict[str, Callable[[str, int, random.Random, int], list[Example]]] = {
    "continuation": continuation,
    "order": order,
}
