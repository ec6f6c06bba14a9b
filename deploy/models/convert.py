"""From the demo's GGUF to the files that services load: bfloat16 safetensors, tokenizer, chat template, configs.

Numbers are those that transformers' own reader gives (a test holds them to it); it needs half a minute, this needs seconds.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deploy.models.gguf import Gguf

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3
"""Token type of special tokens in GGUF."""


def convert(gguf: Gguf, folder: Path, report: Callable[[int, int], None]) -> None:
    """Writes every file into `folder`. `report(done, total)` counts tensors."""
    facts = gguf.facts
    if facts["general.architecture"] != "llama" or facts["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(
            f"a {facts['general.architecture']} model; only llama with a byte-level tokenizer is known here"
        )
    config = _config(facts)
    _write_weights(gguf, config, folder / "model.safetensors", report)
    _write_tokenizer(facts, folder / "tokenizer.json")
    ids = {f"{name}_token_id": facts[f"tokenizer.ggml.{key}_token_id"] for name, key in _SPECIAL.items()}
    _write_json(folder / "config.json", config | ids)
    _write_json(folder / "generation_config.json", ids)
    tokens = facts["tokenizer.ggml.tokens"]
    special = {f"{name}_token": tokens[ids[f"{name}_token_id"]] for name in _SPECIAL}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    (folder / "chat_template.jinja").write_text(facts["tokenizer.chat_template"], encoding="utf-8")


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.rope.dimension_count"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": facts["llama.vocab_size"],
    }


def _write_weights(gguf: Gguf, config: dict[str, Any], path: Path, report: Callable[[int, int], None]) -> None:
    """A safetensors file: the header's length, the header as JSON, then the tensors one after the other."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in gguf.names:
        shape = gguf.shape(name)
        end = at + 2 * int(np.prod(shape))
        header[_name(name)] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(packed)) + packed)
        for done, name in enumerate(gguf.names):
            report(done, len(gguf.names))
            values = gguf.tensor(name)
            part = name.split(".")[-2]
            file.write(to_bfloat16(_unpermute(values, heads[part]) if part in heads else values).data)
    report(len(gguf.names), len(gguf.names))


def _name(name: str) -> str:
    """blk.7.attn_q.weight -> model.layers.7.self_attn.q_proj.weight"""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _unpermute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """GGUF keeps the two halves that rotate together next to each other; transformers keeps them apart."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each float32's bits, rounded to nearest, ties to even. Finite numbers only."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    upper = (bits >> 16) & 1
    upper += 0x7FFF
    upper += bits
    return (upper >> 16).astype(np.uint16)


def _write_tokenizer(facts: dict[str, Any], path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # what GGUF calls "smollm"
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token for token, kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(path), pretty=False)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
