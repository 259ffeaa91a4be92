"""`python -m benchmarks energy`, its options and its tables."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from benchmarks import commands


def energy(
    recipe: commands.Recipes = None,
    impl: Annotated[str | None, typer.Option(help="Kernel family [default: the fastest].")] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="cudnn, fa2, fa3 or fa4; repeat [default: all that run but fa2].")
    ] = None,
    head_dim: Annotated[list[str] | None, typer.Option(help="Of the grid; repeat [default: 64, 128].")] = None,
    tokens: Annotated[
        list[str] | None, typer.Option(help="Of a sequence, as 8192 or 8K; repeat [default: 4K, 16K].")
    ] = None,
    causal: Annotated[
        bool | None, typer.Option(help="Under a causal mask, or without a mask [default: both].")
    ] = None,
    nvidia: Annotated[
        bool, typer.Option("--nvidia", help="NVIDIA's shapes in the grid's place: batch 2, 64 heads on 8, 128.")
    ] = False,
    passes: Annotated[bool, typer.Option("--passes", help="Each launch of our calls, in the calls' place.")] = False,
    products: Annotated[
        bool, typer.Option("--products", help="Products and copies by themselves, in the calls' place.")
    ] = False,
    rounds: commands.Rounds = 3,
    lead: Annotated[float, typer.Option(help="Seconds of a load until its clock has settled.")] = 0.3,
    window: Annotated[float, typer.Option(help="Seconds of a load that are measured.")] = 1.0,
    device: Annotated[str, typer.Option(help="A GPU.")] = "cuda",
    output: commands.Results = commands.RESULTS,
    commit: commands.Commit = None,
) -> None:
    """Energy of calls under a steady load, by the GPU's counter, with clock and temperature, against BF16 kernels."""
    from benchmarks import energy as benchmark
    from benchmarks import energy_passes, energy_products, meter, shapes
    from benchmarks.attention import CALL, call_of, timed_both_ways
    from benchmarks.baselines import may_claim_best
    from sagebwd.cli.hardware import check_device
    from sagebwd.cli.outputs import check_folder
    from sagebwd.cli.results import environment, path_of, save
    from sagebwd.cli.terminal import console, progress
    from sagebwd.dispatch import check_known
    from sagebwd.recipe import Recipe

    commands.check_at_least(1, rounds=rounds)
    for name, seconds in (("lead", lead), ("window", window)):
        if seconds <= 0:
            raise ValueError(f"{name}={seconds:g} must be more than 0 seconds")
    if passes and products:
        raise ValueError("expected --passes or --products, not both")
    if products and (recipe or impl or peer or head_dim or tokens or nvidia or causal is not None):
        raise ValueError("--products measures no calls; expected no option that chooses among them beside it")
    if passes and peer:
        raise ValueError("--passes measures our launches; expected no --peer beside it")
    if nvidia and head_dim:
        raise ValueError("--nvidia has shapes of its own; expected no --head-dim beside it")
    commands.check_known("peer", peer or (), ("cudnn", "fa2", "fa3", "fa4", "sdpa"))
    check_device(device)
    check_folder("--output", output)
    texts = recipe or (["mixed"] if passes else ["mixed", "token", "full"])
    for text in texts:
        Recipe.parse(text)
    check_known(impl)
    impls = None if impl is None else [impl]
    counter = meter.Meter(device)
    if counter.source != meter.COUNTER:
        console.print("this GPU's energy counter is not readable: joules are power that was read, times time")
    facts = environment(device, commit)
    settings = {"meter": counter, "device": device, "rounds": rounds, "lead": lead, "window": window}
    if products:
        with progress(lambda: "nothing was written") as tell:
            rows = energy_products.measure(energy_products.microloads(device), **settings, tell=tell)
        console.print(_products_table(rows))
        console.print(_slowed(rows), end="")
        console.print(f"wrote {save(rows, facts, output, 'energy-products')}", soft_wrap=True, markup=False)
        return
    lengths = [commands.tokens_of(text) for text in tokens or ("4K", "16K")]
    grid = (
        shapes.nvidia_shapes(lengths, device)
        if nvidia
        else shapes.standard_grid(head_dim or shapes.DEFAULT_WIDTHS, lengths, device)
    )
    grid = [shape for shape in grid if causal in (None, shape.is_causal)]
    kind = "energy-passes" if passes else "energy"
    kept = commands.rows_of_others(path_of(facts, output, kind), facts, CALL, [call_of(shape) for shape in grid])
    rows, path = [], None
    with progress(lambda: f"what was measured is in {path}" if path else "nothing was measured yet") as tell:
        for index, shape in enumerate(grid):

            def told(text: str, done: float, index: int = index, shape: object = shape) -> None:
                tell(f"{index + 1} of {len(grid)}, {shape}: {text}", (index + done) / len(grid))

            if passes:
                for text in texts:
                    rows += (found := energy_passes.measure_shape(shape, text, impls, **settings, tell=told))
                    console.print(_passes_table(f"{shape}, {text}", found))
                    console.print(_slowed(found), end="")
            else:
                rows += (found := benchmark.measure_shape(shape, texts, impls, peer, **settings, tell=told))
                console.print(_calls_table(str(shape), found))
                console.print(_slowed(found), end="")
            # anew with every shape: one that is cut off has what it measured
            path = save([*kept, *rows], facts, output, kind)
    console.print(f"wrote {path}", soft_wrap=True, markup=False)
    if not passes and not may_claim_best(timed_both_ways(rows), device):
        console.print("no claim over the best baseline: FlashAttention-4 or -3 is not among these")
    if any(row.gate == "FAILED" for row in rows):
        raise ValueError("some shapes FAILED the correctness gate: their results are wrong, do not use them")


COSTS = "ms", "slower", "mJ", "spread", "mJ above rest", "W", "MHz", "C"


def _table(title: str, names: tuple[str, ...], *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for heading in (*names, *headings):
        table.add_column(heading, justify="left" if heading in names else "right")
    return table


def _costs(row: object) -> list[str]:
    """Cells of `COSTS`."""
    mhz = f"{row.mhz:.0f}"
    joules = f"{row.joules * 1e3:.2f}", f"{row.spread:.1%}", f"{row.above_rest * 1e3:.2f}"
    return [f"{row.ms:.4f}", f"{row.slower:.1%}", *joules, f"{row.watts:.0f}", mhz, f"{row.celsius:.0f}"]


def _slowed(rows: list) -> str:
    """A warning of loads that the meter slows, or nothing."""
    from benchmarks.energy import SLOWED

    slowed = [row.slower for row in rows if row.slower is not None and row.slower > SLOWED]
    if not slowed:
        return ""
    return (
        f"{len(slowed)} of {len(rows)} loads take over {SLOWED:.0%} longer while the meter is read, at most "
        f"{max(slowed):.0%} (slower): their energy and time are not those of the call by itself\n"
    )


def _rest(rows: list) -> str:
    """What is of all rows."""
    row = next((row for row in rows if row.joules is not None), None)
    if row is None:
        return ""
    updates, late = min(row.updates for row in rows if row.updates), max(row.resolution or 0 for row in rows)
    rest = " and ".join(f"{watts:.0f}" for watts in row.rest_watts)
    return f"; at rest {rest} W; by {row.source}, {updates} updates a load at least, read late by {late:.1%} at most"


def _calls_table(title: str, rows: list) -> Table:
    headings = *COSTS, "J a TFLOP", "energy over best", "time over it"
    table = _table(title + _rest(rows), ("attention", "direction"), *headings)
    for row in rows:
        if row.ms is None:
            table.add_row(f"{row.impl} {row.recipe}", row.direction, row.gate)
            continue
        over = ["", ""] if row.peer is None else [f"{row.energy_over:.2f}x {row.peer}", f"{row.time_over:.2f}x"]
        wrong = "" if row.gate == "ok" else " (wrong)"
        table.add_row(
            f"{row.impl} {row.recipe}{wrong}", row.direction, *_costs(row), f"{row.joules_per_tflop:.2f}", *over
        )
    return table


def _passes_table(title: str, rows: list) -> Table:
    """Launches in their order, their sum, and the call, whose joules they are shares of."""
    table = _table(title + _rest(rows), ("launch", "direction"), *COSTS, "of the call")
    if rows[-1].ms is None:
        table.add_row(rows[-1].kernel, rows[-1].direction, rows[-1].gate)
        return table
    *launches, call = rows
    for row in rows:
        table.add_row(row.kernel, row.direction, *_costs(row), f"{row.joules / call.joules:.1%}")
    ms, joules = (sum(getattr(row, name) for row in launches) for name in ("ms", "joules"))
    above = sum(row.above_rest for row in launches)
    of_call = "", "", "", f"{joules / call.joules:.1%}"
    table.add_row("all launches", "", f"{ms:.4f}", "", f"{joules * 1e3:.2f}", "", f"{above * 1e3:.2f}", *of_call)
    return table


def _products_table(rows: list) -> Table:
    headings = *COSTS, "pJ each", "above rest", "10^12/s"
    table = _table("matrix products and copies" + _rest(rows), ("load", "of", "kernel"), *headings)
    for row in rows:
        each = f"{row.picojoules:.3f}", f"{row.picojoules_above_rest:.3f}", f"{row.rate:.1f}"
        table.add_row(row.name, row.of, row.kernel[:40], *_costs(row), *each)
    return table
