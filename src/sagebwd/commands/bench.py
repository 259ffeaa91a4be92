"""The commands `sagebwd bench` and `sagebwd bench-training`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sagebwd.commands.terminal import console, progress, quiet


def bench(
    recipe: Annotated[list[str] | None, typer.Option(help="Recipe name or text; repeat for several.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Kernel family, the fastest unless named; repeat.")] = None,
    head_dim: Annotated[
        list[str] | None,
        typer.Option(help="Of the grid: 64, 72, 80, 96, 112, 128, 192, 192/128, 256; repeat [default: 64, 128]."),
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Of the grid; repeat for several.")] = None,
    special: Annotated[
        bool | None, typer.Option(help="Also grouped heads and the video shape [default: with the grid].")
    ] = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="Time packed documents, causal, of these head_dims in the grid's place.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option(help="Also FP8 recipes with gradients that repeat bit for bit.")
    ] = False,
    peer: Annotated[
        list[str] | None, typer.Option(help="Also a low-bit attention of others: cudnn-fp8, cudnn-fp8-e4m3; repeat.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 4,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the command out.")] = "cuda",
    output: Annotated[Path, typer.Option(help="Folder for JSON, CSV and plot.")] = Path("benchmarks/results"),
    commit: Annotated[str | None, typer.Option(help="Commit to record outside a git checkout.")] = None,
) -> None:
    """Speed and memory on the standard grid, or of packed documents, end to end, against the best BF16 kernels."""
    from sagebwd.benchmarks import attention as benchmark
    from sagebwd.benchmarks import low_bit, peers, shapes
    from sagebwd.benchmarks.packed import packed_shapes
    from sagebwd.benchmarks.plot import plot_attention
    from sagebwd.benchmarks.results import environment, save, save_csv
    from sagebwd.dispatch import check_known
    from sagebwd.hardware import check_device
    from sagebwd.recipe import Recipe

    check_device(device)
    for name in impl or ():
        check_known(name)
    low_bit.check(peer or ())
    recipes = [Recipe.parse(text) for text in recipe or ["token", "paper"]]
    if packed:
        if tokens or special or peer:
            raise ValueError(
                "--packed has shapes of its own; expected none of --tokens, --special and --peer beside it"
            )
        kind, grid = "packed", packed_shapes(head_dim or shapes.DEFAULT_WIDTHS)
    else:
        kind, grid = "attention", shapes.standard_grid(head_dim or shapes.DEFAULT_WIDTHS, tokens or shapes.GRID_TOKENS)
        grid += shapes.special_shapes() if special is not False else []
    facts = environment(device, commit) | low_bit.facts(peer or ())
    rows: list[benchmark.Measurement] = []
    for index, shape in enumerate(grid, 1):
        with console.status(f"{index}/{len(grid)} {shape}"):
            measured = benchmark.measure_shape(
                shape, recipes, impl, device, rounds, deterministic=deterministic, low_bit_peers=peer or ()
            )
        rows += measured
        console.print(_bench_table(str(shape), measured))
        for line in low_bit.comparisons(measured):
            console.print(line, markup=False)
        for name, reason in measured[-1].peer_gates.items():
            console.print(f"{name} does not count here, {reason}", markup=False)
        path = save(rows, facts, output, kind)  # anew with every shape: one that is cut off has what it measured
    console.print(f"wrote {path} and {save_csv(rows, path)}")
    compared = {"the best baseline": "peer", "FlashAttention-2": "fa2"}
    if not peers.may_claim_best({row.impl for row in rows}, device):
        del compared["the best baseline"]
        console.print("no claim over the best baseline: FlashAttention-4 is not installed, or runs no shape here")
    for name, text in dict.fromkeys((row.impl, row.recipe) for row in rows if row.recipe in set(map(str, recipes))):
        for baseline, over in compared.items():
            means = {
                way: benchmark.geometric_mean_speedup(rows, name, text, way, over) for way in benchmark.DIRECTIONS
            }
            if None not in means.values():
                line = ", ".join(f"{way} {mean:.2f}x{' (slower)' if mean < 1 else ''}" for way, mean in means.items())
                console.print(f"{text} ({name}) over {baseline}: {line}")
        costs = {way: benchmark.deterministic_cost(rows, name, text, way) for way in benchmark.DIRECTIONS}
        if None not in costs.values():
            line = ", ".join(f"{way} {cost:.2f}x" for way, cost in costs.items())
            console.print(f"{text} ({name}), time of the deterministic mode: {line}")
    for line in low_bit.comparisons(rows) if len(grid) > 1 else ():
        console.print(f"all shapes: {line}", markup=False)
    if any(shapes.on_grid(asdict(row)) and row.gate == "ok" for row in rows):
        console.print(f"wrote {plot_attention(path)}")
    if any(row.gate == "FAILED" for row in rows):
        raise ValueError("some shapes FAILED the correctness gate: their results are wrong, do not use them")


def _bench_table(title: str, rows: list) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    measures = "fwd", "bwd", "fwd+bwd ms / TFLOPS", "over best here", "over FA2", "peak MiB", "kept MiB"
    for heading in ("attention", *measures):
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for start in range(0, len(rows), 3):
        forward, backward, both = rows[start : start + 3]
        if both.gate == "FAILED":
            table.add_row(f"{both.impl} {both.recipe}", "[red]FAILED[/red]")
            continue
        cells = [
            f"{row.ms:.3f} / {row.tflops:.0f}{'' if row.gate == 'ok' else ' wrong'}"
            for row in (forward, backward, both)
        ]
        over_best = "" if both.speedup is None else f"{both.speedup:.2f}x {both.peer}"
        over_fa2 = "" if both.fa2_ms is None else f"{both.fa2_ms / both.ms:.2f}x"
        used = ["" if used is None else f"{used / 2**20:.0f}" for used in (both.peak_bytes, both.kept_bytes)]
        table.add_row(f"{both.impl} {both.recipe}", *cells, over_best, over_fa2, *used)
    return table


def bench_training(
    config: Annotated[Path, typer.Option(help="YAML file whose model is trained.")] = Path("configs/paper-325m.yaml"),
    attention: Annotated[
        list[str] | None,
        typer.Option(help="cudnn, flash, sdpa, fa4, a recipe or recipe@impl; repeat [default: all here]."),
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens a sequence [default: the config's]; repeat.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences at once [default: 32768 tokens].")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeat for several.")] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile the model.")] = True,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Compile its layers, one for all, in a tenth of the time.")
    ] = False,
    reduce_overhead: Annotated[
        bool, typer.Option("--reduce-overhead", help="Compile it whole, its kernels launched as CUDA graphs.")
    ] = False,
    largest_context: Annotated[
        bool, typer.Option("--largest-context", help="Time nothing: find the longest sequence that one GPU trains.")
    ] = False,
    causal: Annotated[bool, typer.Option(help="Or without a mask, as in a video model.")] = True,
    steps: Annotated[int, typer.Option(help="Timed steps of each; the median counts.")] = 8,
    warmup: Annotated[int, typer.Option(help="Steps of each before them.")] = 2,
    vocabulary: Annotated[int, typer.Option(help="Token ids.")] = 50257,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the command out.")] = "cuda",
    output: Annotated[Path, typer.Option(help="Folder for the JSON.")] = Path("benchmarks/results"),
    commit: Annotated[str | None, typer.Option(help="Commit to record outside a git checkout.")] = None,
) -> None:
    """Where the time of training steps goes, one attention beside another; under torchrun, of N processes."""
    quiet()
    from sagebwd.benchmarks import largest_context as longest
    from sagebwd.benchmarks import training as benchmark
    from sagebwd.benchmarks import training_tables as tables
    from sagebwd.benchmarks.results import save
    from sagebwd.hardware import check_device
    from sagebwd.training import processes
    from sagebwd.training.config import load

    check_device(device)
    if sum((not compiled, by_layer, reduce_overhead)) > 1:
        raise ValueError("expected one of --no-compile, --by-layer and --reduce-overhead")
    how = "no" if not compiled else "layers" if by_layer else "reduce-overhead" if reduce_overhead else "model"
    names = attention or (["cudnn", "flash", "token"] if device.startswith("cuda") else ["sdpa", "token"])
    choices = [benchmark.Choice.parse(name, device) for name in names]
    chosen = load(config, setting)
    processes.join()
    console.quiet = not processes.is_first()
    facts = benchmark.facts(device, commit, chosen)
    shared = {"vocabulary": vocabulary, "device": device, "compiled": how, "is_causal": causal}
    if largest_context:
        if not device.startswith("cuda") or processes.count() > 1 or how == "reduce-overhead":
            raise ValueError("--largest-context needs one process, a GPU, and no CUDA graphs, whose memory stays")
        start, found = chosen.replace({"data.context": (context or [chosen.data.context])[0]}), []
        with progress() as tell:
            for row in longest.measure(start, choices, batch=batch or 1, progress=tell, **shared):
                found.append(row)  # and saved: a search that is cut off has what it found
                path = save(found, facts, output, "largest-context")
        console.print(longest.table(found))
        console.print(f"wrote {path}")
        return
    name = "training" if processes.count() == 1 else f"training_{processes.count()}-processes"
    rows: list[benchmark.Step] = []
    for tokens in context or [chosen.data.context]:
        with progress() as tell:
            measured = benchmark.measure(
                chosen.replace({"data.context": tokens}), choices, batch=batch, steps=steps, warmup=warmup,
                progress=lambda text, tokens=tokens: tell(f"context {tokens}, {text}"), **shared,
            )  # fmt: skip
        rows += measured
        console.print(tables.table(measured))
        console.print(tables.parts_table(measured))
        if processes.is_first():  # anew with every context: one that is cut off has what it measured
            console.print(f"wrote {save(rows, facts, output, name)}")
    processes.leave()
    if any(row.gate == "FAILED" for row in rows):
        raise ValueError("an attention FAILED: its gradients are wrong, do not use it")
