"""A batched, ragged key-value cache that can be cut back, for any full-attention model of transformers.

Law. Per layer there is one tensor of keys and one of values, [slots, kv_heads, capacity + 1, head_dim]. A pass writes each
token's keys and values to its cell, and a token attends to cells 0 .. position of its own slot. What lies beyond a row's
position is never seen, so cutting back is writing at a smaller position. The spare cell at the end takes padding (see
`feeds.py`). Nothing of the size of a slot is allocated or copied in a pass: neighbouring slots are read as one view.

A slot is wiped when a sequence starts in it: an old not-a-number would survive masking, since zero times it is not zero.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from transformers import Cache

from specwire.lm.feeds import Rectangle

_active = threading.local()  # .kv: the cache of the pass that runs on this thread


class KVSlots(Cache):  # type: ignore[misc]
    """The cache that a model is handed, and where attention finds the rows of the pass."""

    def __init__(self, num_slots: int, capacity: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.capacity = capacity
        self.device = device
        self._keys: dict[int, torch.Tensor] = {}  # by layer; [slots, kv_heads, capacity + 1, head_dim]
        self._values: dict[int, torch.Tensor] = {}
        self._ever_written = [0] * num_slots  # cells of a slot that may hold something
        self._arange = torch.arange(capacity, device=device)

    def __repr__(self) -> str:
        return (
            f"KVSlots(slots={self.num_slots} capacity={self.capacity} layers={len(self._keys)} bytes={self.num_bytes})"
        )

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values."""
        return sum(tensor.nbytes for layer in (self._keys, self._values) for tensor in layer.values())

    def begin(self, rectangle: Rectangle) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepares one pass; returns its token ids and positions, [rows, width] each, on the device."""
        ends = rectangle.positions[:, -1].tolist()
        for slot, cell, end in zip(rectangle.slots.tolist(), rectangle.cells[:, 0].tolist(), ends, strict=True):
            if cell == 0 and self._ever_written[slot]:
                self._wipe(slot)
            if cell < self.capacity:  # else the row is all padding
                self._ever_written[slot] = max(self._ever_written[slot], end + 1)
        # one transfer for all small integers of the pass
        rows, width = rectangle.tokens.shape
        packed = torch.from_numpy(_pack(rectangle)).to(self.device, non_blocking=True)
        tokens, self._positions, self._cells = packed[: 3 * rows * width].view(3, rows, width)
        self.wanted = packed[3 * rows * width + rows :]
        self._slots = packed[3 * rows * width : 3 * rows * width + rows]
        self._runs = _runs(rectangle)
        self._write_index: dict[int, torch.Tensor] = {}
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        return tokens, self._positions

    def __enter__(self) -> KVSlots:
        _active.kv = self
        return self

    def __exit__(self, *_: object) -> None:
        _active.kv = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [rows, kv_heads, width, head_dim] to the cells of the pass; returns the whole storage for `attend`."""
        return self.write(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [..., kv_heads, head_dim], token after token, to the cells of the pass; returns the whole storage."""
        if layer not in self._keys:
            self._keys[layer], self._values[layer] = self._allocate(keys), self._allocate(values)
        stored = self._keys[layer], self._values[layer]
        heads = keys.shape[-2]
        index = self._write_index.get(heads)
        if index is None:
            head = torch.arange(heads, device=self.device)
            index = (self._slots[:, None, None] * heads + head) * (self.capacity + 1) + self._cells[:, :, None]
            index = self._write_index[heads] = index.reshape(-1)  # [rows * width * kv_heads]
        for storage, states in zip(stored, (keys, values), strict=True):
            dim = states.shape[-1]
            storage.view(-1, dim).index_copy_(0, index, states.reshape(-1, dim))
        return stored

    def attention(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:  # query [rows, heads, width, head_dim] -> [rows, width, heads, head_dim]
        """Heads that share keys are folded into the width, so that keys are read once and never repeated in memory."""
        rows, heads, width, dim = query.shape
        kv_heads = keys.shape[1]
        out = self._attend(query.reshape(rows, kv_heads, heads // kv_heads * width, dim), keys, values, scaling)
        return out.reshape(rows, heads, width, out.shape[-1]).transpose(1, 2)

    def attend_tokens(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, width: int, scaling: float
    ) -> torch.Tensor:  # queries [rows * width, heads, head_dim] -> [rows * width, heads * head_dim]
        """The same for queries that lie token after token; nothing is moved when a row has one token."""
        tokens, heads, dim = queries.shape
        kv_heads = keys.shape[1]
        rows, groups = tokens // width, heads // kv_heads
        if width == 1:
            return self._attend(queries.view(rows, kv_heads, groups, dim), keys, values, scaling).reshape(rows, -1)
        folded = queries.view(rows, width, kv_heads, groups, dim).permute(0, 2, 3, 1, 4)
        out = self._attend(folded.reshape(rows, kv_heads, groups * width, dim), keys, values, scaling)
        return out.reshape(rows, kv_heads, groups, width, -1).permute(0, 3, 1, 2, 4).reshape(tokens, -1)

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:  # query [rows, kv_heads, groups * width, head_dim], and so the result
        groups = query.shape[2] // self._positions.shape[1]
        parts = [
            F.scaled_dot_product_attention(
                query[first:last],
                keys[slot : slot + last - first, :, :context],
                values[slot : slot + last - first, :, :context],
                attn_mask=self._mask(index, groups, query.dtype),
                scale=scaling,
            )
            for index, (first, last, slot, context, _) in enumerate(self._runs)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mask(self, run: int, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """[run's rows, 1, groups * width, context]: 0 where a token may look, minus infinity elsewhere. Made once per pass."""
        first, last, _, context, plain = self._runs[run]
        if plain:
            return None
        mask = self._masks.get((run, groups))
        if mask is None:
            positions = self._positions[first:last]
            hidden = self._arange[:context] > positions[:, None, None, :, None]  # [rows, 1, 1, width, context]
            shape = (last - first, 1, groups, positions.shape[1], context)
            mask = torch.zeros(shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))
            mask = self._masks[run, groups] = mask.view(last - first, 1, -1, context)
        return mask

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        shape = (self.num_slots, states.shape[-2], self.capacity + 1, states.shape[-1])
        return torch.zeros(shape, dtype=states.dtype, device=self.device)

    def _wipe(self, slot: int) -> None:
        for layer in (self._keys, self._values):
            for storage in layer.values():
                storage[slot, :, : self._ever_written[slot]] = 0
        self._ever_written[slot] = 0


def _pack(rectangle: Rectangle) -> npt.NDArray[np.int64]:
    """tokens, positions, cells, slots and wanted, one after the other."""
    parts = (rectangle.tokens, rectangle.positions, rectangle.cells, rectangle.slots, rectangle.wanted)
    return np.concatenate([part.reshape(-1) for part in parts])


def _runs(rectangle: Rectangle) -> list[tuple[int, int, int, int, bool]]:
    """Rows whose slots are neighbours: (first row, last row + 1, first slot, cells to read, no mask is needed)."""
    slots, ends = rectangle.slots.tolist(), (rectangle.positions[:, -1] + 1).tolist()
    single = rectangle.tokens.shape[1] == 1
    runs = []
    first = 0
    for row in range(1, len(slots) + 1):
        if row < len(slots) and slots[row] == slots[row - 1] + 1:
            continue
        context = rectangle.context if rectangle.fixed else max(ends[first:row])
        plain = single and not rectangle.fixed and min(ends[first:row]) == context
        runs.append((first, row, slots[first], context, plain))
        first = row
    return runs


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in each layer, with what `KVSlots.update` returned."""
    if softcap is not None or s_aux is not None or position_bias is not None:
        raise NotImplementedError("attention with a soft cap, sinks or a position bias")
    kv: KVSlots = _active.kv
    return kv.attention(query, key, value, scaling), None
