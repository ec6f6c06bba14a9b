"""The cache of models on disk: where it is, what is in it, and whether that is what it should be.

Law. A model's folder appears in the cache by one rename, complete and with its manifest, or not at all. A file is trusted
when its size and time are those of the manifest; `verify` reads every byte.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from specwire.cache import cache_dir
from specwire.law.errors import InvalidArgument, SpecwireError, Unavailable

DEMO = "demo"
DEMO_DRAFT = "demo-draft"
TABLE = "table"
MANIFEST = "manifest.json"
_DRAFT_SHA256 = "457799f0623b04c9b7ed0cec45c80263692d3665053e8efe9785a1f5838c38e4"


class ModelError(SpecwireError):
    """A model that cannot be had: broken files, no room, a download that failed. The text says what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One model that is here."""

    name: str
    path: Path
    num_bytes: int


def offline() -> str | None:
    """The environment variable that forbids to go online, if any."""
    for name in ("SPECWIRE_OFFLINE", "HF_HUB_OFFLINE"):
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            return name
    return None


def demo_folder() -> Path:
    """Where the demo target lies once fetched."""
    return cache_dir() / "models" / DEMO


def draft_folder() -> Path:
    """The demo draft, shipped inside the package."""
    return Path(str(resources.files("deploy.models.demo_draft")))


def resolve(name: str | os.PathLike[str]) -> str:
    """What a service loads for a name: a folder's absolute path, or `table` as it is. Never goes online.

    Raises Unavailable when the model must be fetched first, InvalidArgument when the name can mean nothing."""
    name = os.fspath(name)
    if name == TABLE:
        return name
    if name == DEMO:
        if not problems(demo_folder()):
            return str(demo_folder())
        raise Unavailable(f"{DEMO} is not in the cache ({cache_dir()}). First: specwire models fetch {DEMO}")
    if name == DEMO_DRAFT:
        return str(draft_folder())
    if Path(name).expanduser().is_dir():
        return str(Path(name).expanduser().resolve())
    return str(hub_folder(name))


def hub_folder(name: str) -> Path:
    """A hub id in the hub's own cache."""
    from specwire.lm.checkpoint import hub_snapshot, is_hub_id

    if not is_hub_id(name):
        raise InvalidArgument("model", name, f"{DEMO}, {DEMO_DRAFT}, {TABLE}, an existing folder or a hub id")
    try:
        return hub_snapshot(name, local_files_only=True)
    except Exception as error:  # the hub's own tree
        if meant := difflib.get_close_matches(name, (DEMO, DEMO_DRAFT, TABLE), 1):
            raise InvalidArgument(
                "model", name, f"a folder, or a model that was fetched; did you mean {meant[0]}?"
            ) from None
        raise Unavailable(
            f"{name} is neither a folder nor in the hub's cache. First: specwire models fetch {name}"
        ) from error


def listing() -> list[Entry]:
    """The models that `resolve` knows without the hub."""
    folders = {DEMO: demo_folder(), DEMO_DRAFT: draft_folder()}
    return [
        Entry(name, folder, sum(path.stat().st_size for path in folder.iterdir() if path.is_file()))
        for name, folder in folders.items()
        if name == DEMO_DRAFT or not problems(folder)
    ]


def verify(name: str) -> str:
    """Reads every byte of a model; returns its path. Raises ModelError saying which file is not what it was."""
    path = resolve(name)
    if name == DEMO:
        wrong = problems(demo_folder(), every_byte=True)
        if wrong:
            raise ModelError(f"{demo_folder()}: {'; '.join(wrong)}. Repair with: specwire models fetch {name}")
    if name == DEMO_DRAFT and sha256(draft_folder() / "model.safetensors") != _DRAFT_SHA256:
        raise ModelError(f"{draft_folder()}: model.safetensors is not what was shipped. Install specwire again")
    return path


def write_manifest(folder: Path, source: dict[str, Any]) -> None:
    """Records what every file of a finished folder is."""
    files = {}
    for path in sorted(folder.iterdir()):
        state = path.stat()
        files[path.name] = {"size": state.st_size, "mtime_ns": state.st_mtime_ns, "sha256": sha256(path)}
    (folder / MANIFEST).write_text(json.dumps({"source": source, "files": files}, indent=2) + "\n", encoding="utf-8")


def problems(folder: Path, *, every_byte: bool = False, source: dict[str, Any] | None = None) -> list[str]:
    """What is wrong with a folder of the cache; nothing when it can be used. `source`: what it must have been made from."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return ["there is no readable manifest"]
    if source is not None and manifest.get("source") != source:
        return ["it was made from something else"]
    wrong = []
    for name, known in files.items():
        try:
            state = (folder / name).stat()
        except OSError:
            wrong.append(f"{name} is missing")
            continue
        if state.st_size != known["size"]:
            wrong.append(f"{name} has {state.st_size} bytes, not {known['size']}")
        elif (every_byte or state.st_mtime_ns != known["mtime_ns"]) and sha256(folder / name) != known["sha256"]:
            wrong.append(f"{name} has changed")
    return wrong


def sha256(path: Path, report: Callable[[int], None] | None = None) -> str:
    """Of a file's bytes. `report` is told how many were read."""
    state = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            state.update(chunk)
            done += len(chunk)
            if report is not None:
                report(done)
    return state.hexdigest()


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time works on a model; another waits. The lock goes with its process, however that ends."""
    import fcntl

    path = cache_dir() / f".{name}.lock"
    with writing(), path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Makes the cache folder, and turns what a disk says into one clear error."""
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        hint = (
            "Set SPECWIRE_CACHE to a folder with room"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "Set SPECWIRE_CACHE"
        )
        raise ModelError(f"{error.filename or cache_dir()}: {error.strerror or error}. {hint}") from error
