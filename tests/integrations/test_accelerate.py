"""Accelerate on two CPU processes: weights divided by FSDP2, and sequences by torch's context_parallel.

Accelerate (1.15) leaves its FSDP plugin and its parallelism out on CPUs; what it sets on GPUs is set here by hand.
"""

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.optim.swa_utils import AveragedModel
from transformers import Qwen3Config, Qwen3ForCausalLM

import sagebwd
from sagebwd.counts import counts
from sagebwd.integrations.context_parallel import ring_attention, shard
from sagebwd.integrations.transformers import register
from sagebwd.integrations.transformers_sharing import keep_sequences, share_sequences
from sagebwd.reference.metrics import relative_l2
from tests.lab.training.runs import begin, finish

pytestmark = [
    pytest.mark.rounding,
    pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build"),
]

LAYERS, TOKENS, STEPS = 2, 64, 8
IDS = torch.randint(1, 64, (2, TOKENS), generator=torch.Generator().manual_seed(1))
LABELS = F.pad(IDS[:, 1:], (0, 1), value=-100)
PLACES = torch.arange(TOKENS).expand(2, -1)


def qwen3(recipe, implementation="sagebwd", **settings):
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, pad_token_id=0, bos_token_id=None, eos_token_id=None, use_cache=False,
        **settings,
    )  # fmt: skip
    config.sagebwd = {"recipe": recipe}
    torch.manual_seed(0)
    return Qwen3ForCausalLM._from_config(config, attn_implementation=implementation)


def accelerator(parallelism=None):
    """One for each model: Accelerate forgets what was set when it prepares one."""
    AcceleratorState._reset_state()
    made = Accelerator(cpu=True)
    made.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Qwen3DecoderLayer"]
    )
    made.state.distributed_type = DistributedType.FSDP
    if parallelism is not None:
        made.state.parallelism_config = parallelism
        made.state.device_mesh = parallelism.build_device_mesh("cpu")
    return made


def train(model, optimizer, step):
    """The losses of ``step``, which runs forward and backward and returns the loss of the whole batch."""
    losses = []
    for _ in range(STEPS):
        losses.append(step(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def loss_of(model, ids, labels, places):
    logits = model(input_ids=ids, position_ids=places).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (LABELS != -100).sum()


def alone(model):
    loss = loss_of(model, IDS, LABELS, PLACES)
    loss.backward()
    return loss.item()


def by(recipe, step_of, parallelism=None, shared=False):
    """Losses of a model that Accelerate prepared, its weights divided."""
    model, accelerate = qwen3(recipe), accelerator(parallelism)
    model, optimizer = accelerate.prepare(model, torch.optim.Adam(model.parameters(), lr=5e-3))
    whole = [name for name, weight in model.named_parameters() if not isinstance(weight, DTensor)]
    assert not whole, whole
    if shared:
        share_sequences(model, accelerate.torch_device_mesh["cp"].get_group())
    counts.clear()
    return train(model, optimizer, step_of(accelerate))


def expected(recipe):
    model = qwen3(recipe)
    return train(model, torch.optim.Adam(model.parameters(), lr=5e-3), alone)


def assert_learns(losses, exact):
    assert losses[-1] < losses[0] - 0.5
    assert max(abs(a - b) for a, b in zip(losses, exact)) < 0.1


def divided_weights():
    register()

    def step_of(accelerate):
        def step(model):  # each process has one of the two rows
            rank = slice(accelerate.process_index, accelerate.process_index + 1)
            loss = loss_of(model, IDS[rank], LABELS[rank], PLACES[rank])
            accelerate.backward(2 * loss)  # FSDP averages
            dist.all_reduce(loss := loss.detach())
            return loss.item()

        return step

    exact = expected("full")
    for recipe in ("full", "token"):
        losses = by(recipe, step_of)
        assert counts == {f"{recipe} on reference": LAYERS * STEPS}
        assert_learns(losses, exact)
        if recipe == "full":
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(exact), atol=5e-3, rtol=0)
    dist.destroy_process_group()


def divided_sequences():
    register()

    def step_of(accelerate):
        def step(model):
            buffers = [x.clone() for x in (IDS, LABELS, PLACES)]
            with accelerate.maybe_context_parallel(
                buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
            ):
                assert buffers[0].shape == (2, TOKENS // 2)
                loss = loss_of(model, *buffers)
                accelerate.backward(2 * loss)
            dist.all_reduce(loss := loss.detach())
            return loss.item()

        return step

    exact = expected("full")
    for recipe in ("full", "token"):
        losses = by(recipe, step_of, ParallelismConfig(cp_size=2), shared=True)
        assert counts == {f"{recipe} on reference": LAYERS * STEPS * 2}  # a call for each step of the ring
        assert_learns(losses, exact)
        if recipe == "full":
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(exact), atol=5e-3, rtol=0)
    with pytest.raises(NotImplementedError, match="context_parallel divides the sequence"):
        by("token", step_of, ParallelismConfig(cp_size=2))
    dist.destroy_process_group()


def what_torch_replaces():
    """In torch's context_parallel: its function alone, and on a GPU alone; a ring has the same tokens."""
    register()
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    whole = torch.randn(1, 2, TOKENS, 16, generator=torch.Generator().manual_seed(0))
    x, other = whole.clone(), sagebwd.replace_sdpa(impl="reference")
    offsets = torch.tensor([0, TOKENS // 2], dtype=torch.int32)
    sagebwd.sage_attention(whole, whole, whole, recipe="token")
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        assert torch.equal(x, shard(whole, 2))
        packed = x[0].transpose(0, 1)
        with pytest.raises(NotImplementedError, match=r"replaces .*scaled_dot_product_attention alone: "):
            sagebwd.sage_attention(x, x, x, recipe="token")
        with pytest.raises(NotImplementedError, match="ring_attention"):
            sagebwd.sage_attention_varlen(packed, packed, packed, offsets, offsets, TOKENS // 2, TOKENS // 2)
        with pytest.raises(NotImplementedError, match="ring_attention"), other:
            pass
        with pytest.raises(Exception, match="ring_attention"):
            torch.compile(sagebwd.sage_attention, backend="eager")(x, x, x, recipe="token")
        with pytest.raises(NotImplementedError, match=r"_flash_attention_for_cpu.* does not have a sharding strategy"):
            F.scaled_dot_product_attention(x, x, x, is_causal=True)
        ring = ring_attention(x, x, x, is_causal=True, recipe="full", group=mesh.get_group())
    assert relative_l2(ring, shard(F.scaled_dot_product_attention(whole, whole, whole, is_causal=True), 2)) < 1e-5
    sagebwd.sage_attention(x, x, x, recipe="token")  # and afterwards
    dist.destroy_process_group()


def what_a_shared_model_refuses():
    register()
    dist.init_process_group("gloo")
    model = qwen3("full")
    share_sequences(model)
    ids, places = shard(IDS, 1), shard(PLACES, 1)
    model(input_ids=ids, position_ids=places)
    with pytest.raises(ValueError, match=rf"process {dist.get_rank()} of 2 has of {TOKENS}; give shard"):
        model(input_ids=ids)
    with pytest.raises(NotImplementedError, match="padding is not supported where share_sequences"):
        model(input_ids=ids, position_ids=places, attention_mask=F.pad(torch.ones_like(ids)[:, 1:], (1, 0)))
    written = places.clone()
    model(input_ids=ids, position_ids=written)
    written.data.copy_(places.flip(1))  # of which the tensor itself knows nothing
    with pytest.raises(ValueError, match="position_ids: not those of the tokens that process"):
        model(input_ids=ids, position_ids=written)
    offsets = torch.tensor([0, TOKENS // 2, TOKENS], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 32, "max_length_k": 32}
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q, of packed documents, is not supported"):
        model(input_ids=ids, position_ids=places, **packed)
    with pytest.raises(NotImplementedError, match="a KV cache is not supported"):
        model.generate(ids, max_new_tokens=2, use_cache=True, position_ids=places)
    windowed = qwen3("full", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    share_sequences(windowed)
    with pytest.raises(NotImplementedError, match="a sliding window is not supported"):
        windowed(input_ids=ids, position_ids=places)
    # keys of the first process's tokens alone are hidden: the other hears of it
    alone = "padding is not supported where" if dist.get_rank() == 0 else "rank 0 refuses it: .*padding is not"
    hidden = F.pad(torch.ones_like(ids)[:, 1:], (1, 0), value=dist.get_rank())
    with pytest.raises((NotImplementedError, ValueError), match=alone):
        model(input_ids=ids, position_ids=places, attention_mask=hidden)
    keep_sequences(model)
    assert torch.equal(model(input_ids=IDS).logits, qwen3("full")(input_ids=IDS).logits)
    with pytest.raises(ValueError, match=re.escape("Qwen3ForCausalLM has attn_implementation='sdpa'")):
        share_sequences(qwen3("full", "sdpa"))
    with pytest.raises(ValueError, match=re.escape("Linear has attn_implementation=None")):
        share_sequences(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="group: expected a process group or None, got str"):
        share_sequences(model, "cp")
    dist.destroy_process_group()


def copies_of_a_shared_model():
    register()
    dist.init_process_group("gloo")
    whole = qwen3("full")(input_ids=IDS).logits
    model = qwen3("full")
    share_sequences(model, dist.new_group([0, 1]))
    ids, places = shard(IDS, 1), shard(PLACES, 1)
    for copied in (model, copy.deepcopy(model), AveragedModel(model).module):
        assert relative_l2(copied(input_ids=ids, position_ids=places).logits, shard(whole, 1)) < 1e-5
        copied.set_attn_implementation("sdpa")
        for part in (copied, copied.model.layers[0].self_attn):
            with pytest.raises(
                NotImplementedError, match="attn_implementation='sdpa' is not supported where share_seq"
            ):
                part(input_ids=ids, position_ids=places)
        keep_sequences(copied)
        assert torch.equal(copied(input_ids=IDS).logits, qwen3("full", "sdpa")(input_ids=IDS).logits)
        copied.set_attn_implementation("sagebwd")
        assert torch.equal(copied(input_ids=IDS).logits, whole)
    share_sequences(model)
    with pytest.raises(TypeError, match="cannot be pickled, as its process group cannot; save its state_dict"):
        pickle.dumps(model)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "worker",
    [divided_weights, divided_sequences, what_torch_replaces, what_a_shared_model_refuses, copies_of_a_shared_model],
)
def test_on_two_processes(worker):
    finish(begin(2, "cpu", worker))
