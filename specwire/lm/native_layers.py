"""A model that runs on compiled layers (native.py): on a CPU, any weights, float32 in and out, a step as one call.

Law. A row's result is the same to the last bit whatever other rows there are, whatever the number of threads, and however its
text was cut into passes. C checks nothing: shapes and types are checked here, and what an address was given of is kept alive.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from specwire.lm import native
from specwire.lm.int8 import quantize
from specwire.lm.native import LANES, UNIT_TOKENS
from specwire.lm.port import Feed

_LINE = 16
"""Numbers of a cache line: no room begins within one."""


class NativeLinear(nn.Module):
    """A frozen linear layer, float32 in and out, [..., inputs] -> [..., outputs]. How exact products are: c/sums.c, c/halves.c."""

    def __init__(self, library: native.Library, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [outputs, inputs], inputs a multiple of `LANES`, and `bias` [outputs], both float32 on the CPU. Weights are kept
        as `library` keeps them; nothing is lost if they are numbers of that kind (int8.py)."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        assert self.in_features % LANES == 0
        assert all(
            each.dtype == torch.float32 and each.device.type == "cpu" for each in (weight, bias) if each is not None
        )
        assert bias is None or bias.shape == (self.out_features,)
        self._library = library
        scale = None
        if library.kept is torch.int8:
            weight, scale = quantize(weight.detach())
        else:
            weight = weight.detach().to(library.kept)
        weight = weight.contiguous()
        self._weight = torch.empty(
            library.packed_bytes(self.out_features, self.in_features), dtype=torch.uint8, device="cpu"
        )
        library.pack(weight.data_ptr(), self.out_features, self.in_features, self._weight.data_ptr())
        self._bias = None if bias is None else bias.detach().contiguous()
        self._scale = None if scale is None else scale.contiguous()
        self.structure = native.Linear(
            self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.out_features,
            self.in_features,
            None if self._scale is None else self._scale.data_ptr(),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The product."""
        assert inputs.shape[-1] == self.in_features
        inputs = inputs.contiguous()
        result = torch.empty(*inputs.shape[:-1], self.out_features, dtype=torch.float32, device="cpu")
        rows = inputs.numel() // self.in_features
        split = torch.empty(self._library.split_bytes(rows, self.in_features), dtype=torch.uint8, device="cpu")
        threads = torch.get_num_threads()
        self._library.linear(self.structure, _address(inputs), _address(result), rows, split.data_ptr(), threads)
        return result


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a layer is made of. Norms are weights, [hidden] and [head_dim]."""

    qkv: NativeLinear
    out: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    before_attention: torch.Tensor
    before_mlp: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention looks like, in every layer."""

    queries: int
    """Heads of queries, a multiple of `keys`."""
    keys: int
    """Heads of keys, and of values."""
    dim: int
    """Numbers of a head, a multiple of `LANES`."""
    scaling: float
    """What a product of query and key is multiplied by."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What stands before and after the layers."""

    embeddings: torch.Tensor
    """[vocabulary, hidden]"""
    last_norm: torch.Tensor
    """[hidden]"""
    eps: float
    """Of all norms."""
    cos: torch.Tensor
    """[positions, 1, head_dim]"""
    sin: torch.Tensor
    """The same, its first half negated."""


class NativeModel:
    """A whole step, from tokens to scores, as one call. Between two long calls little else is done: whatever runs then, torch's
    own operations most of all, has left every cache while the weights passed by."""

    def __init__(
        self,
        library: native.Library,
        ends: Ends,
        layers: Sequence[LayerParts],
        heads: Heads,
        head: NativeLinear,
        kv: Storage,
    ) -> None:
        """`head`: hidden states to scores. `kv`: the cache; there is no other for these layers ever after."""
        hidden, mixed = ends.last_norm.numel(), (heads.queries + 2 * heads.keys) * heads.dim
        assert heads.dim % LANES == 0
        assert heads.queries % heads.keys == 0
        assert ends.cos.shape[1:] == ends.sin.shape[1:] == (1, heads.dim)
        assert ends.embeddings.shape[1] == head.in_features == hidden
        for each in layers:
            assert (each.qkv.in_features, each.qkv.out_features) == (hidden, mixed)
            assert (each.out.in_features, each.out.out_features) == (heads.queries * heads.dim, hidden)
            assert (each.gate_up.in_features, each.gate_up.out_features) == (hidden, 2 * each.down.in_features)
            assert each.down.out_features == each.before_attention.numel() == each.before_mlp.numel() == hidden
            assert all(norm is None or norm.numel() == heads.dim for norm in (each.query_norm, each.key_norm))
        narrow = max(max(each.out.in_features, each.down.in_features) for each in layers)
        wide = max(each.gate_up.out_features for each in layers)
        self._library, self._kv = library, kv
        self._widths = hidden, hidden, wide, mixed, narrow
        self._most_inputs = max(hidden, narrow)
        self._columns = head.out_features
        self._storage = [kv.both(index, 2 * heads.keys, heads.dim) for index in range(len(layers))]
        self._cells = self._storage[0].shape[-2]
        self._scores = UNIT_TOKENS * (heads.queries // heads.keys) * (-(-self._cells // LANES) * LANES)  # of a thread
        assert self._cells <= 1 + min(len(ends.cos), len(ends.sin))
        self._layers = (native.Layer * len(layers))()
        self._body = native.Body(
            *(hidden, heads.queries, heads.keys, heads.dim, self._cells, len(layers)),
            *(ends.eps, heads.scaling, ctypes.addressof(self._layers), _address(ends.embeddings), head.structure),
            *map(_address, (ends.last_norm, ends.cos, ends.sin)),
        )
        for layer, parts, storage in zip(self._layers, layers, self._storage, strict=True):
            for name in ("qkv", "out", "gate_up", "down"):
                setattr(layer, name, getattr(parts, name).structure)
            for name in ("before_attention", "before_mlp", "query_norm", "key_norm"):
                setattr(layer, name, _address(getattr(parts, name)))
            layer.cells = _address(storage)
        self._kept = ends, layers, head  # as long as their addresses are in use
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def __call__(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Scores of the wanted rows, [sum(rows), columns], in the order of feeds that `SlotLengths` has found right."""
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        ends: dict[int, int] = {}
        for feed in feeds if len(feeds) == 1 else sorted(feeds, key=_slot):
            count = len(feed.tokens)
            self._kv.open(feed.slot, feed.start, feed.start + count)
            tokens += feed.tokens
            slots += [feed.slot] * count
            positions += range(feed.start, feed.start + count)
            ends[feed.slot] = len(tokens)
        wanted = [row for feed in feeds for row in range(ends[feed.slot] - feed.rows, ends[feed.slot])]
        assert max(positions) < self._cells
        rows, threads = len(tokens), torch.get_num_threads()
        numbers = array("q", tokens + slots + positions + wanted)
        first, _ = numbers.buffer_info()
        result = torch.empty(len(wanted), self._columns, dtype=torch.float32, device="cpu")
        work = native.Pass(
            *(rows, len(wanted)),
            *(first + numbers.itemsize * rows * n for n in range(4)),
            _address(result),
            *self._addresses(
                [
                    *(rows * width for width in self._widths),
                    *(threads * self._scores, 2 * (rows + 1), self._library.split_bytes(rows, self._most_inputs) // 4),
                ]
            ),
        )
        self._library.forward(self._body, work, threads)
        return result

    def _addresses(self, sizes: Sequence[int]) -> list[int]:
        """Room for so many numbers of 32 bits each, used by one pass after the other."""
        sizes = [-(-size // _LINE) * _LINE for size in sizes]
        if self._scratch.numel() < sum(sizes):
            self._scratch = torch.empty(sum(sizes), dtype=torch.float32, device="cpu")
        first, size = self._scratch.data_ptr(), self._scratch.itemsize
        return [first + size * offset for offset in itertools.accumulate(sizes[:-1], initial=0)]


class Storage(Protocol):
    """Where keys and values lie."""

    def open(self, slot: int, first: int, end: int) -> None:
        """These cells of a slot are about to be written."""

    def both(self, layer: int, heads: int, head_dim: int) -> torch.Tensor:
        """[slots, heads, cells, head_dim] float32, keys before values, always the same tensor."""


def _slot(feed: Feed) -> int:
    return feed.slot


def _address(tensor: torch.Tensor | None) -> int | None:
    """Of float32 numbers that follow each other."""
    if tensor is None:
        return None
    assert tensor.dtype == torch.float32
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    return tensor.data_ptr()
