"""The benchmarks' command line: `python -m benchmarks attention | packed-skew | masks | block | step | energy`."""

from __future__ import annotations

import itertools
import os
import sys
import time
from dataclasses import asdict
from typing import Annotated

from sagebwd_command import command_line, run, stop_by_ctrl_c

if __name__ == "__main__":
    stop_by_ctrl_c("benchmarks")

try:
    import typer
    from rich.table import Table

    from benchmarks import commands, energy_command, step_command
except ImportError as error:  # pragma: no cover - exercised in a subprocess
    sys.exit(f"benchmarks: the command line needs {error.name}; in a clone of sagebwd: pip install '.[lab]'")

app = command_line("Speed and memory of attention.")


@app.command()
def attention(
    recipe: commands.Recipes = None,
    impl: Annotated[list[str] | None, typer.Option(help="Kernel family, the fastest unless named; repeat.")] = None,
    head_dim: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the grid: 64, 72, 80, 96, 112, 128, 192, 192/128, 256, 288, 320, 384, 512; repeat [default: 64, "
            "128]."
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="Of a sequence; repeat for several [default: the grid's; on a CPU its shortest]."),
    ] = None,
    special: Annotated[
        bool | None, typer.Option(help="Also grouped heads and the video shape [default: on a GPU].")
    ] = None,
    nvidia: Annotated[
        bool, typer.Option("--nvidia", help="NVIDIA's shapes in the grid's place: batch 2, 64 heads on 8, 128.")
    ] = False,
    packed: Annotated[
        bool, typer.Option("--packed", help="Time packed documents, causal, of these head_dims in the grid's place.")
    ] = False,
    documents: Annotated[
        list[str] | None,
        typer.Option(help="Of --packed: 16x2k, 8x2k, mixed, heavy-tailed, web, sft; repeat [default: all]."),
    ] = None,
    wide: Annotated[
        bool,
        typer.Option(
            "--wide",
            help="Time head_dims beyond 256 [default: 512, 384, 320, 288] in the grid's place: causal, with a window "
            "and with grouped heads.",
        ),
    ] = False,
    seconds: Annotated[float | None, typer.Option(help="Begin no shape that would end later.")] = None,
    deterministic: Annotated[
        bool, typer.Option(help="Also FP8 recipes with gradients that repeat bit for bit.")
    ] = False,
    peer: Annotated[
        list[str] | None, typer.Option(help="Also a low-bit attention of others: cudnn-fp8, cudnn-fp8-e4m3; repeat.")
    ] = None,
    bursts: Annotated[
        bool, typer.Option("--bursts", help="Calls behind a pause, on a cool GPU, in a steady load's place.")
    ] = False,
    rounds: commands.Rounds = 4,
    device: commands.Device = "cuda",
    output: commands.Results = commands.RESULTS,
    commit: commands.Commit = None,
) -> None:
    """Speed and memory on the standard grid, or of packed documents, end to end, against the best BF16 kernels."""
    from benchmarks import attention as benchmark
    from benchmarks import baselines, low_bit, shapes, wide_baselines
    from benchmarks.packed import packed_shapes
    from benchmarks.plot import plot_attention
    from sagebwd.cli.hardware import check_device
    from sagebwd.cli.outputs import check_folder
    from sagebwd.cli.results import environment, path_of, save
    from sagebwd.cli.terminal import console, progress
    from sagebwd.dispatch import check_known
    from sagebwd.recipe import AUTO, Recipe

    commands.check_at_least(1, rounds=rounds, tokens=min(tokens or [1]))
    check_device(device)
    check_folder("--output", output)
    for name in impl or ():
        check_known(name)
    low_bit.check(peer or ())
    default = ["mixed", AUTO] if packed else ["mixed", "token"] if wide else ["token", "paper"]
    recipes = [Recipe.parse_or_auto(text) for text in recipe or default]
    if documents and not packed:
        raise ValueError("--documents names lengths of --packed, which was not given")
    if packed:
        if tokens or special or peer or nvidia:
            raise ValueError(
                "--packed has shapes of its own; expected none of --tokens, --special, --peer and --nvidia beside it"
            )
        kind, grid = "packed", packed_shapes(head_dim or shapes.DEFAULT_WIDTHS, documents, device)
    elif nvidia:
        if head_dim or special:
            raise ValueError("--nvidia has shapes of its own; expected neither --head-dim nor --special beside it")
        kind, grid = "attention", shapes.nvidia_shapes(tokens, device)
    elif wide:
        given = {} if head_dim is None else {"widths": head_dim}
        kind, grid = "attention", shapes.wide_shapes(**given, tokens=tokens, device=device)
    else:
        kind, grid = "attention", shapes.standard_grid(head_dim or shapes.DEFAULT_WIDTHS, tokens, device)
        grid += shapes.special_shapes() if (device != "cpu" if special is None else special) else []
    kind += "-bursts" * bursts
    facts = environment(device, commit) | low_bit.facts(peer or ())
    kept = commands.rows_of_others(
        path_of(facts, output, kind), facts, benchmark.CALL, [benchmark.call_of(x) for x in grid]
    )
    rows: list[benchmark.Measurement] = []
    path, began, longest = None, time.perf_counter(), 0.0
    work = [0.0, *itertools.accumulate(shape.flops("fwd+bwd") for shape in grid)]
    with progress(lambda: f"what was measured is in {path}" if path else "nothing was measured yet") as tell:
        if wide and device.startswith("cuda"):
            tell("compiling FlexAttention", 0.0)
            wide_baselines.compile_ahead(grid, device, max(1, (os.cpu_count() or 1) - 1))
        for index, shape in enumerate(grid):
            start = time.perf_counter()
            if seconds is not None and start - began + longest > seconds:
                console.print(f"no time for {len(grid) - index} of {len(grid)} shapes, from {shape} on")
                break

            def told(text: str, done: float, index: int = index, shape: object = shape) -> None:
                share = (work[index] + done * (work[index + 1] - work[index])) / work[-1]
                tell(f"{index + 1} of {len(grid)}, {shape}: {text}", share)

            measured = benchmark.measure_shape(
                shape, recipes, impl, device, rounds, deterministic=deterministic, low_bit_peers=peer or (),
                bursts=bursts, tell=told,
            )  # fmt: skip
            rows += measured
            # anew with every shape: one that is cut off has what it measured
            path = save([*kept, *rows], facts, output, kind)
            longest = max(longest, time.perf_counter() - start)
            console.print(_attention_table(str(shape), measured))
            for line in low_bit.comparisons(measured):
                console.print(line, markup=False)
            for name, reason in measured[-1].peer_gates.items():
                console.print(f"{name} does not count here, {reason}", markup=False)
    console.print(f"wrote {path} and {benchmark.save_csv([*kept, *rows], path)}", markup=False)
    compared = {"the best baseline": "peer", "FlashAttention-2": "fa2"}
    if not baselines.may_claim_best(benchmark.timed_both_ways(rows), device):
        del compared["the best baseline"]
        console.print("no claim over the best baseline: FlashAttention-4 or -3 is not installed or trains no shape")
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
        console.print(f"wrote {plot_attention(path)}", markup=False)
    if any(row.gate == "FAILED" for row in rows):
        raise ValueError("some shapes FAILED the correctness gate: their results are wrong, do not use them")


def _attention_table(title: str, rows: list) -> Table:
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
            row.gate.partition(":")[0] if row.ms is None else
            f"{row.ms:.3f} / {row.tflops:.0f}{'' if row.gate == 'ok' else ' wrong'}"
            for row in (forward, backward, both)
        ]  # fmt: skip
        over_best = "" if both.speedup is None else f"{both.speedup:.2f}x {both.peer}"
        over_fa2 = "" if None in (both.fa2_ms, both.ms) else f"{both.fa2_ms / both.ms:.2f}x"
        used = ["" if used is None else f"{used / 2**20:.0f}" for used in (both.peak_bytes, both.kept_bytes)]
        table.add_row(f"{both.impl} {both.recipe}", *cells, over_best, over_fa2, *used)
    return table


@app.command()
def packed_skew(
    recipe: Annotated[str, typer.Option(help="Recipe of ours, a name or text.")] = "mixed",
    impl: Annotated[str | None, typer.Option(help="Kernel family [default: the fastest].")] = None,
    case: Annotated[list[str] | None, typer.Option(help="A case by its name; repeat [default: all].")] = None,
    device: commands.Device = "cuda",
    output: commands.Results = commands.RESULTS,
    commit: commands.Commit = None,
) -> None:
    """Peak memory of packed documents of very different lengths, beside FlashAttention-4's."""
    from benchmarks import packed_skew as benchmark
    from sagebwd.cli.hardware import check_device
    from sagebwd.cli.outputs import check_folder
    from sagebwd.cli.results import environment, path_of, save
    from sagebwd.cli.terminal import console, progress
    from sagebwd.dispatch import check_known
    from sagebwd.recipe import Recipe

    check_device(device)
    check_folder("--output", output)
    check_known(impl)
    asked = Recipe.parse(recipe)
    for name in case or ():
        if name not in benchmark.CASES:
            raise ValueError(f"case={name!r} is not known; accepted: {', '.join(benchmark.CASES)}")
    names = case or list(benchmark.CASES)
    facts = environment(device, commit)
    of, measured = ("case", "recipe", "impl"), [(name, str(asked), impl) for name in names]
    kept = commands.rows_of_others(path_of(facts, output, "packed-skew"), facts, of, measured)
    rows: list[benchmark.Measurement] = []
    path = None
    with progress(lambda: f"what was measured is in {path}" if path else "nothing was measured yet") as tell:
        for row in benchmark.measure(asked, impl, device, names, tell):
            rows.append(row)
            # anew with every case: one that is cut off has what it measured
            path = save([*kept, *rows], facts, output, "packed-skew")
    table = Table(title=f"{asked}, peak MiB beyond the inputs", title_justify="left", box=None)
    for heading in ("documents", "ours", "FlashAttention-4", "over it"):
        table.add_column(heading, justify="left" if heading == "documents" else "right")
    for row in rows:
        peaks = ["" if mib is None else f"{mib:.0f}" for mib in (row.peak_mib, row.fa4_peak_mib)]
        over = "" if row.over is None else f"{row.over:.2f}x"
        table.add_row(row.case, *(peaks if row.gate == "ok" else ["[red]FAILED[/red]", ""]), over)
    console.print(table)
    console.print(f"wrote {path}", soft_wrap=True, markup=False)
    if any(row.gate != "ok" for row in rows):
        raise ValueError("some cases FAILED the correctness gate: their results are wrong, do not use them")
    above = [row.case for row in rows if row.over is not None and row.over > benchmark.MOST]
    if above:
        console.print(f"above {benchmark.MOST} times FlashAttention-4's: {'; '.join(above)}", markup=False)


@app.command()
def masks(
    mask: Annotated[
        list[str] | None,
        typer.Option(
            help="teacher-forcing, documents, causal-frames, gpt-oss-window (with sinks), image-blocks, elements or "
            "causal-frames-14b; chunks, prefix, window, random or gpt-oss; repeat [default: the first seven]."
        ),
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Repeat for several [default: the mask's own].")] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="A recipe, 'read RECIPE', 'packed RECIPE', 'band RECIPE', flex, flex-flash, fa4, sdpa, 'packed "
            "varlen', 'packed fa4' or 'packed fa3'; repeat [default: mixed in each form, all others but flex-flash]."
        ),
    ] = None,
    impl: Annotated[str | None, typer.Option(help="Kernel family of ours [default: the fastest].")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Queries and keys, about [default: the mask's own; on a CPU 512].")
    ] = None,
    rounds: commands.Rounds = 4,
    processes: Annotated[
        int | None,
        typer.Option(help="That compile before anything is timed [default: 12 on a GPU, of fewer cores fewer]."),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Begin no mask that would end later.")] = None,
    device: commands.Device = "cuda",
    output: commands.Results = commands.RESULTS,
    commit: commands.Commit = None,
    kernels_hash: commands.KernelsHash = None,
) -> None:
    """Speed of masks of video, documents and images, end to end, against FlexAttention, FlashAttention and SDPA."""
    from sagebwd.cli.terminal import console, progress, quiet

    quiet()
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # or what other processes compile is lost
    from benchmarks import mask_attentions, mask_cases
    from benchmarks import masks as benchmark
    from sagebwd.cli.hardware import check_device
    from sagebwd.cli.measure import MOST_PROCESSES
    from sagebwd.cli.outputs import check_folder
    from sagebwd.cli.results import environment, path_of, save
    from sagebwd.dispatch import check_known

    commands.check_at_least(1, tokens=1 if tokens is None else tokens, rounds=rounds, head_dim=min(head_dim or [1]))
    commands.check_at_least(0, processes=processes)
    check_device(device)
    check_folder("--output", output)
    check_known(impl)
    names = attention or list(mask_attentions.DEFAULT)
    for name in names:
        mask_attentions.recipe_of(name)
    tokens = tokens or (512 if device == "cpu" else None)
    cases = [
        mask_cases.Case.of(kind, width, tokens) for width in head_dim or [None] for kind in mask or mask_cases.DEFAULT
    ]
    if processes is None:
        processes = min(MOST_PROCESSES, (os.cpu_count() or 1) - 1) if device.startswith("cuda") else 0
    facts = environment(device, commit) | commands.kernels(kernels_hash)
    kept = commands.rows_of_others(
        path_of(facts, output, "masks"), facts, ("mask", "head_dim", "tokens"),
        [(case.kind, case.shape.head_dim, case.shape.tokens) for case in cases],
    )  # fmt: skip
    rows: list[benchmark.Measurement] = []
    path = None
    with progress(lambda: f"what was measured is in {path}" if path else "nothing was measured yet") as tell:
        for measured in benchmark.measure(
            cases, names, device, impl=impl, rounds=rounds, processes=processes, seconds=seconds, tell=tell
        ):
            rows += measured
            # anew with every mask: one that is cut off has what it measured
            path = save([*kept, *rows], facts, output, "masks")
            console.print(_masks_table(measured))
            for row in measured:
                if row.gate != "ok" and row.direction == benchmark.BOTH:
                    console.print(f"{row.attention}: {row.gate}", markup=False, highlight=False, soft_wrap=True)
    if not rows:
        raise ValueError(f"--seconds {seconds:g}: no mask was timed; give more")
    console.print(f"wrote {path}", soft_wrap=True, markup=False)
    if any(row.gate.startswith("FAILED") for row in rows):
        raise ValueError("some masks FAILED the correctness gate: their results are wrong, do not use them")


def _masks_table(rows: list) -> Table:
    """A line an attention: each direction's ms and TFLOPS, FlexAttention's time over it, and the best other's."""
    from benchmarks.mask_attentions import FLEX, PEERS

    one, ways = rows[0], list(dict.fromkeys(row.direction for row in rows))
    shape = f"D{one.head_dim} H{one.heads}/{one.kv_heads} B{one.batch} N{one.tokens}"
    named = "" if one.named_ms is None else f", by name in {one.named_ms:.1f}"
    read = "".join(f", read in {ms:.2f}" for ms in {row.read_ms for row in rows} - {None})
    made = f"BlockMask made in {one.block_mask_ms:.1f} ms{named}{read}"
    table = Table(title=f"{one.mask} {shape}, {one.shown:.1%} of pairs, {made}", title_justify="left", box=None)
    table.add_column("attention")
    for way in ways:
        for heading in (f"{way} ms / TFLOPS", "over flex", "over the best other"):
            table.add_column(heading, justify="left" if heading == "over the best other" else "right")
    for name in dict.fromkeys(row.attention for row in rows):
        cells = []
        for row in (row for row in rows if row.attention == name):
            if row.ms is None:
                cells += ["FAILED" if row.gate.startswith("FAILED") else "does not run", "", ""]
                continue
            flex, others = row.over.get(FLEX), {x: row.over[x] for x in PEERS if x in row.over and x != FLEX}
            best = min(others, key=others.get, default=None)
            cells += [
                f"{row.ms:.3f} / {row.tflops:.0f}{'' if row.gate == 'ok' else ' wrong'}",
                "" if flex is None else f"{flex:.2f}x",
                "" if best is None else f"{others[best]:.2f}x {best}",
            ]
        table.add_row(name, *cells)
    return table


@app.command()
def block(
    recipe: Annotated[str, typer.Option(help="Recipe of ours, a name or text.")] = "auto",
    head_dim: Annotated[list[int] | None, typer.Option(help="Repeat for several [default: 128, 64].")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Of a sequence; repeat [default: 2048, 4096, 8192; on a CPU 256].")
    ] = None,
    grouped: Annotated[bool, typer.Option(help="Also 32 heads of 128 that read 8 key heads.")] = True,
    rounds: commands.Rounds = 4,
    seconds: Annotated[float | None, typer.Option(help="Begin no shape that would end later.")] = None,
    device: commands.Device = "cuda",
    output: commands.Results = commands.RESULTS,
    commit: commands.Commit = None,
) -> None:
    """Speed of QK-norm, rotary embedding and attention, against compiled norm and rotary with BF16 attention."""
    from benchmarks import block as benchmark
    from sagebwd.cli.hardware import check_device
    from sagebwd.cli.outputs import check_folder
    from sagebwd.cli.results import environment, save
    from sagebwd.cli.terminal import console, progress, quiet
    from sagebwd.recipe import Recipe

    quiet()
    commands.check_at_least(1, rounds=rounds, tokens=min(tokens or [1]), head_dim=min(head_dim or [1]))
    for width in head_dim or ():
        if width % 2 or width > 256:
            raise ValueError(f"head_dim={width} is not of this benchmark; accepted: even numbers up to 256")
    check_device(device)
    check_folder("--output", output)
    Recipe.parse_or_auto(recipe)
    on_cpu = device == "cpu"
    lengths = tokens or ([256] if on_cpu else [2048, 4096, 8192])
    total = {"total": max(lengths)} if on_cpu else {}
    grid = benchmark.shapes(head_dim or (128, 64), lengths, grouped, **total)
    facts = environment(device, commit)
    rows: list[benchmark.Measurement] = []
    path, start, longest = None, time.perf_counter(), 0.0
    with progress(lambda: f"what was measured is in {path}" if path else "nothing was measured yet") as tell:
        for index, shape in enumerate(grid):
            began = time.perf_counter()
            if seconds is not None and began - start + longest > seconds:
                console.print(f"no time for {len(grid) - index} of {len(grid)}, from {shape} on")
                break

            def told(text: str, done: float, index: int = index, shape: object = shape) -> None:
                tell(f"{index + 1} of {len(grid)}, {shape}: {text}", (index + done) / len(grid))

            measured = benchmark.measure_shape(shape, recipe, device, rounds, tell=told)
            rows += measured
            longest = max(longest, time.perf_counter() - began)
            # anew with every shape: one that is cut off has what it measured
            path = save(rows, facts, output, "block")
            console.print(_block_table(str(shape), measured))
    if not rows:
        raise ValueError(f"--seconds {seconds:g}: no shape was timed; give more")
    console.print(f"wrote {path}", soft_wrap=True, markup=False)
    ours = [row for row in rows if row.name == benchmark.FUSED]
    if any(row.gate != "ok" for row in ours):
        raise ValueError("some shapes FAILED the correctness gate: their results are wrong, do not use them")


def _block_table(title: str, rows: list) -> Table:
    """A line a part and name: each direction's ms, and the others' time over it."""
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("part", "name", "fwd ms", "over", "fwd+bwd ms", "over", "kept MiB"):
        table.add_column(heading, justify="right" if heading.endswith(("ms", "MiB")) else "left")
    for part, name in dict.fromkeys((row.part, row.name) for row in rows):
        cells = []
        for row in rows:
            if (row.part, row.name) == (part, name):
                over = ", ".join(f"{peer} {ratio:.2f}x" for peer, ratio in row.over.items())
                gate = row.gate if row.gate.startswith("wrong") else row.gate.partition(":")[0]
                cells += [gate, ""] if row.ms is None else [f"{row.ms:.3f}", over]
                kept = "" if row.kept_bytes is None else f"{row.kept_bytes / 2**20:.0f}"
        table.add_row(part, name, *cells, kept)
    return table


app.command()(step_command.step)
app.command()(energy_command.energy)


def main() -> None:
    """Entry point of `python -m benchmarks`."""
    run(app, "benchmarks")


if __name__ == "__main__":  # processes that it starts import this too
    main()
