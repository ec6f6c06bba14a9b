"""Tiny random models, one of each architecture, and plain decoding through the port."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import transformers

from specwire.lm.port import Feed, LanguageModel

VOCAB = 61
CONTEXT = 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON),
    "llama_tied": lambda: transformers.LlamaConfig(**_COMMON | {"tie_word_embeddings": True}),
    "qwen2": lambda: transformers.Qwen2Config(**_COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON | {"head_dim": 8}),
    "mistral": lambda: transformers.MistralConfig(**_COMMON | {"sliding_window": None}),
    "granite": lambda: transformers.GraniteConfig(**_COMMON | {"logits_scaling": 3.0}),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, eos_token_id=None, bos_token_id=None
    ),
}


def greedy(model: LanguageModel, prompt: Sequence[int], count: int, slot: int = 0) -> list[int]:
    """Plain decoding: the prompt in one chunk, then token by token."""
    out: list[int] = []
    feed = Feed(slot, 0, list(prompt), 1)
    while len(out) < count:
        out.append(int(model.forward([feed])[0].argmax()))
        feed = Feed(slot, len(prompt) + len(out) - 1, out[-1:], 1)
    return out
