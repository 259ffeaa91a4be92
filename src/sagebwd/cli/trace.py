"""`sagebwd trace`: errors of recipes inside a trained model."""

from __future__ import annotations

import json
import lzma
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sagebwd.cli.terminal import console, progress, quiet

if TYPE_CHECKING:
    import torch

    from sagebwd.diagnostics.capture import Captured
    from sagebwd.diagnostics.trace import Row

ALL = "all"
DIGITS = 5
"""Significant digits of a number in ``--output``: a window of a model is millions of them."""


def trace(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a Transformers model (of ours RUN/model), or a .gguf file.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text file, .xz or not [default: a page of ours].")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a window [default: up to 1024].")] = None,
    windows: Annotated[int, typer.Option(help="Windows of the text, from its beginning to its end.")] = 1,
    layers: Annotated[str | None, typer.Option(help="Layers, as 0,5,11 [default: all].")] = None,
    heads: Annotated[str | None, typer.Option(help="Query heads, as 0,3 or all; also shows them one by one.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="Recipe name or text; repeat for several.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Round what is captured, as bfloat16, which kernels take [default: no].")
    ] = None,
    attribute: Annotated[bool, typer.Option(help="Also each product's share of the error.")] = False,
    save: Annotated[Path | None, typer.Option(help="Keep q, k, v and the gradients: a .safetensors file.")] = None,
    load: Annotated[Path | None, typer.Option(help="Take them from such a file, in place of --model.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the rows, to a .json or .json.xz file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw per-layer curves: a .png file.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Error of recipes inside a trained model, layer by layer, next to the paper's Table 2."""
    quiet()
    import torch

    from sagebwd.cli.hardware import check_device
    from sagebwd.cli.outputs import check_files
    from sagebwd.cli.results import commit
    from sagebwd.environment import write_whole
    from sagebwd.recipe import Recipe

    recipes = [Recipe.parse(one) for one in recipe or ["paper", "token"]]
    chosen_layers, chosen_heads = _indices("layers", layers), None if heads == ALL else _indices("heads", heads)
    rounded = None if dtype is None else dtype_of(dtype)
    if (model is None) == (load is None):
        raise ValueError("give one of --model FOLDER and --load FILE")
    if windows != 1 and (save is not None or load is not None):
        raise ValueError(f"windows={windows}: a file of --save and --load holds one window")
    if text is not None and (text.is_dir() or not text.exists()):  # before a model is loaded
        raise ValueError(
            f"text={str(text)!r}: {'a folder' if text.is_dir() else 'there is no such file'}; give a file"
        )
    check_device(device)
    check_files(
        {"--save": save, "--output": output, "--plot": plot}, {"--load": load, "--model": model, "--text": text}
    )
    rows: list[Row] = []
    with progress(lambda: f"{save} is whole" if save and save.exists() else "nothing was written") as tell:
        tell("loading transformers")
        try:
            from sagebwd.diagnostics import capture, models, tables
            from sagebwd.diagnostics import layers as together
            from sagebwd.diagnostics import trace as study
            from sagebwd.diagnostics.plots import plot_trace, pyplot

            if plot is not None:  # before what takes long
                pyplot()
        except ImportError as error:
            raise ValueError(f"trace: {error}") from None

        def add(captured: list[Captured], window: int) -> None:
            def told(text: str, done: float) -> None:
                tell(text, (window + done) / windows)

            kept = [call.select(chosen_heads).to(rounded) for call in captured]
            if save is not None:
                capture.save(kept, save)
            rows.extend(study.measure(kept, recipes, attribute=attribute, window=window, progress=told))

        tell(f"reading {load or model}")
        if load is not None:
            captured = capture.load(load, chosen_layers, device)
            count = captured[0].q.shape[2]
            add(captured, 0)
        else:
            trained = models.load_model(model, device)
            ids = models.text_windows(trained, model, text, tokens, windows)
            count = ids[0].shape[1]
            for window, one in enumerate(ids):
                add(capture.capture(trained, one, layers=chosen_layers), window)
    shown = together.means(rows)
    # before tables: whoever reads them may go away
    if output is not None:
        content = {"source": (load or model).name, "text": text and text.name, "tokens": count, "windows": windows}
        content |= {"dtype": dtype, "torch": torch.__version__, "commit": commit()}
        content |= {"layers": list(map(asdict, shown)), "rows": list(map(asdict, rows))}
        write_whole(output, _packed(_rounded(content), output.suffix))
    if plot is not None:
        plot_trace(shown, plot)
    one_by_one = together.over_windows(rows) if heads else []
    subject = f"{load or model}, {windows if windows > 1 else 'one'} window{'s' * (windows > 1)} of {count} tokens"
    # heads of a layer in order, their mean last
    by_place = sorted(one_by_one + shown, key=lambda row: (row.layer, math.inf if row.head is None else row.head))
    for table in (*tables.trace(by_place, subject), tables.overall(rows)):
        console.print(table)
    for written in (save, output, plot):
        if written is not None:
            console.print(f"wrote {written}", markup=False, soft_wrap=True)


def _packed(content: object, suffix: str) -> bytes:
    """JSON as a file of such a suffix has it."""
    text = json.dumps(content, indent=None if suffix == ".xz" else 1) + "\n"
    return lzma.compress(text.encode()) if suffix == ".xz" else text.encode()


def _rounded(content: object) -> object:
    return json.loads(json.dumps(content), parse_float=lambda x: float(f"{float(x):.{DIGITS}g}"))


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of that name. Raises ValueError for one that no kernel takes."""
    import torch

    if name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype={name!r} is not known; accepted: bfloat16, float16, float32")
    return getattr(torch, name)


def _indices(name: str, given: str | None) -> list[int] | None:
    if given is None:
        return None
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{name}={given!r}: expected indices with commas between them, for example 0,5,11")
    return [int(part) for part in parts]
