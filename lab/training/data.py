"""Text to tokens to batches.

Sources: ``python-stdlib`` (the sources of the running Python and their documentation, read from disk), text files
(.txt, .txt.xz, .txt.zst; documents end with a line ``<|endoftext|>``), and ``hf:NAME``, the ``text`` column of a
dataset that `datasets` streams. Tokenisers: ``bytes``, ``bpe:SIZE`` trained on the source, or a tokenizer.json.

Tokens are kept as files of 16- or 32-bit ids in a cache folder, made once for a source and tokeniser, and
memory-mapped. The order of a run follows from its seed alone, so that every variant sees the same batches and a
resumed run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from lab.training.config import Config, Data
from sagebwd.diagnostics.text import open_text, readable
from sagebwd.environment import CACHE_DIR, cache_folder

Encoder = Callable[[str], list[int]]
END_OF_TEXT = "<|endoftext|>"
STDLIB, HUB = "python-stdlib", "hf:"
BYTE_VOCABULARY = 257  # 256 bytes and the end of a document
BPE_TRAINING_CHARACTERS = 4_000_000
# Documents tokenised at a time: few of a stream or up to a limit, as what is beyond is thrown away; of files as many
# as keep all cores busy, however long one of them is.
_FEW, _MANY = 32, 1024


@dataclass(frozen=True)
class Tokens:
    """Token ids of a source: memory-mapped arrays, and how many ids there are."""

    train: np.ndarray
    held_out: np.ndarray
    vocabulary: int


class Blocks(Dataset):
    """``count`` sequences of ``context`` tokens, without repetition within an epoch, in an order set by ``seed``.

    Raises ValueError where the tokens do not fill one sequence.
    """

    def __init__(self, tokens: np.ndarray, context: int, count: int | None = None, seed: int | None = None) -> None:
        self.tokens, self.context = tokens, context
        self.available = len(tokens) // context
        if self.available == 0:
            raise ValueError(f"data: {len(tokens)} tokens do not fill one sequence of data.context={context}")
        self.count = self.available if count is None else count
        self.seed = seed
        self._epoch, self._order = -1, np.arange(self.available)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sequence ``index`` as input_ids and labels, (context,) int64; the model shifts the labels."""
        epoch, position = divmod(index, self.available)
        if self.seed is not None and epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.available)
        start = int(self._order[position]) * self.context
        ids = torch.from_numpy(self.tokens[start : start + self.context].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


def load(config: Config) -> Tokens:
    """The tokens of a config's data, from the cache or made now.

    Raises ValueError for a source or tokeniser that is missing, empty, unreadable or in the wrong encoding, and for a
    folder that cannot be written.
    """
    data, folder = config.data, token_folder(config)
    if not (folder / "meta.json").exists():
        _tokenise(data, folder, _wanted(config))
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    train, held_out = (np.memmap(folder / f"{part}.bin", meta["dtype"], "r") for part in ("train", "held_out"))
    return Tokens(train, held_out, meta["vocabulary"])


def token_folder(config: Config) -> Path:
    """Where `load` keeps the tokens of a config's data."""
    return _cache_folder(config.data) / _key(config.data, _wanted(config))


def _wanted(config: Config) -> int:
    return config.optimisation.tokens_per_step * config.optimisation.steps


def _cache_folder(data: Data) -> Path:
    if not data.cache:
        return cache_folder()
    try:
        return Path(data.cache).expanduser()
    except RuntimeError:
        raise ValueError(f"data.cache={data.cache!r}: this user has no home; accepted: a folder without ~") from None


def _key(data: Data, wanted: int) -> str:
    """A hash of all that the tokens depend on: the settings, and the size and time of the files behind them."""
    facts: dict[str, object] = {key: value for key, value in asdict(data).items() if key not in ("cache", "context")}
    if STDLIB in (data.source, data.held_out):
        facts["python"] = sysconfig.get_python_version()
        facts["files"] = len(_stdlib_files())
    if data.source.startswith(HUB):
        facts["tokens"] = wanted
    for name in filter(None, (data.source, data.held_out, data.tokenizer)):
        path = _expanded(name.removeprefix(HUB))
        if path.is_file():
            facts[f"file {name}"] = (str(path.resolve()), *_size_and_time(path))
        elif name.startswith(HUB) and path.is_dir():
            within = sorted(file for file in path.rglob("*") if file.is_file())
            files = [(str(file.relative_to(path)), *_size_and_time(file)) for file in within]
            facts[f"folder {name}"] = (str(path.resolve()), files)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _expanded(name: str) -> Path:
    """A path with the user's home in place of ``~``; as it is for a user without one."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _tokenise(data: Data, folder: Path, wanted: int) -> None:
    """Write the token files beside their folder and move them there when whole."""
    tokenizer = _tokenizer(data)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ValueError(
            f"data.cache: {folder.parent} cannot be written ({type(error).__name__}: {error}); set data.cache or "
            f"{CACHE_DIR} to a folder that can be"
        ) from None
    try:
        dtype = np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32
        counts = _write_parts(data, tokenizer, scratch, dtype, wanted)
        for part, count in counts.items():
            if count == 0:
                raise ValueError(f"data.source={data.source!r}: no {part.replace('_', '-')} text in it")
        meta = {"dtype": np.dtype(dtype).name, "vocabulary": tokenizer.vocabulary, **counts}
        (scratch / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        try:
            scratch.rename(folder)
        except OSError:
            if not (folder / "meta.json").exists():  # else another process has made it meanwhile
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_parts(data: Data, tokenizer: _Tokenizer, scratch: Path, dtype: type, wanted: int) -> dict[str, int]:
    counts = {"train": 0, "held_out": 0}
    limit = None if data.max_megabytes is None else data.max_megabytes * 1e6
    characters = 0
    with (
        (scratch / "train.bin").open("wb") as train,
        (scratch / "held_out.bin").open("wb") as held_out,
        tqdm(desc="tokenising", unit=" tokens", unit_scale=True, leave=False) as progress,
    ):
        files = {"train": train, "held_out": held_out}
        for batch in _batches(data):
            encoded = tokenizer.encode([text for _, text in batch])
            for (part, text), ids in zip(batch, encoded):
                files[part].write(np.asarray(ids, dtype).tobytes())
                counts[part] += len(ids)
                characters += len(text) if part == "train" else 0
                progress.update(len(ids))
            if data.source.startswith(HUB) and counts["train"] >= wanted and counts["held_out"]:
                break
            if limit is not None and characters >= limit and counts["held_out"]:
                break
    return counts


def _batches(data: Data) -> Iterator[tuple[tuple[str, str], ...]]:
    parts = _split_documents(data)
    size = _FEW if data.source.startswith(HUB) or data.max_megabytes is not None else _MANY
    while batch := tuple(itertools.islice(parts, size)):
        yield batch


def _split_documents(data: Data) -> Iterator[tuple[str, str]]:
    """(part, document) of all, "train" or "held_out"; held out is a file of its own, or a share by a hash of the text.

    Raises ValueError for a source that is missing, empty, unreadable or in the wrong encoding.
    """
    if data.held_out is not None:
        yield from (("held_out", text) for text in documents(data.held_out))
    for text in documents(data.source):
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) / 2**32
        yield ("held_out" if data.held_out is None and digest < data.held_out_share else "train"), text


def documents(source: str) -> Iterator[str]:
    """The documents of a source. Raises ValueError where it cannot be read."""
    if source == STDLIB:
        return (path.read_text(encoding="utf-8", errors="ignore") for path in _stdlib_files())
    if source.startswith(HUB):
        return _hub_documents(source.removeprefix(HUB))
    return _file_documents(_expanded(source))


def _stdlib_files() -> list[Path]:
    """Python's own modules, without tests and installed packages, in a fixed order that mixes subjects."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest())


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """A text file for reading; .xz and .zst are unpacked."""
    if path.suffix != ".zst":
        with open_text(path) as file:
            yield file
        return
    import zstandard

    try:
        with zstandard.open(path, "rt", encoding="utf-8") as file:
            yield file
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from None


def _file_documents(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise ValueError(f"data.source={str(path)!r}: there is no such file; accepted: {STDLIB}, a text file, hf:NAME")
    if path.stat().st_size == 0:
        raise ValueError(f"data.source={str(path)!r}: the file is empty")
    if path.suffix not in (".txt", ".xz", ".zst"):
        raise ValueError(f"data.source={str(path)!r}: accepted endings are .txt, .txt.xz and .txt.zst")
    lines: list[str] = []
    with readable(f"data.source={str(path)!r}"), _opened(path) as file:
        for line in file:
            if line.rstrip("\n") == END_OF_TEXT:
                yield "".join(lines)
                lines = []
            else:
                lines.append(line)
    if "".join(lines).strip():
        yield "".join(lines)


def _hub_documents(name: str) -> Iterator[str]:
    """The ``text`` column of a dataset's train split, streamed: a hub's name or a local folder."""
    from datasets import load_dataset

    folder = _expanded(name)
    try:
        rows = load_dataset(str(folder) if folder.is_dir() else name, split="train", streaming=True)
    except (FileNotFoundError, ValueError, ConnectionError, OSError) as error:
        raise ValueError(f"data.source='hf:{name}': cannot be loaded ({' '.join(str(error).split())[:200]})") from None
    for row in rows:
        if "text" not in row:
            raise ValueError(f"data.source='hf:{name}': no column 'text', only {', '.join(row)}")
        yield row["text"]


class _Tokenizer:
    """``encode`` gives the ids of each document, the end-of-document id after it; ``vocabulary`` counts all ids."""

    vocabulary: int

    def encode(self, documents: list[str]) -> list[list[int]]:
        raise NotImplementedError


class _Bytes(_Tokenizer):
    vocabulary = BYTE_VOCABULARY

    def encode(self, documents: list[str]) -> list[list[int]]:
        return [[*text.encode("utf-8"), BYTE_VOCABULARY - 1] for text in documents]


class _Subwords(_Tokenizer):
    """A `tokenizers` tokeniser; the end of a document is ``<|endoftext|>``, which it must know."""

    def __init__(self, tokenizer, origin: str) -> None:
        self.tokenizer, self.vocabulary = tokenizer, tokenizer.get_vocab_size()
        self.end = tokenizer.token_to_id(END_OF_TEXT)
        if self.end is None:
            raise ValueError(f"data.tokenizer={origin!r}: it has no token {END_OF_TEXT}")

    def encode(self, documents: list[str]) -> list[list[int]]:
        return [[*encoding.ids, self.end] for encoding in self.tokenizer.encode_batch(documents)]


def encode(data: Data, document: str) -> list[int]:
    """The ids of one document under a config's tokeniser, the end-of-document id after it.

    Raises ValueError for a tokeniser that is missing or unreadable.
    """
    return _tokenizer(data).encode([document])[0]


def run_encoder(model_path: Path) -> Encoder | None:
    """The tokeniser of the run that a model's folder belongs to; None of a folder that is of no run.

    `know_runs` makes it one of `sagebwd.diagnostics.models.ENCODERS`.
    """
    run = next((folder for folder in (model_path, model_path.parent) if (folder / "config.yaml").is_file()), None)
    if run is None or model_path.suffix == ".gguf":
        return None
    data = Data(**yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["data"])
    return lambda text: encode(data, text)


def know_runs() -> None:
    """Let `sagebwd.diagnostics.models` read texts by the tokenisers of runs."""
    from sagebwd.diagnostics import models

    if run_encoder not in models.ENCODERS:
        models.ENCODERS.append(run_encoder)


def _tokenizer(data: Data) -> _Tokenizer:
    """The tokeniser a config names. Raises ValueError where there is none such."""
    name = data.tokenizer
    if name == "bytes":
        return _Bytes()
    if name.startswith("bpe:"):
        size = name.removeprefix("bpe:")
        if not size.isdigit() or not 258 <= int(size) <= 1 << 20:
            raise ValueError(f"data.tokenizer={name!r}: expected bpe:SIZE with a size of at least 258")
        return _Subwords(_train_bpe(data, int(size)), name)
    return _Subwords(_read_tokenizer(name), name)


def _read_tokenizer(name: str):
    """The `tokenizers` tokeniser in a tokenizer.json. Raises ValueError where it is missing or unreadable."""
    from tokenizers import Tokenizer

    path = _expanded(name)
    if not path.is_file():
        raise ValueError(
            f"data.tokenizer={name!r}: there is no such file; accepted: bytes, bpe:SIZE, a tokenizer.json"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception for a file that it cannot read
        raise ValueError(f"data.tokenizer={name!r}: not a tokenizer.json ({error})") from None


def _train_bpe(data: Data, size: int):
    """A byte-level BPE of ``size`` ids, trained on the first few megabytes of the training text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def text() -> Iterator[str]:
        left = BPE_TRAINING_CHARACTERS
        for part, document in _split_documents(data):
            if part == "train":
                yield document[:left]
                left -= len(document)
                if left <= 0:
                    return

    print(f"training a tokeniser of {size} ids", file=sys.stderr)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text(), trainer)
    return tokenizer
