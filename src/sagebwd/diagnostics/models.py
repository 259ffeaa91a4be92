"""Trained models as they lie on disk, and texts as the token ids that they read.

A model is the folder that ``save_pretrained`` wrote, a run's ``model`` or checkpoint for example, or a GGUF file,
whose quantised weights become FP32 (which takes the package gguf).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from sagebwd.diagnostics.text import read_text
from sagebwd.extras import extra

with extra("diagnostics"):
    import transformers
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

_DEFAULT_TOKENS = 1024
ENCODERS: list[Callable[[Path], Callable[[str], list[int]] | None]] = []
"""Further tokenisers: each function gives the encoder of a model's folder that it knows, or else None."""


def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A decoder, or an encoder with a masked-language head, from files alone.

    Args: path, of a folder or a GGUF file, which holds a decoder; dtype, of the weights, for None the folder's own.

    Raises ValueError where there is no such model or it is damaged, and for a GGUF file without the package that reads
    it.
    """
    path = Path(path)
    settings = {"local_files_only": True} | ({} if dtype is None else {"dtype": dtype})
    if path.suffix == ".gguf":
        folder, named = located(path)
        with _whole(path):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **named, **settings)
        return in_full(model).to(device)
    if not (path / "config.json").is_file():
        raise ValueError(
            f"model={str(path)!r}: no config.json there; accepted: the folder of a Transformers model, for example "
            "model/ or checkpoint-N/ of a run, and a .gguf file"
        )
    with _whole(path):
        config = transformers.AutoConfig.from_pretrained(path)
        named = (config.architectures or [""])[0]
        masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not named.endswith(("ForCausalLM", "LMHeadModel"))
        auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
        model = auto.from_pretrained(path, **settings)
    return model.to(device)


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Where Transformers reads a model's files, which raises what its parts do: a ValueError that names them."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model={str(path)!r}: it cannot be loaded ({type(error).__name__}: {reason})") from error


def located(path: str | Path) -> tuple[str | Path, dict[str, str]]:
    """Where Transformers' ``from_pretrained`` finds a model, and how it is told of a GGUF file in that folder.

    Raises ValueError where there is no such file, or without the package that reads it.
    """
    if not str(path).endswith(".gguf"):
        return path, {}
    if not Path(path).is_file():
        raise ValueError(f"model={str(path)!r}: there is no such file")
    if find_spec("gguf") is None:
        raise ValueError(f"model={str(path)!r}: a GGUF file needs the package gguf: pip install gguf")
    transformers.utils.logging.disable_progress_bar()
    return Path(path).parent, {"gguf_file": Path(path).name}


def in_full(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, whose weights a GGUF file had in few bits, as one that Transformers saves: they are numbers."""
    if getattr(model, "hf_quantizer", None) is not None:
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
    return model


def encode(model_path: str | Path, text: str) -> Tensor:
    """The token ids of a text, (1, tokens) int64, by the tokeniser of a model's folder or GGUF file, or `ENCODERS`.

    Raises ValueError where there is no tokeniser or no text, and as `load_model` does for a GGUF file.
    """
    path = Path(model_path)
    if not text:
        raise ValueError("text: it is empty")
    for known in ENCODERS:
        if (encoder := known(path)) is not None:
            return torch.tensor([encoder(text)])
    return load_tokenizer(path)(text, return_tensors="pt", verbose=False)["input_ids"]


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokeniser in a model's folder or GGUF file. Raises ValueError where there is none, and as `load_model`."""
    path = Path(path)
    if path.suffix == ".gguf":
        folder, named = located(path)
        with _whole(path):
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **named)
    if any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")):
        with _whole(path):
            return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    raise ValueError(
        f"model={str(path)!r}: no tokeniser there; accepted: a folder with tokenizer.json, tokenizer_config.json or "
        "vocab.txt, and a .gguf file; runs of the laboratory need `python -m lab trace`"
    )


def windows(ids: Tensor, tokens: int, count: int = 1) -> list[Tensor]:
    """``count`` windows (1, tokens) of ids (1, n), the first at their beginning, the last at their end.

    Raises ValueError for fewer than one window or token, and where they are more than there are.
    """
    found = ids.shape[1]
    if count < 1:
        raise ValueError(f"windows={count} must be at least 1")
    if not 1 <= tokens <= found:
        raise ValueError(f"tokens={tokens}: the text has {found}; accepted: 1 to that")
    if tokens * count > found:
        raise ValueError(f"windows={count}: {count} windows of {tokens} need {tokens * count}; the text has {found}")
    starts = torch.linspace(0, found - tokens, count).long().tolist()
    return [ids[:, start : start + tokens] for start in starts]


def context(model: PreTrainedModel) -> int | None:
    """The most tokens that the model has positions for; None where its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def text_windows(
    model: PreTrainedModel, path: str | Path, text: str | Path | None, tokens: int | None = None, count: int = 1
) -> list[Tensor]:
    """`windows` of a text file as the model at ``path`` reads it, by default up to 1024 tokens of `SAMPLE_TEXT`.

    Raises ValueError as `encode` and `windows` do.
    """
    ids = encode(path, read_text(text))
    if tokens is None:
        tokens = min(_DEFAULT_TOKENS, max(1, ids.shape[1] // max(count, 1)), context(model) or _DEFAULT_TOKENS)
    return windows(ids, tokens, count)
