"""JSON lines to what Trainer takes.

Two kinds of lines. Answers, for decoders: ``{"prompt": ..., "answer": ...}``, where wanted with ``"choices"``, among
which the answer is. Labels, for classification: ``{"text": ..., "label": ...}``, where wanted with ``"pair"``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lab.training.data import BYTE_VOCABULARY, END_OF_TEXT, read_tokenizer
from sagebwd.diagnostics.models import located

IGNORED = -100
"""The label of a token that no loss counts."""
_PAD = "<|pad|>"
_FIELDS = {
    "answers": ({"prompt", "answer"}, {"choices"}),
    "labels": ({"text", "label"}, {"pair"}),
}
_ACCEPTED = "prompt and answer (and choices), or text and label (and pair)"

Line = dict[str, object]
Row = dict[str, object]


@dataclass(frozen=True)
class Lines:
    """A file of one kind: ``lines`` as they stand in it, ``numbers`` where."""

    path: Path
    kind: str  # answers or labels
    lines: list[Line]
    numbers: list[int]

    def where(self, index: int) -> str:
        """Where a line is, for a message."""
        return f"{self.path}, line {self.numbers[index]}"


def read(path: str, key: str) -> Lines:
    """The lines of a file; empty ones are passed over.

    Raises ValueError for a file that is missing, not UTF-8 or empty, and, naming the line, for one that is not JSON,
    lacks a field, has one of the wrong type, is of another kind than the first, or has no answer among its choices.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{key}={path!r}: there is no such file; `python -m lab task` makes some")
    try:
        texts = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}={path!r}: not UTF-8 (byte {error.object[error.start]:#04x})") from None
    lines, numbers, kind = [], [], None
    for number, text in enumerate(texts, 1):
        if text.strip():
            line, its_kind = _line(text, f"{file}, line {number}")
            if kind not in (None, its_kind):
                raise ValueError(f"{file}, line {number}: it holds {its_kind}, the lines before it {kind}")
            lines.append(line)
            numbers.append(number)
            kind = its_kind
    if kind is None:
        raise ValueError(f"{key}={path!r}: the file is empty; accepted: JSON lines with {_ACCEPTED}")
    return Lines(file, kind, lines, numbers)


def _line(text: str, where: str) -> tuple[Line, str]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno}): {text.strip()[:60]}") from None
    if not isinstance(line, dict):
        raise ValueError(f"{where}: expected an object with {_ACCEPTED}; got {text.strip()[:60]}")
    kind = next((kind for kind, (needed, _) in _FIELDS.items() if needed & set(line)), None)
    if kind is None:
        raise ValueError(f"{where}: expected fields {_ACCEPTED}; got {', '.join(line) or 'none'}")
    needed, optional = _FIELDS[kind]
    missing = sorted(needed - set(line))
    if missing:
        raise ValueError(f"{where}: field {missing[0]!r} is missing; got {', '.join(line)}")
    for name in sorted((needed | optional) - {"choices", "label"}):
        if name in line and not (isinstance(line[name], str) and line[name]):
            raise ValueError(f"{where}: {name}={line[name]!r} must be a text that is not empty")
    if kind == "labels" and (isinstance(line["label"], bool) or not isinstance(line["label"], str | int)):
        raise ValueError(f"{where}: label={line['label']!r} must be a text or a whole number")
    if "choices" in line:
        _check_choices(line, where)
    return line, kind


def _check_choices(line: Line, where: str) -> None:
    choices = line["choices"]
    if not (isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)):
        raise ValueError(f"{where}: choices={str(choices)[:60]} must be a list of texts that are not empty")
    if line["answer"] not in choices:
        raise ValueError(f"{where}: the answer is not among the choices")
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise ValueError(f"{where}: choices must be at least two, and no two alike")


def tokenizer(name: str | None, checkpoint: str | None, pairs: bool) -> PreTrainedTokenizerBase:
    """The tokeniser that a config's data.tokenizer names, or without one the checkpoint's own.

    Args: pairs, whether a tokenizer.json or "bytes" is to put ``<|endoftext|>`` around each text of a pair.
    Without a checkpoint, for a model from scratch, padding has a token of its own.

    Raises ValueError where there is none such.
    """
    if name is None:
        if checkpoint is None:
            raise ValueError("data.tokenizer is not given; accepted: bytes, a tokenizer.json")
        try:
            folder, named = located(checkpoint)
            own = AutoTokenizer.from_pretrained(folder, **named)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"model.path={checkpoint!r} has no tokeniser ({' '.join(str(error).split())[:120]}); set "
                "data.tokenizer to the one it was trained with: bytes, or a tokenizer.json"
            ) from None
        if own.pad_token is None:
            own.pad_token = own.eos_token or own.unk_token
        return own
    tokens = _bytes() if name == "bytes" else read_tokenizer(name)
    end = tokens.token_to_id(END_OF_TEXT)
    if end is None:
        raise ValueError(f"data.tokenizer={name!r}: it has no token {END_OF_TEXT}")
    if pairs:
        tokens.post_processor = TemplateProcessing(
            single=f"{END_OF_TEXT} $A {END_OF_TEXT}",
            pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B:1 {END_OF_TEXT}:1",
            special_tokens=[(END_OF_TEXT, end)],
        )
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if pairs and checkpoint is None else None
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token=END_OF_TEXT,
        pad_token=_PAD if checkpoint is None else END_OF_TEXT,
        **({} if inputs is None else {"model_input_names": inputs}),
    )


def _bytes() -> Tokenizer:
    """The ids of pre-training's "bytes": a byte's value, and the end of a document."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # the characters that the byte-level pre-tokeniser stands bytes for
    characters = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    tokens = Tokenizer(models.BPE(characters, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([END_OF_TEXT])
    assert tokens.token_to_id(END_OF_TEXT) == BYTE_VOCABULARY - 1
    return tokens


def answer_rows(
    lines: Lines, tokens: PreTrainedTokenizerBase, max_tokens: int, end: bool, choices: bool
) -> tuple[list[Row], list[int]]:
    """Rows of input_ids and labels, labels `IGNORED` outside of the answer; a prompt too long loses its beginning.

    Args: end, whether the end-of-text token follows an answer; choices, a row for each choice in place of one a line.

    Returns: the rows, and how many each line gives; of a line's rows the first is the right answer's.

    Raises ValueError for an answer that does not fit into ``max_tokens``.
    """
    bos = tokens.bos_token_id
    begin = [bos] if bos is not None and tokens("")["input_ids"][:1] == [bos] else []
    last = [tokens.eos_token_id] if end and tokens.eos_token_id is not None else []
    rows, counts = [], []
    for index, line in enumerate(lines.lines):
        answers = [line["answer"]]
        if choices:
            answers += [choice for choice in line.get("choices", []) if choice != line["answer"]]
        encoded = tokens([line["prompt"], *answers], add_special_tokens=False)["input_ids"]
        prompt, answers = encoded[0], [ids + last for ids in encoded[1:]]
        room = max_tokens - len(begin) - max(map(len, answers))
        if room < 1 or not prompt or not min(map(len, answers)):
            raise ValueError(
                f"{lines.where(index)}: the answer has {max(map(len, answers))} tokens, the prompt {len(prompt)}; "
                f"data.max_tokens={max_tokens} must hold the answer, at least one token, and one of the prompt"
            )
        prompt = begin + prompt[-room:]
        rows += [{"input_ids": prompt + ids, "labels": [IGNORED] * len(prompt) + ids} for ids in answers]
        counts.append(len(answers))
    return rows, counts


def label_names(lines: Lines) -> list[str]:
    """The labels of training lines, sorted. Raises ValueError where there is one alone."""
    names = sorted({str(line["label"]) for line in lines.lines})
    if len(names) < 2:
        raise ValueError(f"{lines.path}: all lines have the label {names[0]!r}; expected at least two labels")
    return names


def label_rows(lines: Lines, tokens: PreTrainedTokenizerBase, max_tokens: int, names: list[str]) -> list[Row]:
    """Rows as the tokeniser gives them, with the label's index in ``names``; texts too long lose their ends.

    Raises ValueError for a label that is not among ``names``.
    """
    rows = []
    for index, line in enumerate(lines.lines):
        label = str(line["label"])
        if label not in names:
            raise ValueError(
                f"{lines.where(index)}: label {label!r} is in no line of the training file; there: {', '.join(names)}"
            )
        encoded = tokens(line["text"], line.get("pair"), truncation=True, max_length=max_tokens)
        rows.append({**encoded, "label": names.index(label)})
    return rows
