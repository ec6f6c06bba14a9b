"""Reads a GGUF file's facts and turns its tensors back to numbers. Numpy alone, so that a fetch need not import a framework.

Knows the few kinds of quantisation that the shipped demo uses; for other files the services go through transformers.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_F32, _F16, _Q4_1, _Q8_0 = 0, 1, 3, 8
_BLOCK = 32
"""Weights that share one scale."""
_BYTES_PER_BLOCK = {_F32: 4 * _BLOCK, _F16: 2 * _BLOCK, _Q4_1: 20, _Q8_0: 34}


@dataclass(frozen=True)
class Gguf:
    """One file, held in memory."""

    facts: dict[str, Any]
    """Key-value pairs of the header."""
    _data: memoryview
    _tensors: dict[str, tuple[tuple[int, ...], int, int]]
    """name -> shape as stored in rows of the last axis, kind, first byte"""

    @property
    def names(self) -> list[str]:
        """Tensors, in file order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """With the longest-running axis last."""
        return self._tensors[name][0]

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Dequantised."""
        shape, kind, offset = self._tensors[name]
        blocks = int(np.prod(shape)) // _BLOCK
        raw = np.frombuffer(self._data, np.uint8, blocks * _BYTES_PER_BLOCK[kind], offset)
        return _dequantise(raw, kind).reshape(shape)


def parse(data: bytes | memoryview) -> Gguf:
    """Raises ValueError on anything that is no such file."""
    view = memoryview(data)
    if bytes(view[:4]) != b"GGUF":
        raise ValueError("not a GGUF file")
    version, num_tensors, num_facts = struct.unpack_from("<IQQ", view, 4)
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}; 2 and 3 are known")
    at = 24
    facts: dict[str, Any] = {}
    for _ in range(num_facts):
        key, at = _string(view, at)
        (kind,) = struct.unpack_from("<I", view, at)
        facts[key], at = _value(view, at + 4, kind)
    tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name, at = _string(view, at)
        (num_axes,) = struct.unpack_from("<I", view, at)
        shape = struct.unpack_from(f"<{num_axes}Q", view, at + 4)
        kind, offset = struct.unpack_from("<IQ", view, at + 4 + 8 * num_axes)
        at += 16 + 8 * num_axes
        if kind not in _BYTES_PER_BLOCK or int(np.prod(shape)) % _BLOCK:
            raise ValueError(f"tensor {name}: kind {kind} of shape {shape} is not known here")
        tensors[name] = tuple(reversed(shape)), kind, offset
    alignment = int(facts.get("general.alignment", 32))
    begin = -(-at // alignment) * alignment
    return Gguf(facts, view, {name: (shape, kind, begin + offset) for name, (shape, kind, offset) in tensors.items()})


def _string(view: memoryview, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", view, at)
    end = at + 8 + length
    return str(view[at + 8 : end], "utf-8"), end


def _value(view: memoryview, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(view, at)
    if kind != _ARRAY:
        form = _SCALARS[kind]
        return struct.unpack_from(form, view, at)[0], at + struct.calcsize(form)
    kind, length = struct.unpack_from("<IQ", view, at)
    at += 12
    if kind in _SCALARS:
        form = _SCALARS[kind]
        end = at + length * struct.calcsize(form)
        return list(struct.unpack_from(f"<{length}{form[1]}", view, at)), end
    values = []
    for _ in range(length):
        value, at = _value(view, at, kind)
        values.append(value)
    return values, at


def _dequantise(raw: npt.NDArray[np.uint8], kind: int) -> npt.NDArray[np.float32]:
    """bytes -> numbers, 32 to a block"""
    if kind == _F32:
        return raw.view(np.float32)
    if kind == _F16:
        return raw.view(np.float16).astype(np.float32)
    blocks = raw.reshape(-1, _BYTES_PER_BLOCK[kind])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)  # [blocks, 1]
    if kind == _Q8_0:
        return scale * blocks[:, 2:].view(np.int8)
    least = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    numbers = np.empty((len(blocks), _BLOCK), np.float32)  # Q4_1: scale * nibble + least; low nibbles come first
    np.multiply(scale, blocks[:, 4:] & 15, out=numbers[:, :16])
    np.multiply(scale, blocks[:, 4:] >> 4, out=numbers[:, 16:])
    numbers += least
    return numbers
