"""Speed of block masks, end to end, against FlexAttention and FlashAttention-4 under the same masks.

All attentions of a case take turns in rounds and are compared by the median, as dense ones are. What is timed is
a call as a user makes it, forward alone or forward and backward, under a mask that was seen before; what a call costs
more under a mask that is new is a column of its own. Before they are timed, one key head of ours is held against the
recipe's emulator, and one of a peer's against attention in FP64 under the same mask.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch._inductor.config
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from benchmarks.correctness import Outcome, emulated, gate, wrong_tensors
from benchmarks.mask_cases import DENSE, PACKED, PEERS, Attention, Case, attentions
from benchmarks.timer import from_rest
from sagebwd import dispatch
from sagebwd.auto import model
from sagebwd.call import Ask
from sagebwd.cli.measure import COMPILING
from sagebwd.cli.processes import run_in_processes
from sagebwd.cli.timer import ROUNDS, time_interleaved
from sagebwd.masks.mask import Mask, of_tensor
from sagebwd.recipe import Recipe

FORWARD, BOTH = DIRECTIONS = ("fwd", "fwd+bwd")
NEW_MASKS = 3
"""Masks that are new, of which the median counts."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Measurement:
    """One row of the result file; times in ms, rates in TFLOPS of the pairs that the mask shows.

    attention: a recipe, a packed one, or one of `PEERS`. impl: who runs ours. shown: the share of all pairs. host_ms:
    how long the host took to issue what the device took ms for. mask_ms: what the first call under a BlockMask costs
    more; None of what reads none. block_mask_ms: how long torch takes to make the BlockMask. gate: "ok", "FAILED" of
    ours that is not its recipe or breaks, "wrong" of a peer, or why it does not run. over: the time of each peer that
    is right, and of the packed call by the same recipe, over this one; of rows that are right.
    """

    mask: str
    attention: str
    impl: str | None
    head_dim: int
    heads: int
    kv_heads: int
    batch: int
    tokens: int
    shown: float
    direction: str
    ms: float | None
    host_ms: float | None
    tflops: float | None
    mask_ms: float | None
    block_mask_ms: float
    gate: str
    over: dict[str, float]


def measure(
    cases: list[Case], names: Iterable[str], device: str, *, impl: str | None = None, rounds: int = ROUNDS,
    processes: int = 0, seconds: float | None = None, tell: Callable[..., object] = lambda *_: None,
) -> Iterator[list[Measurement]]:  # fmt: skip
    """The rows of each case, one case after another.

    processes: compile in so many at once before anything is timed, so that timing finds it on disk; 0 for none.
    seconds: begin no case that would end later, as long as the longest so far. tell: is told what begins, and which
    share of the whole is done.
    """
    start, longest, compiling = time.perf_counter(), 0.0, COMPILING if processes else 0.0
    if processes:
        _compile(cases, tuple(names), device, impl, processes, tell)
    for number, case in enumerate(cases):
        began = time.perf_counter()
        if seconds is not None and began - start + longest > seconds:
            tell(f"no time for {len(cases) - number} of {len(cases)}, from {case} on")
            return

        def told(text: str, done: float, number: int = number) -> None:
            share = compiling + (1 - compiling) * (number + done) / len(cases)
            tell(f"{number + 1} of {len(cases)}: {text}", share)

        yield measure_case(case, names, device, impl, rounds, told)
        longest = max(longest, time.perf_counter() - began)


def measure_case(
    case: Case, names: Iterable[str], device: str, impl: str | None = None, rounds: int = ROUNDS,
    tell: Callable[[str, float], object] = lambda *_: None,
) -> list[Measurement]:  # fmt: skip
    """A row of each attention and direction."""
    tell(f"{case}", 0.0)
    inputs, mask_mod = case.shape.inputs(device, torch.bfloat16), case.mask_mod(device)
    block_mask = case.block_mask(mask_mod, device)
    _, block_mask_ms, _ = from_rest(lambda: case.block_mask(mask_mod, device), device)
    mask, sinks = of_tensor(case.dense(mask_mod, device)), case.sinks(device)
    beside = None if sinks is None else sinks.detach()
    exact = emulated(case.shape, Recipe.named("full"), inputs, torch.float64, mask, sinks=beside)
    found, gates = attentions(case, names, device, impl, sinks), {}
    for number, (name, attention) in enumerate(found.items(), 1):
        began = time.perf_counter()
        check = partial(_peer_gates, case, attention, exact, inputs, block_mask)
        if name not in PEERS:
            check = partial(_our_gates, case, name, attention, mask, inputs, block_mask, beside)
        gates[name] = check()
        tell(
            f"{case}, {name}: {gates[name][BOTH]}, compiled and checked in {time.perf_counter() - began:.0f} s",
            number / (len(found) + len(DIRECTIONS)),
        )
    rows, shown = [], mask.elements.count_nonzero().item() / mask.elements.numel()
    for number, direction in enumerate(DIRECTIONS):
        tell(f"{case}, timing {direction}", (len(found) + number) / (len(found) + len(DIRECTIONS)))
        timed = {name: found[name] for name in found if gates[name][direction].startswith(("ok", "wrong"))}
        runs = {name: _run(attention, inputs, block_mask, direction, sinks) for name, attention in timed.items()}
        times = time_interleaved(runs, device, rounds)
        readers = [name for name in timed if name != DENSE and not name.startswith(PACKED) and sinks is None]
        new = {name: _new_mask_ms(timed[name], inputs, block_mask, direction, device) for name in readers}
        right = {name: ms for name, (ms, _) in times.items() if gates[name][direction] == "ok"}
        for name in found:
            ms, host_ms = times.get(name, (None, None))
            shape = case.shape
            flops = shape.flops("fwd") + (shape.flops("bwd") if direction == BOTH else 0)
            peers = {peer: right[peer] for peer in (*PEERS, PACKED + name) if peer in right and peer != name}
            rows.append(Measurement(
                case.kind, name, _impl(case, name, impl, inputs), shape.head_dim, shape.heads, shape.kv_heads,
                shape.batch, shape.tokens, shown, direction, ms, host_ms,
                None if ms is None else shown * flops / ms * 1e-9, new.get(name), block_mask_ms,
                gates[name][direction], {peer: theirs / ms for peer, theirs in peers.items()} if name in right else {},
            ))  # fmt: skip
    return rows


def _run(
    attention: Attention, inputs: Inputs, block_mask: BlockMask, direction: str, sinks: Tensor | None = None
) -> Callable[[], object]:
    """sinks: those of the attention, whose gradient is then computed too."""
    *tensors, do = inputs
    if direction == FORWARD:
        return torch.no_grad()(lambda: attention(*tensors, block_mask))
    leaves = [x.detach().requires_grad_() for x in tensors]
    wanted = leaves if sinks is None else [*leaves, sinks]
    return lambda: torch.autograd.grad(attention(*leaves, block_mask), wanted, do)


def _problem(attention: Attention, inputs: Inputs, block_mask: BlockMask, direction: str) -> str | None:
    """Why an attention does not run, tried once; None where it does."""
    try:
        _run(attention, inputs, block_mask, direction)()
    except Exception as error:  # a compiler of another project raises what it likes
        lines = str(error).splitlines() or [""]
        return f"does not run: {type(error).__name__}: {lines[0][:300]}"
    return None


def _our_gates(
    case: Case, name: str, attention: Attention, mask: Mask, inputs: Inputs, block_mask: BlockMask,
    sinks: Tensor | None,
) -> dict[str, str]:  # fmt: skip
    """Whether a recipe's kernels are the recipe, of packed sequences in the last."""
    problem = _problem(attention, inputs, block_mask, BOTH)
    if problem is not None:
        refused = problem.startswith(f"does not run: {NotImplementedError.__name__}")
        return dict.fromkeys(DIRECTIONS, problem if refused else f"FAILED, {problem}")
    recipe, call = Recipe.parse(name.removeprefix(PACKED)), _under(attention, block_mask)
    if name.startswith(PACKED):
        shape, last = replace(case.shape, is_causal=True), slice(case.bounds()[-2], None)
        return dict.fromkeys(DIRECTIONS, gate(shape, call, recipe, inputs, tokens=last))
    if sinks is not None:
        return dict.fromkeys(DIRECTIONS, gate(case.shape, call, recipe, inputs, band=case.band(), sinks=sinks))
    return dict.fromkeys(DIRECTIONS, gate(case.shape, call, recipe, inputs, mask))


def _peer_gates(
    case: Case, attention: Attention, exact: Outcome, inputs: Inputs, block_mask: BlockMask
) -> dict[str, str]:
    """Forward counts by its O alone, forward and backward by the gradients too."""
    problems = {direction: _problem(attention, inputs, block_mask, direction) for direction in DIRECTIONS}
    if problems[FORWARD] is not None:
        return problems | {BOTH: problems[BOTH] or problems[FORWARD]}
    call, backward = _under(attention, block_mask), problems[BOTH] is None
    wrong = wrong_tensors(case.shape, call, exact, inputs, backward=backward)
    found = {FORWARD: [x for x in wrong if x == "o"], BOTH: list(wrong)}
    gates = {way: ", ".join(f"{x} {wrong[x]:.2f}" for x in names) for way, names in found.items()}
    gates = {way: f"wrong: {text}" if text else "ok" for way, text in gates.items()}
    return gates if backward else gates | {BOTH: problems[BOTH]}


def _under(attention: Attention, block_mask: BlockMask) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attention(q, k, v, block_mask)


def _impl(case: Case, name: str, impl: str | None, inputs: Inputs) -> str | None:
    """Who runs each direction of ours, as `sagebwd.dispatch.Choice.name` has it."""
    if name in PEERS:
        return None
    kind = model.PACKED if name.startswith(PACKED) else model.MASK
    if (band := case.band()) is not None:
        kind = model.CAUSAL if band.lower is None else model.WINDOW
    try:
        return dispatch.choose(Ask.of(inputs[0], inputs[2], Recipe.parse(name.removeprefix(PACKED)), impl, kind)).name
    except NotImplementedError:
        return None


def _new_mask_ms(attention: Attention, inputs: Inputs, block_mask: BlockMask, direction: str, device: str) -> float:
    """What a call costs more under a BlockMask that it has not seen than under the same one again."""
    more = []
    for _ in range(NEW_MASKS):
        run = _run(attention, inputs, block_mask.to(device), direction)  # another object that shows the same
        first, again = (from_rest(run, device)[1] for _ in range(2))
        more.append(first - again)
    return max(0.0, statistics.median(more))


def _compile(
    cases: list[Case], names: tuple[str, ...], device: str, impl: str | None, processes: int,
    tell: Callable[..., object],
) -> None:  # fmt: skip
    """Call each attention of each case once, in several processes: what they compile stays on disk."""
    tell(f"compiling for {len(cases)} cases in {processes} processes")
    calls = run_in_processes(_call, [(case, names, device, impl) for case in cases], processes)
    for done, (index, error) in enumerate(calls, 1):
        # of a process that died: what it lacks is compiled when it is timed
        text = f"compiled {done} of {len(cases)}: {cases[index]}{'' if error is None else f', {error}'}"
        tell(text, COMPILING * done / len(cases))


def _call(case: Case, names: tuple[str, ...], device: str, impl: str | None) -> None:
    torch._inductor.config.compile_threads = 1  # the processes are as many as there is work for
    inputs, block_mask = case.shape.inputs(device, torch.bfloat16), case.block_mask(case.mask_mod(device), device)
    for attention in attentions(case, names, device, impl, case.sinks(device)).values():
        for direction in DIRECTIONS:
            _problem(attention, inputs, block_mask, direction)
