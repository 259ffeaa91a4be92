"""`python -m lab bench-training`: where the time of training steps goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands import RESULTS, Commit, Device, Results, check_at_least, loading
from lab.commands.configs import ConfigFile, Setting, load


def bench_training(
    config: ConfigFile = Path("configs/paper-325m.yaml"),
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="cudnn, flash, sdpa, fa4, a recipe, recipe+fused or recipe@impl; repeat [default: all here]."
        ),
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens a sequence [default: the config's]; repeat.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences at once [default: 32768 tokens].")] = None,
    setting: Setting = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile the model.")] = True,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Compile its layers, one for all, in a tenth of the time.")
    ] = False,
    reduce_overhead: Annotated[
        bool, typer.Option("--reduce-overhead", help="Compile it whole, its kernels launched as CUDA graphs.")
    ] = False,
    causal: Annotated[bool, typer.Option(help="Or without a mask, as in a video model.")] = True,
    steps: Annotated[int, typer.Option(help="Timed steps of each; the median counts.")] = 8,
    warmup: Annotated[int, typer.Option(help="Steps of each before them.")] = 2,
    vocabulary: Annotated[int, typer.Option(help="Token ids.")] = 50257,
    device: Device = "cuda",
    output: Results = RESULTS,
    commit: Commit = None,
) -> None:
    """Where the time of training steps goes, one attention beside another; under torchrun, of N processes."""
    check_at_least(1, steps=steps, warmup=warmup, batch=batch, vocabulary=vocabulary, context=min(context or [1]))
    chosen = load(config, setting)
    from sagebwd.cli.hardware import check_device
    from sagebwd.cli.outputs import check_folder
    from sagebwd.cli.results import save
    from sagebwd.cli.terminal import console, progress, quiet

    check_device(device)
    check_folder("--output", output)
    quiet()
    with loading("transformers"):
        from lab.steps import tables
        from lab.steps import timing as benchmark
        from lab.training import processes
    if sum((not compiled, by_layer, reduce_overhead)) > 1:
        raise ValueError("expected one of --no-compile, --by-layer and --reduce-overhead")
    how = "no" if not compiled else "layers" if by_layer else "reduce-overhead" if reduce_overhead else "model"
    names = attention or (["cudnn", "flash", "token"] if device.startswith("cuda") else ["sdpa", "token"])
    choices = [benchmark.Choice.parse(name, device) for name in names]
    processes.join()
    console.quiet = not processes.is_first()
    facts = benchmark.facts(device, commit, chosen)
    shared = {"vocabulary": vocabulary, "device": device, "compiled": how, "is_causal": causal}
    name = "training" if processes.count() == 1 else f"training_{processes.count()}-processes"
    rows: list[benchmark.Step] = []
    path, contexts = None, context or [chosen.data.context]
    with progress(lambda: f"what was measured is in {path}" if path else "nothing was measured yet") as tell:
        for number, tokens in enumerate(contexts):
            measured = benchmark.measure(
                chosen.replace({"data.context": tokens}), choices, batch=batch, steps=steps, warmup=warmup,
                progress=lambda text, done, tokens=tokens, number=number: tell(
                    f"context {tokens}, {text}", (number + done) / len(contexts)
                ), **shared,
            )  # fmt: skip
            rows += measured
            if processes.is_first():  # anew with every context: one that is cut off has what it measured
                path = save(rows, facts, output, name)
            console.print(tables.table(measured))
            console.print(tables.parts_table(measured))
            console.print(f"wrote {path}", markup=False)
    processes.leave()
    if any(row.gate == "FAILED" for row in rows):
        raise ValueError("an attention FAILED: its gradients are wrong, do not use it")
