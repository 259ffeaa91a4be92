"""Token files: a text as the ids of a trained model's own tokeniser, made once, where the text is, in one .npy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lab.training.data import END_OF_TEXT, documents
from sagebwd.diagnostics.models import load_tokenizer
from sagebwd.environment import write_whole

DOCUMENTS_AT_ONCE = 256


def write(
    model: str | Path, text: str | Path, output: Path, most: int | None = None,
    tell: Callable[[str, float], object] = lambda *_: None,
) -> int:  # fmt: skip
    """Write the ids of a text's documents into ``output``, .npy, uint16 or uint32; how many there are.

    The end-of-document id follows each document: that of `END_OF_TEXT`, or where the tokeniser does not know it the
    end of its sequences.

    Args: model, a folder or GGUF file with its tokeniser; text, as a config's ``data.source``; most, ids, after which
    the rest of the text is left out; tell, is told how many there are so far, and which share that is of ``most``.

    Raises ValueError for another ending than .npy, a text without documents, and as `load_tokenizer` and
    `lab.training.data.documents` do.
    """
    if output.suffix != ".npy":
        raise ValueError(f"output={str(output)!r}: accepted ending is .npy")
    tokenizer = load_tokenizer(model)
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    end = tokenizer.eos_token_id if end in (None, tokenizer.unk_token_id) else end
    if end is None:
        raise ValueError(f"model={str(model)!r}: its tokeniser has neither {END_OF_TEXT} nor an end of sequences")
    parts, count = [], 0
    for batch in _batches(documents(str(text))):
        tell(f"tokenising, {count:,} tokens", 0.0 if most is None else count / most)
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            parts.append(np.asarray([*ids, end], np.uint32))
            count += len(ids) + 1
        if most is not None and count >= most:
            break
    if not parts:
        raise ValueError(f"text={str(text)!r}: no documents in it")
    found = np.concatenate(parts)[:most].astype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)

    def save(path: Path) -> None:
        with path.open("wb") as file:  # by a name alone numpy would add its ending
            np.save(file, found)

    write_whole(output, save)
    return len(found)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(itertools.islice(texts, DOCUMENTS_AT_ONCE)):
        yield batch


def read(path: str | Path, vocabulary: int, name: str) -> np.ndarray:
    """The ids of a file that `write` made, memory-mapped. Raises ValueError, naming ``name``, where it is none, or
    holds an id that a model of ``vocabulary`` ids does not know."""
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name}={str(path)!r}: no token file that `python -m lab token-file` wrote "
            f"({' '.join(str(error).split())})"
        ) from None
    if ids.ndim != 1 or ids.dtype not in (np.uint16, np.uint32) or not len(ids):
        raise ValueError(f"{name}={str(path)!r}: expected one axis of uint16 or uint32, got {ids.shape} {ids.dtype}")
    if int(ids.max()) >= vocabulary:
        raise ValueError(f"{name}={str(path)!r}: id {int(ids.max())} is beyond the model's {vocabulary}")
    return ids
