"""A model of random weights with its tokenizer, and a text."""

import pytest
import torch


@pytest.fixture
def folder(tmp_path):
    # here, since few tests of this folder need them
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(str(i * i % 64) for i in range(300)))
    return tmp_path
