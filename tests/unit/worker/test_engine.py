"""The engine thread with a stepper that is told when to go on: no polling, no lost command, no death."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from specwire.law.tasks import Answer, Failure, ProposeTask, SessionId, Task
from specwire.law.values import GREEDY, Block, Law, Opening
from specwire.lm.port import ModelSpec
from specwire.wire.codec import Hello, TaskFrame
from specwire.worker.desk import Delivery, Desk
from specwire.worker.engine import Engine
from specwire.worker.jobs import Job
from specwire.worker.observe import Observers, StepRecord
from specwire.worker.stepper import Done, Due, Part, Plan, StepResult

OPENING = Opening(Law.SHARED_NOISE, GREEDY, 0, 0, 1)
SPEC = ModelSpec("m", "m", 9, (), 9, (), GREEDY, "cpu", "float32", "f")


class Gated:
    """A stepper that does one job a step, each behind a gate."""

    spec = SPEC
    num_slots = 4

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.wait_until: float | None = None
        self.broken_plans = 0
        self.thread = threading.current_thread().name

    def check(self, task: Task) -> None:
        pass

    def plan(self, jobs: Sequence[Job], due: Sequence[Due], free_since: float, now: float) -> Plan:
        if self.broken_plans:
            self.broken_plans -= 1
            raise RuntimeError("a bug in planning")
        if self.wait_until is not None and len(jobs) < 2 and now < self.wait_until:
            return Plan(wait_until=self.wait_until)
        return Plan((Part(jobs[0], 1, True),))

    def run(self, parts: Sequence[Part]) -> StepResult:
        self.entered.release()
        assert self.gate.acquire(timeout=20)
        return StepResult([Done(parts[0].job, Block((len(parts),)))], rows=1)


class Ear:
    """A stream that keeps deliveries and the event that one came."""

    def __init__(self) -> None:
        self.deliveries: asyncio.Queue[Delivery] = asyncio.Queue()

    def deliver(self, delivery: Delivery) -> None:
        self.deliveries.put_nowait(delivery)

    async def next(self) -> Delivery:
        return await asyncio.wait_for(self.deliveries.get(), 20)


def ask(counter: int) -> ProposeTask:
    """A session from nothing."""
    return ProposeTask(SessionId(1, counter), 1, 1, 0, 0, (1,), OPENING, num_tokens=1)


@asynccontextmanager
async def engine_with(
    stepper: Callable[[], Gated], observers: Observers | None = None
) -> AsyncIterator[tuple[Engine, Gated, Ear]]:
    """A running engine with one welcomed stream."""
    engine = Engine(stepper, asyncio.get_running_loop(), observers or Observers(), 60.0, 600.0, 60.0)
    built = await engine.wait_ready()
    assert isinstance(built, Gated)
    ear = Ear()
    engine.put(lambda desk, now: desk.open(ear, Hello(1, 1, 1000, 1)))
    assert (await ear.next()).welcome
    try:
        yield engine, built, ear
    finally:
        built.gate.release(100)
        assert await asyncio.to_thread(engine.stop, 20)


def send(engine: Engine, ear: Ear, *counters: int) -> None:
    """One frame of new sessions."""
    frame = TaskFrame(tasks=tuple(ask(counter) for counter in counters))
    engine.put(lambda desk, now: desk.frame(ear, 1, frame, now, now, now))


def on_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Runs an async test."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    run.__name__ = getattr(test, "__name__", "test")
    run.__doc__ = test.__doc__
    return run


@on_a_loop
async def test_the_model_is_built_and_used_by_the_engine_thread_only() -> None:
    """One thread owns the device."""
    async with engine_with(Gated) as (_, stepper, _):
        assert stepper.thread == "engine"


@on_a_loop
async def test_what_arrives_during_a_step_is_taken_after_it() -> None:
    """In order, one answer a step here."""
    async with engine_with(Gated) as (engine, stepper, ear):
        send(engine, ear, 1)
        await asyncio.to_thread(stepper.entered.acquire)
        send(engine, ear, 2, 3)
        assert ear.deliveries.empty()
        stepper.gate.release(3)
        answered = [(await ear.next()).finished[0].answer.session.counter for _ in range(3)]

        assert answered == [1, 2, 3]


@on_a_loop
async def test_lingering_ends_when_company_comes() -> None:
    """Long before the time it would have waited."""
    async with engine_with(Gated) as (engine, stepper, ear):
        stepper.wait_until = 1e12
        stepper.gate.release(2)
        send(engine, ear, 1)
        send(engine, ear, 2)
        assert (await ear.next()).finished[0].answer.session.counter == 1
        stepper.wait_until = None
        send(engine, ear, 3)

        assert (await ear.next()).finished[0].answer.session.counter == 2


@on_a_loop
async def test_broken_bookkeeping_fails_everybody_and_the_engine_lives() -> None:
    """The last resort is still an answer to everyone."""
    async with engine_with(Gated) as (engine, stepper, ear):
        stepper.broken_plans = 1
        send(engine, ear, 1, 2)
        failed = await ear.next()
        stepper.gate.release()
        send(engine, ear, 3)
        served = await ear.next()

        assert [each.answer.result for each in failed.finished] == [Failure("internal error")] * 2
        assert isinstance(served.finished[0].answer.result, Block)


@on_a_loop
async def test_a_command_that_raises_hurts_nobody() -> None:
    """It is logged, and the next one is served."""

    def broken(desk: Desk, now: int) -> None:
        raise RuntimeError("a bug in a command")

    async with engine_with(Gated) as (engine, stepper, ear):
        engine.put(broken)
        stepper.gate.release()
        send(engine, ear, 1)

        assert len((await ear.next()).finished) == 1


@on_a_loop
async def test_an_observer_that_raises_is_asked_once() -> None:
    """Metric errors never stop serving (field report 146)."""

    class Broken:
        asked = 0

        def step_done(self, record: Any) -> None:
            self.asked += 1
            raise ValueError("counter went down")

        def task_done(self, answer: Answer) -> None:
            pass

        def session_count(self, sessions: int, waiting: int) -> None:
            pass

    observer = Broken()
    async with engine_with(Gated, Observers([observer])) as (engine, stepper, ear):
        stepper.gate.release(2)
        send(engine, ear, 1)
        await ear.next()
        send(engine, ear, 2)
        await ear.next()
        await idle(engine)

        assert observer.asked == 1


class Notes:
    """An observer that writes down what it is told, where, and how many answers had been handed over by then."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.threads: set[str] = set()
        self.answers: list[int] = []
        self.ear: Ear | None = None
        self._changed = asyncio.Event()

    async def hear(self, what: str) -> None:
        """Returns when that was told."""
        async with asyncio.timeout(20):
            while what not in self.told:
                self._changed.clear()
                await self._changed.wait()

    def _note(self, what: str) -> None:
        self._changed.set()
        self.told.append(what)
        self.threads.add(threading.current_thread().name)
        self.answers.append(self.ear.deliveries.qsize() if self.ear is not None else 0)

    def step_done(self, record: StepRecord) -> None:
        self._note(f"step {record.timing.step}")

    def task_done(self, answer: Answer) -> None:
        self._note("task")

    def session_count(self, sessions: int, waiting: int) -> None:
        self._note(f"{sessions} sessions")


class Chunks(Gated):
    """The first steps answer nothing, as those of a long prompt."""

    unanswered = 3

    def run(self, parts: Sequence[Part]) -> StepResult:
        result = super().run(parts)
        self.unanswered -= 1
        return result if self.unanswered < 0 else StepResult([], rows=1)


@on_a_loop
async def test_observers_are_told_behind_the_answers() -> None:
    """On the event loop: whoever writes an answer does not wait for counters to be counted."""
    notes = Notes()
    async with engine_with(Gated, Observers([notes])) as (engine, stepper, ear):
        notes.ear = ear
        stepper.gate.release(2)
        send(engine, ear, 1, 2)
        await notes.hear("step 2")
        at = notes.told.index("step 1")

        assert ["step 1", "task"] == notes.told[at : at + 2]
        assert notes.answers[at] >= 1
        assert {threading.current_thread().name} == notes.threads


@on_a_loop
async def test_observers_hear_of_steps_that_answer_nothing() -> None:
    """A long prompt on a slow device must not look like a standstill."""
    notes = Notes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specwire.worker.engine.NOTES_WAIT_NS", 0)
        async with engine_with(Chunks, Observers([notes])) as (engine, stepper, ear):
            send(engine, ear, 1)
            stepper.gate.release(2)
            await notes.hear("step 2")

            assert ear.deliveries.empty()


@on_a_loop
async def test_observers_hear_the_rest_when_the_engine_ends() -> None:
    """Steps that answered nothing yet are counted nevertheless."""
    notes = Notes()
    async with engine_with(Chunks, Observers([notes])) as (engine, stepper, ear):
        send(engine, ear, 1)
        stepper.gate.release(1)
        for _ in range(2):
            assert await asyncio.to_thread(stepper.entered.acquire, timeout=20)
        assert not engine.stop(0)  # asked to end within a step
        stepper.gate.release(1)
        assert await asyncio.to_thread(engine.stop, 20)
        await notes.hear("step 2")


async def idle(engine: Engine) -> None:
    """Returns when no task is left."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    engine.when_idle(lambda: loop.call_soon_threadsafe(done.set))
    await done.wait()


@on_a_loop
async def test_idle_is_told_after_the_last_answer() -> None:
    """For draining."""
    async with engine_with(Gated) as (engine, stepper, ear):
        loop = asyncio.get_running_loop()
        answers_at_idle: asyncio.Future[int] = loop.create_future()
        send(engine, ear, 1, 2)
        engine.when_idle(lambda: loop.call_soon_threadsafe(lambda: answers_at_idle.set_result(ear.deliveries.qsize())))
        stepper.gate.release(2)

        assert await answers_at_idle == 2


@on_a_loop
async def test_a_model_that_cannot_be_built_is_told() -> None:
    """By the exception it raised."""

    def build() -> Gated:
        raise MemoryError("too large")

    engine = Engine(build, asyncio.get_running_loop(), Observers(), 60.0, 600.0, 60.0)
    with pytest.raises(MemoryError, match="too large"):
        await engine.wait_ready()
