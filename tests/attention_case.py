"""A call of attention: its tensors, its results and gradients, and what they are held to: softmax or the emulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.conformance import emulator_error, moved, violation
from lab.studies.gaussian import with_sinks
from sagebwd import dispatch
from sagebwd.call import Ask, Call, Saved, keeps_inputs
from sagebwd.dispatch import Choice
from sagebwd.kernels.capabilities import BACKWARD, FORWARD
from sagebwd.kernels.families import FAMILIES
from sagebwd.masks.kinds import FULL, MASK
from sagebwd.masks.mask import Mask, shown
from sagebwd.recipe import Recipe
from tests.masks import drawn

EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


# What `AttentionCase.unaligned` may name.
TENSORS = ("q", "k", "v", "do", "dlse", "key_mask", "cu_seqlens_q", "cu_seqlens_k", "saved")
COPIED = TENSORS[:4]

# Tokens of other draws that say how far a call's precision may lead: of one token dK is exactly 0 but for the rounding
# of dP - delta, which the emulator in FP32 has in every fifth draw alone (up to 2e-6 at head_dim 256).
DRAWN = 16


def leaves(*tensors: Tensor) -> list[Tensor]:
    """The same memory, for which gradients are wanted."""
    return [x.detach().requires_grad_() for x in tensors]


def outcome(
    attention: Callable[..., Tensor | tuple[Tensor, ...]], tensors: Sequence[Tensor], do: Tensor,
    dlse: Tensor | None = None, **options: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All that an attention gives of tensors, then their gradients where do, and dlse, are O's, and lse's."""
    given = leaves(*tensors)
    found = attention(*given, **options)
    found = found if isinstance(found, tuple) else (found,)
    gradients = torch.autograd.grad(found[: 1 if dlse is None else 2], given, (do,) if dlse is None else (do, dlse))
    return *(x.detach() for x in found), *gradients


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False,
    window: tuple[int, int] = (-1, -1), scale: float | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O and lse of (batch, heads, tokens, head_dim) as the formula has them; a query that sees no key: 0 and -inf.

    mask: of elements, boolean or added; is_causal and window, (left, right), aligned top left; sinks, (heads,).
    """
    k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    left, right = window[0], 0 if is_causal else window[1]
    visible = (distance >= -left) | (left < 0)
    visible = visible & ((distance <= right) | (right < 0))
    if mask is not None:
        visible = visible & shown(mask)
        s = s if mask.dtype == torch.bool else s + torch.where(shown(mask), mask.to(s.dtype), 0)
    s = s.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)
    lse = s.logsumexp(-1)
    return (s - lse.nan_to_num(neginf=0)[..., None]).exp()[..., : k.shape[-2]] @ v, lse


def after_an_element(x: Tensor) -> Tensor:
    """x as a slice of a flat buffer that begins at its second element, no multiple of 16 bytes."""
    flat = x.new_empty(x.numel() + 1)
    return flat[1:].view(x.shape).copy_(x)


def tensors_in(x: object) -> list[Tensor]:
    """Tensors in named tuples in named tuples."""
    if isinstance(x, Tensor):
        return [x]
    return [tensor for field in x for tensor in tensors_in(field)] if hasattr(x, "_fields") else []


@dataclass
class AttentionCase:
    """Shapes and options of a call; lengths_q and lengths_k make it a packed one.

    unaligned: which of `TENSORS` begin at an odd element; "saved" is all that forward leaves for backward.
    """

    recipe: str = "token"
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    tokens_q: int = 65
    tokens_k: int = 130
    head_dim: int = 64
    value_dim: int = 0  # of v, o and do; 0: head_dim
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    masked: bool = False
    padding: bool = False  # what `masked` hides are the last keys, of each batch element more than of the one before
    every: int = 1  # `masked` hides all but each so-many-th key
    mask: str = ""  # of `tests.masks.KINDS`; `masked` beside it is a mask of keys too
    with_dlse: bool = False
    lengths_q: list[int] = field(default_factory=list)
    lengths_k: list[int] = field(default_factory=list)
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    seed: int = 0
    deterministic: bool = False
    unaligned: tuple[str, ...] = ()
    sink: float = 0  # logits that the first key of each sequence, or the first that counts, stands above the rest
    place: int = 0  # of the sink, behind that first key
    do_size: float = 1  # of do's elements
    scale: float = 0  # the softmax scale; 0: that of head_dim
    max_logits: bool = False  # the heads' largest logits are wanted
    by_token: bool = False  # the heads of a token lie side by side, as models project them

    @property
    def dims(self) -> tuple[int, int]:
        """head_dim and value's."""
        return self.head_dim, self.value_dim or self.head_dim

    def _placed(self, names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(
            after_an_element(x) if x is not None and name in self.unaligned else x for name, x in zip(names, tensors)
        )

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v, do, dlse or None, drawn in BF16; k and v have a mean over tokens."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(heads: int, tokens: int, dim: int, *, mean: bool = False) -> Tensor:
            shape = (tokens, heads, dim) if self.lengths_q else (self.batch, heads, tokens, dim)
            x = torch.randn(shape, generator=generator)
            if mean:
                x = x + 2 * torch.randn(dim, generator=generator)
            x = x.bfloat16().to(self.dtype).to(self.device)
            return x.transpose(1, 2).contiguous().transpose(1, 2) if self.by_token else x

        tokens_q, tokens_k = sum(self.lengths_q) or self.tokens_q, sum(self.lengths_k) or self.tokens_k
        dim, value_dim = self.dims
        q, do = draw(self.heads, tokens_q, dim), draw(self.heads, tokens_q, value_dim)
        k, v = draw(self.kv_heads, tokens_k, dim, mean=True), draw(self.kv_heads, tokens_k, value_dim, mean=True)
        do = do * self.do_size
        if self.sink:
            q, k, v = self._with_sinks(q, k, v, generator)
        dlse = None
        if self.with_dlse:
            shape = (self.heads, tokens_q) if self.lengths_q else (self.batch, self.heads, tokens_q)
            dlse = torch.randn(shape, generator=generator).to(self.device)
        return self._placed(TENSORS[:5], (q, k, v, do, dlse))

    def _with_sinks(self, q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        if self.lengths_q:
            starts = [sum(self.lengths_k[:n]) + self.place for n, length in enumerate(self.lengths_k) if length]
            packed = (x.float().cpu().transpose(0, 1)[None] for x in (q, k, v))
            found = (x[0].transpose(0, 1) for x in with_sinks(*packed, self.sink, starts, generator))
        else:
            first = int(self.settings()[0][0].nonzero()[self.place]) if self.masked else self.place
            found = with_sinks(*(x.float().cpu() for x in (q, k, v)), self.sink, (first,), generator)
        return tuple(x.bfloat16().to(self.dtype).to(self.device) for x in found)

    def settings(self) -> tuple:
        """The arguments of forward and backward that are no inputs."""
        mask, packing, longest = None, (None, None), (self.tokens_q, self.tokens_k)
        if self.masked:
            generator = torch.Generator().manual_seed(self.seed + 1)
            mask = torch.rand(self.batch, self.tokens_k, generator=generator) > 0.3
            mask[:, -self.tokens_k // 4 :] = False
            if self.padding:
                kept = self.tokens_k * torch.arange(self.batch, 0, -1) // (self.batch + 1)
                mask = torch.arange(self.tokens_k) < kept[:, None]
            if self.every > 1:
                mask = mask & (torch.arange(self.tokens_k) % self.every == 1)
            mask = mask.to(self.device)
        drawn = self.mask_of()
        if drawn is not None:
            seen = drawn.keys.expand(self.batch, self.tokens_k)
            mask = seen if mask is None else seen & mask
        if self.lengths_q:
            packing = tuple(
                torch.tensor([0, *lengths], device=self.device).cumsum(0, dtype=torch.int32)
                for lengths in (self.lengths_q, self.lengths_k)
            )
            longest = max(self.lengths_q), max(self.lengths_k)
        mask, *packing = self._placed(TENSORS[5:8], (mask, *packing))
        scale = self.scale or self.head_dim**-0.5
        return mask, *packing, *longest, self.is_causal, *self.window, scale, Recipe.parse(self.recipe)

    def mask_of(self) -> Mask | None:
        """The mask that is none of keys alone."""
        if not self.mask:
            return None
        shape = self.batch, self.heads, self.tokens_q, self.tokens_k
        return drawn(self.mask, shape, self.dtype, self.seed + 1, self.device)

    def call(self, q: Tensor, k: Tensor) -> Call:
        """As an implementation gets it."""
        call = Call.of(q, k, self.dims, *self.settings(), self.deterministic, self.mask_of())
        return call._replace(max_logits=self.max_logits)

    def choice(self, impl: str) -> Choice:
        """Who runs the call: of an implementation, or of a choice's name, whatever GPU is here."""
        recipe = Recipe.parse(self.recipe)
        if dispatch.SEPARATOR not in impl:
            device, kind = torch.device(self.device), MASK if self.mask else FULL
            found = dispatch._rows(FAMILIES[impl], recipe, Ask(recipe, *self.dims, self.dtype, device, kind))
            assert not isinstance(found, str), found
            impl = dispatch.SEPARATOR.join(row.impl for row in found)
        return dispatch.named(recipe, impl)

    def forward(self, impl: str, call: Call, inputs: tuple[Tensor, ...]) -> Saved:
        """What backward gets of forward."""
        choice = self.choice(impl)
        if choice.forward.in_torch:
            outputs = dispatch.module_of(choice.forward.module).forward(call, *inputs[:3])
        else:
            outputs = self._by_kernels(FORWARD, choice, call, *inputs[:3])
        return Saved(*self._placed(("saved",) * len(outputs), outputs))

    def backward(self, impl: str, call: Call, saved: Saved, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """dq, dk and dv; q and k are kept as `sagebwd.ops` does."""
        q, k, v, do, dlse = inputs
        choice = self.choice(impl)
        keep_q, keep_k = keeps_inputs(call.recipe, choice.backward, self.dims)
        given = saved, do, dlse, q if keep_q else None, k if keep_k else None, v
        if choice.backward.in_torch:
            return dispatch.module_of(choice.backward.module).backward(call, *given)
        return self._by_kernels(BACKWARD, choice, call, *given)[:-1]

    def _by_kernels(self, direction: str, choice: Choice, call: Call, *given: object) -> tuple[Tensor, ...]:
        """What the kernels of a direction give, each in memory of its own."""
        runtime, of_call = dispatch.runtime(), dispatch.prepared(direction, choice, call)
        described = getattr(runtime.driver, direction)
        return runtime.program.run(described, *dispatch.family(direction, choice, call), of_call, *given)

    def run(self, impl: str, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Outputs, gradients and saved tensors of an implementation."""
        call = self.call(*inputs[:2])
        saved = self.forward(impl, call, inputs)
        dq, dk, dv = self.backward(impl, call, saved, inputs)
        largest = None if saved.max_logits is None else saved.max_logits.amax(-1)
        return {**saved._asdict(), "max_logits": largest, "dq": dq, "dk": dk, "dv": dv}

    def check(self, impl: str) -> dict[str, Tensor]:
        """Assert that the kernels compute the recipe; returns what they computed."""
        inputs = self.inputs()
        actual = self.run(impl, inputs)
        names = "o", "lse", "k_mean", "dq", "dk", "dv"
        self.check_outputs(inputs, actual, (*names, *(("max_logits",) if self.max_logits else ())))
        return actual

    def check_outputs(self, inputs: tuple[Tensor, ...], actual: dict[str, Tensor], names: tuple[str, ...]) -> None:
        """Assert that some of what kernels computed, lse among it, is the recipe's; lse's rows without keys go."""
        low, high = self._emulators(inputs)
        tokens = max(sum(self.lengths_q) or self.tokens_q, sum(self.lengths_k) or self.tokens_k)
        steps = range(1000, 1000 * max(2, DRAWN // tokens) + 1, 1000)
        draws = [dataclasses.replace(self, seed=self.seed + step) for step in steps]
        others = [draw._emulators(draw.inputs()) for draw in draws]
        if Recipe.parse(self.recipe).rotate:
            others.append((self._moved(inputs), dict(high)))
        seen = high["lse"].isfinite()
        assert torch.equal(actual["lse"].isfinite(), seen), "lse is -inf where, and only where, a query sees no key"
        for result in (actual, low, high):
            result["lse"] = result["lse"][seen]
        for name in names:
            eps = EPS[self.dtype] if actual[name].dtype == self.dtype else 2.0**-20
            errors = [emulator_error(a[name][a[name].isfinite()], b[name][a[name].isfinite()]) for a, b in others]
            problem = violation(actual[name], low[name], high[name], eps, errors)
            assert problem is None, f"{name}: {problem}"

    def check_addresses(self, impl: str, names: tuple[str, ...]) -> None:
        """Assert that these tensors may begin at odd elements, in calls made again after aligned ones and before.

        Those that are copied then give the same bits; others are read by a kernel that is compiled for them.
        """
        from sagebwd.cache import PLANS

        odd = dataclasses.replace(self, unaligned=names)
        expected = self.run(impl, self.inputs())
        for first, second in ((self, odd), (odd, self)):
            PLANS.clear()
            for call in (first, first, second, second):
                actual = call.run(impl, call.inputs())
                if set(names) <= set(COPIED):
                    there = {name: x for name, x in expected.items() if x is not None}
                    assert all(torch.equal(actual[name], x) for name, x in there.items()), (names, call.unaligned)
            odd.check(impl)

    def _moved(self, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The emulator in FP64 of `moved` Q and K."""
        q, k, *rest = inputs
        return self.run(
            "reference", (*moved(q, k, seed=self.seed), *(None if x is None else x.double() for x in rest))
        )

    def _emulators(self, inputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The emulator at the kernel's precision and in FP64."""
        high = tuple(None if x is None else x.double() for x in inputs)
        return self.run("reference", inputs), self.run("reference", high)
