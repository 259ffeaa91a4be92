"""The model that a config describes."""

import torch

from sagebwd.training.model import build


def test_embeddings_get_rows_up_to_a_multiple(tiny):
    plain, padded = (build(tiny.replace({"model.vocabulary_multiple": multiple}), 257) for multiple in (1, 128))
    assert plain.config.vocab_size == 257
    assert padded.config.vocab_size == padded.get_input_embeddings().weight.shape[0] == 384
    ids = torch.arange(64)[None] * 4
    assert padded(input_ids=ids).logits.shape[-1] == 384
    assert torch.isfinite(padded(input_ids=ids, labels=ids).loss)
