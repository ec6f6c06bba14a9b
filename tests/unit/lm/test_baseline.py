"""Transformers as a baseline: what is changed in a draft so that assisted generation can use it."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from specwire.lm.baseline import IMPOSSIBLE, widen
from tests.unit.lm.tiny import CONFIGS, VOCAB


def test_a_reduced_head_is_widened() -> None:
    """Scores of known tokens are what they were, at their places; others cannot be chosen."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(CONFIGS["llama"]()).eval()
    columns = np.array([0, 3, 4, 17, 60], dtype=np.int64)
    model.set_output_embeddings(torch.nn.Linear(32, len(columns), bias=False))
    tokens = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        reduced = model(tokens).logits
        widen(model, columns, VOCAB)
        wide = model(tokens).logits

    assert wide.shape[-1] == model.config.vocab_size == VOCAB
    assert torch.equal(wide[..., torch.from_numpy(columns)], reduced)
    others = np.setdiff1d(np.arange(VOCAB), columns)
    assert (wide[..., torch.from_numpy(others)] == IMPOSSIBLE).all()
