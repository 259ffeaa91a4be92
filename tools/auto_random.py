"""Whether `auto` loses on calls that nobody chose: `python -m tools.auto_random --seed 1 --output FOLDER`, on a GPU.

It draws calls by a seed: widths, lengths from 256 to 64K tokens, batch, heads, groups, masks, packed sequences,
forward and both. Each is timed under `auto`, in low precision, by torch's pick and each of its backends, and by
FlashAttention-4 and -3 where they are installed; what takes three times as long as the fastest is timed once. The
output and gradients of each are compared with the first of torch and the peers; who is wrong does not count. It
prints the least and the geometric mean of `auto`'s speed over the fastest, how often the model names who is within 3%
of the fastest, and how often the timer itself is that far off: `auto` beside the contender that it ran. Each call's
times go into ``auto_<gpu>_<date>_<commit>.json``: with the same seed and commit a second run goes on where
``--seconds`` ended the first. Exit code 1 where `auto` has less than `LEAST` over the fastest, or `LEAST_BELOW` in
calls that the host decides.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean

import torch
from torch import Tensor

from sagebwd import arguments, dispatch
from sagebwd.auto import choice as auto_choice
from sagebwd.auto.contenders import LOW, PEERS, PICKED, TORCH, VARLEN
from sagebwd.auto.model import DIRECTIONS, MARGIN
from sagebwd.call import Ask
from sagebwd.cli import contenders
from sagebwd.cli.contenders import Attention, takes
from sagebwd.cli.hardware import check_device
from sagebwd.cli.measure import FA4_CACHE, MOST_PROCESSES, compile_run, run_of
from sagebwd.cli.outputs import check_folder
from sagebwd.cli.processes import run_in_processes
from sagebwd.cli.results import environment, path_of, save
from sagebwd.cli.timer import time_contenders
from sagebwd.masks.kinds import CAUSAL, FULL, MASK, PACKED, PADDING, WINDOW
from sagebwd.recipe import AUTO
from sagebwd.reference.metrics import relative_l2
from tools.auto_shapes import Call, attentions

AUTO_RUN = "auto"
# Ms, from which on the GPU decides, and how fast `auto` is to be over the fastest from there on and below.
HOST_MS, LEAST, LEAST_BELOW = 0.3, 0.95, 0.90
# A choice is right that takes at most so many times the fastest's ms.
RIGHT = 1.03
# Relative L2 of an output and of gradients, beyond which a contender is wrong: low precision has .02 and .05 of it.
WRONG = 0.1, 0.3
ROUNDS, ROUND_MS, LEAD_MS = 8, 8.0, 30.0
# Of a call's forward: elements of Q, and operations, 4 ms at a thousand TFLOPS.
MOST_ELEMENTS, MOST_FLOPS = 1 << 26, 4e12
# The share of the seconds that compiling may take.
COMPILING = 0.5

KINDS = {CAUSAL: 6, FULL: 5, WINDOW: 3, PACKED: 3, PADDING: 2, MASK: 1}
WIDTHS = {
    (128, 128): 8, (64, 64): 6, (256, 256): 3, (192, 128): 2, (192, 192): 1, (96, 96): 2, (80, 80): 2, (112, 112): 1,
    (72, 72): 1,
}  # fmt: skip
GROUPS = {1: 6, 4: 2, 8: 1, 2: 1}
# Powers of two of a sequence's tokens; masks of elements are of the square.
LENGTHS = {MASK: (8, 13), PADDING: (8, 14)}
ALL_LENGTHS = 8, 16


def drawn(count: int, seed: int) -> list[Call]:
    """Calls by a seed; the first of more are the same."""
    generator = random.Random(seed)
    return [_drawn(generator) for _ in range(count)]


def _drawn(of: random.Random) -> Call:
    def pick(weights: dict) -> object:
        return of.choices(list(weights), list(weights.values()))[0]

    kind, (head_dim, value_dim), group = pick(KINDS), pick(WIDTHS), pick(GROUPS)
    step = of.choice((8, 64, 256))
    tokens = max(256, round(2 ** of.uniform(*LENGTHS.get(kind, ALL_LENGTHS)) / step) * step)
    kv_tokens = of.choice((77, 256, 512, 1024)) if kind == FULL and of.random() < 0.25 else 0
    left = min(of.choice((127, 255, 511, 1023, tokens // 4)), tokens // 2) if kind == WINDOW else 0
    pairs = tokens * ((left + 1) if left else (kv_tokens or tokens)) / (2 if kind in (CAUSAL, PACKED) else 1)
    flops = 2 * (head_dim + value_dim) * pairs
    room = max(1, min(MOST_ELEMENTS // (tokens * value_dim), int(MOST_FLOPS / flops)))
    kv_heads = max(1, min(of.choice((8, 12, 16, 24, 32, 40)), room) // group)
    heads = kv_heads * group
    batch = of.randint(1, max(1, min(64, room // heads)))
    lengths: tuple[int, ...] = ()
    if kind == PACKED and batch > 1 and of.random() < 0.6:  # documents, with the same total
        ends = sorted(of.sample(range(1, batch * tokens), batch - 1))
        lengths = tuple(b - a for a, b in zip([0, *ends], [*ends, batch * tokens]))
    trains = of.random() < 0.5
    return Call(kind, head_dim, value_dim, batch, heads, kv_heads, tokens, kv_tokens, trains, left, lengths)


@dataclass(frozen=True)
class Row:
    """A call's (ms, host's ms) by who ran it: "auto", "low", and contenders in full precision.

    call: in words. chosen: who the model names, ran: what `explain` says runs, why: its sentence. errors: relative L2
    of the output and of each gradient from the first of torch and the peers, by who ran it. slow: who was timed once.
    picked: of those the backend that torch's own function takes, and so is timed twice.
    """

    seed: int
    number: int
    call: str
    chosen: str
    ran: str
    why: str
    times: dict[str, tuple[float, float | None]]
    errors: dict[str, list[float]]
    slow: list[str]
    picked: str = ""

    @property
    def wrong(self) -> list[str]:
        """Who is wrong."""
        return [
            name for name, (o, *rest) in self.errors.items() if not (o < WRONG[0] and max(rest, default=0) < WRONG[1])
        ]

    @property
    def best(self) -> float | None:
        """The fastest's ms, of those that are right."""
        known = [ms for name, (ms, _) in self.times.items() if name != AUTO_RUN and name not in self.wrong]
        return min(known, default=None)

    @property
    def over_best(self) -> float | None:
        """`auto`'s speed over the fastest's, 0 where it raised."""
        if self.best is None:
            return None
        return self.best / self.times[AUTO_RUN][0] if AUTO_RUN in self.times else 0.0

    @property
    def over_torch(self) -> float | None:
        """`auto`'s speed over that of what torch picks."""
        return self.times[TORCH][0] / self.times[AUTO_RUN][0] if {TORCH, AUTO_RUN} <= set(self.times) else None

    @property
    def apart(self) -> float | None:
        """`auto`'s ms over those of whom it ran, or the reverse, at least 1; None where one of them was not timed."""
        if not {AUTO_RUN, self.chosen} <= set(self.times):
            return None
        ratio = self.times[AUTO_RUN][0] / self.times[self.chosen][0]
        return max(ratio, 1 / ratio)

    @property
    def is_right(self) -> bool:
        """Whether who was chosen is within 3% of the fastest."""
        name = self.chosen if self.chosen in self.times else AUTO_RUN
        return self.best is None or self.ms_of(name) <= RIGHT * self.best

    def ms_of(self, name: str) -> float:
        """Ms of a contender, the lesser of both of who was timed twice."""
        names = {TORCH, self.picked} if name in (TORCH, self.picked) else {name}
        return min((self.times[one][0] for one in names if one in self.times), default=math.inf)


def runs_of(call: Call, tensors: list[Tensor]) -> tuple[dict[str, Attention], Callable]:
    """Who takes a call, by name, and what explains `auto`'s choice."""
    recipe = dispatch.choose(Ask.of(tensors[0], tensors[2], AUTO, dispatch.FASTEST, call.kind)).recipe
    auto, theirs, why = attentions(call, tensors)
    low, _, _ = attentions(call, tensors, recipe)
    return {AUTO_RUN: auto, LOW: low, **theirs}, why


def errors_of(
    attends: dict[str, Attention], tensors: list[Tensor], do: Tensor, trains: bool
) -> dict[str, list[float]]:
    """Relative L2 by name, of the output and gradients; {} where there is nothing in full precision."""
    exact = next((name for name in (TORCH, *PEERS) if name in attends), None)
    if exact is None:
        return {}
    wanted = _outcome(attends[exact], tensors, do, trains)
    found = {}
    for name, attend in attends.items():
        if name != exact:
            outcome = _outcome(attend, tensors, do, trains)
            found[name] = [float(f"{relative_l2(x, y):.3g}") for x, y in zip(outcome, wanted)]
    return found


def _outcome(attend: Attention, tensors: list[Tensor], do: Tensor, trains: bool) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(trains) for x in tensors]
    out = attend(*leaves)
    return [out.detach(), *(torch.autograd.grad(out, leaves, do) if trains else ())]


def measure(seed: int, number: int, call: Call, device: str, timer: Callable) -> Row:
    """One call's row."""
    *tensors, do = call.inputs(device)
    attends, why = runs_of(call, tensors)
    direction = DIRECTIONS[call.trains]
    runs = {name: run_of(attend, tensors, do, direction) for name, attend in attends.items()}
    runs = {name: run for name, run in runs.items() if takes("ours" if name == AUTO_RUN else name, run)}
    errors = errors_of({name: attends[name] for name in runs}, tensors, do, call.trains)
    times = timer(runs, device)
    slow = [name for name, (_, host_ms) in times.items() if host_ms is None]
    leaves = [x.detach().requires_grad_(call.trains) for x in tensors]
    ran, because = why(*leaves)
    picked = picked_of(call, attends.get(TORCH), leaves)
    return Row(seed, number, str(call), chosen_of(call, leaves), ran, because, times, errors, slow, picked)


def picked_of(call: Call, attend: Attention | None, leaves: list[Tensor]) -> str:
    """The backend that torch's own function takes, as `Row.times` has it."""
    if attend is None or call.kind == PACKED:
        return ""
    return PICKED.get(contenders.picked(attend, leaves), "")


def chosen_of(call: Call, leaves: list[Tensor]) -> str:
    """Who `auto` chooses, as `Row.times` has it."""
    q, k, v = leaves
    if call.kind == PACKED:
        offsets = call.offsets(q.device)
        choice = arguments.packed_choice_of(q, k, v, offsets, offsets, *(call.longest,) * 2, is_causal=True)[0]
    else:
        ours = attentions(call, leaves)[0]
        choice = arguments.choice_of(q, k, v, **ours.keywords)[0]
    contender = choice.contender or LOW
    return TORCH if contender == VARLEN else contender


def ms_by_package(call: Call, row: Row, card: str) -> float:
    """Ms in a row of whom the package's model names for its call, on a card with the peers that the row has."""
    *tensors, _ = call.inputs("meta")
    leaves = [x.requires_grad_(call.trains) for x in tensors]
    if call.kind == PACKED:
        offsets = call.offsets(torch.device("meta"))
        lengths = (call.longest,) * 2
        _, of = arguments.packed_choice_of(*leaves, offsets, offsets, *lengths, is_causal=True, card=card)
    else:
        _, of = arguments.choice_of(*leaves, **attentions(call, leaves)[0].keywords, card=card)
    times = auto_choice.times_of(of.ask, card)
    if times is None:
        return row.ms_of(TORCH if of.size.by_torch else LOW)
    own = (times.head_dim, times.value_dim) == (call.head_dim, call.value_dim)
    low_ms, full = times.ms(of.size)
    taken = {TORCH if name == VARLEN else name: ms for name, ms in full.items() if own or name not in PEERS}
    if low_ms is not None:
        taken[LOW] = (1 + MARGIN / 100) * low_ms
    wrong = [*row.wrong, *(name for name in taken if auto_choice.is_wrong(name, of.ask, of.size))]
    known = [name for name in taken if name in row.times and name not in wrong]
    return row.ms_of(min(known, key=taken.get))


def compile_call(call: Call, device: str) -> None:
    """Run once what a call compiles."""
    *tensors, do = call.inputs(device)
    attends, _ = runs_of(call, tensors)
    attends["ours"] = attends.pop(LOW)
    compile_run(attends, tensors, do, DIRECTIONS[call.trains])


def compiled(calls: list[Call], device: str, until: float) -> None:
    """Compile what calls need, in several processes, one call of each form, as far as there is time."""
    os.environ.setdefault(FA4_CACHE, "1")
    forms = {(x.kind, x.head_dim, x.value_dim, x.heads == x.kv_heads, x.trains, x.left > 0): x for x in calls}
    count = max(1, min(len(forms), (os.cpu_count() or 1) - 1, MOST_PROCESSES))
    given = [(call, device) for call in forms.values()]
    for done, (_, error) in enumerate(run_in_processes(compile_call, given, count), 1):
        said = "" if error is None else f": {type(error).__name__}: {error}"
        print(f"compiled {done} of {len(given)}{said}", file=sys.stderr, flush=True)
        if time.monotonic() > until:
            break


def rows_of(calls: list[Call], seed: int, known: set[int], device: str, until: float) -> Iterator[Row]:
    """Rows that are not known, told as they come, as far as there is time."""
    timer = partial(time_contenders, rounds=ROUNDS, round_ms=ROUND_MS, lead_ms=LEAD_MS, always=AUTO_RUN)
    for number, call in enumerate(calls):
        if number in known:
            continue
        if time.monotonic() > until:
            print(f"stopped before call {number} of {len(calls)}: the same command goes on", file=sys.stderr)
            return
        row = measure(seed, number, call, device, timer)
        times = ", ".join(f"{name} {ms:.3f}" for name, (ms, _) in row.times.items())
        print(f"{number + 1} of {len(calls)}: {row.call}: {row.chosen}: {times}", file=sys.stderr, flush=True)
        yield row


def report(rows: list[Row]) -> tuple[str, bool]:
    """What is printed of rows, and whether `auto` has lost nowhere."""
    lines, fine = [], True
    compared = [row for row in rows if row.over_best is not None]
    for name, least, chosen in (
        (f"from {HOST_MS} ms on", LEAST, [row for row in compared if row.best >= HOST_MS]),
        ("below", LEAST_BELOW, [row for row in compared if row.best < HOST_MS]),
    ):
        if chosen:
            ratios = [row.over_best for row in chosen]
            mean = geometric_mean([ratio for ratio in ratios if ratio] or [math.nan])
            raised = f", {ratios.count(0)} raised" * (0 in ratios)
            lines.append(
                f"{name}: {len(chosen)} calls, auto over the fastest: least {min(ratios):.3f}, geometric mean "
                f"{mean:.3f}{raised}"
            )
            apart = [row.apart for row in chosen if row.apart is not None]
            if apart:
                far = sum(ratio > RIGHT for ratio in apart)
                lines.append(f"timed twice, as auto and by itself: {far} of {len(apart)} are more than 3% apart")
            lost = [row for row in chosen if row.over_best < least]
            lines += [f"lost: {row.over_best:.3f}: {row.call}: {row.why}" for row in lost]
            fine &= not lost
    over_torch = [row.over_torch for row in rows if row.over_torch is not None]
    if over_torch:
        lines.append(f"geometric mean over torch's pick: {geometric_mean(over_torch):.3f}, {len(over_torch)} calls")
    if rows:
        lines.append(f"chosen within 3% of the fastest: {sum(row.is_right for row in rows) / len(rows):.3f}")
    lines += [f"wrong: {name}, {row.errors[name]}: {row.call}" for row in rows for name in row.wrong]
    return "\n".join(lines), fine


def _known(path: Path) -> dict[tuple[int, int], Row]:
    """The rows of a file by seed and number; ValueError for one of other rows."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    if not all("seed" in row for row in rows):
        raise ValueError(f"--output: {path} has other rows; accepted: another folder")
    return {(row["seed"], row["number"]): Row(**row) for row in rows}


def main(arguments: list[str] | None = None) -> int:
    """Time the calls; 1 where `auto` has lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop in time; the same command then goes on")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results file")
    parser.add_argument("--commit", help="what runs, outside a git checkout")
    given = parser.parse_args(arguments)
    check_device(given.device)
    begun, calls = time.monotonic(), drawn(given.calls, given.seed)
    facts = environment(given.device, given.commit)
    path = path_of(facts, given.output, "auto")
    try:
        check_folder("--output", given.output)
        rows = _known(path)
    except ValueError as error:
        parser.error(str(error))
    known = {number for seed, number in rows if seed == given.seed}
    if given.device.startswith("cuda"):
        anew = [call for number, call in enumerate(calls) if number not in known]
        compiled(anew, given.device, begun + COMPILING * given.seconds)
    for row in rows_of(calls, given.seed, known, given.device, begun + given.seconds):
        rows[row.seed, row.number] = row
        save([rows[key] for key in sorted(rows)], facts, given.output, "auto")  # anew with each
    ours = [rows[key] for key in sorted(rows) if key[0] == given.seed and key[1] < len(calls)]
    text, fine = report(ours)
    print(f"{len(ours)} of {len(calls)} calls of seed {given.seed}\n{text}\nin {path}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
