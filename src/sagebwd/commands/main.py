"""The command line: `sagebwd pretrain | compare | seeds | gaps | tokenize | continue | token-file | finetune | task |
gaussian | trace | bench | bench-masks | bench-training | figure | doctor`.

Errors that a person can mend are one line and exit code 2; Ctrl-C is exit code 130. Commands import what they need
when they run, so that `sagebwd --help` is quick and a missing extra is named.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.markup import escape
    from rich.table import Table

    from sagebwd.commands import bench as cli_bench
    from sagebwd.commands import continued as cli_continued
    from sagebwd.commands import figures as cli_figures
    from sagebwd.commands import finetune as cli_finetune
    from sagebwd.commands import masks as cli_masks
    from sagebwd.commands import seeds as cli_seeds
    from sagebwd.commands import trace as cli_trace
    from sagebwd.commands.terminal import console, errors, interruptible, progress, quiet
except ImportError as error:  # pragma: no cover - exercised in a subprocess
    sys.exit(f"sagebwd: the command line needs {error.name}; in a checkout of sagebwd: pip install '.[train]'")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # rich's own drops what is in brackets
    help="Trainable low-bit attention.",
)


@app.command()
def pretrain(
    config: Annotated[Path, typer.Option(help="YAML file; those in configs/ are examples.")],
    output: Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/NAME].")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeat for several.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest whole checkpoint.")] = False,
) -> None:
    """Pre-train a Llama (with QK-norm: a Qwen3) under one attention."""
    from sagebwd.training.config import load

    chosen = load(config, setting)
    quiet()
    from sagebwd.training.pretrain import run
    from sagebwd.training.processes import is_first
    from sagebwd.training.run_dir import RESULT

    run_dir = output or Path("runs") / chosen.name
    with interruptible("go on with --resume"):
        run(chosen, run_dir, resume)
    if is_first():
        console.print(f"finished: {run_dir / RESULT}")


@app.command()
def compare(
    config: Annotated[Path, typer.Option(help="YAML file with variants.")],
    output: Annotated[Path | None, typer.Option(help="Folder of the comparison [default: runs/NAME].")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeat for several.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run these variants alone; repeat for several.")] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Variants at once, in processes of their own, on the GPUs in turn.")
    ] = None,
) -> None:
    """Train a config's variants on the same data from the same weights, and report their losses side by side.

    Variants that have finished are kept, one that was interrupted goes on where it stopped.
    """
    from sagebwd.training.config import load

    chosen = load(config, setting)
    quiet()
    from sagebwd.training import compare as comparison
    from sagebwd.training.processes import is_first

    folder = output or Path("runs") / chosen.name
    with interruptible("the same command goes on from there"):
        outcomes = comparison.compare(chosen, folder, only, jobs)
    if is_first():
        console.print(comparison.table(outcomes))
        console.print(f"report: {folder / 'report.html'}")


app.command()(cli_seeds.seeds)
app.command()(cli_seeds.gaps)


@app.command()
def tokenize(
    config: Annotated[Path, typer.Option(help="YAML file of a training run.")],
    setting: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeat for several.")] = None,
) -> None:
    """Make the token files of a config's data, which its runs share; they are kept if they are there."""
    from sagebwd.training.config import load

    chosen = load(config, setting)
    from sagebwd.training import data

    tokens = data.load(chosen)
    counts = f"{len(tokens.train):,} training and {len(tokens.held_out):,} held-out tokens"
    console.print(f"{counts}, vocabulary {tokens.vocabulary:,}: {data.token_folder(chosen)}", soft_wrap=True)


app.command("continue")(cli_continued.continued)
app.command()(cli_continued.token_file)
app.command()(cli_finetune.finetune)
app.command()(cli_finetune.task)


@app.command()
def gaussian(
    recipe: Annotated[list[str] | None, typer.Option(help="Recipe name or text; repeat for several.")] = None,
    sigma: Annotated[
        list[float] | None, typer.Option(help="Standard deviation of Q and K; repeat for several.")
    ] = None,
    kind: Annotated[
        str, typer.Option(help="Inputs: plain (the paper's Table 1), bias-and-sink or sink (docs/sinks.md).")
    ] = "plain",
    tokens: Annotated[int | None, typer.Option(help="Tokens [default: 4096 for plain, else 2048].")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head dimension [default: 128 for plain, else 64].")] = None,
    seeds: Annotated[int | None, typer.Option(help="Draws to average [default: 1 for plain, else 8].")] = None,
    causal: Annotated[bool, typer.Option(help="Mask the future.")] = False,
    impl: Annotated[str, typer.Option(help="reference (the emulator) or a kernel family.")] = "reference",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    output: Annotated[Path | None, typer.Option(help="Also write the rows as JSON to this file.")] = None,
) -> None:
    """Error of recipes on random inputs, next to the paper's Table 1."""
    from sagebwd.analysis import gaussian as study
    from sagebwd.dispatch import check_known
    from sagebwd.hardware import check_device

    check_device(device)
    check_known(impl)
    plain, biased = kind == "plain", kind == "bias-and-sink"
    recipes = recipe or ([*study.BIAS_AND_SINK, "token"] if biased else ["paper", "token"])
    sigmas = sigma or (list(study.PAPER_TABLE_1) if plain else [1.0, 3.0])
    with progress() as tell:
        rows = study.measure(
            recipes, sigmas, kind=kind, tokens=tokens or (4096 if plain else 2048),
            head_dim=head_dim or (128 if plain else 64), seeds=seeds or (1 if plain else 8), is_causal=causal,
            impl=impl, device=device, progress=tell,
        )  # fmt: skip
    published = "first simulation" if biased else "published"
    table = Table(title=f"{kind} inputs: cosine / relative L2 against FP64; in grey the {published} figures")
    table.add_column("sigma_QK", justify="right")
    table.add_column("recipe")
    for name in study.TENSORS:
        table.add_column(name)
    by_line: dict[tuple[float, str], dict[str, study.Row]] = {}
    for row in rows:
        by_line.setdefault((row.sigma, row.recipe), {})[row.tensor] = row
    for (line_sigma, name), cells in by_line.items():
        ours = [f"{cells[t].cosine:.4f} / {cells[t].relative_l2:.4f}" for t in study.TENSORS]
        table.add_row(f"{line_sigma:g}", name, *ours)
        theirs = [_published(cells[t].expected_cosine, cells[t].expected_l2) for t in study.TENSORS]
        if any(theirs):
            table.add_row("", f"  [dim]{published}[/dim]", *(f"[dim]{cell}[/dim]" for cell in theirs))
    console.print(table)
    if output is not None:
        import json

        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {output}")


def _published(cosine: float | None, relative_l2: float | None) -> str:
    if relative_l2 is None:
        return ""
    return f"{relative_l2:.4f}" if cosine is None else f"{cosine:.4f} / {relative_l2:.4f}"


app.command()(cli_trace.trace)
app.command()(cli_figures.figure)
app.command()(cli_bench.bench)
app.command("bench-masks")(cli_masks.bench_masks)
app.command("bench-training")(cli_bench.bench_training)


@app.command()
def doctor(
    head_dim: Annotated[int, typer.Option(help="Of the call to ask about.")] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    recipe: Annotated[str, typer.Option(help="Recipe name or text; auto is what a call without one takes.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cuda or cpu [default: cuda where there is one].")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time this GPU, for a few minutes: from which length auto is faster.")
    ] = False,
    kind: Annotated[
        list[str] | None, typer.Option(help="With --measure: causal, full, packed, window, padding or mask; repeat.")
    ] = None,
    width: Annotated[
        list[str] | None, typer.Option(help="With --measure: head_dim, or head_dim/value's as 192/128; repeat.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="With --measure: also write JSON to this folder.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record outside a git checkout.")] = None,
) -> None:
    """What runs here and why, and a self-test. Exit code 1 where no kernel runs."""
    import torch

    from sagebwd.commands import doctor as examination
    from sagebwd.hardware import check_device
    from sagebwd.recipe import AUTO

    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype={dtype!r} is not known; accepted: bfloat16, float16, float32")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    if measure:
        from sagebwd.benchmarks import crossings as benchmark
        from sagebwd.commands import crossings

        cases = benchmark.cases(kind or benchmark.KINDS, width or benchmark.MEASURED_WIDTHS)
        crossings.measure(device, cases, output, commit)
        return
    for name, value in examination.facts().items():
        console.print(f"{name:20} {value}", highlight=False, markup=False)
    parsed = examination.recipe_of(device, getattr(torch, dtype), head_dim, recipe)
    named = f"{recipe}, which is {parsed} here," if recipe == AUTO else f"{parsed},"
    console.print(f"\nA call with head_dim {head_dim}, {dtype}, recipe {named} on {device}:")
    found = examination.answers(device, getattr(torch, dtype), head_dim, parsed)
    for answer in found:
        mark = "[green]runs it[/green]" if answer.chosen else "[dim]could[/dim]" if answer.takes else "[red]no[/red]"
        console.print(f"  {answer.impl:12} {mark}: {escape(answer.reason)}", highlight=False)
    if device.startswith("cuda") and recipe == AUTO:
        from sagebwd.commands import crossings

        crossings.show(device)
    if any(answer.chosen for answer in found):
        error = examination.self_test(device, getattr(torch, dtype), head_dim, parsed)
        passed = error < 0.03
        console.print(f"self-test {'PASS' if passed else 'FAIL'}: relative L2 to the reference at most {error:.4f}")
        if not passed:
            raise typer.Exit(1)
    if not any(answer.chosen and answer.impl != "reference" for answer in found):
        console.print("No kernel runs here: calls use the reference, which is right and slow.")
        raise typer.Exit(1)


def main() -> None:
    """Entry point: turns errors that a person can mend into one line."""
    try:
        app()
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        # settings are wrong in all processes of a run alike
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, OSError):
            errors.print(f"sagebwd: {error}", style="red", highlight=False, markup=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
