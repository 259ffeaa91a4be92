"""One model with its optimiser and random tokens, whose steps the benchmarks of training time and weigh."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.shapes import flops
from benchmarks.timer import from_rest, wait
from lab.training import processes
from lab.training.config import Config
from lab.training.model import build, checkpoint_layers

COMPILED = ("model", "layers", "reduce-overhead", "no")
"""The whole model by torch.compile; each decoder layer by itself, one for all, and the loss; the whole model with its
kernels launched as CUDA graphs, by ``torch.compile(mode="reduce-overhead")``; nothing."""


class Layer(nn.Module):
    """A decoder layer from outside: of some versions of Transformers only this has its checkpointing within."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: object, **options: object) -> Tensor:
        """As the layer's."""
        return self.layer(*inputs, **options)


class Runner:
    """The model, its optimiser and the tokens.

    Args: vocabulary, token ids; batch, sequences of a micro-batch; compiled, one of `COMPILED`; is_causal, False for
    attention as video models have it. Raises ValueError for an unknown ``compiled``.
    """

    def __init__(
        self, config: Config, vocabulary: int, batch: int, device: str, compiled: str, is_causal: bool
    ) -> None:
        if compiled not in COMPILED:
            raise ValueError(f"compiled={compiled!r} is not known; accepted: {', '.join(COMPILED)}")
        self.config, self.batch, self.device = config, batch, torch.device(device)
        self.vocabulary, self.context = vocabulary, config.data.context
        self.compiled, self.is_causal = compiled, is_causal
        with self.device:  # where numbers are drawn sooner
            self.model = build(config, vocabulary).train()
        self.model.config.is_causal = is_causal
        for layer in self.model.model.layers:
            layer.self_attn.is_causal = is_causal
        checkpoint_layers(self.model, config.optimisation)
        if compiled == "layers":
            self._compile_layers()
        self.called: nn.Module = self.model
        if processes.count() > 1:  # wrapped, then compiled, as Accelerate does under Trainer
            self.called = DistributedDataParallel(self.model, broadcast_buffers=False)
        if compiled in ("model", "reduce-overhead"):
            mode = None if compiled == "model" else compiled
            self.called = torch.compile(self.called, dynamic=False, mode=mode)
        settings = config.optimisation
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay, fused=True,
        )  # fmt: skip

    def _compile_layers(self) -> None:
        layers = self.model.model.layers
        for index, layer in enumerate(layers):
            layers[index] = Layer(layer)
            layers[index].compile(dynamic=False)
        self.model.loss_function = torch.compile(self.model.loss_function, dynamic=False)

    def tokens(self, seed: int) -> Tensor:
        """Random ids, the same for one seed in one process."""
        generator = torch.Generator(self.device).manual_seed(seed * processes.count() + processes.rank())
        shape = (self.batch, self.context)
        return torch.randint(self.vocabulary, shape, generator=generator, device=self.device)

    def loss(self, ids: Tensor) -> Tensor:
        """Forward, under BF16 autocast."""
        self.optimiser.zero_grad(set_to_none=True)
        if self.compiled == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.called(input_ids=ids, labels=ids).loss

    def gradients(self, ids: Tensor) -> None:
        """Forward and backward."""
        self.loss(ids).backward()

    def step(self, ids: Tensor) -> None:
        """Forward, backward, the clip and the optimiser's step."""
        self.gradients(ids)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimisation.clip_norm)
        self.optimiser.step()

    def projections(self) -> Tensor:
        """The gradients of every layer's projections to q, k and v, as one vector."""
        names = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        return torch.cat([w.grad.flatten() for name, w in self.model.named_parameters() if name.endswith(names)])

    def parameters(self) -> int:
        """How many numbers the model learns."""
        return sum(weight.numel() for weight in self.model.parameters())

    def flops(self) -> float:
        """Of one step, as `lab.steps.timing` counts them."""
        weights = sum(part.weight.numel() for part in self.model.modules() if isinstance(part, nn.Linear))
        model = self.config.model
        head_dim = model.head_dim or model.width // model.heads
        forward = flops(self.batch, model.heads, self.context, self.context, head_dim, is_causal=self.is_causal)
        return 6.0 * weights * self.batch * self.context + 3.0 * forward * model.layers

    def checkpointing(self) -> str:
        """What of the layers is computed again in backward: "no", "layers", or all of them "but attention"."""
        settings = self.config.optimisation
        if not settings.gradient_checkpointing:
            return "no"
        return "but attention" if settings.keep_attention else "layers"

    def milliseconds(self, run: Callable[[], object]) -> tuple[float, float]:
        """From nothing queued to nothing queued, begun by all processes together; and until ``run`` returned."""
        wait(self.device)
        if processes.count() > 1:
            torch.distributed.barrier()
        return from_rest(run, self.device)[1:]

    def kept_bytes(self, ids: Tensor) -> int | None:
        """What a forward leaves on the GPU for its backward; None where nobody counts: on a CPU, and in
        CUDA graphs, whose memory stays."""
        if self.device.type != "cuda" or self.compiled == "reduce-overhead":
            return None
        self.optimiser.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated(self.device)
        loss = self.loss(ids)
        kept = torch.cuda.memory_allocated(self.device) - before
        loss.backward()
        return kept

    def reset_peak(self) -> None:
        """Forget the peak of memory so far."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """Of memory in use since `reset_peak`; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
