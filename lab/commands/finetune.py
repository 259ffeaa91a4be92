"""The commands `python -m lab finetune` and `python -m lab task`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lab.commands.terminal import interruptible
from sagebwd.cli.terminal import console, quiet


def finetune(
    config: Annotated[Path, typer.Option(help="YAML file; those in configs/finetune/ are examples.")],
    output: Annotated[Path | None, typer.Option(help="Folder of the runs [default: runs/NAME].")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeat for several.")] = None,
    resume: Annotated[bool, typer.Option(help="Keep runs that have finished, and go on with the others.")] = False,
) -> None:
    """Fine-tune a checkpoint on JSON lines under each variant of attention and seed, and report the accuracies."""
    from lab.commands.configs import load
    from lab.training.finetune_config import Finetuning

    chosen = load(config, setting, Finetuning)
    from lab.training import finetune_report
    from lab.training.finetune import finetune as run

    quiet()
    folder = output or Path("runs") / chosen.name
    with interruptible("go on with --resume"):
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

    with console.status(f"making {name}"):
        made = tasks.make(
            name, source, output, held_out, held_out_share, examples, held_out_examples, per_document, seed
        )
    for part, count in made.items():
        console.print(f"{output / part}.jsonl: {count} examples")
