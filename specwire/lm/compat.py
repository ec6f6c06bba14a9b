"""The one place that knows how releases of transformers (5.17 and later) differ, and which of its switches we use."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import logging as hf_logging


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which `forward` takes a cache: `past_key_values`, renamed `cache` on the way to 5.24."""
    named = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return "cache" if "cache" in named else "past_key_values"


def use_attention(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> None:
    """Makes every layer call `function`. No mask function is registered under the name, so the model builds no mask."""
    AttentionInterface.register(name, function)
    model.set_attn_implementation(name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no warnings of transformers while a model is loaded: what matters is raised."""
    bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def cache_layer_types(config: Any) -> set[str]:
    """Class names of the cache layers that transformers itself would give this model; "DynamicLayer" is full attention."""
    from transformers import DynamicCache

    return {type(layer).__name__ for layer in DynamicCache(config=config).layers}


def from_config(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A model whose parameters are not yet given values that mean anything (the caller loads all of them)."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model
