"""`python -m lab assay`: are a recipe's gradients right, and would it be seen if they were not?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands import Device, Recipes, check_at_least
from lab.commands.configs import Setting, load
from lab.commands.terminal import training
from lab.training.config import Config


def assay(
    model: Annotated[
        Path | None, typer.Option(help="A trained model of Transformers: a folder with its tokeniser, or a GGUF file.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Its text, xz or not, or a token file, .npy [default: the config's held-out].")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="In place of --model: a training run, trained first in full precision.")
    ] = None,
    setting: Setting = None,
    run: Annotated[Path | None, typer.Option(help="Folder of that run [default: runs/NAME-assay].")] = None,
    recipe: Recipes = None,
    faults: Annotated[bool, typer.Option(help="Plant faults, which must be told apart.")] = True,
    tokens: Annotated[int, typer.Option(help="Of a window.")] = 512,
    windows: Annotated[int, typer.Option(help="Batches, at least two.")] = 64,
    output: Annotated[Path | None, typer.Option(help="Write every window as JSON to this file.")] = None,
    device: Device = "cpu",
    weights: Annotated[
        Path | None, typer.Option(help="A .safetensors of python -m lab continue, in place of the model's weights.")
    ] = None,
    emulated: Annotated[bool, typer.Option(help="Run recipes in the emulator on a GPU too.")] = False,
    commit: Annotated[str | None, typer.Option(help="What ran, outside a git checkout.")] = None,
) -> None:
    """Compare the gradient of all weights under recipes with FP32's: slope, cosine, error, and planted faults.

    Exit code 1 where a fault is not told apart, or what computes the same is: such a recipe trains nothing.
    """
    check_at_least(2, windows=windows)
    if (model is None) == (config is None):
        raise ValueError("expected one of --model, a trained model, and --config, a run that is trained first")
    if model is not None and text is None:
        raise ValueError("--model wants a --text beside it")
    chosen = None if config is None else load(config, setting)
    with training("a run that was trained is kept, the same command goes on from there"):
        import torch

        from lab.studies import assay as study
        from lab.training.data import know_runs
        from sagebwd.cli.hardware import check_device
        from sagebwd.cli.outputs import check_files
        from sagebwd.cli.results import environment
        from sagebwd.cli.terminal import console, progress
        from sagebwd.diagnostics.models import load_model
        from sagebwd.recipe import Recipe

        check_device(device)
        check_files({"--output": output}, {"--model": model, "--text": text, "--weights": weights})
        recipes = [one if one == study.ROUNDED else str(Recipe.parse(one)) for one in recipe or study.RECIPES]
        if chosen is not None:
            model = _trained(chosen, run or Path("runs") / f"{chosen.name}-assay")
            text = text or Path(chosen.data.held_out or chosen.data.source)
        know_runs()
        loaded = load_model(model, device, torch.float32)
        if weights is not None:
            study.with_weights(loaded, weights)
        ids = [one.to(device) for one in _windows(loaded, model, text, tokens, windows)]
        impl = None if device.startswith("cuda") and not emulated else "reference"
        arms = [arm for one in recipes for arm in study.arms(one, impl, faults)]
        layers: dict[str, dict] = {}
        facts = {"model": model.name, "text": text.name, "tokens": tokens, **environment(device, commit), "impl": impl,
                 "weights": weights and str(weights), "layers": layers}  # fmt: skip
        with progress("windows that were measured are in the --output") as tell:
            rows = []
            for row in study.measure(loaded, ids, arms, layers):
                rows.append(row)
                tell(f"window {len(rows)} of {windows}")
                _write(output, {**facts, "rows": rows})  # one that is cut off has what it measured
        found = study.differences(rows, arms)
        _write(output, {**facts, "apart": [study.told(one) for one in found], "rows": rows})
        console.print(study.table(rows))
        if found:
            console.print(study.table_of_faults(found))
    if not all(one.right for one in found):
        raise typer.Exit(1)


def _trained(chosen: Config, folder: Path) -> Path:
    """The model of a config's run in full precision, trained unless it is there."""
    from lab.training import pretrain, run_dir

    if not (folder / "model").is_dir():
        pretrain.run(chosen.replace({"attention.recipe": "sdpa"}), folder, bool(run_dir.checkpoints(folder)))
    return folder / "model"


def _windows(loaded: object, model: Path, text: Path, tokens: int, count: int) -> list:
    """Windows of a text, or of a token file of the model's."""
    import torch

    from lab.training.continued import tokens as token_files
    from sagebwd.diagnostics.models import text_windows, windows

    if text.suffix != ".npy":
        return text_windows(loaded, model, text, tokens, count)
    ids = token_files.read(str(text), loaded.config.get_text_config().vocab_size, "text")
    return windows(torch.from_numpy(ids.astype("int64"))[None], tokens, count)


def _write(output: Path | None, content: dict) -> None:
    from sagebwd.environment import write_whole

    if output is not None:
        write_whole(output, json.dumps(content, indent=1) + "\n")
