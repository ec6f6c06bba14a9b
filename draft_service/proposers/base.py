"""The port of everything that can propose tokens. A new way of drafting is a new file beside `model.py`.

Law. A proposer is called by the engine thread only, once a step, with the sequences of that step. It keeps per sequence
nothing but the cache slot it is told; a sequence may leave between any two steps, and its slot may be given to another, which
then starts at 0, or goes on from the beginning that they share (`cut`, `copy`). What it proposes never changes the output, only how
much of it is accepted; but under `rejection` the law it states must be the law it sampled from, and how many tokens it proposes
must not depend on which tokens they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specwire.law.errors import BadLaw
from specwire.law.values import Opening, SparseLaw
from specwire.lm.port import ModelSpec


@dataclass(frozen=True, slots=True)
class Want:
    """How a sequence is to be continued after its tokens have been read."""

    opening: Opening
    position: int
    """Of the first token to propose."""
    limit: int
    """At most so many tokens, at least one."""


@dataclass(frozen=True, slots=True)
class Line:
    """One sequence's part of a step: read tokens, then perhaps propose."""

    slot: int
    start: int
    """Position of tokens[0]; what the slot held from there on is invalid."""
    tokens: Sequence[int]
    """At least one."""
    want: Want | None
    """None: only read."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a sequence got: one token or more, at most the limit."""

    tokens: tuple[int, ...]
    laws: tuple[SparseLaw, ...] = ()
    """One per token under `rejection`, when the token was drawn and not a point mass; else empty."""


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step did."""

    proposals: Sequence[Proposal | BadLaw | None]
    """One per line: None where none was wanted, the error where the model gave no usable law."""
    compute_ns: int
    sample_ns: int


class Proposer(Protocol):
    """Reads and proposes for many sequences at once."""

    @property
    def spec(self) -> ModelSpec:
        """What it is. `columns` tells a reduced vocabulary. Does not mutate."""

    @property
    def num_slots(self) -> int:
        """Sequences it can hold. Does not mutate."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Slot `target` holds the first `length` tokens of slot `source` from now on, and nothing else."""

    def cut(self, slot: int, length: int) -> None:
        """Slot `slot` holds its first `length` tokens from now on, and nothing else."""

    def advance(self, lines: Sequence[Line]) -> Advance:
        """One step of all sequences. Mutates their slots. Raises whatever the model raises; then all lines failed."""
