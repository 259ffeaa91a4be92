"""Random sequences of calls, each compared with a fresh process: `python -m tools.call_sequences --steps 2000`.

One long-lived process runs the steps: eager, checkpointed and no_grad calls on three CUDA streams or in two threads;
CUDA graphs, captured and replayed between eager calls; masks that every kind of writer rewrites, and mask objects that
are copied, pickled and rebuilt; twice, thousands of other calls. The results of a step may depend on its `Call` alone.
The tool orders a user's tensors among streams, as a user must; what sagebwd derives from them, sagebwd has to order.

The oracle computes each distinct call in a fresh process: eager, on one stream, under a mask that is never rewritten
and never freed. Starting CUDA takes seconds, too long for each of a thousand calls: so a process computes many calls,
none of a kind (recipe, shapes, form of the mask) that it has met. What is kept by shape, address or identity is then
never hit. `--alone` calls, drawn at random, are computed once more, each in a process of its own, and must agree.

o, lse and gradients under deterministic algorithms must be equal bit for bit, and so all of the reference. Other
gradients are added by atomics, or by torch: within `TOLERANCE`. A process that hangs is ended, and its step named.
Exit code 1 where a step differs, hangs or crashes, 3 where time ran out before the last.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import faulthandler
import json
import math
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from sagebwd import read_block_mask, read_mask, sage_attention, sage_attention_varlen
from sagebwd.cache import ENTRIES
from sagebwd.cli.hardware import check_device
from sagebwd.cli.outputs import check_files
from sagebwd.environment import write_whole
from sagebwd.masks.mask import Mask
from sagebwd.switches import current, switches

# How a process says what it is at, and for how many seconds that may last.
Watch = Callable[[str, float], None]
# Relative L2 of gradients whose terms are added in any order.
TOLERANCE = 2e-3
# Seconds after which a call of the oracle, which may compile, or a round of steps hangs.
PATIENCE, PATIENCE_OF_ROUND = 240, 120
SAID_EVERY = 10
# Of the oracle, side by side; each takes half a gigabyte of a GPU for its context.
PROCESSES = 16
# Differences that are printed and recorded, each with the steps before it.
PRINTED, HISTORY = 20, 8
# Calls of other kinds, more than the cache of plans holds; how often they come; the memory that they may keep.
OTHERS, TIMES, KEPT_BYTES = ENTRIES + 64, 2, 128 << 20
# Sets of inputs, and contents of a mask, of each kind of call.
SEEDS, CONTENTS = 2, 4
# Cycles that a stream is busy before a call, some 5 ms.
SLEEP = 10_000_000
HEADS = 2
LENGTHS = {"cuda": (256, 384, 512, 333), "cpu": (32, 48, 64, 41)}
# Deterministic algorithms by torch's flag or sagebwd's switch, of all calls of a round.
MODES = ("", "", "", "torch", "switch")
BLOCKS, READERS = ("block", "read_block"), {"read2": read_mask, "read_block": read_block_mask}
GRADIENTS = ("dq", "dk", "dv", "dsinks")


class Shown:
    """Prints the fields that are not at their defaults."""

    def __str__(self) -> str:
        values = [(x.name, getattr(self, x.name), x.default) for x in fields(self)]
        return f"({' '.join(f'{name}={value}' for name, value, usual in values if value != usual)})"


@dataclass(frozen=True)
class Call(Shown):
    """A call with its backward: all that its results may depend on.

    mask: "pad", "bool", "bias" or "read" (by read_mask) with its number of dimensions, or one of `BLOCKS`. grad: the
    layout of o's gradient. seed: of the inputs. contents: of the mask, or of cu_seqlens where there are sequences.
    """

    recipe: str
    mask: str = ""
    impl: str | None = None
    head_dim: int = 64
    kv_heads: int = HEADS
    batch: int = 1
    tokens: int = 0
    sequences: int = 0
    is_causal: bool = False
    window: tuple[int, int] | None = None
    scale: float | None = None
    has_sinks: bool = False
    returns_lse: bool = False
    grad: str = "plain"  # or "strided", "zero"
    trains: bool = True
    deterministic: str = ""
    seed: int = 0
    contents: int = 0

    @property
    def kind(self) -> Call:
        """What calls have in common that share masks, and that the oracle computes in different processes."""
        return replace(self, grad="plain", trains=True, deterministic="", seed=0, contents=0)

    @property
    def has_mask(self) -> bool:
        """Whether it reads a tensor that a user may rewrite between calls."""
        return bool(self.mask or self.sequences)

    @property
    def is_rewritten(self) -> bool:
        """Whether a graph of the call writes its mask first, as it can a tensor."""
        return self.has_mask and self.mask not in (*BLOCKS, *READERS)

    @property
    def is_exact(self) -> bool:
        """Whether gradients are the same bits in every run."""
        return self.impl == "reference" or (self.deterministic != "" and self.recipe != "auto")

    def inputs(self, device: str) -> tuple[list[Tensor], list[Tensor]]:
        """query, key, value and sinks; and the gradients of o and lse."""
        generator = torch.Generator(device).manual_seed(1000 + self.seed)

        def draw(heads: int, *rest: int) -> Tensor:
            shape = (self.tokens, heads) if self.sequences else (self.batch, heads, self.tokens)
            return torch.randn(*shape, *rest, generator=generator, device=device)

        leaves = [draw(heads, self.head_dim).bfloat16() for heads in (HEADS, self.kv_heads, self.kv_heads)]
        if self.has_sinks:
            leaves.append(torch.randn(HEADS, generator=generator, device=device))
        do, dlse = draw(HEADS, self.head_dim, 2).bfloat16()[..., 0], draw(HEADS)
        do = do if self.grad == "strided" else do.contiguous()
        if self.grad == "zero":
            do = torch._efficientzerotensor(do.shape, dtype=do.dtype, device=device)
        return leaves, [do, dlse] if self.returns_lse else [do]

    def mask_of(self, device: str) -> object:
        """The mask, or cu_seqlens: a tensor, or a BlockMask whose blocks are another mask_mod's."""
        n, contents = self.tokens, self.contents
        if self.sequences:
            inner = [n * (i + 1) // self.sequences - 3 * contents for i in range(self.sequences - 1)]
            return torch.tensor([0, *inner, n], dtype=torch.int32).to(device)
        if self.mask in BLOCKS:
            from torch.nn.attention.flex_attention import create_block_mask  # it takes long to import

            block_mask = create_block_mask(partial(shows, contents // 2 * 2), None, None, n, n, device=device)
            block_mask.mask_mod = partial(shows, contents)
            return block_mask
        sizes = (self.batch, HEADS, n, n)
        b, h, q, k = torch.meshgrid(*(torch.arange(size, device=device) for size in sizes), indexing="ij")
        mask = shows(contents, b, h, q, k)
        if self.mask.startswith("pad"):
            mask = (k < n - n * (1 + contents) // 6 - 3 * b)[:, :1, :1]
        if self.mask.startswith("bias"):
            mask = torch.where(mask, (k - q).abs() % 17 * (-0.0625 if contents else 0.0), -math.inf).bfloat16()
        return mask[(0,) * (4 - int(self.mask[-1]))].contiguous()

    def read_of(self, mask: object) -> object:
        """What the call is given of its mask."""
        return READERS[self.mask](mask) if self.mask in READERS else mask

    def attend(self, leaves: list[Tensor], mask: object) -> tuple[Tensor, ...]:
        """o, and lse where it is returned, by the public functions."""
        options = {"is_causal": self.is_causal, "window": self.window, "scale": self.scale, "recipe": self.recipe}
        options |= {"impl": self.impl, "return_lse": self.returns_lse}
        if self.has_sinks:
            *leaves, options["sinks"] = leaves
        if self.sequences:
            outputs = sage_attention_varlen(*leaves, mask, mask, self.tokens, self.tokens, **options)
        else:
            options["block_mask" if self.mask in (*BLOCKS, *READERS) else "attn_mask"] = mask
            outputs = sage_attention(*leaves, enable_gqa=self.kv_heads != HEADS, **options)
        return outputs if self.returns_lse else (outputs,)

    def run(self, given: tuple[list[Tensor], list[Tensor]], mask: object, how: str = "eager") -> dict[str, Tensor]:
        """o, lse where it is returned, and the gradients; given, of `inputs`; mask, of `read_of`."""
        leaves = [x.detach().requires_grad_(self.trains) for x in given[0]]
        with torch.set_grad_enabled(self.trains):
            if how in ("checkpoint", "reentrant"):
                outputs = checkpoint(lambda *x: self.attend(x, mask), *leaves, use_reentrant=how == "reentrant")
            else:
                outputs = self.attend(leaves, mask)
        found = {name: x.detach() for name, x in zip(("o", "lse"), outputs)}
        if self.trains:
            torch.autograd.backward(outputs, given[1])
            found |= {name: leaf.grad for name, leaf in zip(GRADIENTS, leaves)}
        return found


def shows(contents: int, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whether a query sees a key; all see the first, and none sees some blocks of the others."""
    q = q + 16 * b + 8 * h
    if contents == 0:
        seen = (q - k < 24) & (k - q < 24)
    elif contents == 1:
        seen = q // 80 == k // 80
    else:
        seen = (q * 7 + k * 13 * contents) % 11 < 6
    return seen & (k // 16 % 5 != contents + 1) | (k == 0)


def deterministic(mode: str) -> AbstractContextManager:
    """The context of sagebwd's switch; torch's flag is set at once, for the process."""
    torch.use_deterministic_algorithms(mode == "torch", warn_only=True)
    return switches(deterministic=True if mode == "switch" else None)


# Steps


@dataclass(frozen=True)
class Step(Shown):
    """A call, and circumstances that its results must not depend on.

    how: "eager", "checkpoint", "reentrant", "no_grad", "inference"; "capture", or "capture-first" of a call that was
    not met before; "replay"; "others", calls of other kinds. write: who writes the kind's mask before the call.
    """

    how: str
    call: Call | None = None
    write: str = ""
    stream: int = 1
    sleeps: bool = False
    graph: int = -1


class Round(NamedTuple):
    """Steps that are started without waiting for the device in between, one after another or in two threads."""

    steps: list[Step]
    mode: str = ""
    threads: int = 1


# The calls, of no length yet; on a CPU the reference runs them.
FAMILIES = (
    *(Call("mixed", mask) for mask in ("pad2", "pad3", "pad4", "bool2", "bool4", "bias2", "bias4", *READERS, "block")),
    *(Call("token", mask, grad="strided") for mask in ("pad2", "bool2", "bias4", "read2", "block")),
    *(Call("auto", mask) for mask in ("pad2", "bool4", "bias2")),
    Call("full", "read_block", returns_lse=True), Call("mixed", head_dim=128, kv_heads=1, returns_lse=True),
    Call("mixed", "bool4", head_dim=128, kv_heads=1, batch=2, is_causal=True, grad="strided"),
    Call("mixed", "pad4", batch=2, window=(32, 0)), Call("mixed", window=(32, 8), has_sinks=True, scale=0.2),
    Call("mixed", is_causal=True, grad="zero"), Call("token", is_causal=True, grad="zero"),
    Call("mixed", sequences=3, is_causal=True, kv_heads=1, grad="strided"), Call("auto", sequences=2),
    Call("token", sequences=2, window=(32, 0)), Call("token", window=(24, 0), has_sinks=True, batch=2),
    Call("auto", is_causal=True), Call("auto", window=(32, 0)), Call("auto", window=(24, 8), kv_heads=1, batch=2),
)  # fmt: skip
# Writers of a mask's memory, beside the replays of graphs; writers that put a mask elsewhere; writers of a BlockMask.
WRITERS = {
    "cuda": ("copy_", "data.copy_", "kernel", "broadcast", "all_reduce"),
    "cpu": ("copy_", "data.copy_", "memmove", "numpy", "broadcast", "all_reduce", "scatter", "recv"),
}
# What becomes of a mask object before its first call: copies of it are used as it is, and what pytree code rebuilds.
HANDLED = (
    lambda mask: mask, copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask)),
    lambda mask: tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, mask), lambda mask: mask[:],
)  # fmt: skip
MOVING, WRITERS_OF_BLOCKS = ("data=", "reborn"), ("mask_mod=", "reborn")
COLLECTIVES = ("broadcast", "scatter", "recv", "all_reduce")


class Planner:
    """Draws rounds from a seed, and keeps account of what the mask of each kind holds and which graphs there are."""

    def __init__(self, seed: int, device: str, graphs: bool) -> None:
        self.rng, self.has_graphs, self.writers = random.Random(seed), graphs, WRITERS[device]
        small = {"impl": "reference", "head_dim": 8} if device == "cpu" else {}
        lengths = partial(self.rng.sample, LENGTHS[device], 2)
        self.kinds = [replace(call, tokens=tokens, **small) for call in FAMILIES for tokens in lengths()]
        self.contents: dict[Call, int] = {}
        self.graphs: list[Call] = []

    def rounds(self, steps: int) -> list[Round]:
        """Rounds of so many steps."""
        found, done, times = [], 0, 0
        while done < steps:
            if times < TIMES and done >= (times + 1) * steps // (TIMES + 1):
                drawn, times = Round([Step("others"), *map(self.replay, range(len(self.graphs)))]), times + 1
            else:
                drawn = self.round(threads=2 if self.rng.random() < 0.15 else 1)
            found.append(drawn._replace(steps=drawn.steps[: steps - done]))
            done += len(found[-1].steps)
        return found

    def round(self, threads: int) -> Round:
        """Steps of two kinds. Those of a thread share a stream, and write no mask."""
        rng, mode, steps = self.rng, self.rng.choice(MODES), []
        kinds = rng.sample(self.kinds, 2)
        for number in range(8 if threads == 2 else rng.randint(3, 6)):
            if self.has_graphs and threads == 1 and number and rng.random() < 0.25:
                replays = self.graphs and rng.random() < 0.8
                steps.append(self.replay(rng.randrange(len(self.graphs))) if replays else self.capture(mode))
                kinds = [steps[-1].call.kind, *kinds[:1]]  # eager calls of the graph's kind follow
                continue
            step = self.eager(rng.choice(kinds), mode, writes=threads == 1 and rng.random() < 0.5)
            stream = 1 + number % 2 if threads == 2 else rng.randrange(3)
            # the first one's work comes after what other streams are given
            steps.append(replace(step, stream=stream, sleeps=number < threads))
        return Round(steps, mode, threads)

    def eager(self, kind: Call, mode: str, writes: bool) -> Step:
        """A step without a graph, which may rewrite the mask first."""
        rng, write, key = self.rng, "", kind.kind
        if kind.has_mask and writes:
            moving = () if key in [call.kind for call in self.graphs] else MOVING  # a graph has the address
            write = rng.choice(WRITERS_OF_BLOCKS if kind.mask in BLOCKS else self.writers + moving)
            now = self.contents.get(key, 0)
            self.contents[key] = now ^ 1 if write == "mask_mod=" else rng.randrange(CONTENTS)  # of the same blocks
        call = self.call(kind, mode)
        how = rng.choice(("eager", "eager", "checkpoint", "reentrant") if call.trains else ("no_grad", "inference"))
        if how == "reentrant" and kind.recipe == "auto":  # its forward without gradients may be another's
            how = "checkpoint"
        return Step(how, call, write)

    def call(self, kind: Call, mode: str) -> Call:
        """A call of a kind, under its mask as it is."""
        rng, trains = self.rng, self.rng.random() < 0.75
        values = {"seed": rng.randrange(SEEDS), "contents": self.contents.get(kind.kind, 0), "deterministic": mode}
        return replace(kind, **values, trains=trains, grad=rng.choice(("plain", kind.grad)) if trains else "plain")

    def capture(self, mode: str) -> Step:
        """A capture and its first replay; the first graph has a window's mask, which sagebwd makes for torch."""
        windows, number = [kind for kind in self.kinds if kind.window and kind.recipe == "auto"], len(self.graphs)
        kind = replace(self.rng.choice(self.kinds if self.graphs else windows), grad="plain")
        how = self.rng.choice(("capture", "capture-first"))
        if how == "capture-first":  # of a scale of its own, which is not compiled in; eager calls meet it later
            kind = replace(kind, scale=round(0.1 + 0.01 * number, 2))
            self.kinds.append(kind)
        self.graphs.append(self.call(kind, mode))
        return Step(how, self.graphs[-1], graph=number)

    def replay(self, graph: int) -> Step:
        """A replay on new inputs; of a tensor as its mask it writes the contents too."""
        call = replace(self.graphs[graph], seed=self.rng.randrange(SEEDS))
        if call.is_rewritten:
            self.contents[call.kind] = self.rng.randrange(CONTENTS)
            call = replace(call, contents=self.contents[call.kind])
        return Step("replay", call, stream=self.rng.randrange(3), graph=graph)


# Writers of masks


def bytes_of(x: Tensor) -> Tensor:
    """A tensor's memory, (bytes,) uint8."""
    return x.view(-1).view(torch.uint8)


@cache
def copy_kernel() -> object:
    """A kernel that copies bytes; Triton is not there on every CPU."""
    import triton
    import triton.language as tl

    @triton.jit
    def copy_bytes(to, x, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(x + at, mask=at < count), mask=at < count)

    return lambda to, x: copy_bytes[(-(-len(to) // 1024),)](to, x, len(to), BLOCK=1024)


@cache
def ranks() -> list[dist.ProcessGroupGloo]:
    """Two ranks of a process group, both in this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2), range(2)))


def communicate(name: str, mask: Tensor, new: Tensor) -> None:
    """Write a mask by a collective: the mask is rank 0's, and what it becomes is rank 1's."""
    (here, there), to, x = ranks(), bytes_of(mask), bytes_of(new)
    works = {
        "broadcast": lambda: (here.broadcast(to, 1), there.broadcast(x, 1)),
        "scatter": lambda: (here.scatter(to, [], 1), there.scatter(x.clone(), [x, x], 1)),
        "recv": lambda: (here.recv([to], 1, 0), there.send([x], 0, 0)),
        "all_reduce": lambda: (here.allreduce(to), there.allreduce(x - to)),
    }[name]()
    for work in works:
        work.wait()


# Of all these torch counts a version of "copy_" alone.
BY: dict[str, Callable[..., object]] = {
    "copy_": lambda mask, new: mask.copy_(new),
    "data.copy_": lambda mask, new: mask.data.copy_(new),
    "data=": lambda mask, new: setattr(mask, "data", new),
    "mask_mod=": lambda mask, new: setattr(mask, "mask_mod", new.mask_mod),
    "memmove": lambda mask, new: ctypes.memmove(mask.data_ptr(), new.data_ptr(), mask.nbytes),
    "numpy": lambda mask, new: bytes_of(mask).numpy().put(range(mask.nbytes), bytes_of(new).numpy()),
    "kernel": lambda mask, new: copy_kernel()(bytes_of(mask), bytes_of(new)),
    **{name: partial(communicate, name) for name in COLLECTIVES},
}


# The long-lived process


class Runner:
    """Runs steps as a user's program would that keeps masks and graphs.

    A write, and a replay, begin after all that the streams were given, and all streams wait for them. Memory that
    several streams use is freed when the device has finished. Else calls on different streams are in no order.
    """

    def __init__(self, device: str, graphs: bool, others: int) -> None:
        self.device, self.on_gpu, self.count = device, graphs, others
        self.streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(2))] if graphs else []
        self.synchronize = torch.cuda.synchronize if graphs else lambda: None
        # by kind: what a user writes, and what calls are given
        self.masks: dict[Call, object] = {}
        self.read: dict[Call, object] = {}
        self.handled = 0
        # graph, its inputs, its results, and its mask
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[Tensor], dict[str, Tensor], object]] = {}

    def run(self, each: Round) -> list[dict[str, Tensor] | str]:
        """Results of a round's steps, or what they raised. Raises an error of the device: no later call is right."""
        found: list[dict[str, Tensor] | str] = ["is not run"] * len(each.steps)

        def work(first: int) -> None:
            for n in range(first, len(each.steps), each.threads):
                try:
                    with deterministic(each.mode):  # threads enter and leave it by turns
                        found[n] = self.step(each.steps[n])
                except Exception as error:
                    found[n] = f"raises {type(error).__name__}: {str(error)[:300]}"

        if each.threads == 1:
            work(0)
        else:
            with ThreadPoolExecutor(each.threads) as pool:
                list(pool.map(work, range(each.threads)))
        self.synchronize()
        if found and current.deterministic:
            found[-1], current.deterministic = "leaves sagebwd's switch on", False
        return found

    def step(self, step: Step) -> dict[str, Tensor]:
        """Results of a step that the device may still have to compute."""
        if step.call is None:
            self.others()
            return {}
        if step.write or (step.call.has_mask and step.call.kind not in self.read):
            self.write(step)
        if step.how.startswith("capture"):
            self.capture(step)
        return self.eager(step) if step.graph < 0 else self.replay(step)

    def on(self, stream: int, sleeps: bool = False) -> AbstractContextManager:
        """The context of a stream, which is kept busy where it sleeps."""
        if not self.on_gpu:
            return nullcontext()
        if sleeps:
            with torch.cuda.stream(self.streams[stream % 3]):
                torch.cuda._sleep(SLEEP)
        return torch.cuda.stream(self.streams[stream % 3])

    @contextmanager
    def alone_on(self, stream: int) -> Iterator[None]:
        """The context of a stream, after all that the streams were given and before all that they will be."""
        with self.on(stream):
            for other in self.streams:
                torch.cuda.current_stream().wait_stream(other)
            yield
            for other in self.streams:
                other.wait_stream(torch.cuda.current_stream())

    def write(self, step: Step) -> None:
        """Make a mask, or give it other contents, on another stream than the call's."""
        call, key, stream = step.call, step.call.kind, step.stream + 1
        with self.alone_on(stream):
            # what is moved is free at once, memory and identity; collectives copy on streams of their own
            wait = self.synchronize if step.write in (*MOVING, *COLLECTIVES) else lambda: None
            wait()
            if step.write == "reborn":
                self.masks.pop(key, None), self.read.pop(key, None)
            if step.write and key in self.masks:
                BY[step.write](self.masks[key], call.mask_of(self.device))
            else:
                self.masks[key] = call.mask_of(self.device)
            wait()
        with self.on(stream, step.sleeps):
            found = call.read_of(self.masks[key])  # sagebwd orders its use
            if isinstance(found, Mask):
                found = HANDLED[self.handled % len(HANDLED)](found)
                self.handled += 1
                wait()  # what is rebuilt is a user's
            self.read[key] = found

    def eager(self, step: Step) -> dict[str, Tensor]:
        """Results of a call without a graph."""
        without = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(step.how, nullcontext)
        with self.on(step.stream, step.sleeps), without():
            return step.call.run(step.call.inputs(self.device), self.read.get(step.call.kind), step.how)

    def capture(self, step: Step) -> None:
        """Capture a call after three runs of it; or after one of another scale, which loads its kernels alone."""
        call, mask = step.call, self.read.get(step.call.kind)
        if call.mask == "block":  # which waits for the device
            mask = read_block_mask(mask)
        self.synchronize()
        with self.on(1):
            given = call.inputs(self.device)
            source = [call.mask_of(self.device)] if call.is_rewritten else []
            if step.how == "capture":
                for _ in range(3):
                    call.run(given, mask)
            else:
                other = call.read_of(call.mask_of(self.device)) if call.has_mask else None
                replace(call, scale=0.05).run(given, other)
        self.synchronize()

        def work() -> dict[str, Tensor]:
            for x in source:
                mask.copy_(x)
            return call.run(given, mask)

        graph = torch.cuda.CUDAGraph()
        self.graphs[step.graph] = graph, [*chain(*given), *source], self.record(graph, work), mask

    def record(self, graph: torch.cuda.CUDAGraph, work: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The results that a graph will fill, of work that is captured."""
        with torch.cuda.graph(graph, stream=self.streams[1]):
            return work()

    def replay(self, step: Step) -> dict[str, Tensor]:
        """Results of a graph on new inputs."""
        graph, static, found, _ = self.graphs[step.graph]
        with self.alone_on(step.stream):
            new = [*chain(*step.call.inputs(self.device))]
            new += [step.call.mask_of(self.device)] if step.call.is_rewritten else []
            for to, x in zip(static, new):
                to.copy_(x)
            graph.replay()
            return {name: x.clone() for name, x in found.items()}

    def others(self) -> None:
        """Run calls of other kinds, of which no memory may be kept, and overwrite what was freed."""
        size, options = (512, {}) if self.on_gpu else (68, {"recipe": "full", "impl": "reference"})
        x = torch.randn(1, 1, size, 64, device=self.device).bfloat16()
        self.synchronize()
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        for n in range(self.count):  # on a GPU by torch, under a window's mask
            some = x[:, :, : size - n % 64]
            sage_attention(some, some, some, window=(n // 64, 0), **options)
        self.synchronize()
        kept = torch.cuda.memory_allocated() - before if self.on_gpu else 0
        sizes = [1 << n for n in range(9, 21) for _ in range(32)] * self.on_gpu
        for stream in range(3):
            with self.on(stream):
                junk = [torch.full((n,), 255, dtype=torch.uint8, device=self.device) for n in sizes]
                del junk
        if kept > KEPT_BYTES:
            raise RuntimeError(f"{self.count} other calls keep {kept >> 20} MiB")


def walk(rounds: list[Round], device: str, others: int, until: float, path: Path, watch: Watch) -> None:
    """Run rounds until time is up, compare steps with what the oracle saved beside ``path``, and write the record."""
    watch("the oracle's results", PATIENCE)
    expected, differences = expected_of(path.parent)
    runner = Runner(device, device == "cuda", others)
    began = said = time.monotonic()
    history, printed = [], 0
    for each in [*rounds, Round([])]:
        for one in differences[printed:PRINTED]:
            print("\n  ".join([f"step {one['step']} differs: {one['what']}", *one["steps"]]), flush=True)
        printed, done = len(differences), len(history)
        record = {"steps": done, "differ": printed, "differences": differences[:PRINTED]}
        write_whole(path, json.dumps(record))
        if time.monotonic() - said > SAID_EVERY:
            said = time.monotonic()
            print(f"{done} steps, {printed} differ, {said - began:.0f} s", flush=True)
        if time.monotonic() > until:
            return
        beside = f"{' in threads' * (each.threads - 1)}{' deterministic by ' * bool(each.mode)}{each.mode}"
        first, last = done + 1, done + len(each.steps)
        watch(f"steps {first} to {last}{beside}: {'; '.join(map(str, each.steps))}", PATIENCE_OF_ROUND)
        for step, result in zip(each.steps, runner.run(each)):
            history.append(f"{len(history) + 1}{beside}: {step}")
            what = differs(step.call, result, expected.get(step.call, {}))
            if what:
                differences.append({"step": len(history), "what": what, "steps": history[-HISTORY:]})


# Oracle and comparison


def batches(calls: list[Call], least: int) -> list[list[Call]]:
    """Calls by process, none of a kind twice; each begins elsewhere, so that they share the compiling."""
    by_kind: dict[Call, list[Call]] = defaultdict(list)
    for call in calls:
        by_kind[call.kind].append(call)
    count, ordered = max(least, *map(len, by_kind.values())), list(chain(*by_kind.values()))
    found = [ordered[first::count] for first in range(min(count, len(calls)))]
    turns = [n * len(batch) // len(found) for n, batch in enumerate(found)]
    return [batch[turn:] + batch[:turn] for batch, turn in zip(found, turns)]


def oracle(batch: list[Call], device: str, path: Path, watch: Watch) -> None:
    """Compute calls, and save the results of each, or its error."""
    found, kept = {}, [torch.zeros(1, device=device)]  # fails at once where CUDA does not start
    for call in batch:
        watch(f"oracle: {call}", PATIENCE)
        try:
            with deterministic(call.deterministic):
                kept.append(call.read_of(call.mask_of(device)) if call.has_mask else None)  # no address comes back
                found[call] = {name: x.cpu() for name, x in call.run(call.inputs(device), kept[-1]).items()}
        except Exception as error:
            found[call] = f"raises {type(error).__name__}: {error}"
    torch.save(found, path)


def expected_of(folder: Path) -> tuple[dict[Call, object], list[dict[str, object]]]:
    """What the oracle saved of each call; and where a call alone in a process differs from the pool's."""
    found, differences = {}, []
    for path in sorted(folder.glob("*.pt")):
        for call, results in torch.load(path, weights_only=False).items():
            what = differs(call, results, found[call]) if call in found else ""
            found.setdefault(call, results)
            if what:
                differences.append({"step": 0, "what": f"alone in a process: {what}", "steps": [str(call)]})
    return found, differences


def differs(call: Call | None, found: object, expected: object) -> str:
    """How results differ from those expected; "" where they do not. A text says what happened in place of results."""
    if isinstance(expected, str) or isinstance(found, str):
        return found if isinstance(found, str) else f"a fresh process {expected}"
    if list(found) != list(expected):
        return f"has {list(found)}, not {list(expected)}"
    any_order = GRADIENTS if call is not None and not call.is_exact else ()
    lines = [distance(x, found[x], expected[x], TOLERANCE if x in any_order else 0) for x in expected]
    return "; ".join(line for line in lines if line)


def distance(name: str, found: Tensor | None, expected: Tensor, tolerance: float) -> str:
    """How far a tensor is off; "" where it is within the tolerance."""
    if found is None or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{name} is {None if found is None else (found.dtype, *found.shape)}"
    found, expected = found.cpu().double(), expected.double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    off = torch.where(same, 0, found - expected).norm().item()  # NaN where one of the two is
    whole = expected.nan_to_num(0, 0, 0).norm().item()
    if bool(same.all()) or off <= tolerance * whole:
        return ""
    return f"{name} is {off / whole if whole else math.inf:.2g} off, {int((~same).sum())} of {same.numel()} numbers"


# Processes


def begin(function: Callable[..., None], arguments: tuple, path: Path) -> None:
    """In a fresh process: run a function that writes ``path``, and keep a log beside it of what it is at."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.set_num_threads(1)  # a CPU's sums are in one order
    with path.with_suffix(".log").open("w", encoding="utf-8") as log:

        def watch(what: str, patience: float) -> None:
            """Have the process end unless this is called again in time; the log then says where threads are."""
            log.seek(0)
            log.truncate()
            print(what, file=log, flush=True)
            faulthandler.dump_traceback_later(patience, exit=True, file=log)

        faulthandler.enable(log)
        try:
            function(*arguments, path, watch)
        except Exception:
            traceback.print_exc(file=log)
            log.flush()
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()


def run(jobs: list[tuple[Callable[..., None], tuple, Path]], width: int) -> None:
    """Run jobs in fresh processes, ``width`` of them side by side. Raises RuntimeError where a process fails."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or asking for a GPU starts CUDA, which no fork survives
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.nn.attention.flex_attention", "sagebwd"])
    left, running, began = list(reversed(jobs)), {}, time.monotonic()
    try:
        while left or running:
            while left and len(running) < width:
                job = left.pop()
                process = context.Process(target=begin, args=job, daemon=True)
                process.start()
                running[process] = job[-1].with_suffix(".log")
            wait([process.sentinel for process in running], timeout=1)
            for process in [process for process in running if process.exitcode is not None]:
                log = running.pop(process)
                if process.exitcode:
                    text = log.read_text(encoding="utf-8") if log.exists() else "its start"
                    raise RuntimeError(f"a process ended with status {process.exitcode} at {text}")
                done, seconds = len(jobs) - len(left) - len(running), time.monotonic() - began
                print(f"{done} of {len(jobs)} processes done, {seconds:.0f} s", flush=True)
    finally:
        for process in running:
            process.kill()
            process.join(10)  # one that waits for a GPU may outlive it


def main(arguments: list[str] | None = None) -> int:
    """Draw steps, ask the oracle for their results, run them, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the steps")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: no streams and no graphs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round after so long")
    parser.add_argument("--alone", type=int, default=32, help="calls that are computed once more, each in a process")
    parser.add_argument("--others", type=int, default=OTHERS, help="calls of other kinds, twice")
    parser.add_argument("--output", type=Path, help="a JSON file for the record")
    given = parser.parse_args(arguments)
    check_device(given.device)
    try:
        check_files({"--output": given.output})
    except ValueError as error:
        parser.error(str(error))
    began, width = time.monotonic(), min(PROCESSES, os.cpu_count() or 1)
    rounds = Planner(given.seed, given.device, given.device == "cuda").rounds(given.steps)
    calls = list(dict.fromkeys(step.call for each in rounds for step in each.steps if step.call))
    alone = random.Random(given.seed).sample(calls, min(given.alone, len(calls)))
    parts = batches(calls, width) + [[call] for call in alone]
    print(f"oracle: {len(calls)} calls, {len(alone)} of them twice, in {len(parts)} processes", flush=True)
    record = {"asked": given.steps, "seed": given.seed, "calls": len(calls), "alone": len(alone), "failed": ""}
    record |= {"steps": 0, "differ": 0, "differences": []}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "steps.json"
        try:
            run([(oracle, (part, given.device), Path(name) / f"{n:05}.pt") for n, part in enumerate(parts)], width)
            run([(walk, (rounds, given.device, given.others, began + given.seconds), path)], 1)
        except RuntimeError as error:
            record["failed"] = str(error)
            print(error, flush=True)
        if path.exists():
            record |= json.loads(path.read_text(encoding="utf-8"))
    record["seconds"] = round(time.monotonic() - began, 1)
    if given.output is not None:
        write_whole(given.output, json.dumps(record, indent=1))
    print(f"{record['steps']} steps, {record['differ']} differ, {record['seconds']:.0f} s")
    if record["differ"] or record["failed"]:
        return 1
    return 3 if record["steps"] < given.steps else 0


if __name__ == "__main__":
    from tools import call_sequences  # whose classes, other than this module's, are those of the processes

    sys.exit(call_sequences.main())
