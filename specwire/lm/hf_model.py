"""A transformers model from a checkpoint: refused with the reason when its cache cannot be cut back, else loaded whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specwire.law.errors import InvalidArgument
from specwire.lm import compat
from specwire.lm.checkpoint import Checkpoint


def read_config(checkpoint: Checkpoint) -> Any:
    """The model's configuration. Raises InvalidArgument when transformers does not know the architecture."""
    gguf = {"gguf_file": checkpoint.gguf_file} if checkpoint.gguf_file else {}
    try:
        with compat.quiet():
            return AutoConfig.from_pretrained(checkpoint.folder, **gguf)
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidArgument(
            "model", str(checkpoint.folder), f"an architecture that transformers knows ({reason})"
        ) from error


def check_supported(config: Any, context: int) -> None:
    """Raises InvalidArgument unless every layer attends to the whole context, so that cutting back costs nothing."""
    kind = config.model_type

    def refuse(why: str) -> InvalidArgument:
        return InvalidArgument("model", kind, f"a decoder with full attention in every layer: {why}")

    if getattr(config, "is_encoder_decoder", False):
        raise refuse("this is an encoder-decoder")
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise refuse("it has no causal language model in transformers")
    if getattr(mapping[type(config)], "_is_stateful", False):
        raise refuse("its recurrent state cannot be cut back after a refusal")
    layers = compat.cache_layer_types(config) - {"DynamicLayer"}
    windows = {layer for layer in layers if layer == "DynamicSlidingWindowLayer"}
    if layers - windows:
        raise refuse(f"it has {', '.join(sorted(layers - windows))}")
    window = getattr(config.get_text_config(decoder=True), "sliding_window", None)
    if windows and window is not None and window < context:
        raise refuse(
            f"its sliding window of {window} is shorter than max_context {context}; set max_context to at most {window}"
        )
    for rope_type, fixed in _changing_rotations(config.get_text_config(decoder=True)):
        if fixed < context:
            raise refuse(
                f"its {rope_type} rotary embedding changes for the whole batch when one text passes {fixed} tokens; "
                f"set max_context to at most {fixed}"
            )


def _changing_rotations(config: Any) -> list[tuple[str, int]]:
    """Rotary embeddings whose frequencies depend on the longest text of the batch: (kind, length up to which they do not)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in (parameters, *parameters.values()) if isinstance(each, dict) and "rope_type" in each]
    longest = getattr(config, "max_position_embeddings", 0)
    return [
        (each["rope_type"], int(each.get("original_max_position_embeddings") or longest))
        for each in kinds
        if each["rope_type"] in ("dynamic", "longrope")
    ]


def load(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype
) -> tuple[PreTrainedModel, npt.NDArray[np.int64] | None]:
    """The model on the CPU, and the target ids of its columns when its vocabulary is reduced."""
    reduced = _find_tensor(checkpoint.folder, "d2t") if checkpoint.gguf_file is None else None
    try:
        with compat.quiet():
            if reduced is not None or checkpoint.embeddings is not None:
                model, columns = _load_borrowing(checkpoint, config, dtype)
            else:
                gguf = {"gguf_file": checkpoint.gguf_file} if checkpoint.gguf_file else {}
                model, columns = _load_plain(checkpoint, dtype, gguf), None
    except (RuntimeError, OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InvalidArgument("model", str(checkpoint.folder), f"a checkpoint that can be loaded ({reason})") from error
    model.requires_grad_(False)
    return model.eval(), columns


def _load_plain(checkpoint: Checkpoint, dtype: torch.dtype, gguf: dict[str, str]) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        output_loading_info=True,
        **gguf,
    )
    missing = [name for name in info["missing_keys"] if not name.endswith(("rotary_emb.inv_freq", ".attn.bias"))]
    if missing or info.get("mismatched_keys"):
        raise ValueError(f"weights are missing or of another shape: {sorted(missing or info['mismatched_keys'])[:4]}")
    loaded: PreTrainedModel = model
    return loaded


def _load_borrowing(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype
) -> tuple[PreTrainedModel, npt.NDArray[np.int64] | None]:
    """A draft with its own head, perhaps over a reduced vocabulary, and perhaps with the target's embedding table."""
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.folder.glob("*.safetensors")):
        state |= load_file(path)
    shift = state.pop("d2t", None)
    state.pop("t2d", None)  # the mask of kept ids says nothing that d2t does not
    config.tie_word_embeddings = config.tie_word_embeddings and shift is None
    model = compat.from_config(config, dtype)
    embedding = (
        next(name for name, module in model.named_modules() if module is model.get_input_embeddings()) + ".weight"
    )
    if embedding not in state:
        if checkpoint.embeddings is None:
            raise InvalidArgument(
                "embeddings_from", None, f"the target's checkpoint, since this one has no {embedding}"
            )
        borrowed = _find_tensor(checkpoint.embeddings, embedding)
        if borrowed is None:
            raise InvalidArgument("embeddings_from", str(checkpoint.embeddings), f"a checkpoint that holds {embedding}")
        state[embedding] = borrowed
        if tuple(borrowed.shape) != tuple(model.get_input_embeddings().weight.shape):
            raise InvalidArgument(
                "embeddings_from",
                tuple(borrowed.shape),
                f"an embedding table of shape {tuple(model.get_input_embeddings().weight.shape)}",
            )
    columns = None
    if shift is not None:
        columns = (torch.arange(len(shift)) + shift).numpy().astype(np.int64)
        if (np.diff(columns) <= 0).any() or columns[0] < 0 or columns[-1] >= config.vocab_size:
            raise ValueError(f"d2t must give ascending target ids below {config.vocab_size}")
        head_name = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
        head = state[f"{head_name}.weight"]
        if len(head) < len(columns):
            raise ValueError(f"the head has {len(head)} rows, fewer than the {len(columns)} ids of d2t")
        state[f"{head_name}.weight"] = head[: len(columns)]  # rows past d2t are padding
        model.set_output_embeddings(torch.nn.Linear(head.shape[1], len(columns), bias=False, dtype=dtype))
    elif config.tie_word_embeddings:
        state.setdefault("lm_head.weight", state[embedding])
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()})
    return model, columns


def _find_tensor(folder: Path, name: str) -> torch.Tensor | None:
    """One tensor of a checkpoint in one or several files, without reading the others."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118  (the handle is no mapping)
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    return None
