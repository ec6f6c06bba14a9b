"""Models whose cache cannot be cut back, or that we would misread, are refused at start with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from specwire.lm import native
from specwire.lm.kv_slots import KVSlots
from tests.unit.lm.tiny import CONTEXT, build, greedy, refuse

PROMPT = [3, 1, 4, 1, 5, 9]
SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mamba": (lambda: transformers.MambaConfig(**SMALL), "recurrent state"),
    "rwkv": (lambda: transformers.RwkvConfig(**SMALL), "recurrent state"),
    "hybrid": (lambda: transformers.JambaConfig(**SMALL), "recurrent state"),
    "encoder-decoder": (lambda: transformers.T5Config(vocab_size=32, d_model=16), "encoder-decoder"),
    "window": (lambda: transformers.MistralConfig(**SMALL, sliding_window=8), "sliding window of 8 .* at most 8"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_cut_back_are_refused(kind: str, tmp_path: Path) -> None:
    """At start, with the reason, before weights are read."""
    config, said = REFUSED[kind]
    config().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")

    refuse(tmp_path, "model", said, max_context=64)


@pytest.mark.parametrize(
    "config",
    [
        transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2),
        transformers.Gemma2Config(**SMALL, intermediate_size=32, num_key_value_heads=1, head_dim=8, sliding_window=64),
    ],
    ids=["alibi", "softcap"],
)
def test_attention_of_another_kind_is_refused(config: Any, tmp_path: Path) -> None:
    """Scores that depend on more than keys, values and positions would come out wrong."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)

    refuse(tmp_path, "model", "does not support an attention implementation|soft cap", max_context=64)


@pytest.mark.parametrize("mistake", ["no mask", "stale cells", "stale cells of other layers", "attention raises"])
def test_the_trial_notices_a_cache_that_is_misread(mistake: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded mistakes: the model is refused at start instead of answering wrongly."""
    write, write_both = KVSlots.write, KVSlots.write_both

    def forget(self: KVSlots, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        return write(self, layer, keys * (layer > 0), values)

    def forget_both(self: KVSlots, layer: int, states: torch.Tensor) -> Any:
        return write_both(self, layer, states * (layer > 0))

    def fail(*_: Any) -> None:
        raise NotImplementedError("attention of another kind")

    target = {
        "no mask": ("_mask", lambda *_: None),
        "stale cells": ("write_both", forget_both),
        "stale cells of other layers": ("write", forget),
        "attention raises": ("_attend", fail),
    }
    monkeypatch.setattr(KVSlots, *target[mistake])
    monkeypatch.setattr(native, "load", lambda _: None)  # test_native.py seeds its own

    said = "attention of another kind" if mistake == "attention raises" else "can be cut back"
    refuse(llama, "model", said, fused=not mistake.endswith("other layers"))


def test_a_window_as_long_as_the_context_is_no_window(tmp_path: Path) -> None:
    """Mistral with its window is served up to that length."""
    config = transformers.MistralConfig(
        **SMALL, intermediate_size=32, num_key_value_heads=1, sliding_window=CONTEXT, eos_token_id=None
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    expected = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, 6), max_new_tokens=20, do_sample=False, pad_token_id=0
    )

    assert greedy(build(tmp_path, max_context=CONTEXT), PROMPT, 20) == expected[0, 6:].tolist()


@pytest.mark.parametrize(
    ("rope", "fixed"),
    [
        ({"rope_type": "longrope", "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}, CONTEXT),
        ({"rope_type": "dynamic", "factor": 2.0}, CONTEXT),
    ],
    ids=["longrope", "dynamic"],
)
def test_a_rotation_that_changes_with_the_batch_is_served_as_far_as_it_does_not(
    rope: dict[str, Any], fixed: int, tmp_path: Path
) -> None:
    """Past that length one long text would turn the keys of all others."""
    longest = 2 * fixed if rope["rope_type"] == "longrope" else fixed
    config = transformers.LlamaConfig(
        **SMALL,
        intermediate_size=32,
        max_position_embeddings=longest,
        rope_parameters=rope | {"rope_theta": 1e4, "original_max_position_embeddings": fixed},
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    expected = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, 6), max_new_tokens=20, do_sample=False, pad_token_id=0
    )

    if longest > fixed:
        refuse(tmp_path, "model", f"set max_context to at most {fixed}", max_context=fixed + 1)
    assert greedy(build(tmp_path, max_context=fixed), PROMPT, 20) == expected[0, 6:].tolist()
