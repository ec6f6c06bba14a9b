"""Whether files hold what they should: checksums, the manifest of a folder of ours, and what the hub's cache knows of its files.

Every fault is told as file and how: missing, so many bytes and not so many, or a checksum and not another.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_SHOWN = 16
"""Digits of a checksum that people are shown."""


def write_manifest(folder: Path, source: dict[str, Any]) -> None:
    """Records what every file of a finished folder is."""
    files = {}
    for path in sorted(folder.iterdir()):
        state = path.stat()
        files[path.name] = {"size": state.st_size, "mtime_ns": state.st_mtime_ns, "sha256": sha256(path)}
    (folder / MANIFEST).write_text(json.dumps({"source": source, "files": files}, indent=2) + "\n", encoding="utf-8")


def problems(folder: Path, *, every_byte: bool = False, source: dict[str, Any] | None = None) -> list[str]:
    """What is wrong with a folder by its manifest; nothing when it can be used. `source`: what it must have been made from."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {name: (known["size"], known["mtime_ns"], known["sha256"]) for name, known in manifest["files"].items()}
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} cannot be read ({type(error).__name__})"]
    if source is not None and manifest.get("source") != source:
        return ["it was made from something else"]
    wrong = []
    for name, (size, mtime_ns, checksum) in files.items():
        try:
            state = (folder / name).stat()
            if state.st_size != size:
                wrong.append(f"{name} has {state.st_size} bytes, not {size}")
            elif every_byte or state.st_mtime_ns != mtime_ns:
                wrong += _differing(name, sha256(folder / name), checksum)
        except OSError as error:
            wrong.append(_unread(name, error))
    return wrong


def differing(folder: Path, checksums: Mapping[str, str]) -> list[str]:
    """What is wrong with files of a folder that have these checksums: SHA-256, or git's of 40 digits."""
    wrong = []
    for name, checksum in checksums.items():
        try:
            found = sha256(folder / name) if len(checksum) == 64 else git_blob(folder / name)
            wrong += _differing(name, found, checksum)
        except OSError as error:
            wrong.append(_unread(name, error))
    return wrong


def hub_checksums(snapshot: Path) -> dict[str, str]:
    """The checksum of each file of a model in the hub's cache, where files are links to others that are named by what they hold.
    Empty for any other folder."""
    found = {}
    for link in sorted(path for path in snapshot.rglob("*") if path.is_symlink()):
        checksum = Path(os.readlink(link)).name
        if len(checksum) in (40, 64) and set(checksum) <= set("0123456789abcdef"):
            found[str(link.relative_to(snapshot))] = checksum
    return found


def _differing(name: str, found: str, checksum: str) -> list[str]:
    if found == checksum:
        return []
    return [f"{name} has changed: its checksum is {found[:_SHOWN]}..., not {checksum[:_SHOWN]}..."]


def _unread(name: str, error: OSError) -> str:
    return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read ({error.strerror})"


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


def git_blob(path: Path) -> str:
    """By which git, and so the hub, knows a small file: SHA-1 of its length and its bytes."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
