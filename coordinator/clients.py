"""The coordinator's end of its links: one long stream per worker, opened again for as long as the worker is wanted.

Law. Tasks put into a link's outbox in one turn of the event loop leave in one frame. A task is stamped when it is put (ready)
and when its frame is handed to gRPC (written); an answer frame is stamped as raw bytes (received) and when it is taken up. A
broken stream empties the outbox, since the ledgers know what was in flight and say it again. Every stream has a number
(generation) of its own, and frames of a former one are never delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from coordinator.ledger import Role
from specwire.law.errors import SpecwireError, Unavailable
from specwire.law.tasks import ProposeTask, SessionId, VerifyTask
from specwire.wire import rpc
from specwire.wire.codec import (
    PROTOCOL_VERSION,
    AnswerFrame,
    Hello,
    Kind,
    TaskFrame,
    decode_answer_frame,
    encode_task_frame,
)
from specwire.wire.stopwatch import Stamped, now_ns

log = logging.getLogger(__name__)

ECHO_INTERVAL_S = 1.0
ECHO_KEPT = 31
"""Round trips of the last so many echoes give the median that is reported."""
MAX_CLOSES = 4096
"""Ends of sessions kept for a worker whose stream is down; the leases of older ones have run out anyway."""
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

_METHODS = {Role.DRAFT: "/specwire.v1.Draft/Propose", Role.TARGET: "/specwire.v1.Target/Verify"}
_KINDS = {Role.DRAFT: Kind.PROPOSE, Role.TARGET: Kind.VERIFY}


@dataclass(frozen=True, slots=True)
class Written:
    """A frame has been handed to gRPC."""

    sessions: tuple[int, ...]
    written_ns: int
    frame_bytes: int


_WRITE_MET_THE_END = "Internal error from Core"
"""What gRPC's library says when a call ends under a write. The status the worker sent is lost then."""


class LinkEvents(Protocol):
    """What a link tells its owner. Called on the event loop; must not block."""

    def due(self, link: WorkerLink, group: int | None) -> tuple[int, int, int]:
        """(sessions whose blocks are due soon, within how many microseconds, of which group); asked before a frame is written.
        `group`: of the tasks in it; None: none of them is in one."""

    def link_up(self, link: WorkerLink, same_worker: bool) -> None:
        """A stream stands and the worker has said who it is."""

    def link_down(self, link: WorkerLink, reason: str) -> None:
        """The stream is lost."""

    def frame_written(self, link: WorkerLink, written: Written) -> None:
        """A frame with tasks went out."""

    def frame_received(self, link: WorkerLink, frame: AnswerFrame, received_ns: int, frame_bytes: int) -> None:
        """Answers came."""


class WorkerLink:
    """One worker's link. Its fields are for reading; only its own coroutines change them."""

    def __init__(
        self, name: str, role: Role, address: str, incarnation: int, lease_ms: int, events: LinkEvents
    ) -> None:
        self.name = name
        self.role = role
        self.address = address
        self.up = False
        """A stream stands and Welcome was received."""
        self.generation = 0
        """Number of the present stream, or of the last one."""
        self.worker_incarnation: int | None = None
        """The worker's life as last heard."""
        self.reason = "connecting"
        """Why it is not up; empty when it is."""
        self.round_trips_us: deque[int] = deque(maxlen=ECHO_KEPT)
        self.silent_since_ns: int | None = None
        """When the oldest unanswered echo was written; None when none is open."""
        self._incarnation = incarnation
        self._lease_ms = lease_ms
        self._events = events
        self._kind = _KINDS[role]
        self._tasks: list[ProposeTask | VerifyTask] = []
        self._announce = False
        """What is due is to be said, even if no task is sent."""
        self._closes: deque[SessionId] = deque(maxlen=MAX_CLOSES)
        self._closed: deque[tuple[int, SessionId]] = deque(maxlen=MAX_CLOSES)
        """Closes written, each with the number of the echo that will confirm it. They may go down with the stream: a worker that
        comes back is told again."""
        self._echo = 0
        self._last_echo = 0
        """Number of the last echo put into the outbox of this stream."""
        self._echo_written: dict[int, int] = {}
        self._wake = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return (
            f"WorkerLink({self.name}, {self.address}, {'up' if self.up else self.reason}, generation={self.generation})"
        )

    def start(self) -> None:
        """Begins to connect, and goes on until `stop`."""
        self._runner = asyncio.create_task(self._run(), name=f"link {self.name}")

    async def stop(self) -> None:
        """Ends the link. `link_down` is not called."""
        if self._runner is not None:
            self._runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runner
        self.up = False

    def send(self, task: ProposeTask | VerifyTask) -> None:
        """Puts a task into the outbox. Ignored while the link is down: the ledger will say it again."""
        if self.up:
            self._tasks.append(task)
            self._wake.set()

    def announce(self) -> None:
        """Sends what is due, also when no task goes out now, so that the target does not start without its company."""
        if self.up:
            self._announce = True
            self._wake.set()

    def close(self, session: SessionId) -> None:
        """Tells the worker that a session is over: now, or when its stream is back. Another life of it need not be told."""
        self._tasks = [task for task in self._tasks if task.session != session] if self._tasks else self._tasks
        self._closes.append(session)
        self._wake.set()

    def round_trip_us(self) -> int:
        """Median echo, 0 before the first."""
        ordered = sorted(self.round_trips_us)
        return ordered[len(ordered) // 2] if ordered else 0

    def silent_s(self) -> float:
        """For how long the worker owes an echo."""
        return 0.0 if self.silent_since_ns is None else (now_ns() - self.silent_since_ns) / 1e9

    async def _run(self) -> None:
        attempt = 0
        channel = rpc.open_channel(self.address)
        try:
            while True:
                started_generation = self.generation
                try:
                    await self._stream(channel)
                    reason = "the worker ended the stream"
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name.lower()}: {error.details()}"
                    if error.details() == _WRITE_MET_THE_END:
                        reason = "the stream ended while a frame was being written"
                except (asyncio.CancelledError, GeneratorExit):
                    raise
                except SpecwireError as error:
                    reason = str(error)
                except Exception as error:  # a frame we cannot read: the stream is useless, the service is not
                    log.exception("link %s", self.name)
                    reason = f"broken stream: {type(error).__name__}"
                was_up, self.up = self.up, False
                if reason != self.reason:
                    log.info("link %s down: %s", self.name, reason)
                self.reason = reason
                self._tasks.clear()
                self._echo_written.clear()
                if was_up:
                    attempt = 0
                    try:
                        self._events.link_down(self, reason)
                    except Exception:  # a bug there must not end the link
                        log.exception("link %s", self.name)
                assert self.generation == started_generation + 1
                await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)] * rpc.jitter())
                attempt += 1
        finally:
            await channel.close()

    async def _stream(self, channel: grpc.aio.Channel) -> None:
        """One stream from Hello to its end."""
        self.generation += 1
        call = rpc.raw_stream_call(channel, _METHODS[self.role])()
        hello = Hello(self._incarnation, PROTOCOL_VERSION, self._lease_ms, self.generation)
        writers: list[asyncio.Task[None]] = []
        try:
            await call.write(encode_task_frame(self._kind, TaskFrame(hello=hello)))
            while True:
                stamped: Stamped | Any = await call.read()
                if stamped is grpc.aio.EOF:
                    status = await call.code()
                    if status is not grpc.StatusCode.OK:
                        raise grpc.aio.AioRpcError(
                            status, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
                        )
                    return
                frame = decode_answer_frame(self._kind, stamped.raw, self._incarnation)
                if frame.welcome is not None:
                    self._welcomed(frame.welcome)
                    writers = [
                        asyncio.create_task(self._write(call), name=f"write {self.name}"),
                        asyncio.create_task(self._echoes(), name=f"echo {self.name}"),
                    ]
                    for writer in writers:
                        writer.add_done_callback(lambda done: None if done.cancelled() else call.cancel())
                if frame.echo:
                    self._echoed(frame.echo, stamped.received_ns)
                if frame.answers and self.up:
                    self._events.frame_received(self, frame, stamped.received_ns, len(stamped.raw))
        except asyncio.CancelledError:
            # A writer that fails cancels the call, and the read then looks as if this task had been cancelled.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            failed = [writer for writer in writers if writer.done() and not writer.cancelled() and writer.exception()]
            raise (failed[0].exception() if failed else None) or Unavailable("the call was cancelled") from None
        finally:
            for writer in writers:
                writer.cancel()
            await asyncio.gather(*writers, return_exceptions=True)
            call.cancel()

    def _welcomed(self, worker: int) -> None:
        same = worker == self.worker_incarnation
        self.worker_incarnation = worker
        self.up = True
        self.reason = ""
        self.silent_since_ns = None
        told = [session for _, session in self._closed]
        self._closed.clear()
        self._last_echo = 0
        self._closes = deque([*told, *self._closes] if same else (), MAX_CLOSES)
        self._wake.set()
        log.info("link %s up at %s%s", self.name, self.address, "" if same else " (new worker)")
        self._events.link_up(self, same)

    async def _write(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            tasks, self._tasks = self._tasks, []
            closes = tuple(self._closes)
            self._closes.clear()
            echo, self._echo = self._echo, 0
            self._closed.extend((echo or self._last_echo + 1, session) for session in closes)
            announce, self._announce = self._announce or bool(tasks), False
            due_sessions = due_us = due_group = 0
            if announce and self.role is Role.TARGET:
                groups = (task.group for task in tasks if isinstance(task, VerifyTask))
                due_sessions, due_us, due_group = self._events.due(self, next(filter(None, groups), None))
            if not (tasks or closes or echo or due_sessions):
                continue
            raw = encode_task_frame(
                self._kind,
                TaskFrame(
                    tasks=tuple(tasks),
                    closes=closes,
                    echo=echo,
                    due_sessions=due_sessions,
                    due_us=due_us,
                    due_group=due_group,
                ),
            )
            written_ns = now_ns()
            if echo:
                self._echo_written[echo] = written_ns
                if self.silent_since_ns is None:
                    self.silent_since_ns = written_ns
            if tasks:
                written = Written(tuple(task.session.counter for task in tasks), written_ns, len(raw))
                self._events.frame_written(self, written)
            await call.write(raw)

    async def _echoes(self) -> None:
        number = 0
        while True:
            number += 1
            if len(self._echo_written) < ECHO_KEPT:
                self._echo = self._last_echo = number
                self._wake.set()
            await asyncio.sleep(ECHO_INTERVAL_S)

    def _echoed(self, number: int, received_ns: int) -> None:
        written_ns = self._echo_written.pop(number, None)
        if written_ns is not None:
            self.round_trips_us.append((received_ns - written_ns) // 1000)
        self.silent_since_ns = min(self._echo_written.values(), default=None)
        while self._closed and self._closed[0][0] <= number:
            self._closed.popleft()
