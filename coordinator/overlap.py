"""Whether a draft worked while something else went on.

Law. A draft works from the moment a task for it is put into its link until an answer to the session is here, or link or session
is gone.
"""

from __future__ import annotations

from specwire.wire.stopwatch import now_ns


class DraftWork:
    """The tasks of all sessions that are at a draft."""

    __slots__ = ("_began_ns", "_ended_ns", "_sessions")

    def __init__(self) -> None:
        self._sessions: dict[int, int] = {}
        """Session to the number of its task sent last."""
        self._began_ns = 0
        """Since when there has been one at every moment. Means nothing while there is none."""
        self._ended_ns = 0
        """When one ended last."""

    def __repr__(self) -> str:
        return f"DraftWork({len(self._sessions)} sessions)"

    def __len__(self) -> int:
        return len(self._sessions)

    def begins(self, session: int, number: int) -> None:
        """A task of this session was sent."""
        if not self._sessions:
            self._began_ns = now_ns()
        self._sessions[session] = number

    def ends(self, session: int, number: int | None = None) -> None:
        """The task with this number was answered, or all of the session's are lost. Not an error if there is none, or a later
        one."""
        last = self._sessions.get(session)
        if last is not None and (number is None or number >= last):
            del self._sessions[session]
            self._ended_ns = now_ns()

    def within(self, begin_ns: int, end_ns: int) -> bool:
        """Whether a draft worked between two stamps, the later one not long ago."""
        return bool(self._sessions and self._began_ns < end_ns) or self._ended_ns > begin_ns
