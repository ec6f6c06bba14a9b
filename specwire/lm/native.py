"""Compiles the files in `c` at their first use, into the cache folder, loads them, and says what their structures look like.

There is a library for each way of keeping weights and each set of instructions: the best that the CPU, the compiler and the system
allow.

Law. A library is found by what it was made from: source, flags and compiler. It is written under another name and renamed, with a
digest beside it, so that neither services starting together nor a lost write ever load half of one. Only a folder that is the
user's own and writable by nobody else is trusted. Where there is no compiler, or it fails, `load` returns None; that is said
once, and everything works without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch

from specwire.cache import cache_dir

log = logging.getLogger(__name__)

LANES = 8
"""Numbers of a partial sum: sizes of the hidden state, of inputs and of heads must be multiples of it."""
UNIT_TOKENS = 4
"""Tokens of a slot that attend together; room for their scores is made for so many."""
_FLAGS = (
    *("-O3", "-std=gnu11", "-mavx2", "-mfma", "-mf16c", "-pthread", "-fPIC", "-shared"),
    *("-fno-fast-math", "-ffp-contract=off"),  # sums keep their order, whatever the user's own flags say
    *(f"-DLANES={LANES}", f"-DUNIT_TOKENS={UNIT_TOKENS}"),
)
_WIDE = ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl")
_TILES = (*_WIDE, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
KEPT = {
    torch.int8: "INT8",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT32",
}
"""How weights can be kept, and what C calls it."""
_TIME_LIMIT_S = 60.0

Address, Size = ctypes.c_void_p, ctypes.c_size_t


class Linear(ctypes.Structure):
    """`linear_t` of `c/shared.c`."""

    _fields_ = (("weight", Address), ("bias", Address), ("outputs", Size), ("inputs", Size), ("scale", Address))


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
        *(("layers", Address), ("embeddings", Address), ("head", Linear)),
        *((name, Address) for name in ("last_norm", "cos", "sin")),
    )


class Pass(ctypes.Structure):
    """`pass_t`."""

    _fields_ = (
        *((name, Size) for name in ("rows", "wanted_rows")),
        *((name, Address) for name in ("tokens", "slots", "positions", "wanted", "result")),
        *((name, Address) for name in ("states", "normed", "wide", "mixed", "narrow", "scores", "units", "split")),
    )


@dataclass(frozen=True, slots=True)
class Library:
    """Compiled layers for one way of keeping weights. Sizes are in bytes."""

    kept: torch.dtype
    arithmetic: str
    """How products are summed: `c/sums.c` or `c/halves.c`. Of libraries that agree in this and in what is kept, rows agree to the
    last bit, whatever the CPU."""
    packed_bytes: Callable[[int, int], int]
    """Of weights, by outputs and inputs."""
    split_bytes: Callable[[int, int], int]
    """What a product needs beside its inputs, by rows and inputs."""
    pack: Callable[[int, int, int, int], None]
    """Weights, outputs, inputs, and where they go in the order in which they are met."""
    linear: Callable[[Linear, int | None, int | None, int, int, int], None]
    """A product: layer, inputs, result, rows, room of `split_bytes`, threads."""
    forward: Callable[[Body, Pass, int], None]
    """A step, and threads."""


@functools.cache
def load(kept: torch.dtype) -> Library | None:
    """The library for weights that are kept so, or None where it cannot be had. Ask only for what would use it: a failure is told
    to the user."""
    if not _cpu_has_instructions():
        return None
    reason = ""
    for arithmetic, flags in _instructions(kept):
        try:
            return _library(kept, arithmetic, flags)
        except (OSError, AttributeError, ValueError, subprocess.SubprocessError) as error:
            text = error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
            reason = " ".join(text.split())[:300]
            log.info("compiled layers do without %s %s: %s", arithmetic, " ".join(flags), reason)
    log.warning("compiled layers are not in use, so a step takes up to twice as long: %s", reason)
    return None


def _library(kept: torch.dtype, arithmetic: str, flags: Sequence[str]) -> Library:
    """Raises OSError, AttributeError, ValueError or SubprocessError if it cannot be made, or is not what is described here."""
    folder = files("specwire.lm") / "c"
    source = "".join(
        f'#line 1 "{name}.c"\n' + (folder / f"{name}.c").read_text(encoding="utf-8")
        for name in ("shared", arithmetic, "layers")
    )
    found = _load(_compilers(), [*_FLAGS, *flags, f"-DFETCH=_MM_HINT_{_fetch()}", f"-DKEPT={KEPT[kept]}"], source)
    found.specwire_linear.argtypes = [ctypes.POINTER(Linear), Address, Address, Size, Address, ctypes.c_int]
    found.specwire_forward.argtypes = [ctypes.POINTER(Body), ctypes.POINTER(Pass), ctypes.c_int]
    found.specwire_pack.argtypes = [Address, Size, Size, Address]
    for function in (found.specwire_packed_bytes, found.specwire_split_bytes):
        function.argtypes, function.restype = [Size, Size], Size
    for function in (found.specwire_linear, found.specwire_forward, found.specwire_pack):
        function.restype = None
    sizes = tuple((Size * 4).in_dll(found, "specwire_sizes"))
    if sizes != tuple(map(ctypes.sizeof, (Linear, Layer, Body, Pass))):
        raise ValueError(f"structures of {sizes} bytes")
    if found.specwire_prepare():
        raise OSError(f"the system does not allow {arithmetic}")
    return Library(
        *(kept, arithmetic, found.specwire_packed_bytes, found.specwire_split_bytes),
        *(found.specwire_pack, found.specwire_linear, found.specwire_forward),
    )


def _cpu_has_instructions() -> bool:
    """Linux on an x86 with AVX2; those that have it have FMA and F16C as well."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return platform.system() == "Linux" and x86 and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _instructions(kept: torch.dtype) -> list[tuple[str, tuple[str, ...]]]:
    """What this CPU has, best first: the order of sums, and the compiler's flags."""
    found: list[tuple[str, tuple[str, ...]]] = [("sums", ())]
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        found.insert(0, ("sums", _WIDE))
        if kept is torch.bfloat16 and {"amx_tile", "amx_bf16", "avx512_bf16"} <= set(_cpuinfo().split()):
            found.insert(0, ("halves", _TILES))
    return found


def _fetch() -> str:
    """Which cache the weights to come are fetched to: on AMD's CPUs past the second, which code and everything else then keep;
    Intel's fetch too few at a time that way, and take twice as long."""
    return "NTA" if "AuthenticAMD" in _cpuinfo() else "T1"


def _cpuinfo() -> str:
    """What the system says of the CPU; empty if nothing."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _compilers() -> list[list[str]]:
    """Commands of C compilers that are there, to be tried in turn. CC names the only one. Raises OSError if there is none."""
    named = shlex.split(os.environ.get("CC", ""))
    found = [command for command in ([named] if named else [["cc"], ["gcc"]]) if shutil.which(command[0])]
    if not found:
        raise FileNotFoundError(
            f"CC={shlex.join(named)} is no command" if named else "there is no C compiler (cc, gcc; CC names another)"
        )
    return found


def _load(compilers: list[list[str]], flags: list[str], source: str) -> ctypes.CDLL:
    """With the first that works."""
    for compiler in compilers[:-1]:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return _load_with(compiler, flags, source)
    return _load_with(compilers[-1], flags, source)


def _load_with(compiler: list[str], flags: list[str], source: str) -> ctypes.CDLL:
    """From the cache folder, or from one of this process alone where that is not to be used."""
    command = [*compiler, *flags, "-x", "c", "-", "-lm"]
    version = _run([*compiler, "--version"])
    made_from = hashlib.sha256(repr((source, version, command)).encode()).hexdigest()[:16]
    try:
        return _load_from(_trusted(cache_dir() / "native"), made_from, command, source)
    except OSError as error:  # what does not compile there compiles nowhere
        log.info("compiled layers are not kept in the cache folder: %s", error)
    with tempfile.TemporaryDirectory(prefix="specwire-") as own:
        return _load_from(Path(own), made_from, command, source)  # stays loaded when its file is gone


def _trusted(folder: Path) -> Path:
    """Raises PermissionError if others could put code there for us to run."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} must belong to this user and be writable by nobody else")
    return folder


def _load_from(folder: Path, made_from: str, command: list[str], source: str) -> ctypes.CDLL:
    """Loads the library from a folder; makes it there first if need be."""
    path, digest = folder / f"native-{made_from}.so", folder / f"native-{made_from}.sha256"
    if not _whole(path, digest):
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as making:
            made = Path(making) / path.name
            _run([*command, "-o", str(made)], source)
            told = Path(making) / digest.name
            told.write_text(hashlib.sha256(made.read_bytes()).hexdigest(), encoding="ascii")
            made.replace(path)
            told.replace(digest)
    return ctypes.CDLL(str(path))


def _whole(path: Path, digest: Path) -> bool:
    """Half a library is a crash, not an error."""
    try:
        return digest.read_text(encoding="ascii") == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def _run(command: list[str], text: str = "") -> str:
    """What it prints; `text` is its standard input."""
    done = subprocess.run(
        command, input=text, capture_output=True, check=True, text=True, errors="replace", timeout=_TIME_LIMIT_S
    )
    return done.stdout
