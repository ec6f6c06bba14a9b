"""Virtual time: what happens when, on devices that may share cores and links that keep the order of what they carry.

Law. Nothing sleeps, and chance is a seeded argument, so a run can be repeated. What happens at one moment happens in the order in
which it was asked for; an engine decides last, so that it sees all that has come by then.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any, Protocol


class Clock:
    """Microseconds, and what is to happen."""

    __slots__ = ("_count", "_events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._events: list[tuple[float, bool, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when: float, call: Callable[..., None], *arguments: Any, last: bool = False) -> None:
        """Calls at that time. `last`: after all else that happens then."""
        self._count += 1
        heapq.heappush(self._events, (max(when, self.now), last, self._count, call, arguments))

    def step(self) -> bool:
        """The next event. False: there is none."""
        if not self._events:
            return False
        self.now, _, _, call, arguments = heapq.heappop(self._events)
        call(*arguments)
        return True


class Jitter:
    """How much longer or shorter than on average something takes."""

    __slots__ = ("_part", "_random")

    def __init__(self, part: float, seed: int) -> None:
        self._part = part
        self._random = random.Random(seed)

    def __call__(self, us: float) -> float:
        return us * (1.0 + self._part * (2.0 * self._random.random() - 1.0)) if self._part else us


class Way:
    """One direction of a link. What was sent first arrives first."""

    __slots__ = ("_arrived", "_clock", "_jitter", "_us")

    def __init__(self, clock: Clock, jitter: Jitter, us: float) -> None:
        self._clock = clock
        self._jitter = jitter
        self._us = us
        self._arrived = 0.0

    def carry(self, call: Callable[..., None], *arguments: Any) -> None:
        """Calls at the other end when it arrives."""
        self._arrived = max(self._arrived, self._clock.now + self._jitter(self._us))
        self._clock.at(self._arrived, call, *arguments)


class Stepping(Protocol):
    """An engine, as devices see it."""

    drafts: bool
    """Whether it is a draft's."""

    def ended(self) -> None:
        """The step is over."""


class Devices:
    """What the engines' steps run on."""

    __slots__ = ("_clock", "_left", "_since", "_slower", "_stretch", "_turn")

    def __init__(self, clock: Clock, stretch: float) -> None:
        self._clock = clock
        self._stretch = stretch
        self._left: dict[Stepping, float] = {}
        """Microseconds of work of each step under way, as of `_since`."""
        self._since = 0.0
        self._slower = 1.0
        """How many times longer that work takes now."""
        self._turn = 0
        """Rises whenever what was foretold no longer holds."""

    def run(self, engine: Stepping, us: float) -> None:
        """A step of so much work begins. `ended` is called when it is done."""
        if self._stretch == 1.0:
            self._clock.at(self._clock.now + us, engine.ended)
            return
        self._settle()
        self._left[engine] = us
        self._foretell()

    def _settle(self) -> None:
        """Books the work done since it was booked last."""
        done = (self._clock.now - self._since) / self._slower
        self._since = self._clock.now
        for engine in self._left:
            self._left[engine] -= done

    def _foretell(self) -> None:
        """Says when each step will end, if nothing begins or ends before."""
        beside = len({engine.drafts for engine in self._left}) > 1
        self._slower = self._stretch if beside else 1.0
        self._turn += 1
        for engine, left in self._left.items():
            self._clock.at(self._clock.now + max(0.0, left) * self._slower, self._end, engine, self._turn)

    def _end(self, engine: Stepping, turn: int) -> None:
        if turn != self._turn:
            return
        self._settle()
        del self._left[engine]
        self._foretell()
        engine.ended()
