"""The cache of models on disk: where it is, what is in it, and whether that is what it should be.

Law. A model's folder appears in the cache by one rename, complete and with its manifest, or not at all. A file is trusted
when its size and time are those of the manifest; `verify` reads every byte.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from deploy.models.checksums import differing, hub_checksums, problems
from specwire.cache import cache_dir
from specwire.law.errors import InvalidArgument, SpecwireError, Unavailable

DEMO = "demo"
DEMO_DRAFT = "demo-draft"
TABLE = "table"
KNOWN = (DEMO, DEMO_DRAFT, TABLE)
_DRAFT_FILES = {
    "config.json": "26dcb40febfeadbedc5e825937a368fc1803e391df7eb2cc43267e3660d61370",
    "model.safetensors": "457799f0623b04c9b7ed0cec45c80263692d3665053e8efe9785a1f5838c38e4",
}
_FETCH_AGAIN = f"Repair with: specwire models fetch {DEMO}"


class ModelError(SpecwireError):
    """A model that cannot be had: broken files, no room, a download that failed. The text says what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One model that is here."""

    name: str
    path: Path
    num_bytes: int
    wrong: tuple[str, ...] = ()
    """What is damaged in it, as far as sizes and times tell."""


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

    Raises Unavailable when the model must be fetched first, or again; InvalidArgument when the name can mean nothing."""
    name = os.fspath(name)
    if not name.strip():  # as a path it would be the folder one is in
        raise unknown(name)
    if name == TABLE:
        return name
    if name == DEMO:
        if not demo_folder().is_dir():
            raise Unavailable(f"{DEMO} is not in the cache ({cache_dir()}). First: specwire models fetch {DEMO}")
        if wrong := problems(demo_folder()):
            raise Unavailable(_damaged(demo_folder(), wrong, _FETCH_AGAIN))
        return str(demo_folder())
    if name == DEMO_DRAFT:
        return str(draft_folder())
    if Path(name).expanduser().is_dir():
        return str(Path(name).expanduser().resolve())
    return str(hub_folder(name))


def hub_folder(name: str) -> Path:
    """A hub id in the hub's own cache."""
    from specwire.lm.checkpoint import hub_snapshot, is_hub_id

    if not is_hub_id(name):
        raise unknown(name)
    try:
        return hub_snapshot(name, local_files_only=True)
    except Exception as error:  # the hub's own tree
        if "/" not in name:  # a slip of the pen, far more often than one of the few hub ids without an owner
            raise unknown(name) from None
        half = type(error).__name__ == "IncompleteSnapshotError"  # of a fetch that was interrupted
        where = "not whole in the hub's cache" if half else "neither a folder nor in the hub's cache"
        raise Unavailable(f"{name} is {where}. First: specwire models fetch {name}") from error


def unknown(name: str, reason: str = "") -> InvalidArgument:
    """The refusal of a name that means no model. `reason`: why the hub does not know it."""
    limit = f"{', '.join(KNOWN)}, an existing folder or a hub id (owner/name)"
    if reason:
        limit += f" that can be fetched ({reason})"
    if meant := difflib.get_close_matches(name, KNOWN, 1):
        limit += f"; did you mean {meant[0]}?"
    return InvalidArgument("model", name, limit)


def listing() -> list[Entry]:
    """The models that are here without the hub; damaged ones too, with what is wrong."""
    found = []
    for name, folder in ((DEMO, demo_folder()), (DEMO_DRAFT, draft_folder())):
        if folder.is_dir():
            num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
            found.append(Entry(name, folder, num_bytes, tuple(problems(folder)) if name == DEMO else ()))
    return found


def verify(name: str) -> str:
    """Reads every byte of a model; returns its path. Raises ModelError saying which file is not what it was, how, and what mends
    it; InvalidArgument for a folder, which has no checksums; and what `resolve` raises when there is no such model."""
    if name == DEMO and demo_folder().is_dir():
        folder, repair = demo_folder(), _FETCH_AGAIN
        wrong = problems(folder, every_byte=True)
    elif name == DEMO_DRAFT:
        folder, repair = draft_folder(), "Repair: install specwire again"
        wrong = differing(folder, _DRAFT_FILES)
    elif name in KNOWN:
        return resolve(name)
    else:
        folder = Path(resolve(name))
        checksums = hub_checksums(folder)
        if not checksums:
            limit = f"{', '.join(KNOWN)} or a model in the hub's cache: there are no checksums to hold {folder} against"
            raise InvalidArgument("model", name, limit)
        wrong = differing(folder, checksums)
        repair = f"Repair: remove the files that these are links to, then: specwire models fetch {name}"
    if wrong:
        raise ModelError(_damaged(folder, wrong, repair))
    return str(folder)


def _damaged(folder: Path, wrong: Sequence[str], repair: str) -> str:
    return f"{folder} is damaged: {'; '.join(wrong)}. {repair}"


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
