"""What a worker knows of each session, and which task it may work on.

Law. A task is checked in this order, and the first check that fails is the answer:

1. closed sessions stay closed (tombstone);
2. epoch and number: an exact repeat of a task in work is silently that task, an exact repeat of the last task is answered with
   the stored answer, anything else that is not newer is refused as stale;
3. length: the cache must reach `keep`;
4. hash: the tokens before `keep` must be the ones the coordinator means.

Only a task that passed all of them, when its turn comes, cuts and extends the text. A refusal changes nothing and says the
length and the hash there. `keep = 0` passes 3 and 4 by definition and begins anew.

Tasks of one session are worked on in order. A newer task of the same epoch waits behind the one in work and is checked when
its turn comes; a newer task of a higher epoch overtakes, since nobody wants the older answer any more.

This module knows no clock, no model and no wire. One thread uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

from specwire.law.cursor import Prefix
from specwire.law.tasks import Answer, Reason, Refusal, SessionId
from specwire.worker.jobs import Job, same_task
from specwire.worker.leases import Leases
from specwire.worker.session import Session
from specwire.worker.slots import Grant, Slots

MAX_BEHIND = 8
"""Tasks of one session that may wait behind the one in work."""


@dataclass(frozen=True, slots=True)
class Accept:
    """The task may begin. `overtaken` are older jobs of the session that will never be worked on again."""

    session: Session
    overtaken: tuple[Job, ...] = ()
    grant: Grant | None = None
    """Of a new session."""


@dataclass(frozen=True, slots=True)
class Resend:
    """An exact repeat of the last task: this was the answer."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Taken:
    """Nothing to do now: the task is in work already, or waits behind an older one."""

    repeat: bool


class SessionTable:
    """All sessions of all coordinators at this worker."""

    def __init__(self, num_slots: int, idle_s: float, *, prefix_caching: bool = True) -> None:
        """`prefix_caching`: what a session leaves in its slot may serve the next whose text begins alike."""
        self._idle_s = idle_s
        self._slots = Slots(num_slots, remember=prefix_caching)
        self._sessions: dict[SessionId, Session] = {}
        self.leases = Leases()

    def __repr__(self) -> str:
        working = sum(1 for session in self._sessions.values() if session.front)
        return f"SessionTable(sessions={len(self._sessions)} working={working} {self._slots!r} {self.leases!r})"

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session: SessionId) -> Session | None:
        """The session, if it lives here."""
        return self._sessions.get(session)

    def ids(self) -> list[SessionId]:
        """Every session that lives here."""
        return list(self._sessions)

    def fronts(self) -> list[Job]:
        """Jobs whose turn it is, oldest first."""
        return sorted((s.front for s in self._sessions.values() if s.front), key=lambda job: job.order)

    def place(self, session: SessionId, reason: Reason, detail: str = "") -> Refusal:
        """A refusal that says where the session stands, known here or not."""
        known = self._sessions.get(session)
        return known.place(reason, detail) if known else Refusal(reason, 0, 0, detail)

    def admit(self, job: Job, now: float) -> Accept | Resend | Taken | Refusal:
        """Checks one arriving task in the order of the law. Changes no text."""
        task = job.task
        if self.leases.closed(task.session):
            return Refusal(Reason.CLOSED)
        session = self._sessions.get(task.session)
        if session is None:
            return self._admit_new(job, now)
        session.touched = now
        waiting = [session.front, *session.behind] if session.front else []
        if any(same_task(task, other.task) for other in waiting):
            return Taken(repeat=True)
        if not waiting and session.last is not None and session.answer is not None and same_task(task, session.last):
            return Resend(session.answer)
        epoch, number = session.newest
        if task.epoch < epoch or task.number <= number:
            return session.place(Reason.STALE, f"epoch {task.epoch} number {task.number} after {epoch}, {number}")
        if waiting and task.epoch == epoch:
            if len(session.behind) == MAX_BEHIND:
                return session.place(Reason.NO_ROOM, f"{MAX_BEHIND} tasks of the session wait already")
            session.behind.append(job)
            job.session = session
            return Taken(repeat=False)
        refusal = session.follows(task)
        if refusal is not None:
            return refusal
        session.behind.clear()
        session.front = job
        job.session = session
        return Accept(session, tuple(waiting))

    def _admit_new(self, job: Job, now: float) -> Accept | Refusal:
        task = job.task
        if task.opening is None:
            return Refusal(Reason.LENGTH)
        grant = self._grant(job)
        if grant is None and self._evict(now):
            grant = self._grant(job)
        if grant is None:
            return Refusal(Reason.NO_ROOM, detail=f"all {len(self._sessions)} cache slots are held")
        text = Prefix(task.opening.fingerprint())
        session = Session(task.session, task.opening, grant.slot, text, found=grant.found, touched=now)
        session.front, job.session = job, session
        self._sessions[task.session] = session
        return Accept(session, grant=grant)

    def _grant(self, job: Job) -> Grant | None:
        task = job.task
        assert task.opening is not None
        if self._slots.full:
            return None
        if task.opening.private_prompt or not self._slots.remembers:
            return self._slots.acquire((), {})
        length = max(len(task.append), task.opening.prompt_length)
        sessions = self._sessions.values()
        busy = {each.slot: each.cached(length) for each in sessions if not each.opening.private_prompt}
        return self._slots.acquire(task.append, busy, length)

    def _evict(self, now: float) -> bool:
        """Makes room at the cost of a replay at most: of the session that has been without a stream for longest, else of
        the one nobody spoke of for longest, if for more than its lease. False: everybody here is in use."""
        lost = {session: at for session in self._sessions if (at := self.leases.lost_at(session)) is not None}
        quiet = {
            key: session.touched
            for key, session in self._sessions.items()
            if session.front is None and session.touched + self.leases.lease_s(key) < now
        }
        candidates = lost or quiet
        if not candidates:
            return False
        self.drop(min(candidates, key=lambda key: candidates[key]))
        return True

    def turn(self, session: Session) -> list[tuple[Job, Refusal]]:
        """After the front left: gives the turn to the next job that follows. Returns those that did not, refused. A session
        whose first task never began goes away: nothing of it is here."""
        assert session.front is None
        refused: list[tuple[Job, Refusal]] = []
        while session.front is None and session.behind:
            job = session.behind.popleft()
            refusal = session.follows(job.task)
            if refusal is None:
                session.front = job
            else:
                refused.append((job, refusal))
        if session.front is None and session.number < 0:
            self.drop(session.id)
        return refused

    def withdraw(self, session: Session) -> list[tuple[Job, Refusal]]:
        """Takes back a front that has not begun; nothing was changed. Then as `turn`."""
        assert session.front is not None
        assert not session.front.begun
        session.front = None
        return self.turn(session)

    def drop(self, session: SessionId, *, failed: bool = False) -> tuple[Job, ...]:
        """Forgets a session and frees its slot. Returns the jobs that die with it. `failed`: what its slot holds is not to be
        trusted."""
        known = self._sessions.pop(session, None)
        if known is None:
            return ()
        self._slots.release(known.slot, () if failed or known.opening.private_prompt else known.cached())
        jobs = (known.front, *known.behind) if known.front else ()
        known.front = None
        known.behind.clear()
        return jobs

    def close(self, session: SessionId, now: float) -> None:
        """The coordinator is done with it. A tombstone stays for one lease, so that a late task cannot bring it back."""
        self.drop(session)
        self.leases.bury(session, now)

    def purge_unbegun(self, incarnation: int) -> None:
        """A stream was lost: what had not begun has changed nothing and will be asked for again, if at all."""
        for session in [s for s in self._sessions.values() if s.id.incarnation == incarnation and s.front]:
            session.behind.clear()
            if session.front and not session.front.begun:
                self.withdraw(session)

    def expire(self, now: float) -> None:
        """Forgets what outlived its lease: tombstones, and the sessions of streams that did not come back. So it does with
        sessions nobody spoke of for `idle_s`, whose close was lost; if somebody needs one after all, it is replayed."""
        gone = self.leases.expire(now)
        for session in list(self._sessions.values()):
            if session.id.incarnation in gone or (session.front is None and session.touched + self._idle_s <= now):
                self.drop(session.id)

    def next_expiry(self) -> float | None:
        """When `expire` has something to do next. None: nothing is running out."""
        times = [session.touched + self._idle_s for session in self._sessions.values() if session.front is None]
        lease = self.leases.next_expiry()
        return min([*times, lease] if lease is not None else times, default=None)

    def waiting(self) -> int:
        """Tasks taken and not done."""
        return sum(1 + len(session.behind) for session in self._sessions.values() if session.front)

    def sizes(self) -> dict[str, int]:
        """Entries of every map. All zero when idle and every coordinator has gone."""
        return {"sessions": len(self._sessions), "waiting": self.waiting(), **self.leases.sizes()}

    def check(self) -> None:
        """Raises AssertionError where the table contradicts itself. For tests."""
        self._slots.check([session.slot for session in self._sessions.values()])
        for key, session in self._sessions.items():
            assert key == session.id
            assert not self.leases.closed(key)
            assert (session.last is None) == (session.answer is None)
            assert session.front is not None or not session.behind
            assert session.filled >= 0
            for job in (session.front, *session.behind):
                assert job is None or job.session is session
            order = [(job.task.epoch, job.task.number) for job in (session.front, *session.behind) if job]
            assert order == sorted(set(order))
            assert all(not job.begun for job in session.behind)
