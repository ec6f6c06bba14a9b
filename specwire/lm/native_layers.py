"""Layers that run on `native.c`: on a CPU, weights in int8, float16 or float32, arithmetic in float32, all layers as one call.

Law. A row's result is the same to the last bit whatever other rows there are, whatever the number of threads, and however its
text was cut into passes. C checks nothing: shapes and types are checked here, and what an address was given of is kept alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from specwire.lm import native
from specwire.lm.int8 import quantize
from specwire.lm.native import LANES, UNIT_TOKENS


class NativeLinear(nn.Module):
    """A frozen linear layer, arithmetic in float32, [..., inputs] -> [..., outputs]."""

    def __init__(
        self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None, *, stored: torch.dtype
    ) -> None:
        """`weight` [outputs, inputs], inputs a multiple of `LANES`, and `bias` [outputs], both float32 on the CPU. `stored`: how
        weights are kept, float32, float16 or int8; nothing is lost if they are numbers of that kind (int8.py)."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        assert self.in_features % LANES == 0
        assert all(
            each.dtype == torch.float32 and each.device.type == "cpu" for each in (weight, bias) if each is not None
        )
        assert bias is None or bias.shape == (self.out_features,)
        missing = -self.out_features % LANES
        self._library = library
        scale = None
        if stored is torch.int8:
            weight, scale = quantize(weight.detach())
        else:
            weight = weight.detach().to(stored)
        # as it is, if it can be: then memory stays shared with a tied table of embeddings
        self._weight = (F.pad(weight, (0, 0, 0, missing)) if missing else weight).contiguous()
        self._bias = None if bias is None else F.pad(bias.detach(), (0, missing)).contiguous()
        self._scale = None if scale is None else F.pad(scale, (0, missing)).contiguous()
        self.structure = native.Linear(
            self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.out_features,
            self.in_features,
            self._weight.itemsize,
            None if self._scale is None else self._scale.data_ptr(),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The product."""
        assert inputs.shape[-1] == self.in_features
        inputs = inputs.contiguous()
        result = torch.empty(*inputs.shape[:-1], self.out_features, dtype=torch.float32, device="cpu")
        rows = inputs.numel() // self.in_features
        self._library.specwire_linear(self.structure, _address(inputs), _address(result), rows, torch.get_num_threads())
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


class NativeLayers:
    """All layers and the last norm, as one call."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[LayerParts],
        last_norm: torch.Tensor,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: Heads,
    ) -> None:
        """`last_norm` [hidden]; `cos`, `sin` [positions, 1, head_dim], the first half of `sin` negated."""
        hidden, mixed = last_norm.numel(), (heads.queries + 2 * heads.keys) * heads.dim
        assert heads.dim % LANES == 0
        assert heads.queries % heads.keys == 0
        assert cos.shape[1:] == sin.shape[1:] == (1, heads.dim)
        for each in layers:
            assert (each.qkv.in_features, each.qkv.out_features) == (hidden, mixed)
            assert (each.out.in_features, each.out.out_features) == (heads.queries * heads.dim, hidden)
            assert (each.gate_up.in_features, each.gate_up.out_features) == (hidden, 2 * each.down.in_features)
            assert each.down.out_features == each.before_attention.numel() == each.before_mlp.numel() == hidden
            assert all(norm is None or norm.numel() == heads.dim for norm in (each.query_norm, each.key_norm))
        self._library = library
        self._parts = layers
        self._tables = last_norm, cos, sin
        self._hidden, self._eps, self._heads = hidden, eps, heads
        narrow = max(max(each.out.in_features, each.down.in_features) for each in layers)
        wide = max(each.gate_up.out_features for each in layers)
        self._widths = self._hidden, wide, mixed, narrow
        self._body: native.Body | None = None
        self._kv: Storage | None = None
        self._storage: list[torch.Tensor] = []
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def __call__(self, states: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, kv: Storage) -> torch.Tensor:
        """`states` [n, hidden], which is overwritten and returned; `slots`, `positions` [n], in the order of both and within the
        cache, as `feeds.py` makes them."""
        rows, threads, heads = len(states), torch.get_num_threads(), self._heads
        assert states.shape == (rows, self._hidden)
        assert slots.shape == positions.shape == (rows,)
        assert slots.dtype == positions.dtype == torch.int64
        if self._body is None:
            self._body = self._bind(kv)
        assert kv is self._kv
        row_of_scores = -(-self._body.cells_per_slot // LANES) * LANES
        scores = threads * UNIT_TOKENS * (heads.queries // heads.keys) * row_of_scores
        units = 2 * (rows + 1)  # of 64 bits
        addresses = self._addresses([*(rows * width for width in self._widths), scores, units])
        work = native.Pass(rows, slots.data_ptr(), positions.data_ptr(), _address(states), *addresses)
        self._library.specwire_forward(self._body, work, threads)
        return states

    def _addresses(self, sizes: Sequence[int]) -> list[int]:
        """Room for so many float32 numbers each, used by one pass after the other."""
        sizes = [-(-size // LANES) * LANES for size in sizes]
        if self._scratch.numel() < sum(sizes):
            self._scratch = torch.empty(sum(sizes), dtype=torch.float32, device="cpu")
        first = self._scratch.data_ptr()
        return [first + self._scratch.itemsize * sum(sizes[:n]) for n in range(len(sizes))]

    def _bind(self, kv: Storage) -> native.Body:
        """The layers over one cache; there is no other for these layers ever after."""
        self._kv = kv
        self._storage = [kv.both(index, 2 * self._heads.keys, self._heads.dim) for index in range(len(self._parts))]
        layers = (native.Layer * len(self._parts))()
        for layer, parts, storage in zip(layers, self._parts, self._storage, strict=True):
            for name in ("qkv", "out", "gate_up", "down"):
                setattr(layer, name, getattr(parts, name).structure)
            for name in ("before_attention", "before_mlp", "query_norm", "key_norm"):
                setattr(layer, name, _address(getattr(parts, name)))
            layer.cells = _address(storage)
        cells_per_slot = self._storage[0].shape[-2]
        assert cells_per_slot <= 1 + min(len(table) for table in self._tables[1:])
        sizes = self._hidden, self._heads.queries, self._heads.keys, self._heads.dim, cells_per_slot, len(layers)
        body = native.Body(
            *sizes, self._eps, self._heads.scaling, ctypes.addressof(layers), *map(_address, self._tables)
        )
        body.kept = layers  # as long as its address is in use
        return body


class Storage(Protocol):
    """Where keys and values lie."""

    def both(self, layer: int, heads: int, head_dim: int) -> torch.Tensor:
        """[slots, heads, cells, head_dim] float32, keys before values, always the same tensor."""


def _address(tensor: torch.Tensor | None) -> int | None:
    """Of float32 numbers that follow each other."""
    if tensor is None:
        return None
    assert tensor.dtype == torch.float32
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    return tensor.data_ptr()
