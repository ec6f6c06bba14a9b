"""The workers of a service on paper: what waits, what goes into a step, when a step ends. Shares are the product's own.

Law. An engine takes one step at a time, of what waits when it begins; what comes meanwhile waits. A target's step serves one group,
the one of which most wait, and lingers as the product's does (target_service/batch.py, specwire/worker/desk.py). A draft grows
each task by a token a step, of one group perhaps (draft_service/turns.py); tasks join and leave between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from deploy.experiment.clock import Clock, Devices, Jitter, Way
from deploy.experiment.jobs import Frame, Job
from deploy.experiment.world import Steps
from draft_service.turns import Turns
from specwire.law.tasks import SessionId, StepTiming
from specwire.worker.shares import Claim, Share, share
from specwire.worker.stepper import Due
from specwire.worker.turnaround import Turnaround
from target_service.batch import linger_until, turn

RECENT = 0.25
"""Weight of the newest step in the recent time of a step, as in target_service/engine.py, which would load torch."""
MOMENT_S = 1e-9
"""Times closer than this are the same: the product counts nanoseconds."""


class Notes(Protocol):
    """Who counts steps."""

    def began(self, engine: Engine, group: int, now: float) -> None:
        """A step begins."""

    def ended(self, engine: Engine, began: float, rows: int, sessions: int, now: float) -> None:
        """It is over."""


Reply = Callable[["Engine", list[Job], StepTiming], None]


class Engine:
    """What both kinds have in common."""

    drafts = False

    def __init__(
        self,
        name: str,
        clock: Clock,
        devices: Devices,
        jitter: Jitter,
        steps: Steps,
        read_us: float,
        budget: int,
        most: int,
    ) -> None:
        self.name = name
        self.bound: set[int] = set()
        """Sessions that stay here."""
        self.jobs: list[Job] = []
        """Oldest first."""
        self._clock = clock
        self._devices = devices
        self._jitter = jitter
        self._steps = steps
        self._read_us = read_us
        self._budget = budget
        self._most = most
        self._open: dict[SessionId, Job] = {}
        """Jobs that are wanted. A session has one at most."""
        self._running: list[tuple[Job, Share]] = []
        self._began = 0.0
        self._free_since = 0.0
        self._group = self._rows = self._read = self._count = 0

    def connect(self, reply: Reply, notes: Notes, link_us: float) -> Way:
        """Joins it to the coordinator. Returns the way to it."""
        half = link_us / 2.0
        self._answers = Way(self._clock, self._jitter, half)
        self._reply, self._notes = reply, notes
        return Way(self._clock, self._jitter, half)

    def frame(self, frame: Frame) -> None:
        """A frame came. The engine decides when all that comes now has come."""
        now = self._clock.now
        gone = [self._open.pop(session, None) for session in frame.closes]
        for job in frame.jobs:
            gone.append(self._open.pop(job.session, None))
            job.arrived_us = job.mark_us = now
            self.jobs.append(job)
            self._open[job.session] = job
        for old in gone:
            if old is not None:
                old.gone = True
        if any(gone) and not self._running:
            self.jobs = [job for job in self.jobs if not job.gone]
        self._think()

    def _think(self) -> None:
        if not self._running:
            self._clock.at(self._clock.now, self._turn, last=True)

    def _turn(self) -> None:
        if self._running or not self.jobs:
            return
        jobs, shares = self._plan()
        if not shares:
            return
        self._running = [(jobs[each.key], each) for each in shares]
        self._rows = sum(self._wanted(job) for job, each in self._running if each.last)
        self._read = sum(each.rows for each in shares) - self._rows
        now = self._began = self._clock.now
        for job, _ in self._running:
            job.queue_us += now - job.mark_us
        self._notes.began(self, self._group, now)
        us = self._steps.at(max(1, self._rows)) + self._read_us * self._read
        self._devices.run(self, self._jitter(us))

    def ended(self) -> None:
        """The step is over: its finished jobs are answered."""
        now = self._clock.now
        us = now - self._began
        running, self._running = self._running, []
        self._count += 1
        self._free_since = now
        finished: list[Job] = []
        for job, each in running:
            job.compute_us += us
            job.mark_us = now
            job.bulk -= each.rows - (self._wanted(job) if each.last else 0)
            if each.last and self._advanced(job):
                finished.append(job)
        answered = [job for job in finished if not job.gone]
        for job in answered:
            del self._open[job.session]
        for job in finished:
            job.gone = True
        self.jobs = [job for job in self.jobs if not job.gone]
        self._notes.ended(self, self._began, self._rows, len(running), now)
        timing = StepTiming(
            compute_us=round(us), rows=self._rows, prefill_rows=self._read, sessions=len(running), step=self._count
        )
        self._after(answered, us / 1e6, timing)
        if answered:
            self._answers.carry(self._reply, self, answered, timing)
        self._think()

    def busy_since(self) -> float | None:
        """When the step under way began; None: there is none."""
        return self._began if self._running else None

    # ---------------------------------------------------------------- what differs

    def _plan(self) -> tuple[list[Job], Sequence[Share]]:
        """The next step: jobs, and shares with their places among them. No share: it waits."""
        raise NotImplementedError

    def _wanted(self, job: Job) -> int:
        """Rows of it that are judged, or grow, in the step that reads its last text."""
        raise NotImplementedError

    def _advanced(self, job: Job) -> bool:
        """Its share was served. Returns whether it is done."""
        raise NotImplementedError

    def _after(self, answered: list[Job], seconds: float, timing: StepTiming) -> None:
        """A step is over."""


class TargetEngine(Engine):
    """Judges blocks."""

    def __init__(self, *arguments: Any, linger: bool = True) -> None:
        super().__init__(*arguments)
        self._linger = linger
        self._step_s = 0.0
        self._due = Due()
        self._turnaround = Turnaround()
        self._answered_us: dict[SessionId, float] = {}

    def frame(self, frame: Frame) -> None:
        """Tells also of sessions that are due."""
        now = self._clock.now
        for session in frame.closes:
            self._answered_us.pop(session, None)
        sessions, within_us, group = frame.due
        if frame.jobs or sessions:
            self._due = Due(sessions, (now + within_us) / 1e6, group)
        for job in frame.jobs:
            job.away_us = max(0.0, now - self._answered_us.get(job.session, now))
        self._turnaround.heard((job.session for job in frame.jobs), frame.closes, sessions > 0, now / 1e6)
        super().frame(frame)

    def _plan(self) -> tuple[list[Job], Sequence[Share]]:
        jobs, now = self.jobs, self._clock.now / 1e6
        due = [each for each in (self._due, *self._turnaround.due()) if each.sessions and each.by > now + MOMENT_S]
        since = max(self._free_since, jobs[0].mark_us) / 1e6
        step_s = self._step_s if self._linger else 0.0
        oldest = next((job for job in jobs if job.group), None)
        waited_s = now - oldest.mark_us / 1e6 if oldest is not None else 0.0
        self._group = turn([job.group for job in jobs], waited_s, step_s)
        if self._group:
            jobs = [job for job in jobs if job.group in (0, self._group)]
            due = [each for each in due if each.group == self._group]
        claims = [Claim(key, job.bulk, job.final) for key, job in enumerate(jobs)]
        if due and step_s:
            room = min(self._most - len(claims), self._budget - sum(claim.total for claim in claims))
            away_s = sum(min(job.away_us / 1e6, step_s) for job in jobs) / len(jobs)
            until = linger_until(claims, due, room, step_s, away_s, since, now)
            if until is not None:
                self._clock.at(until * 1e6, self._turn, last=True)
                return jobs, ()
        return jobs, share(claims, self._budget, self._most)

    def _wanted(self, job: Job) -> int:
        return job.final

    def _advanced(self, job: Job) -> bool:
        return True

    def _after(self, answered: list[Job], seconds: float, timing: StepTiming) -> None:
        if timing.prefill_rows <= timing.rows > 0:
            self._step_s = (1 - RECENT) * self._step_s + RECENT * seconds if self._step_s else seconds
        if answered:
            now = self._clock.now
            for job in answered:
                self._answered_us[job.session] = now
            self._turnaround.answered((job.session for job in answered), now / 1e6)


class DraftEngine(Engine):
    """Proposes blocks, token by token."""

    drafts = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turns = Turns()

    def _plan(self) -> tuple[list[Job], Sequence[Share]]:
        jobs = self.jobs
        if alone := self._turns.whose([job.group for job in jobs]):
            jobs = [job for job in jobs if job.group in (0, alone)]
        claims = [Claim(key, job.bulk, self._wanted(job)) for key, job in enumerate(jobs)]
        return jobs, share(claims, self._budget, self._most)

    def _wanted(self, job: Job) -> int:
        return 1 if job.final else 0

    def _advanced(self, job: Job) -> bool:
        job.final -= self._wanted(job)
        return job.final == 0

    def _after(self, answered: list[Job], seconds: float, timing: StepTiming) -> None:
        if timing.rows and not timing.prefill_rows:
            self._turns.observe(timing.rows, seconds)
