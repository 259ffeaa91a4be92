"""FSDP2: weights, gradients and the optimiser's state divided among processes, with the same losses.

Trainer and Accelerate divide the model, a unit each decoder layer. What is done here in place of theirs:

- Checkpoints are those of an undivided run: one process or several, divided or not, resume each other's.
- BF16 is autocast, as without FSDP. Accelerate's policy would cast weights and reductions to BF16 and leave autocast
  out, which is another model.
- On CPUs, where Accelerate (1.15) drops its FSDP plugin without a word and goes on with DDP, it is put back.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import MethodType
from typing import TypeVar

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from lab.training import processes

State = TypeVar("State")


def arguments() -> dict[str, object]:
    """What TrainingArguments takes for it."""
    settings = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True,
        "state_dict_type": "FULL_STATE_DICT",
    }
    return {"fsdp": True, "fsdp_config": settings}


def whole_weights(model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """`gathered` of a model's state_dict, tied weights once."""
    every, once = (dict(model.named_parameters(remove_duplicate=once)) for once in (False, True))
    tied = every.keys() - once.keys()
    return gathered({name: value for name, value in model.state_dict().items() if name not in tied}, keep)


def gathered(state: State, keep: bool = True) -> State:
    """A nested state with divided tensors whole, on the CPU; empty where not to ``keep``. Every process takes part."""

    def whole(divided: DTensor) -> Tensor:
        full = divided.full_tensor()
        return full.cpu() if keep else full.new_empty(0)

    return tree_map_only(DTensor, whole, state)


def divided(whole: Tensor, like: Tensor) -> Tensor:
    """This process's part of ``whole``, where ``like`` is divided and of its shape; without communication."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def held(weights: Iterable[Tensor]) -> list[Tensor]:
    """This process's parts."""
    return [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]


class ShardedTrainer(Trainer):
    """Trainer that trains and saves under FSDP what it would without; without FSDP, Trainer."""

    def create_accelerator_and_postprocess(self) -> None:
        """Also on CPUs, without Accelerate's policy, and with nothing in the environment for the next Trainer."""
        settings = self.args.fsdp_plugin_args
        if settings is not None:
            settings["mixed_precision_policy"] = MixedPrecisionPolicy()
        super().create_accelerator_and_postprocess()
        processes.set_aside()
        if settings is not None and not self.is_fsdp_enabled:
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**settings)
            state.distributed_type = DistributedType.FSDP
            self.is_fsdp_enabled = True

    def _prepare_for_training(self, *arguments: object, **keywords: object) -> tuple:
        if self.is_fsdp_enabled and self.args.bf16:
            forward = torch.autocast(self.args.device.type, torch.bfloat16)(type(self.model).forward)
            self.model.forward = MethodType(forward, self.model)
        return super()._prepare_for_training(*arguments, **keywords)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer; `get_state_dict` of Accelerate 1.15 leaves tied weights divided, which then cannot be saved."""
        if not self.is_fsdp_enabled:
            return super().save_model(output_dir, _internal_call)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return self._save(output_dir, state_dict=whole_weights(model, keep=self.args.should_save))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        state = gathered(self.optimizer.state_dict(), keep=self.args.should_save)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)
        return None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.is_fsdp_enabled:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        weights = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for path in Path(resume_from_checkpoint).glob("model*.safetensors"):
                for name, whole in load_file(path).items():
                    weights[name].copy_(divided(whole, weights[name]))
        return None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_fsdp_enabled or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        state = torch.load(Path(checkpoint) / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
        state["state"] = {
            index: {name: divided(value, weights[index]) for name, value in of_weight.items()}
            for index, of_weight in state["state"].items()
        }
        self.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
        return None
