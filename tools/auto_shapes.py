"""Whether `auto` loses: 44 calls of `auto` beside others in full precision, `python -m tools.auto_shapes`, on a GPU.

Each call is timed as a user makes it, by turns with `scaled_dot_product_attention` by what torch picks and by each of
its backends that takes the call, or with `varlen_attn` for packed sequences, and with FlashAttention-4 and -3 where
they are installed. The table has what `auto` ran, and how many times as fast as torch's pick and as the fastest of
all of these it is. Where `auto` hands a call over, it is another's call with what the question costs.
`--results FOLDER` keeps every time. Exit code 1 where `auto` has less than `LEAST` of the speed of what torch picks.
`CALLS` are of many widths, masks and lengths; none was chosen by what it gives. `tools/auto_random.py` draws others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sagebwd import explain, explain_varlen, sage_attention
from sagebwd.auto.contenders import TORCH
from sagebwd.auto.fit import window_of
from sagebwd.auto.model import FORWARD, TRAINING, widths_text
from sagebwd.cli import contenders
from sagebwd.cli.contenders import Attention, takes
from sagebwd.cli.hardware import check_device
from sagebwd.cli.measure import packed_attention, run_of, torch_mask
from sagebwd.cli.results import environment, save
from sagebwd.cli.timer import time_interleaved
from sagebwd.masks.kinds import CAUSAL, FULL, MASK, PACKED, PADDING, WINDOW
from sagebwd.recipe import AUTO

# A call of `auto` that is faster than this many times torch's speed has not lost: timings differ by as much.
LEAST = 0.97


@dataclass(frozen=True)
class Call:
    """Of a kind of mask (`sagebwd.masks.kinds`); packed sequences are ``batch`` of ``tokens`` each.

    kv_tokens: of keys, 0 for as many as queries. trains: forward and backward, else forward without gradients. left:
    keys before a query in its window, 0 for a quarter. lengths: of packed sequences that differ, else ().
    """

    kind: str
    head_dim: int
    value_dim: int
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    kv_tokens: int = 0
    trains: bool = True
    left: int = 0
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        keys = f" on {self.kv_tokens}" if self.kv_tokens else ""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads} on {self.kv_heads}"
        width = widths_text(self.head_dim, self.value_dim)
        way = "training" if self.trains else "no gradients"
        kind = f"{self.kind} of {self.left}" if self.left else self.kind
        tokens = f"{min(self.lengths)} to {max(self.lengths)}" if self.lengths else self.tokens
        return f"{kind}, {self.batch} x {heads} heads of {width}, {tokens} tokens{keys}, {way}"

    @property
    def window(self) -> tuple[int, int]:
        """(left, right) of a window."""
        return self.left or window_of(self.tokens), 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths, default=self.tokens)

    def offsets(self, device: torch.device) -> Tensor:
        """Where each packed sequence starts, and the total."""
        lengths = self.lengths or (self.tokens,) * self.batch
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gaussian q, k, v and do in BF16; on the device meta their shapes."""
        generator = None if device == "meta" else torch.Generator(device).manual_seed(0)

        def drawn(heads: int, tokens: int, width: int) -> Tensor:
            shape = (
                (sum(self.lengths) or self.batch * tokens, heads)
                if self.kind == PACKED
                else (self.batch, heads, tokens)
            )
            return torch.randn(*shape, width, generator=generator, device=device, dtype=torch.bfloat16)

        keys = self.kv_tokens or self.tokens
        widths = (self.kv_heads, keys, self.head_dim), (self.kv_heads, keys, self.value_dim)
        return (
            drawn(self.heads, self.tokens, self.head_dim),
            *(drawn(*one) for one in widths),
            drawn(self.heads, self.tokens, self.value_dim),
        )


def _call(
    kind: str, width: int | tuple[int, int], batch: int, heads: int | tuple[int, int], tokens: int, **options: object
) -> Call:
    pair = width if isinstance(width, tuple) else (width, width)
    both = heads if isinstance(heads, tuple) else (heads, heads)
    return Call(kind, *pair, batch, *both, tokens, **options)


MLA = (192, 128)
ALONE = {"trains": False}
CALLS = (
    *(_call(CAUSAL, 128, max(1, 16384 // n), 16, n) for n in (128, 512, 1024, 2048, 4096, 8192, 32768)),
    *(_call(CAUSAL, 64, 16384 // n, 32, n) for n in (512, 2048, 4096, 16384)),
    _call(CAUSAL, 64, 16, 12, 1024),
    _call(CAUSAL, 64, 4, (9, 3), 2048),
    *(_call(CAUSAL, 128, 2, (32, 8), n) for n in (2048, 8192)),
    *(_call(CAUSAL, 256, 16384 // n, 8, n) for n in (1024, 4096)),
    _call(CAUSAL, 256, 2, (8, 4), 8192),
    *(_call(CAUSAL, MLA, 16384 // n, 16, n) for n in (2048, 4096)),
    _call(CAUSAL, 192, 4, 10, 4096),
    *(_call(CAUSAL, width, 4, 2048 // width, 4096) for width in (72, 80, 96, 112)),
    _call(FULL, 64, 28, 16, 576),
    _call(FULL, 64, 32, 12, 512),
    _call(FULL, 128, 2, 16, 4096),
    _call(FULL, 128, 1, 24, 16384),
    _call(FULL, 128, 1, 24, 32760, kv_tokens=512),
    _call(FULL, 96, 2, 16, 4096),
    _call(PADDING, 64, 32, 12, 512),
    _call(PADDING, 128, 4, 16, 4096),
    _call(WINDOW, 128, 1, 16, 8192),
    _call(WINDOW, 64, 1, 16, 8192, **ALONE),
    _call(MASK, 128, 2, 16, 4096),
    _call(MASK, 64, 8, 12, 1024),
    _call(PACKED, 128, 16, 16, 2048),
    _call(PACKED, 64, 64, 12, 512),
    *(_call(CAUSAL, 128, 16384 // n, 16, n, **ALONE) for n in (512, 2048, 8192)),
    _call(FULL, 64, 4, 16, 4096, **ALONE),
    _call(CAUSAL, 256, 4, 8, 4096, **ALONE),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A call's ms under `auto` ("ms"), by torch's pick and by each other that takes it; why: what `auto` says."""

    call: str
    ran: str
    why: str
    ms: float
    host_ms: float
    torch_ms: float | None
    backends: dict[str, float]

    @property
    def over_torch(self) -> float | None:
        """Times as fast as what torch picks."""
        return None if self.torch_ms is None else self.torch_ms / self.ms

    @property
    def over_fastest(self) -> float | None:
        """Times as fast as the fastest in full precision."""
        known = [ms for ms in (self.torch_ms, *self.backends.values()) if ms is not None]
        return min(known) / self.ms if known else None


def attentions(
    call: Call, tensors: list[Tensor], recipe: str = AUTO
) -> tuple[Attention, dict[str, Attention], Callable]:
    """`auto`, or ours by a recipe, the others by name, and what explains `auto`'s choice of the same tensors."""
    q = tensors[0]
    if call.kind == PACKED:
        offsets = call.offsets(q.device)
        arguments = offsets, offsets, call.longest, call.longest
        theirs = contenders.packed(tensors, offsets, call.longest, training=call.trains)
        ours = partial(packed_attention, offsets, call.longest, recipe)
        return ours, theirs, partial(_explained, explain_varlen, arguments, {"is_causal": True})
    mask = torch_mask(call.kind, q, call.left or None)
    options: dict[str, object] = {"is_causal": call.kind == CAUSAL}
    if call.heads != call.kv_heads:
        options["enable_gqa"] = True
    if call.kind == WINDOW:
        options |= {"is_causal": True, "window": call.window}
    elif mask is not None:
        options["attn_mask"] = mask
    window = call.window if call.kind == WINDOW else contenders.UNLIMITED
    theirs = contenders.dense(call.kind, tensors, mask, window, training=call.trains)
    return partial(sage_attention, recipe=recipe, **options), theirs, partial(_explained, explain, (), options)


def _explained(ask: Callable, arguments: tuple, options: dict, *tensors: Tensor) -> tuple[str, str]:
    """What runs, and one sentence that says why."""
    found = ask(*tensors, *arguments, **options)
    return f"{found.recipe} on {found.forward}", str(found)


def measure(call: Call, device: str, timer: Callable) -> Row:
    """One call's times."""
    *tensors, do = call.inputs(device)
    ours, theirs, why = attentions(call, tensors)
    direction = TRAINING if call.trains else FORWARD
    runs = {name: run_of(attention, tensors, do, direction) for name, attention in theirs.items()}
    runs = {"auto": run_of(ours, tensors, do, direction)} | {
        name: run for name, run in runs.items() if takes(name, run)
    }
    ran, because = why(*(x.detach().requires_grad_(call.trains) for x in tensors))
    times = timer(runs, device)
    (ms, host_ms), torch_ms = times.pop("auto"), times.pop(TORCH, (None, None))[0]
    return Row(str(call), ran, because, ms, host_ms, torch_ms, {name: one for name, (one, _) in times.items()})


def rows_of(calls: list[Call], device: str) -> Iterator[Row]:
    """Each call's row, told as it comes."""
    for number, call in enumerate(calls, 1):
        row = measure(call, device, time_interleaved)
        said = "" if row.over_torch is None else f", {row.over_torch:.2f} of torch"
        print(f"{number} of {len(calls)}: {call}: {row.ran}{said}", file=sys.stderr, flush=True)
        yield row


def table(rows: list[Row]) -> Table:
    """What the page has."""
    found = Table("call", "auto runs", "ms", "over torch's pick", "over the fastest")
    for row in rows:
        ratios = ("-" if ratio is None else f"{ratio:.2f}" for ratio in (row.over_torch, row.over_fastest))
        found.add_row(row.call, row.ran, f"{row.ms:.3f}", *ratios)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Time all calls; 1 where one has lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, help="folder for a file of every time")
    parser.add_argument("--commit", help="what ran, outside a git checkout")
    parser.add_argument("--only", action="append", help="calls whose text has this; repeat for more")
    given = parser.parse_args(arguments)
    check_device(given.device)
    for text in given.only or ():
        if not any(text in str(call) for call in CALLS):
            parser.error(f"--only {text}: no call's text has it, such as {CALLS[0]}")
    chosen = [call for call in CALLS if given.only is None or any(text in str(call) for text in given.only)]
    facts, rows = environment(given.device, given.commit), []
    for row in rows_of(chosen, given.device):
        rows.append(row)
        if given.results is not None:
            path = save(rows, facts, given.results, "auto")  # anew with each: one that is cut off has what it measured
    Console(width=170).print(table(rows))
    if given.results is not None:
        print(f"wrote {path}")
    lost = [row.call for row in rows if row.over_torch is not None and row.over_torch < LEAST]
    for call in lost:
        print(f"lost: {call}", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
