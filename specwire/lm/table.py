"""An exact tiny model without weights: the port's second implementation, for proofs and wiring.

Law. Scores of the token after a prefix are a deterministic function of the whole prefix *as read back from the slot*, in
float64. A stale, shifted or foreign cached token therefore gives other scores, as it does in a real model, and a test that
compares tokens sees it. Nothing here depends on the shape of the batch.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specwire.law.values import SamplingSpec
from specwire.lm.feeds import SlotLengths, plan
from specwire.lm.port import Feed, ModelSpec
from specwire.lm.table_config import Fault, TableConfig

if TYPE_CHECKING:
    import torch

_PLAN_OVERHEAD = 8  # tokens; small, so that tests with ragged batches see several rectangles
_MAX_U64 = 2**64 - 1
_TOKEN = (1 << 32) - 1


class TableModel:
    """A `LanguageModel` whose scores are a seeded hash of the cached tokens."""

    def __init__(
        self, config: TableConfig, num_slots: int, capacity: int = 0, vocabulary: tuple[bytes, ...] = ()
    ) -> None:
        self.config = config
        self._num_slots = num_slots
        self._capacity = capacity or config.max_context
        self._lengths = SlotLengths(num_slots, self._capacity, config.vocab_size)
        # [slots, capacity + spare cell] position << 32 | token, as a real cache holds a token's content and place
        self._cells = np.full((num_slots, self._capacity + 1), -1, np.int64)
        self._columns = np.array(config.columns, np.int64) if config.columns is not None else None
        self._ids = np.arange(1, config.vocab_size + config.padding_columns + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        self._seed = np.uint64(_mix_int(config.seed))
        self._noise_seed = np.uint64(_mix_int(config.noise_seed ^ 0x5851F42D4C957F2D))
        self._released = threading.Event()
        self._fired = [0] * len(config.faults)
        self.calls = 0
        """Passes asked for so far, failed ones included. Faults count in the same way, from 1."""
        self.spec = ModelSpec(
            name=config.name,
            architecture="table",
            vocab_size=config.vocab_size,
            vocabulary=vocabulary or config.vocabulary(),
            max_context=self._capacity,
            eos_token_ids=config.eos_token_ids,
            default_sampling=SamplingSpec(),
            device="cpu",
            precision="float64",
            fingerprint=config.fingerprint(),
            columns=self._columns,
            threads=1,
        )

    def __repr__(self) -> str:
        return f"TableModel({self.config.name} vocab={self.config.vocab_size} calls={self.calls} {self._lengths!r})"

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def capacity(self) -> int:
        return self._capacity

    def copy(self, source: int, target: int, length: int) -> None:
        self._lengths.copy(source, target, length)
        self._cells[target, :length] = self._cells[source, :length]

    def cut(self, slot: int, length: int) -> None:
        self._lengths.cut(slot, length)

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def release(self) -> None:
        """Ends every `hang`, present and future. Callable from any thread."""
        self._released.set()

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        import torch

        began = time.perf_counter()
        self._lengths.check(feeds)
        self.calls += 1
        self._lengths.begin(feeds)
        not_numbers = self._strike(feeds) if self.config.faults else []
        for rectangle in plan(feeds, self._capacity, _PLAN_OVERHEAD):
            self._cells[rectangle.slots[:, None], rectangle.cells] = rectangle.positions << 32 | rectangle.tokens
        self._lengths.end(feeds)
        scores = self._score(feeds)
        for row in not_numbers:
            scores[row] = np.nan
        if self.config.step_ms or self.config.row_ms:
            cost_s = (self.config.step_ms + self.config.row_ms * sum(len(feed.tokens) for feed in feeds)) / 1e3
            time.sleep(max(0.0, began + cost_s - time.perf_counter()))
        return torch.from_numpy(scores)

    def _score(self, feeds: Sequence[Feed]) -> npt.NDArray[np.float64]:
        keys: list[int] = []
        scripted: list[tuple[int, int]] = []  # (row of the result, token the script wants there)
        for feed in feeds:
            if feed.rows:
                end = feed.start + len(feed.tokens)
                if self.config.script:
                    scripted += self._scripted(feed.slot, end - feed.rows + 1, end, len(keys))
                keys += self._keys(self._cells[feed.slot], end - feed.rows + 1, end)
        contexts = np.array(keys, np.uint64)  # [rows]
        scores = self._logits(contexts ^ self._seed)  # [rows, vocab + padding]
        share = self.config.disagreement
        if share:
            noise = contexts ^ self._noise_seed
            scores = (1 - share) * scores + share * self._logits(noise)
            off_script = _uniform(noise) < share
            scripted = [(row, token) for row, token in scripted if not off_script[row]]
        for row, token in scripted:
            scores[row, token] += self.config.script_strength
        if self.config.padding_columns:
            scores[:, self.config.vocab_size :] += 1e3  # would win every draw, so they must not leave
            scores = scores[:, : self.config.vocab_size]
        return scores if self._columns is None else np.ascontiguousarray(scores[:, self._columns])

    def _keys(self, cells: npt.NDArray[np.int64], first: int, last: int) -> list[int]:
        """A 64-bit key of each prefix of `first` to `last` cells, as they stand in the slot."""
        order = self.config.order
        if order is not None:
            tokens = cells[:last] & _TOKEN  # a Markov table: the same tokens give the same law wherever they stand
            return [_digest(tokens[max(0, end - order) : end].tobytes()) for end in range(first, last + 1)]
        state = hashlib.blake2b(cells[:first].tobytes(), digest_size=8)
        keys = [int.from_bytes(state.digest(), "little")]
        for end in range(first, last):
            state.update(cells[end : end + 1].tobytes())
            keys.append(int.from_bytes(state.digest(), "little"))
        return keys

    def _logits(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:  # [rows] -> [rows, vocab + padding]
        u = _uniform(_mix(keys)[:, None] ^ self._ids)
        return (2.0 * u - 1.0) * self.config.sharpness

    def _scripted(self, slot: int, first: int, last: int, row: int) -> list[tuple[int, int]]:
        begin = self.config.script_at
        if self.config.script_after is not None:
            marks = np.flatnonzero((self._cells[slot, :last] & _TOKEN) == self.config.script_after)
            begin = int(marks[0]) + 1 if len(marks) else last + 1
        script = self.config.script
        return [
            (row + position - first, script[position - begin])
            for position in range(first, last + 1)
            if 0 <= position - begin < len(script)
        ]

    def _strike(self, feeds: Sequence[Feed]) -> list[int]:
        """Applies the faults that are due; returns the result rows that must become not-a-number."""
        rows: list[int] = []
        for index, fault in enumerate(self.config.faults):
            hit = self._hit(fault, feeds)
            if hit is None or (fault.times is not None and self._fired[index] >= fault.times):
                continue
            self._fired[index] += 1
            if fault.kind == "raise":
                raise RuntimeError(f"injected fault in pass {self.calls}")
            if fault.kind == "sleep":
                time.sleep(fault.seconds)
            elif fault.kind == "hang":
                self._released.wait(fault.seconds or None)
            else:
                rows += hit
        return rows

    def _hit(self, fault: Fault, feeds: Sequence[Feed]) -> list[int] | None:
        """Result rows that the fault selects, or None when it selects no feed of this pass."""
        if fault.call is not None and fault.call != self.calls:
            return None
        rows: list[int] = []
        touched = False
        offset = 0
        for index, feed in enumerate(feeds):
            first = feed.tokens[0] if feed.start == 0 else int(self._cells[feed.slot, 0]) & _TOKEN
            end = feed.start + len(feed.tokens)
            if fault.feed in (None, index) and fault.first_token in (None, first):
                hit = [
                    offset + row
                    for row in range(feed.rows)
                    if fault.row in (None, row) and fault.position in (None, end - feed.rows + row + 1)
                ]
                touched = touched or bool(hit) or (fault.row is None and fault.position is None)
                rows += hit
            offset += feed.rows
        return rows if touched else None


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection of 64 bits in which every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_int(seed: int) -> int:
    return int(_mix(np.array([seed & _MAX_U64], np.uint64))[0])


def _uniform(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """In [0, 1), from the top 53 bits of a mix."""
    return (_mix(x) >> np.uint64(11)).astype(np.float64) * 2.0**-53
