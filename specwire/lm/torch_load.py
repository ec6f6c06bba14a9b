"""From a configuration to a `TorchModel`: facts gathered, settings checked, the model loaded, and one trial run made.

The trial feeds the model ragged rows with a cut-back in the middle and compares with transformers' own single pass. An
architecture whose cache or positions we misunderstand is refused here, at start, rather than answering wrongly.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import platform
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from specwire.law.errors import InvalidArgument
from specwire.lm import checkpoint as files
from specwire.lm import hf_model, int8
from specwire.lm.fused import compiled_library
from specwire.lm.linear import can_halve
from specwire.lm.load import ModelConfig
from specwire.lm.port import Feed, ModelSpec
from specwire.lm.torch_lm import TorchModel
from specwire.lm.vocabulary import read_vocabulary, spell

# Root mean square difference allowed in the trial, as a share of the scores' own spread. Kernels differ by 1e-6 and 1e-2.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


def load_torch_model(config: ModelConfig) -> TorchModel:
    """Raises InvalidArgument naming the setting at fault."""
    device = _device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    checkpoint = files.find(config.model, config.gguf_file, config.embeddings_from)
    hf_config = hf_model.read_config(checkpoint)
    limit = getattr(hf_config.get_text_config(decoder=True), "max_position_embeddings", None)
    context = config.max_context or limit
    if context is None:
        raise InvalidArgument("max_context", None, "given, since the model states no limit")
    if limit is not None and context > limit:
        raise InvalidArgument("max_context", context, f"at most the model's {limit}")
    hf_model.check_supported(hf_config, context)
    precision = fastest_precision(device) if config.precision == "auto" else config.precision
    load = functools.partial(_load, config, checkpoint, hf_config, device, getattr(torch, precision))
    try:
        model, columns = load()
    except InvalidArgument as error:
        if config.precision != "auto" or error.field != "precision":
            raise
        precision = "float32"  # weights that float16 cannot hold
        load = functools.partial(_load, config, checkpoint, hf_config, device, torch.float32)
        model, columns = load()

    rows = model.get_input_embeddings().weight.shape[0]
    vocabulary = _vocabulary(config, checkpoint)[:rows]
    vocab_size = len(vocabulary) or rows
    if columns is not None and columns[-1] >= vocab_size:
        raise InvalidArgument(
            "model", config.model, f"a draft whose d2t stays below the {vocab_size} tokens of the tokenizer"
        )
    generation = files.read_json(checkpoint.folder / "generation_config.json")
    eos = [token for token in files.eos_token_ids(generation, hf_config.to_dict()) if 0 <= token < vocab_size]
    spec = ModelSpec(
        name=config.name or _name(config.model),
        architecture=type(model).__name__,
        vocab_size=vocab_size,
        vocabulary=vocabulary,
        max_context=context,
        eos_token_ids=tuple(eos),
        default_sampling=files.default_sampling(generation),
        device=str(device),
        precision=precision,
        fingerprint="",
        columns=columns,
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
    )
    tokens = [(7 * index + 3) % vocab_size for index in range(min(9, context))]
    with torch.no_grad():
        expected = model.to(device)(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0].float()
    arithmetic = model.dtype
    wrapped = TorchModel(
        model,
        spec,
        config.max_sessions,
        strict_width=config.max_block + 1 if config.exactness == "strict" else None,
        reload=lambda: load()[0],
        fused=config.fused,
        recorded_width=config.max_block + 1 if config.cuda_graphs else 0,
    )
    layers = f"compiled {wrapped.arithmetic}" if wrapped.compiled else "fused" if config.fused else ""
    facts = [precision, config.exactness, layers, str(vocab_size)]
    wrapped.spec = dataclasses.replace(spec, fingerprint=files.fingerprint(checkpoint, facts))
    _trial(wrapped, config.model, tokens, expected, arithmetic)
    wrapped.clear()
    return wrapped


def _name(model: str) -> str:
    """A hub id as it is (also when its folder in the hub's cache is given), else the folder's name."""
    path = Path(model)
    if not path.is_dir():
        return model
    path = path.resolve()
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return path.name


def _load(
    config: ModelConfig, checkpoint: files.Checkpoint, hf_config: Any, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, npt.NDArray[np.int64] | None]:
    """The model as it is to run. In bfloat16 numbers are float32 too where the layers are compiled."""
    model, columns = load_weights(config.model, checkpoint, hf_config, device, dtype)
    if dtype is torch.bfloat16 and device.type == "cpu" and config.fused and compiled_library(model, dtype) is not None:
        model = model.float()
    return model, columns


def load_weights(
    name: str, checkpoint: files.Checkpoint, hf_config: Any, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, npt.NDArray[np.int64] | None]:
    """The model, on the CPU. For a CPU float16 and int8 are precisions of the weights: arithmetic there is float32."""
    whole = dtype is torch.int8
    if whole and device.type != "cpu":
        raise InvalidArgument("precision", "int8", f"bfloat16, float16 or float32 on {device.type}")
    model, columns = hf_model.load(checkpoint, copy.deepcopy(hf_config), torch.float32 if whole else dtype)
    if whole:
        int8.round_linears(model)
    if dtype is torch.float16:
        for parameter, values in model.named_parameters():
            if not torch.isfinite(values).all():
                if values.isnan().any():
                    raise InvalidArgument(
                        "model", name, f"a checkpoint of numbers, but {parameter} holds one that is none"
                    )
                raise InvalidArgument("precision", "float16", f"one that can hold {parameter} of {name}: try float32")
        if device.type == "cpu":
            model = model.float()
    return model, columns


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgument("device", name, "cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument("device", name, "cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise InvalidArgument("device", name, f"one of the {count} CUDA devices here, or cpu")
        device = torch.device("cuda", device.index or 0)
    return device


def fastest_precision(device: torch.device) -> str:
    """What `precision: auto` stands for on a device.

    A CPU without instructions for bfloat16 does it piece by piece, so that a pass takes longer with every row: all linear
    layers of a 135M model on two such cores took 22 ms for 1 row, 79 for 5 and 131 for 9, and with float16 weights 27, 35 and 43.
    A block would then cost as much as plain decoding."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if _cpu_multiplies_bfloat16():
        return "bfloat16"
    return "float16" if _is_x86() and can_halve() else "float32"


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _cpu_multiplies_bfloat16() -> bool:
    """AVX512-BF16 or AMX on x86, where oneDNN says yes to any AVX-512; elsewhere oneDNN's own answer."""
    if _is_x86():
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ops = getattr(torch.ops, "mkldnn", None)
    return ops is not None and hasattr(ops, "_is_mkldnn_bf16_supported") and ops._is_mkldnn_bf16_supported()


def _vocabulary(config: ModelConfig, checkpoint: files.Checkpoint) -> tuple[bytes, ...]:
    if config.tokenizer is not None:
        return read_vocabulary(config.tokenizer)
    folder = checkpoint.tokenizer_folder()
    if folder is not None:
        return read_vocabulary(folder)
    if checkpoint.gguf_file is not None:
        from transformers import AutoTokenizer

        return spell(AutoTokenizer.from_pretrained(checkpoint.folder, gguf_file=checkpoint.gguf_file).get_vocab())
    return ()


def _trial(model: TorchModel, name: str, tokens: list[int], expected: torch.Tensor, arithmetic: torch.dtype) -> None:
    """`expected`: [tokens, columns or more] of one plain pass over `tokens`."""
    middle = len(tokens) // 2
    wrong = tokens[::-1]
    try:
        if middle == 0:
            feeds = [Feed(0, 0, tokens, 1)]
        else:
            model.forward([Feed(0, 0, [*tokens[:middle], *wrong[middle:]], 0)])  # the second half is cut back again
            feeds = [Feed(0, middle, tokens[middle:], len(tokens) - middle)]
            if model.num_slots > 1:
                feeds.append(Feed(1, 0, wrong[:2], 1))  # a shorter neighbour, so that there is padding
        scores = model.forward(feeds)[: len(tokens) - middle]
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        AssertionError,
    ) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidArgument("model", name, f"a model that runs on our cache ({reason})") from error
    expected = expected[middle:, : scores.shape[1]].to(scores.device)
    seen = torch.isfinite(scores)
    if not bool(seen.any()):
        raise InvalidArgument("model", name, "a model whose cache can be cut back: in the trial no score was a number")
    difference = (scores - expected)[seen].square().mean().sqrt().item()
    spread = expected[seen].std().item()
    if not difference <= _TOLERANCE[arithmetic] * spread + 1e-6:
        raise InvalidArgument(
            "model",
            name,
            f"a model whose cache can be cut back: in the trial its scores differ by {difference:.3g} of {spread:.3g}",
        )
