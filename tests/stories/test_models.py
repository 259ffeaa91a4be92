"""Stories 3 to 5: attention inside models, Transformers and its Trainer."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from sagebwd.integrations.transformers import register
from tests.stories import on_each_device

pytestmark = pytest.mark.rounding


def qwen3(attention, dtype=torch.float32, device="cpu", recipe="auto"):
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, use_cache=False, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    register()
    config.sagebwd = {"recipe": recipe}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).to(device)


def document(length, seed):
    return torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(seed))


class GradientsOfProjections(TrainerCallback):
    """What the projections of the first layer got in each step, before it is thrown away."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        attention = getattr(model, "_orig_mod", model).model.layers[0].self_attn
        self.norms.append([getattr(attention, f"{name}_proj").weight.grad.norm().item() for name in "qkv"])


@on_each_device
@pytest.mark.parametrize("variant", ["checkpointing", "compiled", "bf16 weights"])
def test_story_5_trainer_with_bf16_just_works(device, variant, tmp_path):
    """“no dtype error, every logged grad_norm finite, {q,k,v}_proj.weight.grad non-zero in a hook; then again with
    torch_compile=True and with bf16 weights”."""
    torch._dynamo.reset()
    model = qwen3("sagebwd", torch.bfloat16 if variant == "bf16 weights" else torch.float32, recipe="token")
    rows = [{"input_ids": row, "labels": row} for row in document(16 * 40, seed=5).view(16, 40)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=6 if device == "cpu" else 20, bf16=True, use_cpu=device == "cpu", logging_steps=1,
        logging_nan_inf_filter=False, per_device_train_batch_size=2, report_to="none", save_strategy="no",
        disable_tqdm=True, gradient_checkpointing=variant != "compiled", torch_compile=variant == "compiled",
        torch_compile_backend="aot_eager" if variant == "compiled" and device == "cpu" else None,
    )  # fmt: skip
    seen = GradientsOfProjections()
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[seen])
    trainer.train()
    logged = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    assert len(logged) == arguments.max_steps
    assert torch.tensor(logged).isfinite().all()
    assert len(seen.norms) == arguments.max_steps
    assert min(min(norms) for norms in seen.norms) > 0
