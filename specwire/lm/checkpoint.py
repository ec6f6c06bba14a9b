"""A checkpoint as files: where it is, what it says about itself, and what tells it from every other. No tensors."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwire.law.errors import InvalidArgument
from specwire.law.values import SamplingSpec

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_SAMPLE = 1 << 16  # bytes read from each end of a weight file for the fingerprint


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Files of one model, found."""

    folder: Path
    gguf_file: str | None = None
    embeddings: Path | None = None
    """The target's folder, for a draft without an embedding table."""

    @property
    def weight_files(self) -> list[Path]:
        """The model's own, then those that its embeddings come from."""
        own = [self.folder / self.gguf_file] if self.gguf_file else sorted(self.folder.glob("*.safetensors"))
        return own + (sorted(self.embeddings.glob("*.safetensors")) if self.embeddings else [])

    def tokenizer_folder(self) -> Path | None:
        """Where tokenizer.json lies: with the model, else with its embeddings."""
        for folder in (self.folder, self.embeddings):
            if folder is not None and (folder / "tokenizer.json").is_file():
                return folder
        return None


def is_hub_id(name: str) -> bool:
    """Whether a name can be a repository on the hub."""
    return bool(_HUB_ID.match(name))


def hub_snapshot(name: str, *, local_files_only: bool, gguf_file: str | None = None) -> Path:
    """The folder of a hub id in the hub's own cache. Raises what the hub's library raises."""
    from huggingface_hub import snapshot_download

    patterns = [*_FILES, gguf_file] if gguf_file else _FILES
    return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=local_files_only))


def locate(name: str, field: str, gguf_file: str | None = None) -> Path:
    """A folder as it is, or a hub id through the hub's cache; fetched only when allowed to go online."""
    if Path(name).is_dir():
        return Path(name)
    if not is_hub_id(name):
        raise InvalidArgument(field, name, "an existing folder or a hub id")
    offline = os.environ.get("SPECWIRE_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    try:
        return hub_snapshot(name, local_files_only=offline, gguf_file=gguf_file)
    except Exception as error:  # the hub's own tree, plus whatever its transport raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidArgument(field, name, f"an existing folder or a hub id that can be fetched ({reason})") from error


def find(model: str, gguf_file: str | None, embeddings_from: str | None) -> Checkpoint:
    """Raises InvalidArgument naming the setting whose file is missing."""
    folder = locate(model, "model", gguf_file)
    embeddings = locate(embeddings_from, "embeddings_from") if embeddings_from is not None else None
    checkpoint = Checkpoint(folder, gguf_file, embeddings)
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise InvalidArgument("gguf_file", gguf_file, f"a file in {folder}")
        if embeddings is not None:
            raise InvalidArgument("embeddings_from", embeddings_from, "absent together with gguf_file")
    elif not (folder / "config.json").is_file():
        raise InvalidArgument("model", model, "a folder with config.json, or with gguf_file given")
    elif not list(folder.glob("*.safetensors")):
        raise InvalidArgument("model", model, "a folder with weights in .safetensors files")
    return checkpoint


def read_json(path: Path) -> dict[str, Any]:
    """An empty mapping when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument("model", str(path), f"a readable JSON file ({error})") from error
    if not isinstance(value, dict):
        raise InvalidArgument("model", str(path), "a JSON object")
    return value


def default_sampling(generation: dict[str, Any]) -> SamplingSpec:
    """What a request gets that says nothing itself: the numbers that the generation config states, and no others.

    A number that is absent is neutral: temperature 1, no top-k, no top-p, no min-p. `do_sample` is not read: it says how
    one library's `generate` behaves when called bare, and would make most chat models greedy by accident."""
    names = ("temperature", "top_k", "top_p", "min_p")
    return SamplingSpec(**{name: generation[name] for name in names if generation.get(name) is not None})


def eos_token_ids(generation: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    """From the generation config, else from the model config; each may hold a number or a list."""
    for source in (generation, config):
        value = source.get("eos_token_id")
        if value is not None:
            return tuple(dict.fromkeys(value if isinstance(value, list | tuple) else [value]))
    return ()


def fingerprint(checkpoint: Checkpoint, settings: Iterable[str]) -> str:
    """Of the settings, the config, and each weight file's size and both its ends (reading all of it would take minutes)."""
    state = hashlib.blake2b(digest_size=16)
    for text in settings:
        state.update(text.encode() + b"\0")
    config = checkpoint.folder / "config.json"
    if config.is_file():
        state.update(config.read_bytes())
    for path in checkpoint.weight_files:
        size = path.stat().st_size
        state.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            state.update(file.read(_SAMPLE))
            file.seek(max(0, size - _SAMPLE))
            state.update(file.read(_SAMPLE))
    return state.hexdigest()
