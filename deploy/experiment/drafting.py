"""Whether a draft worked while something else went on: as coordinator/overlap.py, in virtual time."""

from __future__ import annotations

from deploy.experiment.jobs import Job


class DraftWork:
    """The tasks of all sessions that are at a draft."""

    __slots__ = ("_began", "_ended", "_jobs")

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        """Session to its task sent last."""
        self._began = self._ended = 0.0

    def begins(self, session: int, job: Job, now: float) -> None:
        """A task was sent."""
        if not self._jobs:
            self._began = now
        self._jobs[session] = job

    def ends(self, session: int, now: float, job: Job | None = None) -> None:
        """This task was answered, or all of the session's are lost. Not an error if there is none, or a later one."""
        last = self._jobs.get(session)
        if last is not None and job in (None, last):
            del self._jobs[session]
            self._ended = now

    def within(self, begin: float, end: float) -> bool:
        """Whether a draft worked between two times, the later one not long ago."""
        return bool(self._jobs and self._began < end) or self._ended > begin
