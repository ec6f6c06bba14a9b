"""When the sessions that were just answered will be back: measured, so that an engine knows whether waiting for them pays.

Law. All verdicts of a step are applied before a coordinator writes its next frame. So a frame that brings a task of a session of
that step tells of all of them: each has its task, is announced, or is closed. A frame that does not may have been on its way
when the step ended, and tells of an earlier one. Estimates move by arrivals only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from specwire.law.tasks import SessionId
from specwire.worker.stepper import Due

_GAIN, _DEVIATION_GAIN, _DEVIATIONS = 1 / 8, 1 / 4, 4
"""As TCP estimates when an acknowledgement is late (RFC 6298): mean plus four mean deviations."""
_LARGEST_JUMP = 4.0
"""An arrival later than so many times the estimate counts as that late: a client that paused says nothing of the next one."""


_STEPS = 4
"""Steps whose answers are remembered."""


class Turnaround:
    """One coordinator's."""

    __slots__ = ("_away", "_deviation_s", "_mean_s")

    def __init__(self) -> None:
        self._away: deque[tuple[float, set[SessionId]]] = deque(maxlen=_STEPS)
        """When a step ended, and the sessions it answered of which nothing was heard since. The oldest first."""
        self._mean_s = 0.0
        """0: not measured yet."""
        self._deviation_s = 0.0

    def __repr__(self) -> str:
        away = [len(sessions) for _, sessions in self._away]
        return f"Turnaround({1e3 * self._mean_s:.1f} +- {1e3 * self._deviation_s:.1f} ms, {away=})"

    def answered(self, sessions: Iterable[SessionId], now: float) -> None:
        """A step ended with answers for these."""
        self._away.append((now, set(sessions)))

    def heard(self, tasks: Iterable[SessionId], closes: Iterable[SessionId], announces: bool, arrived: float) -> None:
        """A frame came, with tasks and closes of these sessions. It may have arrived while a later step ran."""
        tasks = set(tasks)
        before = [(answered, sessions) for answered, sessions in self._away if answered <= arrived]
        seen = max((index for index, (_, sessions) in enumerate(before) if sessions & tasks), default=-1)
        if seen < 0 and announces and not tasks:  # written for its own sake, after verdicts
            seen = len(before) - 1
        if seen >= 0:
            self._observe(arrived - before[seen][0])
            for _ in range(seen + 1):
                self._away.popleft()
        for _, sessions in self._away:
            sessions -= tasks
            sessions.difference_update(closes)

    def due(self) -> list[Due]:
        """Sessions expected back, and by when."""
        if not self._mean_s:
            return []
        within = self._mean_s + _DEVIATIONS * self._deviation_s
        return [Due(len(sessions), answered + within) for answered, sessions in self._away if sessions]

    def _observe(self, gap_s: float) -> None:
        if not self._mean_s:
            self._mean_s, self._deviation_s = gap_s, gap_s / 2
            return
        error = min(gap_s, _LARGEST_JUMP * (self._mean_s + self._deviation_s)) - self._mean_s
        self._deviation_s += _DEVIATION_GAIN * (abs(error) - self._deviation_s)
        self._mean_s += _GAIN * error
