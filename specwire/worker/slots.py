"""Cache slots: who holds them, and what texts free ones still hold, so that a text that begins alike need not be read again.

Law. A slot that was given back with a text holds that text until it is given away again. A new text goes to a free slot that
holds its beginning, if that is worth more than what is overwritten behind it; else to an empty one, lowest first, so that busy
slots stay next to each other; else to the one that has been free for longest. In the latter two cases the beginning is copied
from wherever it lies, busy or free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specwire.law.cursor import common

LEAST_COPIED = 8
"""Tokens worth a copy."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A slot for a new text."""

    slot: int
    found: tuple[int, ...] = ()
    """Tokens that the slot holds once it is cut to them, or the copy is made. A text that goes on may part from them later."""
    source: int | None = None
    """Slot from which the tokens found are to be copied first. None: they are there."""


class Slots:
    """All slots of one cache."""

    def __init__(self, num_slots: int, *, remember: bool) -> None:
        """`remember`: False forgets what a slot held when it is given back."""
        self._num_slots = num_slots
        self._remember = remember
        self._free: dict[int, tuple[int, ...]] = dict.fromkeys(range(num_slots), ())
        """What free slots hold, in the order in which they became free."""

    def __repr__(self) -> str:
        held = self._num_slots - len(self._free)
        return f"Slots(held={held} free={len(self._free)} remembered={sum(map(len, self._free.values()))})"

    def acquire(self, text: tuple[int, ...], busy: Mapping[int, tuple[int, ...]], length: int = 0) -> Grant | None:
        """A slot for a text that begins with `text`; None: all are held. `busy`: tokens that held slots hold. `length`: tokens that
        the text will have once all of it has come, so that what follows in a slot that holds all of this may be wanted too."""
        if not self._free:
            return None
        known = {**self._free, **busy} if self._remember and text else {}
        shared = {slot: common(tokens, text) for slot, tokens in known.items()}
        most = max(shared.values(), default=0)
        if most == len(text):
            shared = {slot: min(len(known[slot]), max(most, length)) for slot in known if shared[slot] == most}
            most = max(shared.values(), default=0)
        donors = [slot for slot in shared if shared[slot] == most]
        for slot in sorted((slot for slot in donors if slot in self._free), key=lambda slot: len(known[slot])):
            if most and (2 * most >= len(known[slot]) or len(self._free) == 1):
                return Grant(slot, self._free.pop(slot)[:most])
        copied = most >= LEAST_COPIED
        empty = [slot for slot, tokens in self._free.items() if not tokens]
        others = [slot for slot in self._free if not (copied and slot == donors[0])]
        slot = min(empty) if empty else others[0]
        del self._free[slot]
        return Grant(slot, known[donors[0]][:most], donors[0]) if copied else Grant(slot)

    @property
    def full(self) -> bool:
        """All are held."""
        return not self._free

    @property
    def remembers(self) -> bool:
        """What a slot held may serve another."""
        return self._remember

    def release(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Gives back a held slot that holds `tokens`. ValueError when it is not held: a slot freed twice would serve two texts."""
        if slot in self._free or not 0 <= slot < self._num_slots:
            raise ValueError(f"slot {slot} is not held")
        self._free[slot] = tokens if self._remember else ()

    def check(self, held: Sequence[int]) -> None:
        """Every slot is either held or free, once."""
        assert sorted([*self._free, *held]) == list(range(self._num_slots))
