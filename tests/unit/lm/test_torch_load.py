"""Checkpoints as they come: vocabularies with padding and holes, borrowed embeddings, GGUF; and those refused at start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specwire.law.errors import InvalidArgument
from specwire.law.values import SamplingSpec
from specwire.lm.load import ModelConfig, build_model
from specwire.lm.port import Feed
from tests.unit.lm.tiny import CONTEXT, VOCAB, build, greedy, refuse, write_gguf, write_tokenizer

PROMPT = [3, 1, 4, 1, 5, 9]


def test_facts_come_from_the_files(llama: Path) -> None:
    """Sampling defaults and end tokens from the generation config, token map from the tokenizer."""
    write_tokenizer(llama / "tokenizer.json", {f"w{index}": index for index in range(VOCAB)})
    (llama / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 7, 2], "temperature": 0.6, "top_k": 20, "do_sample": False, "top_p": None})
    )
    spec = build(llama, max_context=32).spec

    assert spec.name == "llama"
    assert spec.eos_token_ids == (2, 7)
    assert spec.default_sampling == SamplingSpec(temperature=0.6, top_k=20)
    assert spec.vocabulary[:2] == (b"w0", b"w1")
    assert (spec.vocab_size, spec.max_context, spec.architecture) == (VOCAB, 32, "LlamaForCausalLM")


def test_a_hub_model_keeps_its_name(llama: Path, tmp_path: Path) -> None:
    """Given as the folder that the hub's cache keeps it in."""
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "abc"
    shutil.copytree(llama, snapshot)

    assert build(snapshot).spec.name == "someone/tiny"
    assert build(snapshot, name="mine").spec.name == "mine"


def test_silence_means_temperature_one(llama: Path) -> None:
    """A generation config that says nothing (or is not there) leaves every number neutral (field report 13)."""
    (llama / "generation_config.json").unlink(missing_ok=True)

    assert build(llama).spec.default_sampling == SamplingSpec(temperature=1.0)


def test_padding_rows_and_holes_never_come_out(llama: Path) -> None:
    """Rows past the tokenizer are cut off; ids within it that spell nothing get minus infinity (field reports 57, 59)."""
    state = load_file(llama / "model.safetensors")
    state["lm_head.weight"][50:] = 9 * state["lm_head.weight"][:11]  # the best scores of all, some of them
    save_file(state, llama / "model.safetensors", {"format": "pt"})
    full = build(llama).forward([Feed(0, 0, PROMPT, 6)]).clone()
    write_tokenizer(llama / "tokenizer.json", {f"w{index}": index for index in range(50) if index != 30})
    model = build(llama)
    scores = model.forward([Feed(0, 0, PROMPT, 6)])

    assert model.spec.vocab_size == 50
    assert scores.shape == (6, 50)
    assert torch.isneginf(scores[:, 30]).all()
    keep = [index for index in range(50) if index != 30]
    torch.testing.assert_close(scores[:, keep], full[:, keep], rtol=1e-4, atol=1e-4)
    assert not {30, *range(50, VOCAB)} & set(greedy(model, PROMPT, 40))
    with pytest.raises(ValueError, match="token ids"):
        model.forward([Feed(0, 0, [50], 1)])


def test_a_reduced_draft_borrows_the_embeddings(llama: Path, tmp_path: Path) -> None:
    """d2t: column c is target id c + d2t[c]; the table and the tokenizer come from the target."""
    write_tokenizer(llama / "tokenizer.json", {f"w{index}": index for index in range(VOCAB)})
    ids = [0, 1, 5, 9, 20, 60]
    state = load_file(llama / "model.safetensors")
    del state["model.embed_tokens.weight"]
    head = state["lm_head.weight"]
    padding = 5 * head[:2]  # a head padded wider than d2t, with high scores
    state["lm_head.weight"] = torch.cat([head[ids], padding])
    state["d2t"] = torch.tensor([target - column for column, target in enumerate(ids)])
    state["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    draft = tmp_path / "draft"
    draft.mkdir()
    shutil.copy(llama / "config.json", draft)
    save_file(state, draft / "model.safetensors", {"format": "pt"})
    model = build(draft, embeddings_from=str(llama))

    assert model.spec.columns.tolist() == ids
    assert model.spec.vocab_size == VOCAB
    assert model.spec.vocabulary == build(llama).spec.vocabulary
    expected = build(llama).forward([Feed(0, 0, PROMPT, 6)])[:, ids]
    torch.testing.assert_close(model.forward([Feed(0, 0, PROMPT, 6)]), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        model.score_sequence(PROMPT).float(), model.forward([Feed(0, 0, PROMPT, 6)]), rtol=1e-4, atol=1e-4
    )
    refuse(draft, "embeddings_from", "has no model.embed_tokens.weight")


def test_the_shipped_draft_fits_its_target(tmp_path: Path) -> None:
    """The demo draft loads with a table of the demo's shape, and its columns are ids of 49,152 tokens."""
    from deploy.models import resolve

    draft = Path(resolve("demo-draft"))
    shutil.copy(draft / "config.json", tmp_path)
    table = torch.randn(49152, 576, dtype=torch.bfloat16)
    save_file({"model.embed_tokens.weight": table}, tmp_path / "model.safetensors", {"format": "pt"})
    model = build(draft, embeddings_from=str(tmp_path), precision="bfloat16", max_context=64)

    assert model.spec.columns.shape == (8192,)
    assert model.spec.columns[-1] < model.spec.vocab_size == 49152
    assert model.forward([Feed(0, 0, PROMPT, 1)]).shape == (1, 8192)


def test_a_gguf_file_loads(tmp_path: Path) -> None:
    """Weights, end token and token map come out of the one file."""
    write_gguf(tmp_path / "tiny.gguf")
    model = build(tmp_path, gguf_file="tiny.gguf")

    assert model.spec.vocab_size == 262
    assert model.spec.vocabulary[259:] == (b"ab", b"abab", "Ġa".encode())
    assert model.spec.eos_token_ids == (2,)
    assert len(greedy(model, PROMPT, 5)) == 5


def test_half_precisions_stay_near(load: Callable[..., Any]) -> None:
    """bfloat16 and float16 give float32 rows, off by rounding."""
    exact = load("llama").forward([Feed(0, 0, PROMPT, 6)]).clone()
    for precision, allowed in (("bfloat16", 0.1), ("float16", 0.02)):
        scores = load("llama", precision=precision).forward([Feed(0, 0, PROMPT, 6)])

        assert scores.dtype == torch.float32
        assert (scores - exact).square().mean().sqrt() < allowed * exact.std()


def test_the_fingerprint_tells_weights_and_settings_apart(llama: Path) -> None:
    """Equal files and settings agree; one changed weight or another precision does not."""
    first = build(llama).spec.fingerprint
    half = build(llama, precision="bfloat16").spec.fingerprint
    again = build(llama, max_sessions=1).spec.fingerprint
    state = load_file(llama / "model.safetensors")
    state["model.norm.weight"][0] += 1
    save_file(state, llama / "model.safetensors", {"format": "pt"})

    assert first == again
    assert len({first, half, build(llama).spec.fingerprint}) == 3


@pytest.mark.parametrize(
    ("settings", "field", "said"),
    [
        ({"max_context": CONTEXT + 1}, "max_context", f"at most the model's {CONTEXT}"),
        ({"device": "tpu"}, "device", "cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "device", "CUDA devices"),
        ({"gguf_file": "none.gguf"}, "gguf_file", "a file in"),
        ({"tokenizer": "/nowhere"}, "tokenizer", "tokenizer.json"),
        ({"table": {"vocab_size": 4}}, "table", "absent unless"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], field: str, said: str, llama: Path) -> None:
    """Field, value and limit."""
    refuse(llama, field, said, **settings)


def test_missing_weights_are_refused(llama: Path) -> None:
    """A checkpoint that lacks a tensor must not be served with random numbers in its place."""
    state = load_file(llama / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, llama / "model.safetensors", {"format": "pt"})

    refuse(llama, "model", "weights are missing")


def test_an_absent_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not there, an empty one, and a hub id while offline."""
    monkeypatch.setenv("SPECWIRE_OFFLINE", "1")
    refuse(tmp_path / "no where", "model", "an existing folder")
    refuse(tmp_path, "model", "config.json")
    refuse(Path("nobody/nothing"), "model", "hub id that can be fetched")


def test_the_table_needs_no_files(tmp_path: Path) -> None:
    """And refuses settings that only weights have."""
    write_tokenizer(tmp_path / "tokenizer.json", {f"w{index}": index for index in range(4)})
    model = build_model(ModelConfig(table={"vocab_size": 4}, tokenizer=str(tmp_path), max_context=9, max_sessions=3))

    assert (model.num_slots, model.capacity, model.spec.vocabulary[3]) == (3, 9, b"w3")
    with pytest.raises(InvalidArgument, match="embeddings_from"):
        build_model(ModelConfig(embeddings_from="x"))
    with pytest.raises(InvalidArgument, match="tokenizer's 4 tokens"):
        build_model(ModelConfig(table={"vocab_size": 5}, tokenizer=str(tmp_path)))
