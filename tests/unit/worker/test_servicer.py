"""The stream shell without gRPC: what holds a sender back, and what a stream's end looks like."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specwire.law.tasks import Answer, ProposeTask, Reason, Refusal, SessionId
from specwire.wire.codec import PROTOCOL_VERSION, Hello, Kind, TaskFrame, decode_answer_frame, encode_task_frame
from specwire.wire.info import WorkerInfo
from specwire.wire.stopwatch import Stamped, now_ns
from specwire.worker import stream_end
from specwire.worker.desk import Delivery, Finished
from specwire.worker.servicer import WorkerServicer
from specwire.worker.stream_end import StreamEnd

INFO = WorkerInfo("draft", "m", "a", 9, "", "", 9, 1, 1, 1, "cpu", "float32", "0", PROTOCOL_VERSION, 77, "here")


class Desk:
    """Welcomes and refuses everything, at once, on the loop."""

    def __init__(self) -> None:
        self.lost: list[int] = []

    def open(self, stream: StreamEnd, hello: Hello) -> None:
        stream.deliver(Delivery(stream, welcome=True))

    def frame(self, stream: StreamEnd, incarnation: int, frame: TaskFrame, *times: int) -> None:
        refusal = Refusal(Reason.LENGTH)
        answers = [Finished(Answer(t.session, t.epoch, t.number, 0, refusal), times[0]) for t in frame.tasks]
        stream.deliver(Delivery(stream, answers))

    def lose(self, stream: StreamEnd, incarnation: int, now: int) -> None:
        self.lost.append(incarnation)


class Engine:
    """Does what it is asked at once, unless it is busy."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.busy = False
        self.inbox: list[Any] = []

    def put(self, command: Any) -> None:
        self.inbox.append(command)
        if not self.busy:
            self.free()

    def free(self) -> None:
        self.busy = False
        inbox, self.inbox = self.inbox, []
        for command in inbox:
            command(self.desk, now_ns())


class Sender:
    """Endless frames, counted as they are read."""

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self.read = 0

    async def __aiter__(self) -> AsyncIterator[Stamped]:
        hello = TaskFrame(hello=Hello(1, PROTOCOL_VERSION, 1000, 1))
        yield Stamped(encode_task_frame(Kind.PROPOSE, hello), now_ns())
        for number in range(self.frames):
            task = ProposeTask(SessionId(1, 1), 1, number + 1, 3, 0, (1,))
            self.read += 1
            yield Stamped(encode_task_frame(Kind.PROPOSE, TaskFrame(tasks=(task,))), now_ns())
            await asyncio.sleep(0)
        await asyncio.Event().wait()


async def settle() -> None:
    """Lets everything run that can."""
    for _ in range(2000):
        await asyncio.sleep(0)


def served(engine: Engine) -> WorkerServicer:
    """An open servicer."""
    made = WorkerServicer(Kind.PROPOSE, "draft")
    made.open(engine, INFO, ())  # type: ignore[arg-type]
    return made


def test_answers_that_nobody_reads_stop_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow reader holds itself back (field report 42), and once it reads again everything comes."""
    monkeypatch.setattr(stream_end, "MAX_OUTBOX", 16)

    async def run() -> None:
        sender = Sender(500)
        stream = served(Engine()).stream(sender, None)  # type: ignore[arg-type]
        welcome = decode_answer_frame(Kind.PROPOSE, await anext(stream), 1)
        await settle()
        stalled_at = sender.read
        numbers = [
            answer.number
            for _ in range(500)
            for answer in decode_answer_frame(Kind.PROPOSE, await anext(stream), 1).answers
        ]
        await stream.aclose()

        assert welcome.welcome == 77
        assert stalled_at == 17
        assert numbers == list(range(1, 501))

    asyncio.run(run())


def test_an_engine_that_lags_stops_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames wait with the sender, not here."""
    monkeypatch.setattr(stream_end, "MAX_BACKLOG_BYTES", 10 * stream_end.FRAME_COST)

    async def run() -> None:
        engine, sender = Engine(), Sender(100)
        stream = served(engine).stream(sender, None)  # type: ignore[arg-type]
        await anext(stream)
        engine.busy = True
        await settle()
        stalled_at = sender.read
        engine.free()
        for _ in range(100):
            await anext(stream)
        await stream.aclose()

        assert 8 <= stalled_at <= 12
        assert sender.read == 100

    asyncio.run(run())


def test_however_it_ends_the_engine_is_told_once() -> None:
    """The reader's end, and the caller going away."""

    async def run() -> None:
        engine = Engine()

        async def short() -> AsyncIterator[Stamped]:
            yield Stamped(encode_task_frame(Kind.PROPOSE, TaskFrame(hello=Hello(1, PROTOCOL_VERSION, 0, 1))), now_ns())

        whole = [raw async for raw in served(engine).stream(short(), None)]  # type: ignore[arg-type]
        left = served(engine).stream(Sender(5), None)  # type: ignore[arg-type]
        await anext(left)
        await left.aclose()

        assert len(whole) == 1
        assert engine.desk.lost == [1, 1]

    asyncio.run(run())
