"""The commands `python -m lab finetune` and `python -m lab task`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lab.commands.configs import ConfigFile, Folder, Setting, load
from lab.commands.terminal import training
from lab.training.finetune_config import Finetuning


def finetune(
    config: ConfigFile,
    output: Folder = None,
    setting: Setting = None,
    resume: Annotated[bool, typer.Option(help="Keep runs that have finished, and go on with the others.")] = False,
) -> None:
    """Fine-tune a checkpoint on JSON lines under each variant of attention and seed, and report the accuracies."""
    chosen = load(config, setting, Finetuning)
    folder = output or Path("runs") / chosen.name

    def kept() -> str:
        begun = any(folder.glob("*/config.yaml"))
        return f"what was trained is kept in {folder}, go on with --resume" if begun else "nothing was trained yet"

    with training(kept):
        from lab.training import finetune_report
        from lab.training.finetune import finetune as run
        from sagebwd.cli.terminal import console

        outcomes = run(chosen, folder, resume)
    console.print(finetune_report.table(outcomes))
    console.print(f"report: {folder / 'comparison.md'}")


def task(
    name: Annotated[str, typer.Argument(help="continuation or subject (decoders), order or neighbours (encoders).")],
    source: Annotated[str, typer.Option(help="Text of long documents, as a training config's data.source.")],
    output: Annotated[Path, typer.Option(help="Folder for train.jsonl and held_out.jsonl.")],
    held_out: Annotated[str | None, typer.Option(help="Text for held-out examples [default: of the source].")] = None,
    held_out_share: Annotated[float, typer.Option(help="Share of the source's documents, without --held-out.")] = 0.05,
    examples: Annotated[int, typer.Option(help="Training examples.")] = 8000,
    held_out_examples: Annotated[int, typer.Option(help="Held-out examples.")] = 1000,
    per_document: Annotated[int, typer.Option(help="Examples that one document gives, at most.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
) -> None:
    """Make a task to fine-tune on from a text: which passage comes next, or how two paragraphs belong together."""
    from lab.training import tasks
    from sagebwd.cli.terminal import console, progress

    with progress() as tell:
        made = tasks.make(
            name, source, output, held_out, held_out_share, examples, held_out_examples, per_document, seed, tell
        )
    for part, count in made.items():
        console.print(f"{output / part}.jsonl: {count} examples")
