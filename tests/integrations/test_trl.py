"""TRL's SFTTrainer with packing, tiny: it learns on sagebwd alone, and packed sequences are really separate."""

import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("trl")
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.generic import is_flash_attention_requested
from trl import SFTConfig, SFTTrainer

from sagebwd.checkpointing import keep_attention
from sagebwd.counts import counts
from sagebwd.planning.plan import Plan

LAYERS, VOCABULARY = 2, 64
LENGTHS = (20, 33, 11, 48, 7, 25, 40, 16)


@pytest.fixture(autouse=True)
def counted(registered):
    """The counts of a test begin with none, and leave those of other tests alone."""
    before = counts.copy()
    counts.clear()
    yield
    counts.clear()
    counts.update(before)


@pytest.fixture
def trainer(tmp_path):
    """Makes a trainer of a tiny Qwen3 on rows of ready token ids."""

    def make(lengths=LENGTHS, **options):
        vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *map(str, range(2, VOCABULARY))])}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>")),
            pad_token="<pad>", eos_token="<eos>",
        )  # fmt: skip
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, head_dim=32,
            num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, bos_token_id=None, eos_token_id=1,
            sagebwd={"recipe": "token"},
        )  # fmt: skip
        torch.manual_seed(0)
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="sagebwd")
        settings = {
            "packing": True, "max_length": 64, "per_device_train_batch_size": 4, "max_steps": 20, "logging_steps": 1,
            "learning_rate": 5e-3, "gradient_checkpointing": False, "bf16": False,
        }  # fmt: skip
        arguments = SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
            **settings | options,
        )  # fmt: skip
        rows = [{"input_ids": tokens(length, seed)} for seed, length in enumerate(lengths)]
        return SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)

    return make


def tokens(length, seed, first=2, last=VOCABULARY):
    return torch.randint(first, last, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def losses(trainer):
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"packing": False, "padding_free": True, "max_length": None}])
def test_packed_training_learns_and_every_layer_is_counted(trainer, options):
    found = losses(trainer(**options))
    assert sum(found[-4:]) / 4 < found[0] - 0.5
    assert counts == {"token on reference": LAYERS * 20}


def test_batches_bring_the_offsets_of_what_is_packed(trainer):
    """By which no model has to find them in position_ids, which a trace could not."""
    batch = next(iter(trainer().get_train_dataloader()))
    starts = (batch["position_ids"][0] == 0).nonzero().flatten()
    assert len(starts) > 2
    assert torch.equal(batch["cu_seq_lens_q"][:-1], starts.int())
    assert "attention_mask" not in batch


def of_the_second(trainer, first, told):
    """The loss of the sequence that comes second alone, and the embedding's gradients."""
    batch = trainer.data_collator([{"input_ids": first}, {"input_ids": tokens(24, 0, 2, 32)}])
    batch["labels"][:, :40] = -100
    if told != "offsets":
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
            del batch[name]
    if told == "nothing":
        batch["position_ids"] = torch.arange(64)[None]
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(), trainer.model.model.embed_tokens.weight.grad.clone()


@pytest.mark.parametrize("told", ["offsets", "position_ids"])
def test_a_sequence_knows_nothing_of_its_neighbour(trainer, told):
    """A neighbour of other tokens changes no bit, and has no gradient itself."""
    trainer = trainer()
    (loss, gradient), (other, same) = (of_the_second(trainer, tokens(40, seed, 32), told) for seed in (1, 2))
    assert loss == other
    assert torch.equal(gradient, same)
    assert gradient[2:32].any()
    assert not gradient[32:].any()
    assert counts == {"token on reference": 2 * LAYERS}


@pytest.mark.parametrize(
    ("kept", "runs"),
    [(None, 2), ({"selective": True}, 2), ({"context_fn": keep_attention, "use_reentrant": False}, 1)],
)
def test_checkpointing_keeps_attention_by_our_policy_alone(trainer, kept, runs, monkeypatch):
    """TRL's own looks for operators of torch and flash-attn, so that sagebwd's forward runs again."""
    trainer = trainer(gradient_checkpointing=True, gradient_checkpointing_kwargs=kept, max_steps=2)
    real, seen = Plan.forward, []
    monkeypatch.setattr(Plan, "forward", lambda *arguments: seen.append(1) or real(*arguments))
    trainer.train()
    assert len(seen) == LAYERS * 2 * runs


def test_nothing_of_transformers_takes_the_name_for_flash_attention():
    """What it does for that name alone is listed in docs/integrations/trainers.md."""
    assert not is_flash_attention_requested(requested_attention_implementation="sagebwd")
