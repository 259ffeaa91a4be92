"""Speed of block masks, end to end, against FlexAttention, FlashAttention and SDPA under the same masks.

All attentions of a case take turns in rounds and are compared by the median, as dense ones are; one that takes over
three times as long as the fastest is timed once. What is timed is a call as a user makes it, forward alone or forward
and backward: under a mask that is passed as it is, which ours reads in each call, and under one that was read once.
Before they are timed, one key head of ours is held against the recipe's emulator, and one of a peer's against
attention in FP64 under the same mask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch._inductor.config
from torch import Tensor

from benchmarks.baselines import Attention, reason_of
from benchmarks.correctness import Outcome, emulated, gate, wrong_tensors
from benchmarks.mask_attentions import BAND, FLEX, PACKED, PEERS, READ, Given, attentions, recipe_of
from benchmarks.mask_cases import Case
from benchmarks.timer import from_rest
from sagebwd import dispatch
from sagebwd.call import Ask
from sagebwd.cli.measure import COMPILING
from sagebwd.cli.processes import run_in_processes
from sagebwd.cli.timer import LEAD_MS, ROUND_MS, ROUNDS, time_contenders
from sagebwd.kernels.masks.blocks import of_tensor
from sagebwd.masks import kinds
from sagebwd.masks.mask import Mask
from sagebwd.recipe import Recipe

FORWARD, BOTH = DIRECTIONS = ("fwd", "fwd+bwd")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Measurement:
    """One row of the result file; times in ms, rates in TFLOPS of the pairs that the mask shows.

    attention: a recipe, alone or behind one of `FORMS` of `benchmarks.mask_attentions`, or one of its `PEERS`. impl:
    who runs ours. shown: the share of all pairs. host_ms: how long the host took to issue what the device took ms for;
    None of what was timed once. read_ms: how long reading the mask once takes, to the device's end; of rows whose mask
    was read so. block_mask_ms, named_ms: how long torch's create_block_mask takes, and `sagebwd.block_masks` where the
    mask has a name. gate: "ok", "FAILED" of ours that is not its recipe or breaks, "wrong" of a peer, or why it does
    not run. over: the time of each peer that is right, and of the packed call by the same recipe, over this one; of
    rows that are right.
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
    read_ms: float | None
    block_mask_ms: float
    named_ms: float | None
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
    inputs, given = case.shape.inputs(device, torch.bfloat16), _given(case, device)
    mask_mod, sinks = given.block_mask.mask_mod, given.sinks
    block_mask_ms, named_ms = (_making_ms(make, device) for make in (
        lambda: case.block_mask(mask_mod, device), lambda: case.named(device),
    ))  # fmt: skip
    mask, beside = of_tensor(given.elements), None if sinks is None else sinks.detach()
    exact = emulated(case.shape, Recipe.named("full"), inputs, torch.float64, mask, sinks=beside)
    found, gates = attentions(given, names, impl), {}
    for number, (name, attention) in enumerate(found.items(), 1):
        began = time.perf_counter()
        check = partial(_peer_gates, case, attention, exact, inputs)
        if name not in PEERS:
            check = partial(_our_gates, case, name, attention, mask, inputs, beside)
        gates[name] = check()
        tell(
            f"{case}, {name}: {gates[name][BOTH]}, compiled and checked in {time.perf_counter() - began:.0f} s",
            number / (len(found) + len(DIRECTIONS)),
        )
    read_ms = _making_ms(given.read, device) if any(name.startswith(READ) for name in found) else None
    rows, shown = [], mask.elements.count_nonzero().item() / mask.elements.numel()
    for number, direction in enumerate(DIRECTIONS):
        tell(f"{case}, timing {direction}", (len(found) + number) / (len(found) + len(DIRECTIONS)))
        timed = {name: found[name] for name in found if gates[name][direction].startswith(("ok", "wrong"))}
        runs = {name: _run(attention, inputs, direction, sinks) for name, attention in timed.items()}
        times = time_contenders(runs, device, rounds, ROUND_MS, LEAD_MS, FLEX)
        right = {name: ms for name, (ms, _) in times.items() if gates[name][direction] == "ok"}
        for name in found:
            ms, host_ms = times.get(name, (None, None))
            shape = case.shape
            flops = shape.flops("fwd") + (shape.flops("bwd") if direction == BOTH else 0)
            packed = () if name in PEERS else (f"{PACKED}{recipe_of(name)}",)
            peers = {peer: right[peer] for peer in (*PEERS, *packed) if peer in right and peer != name}
            rows.append(Measurement(
                case.kind, name, _impl(case, name, impl, inputs), shape.head_dim, shape.heads, shape.kv_heads,
                shape.batch, shape.tokens, shown, direction, ms, host_ms,
                None if ms is None else shown * flops / ms * 1e-9, read_ms if name.startswith(READ) else None,
                block_mask_ms, named_ms, gates[name][direction],
                {peer: theirs / ms for peer, theirs in peers.items()} if name in right else {},
            ))  # fmt: skip
    return rows


def _given(case: Case, device: str) -> Given:
    """What the attentions of a case are given."""
    mask_mod = case.mask_mod(device)
    return Given(case, case.block_mask(mask_mod, device), case.dense(mask_mod, device), case.sinks(device), device)


def _making_ms(make: Callable[[], object], device: str) -> float | None:
    """How long a mask takes to be made that was made before; None where there is none."""
    found, _, _ = from_rest(make, device)
    return None if found is None else from_rest(make, device)[1]


def _run(
    attention: Attention, inputs: Inputs, direction: str, sinks: Tensor | None = None
) -> Callable[[], object]:  # fmt: skip
    """sinks: those of the attention, whose gradient is then computed too."""
    *tensors, do = inputs
    if direction == FORWARD:
        return torch.no_grad()(lambda: attention(*tensors))
    leaves = [x.detach().requires_grad_() for x in tensors]
    wanted = leaves if sinks is None else [*leaves, sinks]
    return lambda: torch.autograd.grad(attention(*leaves), wanted, do)


def _problem(attention: Attention, inputs: Inputs, direction: str) -> str | None:
    """Why an attention does not run, tried once; None where it does."""
    try:
        _run(attention, inputs, direction)()
    except Exception as error:  # a compiler of another project raises what it likes
        return reason_of(error, inputs[0].device)
    return None


def _our_gates(
    case: Case, name: str, attention: Attention, mask: Mask, inputs: Inputs, sinks: Tensor | None
) -> dict[str, str]:
    """Whether a recipe's kernels are the recipe, of packed sequences in the last."""
    problem = _problem(attention, inputs, BOTH)
    if problem is not None:
        refused = problem.startswith(f"does not run: {NotImplementedError.__name__}")
        return dict.fromkeys(DIRECTIONS, problem if refused else f"FAILED, {problem}")
    call = attention, recipe_of(name), inputs
    if name.startswith(PACKED):
        shape, last = replace(case.shape, is_causal=True), slice(case.bounds()[-2], None)
        return dict.fromkeys(DIRECTIONS, gate(shape, *call, tokens=last))
    if name.startswith(BAND):
        return dict.fromkeys(DIRECTIONS, gate(case.shape, *call, band=case.band(), sinks=sinks))
    return dict.fromkeys(DIRECTIONS, gate(case.shape, *call, mask, sinks=sinks))


def _peer_gates(case: Case, attention: Attention, exact: Outcome, inputs: Inputs) -> dict[str, str]:
    """Forward counts by its O alone, forward and backward by the gradients too."""
    problems = {direction: _problem(attention, inputs, direction) for direction in DIRECTIONS}
    if problems[FORWARD] is not None:
        return problems | {BOTH: problems[BOTH] or problems[FORWARD]}
    backward = problems[BOTH] is None
    wrong = wrong_tensors(case.shape, attention, exact, inputs, backward=backward)
    found = {FORWARD: [x for x in wrong if x == "o"], BOTH: list(wrong)}
    gates = {way: ", ".join(f"{x} {wrong[x]:.2f}" for x in names) for way, names in found.items()}
    gates = {way: f"wrong: {text}" if text else "ok" for way, text in gates.items()}
    return gates if backward else gates | {BOTH: problems[BOTH]}


def _impl(case: Case, name: str, impl: str | None, inputs: Inputs) -> str | None:
    """Who runs each direction of ours, as `sagebwd.dispatch.Choice.name` has it."""
    if name in PEERS:
        return None
    kind = kinds.PACKED if name.startswith(PACKED) else kinds.MASK
    if name.startswith(BAND):
        kind = kinds.CAUSAL if case.band().lower is None else kinds.WINDOW
    try:
        return dispatch.choose(Ask.of(inputs[0], inputs[2], recipe_of(name), impl, kind)).name
    except NotImplementedError:
        return None


def _compile(
    cases: list[Case], names: tuple[str, ...], device: str, impl: str | None, processes: int,
    tell: Callable[..., object],
) -> None:  # fmt: skip
    """Call each attention of each case once, in several processes: what they compile stays on disk.

    All of ours compile much the same; each peer compiles in a process of its own.
    """
    apart = [tuple(x for x in names if x not in PEERS), *((x,) for x in names if x in PEERS)]
    work = [(case, some, device, impl) for some in apart if some for case in cases]
    tell(f"compiling for {len(cases)} cases in {processes} processes")
    for done, (index, error) in enumerate(run_in_processes(_call, work, processes), 1):
        # of a process that died: what it lacks is compiled when it is timed
        case, some, *_ = work[index]
        text = f"compiled {done} of {len(work)}: {case}, {', '.join(some)}{'' if error is None else f': {error}'}"
        tell(text, COMPILING * done / len(work))


def _call(case: Case, names: tuple[str, ...], device: str, impl: str | None) -> None:
    torch._inductor.config.compile_threads = 1  # the processes are as many as there is work for
    inputs = case.shape.inputs(device, torch.bfloat16)
    for attention in attentions(_given(case, device), names, impl).values():
        for direction in DIRECTIONS:
            _problem(attention, inputs, direction)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # the processes share its memory
