"""The bookkeeping of a batched pass: what slots hold, which feeds are allowed, how feeds become passes. No tensors.

Law. Layers of our own (`fused.py`) take any feeds in one pass, token after token: only attention knows rows, and meets them in
groups of neighbouring slots (`pack`). Other layers need rectangles (`plan`), and so does a shape that never changes
(`plan_fixed`). A row of a rectangle is one feed (or a piece of one) in one slot. Rows are padded to the rectangle's width by
repeating the last token at the last position; a padding token is written to the slot's *spare cell*, index `capacity`, which no
row ever reads. So padding can touch neither another row nor a valid token, whatever the lengths. A piece of a feed stands in a
later rectangle than the pieces before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specwire.lm.port import Feed

Ints = npt.NDArray[np.int64]


class SlotLengths:
    """How many tokens each slot validly holds; refuses feeds that break the port's contract before anything is written."""

    def __init__(self, num_slots: int, capacity: int, vocab_size: int) -> None:
        self.capacity = capacity
        self._vocab_size = vocab_size
        self._lengths = [0] * num_slots

    def __repr__(self) -> str:
        return f"SlotLengths({self._lengths})"

    def __getitem__(self, slot: int) -> int:
        return self._lengths[slot]

    def check(self, feeds: Sequence[Feed]) -> None:
        """Raises ValueError on the first feed that is not allowed. Changes nothing."""
        if not feeds:
            raise ValueError("a pass needs at least one feed")
        seen = set()
        for feed in feeds:
            count = len(feed.tokens)
            if not 0 <= feed.slot < len(self._lengths):
                raise ValueError(f"slot {feed.slot} does not exist, there are {len(self._lengths)}")
            if feed.slot in seen:
                raise ValueError(f"slot {feed.slot} is fed twice in one pass")
            seen.add(feed.slot)
            if count < 1 or not 0 <= feed.rows <= count:
                raise ValueError(
                    f"slot {feed.slot}: {count} tokens and {feed.rows} wanted rows, needs 1 <= tokens, rows <= tokens"
                )
            if not 0 <= feed.start <= self._lengths[feed.slot]:
                raise ValueError(
                    f"slot {feed.slot}: starts at {feed.start}, but holds {self._lengths[feed.slot]} tokens"
                )
            if feed.start + count > self.capacity:
                raise ValueError(
                    f"slot {feed.slot}: ends at {feed.start + count}, past the capacity of {self.capacity}"
                )
            if min(feed.tokens) < 0 or max(feed.tokens) >= self._vocab_size:
                raise ValueError(f"slot {feed.slot}: token ids must be in [0, {self._vocab_size})")

    def clear(self) -> None:
        """Every slot is empty."""
        self._lengths = [0] * len(self._lengths)

    def copy(self, source: int, target: int, length: int) -> None:
        """`target` is about to hold the first `length` tokens of `source`, and nothing else. Raises ValueError where it cannot."""
        for slot in (source, target):
            if not 0 <= slot < len(self._lengths):
                raise ValueError(f"slot {slot} does not exist, there are {len(self._lengths)}")
        if source == target or not 0 <= length <= self._lengths[source]:
            raise ValueError(f"slot {source} holds {self._lengths[source]} tokens, not {length} for slot {target}")
        self._lengths[target] = length

    def cut(self, slot: int, length: int) -> None:
        """The slot holds its first `length` tokens and nothing else. Raises ValueError where it holds fewer."""
        if not 0 <= slot < len(self._lengths):
            raise ValueError(f"slot {slot} does not exist, there are {len(self._lengths)}")
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"slot {slot} holds {self._lengths[slot]} tokens, not {length}")
        self._lengths[slot] = length

    def begin(self, feeds: Sequence[Feed]) -> None:
        """The pass is about to write: what a slot held from a feed's start on is gone, even if the pass fails."""
        for feed in feeds:
            self._lengths[feed.slot] = feed.start

    def end(self, feeds: Sequence[Feed]) -> None:
        """The pass is done."""
        for feed in feeds:
            self._lengths[feed.slot] = feed.start + len(feed.tokens)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """One forward pass. Rows are in ascending order of slot, so that busy neighbours can be read without a copy."""

    slots: Ints
    """[rows]"""
    tokens: Ints
    """[rows, width]"""
    positions: Ints
    """[rows, width] Position in the sequence; a token attends to cells 0 .. position of its slot. Padding repeats the last one."""
    cells: Ints
    """[rows, width] Where keys and values go: the position, or the spare cell for padding."""
    context: int
    """Cells that must be readable: the largest position + 1, or all when `fixed`."""
    fixed: bool
    """Shape, context and row of each slot never change from pass to pass."""
    wanted: Ints
    """[n] Scored tokens, as row * width + column."""
    results: Ints
    """[n] Row of the pass's result that each scored token becomes; ascending, so 0 .. n - 1 when there is one rectangle."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend together: their slots are neighbours, so that keys and values are read as one view."""

    first: int
    """Index of the first row's first token in the pass."""
    lengths: tuple[int, ...]
    """Tokens of each row."""
    slot: int
    """Slot of the first row."""
    context: int
    """Cells that are read of each slot."""
    unmasked: bool
    """Every row is one token that sees all these cells."""

    @property
    def width(self) -> int:
        """Tokens of the longest row; the queries of shorter ones are padded to it."""
        return max(self.lengths)

    @property
    def ragged(self) -> bool:
        """Whether rows differ in length."""
        return min(self.lengths) < self.width


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass, token after token in the order of slots. What is per token has one dimension."""

    tokens: Ints
    """[n]"""
    positions: Ints
    """[n] Position in the sequence; a token attends to cells 0 .. position of its slot."""
    cells: Ints
    """[n] Where keys and values go: the position, or the spare cell for padding."""
    slots: Ints
    """[n]"""
    wanted: Ints
    """[m] Index of each scored token."""
    results: Ints
    """[m] Row of the result that each scored token becomes; ascending, so 0 .. m - 1 when there is one pass."""
    groups: tuple[Group, ...]
    """Of all rows."""
    written: tuple[tuple[int, int, int], ...]
    """Per row that is more than padding: slot, first cell, last cell + 1."""
    rows: int
    """Rows of a rectangle; 0 when rows may differ in length."""
    fixed: bool
    """See `Rectangle`."""


@dataclass(frozen=True, slots=True)
class _Piece:
    feed: int
    slot: int
    start: int
    tokens: Sequence[int]
    rows: int
    result: int
    """Row of the pass's result for the first wanted token."""


def pack(feeds: Sequence[Feed], call_cost: int) -> Pass:
    """All feeds in one pass, without padding. `call_cost`: what a call of attention costs besides its queries, in queries."""
    pieces = sorted(_pieces(feeds), key=lambda piece: piece.slot)
    lengths = [len(piece.tokens) for piece in pieces]
    ends = list(itertools.accumulate(lengths))
    positions = np.concatenate([np.arange(piece.start, piece.start + len(piece.tokens)) for piece in pieces])
    spans = sorted((piece.result, piece.rows, end) for piece, end in zip(pieces, ends, strict=True))
    wanted = [index for _, rows, end in spans for index in range(end - rows, end)]
    written = tuple((piece.slot, piece.start, piece.start + len(piece.tokens)) for piece in pieces)
    groups = _groups(pieces, written, lengths, ends, call_cost)
    return Pass(
        np.fromiter(itertools.chain.from_iterable(piece.tokens for piece in pieces), np.int64, ends[-1]),
        positions,
        positions,
        np.repeat(np.array([piece.slot for piece in pieces], np.int64), lengths),
        np.array(wanted, np.int64),
        np.arange(len(wanted)),
        groups,
        written,
        0,
        False,
    )


def _groups(
    pieces: list[_Piece], written: tuple[tuple[int, int, int], ...], lengths: list[int], ends: list[int], call_cost: int
) -> tuple[Group, ...]:
    """Rows cut into groups, in ascending order of slot. `ends`: of each row in the pass."""
    groups = []
    for first, last in _neighbours([piece.slot for piece in pieces]):
        cuts, widths = [0, last - first], lengths[first:last]
        if len(widths) * max(widths) - sum(widths) > call_cost:
            cuts = _cheapest_cuts(widths, call_cost)
        for a, b in itertools.pairwise(cut + first for cut in cuts):
            contexts = [end for _, _, end in written[a:b]]
            groups.append(
                Group(
                    ends[a] - lengths[a],
                    tuple(lengths[a:b]),
                    pieces[a].slot,
                    max(contexts),
                    max(lengths[a:b]) == 1 and min(contexts) == max(contexts),
                )
            )
    return tuple(groups)


def as_pass(rectangle: Rectangle, capacity: int) -> Pass:
    """A rectangle, padding included, row after row."""
    rows, width = rectangle.tokens.shape
    slots, ends = rectangle.slots.tolist(), (rectangle.positions[:, -1] + 1).tolist()
    groups = []
    for first, last in _neighbours(slots):
        context = rectangle.context if rectangle.fixed else max(ends[first:last])
        unmasked = width == 1 and not rectangle.fixed and min(ends[first:last]) == context
        groups.append(Group(first * width, (width,) * (last - first), slots[first], context, unmasked))
    begins = rectangle.cells[:, 0].tolist()
    return Pass(
        rectangle.tokens.reshape(-1),
        rectangle.positions.reshape(-1),
        rectangle.cells.reshape(-1),
        np.repeat(rectangle.slots, width),
        rectangle.wanted,
        rectangle.results,
        tuple(groups),
        tuple(row for row in zip(slots, begins, ends, strict=True) if row[1] < capacity),
        rows,
        rectangle.fixed,
    )


def _neighbours(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of rows whose slots follow each other."""
    borders = [row for row in range(1, len(slots)) if slots[row] != slots[row - 1] + 1]
    return list(itertools.pairwise([0, *borders, len(slots)]))


def plan(feeds: Sequence[Feed], capacity: int, overhead: int) -> list[Rectangle]:
    """Rectangles that hold every feed once, in the order in which they must run.

    `overhead`: what a pass costs besides its tokens, in tokens (reading the weights, launching kernels). A ragged batch is
    cut into several rectangles when the padding saved is worth more than the passes added, so that a long prompt chunk is
    not padded against single-token rows."""
    pieces = _pieces(feeds)
    widths = [len(piece.tokens) for piece in pieces]
    if len(pieces) * max(widths) - sum(widths) <= overhead:
        return [_rectangle(sorted(pieces, key=lambda piece: piece.slot), max(widths), capacity)]
    pieces.sort(key=lambda piece: -len(piece.tokens))
    cuts = _cheapest_cuts([len(piece.tokens) for piece in pieces], overhead)
    groups = [pieces[a:b] for a, b in itertools.pairwise(cuts)]
    return [_rectangle(sorted(group, key=lambda piece: piece.slot), len(group[0].tokens), capacity) for group in groups]


def plan_fixed(feeds: Sequence[Feed], capacity: int, num_slots: int, width: int) -> list[Rectangle]:
    """The same work in rectangles of one shape, [num_slots, width], where row i is always slot i: for `exactness: strict`, whose
    `num_slots` are all there are, and for recorded steps (static_steps.py), which take the first of them."""
    rectangles = []
    todo = _pieces(feeds)
    while todo:
        now, later = [], []
        for piece in todo:
            if len(piece.tokens) <= width:
                now.append(piece)
                continue
            rest = len(piece.tokens) - width
            first = max(0, piece.rows - rest)  # wanted rows that fall into the first `width` tokens
            now.append(_Piece(piece.feed, piece.slot, piece.start, piece.tokens[:width], first, piece.result))
            later.append(
                _Piece(
                    piece.feed,
                    piece.slot,
                    piece.start + width,
                    piece.tokens[width:],
                    piece.rows - first,
                    piece.result + first,
                )
            )
        rectangles.append(_rectangle(now, width, capacity, num_slots))
        todo = later
    return rectangles


def _pieces(feeds: Sequence[Feed]) -> list[_Piece]:
    pieces, result = [], 0
    for index, feed in enumerate(feeds):
        pieces.append(_Piece(index, feed.slot, feed.start, feed.tokens, feed.rows, result))
        result += feed.rows
    return pieces


def _cheapest_cuts(widths: list[int], overhead: int) -> list[int]:
    """Borders 0 = c0 < c1 < ... = n that minimise the sum over groups of overhead + size * widest."""
    n = len(widths)
    best = [0] + [0] * n  # cost of the first i rows
    cut = [0] * (n + 1)
    for end in range(1, n + 1):
        widest, cheapest = 0, -1
        for begin in range(end - 1, -1, -1):
            widest = max(widest, widths[begin])
            cost = best[begin] + overhead + (end - begin) * widest
            if cheapest < 0 or cost <= cheapest:
                cheapest, cut[end] = cost, begin
        best[end] = cheapest
    borders = [n]
    while borders[-1]:
        borders.append(cut[borders[-1]])
    return borders[::-1]


def _rectangle(pieces: list[_Piece], width: int, capacity: int, fixed_rows: int = 0) -> Rectangle:
    rows = fixed_rows or len(pieces)
    slots = np.arange(rows, dtype=np.int64) if fixed_rows else np.array([piece.slot for piece in pieces], np.int64)
    tokens = np.zeros((rows, width), np.int64)
    positions = np.zeros((rows, width), np.int64)
    cells = np.full((rows, width), capacity, np.int64)
    context = capacity if fixed_rows else 0
    wanted: list[int] = []
    results: list[int] = []
    spans = []  # (result row of a piece's first wanted token, how many are wanted, row * width + column after its last token)
    for index, piece in enumerate(pieces):
        row = piece.slot if fixed_rows else index
        count, end = len(piece.tokens), piece.start + len(piece.tokens)
        context = max(context, end)
        tokens[row, :count] = piece.tokens
        cells[row, :count] = positions[row, :count] = np.arange(piece.start, end)
        if count < width:
            tokens[row, count:] = piece.tokens[-1]
            positions[row, count:] = end - 1
        spans.append((piece.result, piece.rows, row * width + count))
    for result, num_rows, last in sorted(spans):
        wanted.extend(range(last - num_rows, last))
        results.extend(range(result, result + num_rows))
    return Rectangle(
        slots,
        tokens,
        positions,
        cells,
        context,
        bool(fixed_rows),
        np.array(wanted, np.int64),
        np.array(results, np.int64),
    )
