"""Tiny random models, one of each architecture, and plain decoding through the port."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from specwire.law.errors import InvalidArgument
from specwire.lm.load import ModelConfig, build_model
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
    "llama_heads": lambda: transformers.LlamaConfig(**_COMMON | {"num_key_value_heads": 4}),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON | {"head_dim": 8}),
    "qwen3_wide": lambda: transformers.Qwen3Config(**_COMMON | {"head_dim": 16}),
    "llama_shared_keys": lambda: transformers.LlamaConfig(**_COMMON | {"num_attention_heads": 8, "head_dim": 24}),
    "llama_odd_heads": lambda: transformers.LlamaConfig(**_COMMON | {"head_dim": 12}),
    "llama_long_heads": lambda: transformers.LlamaConfig(**_COMMON | {"head_dim": 64}),
    "llama_biased": lambda: transformers.LlamaConfig(**_COMMON | {"attention_bias": True, "mlp_bias": True}),
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


def write_tokenizer(path: Path, tokens: Mapping[str, int]) -> None:
    """A tokenizer.json whose tokens are whole words."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel(dict(tokens), unk_token=next(iter(tokens)))).save(str(path))


def write_gguf(path: Path) -> None:
    """A quantised Llama of the demo's kind: Q8_0 embeddings, Q4_1 layers, a byte-level tokenizer, 2 layers of width 64."""
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ab", "abab", "Ġa"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "ab ab", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    rng = np.random.default_rng(0)
    q4, q8 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0

    def add(name: str, *shape: int, kind: Any = None) -> None:
        values = rng.normal(1.0 if len(shape) == 1 else 0.0, 0.3, shape).astype(np.float32)
        if kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), 64, kind=q8)
    add("output_norm.weight", 64)
    for layer in range(2):
        add(f"blk.{layer}.attn_norm.weight", 64)
        add(f"blk.{layer}.ffn_norm.weight", 64)
        for name, rows, columns in (
            ("attn_q", 64, 64),
            ("attn_k", 32, 64),
            ("attn_v", 32, 64),
            ("attn_output", 64, 64),
            ("ffn_gate", 96, 64),
            ("ffn_up", 96, 64),
            ("ffn_down", 64, 96),
        ):
            add(f"blk.{layer}.{name}.weight", rows, columns, kind=q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build(path: Path, **settings: Any) -> Any:
    """The model in a folder."""
    return build_model(ModelConfig(model=str(path), **{"max_sessions": 2} | settings))


def refuse(path: Path, field: str, said: str, **settings: Any) -> None:
    """Asserts that the model is refused, naming the field and saying why."""
    with pytest.raises(InvalidArgument, match=said) as caught:
        build(path, **settings)

    assert caught.value.field == field
