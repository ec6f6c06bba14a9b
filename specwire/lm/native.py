"""Compiles `native.c` at its first use, into the cache folder, loads it, and says what its structures look like.

Law. A library is found by what it was made from: source, flags and compiler. It is written under another name and renamed, so that
services starting together never load half of one; it takes a second. Where there is no compiler, or it fails, `load` returns
None; that is said once, and everything works without it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

import torch

from specwire.cache import cache_dir

log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-mavx2", "-mfma", "-mf16c", "-fopenmp", "-fPIC", "-shared")
_TIME_LIMIT_S = 60.0
LANES = 8
"""Of `native.c`: sizes of inputs, heads and the hidden state must be multiples of it."""
UNIT_TOKENS = 4
"""Of `native.c`."""

Address, Size = ctypes.c_void_p, ctypes.c_size_t


class Linear(ctypes.Structure):
    """`linear_t` of `native.c`."""

    _fields_ = (("weight", Address), ("bias", Address), ("outputs", Size), ("inputs", Size), ("size", Size))


class Layer(ctypes.Structure):
    """`layer_t`."""

    _fields_ = (
        *((name, Linear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, Address) for name in ("before_attention", "before_mlp", "query_norm", "key_norm", "cells")),
    )


class Body(ctypes.Structure):
    """`body_t`."""

    _fields_ = (
        *((name, Size) for name in ("hidden", "heads", "kv_heads", "head_dim", "cells_per_slot", "num_layers")),
        ("eps", ctypes.c_float),
        ("scaling", ctypes.c_float),
        *((name, Address) for name in ("layers", "last_norm", "cos", "sin")),
    )


class Pass(ctypes.Structure):
    """`pass_t`."""

    _fields_ = (
        ("rows", Size),
        *(
            (name, Address)
            for name in ("slots", "positions", "states", "normed", "wide", "mixed", "narrow", "scores", "units")
        ),
    )


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None where it cannot be had."""
    if not _cpu_has_instructions():
        return None
    compiler = _compiler()
    if compiler is None:
        _warn("there is no C compiler (cc, gcc or clang; CC names another)")
        return None
    try:
        library = _load(compiler)
        library.specwire_linear.argtypes = [ctypes.POINTER(Linear), Address, Address, Size, ctypes.c_int]
        library.specwire_forward.argtypes = [ctypes.POINTER(Body), ctypes.POINTER(Pass), ctypes.c_int]
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        _warn(f"what {shlex.join(compiler)} makes of it cannot be used: {_reason(error)}")
        return None
    library.specwire_linear.restype = library.specwire_forward.restype = None
    return library


def _warn(reason: str) -> None:
    log.warning("compiled layers are not in use, so a step takes up to twice as long: %s", reason)


def _reason(error: Exception) -> str:
    """One line."""
    text = error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
    return " ".join(text.split())[:300]


def _cpu_has_instructions() -> bool:
    """Linux on an x86 with AVX2; those that have it have FMA and F16C as well."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return platform.system() == "Linux" and x86 and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _compiler() -> list[str] | None:
    """The command of a C compiler that is there."""
    for command in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        found = shutil.which(command[0]) if command else None
        if found is not None:
            return [found, *command[1:]]
    return None


def _load(compiler: list[str]) -> ctypes.CDLL:
    """From the cache folder, or from one of this process alone where nobody may write to it or run what lies in it."""
    source = (files("specwire.lm") / "native.c").read_text(encoding="utf-8")
    version = _run([*compiler, "--version"])
    made_from = hashlib.sha256(repr((source, version, compiler, _FLAGS)).encode()).hexdigest()[:16]
    with tempfile.TemporaryDirectory(prefix="specwire-") as own:
        try:
            return _load_from(cache_dir() / "native", made_from, compiler, source)
        except OSError as error:
            log.info("compiled layers cannot be kept in the cache folder: %s", error)
            return _load_from(Path(own), made_from, compiler, source)  # stays loaded when its file is gone


def _load_from(folder: Path, made_from: str, compiler: list[str], source: str) -> ctypes.CDLL:
    """Loads the library from a folder; makes it there first if need be."""
    path = folder / f"native-{made_from}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as making:
            made = Path(making) / path.name
            _run([*compiler, *_FLAGS, "-x", "c", "-", "-o", str(made), "-lm"], source)
            made.replace(path)
    return ctypes.CDLL(str(path))


def _run(command: list[str], text: str = "") -> str:
    """What it prints; `text` is its standard input."""
    done = subprocess.run(command, input=text, capture_output=True, check=True, text=True, timeout=_TIME_LIMIT_S)
    return done.stdout
