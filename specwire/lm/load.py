"""From a configuration to a model: the one way in which services get theirs."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from specwire.law.errors import InvalidArgument
from specwire.lm.port import LanguageModel
from specwire.lm.table_config import TableConfig

TABLE = "table"
"""The name of the exact tiny model that needs no weights."""


class ModelConfig(BaseModel):
    """Which model, where, and how large. Frozen; measured capacity is a result and never written back."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = TABLE
    """Folder of a checkpoint, hub id (taken from the local hub cache when offline), or `table`."""
    name: str | None = None
    """What it is called towards people; default: the folder's name, the hub id, or the table's name."""
    gguf_file: str | None = None
    """File within the folder or hub id; its weights are turned back to `precision`."""
    tokenizer: str | None = None
    """tokenizer.json or its folder; default: the model's own folder, then `embeddings_from`."""
    embeddings_from: str | None = None
    """Checkpoint of the target, for a draft that has no embedding table of its own."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    precision: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "float32"
    """auto: the fastest that the device has instructions for (`torch_load.fastest_precision`). A block costs little more than
    one token in float32 on any CPU; in bfloat16 arithmetic without instructions for it, as much as its tokens one by one. On a CPU
    float16 is a precision of the weights, and arithmetic is float32; so is bfloat16 where the layers are compiled (with AMX, on the
    first 16 bits). int8, on a CPU, is that too, and it changes the model (int8.py)."""
    max_context: int | None = Field(default=None, ge=2)
    """Longest sequence, block included; default and upper limit: the model's own."""
    max_sessions: int = Field(default=8, ge=1, le=65536)
    """Cache slots. Memory: slots x context x (bytes of keys and values per token)."""
    max_block: int = Field(default=16, ge=0, le=4096)
    """Longest block of proposed tokens. Under `strict` every pass is max_sessions x (max_block + 1) tokens, where it has to be."""
    exactness: Literal["fast", "strict"] = "fast"
    """strict: scores do not depend on what else is in the batch. Compiled layers (native.py) keep that at no cost; others by one
    fixed shape of every pass, slowly."""
    fused: bool = True
    """Llama and its relatives run on our own layers: on CPUs compiled ones (native.py), else ones of fewer and larger operations
    (fused.py); false: on transformers' own."""
    cuda_graphs: bool = True
    """On a GPU, steps of our own layers are repeated from recordings, made at loading for each shape (static_steps.py); false: each
    step is started kernel by kernel."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Compute threads on a CPU; 0: as the library decides."""
    table: TableConfig | None = None
    """Only with `model: table`."""


def build_model(config: ModelConfig) -> LanguageModel:
    """The model, loaded and ready. Raises InvalidArgument naming the setting at fault."""
    if config.model == TABLE:
        return _table(config)
    if config.table is not None:
        raise InvalidArgument("table", config.table, f"absent unless model is {TABLE!r} (it is {config.model!r})")
    from specwire.lm.torch_load import load_torch_model

    return load_torch_model(config)


def _table(config: ModelConfig) -> LanguageModel:
    from specwire.lm.table import TableModel
    from specwire.lm.vocabulary import read_vocabulary

    for field in ("gguf_file", "embeddings_from"):
        if getattr(config, field) is not None:
            raise InvalidArgument(field, getattr(config, field), f"absent for model {TABLE!r}")
    if config.device != "cpu":
        raise InvalidArgument("device", config.device, f"cpu for model {TABLE!r}")
    table = config.table or TableConfig()
    if config.name is not None:
        table = dataclasses.replace(table, name=config.name)
    if config.max_context is not None:
        table = dataclasses.replace(table, max_context=config.max_context)
    vocabulary = read_vocabulary(config.tokenizer) if config.tokenizer is not None else ()
    if vocabulary and len(vocabulary) != table.vocab_size:
        raise InvalidArgument("table.vocab_size", table.vocab_size, f"the tokenizer's {len(vocabulary)} tokens")
    return TableModel(table, config.max_sessions, vocabulary=vocabulary)
