"""A worker's end of one stream: what waits to be sent, and whether more may be read.

Law. Lives on the event loop; the engine only hands it deliveries and counts what it took. The Welcome goes first. An answer is
completed with its times and serialised when it is about to be written, so that waiting for the other side counts. Memory is
bounded: `full` while the engine or the other side lags behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque

from specwire.law.errors import SpecwireError, Unavailable
from specwire.law.tasks import Answer, TaskTiming
from specwire.wire.codec import AnswerFrame, Kind, encode_answer_frame
from specwire.wire.stopwatch import now_ns
from specwire.worker.desk import Delivery

MAX_BACKLOG_BYTES = 8 * 1024 * 1024
"""Frames of one stream that the engine has not taken yet. Beyond it the reader waits."""
FRAME_COST = 4096
"""What a frame counts besides its bytes."""
MAX_OUTBOX = 256
"""Answer frames of one stream that the other side has not read yet. Beyond it the reader waits."""


class StreamEnd:
    """One connected stream. Lives on the event loop; the engine only hands it to `deliver` and counts what it took."""

    def __init__(self, kind: Kind, incarnation: int) -> None:
        self._kind = kind
        self._worker = incarnation
        self.coordinator: int | None = None
        """Incarnation of the Hello. None: it has not come."""
        self.put_bytes = 0
        """Handed to the engine so far. Written by the event loop only."""
        self.taken_bytes = 0
        """Taken by the engine so far. Written by the engine only."""
        self._outbox: deque[Delivery | int] = deque()  # an int is an echo
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._held: list[int] | None = []
        """Echoes asked for before the Welcome went out, which comes first. None: it has."""
        self._error: SpecwireError | None = None
        self._ended = False
        self._serialise_us = 0

    def __repr__(self) -> str:
        return f"StreamEnd(outbox={len(self._outbox)} backlog={self.put_bytes - self.taken_bytes} ended={self._ended})"

    def deliver(self, delivery: Delivery | int) -> None:
        """Something to send. Called on the event loop, by the engine's wake-up or by the reader (echo)."""
        if isinstance(delivery, Delivery) and delivery.end:
            self.end(Unavailable(delivery.end))
            return
        if isinstance(delivery, int) and self._held is not None:
            self._held.append(delivery)
            return
        self._outbox.append(delivery)
        if self._held is not None:
            self._outbox.extend(self._held)
            self._held = None
        self._ready.set()
        self._room.set()

    def end(self, error: SpecwireError | None) -> None:
        """Ends the stream; None: the other side is done. What waits to be sent is still sent."""
        if not self._ended:
            self._ended, self._error = True, error
            self._ready.set()
            self._room.set()

    @property
    def full(self) -> bool:
        """Whether reading on would only pile up memory."""
        return self.put_bytes - self.taken_bytes > MAX_BACKLOG_BYTES or len(self._outbox) > MAX_OUTBOX

    async def wait_for_room(self) -> None:
        """Returns when the stream is no longer full, or has ended."""
        while self.full and not self._ended:
            self._room.clear()
            await self._room.wait()

    def made_room(self) -> None:
        """The engine took something. Called on the event loop."""
        self._room.set()

    async def next_bytes(self) -> bytes | None:
        """The next frame to write, encoded as late as possible. None: the stream is over. Raises what it ended with."""
        while not self._outbox:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._ready.clear()
            await self._ready.wait()
        item = self._outbox.popleft()
        if len(self._outbox) == MAX_OUTBOX:
            self._room.set()
        if isinstance(item, int):
            return encode_answer_frame(self._kind, AnswerFrame(echo=item))
        return self._encode(item)

    def _encode(self, delivery: Delivery) -> bytes:
        handed_over = now_ns()
        answers = []
        for each in delivery.finished:
            residence_us = max(0, handed_over - each.received_ns) // 1000
            timing = TaskTiming(residence_us, each.parse_us, each.queue_us, each.compute_us)
            said = each.answer
            result = said.result
            answers.append(Answer(said.session, said.epoch, said.number, said.length, result, timing, said.reused))
        step = delivery.step
        if step is not None:
            step = dataclasses.replace(
                step,
                answer_us=max(0, handed_over - delivery.ended_ns) // 1000,
                previous_serialise_us=self._serialise_us,
            )
        welcome = self._worker if delivery.welcome else None
        raw = encode_answer_frame(self._kind, AnswerFrame(welcome, tuple(answers), step))
        self._serialise_us = (now_ns() - handed_over) // 1000
        return raw
