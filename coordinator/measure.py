"""What was measured, in the form in which the controller needs it: step times by rows, acceptance by position.

Law. Estimates move by observations only; nothing here reads a clock or draws a number. Every call costs a constant (or the
length of one block).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import zip_longest

MAX_BLOCK = 64
"""Longest block looked at."""

_KNOTS: tuple[int, ...] = (*range(1, 11), 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_SINGLE = 10
"""So many knots are one row apart: a device that computes eight rows at a time takes a step from eight to nine."""
_GUESSED_SLOPE = 0.1
"""Without a profile: each further row adds a tenth of the first, between a device that does not notice it and one that does."""
_LOCAL_GAIN = 0.2
"""Share of an observed error that the neighbouring knots take over: five observations count."""
_COMMON_GAIN = 0.02
"""Share that all knots take over, since a machine that slows down does so for every number of rows. Small, so that a wrong shape
is not mistaken for a slow machine."""
LARGEST_ERROR = 4.0
"""Observations further off than this factor count as this far off: one pause must not overturn the table."""

_LOADS = 10
"""1, 2, 3-4, 5-8, ... and more than 256 sessions."""
_LARGEST_GAIN = 0.5
"""Share of an error that one observation takes away, though all others are old."""
_FADE = 0.99
"""What an observation is worth a round later in which nothing was observed."""

_ERRORS_FORMULA = 16.0
"""Observations that a formula counts for, ..."""
_ERRORS_TELL = 4.0
"""... and how many of a load say more than those of another."""
_ERROR_MEMORY = 0.995
"""Per observation, and ..."""
_ERROR_FADES = 0.9995
"""... per round in which none could be made: half is forgotten after 1400."""

PRIOR = 0.6
"""Acceptance before anything was drafted."""
_PRIOR_WEIGHT = 2.0
"""Observations of the first position that PRIOR weighs."""
_NEIGHBOUR_WEIGHT = 8.0
"""Observations that the position before weighs in a position's own: one early refusal must not close the way to longer blocks."""


class StepTimes:
    """Microseconds of one step by its rows: a table that never falls, linear in between."""

    __slots__ = ("_us", "known")

    def __init__(self) -> None:
        self._us = [1.0 + _GUESSED_SLOPE * (rows - 1) for rows in _KNOTS]
        """Per knot. Non-decreasing and positive, always."""
        self.known = False
        """False until the first profile or observation: then only the shape means anything."""

    def __repr__(self) -> str:
        return f"StepTimes({ {rows: round(us) for rows, us in zip(_KNOTS, self._us, strict=True)} })"

    def profile(self, measured_us: Sequence[int]) -> None:
        """Takes a worker's start-up measurement: steps of 1, 2, 4, 8 ... rows. Replaces what was known; empty changes nothing."""
        measured = [float(us) for us in measured_us]
        if not measured or min(measured) <= 0:
            return
        if len(measured) == 1:
            measured.append(measured[0] * (1.0 + _GUESSED_SLOPE))
        points = [(1 << n, us) for n, us in enumerate(measured)]
        us: list[float] = []
        for rows in _KNOTS:
            right = min(max(1, bisect_right(points, (rows, float("inf")))), len(points) - 1)
            (x0, y0), (x1, y1) = points[right - 1], points[right]
            us.append(y0 + (y1 - y0) * (rows - x0) / (x1 - x0))
        self._us = us
        self._make_monotone(0, 0)
        self.known = True

    def at(self, rows: int) -> float:
        """Time of a step with so many rows (at least 1). Past the table it goes on as steeply as the table ends."""
        us = self._us
        if rows <= _SINGLE:
            return us[rows - 1]  # this is the innermost loop of a plan
        right = bisect_right(_KNOTS, rows)
        if right == len(_KNOTS):
            right -= 1
        x0, y0 = _KNOTS[right - 1], us[right - 1]
        return y0 + (us[right] - y0) * (rows - x0) / (_KNOTS[right] - x0)

    def observe(self, rows: int, us: float) -> None:
        """A step of so many rows took so long."""
        if rows < 1 or us <= 0:
            return
        error = us / self.at(rows)
        if not self.known:
            self._us = [value * error for value in self._us]
            self.known = True
            return
        error = min(max(error, 1.0 / LARGEST_ERROR), LARGEST_ERROR)
        common = error**_COMMON_GAIN
        self._us = [value * common for value in self._us]
        right = min(max(1, bisect_right(_KNOTS, rows)), len(_KNOTS) - 1)
        share = min(1.0, (rows - _KNOTS[right - 1]) / (_KNOTS[right] - _KNOTS[right - 1]))
        self._us[right - 1] *= error ** (_LOCAL_GAIN * (1.0 - share))
        self._us[right] *= error ** (_LOCAL_GAIN * share)
        self._make_monotone(right - 1, right)

    def _make_monotone(self, low: int, high: int) -> None:
        """The knots just set are right; the others give way."""
        self._us[high] = max(self._us[low], self._us[high])
        for n in range(high + 1, len(_KNOTS)):
            self._us[n] = max(self._us[n], self._us[n - 1])
        for n in range(low - 1, -1, -1):
            self._us[n] = min(self._us[n], self._us[n + 1])


def _most(expected: float) -> float:
    """What an observation counts as at most where so many microseconds were expected. Something near zero can rise."""
    return LARGEST_ERROR * expected + 1000.0


class Average:
    """A moving average that starts at its first value and does not follow a single pause all the way, however old the rest is."""

    __slots__ = ("_gain", "_since", "known", "value")

    def __init__(self, value: float = 0.0, gain: float = 0.1, *, known: bool = False) -> None:
        self.value = value
        self.known = known
        """False while `value` is only a guess."""
        self._gain = gain
        self._since = 0.0
        """Rounds without an observation since the last one."""

    def idle(self, rounds: float = 1.0) -> None:
        """So many rounds went by without an observation: what is known says less of what is now."""
        self._since += rounds

    def observe(self, value: float) -> None:
        """One more."""
        if not self.known:
            self.value, self.known = value, True
        else:
            gain = min(_LARGEST_GAIN, 1.0 - (1.0 - self._gain) * _FADE**self._since)
            self.value += gain * (min(value, _most(self.value)) - self.value)
        self._since = 0.0


class ByLoad:
    """An average for every load: what queues and shared cores add differs with the sessions at work. Loads are told apart by
    powers of two; one that was never seen is read from the nearest that was."""

    __slots__ = ("_averages", "_nearest")

    def __init__(self, value: float = 0.0, *, known: bool = False) -> None:
        """`known`: the value holds for every load until it is observed there, and a first observation counts as any other."""
        self._averages = [Average(value, known=known) for _ in range(_LOADS)]
        self._nearest = list(self._averages)
        """For each load the average that it is read from."""

    def __repr__(self) -> str:
        known = {1 << n: round(each.value, 2) for n, each in enumerate(self._averages) if each.known}
        return f"ByLoad({known})"

    @property
    def known(self) -> bool:
        """Whether anything was observed at any load."""
        return self._nearest[0].known

    def knows(self, sessions: int) -> bool:
        """Whether anything was observed at so many sessions."""
        return self._averages[self.index(sessions)].known

    def at(self, sessions: int) -> float:
        """The average at so many sessions (at least 1)."""
        return self._nearest[self.index(sessions)].value

    def observe(self, sessions: int, value: float, expected: float | None = None) -> None:
        """One more, seen at so many sessions. `expected`: what was thought of this load before its first; a pause may be the first,
        and counts for no more than a later one would. None: what is known of the nearest load, or nothing."""
        at = self.index(sessions)
        average = self._averages[at]
        if average.known:
            average.observe(value)
            return
        if expected is None and self.known:
            expected = self._nearest[at].value
        average.observe(value if expected is None else min(value, _most(expected)))
        self._nearest = [self._find_nearest(load) for load in range(_LOADS)]

    def idle(self, sessions: int, rounds: float) -> None:
        """So many rounds went by without an observation, at so many sessions."""
        self._averages[self.index(sessions)].idle(rounds)

    def _find_nearest(self, load: int) -> Average:
        known = (n for n, each in enumerate(self._averages) if each.known)
        return self._averages[min(known, key=lambda n: abs(n - load))]

    @staticmethod
    def index(sessions: int) -> int:
        """Of so many sessions' load."""
        return min((sessions - 1).bit_length(), _LOADS - 1)


class ErrorByLoad:
    """How many times larger something turns out than a formula says, by load as in `ByLoad`. The formula counts for sixteen
    observations and the last 200 for the rest; what is not observed any more fades, and the formula is believed again."""

    __slots__ = ("_idle", "_seen")

    def __init__(self) -> None:
        self._seen = [(0.0, 0.0)] * _LOADS
        """Sum of observations, and how many."""
        self._idle = 0.0
        """Rounds that are not faded yet."""

    def __repr__(self) -> str:
        return (
            f"ErrorByLoad({ {1 << n: round(_with_prior(*seen), 3) for n, seen in enumerate(self._seen) if seen[1]} })"
        )

    def at(self, sessions: int) -> float:
        """The factor at so many sessions, or at the nearest load that says something; 1.0 while none does."""
        self._fade()
        at = ByLoad.index(sessions)
        nearest = min(range(_LOADS), key=lambda n: (self._seen[n][1] < _ERRORS_TELL, abs(n - at)))
        return _with_prior(*self._seen[nearest])

    def knows(self, sessions: int) -> bool:
        """Whether something was observed at this load, and has not faded."""
        self._fade()
        return self._seen[ByLoad.index(sessions)][1] >= _ERRORS_TELL

    def observe(self, sessions: int, factor: float) -> None:
        """One more."""
        self._fade()
        at = ByLoad.index(sessions)
        total, count = self._seen[at]
        self._seen[at] = (_ERROR_MEMORY * total + factor, _ERROR_MEMORY * count + 1.0)

    def idle(self, rounds: float = 1.0) -> None:
        """So many rounds went by in which nothing of this kind could be observed."""
        self._idle += rounds

    def _fade(self) -> None:
        if self._idle:
            kept = _ERROR_FADES**self._idle
            self._seen = [(kept * total, kept * count) for total, count in self._seen]
            self._idle = 0.0


def _with_prior(total: float, count: float) -> float:
    return (total + _ERRORS_FORMULA) / (count + _ERRORS_FORMULA)


class Acceptance:
    """Chance that the i-th token of a block stands, given that all before it stand. Position 0 is the first token, unless blocks
    begin at positions of their own; then what is past the last one counts as the last."""

    __slots__ = ("_expected", "_memory", "_since", "hits", "tries")

    def __init__(self, memory: float, expected: Sequence[float] = ()) -> None:
        """`expected`: of each position, before anything is seen. Absent: of each what is known of the one before it."""
        self._memory = memory
        """What an observation is worth one observation of that position later."""
        self._expected = expected
        self._since = 0.0
        """Rounds without a block since the last one with."""
        self.tries: list[float] = []
        """Per position: times it was judged with all before it accepted, older ones counting less."""
        self.hits: list[float] = []
        """Per position: of these, times it stood. At most `tries`."""

    def observe(self, drafted: int, accepted: int, first: int = 0) -> None:
        """A block was judged, whose first token has position `first`. Positions after the first refusal say nothing."""
        if self._since:
            # What was seen long ago weighs less, but never nothing: no evidence is no reason to expect better.
            fade = _FADE**self._since
            for n, tries in enumerate(self.tries):
                kept = max(fade, min(1.0, 4.0 / tries)) if tries > 0 else 1.0
                self.tries[n] *= kept
                self.hits[n] *= kept
            self._since = 0.0
        judged = min(drafted, accepted + 1, MAX_BLOCK)
        last = len(self._expected) - 1 if self._expected else MAX_BLOCK - 1
        missing = min(first + judged, last + 1) - len(self.tries)
        if missing > 0:
            self.tries += [0.0] * missing
            self.hits += [0.0] * missing
        for n in range(judged):
            at, stands = first + n, float(n < accepted)
            if at >= last:  # all that is past it is one observation: a long block says no more than others
                at, stands = last, max(0, min(accepted, judged) - n) / (judged - n)
            self.tries[at] = self.tries[at] * self._memory + 1.0
            self.hits[at] = self.hits[at] * self._memory + stands
            if at == last:
                break

    def idle(self, rounds: float = 1.0) -> None:
        """So many rounds went by without a block."""
        self._since += rounds

    def curve(self) -> list[float]:
        """Shrunk toward what is expected of each position; where that is not given, per position ever judged, toward the one before
        it, and the first toward PRIOR."""
        if self._expected:
            seen = zip_longest(self._expected, self.tries, self.hits, fillvalue=0.0)
            return [(h + _NEIGHBOUR_WEIGHT * e) / (t + _NEIGHBOUR_WEIGHT) for e, t, h in seen]
        chances: list[float] = []
        expected, weight = PRIOR, _PRIOR_WEIGHT
        for tries, hits in zip(self.tries, self.hits, strict=True):
            expected = (hits + weight * expected) / (tries + weight)
            weight = _NEIGHBOUR_WEIGHT
            chances.append(expected)
        return chances
