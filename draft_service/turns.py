"""Whether groups of sessions that take turns draft beside each other or one after the other. Pure but for what it has measured.

Law. A step for groups of a and b sessions takes T(a + b). Drafting together, the group that came first waits T(a + b) - T(a) longer
for each token; one after the other, the second waits T(a) + T(b) - T(a + b) longer for each token that the first still gets. So the
first goes alone where

    a * (T(a + b) - T(a)) > b * (T(a) + T(b) - T(a + b))

which is never on a device that hardly notices further rows, and always where every row takes its time.
"""

from __future__ import annotations

from collections.abc import Sequence

RECENT = 0.25
"""Weight of the newest step in the time of a step."""


class Turns:
    """Step times by sessions."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"Turns({ {size: round(1e3 * seconds, 2) for size, seconds in sorted(self._seconds.items())} } ms)"

    def observe(self, sessions: int, seconds: float) -> None:
        """A step with so many took so long."""
        known = self._seconds.get(sessions)
        self._seconds[sessions] = seconds if known is None else (1 - RECENT) * known + RECENT * seconds

    def whose(self, groups: Sequence[int]) -> int:
        """The group that drafts alone now, or 0: all draft. `groups`: of the tasks that wait, the oldest first; 0: in none."""
        first = next(filter(None, groups), 0)
        mine, others = groups.count(first), sum(group not in (0, first) for group in groups)
        if not first or not others:
            return 0
        together, alone, rest = (self._at(size) for size in (mine + others, mine, others))
        if together is None or alone is None or rest is None:
            return 0
        return first if mine * (together - alone) > others * (alone + rest - together) else 0

    def _at(self, sessions: int) -> float | None:
        """Seconds of a step with so many, or hardly more or fewer. None: there was none such."""
        nearest = min(self._seconds, key=lambda size: abs(size - sessions), default=None)
        if nearest is None or abs(nearest - sessions) > max(1, sessions // 8):
            return None
        return self._seconds[nearest]
