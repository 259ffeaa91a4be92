"""`python -m benchmarks step`, its options and its tables."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table

from benchmarks import commands


def step(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="llama-1b-128, llama-1b-64, llama-8b, llama-8b-float8, qwen3-4b, gemma3-4b, gpt-oss-20b, "
            "mla-192-128, wan-1.3b or flux; repeat [default: the first three, qwen3-4b, gemma3-4b]."
        ),
    ] = None,
    tokens: Annotated[
        list[str] | None, typer.Option(help="Of a sequence, as 8192 or 8K; repeat [default: 8K; on a CPU 64].")
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="Uncompiled alone [default: both].")] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="By torch.compile alone [default: both].")] = False,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="sdpa, sdpa-unmasked, eager, flash_attention_4, flash_attention_3, flex_attention, sagebwd or "
            "sagebwd+fuse; repeat [default: all that a model has]."
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Vocabularies are cut as they are [default: 16 of 1B, 3 to 6 of others].")
    ] = None,
    total: Annotated[int | None, typer.Option(help="Tokens of a step [default: 32768; on a CPU 128].")] = None,
    loss: Annotated[str, typer.Option(help="chunked, or plain: the model's own.")] = "chunked",
    rounds: commands.Rounds = 3,
    steps: Annotated[int, typer.Option(help="Timed steps of a round, behind one that is not.")] = 2,
    seconds: Annotated[float | None, typer.Option(help="Begin no model that would end later.")] = None,
    device: commands.Device = "cuda",
    output: commands.Results = commands.RESULTS,
    commit: commands.Commit = None,
    kernels_hash: commands.KernelsHash = None,
) -> None:
    """Time and memory of whole training steps of models that people train, with one attention or another."""
    from sagebwd.cli.terminal import console, duration, progress, quiet

    quiet()
    with commands.loading("models"):
        from benchmarks import step as benchmark
        from benchmarks import step_attentions, step_models
    from benchmarks.baselines import BrokenDevice
    from sagebwd.cli.hardware import check_device
    from sagebwd.cli.outputs import check_folder
    from sagebwd.cli.results import path_of, save

    on_cpu = device == "cpu"
    lengths = [commands.tokens_of(text) for text in tokens or ([str(benchmark.CPU_TOKENS)] if on_cpu else ["8K"])]
    commands.check_at_least(1, layers=layers, total=total, rounds=rounds, steps=steps)
    commands.check_known("model", model or (), step_models.MODELS)
    commands.check_known("attention", attention or (), step_attentions.NAMES)
    commands.check_known("loss", [loss], step_models.LOSSES)
    check_device(device)
    check_folder("--output", output)
    modes = [False] * eager + [True] * compiled or [False, True]
    cases = [
        benchmark.Case(name, length, mode)
        for name in model or step_models.DEFAULT for length in lengths for mode in modes
    ]  # fmt: skip
    total = total or (2 * benchmark.CPU_TOKENS if on_cpu else benchmark.TOTAL_TOKENS)
    facts = benchmark.facts(device, commit) | commands.kernels(kernels_hash)
    kept = commands.rows_of_others(
        path_of(facts, output, "step"), facts, ("model", "asked_tokens", "compiled"),
        [(case.model, case.tokens, case.compiled) for case in cases],
    )  # fmt: skip
    rows: list[benchmark.Measurement] = []
    path, start, longest = None, time.perf_counter(), 0.0
    with progress(lambda: f"what was measured is in {path}" if path else "nothing was measured yet") as tell:
        for index, case in enumerate(cases):
            if not benchmark.attentions_of(case, attention):
                console.print(f"{case} has none of these attentions: {', '.join(attention)}")
                continue
            began = time.perf_counter()
            if seconds is not None and began - start + longest > seconds:
                console.print(f"no time for {len(cases) - index} of {len(cases)}, from {case} on")
                break

            def told(text: str, done: float, index: int = index, case: object = case) -> None:
                tell(f"{index + 1} of {len(cases)}, {case}: {text}", (index + done) / len(cases))

            try:
                measured = benchmark.measure(
                    case, attention, device, layers=layers, total=total, loss=loss, rounds=rounds, steps=steps,
                    tell=told,
                )  # fmt: skip
            except ImportError as error:
                console.print(f"{case} does not run: {error}", markup=False, highlight=False, soft_wrap=True)
                continue
            except BrokenDevice as error:
                if path:
                    console.print(f"wrote {path}", soft_wrap=True, markup=False)
                raise ValueError(f"{case}: {error}; give the others by --attention") from error
            longest = max(longest, time.perf_counter() - began)
            rows += measured
            # anew with every case: a run that is cut off has what it measured
            path = save([*kept, *rows], facts, output, "step")
            console.print(_table(case, measured))
            for row in measured:
                if row.gate != "ok":
                    console.print(f"{row.attention}: {row.gate}", markup=False, highlight=False, soft_wrap=True)
            console.print(f"took {duration(time.perf_counter() - began)}")
    if not rows:
        ways = "more --seconds, models whose packages are installed, or attentions that they have"
        raise ValueError(f"no model was timed: give {ways}")
    console.print(f"wrote {path}", soft_wrap=True, markup=False)
    if any(row.gate.startswith("wrong") for row in rows if step_attentions.is_ours(row.attention)):
        raise ValueError("some of ours are wrong: do not use their results")


def _table(case: object, rows: list) -> Table:
    """A line an attention, with the seconds that it took to start and to time."""
    one = rows[0]
    cut = f"{one.layers} of {one.whole_layers} layers" if one.layers < one.whole_layers else f"{one.layers} layers"
    title = f"{case}, batch {one.batch}, {cut}, {one.parameters / 1e6:.0f}M weights, {one.loss} loss"
    table = Table(title=title, title_justify="left", box=None)
    headings = "ms", "host ms", "over", "tokens/s", "peak GiB", "in attention", "loss", "cosine", "start s", "timing s"
    for heading in ("attention", *headings):
        table.add_column(heading, justify="left" if heading in ("attention", "over") else "right")
    for row in rows:
        if row.ms is None:
            table.add_row(row.attention, "does not run")
            continue
        table.add_row(
            row.attention,
            f"{row.ms:.1f}{'' if row.gate == 'ok' else ' wrong'}",
            f"{row.host_ms:.1f}",
            "" if row.over_best is None else f"{row.over_best:.2f}x {row.best}",
            f"{row.tokens_per_s:,.0f}",
            "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}",
            "" if row.attention_share is None else f"{row.attention_share:.0%}",
            f"{row.loss_value:.3f}",
            f"{row.gradient_cosine:.4f}",
            f"{row.start_s:.1f}",
            f"{row.timing_s:.1f}",
        )
    return table
