"""Tiny checkpoints with random weights, made once, and the ways to load them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specwire.lm import native
from specwire.lm.load import ModelConfig
from specwire.lm.torch_lm import TorchModel
from specwire.lm.torch_load import load_torch_model
from tests.unit.lm.tiny import CONFIGS


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random model of a kind; made once."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(len(kind))
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32)
            for parameter in model.parameters():  # larger than the usual start, so that scores are far apart
                parameter.data.normal_(std=0.3) if parameter.ndim > 1 else parameter.data.add_(0.1)
            model.tie_weights()
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="session")
def load(checkpoint: Callable[[str], Path]) -> Callable[..., TorchModel]:
    """A model of a kind behind the port; one for each set of settings, since a slot begins anew at start 0. `compiled`: on
    compiled layers; False: on torch, as where there is no compiler."""
    made: dict[tuple[object, ...], TorchModel] = {}

    def get(kind: str, *, compiled: bool = False, **settings: Any) -> TorchModel:
        key = (kind, compiled, *sorted(settings.items()))
        if key not in made:
            config = ModelConfig(**{"model": str(checkpoint(kind)), "max_sessions": 4} | settings)
            with pytest.MonkeyPatch.context() as patch:
                if not compiled:
                    patch.setattr(native, "load", lambda _: None)
                made[key] = load_torch_model(config)
        return made[key]

    return get


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    """The same weights in transformers' own hands."""
    made: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in made:
            made[kind] = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(kind), dtype=torch.float32).eval()
        return made[kind]

    return get


@pytest.fixture
def llama(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama's folder, to be changed."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))
