"""Which workers there are and which of them a session may use. Pure: `now` is an argument.

Law. A worker is known by its name in the topology; a registration with the same name replaces the former one, which cannot take
the name back while its successor lives: else two lives under one name would take it from each other for ever. A draft is
used only beside a target whose vocabulary it shares. A worker that stops its heartbeats, or owes an echo for long, is
suspect: it gets no new session and no new block, but what runs there is not given up for it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from specwire.law.errors import InvalidArgument, VersionMismatch
from specwire.wire.codec import PROTOCOL_VERSION
from specwire.wire.info import WorkerInfo


class Standing(enum.Enum):
    """What a worker is good for."""

    CONNECTING = "connecting"
    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"
    REFUSED = "refused"


_HOLDING = (Standing.CONNECTING, Standing.READY, Standing.SUSPECT)
MAX_REPLACED = 16


@dataclass
class Worker:
    """One registered worker."""

    name: str
    info: WorkerInfo
    address: str
    last_heartbeat: float
    """Monotonic seconds of the last registration or heartbeat."""
    standing: Standing = Standing.CONNECTING
    reason: str = ""
    connects: int = 0
    """Streams opened so far, over all registrations."""
    sessions: set[int] = field(default_factory=set)
    """Counters of the sessions bound to it."""

    def __repr__(self) -> str:
        return f"Worker({self.name}, {self.standing.value}, sessions={len(self.sessions)})"


class Fleet:
    """The registry."""

    def __init__(self, heartbeat_s: float, suspect_after_s: float) -> None:
        self.heartbeat_s = heartbeat_s
        self.suspect_after_s = suspect_after_s
        self.workers: dict[str, Worker] = {}
        self._replaced: dict[str, deque[int]] = {}
        """By name: incarnations that were replaced, the last few."""

    def register(self, name: str, info: WorkerInfo, address: str, now: float) -> tuple[Worker, bool]:
        """Takes a registration. Returns the worker and whether it needs a new link (new address or new life).

        Raises VersionMismatch, InvalidArgument."""
        if info.protocol_version != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"{name} speaks protocol version {info.protocol_version}, this coordinator {PROTOCOL_VERSION}"
            )
        if not name:
            raise InvalidArgument("name", name, "the worker's name in the topology")
        if info.role not in ("draft", "target"):
            raise InvalidArgument("role", info.role, "draft or target")
        former = self.workers.get(name)
        if former is not None and former.info.role != info.role:
            raise InvalidArgument("name", name, f"unused by another role; it belongs to a {former.info.role}")
        if former is not None and former.address == address and former.info.incarnation == info.incarnation:
            former.last_heartbeat = now
            fresh = former.standing is Standing.REFUSED  # what it was refused for may be mended: it is weighed again
            if fresh:
                former.standing, former.reason = Standing.CONNECTING, ""
            return former, fresh
        replaced = self._replaced.setdefault(name, deque(maxlen=MAX_REPLACED))
        if former is not None and former.info.incarnation != info.incarnation:
            if info.incarnation in replaced and former.standing in _HOLDING:
                limit = "that of one worker at a time: a younger one has it. Give each worker a name of its own, or end this one"
                raise InvalidArgument("name", name, limit)
            replaced.append(former.info.incarnation)
        worker = Worker(name, info, address, now)
        if former is not None:
            worker.sessions = former.sessions
            worker.connects = former.connects
        self.workers[name] = worker
        return worker, True

    def heartbeat(self, name: str, incarnation: int, now: float) -> bool:
        """A sign of life. False: not known (or refused), register again."""
        worker = self.workers.get(name)
        if worker is None or worker.info.incarnation != incarnation or worker.standing is Standing.REFUSED:
            return False
        worker.last_heartbeat = now
        return True

    def connected(self, worker: Worker) -> None:
        """Its stream stands. A refused worker stays refused: only a new registration lifts that."""
        worker.connects += 1
        if worker.standing is not Standing.REFUSED:
            worker.standing = Standing.READY
            worker.reason = ""

    def disconnected(self, worker: Worker, reason: str) -> None:
        """Its stream broke."""
        if worker.standing is not Standing.REFUSED:
            worker.standing = Standing.LOST
            worker.reason = reason

    def refuse(self, worker: Worker, reason: str) -> None:
        """It does not fit. Kept, so that people can read why."""
        worker.standing = Standing.REFUSED
        worker.reason = reason

    def judge(self, worker: Worker, silent_s: float, now: float) -> None:
        """Weighs silence: between ready and suspect."""
        quiet = max(silent_s, now - worker.last_heartbeat - self.heartbeat_s)
        if worker.standing is Standing.READY and quiet > self.suspect_after_s:
            worker.standing = Standing.SUSPECT
            worker.reason = f"silent for {quiet:.1f} s"
        elif worker.standing is Standing.SUSPECT and quiet <= self.suspect_after_s:
            worker.standing = Standing.READY
            worker.reason = ""

    def of(self, role: str) -> Iterable[Worker]:
        """Workers of a role, by name."""
        return (self.workers[name] for name in sorted(self.workers) if self.workers[name].info.role == role)

    def pick(self, role: str) -> Worker | None:
        """The ready worker of a role with the fewest sessions; ties to the lower name."""
        ready = [worker for worker in self.of(role) if worker.standing is Standing.READY]
        return min(ready, key=lambda worker: (len(worker.sessions), worker.name), default=None)
