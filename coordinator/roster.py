"""The workers at hand: who is registered, whose stream stands, who is left alone for a while.

Law. One link per registered worker, opened anew when the worker has a new address or a new life. A draft that was late is left
alone for longer each time in a row, however many blocks are late at a time; any block from it ends that. Sessions are the driver's
affair.
"""

from __future__ import annotations

import asyncio
import logging

from coordinator.clients import LinkEvents, WorkerLink
from coordinator.config import CoordinatorConfig
from coordinator.fleet import Fleet, Standing, Worker
from coordinator.ledger import Role
from specwire.law.tasks import SessionId

log = logging.getLogger(__name__)

SNOOZE_S = (0.25, 0.5, 1.0, 2.0, 5.0)
"""How long a draft that was late is left alone, by times in a row."""


class Roster:
    """Fleet and links."""

    def __init__(self, config: CoordinatorConfig, incarnation: int, events: LinkEvents) -> None:
        self.fleet = Fleet(config.heartbeat_s, config.suspect_after_s)
        self.links: dict[str, WorkerLink] = {}
        self._lease_ms = int(config.lease_s * 1000)
        self._incarnation = incarnation
        self._events = events
        self._snoozed: dict[str, tuple[float, int]] = {}
        """By draft: left alone until, and how often in a row it was late."""
        self._stopping: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"Roster({list(self.links.values())!r})"

    def attach(self, worker: Worker) -> None:
        """A worker was registered, under a new address or in a new life: its link is opened anew."""
        former = self.links.get(worker.name)
        link = WorkerLink(
            worker.name, Role(worker.info.role), worker.address, self._incarnation, self._lease_ms, self._events
        )
        if former is not None:
            link.generation = former.generation
            link.worker_incarnation = former.worker_incarnation
            self._retire(former, "replaced by a new registration")
        self.links[worker.name] = link
        link.start()

    def detach(self, name: str, reason: str) -> None:
        """A worker is no longer wanted."""
        link = self.links.get(name)
        if link is not None:
            self._retire(link, reason)
            del self.links[name]

    async def stop(self) -> None:
        """Ends every link."""
        for link in list(self.links.values()):
            await link.stop()
        self.links.clear()
        await asyncio.gather(*self._stopping, return_exceptions=True)

    def _retire(self, link: WorkerLink, reason: str) -> None:
        if link.up:
            self._events.link_down(link, reason)
            link.up = False
        task = asyncio.create_task(link.stop(), name=f"stop {link.name}")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def judge(self, now: float) -> list[Worker]:
        """Weighs everybody's silence. Returns those that have just become suspect."""
        suspects = []
        for worker in self.fleet.workers.values():
            link = self.links.get(worker.name)
            if link is None:
                continue
            before = worker.standing
            self.fleet.judge(worker, link.silent_s(), now)
            if before is Standing.READY and worker.standing is Standing.SUSPECT:
                log.warning("%s is suspect: %s", worker.name, worker.reason)
                suspects.append(worker)
        return suspects

    def places(self) -> int:
        """Cache slots of all targets that were not refused."""
        return sum(w.info.max_sessions for w in self.fleet.of("target") if w.standing is not Standing.REFUSED)

    def link(self, name: str | None) -> WorkerLink | None:
        """A worker's link, up or not."""
        return self.links.get(name) if name else None

    def close(self, name: str | None, session: SessionId) -> None:
        """Tells a worker that a session is over."""
        link = self.link(name)
        if link is not None:
            link.close(session)
        worker = self.fleet.workers.get(name) if name else None
        if worker is not None:
            worker.sessions.discard(session.counter)

    def usable(self, name: str, now: float) -> Worker | None:
        """The draft, if it can be asked now."""
        worker = self.fleet.workers.get(name)
        if worker is None or worker.standing is not Standing.READY:
            return None
        snoozed = self._snoozed.get(name)
        return None if snoozed is not None and now < snoozed[0] else worker

    def was_late(self, name: str, now: float) -> None:
        """A block did not come in time. Others that are late while it is left alone were asked for before: one slow moment of a
        draft is one, however many sessions waited."""
        until, strikes = self._snoozed.get(name, (0.0, 0))
        if now < until:
            return
        seconds = SNOOZE_S[min(strikes, len(SNOOZE_S) - 1)]
        log.info("%s was late; left alone for %.2f s", name, seconds)
        self._snoozed[name] = (now + seconds, strikes + 1)

    def was_prompt(self, name: str) -> None:
        """A block came."""
        self._snoozed.pop(name, None)
