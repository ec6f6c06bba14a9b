"""A batched, ragged key-value cache that can be cut back, for any full-attention model of transformers.

Law. Per layer there is one tensor of keys and one of values, [slots, kv_heads, capacity + 1, head_dim], or one that holds both
side by side. A pass writes each token's keys and values to its cell, and a token attends to cells 0 .. position of its own
slot. What lies beyond a row's position is never seen, so cutting back is writing at a smaller position. The spare cell at the
end takes padding (see `feeds.py`). Nothing of the size of a slot is allocated or copied in a pass: neighbouring slots are read
as one view.

A slot is wiped when a sequence starts in it, or is copied to it: an old not-a-number would survive masking, since zero times it
is not zero. A sequence may also go on from the beginning of another that ended without one.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from transformers import Cache

from specwire.lm.feeds import Group, Pass

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
        self._both: dict[int, torch.Tensor] = {}
        """Where keys and values are halves of one storage."""
        self._ever_written = [0] * num_slots  # cells of a slot that may hold something
        self._arange = torch.arange(capacity, device=device)
        self.keep_numbers = False
        """What is not a number is not kept. A row that makes one is told of by its scores in any case; whoever reads cells behind a
        row's own, hidden by a mask, would find it there after that row was refused."""

    def __repr__(self) -> str:
        return (
            f"KVSlots(slots={self.num_slots} capacity={self.capacity} layers={len(self._keys)} bytes={self.num_bytes})"
        )

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values."""
        return sum(tensor.nbytes for layer in (self._keys, self._values) for tensor in layer.values())

    def begin(self, forward: Pass) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepares one pass; returns its token ids and positions, [n] each, on the device."""
        for row in forward.written:
            self.open(*row)
        # one transfer for all small integers of the pass
        parts = [forward.tokens, forward.positions, forward.cells, forward.slots, forward.wanted]
        parts += [index for group in forward.groups if group.ragged for index in _padding(group)]
        packed = torch.from_numpy(np.concatenate(parts)).to(self.device, non_blocking=True)
        split = torch.split(packed, [len(part) for part in parts])
        tokens, self._positions, self._cells, self.slots, self.wanted, *paddings = split
        self._groups = forward.groups
        ragged = (index for index, group in enumerate(forward.groups) if group.ragged)
        self._paddings = dict(zip(ragged, zip(paddings[::2], paddings[1::2], strict=True), strict=True))
        self._write_index: dict[int, torch.Tensor] = {}
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        return tokens, self._positions

    def begin_fixed(self, numbers: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """As `begin`, of one group without padding, whose numbers lie on the device already: [4, n], tokens, positions, cells and
        slots. Nothing here looks at them, so what follows can be recorded (static_steps.py)."""
        tokens, self._positions, self._cells, self.slots = numbers.unbind()
        self._groups, self._paddings = (group,), {}
        self._write_index, self._masks = {}, {}
        return tokens, self._positions

    def open(self, slot: int, first: int, end: int) -> None:
        """These cells of a slot are about to be written."""
        if first == 0:
            self.wipe(slot)
        self._ever_written[slot] = max(self._ever_written[slot], end)

    def wipe(self, slot: int, first: int = 0) -> None:
        """Nothing stands in a slot from cell `first` on."""
        last = self._ever_written[slot]
        if first < last:
            for layer in (self._keys, self._values):
                for storage in layer.values():
                    storage[slot, :, first:last] = 0
            self._ever_written[slot] = first

    def copy(self, source: int, target: int, length: int) -> None:
        """The first cells of a slot to another, which holds nothing else afterwards."""
        self.wipe(target, length)
        for layer in (self._keys, self._values):
            for storage in layer.values():
                storage[target, :, :length] = storage[source, :, :length]
        self._ever_written[target] = max(self._ever_written[target], length)

    def __enter__(self) -> KVSlots:
        _active.kv = self
        return self

    def __exit__(self, *_: object) -> None:
        _active.kv = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [rows, kv_heads, width, head_dim] to the cells of the pass; returns the whole storage for `attend`."""
        return self.write(
            layer_idx, key_states.transpose(1, 2).flatten(0, 1), value_states.transpose(1, 2).flatten(0, 1)
        )

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [n, kv_heads, head_dim] to the cells of the pass; returns the whole storage."""
        if layer not in self._keys:
            self._keys[layer], self._values[layer] = self._allocate(keys), self._allocate(values)
        stored = self._keys[layer], self._values[layer]
        for storage, states in zip(stored, (keys, values), strict=True):
            self._put(storage, states)
        return stored

    def write_both(self, layer: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for keys and values that lie side by side and are alike, [n, 2 * kv_heads, head_dim]."""
        both = self._both.get(layer)
        if both is None:
            both = self._allocate_both(layer, states)
        if self.keep_numbers:
            states = states.nan_to_num()
        self._put(both, states)
        return self._keys[layer], self._values[layer]

    def both(self, layer: int, heads: int, head_dim: int) -> torch.Tensor:
        """Where these keys and values lie, for whoever writes them himself: [slots, heads, capacity + 1, head_dim] float32."""
        if layer not in self._both:
            self._allocate_both(layer, torch.empty(0, heads, head_dim, dtype=torch.float32, device=self.device))
        return self._both[layer]

    def _allocate_both(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        both = self._both[layer] = self._allocate(like)
        self._keys[layer], self._values[layer] = both.chunk(2, 1)
        return both

    def _put(self, storage: torch.Tensor, states: torch.Tensor) -> None:
        heads, dim = states.shape[-2:]
        index = self._write_index.get(heads)
        if index is None:
            head = torch.arange(heads, device=self.device)
            index = (self.slots[:, None] * heads + head) * (self.capacity + 1) + self._cells[:, None]
            index = self._write_index[heads] = index.view(-1)  # [n * heads]
        storage.view(-1, dim).index_copy_(0, index, states.reshape(-1, dim))

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:  # queries [n, heads, head_dim] -> [n, heads * head_dim]
        """Heads that share keys are folded into the width, so that keys are read once and never repeated in memory. Nothing is
        moved where all rows have one token and neighbouring slots."""
        parts = [self._attend(index, group, queries, keys, values, scaling) for index, group in enumerate(self._groups)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(
        self,
        index: int,
        group: Group,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        heads, dim = queries.shape[1:]
        kv_heads = keys.shape[1]
        rows, width, shared = len(group.lengths), group.width, heads // kv_heads
        padding = self._paddings.get(index)
        if padding is not None:
            queries = queries.index_select(0, padding[0])
        elif len(self._groups) > 1:
            queries = queries.narrow(0, group.first, rows * width)
        if width == 1:
            folded = queries.view(rows, kv_heads, shared, dim)
        else:
            folded = queries.view(rows, width, kv_heads, shared, dim).permute(0, 2, 3, 1, 4)
            folded = folded.reshape(rows, kv_heads, shared * width, dim)
        out = F.scaled_dot_product_attention(
            folded,
            _cells_of(keys, group),
            _cells_of(values, group),
            attn_mask=self._mask(index, group, shared, queries.dtype),
            scale=scaling,
        )
        if width > 1:
            out = out.view(rows, kv_heads, shared, width, -1).permute(0, 3, 1, 2, 4)
        out = out.reshape(rows * width, -1)
        return out if padding is None else out.index_select(0, padding[1])

    def _mask(self, index: int, group: Group, shared: int, dtype: torch.dtype) -> torch.Tensor | None:
        """[rows, 1, shared * width, context]: 0 where a token may look, minus infinity elsewhere. Made once per pass."""
        if group.unmasked:
            return None
        mask = self._masks.get((index, shared))
        if mask is None:
            rows, width = len(group.lengths), group.width
            padding = self._paddings.get(index)
            if padding is not None:
                positions = self._positions.index_select(0, padding[0])
            else:
                positions = self._positions.narrow(0, group.first, rows * width)
            hidden = self._arange[: group.context] > positions.view(rows, 1, 1, width, 1)
            shape = (rows, 1, shared, width, group.context)
            mask = torch.zeros(shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))
            mask = self._masks[index, shared] = mask.view(rows, 1, -1, group.context)
        return mask

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        shape = (self.num_slots, states.shape[-2], self.capacity + 1, states.shape[-1])
        return torch.zeros(shape, dtype=states.dtype, device=self.device)


def _cells_of(storage: torch.Tensor, group: Group) -> torch.Tensor:
    """storage[slots of the group, :, :context] in one operation instead of two."""
    _, heads, _, dim = storage.shape
    strides = storage.stride()
    first = storage.storage_offset() + group.slot * strides[0]
    return storage.as_strided((len(group.lengths), heads, group.context, dim), strides, first)


def _padding(group: Group) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Index into the pass that makes the group a rectangle, [rows * width], and the one that takes the padding out again."""
    lengths = np.array(group.lengths)
    first = group.first + np.cumsum(lengths) - lengths
    columns = np.arange(group.width)
    take = first[:, None] + np.minimum(columns, lengths[:, None] - 1)
    return take.reshape(-1), np.flatnonzero((columns < lengths[:, None]).reshape(-1))


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
    rows, heads, width, _dim = query.shape
    out = kv.attend(query.transpose(1, 2).reshape(rows * width, heads, -1), key, value, scaling)
    return out.view(rows, width, heads, -1), None
