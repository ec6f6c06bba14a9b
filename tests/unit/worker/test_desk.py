"""The paperwork: which answers go to whom, in which frame, and what is left behind. No thread, no model, no clock."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from specwire.law.errors import InvalidArgument
from specwire.law.tasks import Answer, Failure, ProposeTask, Reason, Refusal, SessionId, StepTiming, Task
from specwire.law.values import GREEDY, Block, Law, Opening
from specwire.lm.port import ModelSpec
from specwire.wire.codec import Hello, TaskFrame
from specwire.worker.desk import Delivery, Desk
from specwire.worker.jobs import Job
from specwire.worker.stepper import Done, Due, Part, Plan, StepResult

MS = 1_000_000
OPENING = Opening(Law.SHARED_NOISE, GREEDY, 0, 0, 1)


@dataclass(eq=False)
class End:
    """A stream that keeps what it is given."""

    name: str

    def __repr__(self) -> str:
        return self.name

    def deliver(self, delivery: Delivery) -> None:
        raise AssertionError("the desk gives deliveries to the engine, never to a stream")


@dataclass
class EverythingAtOnce:
    """A stepper that does every job in one step and remembers what it was told is due."""

    spec: ModelSpec = field(default_factory=lambda: ModelSpec("m", "m", 9, (), 9, (), GREEDY, "cpu", "float32", "f"))
    num_slots: int = 2
    due: list[list[Due]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """What was copied, by slots and length."""
    copy_raises: bool = False
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """What was cut, by slot and length."""

    def check(self, task: Task) -> None:
        if 8 in task.append:
            raise InvalidArgument("append", 8, "no eight")

    def plan(self, jobs: Sequence[Job], due: Sequence[Due], free_since: float, now: float) -> Plan:
        self.due.append(list(due))
        return Plan(tuple(Part(job, 1, True) for job in jobs))

    def copy(self, source: int, target: int, length: int) -> None:
        if self.copy_raises:
            raise RuntimeError("the device has gone")
        self.copies.append((source, target, length))

    def cut(self, slot: int, length: int) -> None:
        self.cuts.append((slot, length))

    def run(self, parts: Sequence[Part]) -> StepResult:
        return StepResult([Done(part.job, Block((5,))) for part in parts], 100_000, 2_000_000, 30_000)


def ask(counter: int, number: int = 1, append: tuple[int, ...] = (1,), **more: int) -> ProposeTask:
    """A session from nothing."""
    return ProposeTask(SessionId(more.pop("incarnation", 1), counter), 1, number, 0, 0, append, OPENING, **more)


def desk_with(*streams: tuple[End, int]) -> Desk:
    """A desk with these streams connected and welcomed."""
    desk = Desk(EverythingAtOnce(), 60.0, 600.0)
    for stream, incarnation in streams:
        desk.open(stream, Hello(incarnation, 1, 5000, 1))
    desk.take_out()
    return desk


def step(desk: Desk, now_ns: int) -> None:
    """One engine step."""
    plan = desk.plan(0, now_ns)
    desk.begin(plan.parts, now_ns, 123)
    desk.finish(plan.parts, EverythingAtOnce().run(plan.parts), StepTiming(step=1), now_ns + 3 * MS)


def told(desk: Desk) -> list[tuple[str, list[tuple[int, str]], bool]]:
    """(stream, [(session, result)], whether a step is named) of everything to hand over."""
    return [
        (
            repr(delivery.stream),
            [
                (
                    each.answer.session.counter,
                    each.answer.result.reason.name
                    if isinstance(each.answer.result, Refusal)
                    else type(each.answer.result).__name__,
                )
                for each in delivery.finished
            ],
            delivery.step is not None,
        )
        for delivery in desk.take_out()[0]
    ]


def test_answers_of_a_step_go_out_together_by_stream() -> None:
    """One delivery per coordinator, refusals in one of their own."""
    a, b = End("a"), End("b")
    desk = desk_with((a, 1), (b, 2))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1), ask(2, append=(8,)))), 0, 0, 0)
    desk.frame(b, 2, TaskFrame(tasks=(ask(1, incarnation=2), ask(2, incarnation=2))), 0, 0, 0)
    before = told(desk)
    step(desk, MS)

    assert before == [("a", [(2, "INVALID")], False), ("b", [(2, "NO_ROOM")], False)]
    assert told(desk) == [("a", [(1, "Block")], True), ("b", [(1, "Block")], True)]


def test_times_of_a_task() -> None:
    """Parsed at 1 ms, taken up at 4 ms, a step of 2.13 ms."""
    a = End("a")
    desk = desk_with((a, 1))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1),)), 0, MS, 2 * MS)
    step(desk, 4 * MS)
    (delivery,), _ = desk.take_out()
    (each,) = delivery.finished

    assert (each.received_ns, each.parse_us, each.queue_us, each.compute_us) == (0, 1000, 3000, 2130)
    assert delivery.ended_ns == 7 * MS


def test_how_long_a_session_was_away() -> None:
    """From its answer to its next task, by the stamps of both; a first task comes from nowhere."""
    end = End("a")
    desk = desk_with((end, 1))
    desk.frame(end, 1, TaskFrame(tasks=(ask(1),)), 1 * MS, 1 * MS, 1 * MS)
    first = desk.table.fronts()[0]
    step(desk, 2 * MS)
    desk.frame(end, 1, TaskFrame(tasks=(ask(1, 2),)), 24 * MS, 25 * MS, 40 * MS)

    assert (first.away_ns, desk.table.fronts()[0].away_ns) == (0, 20 * MS)


def test_an_answer_without_a_stream_waits_with_its_session() -> None:
    """The next stream repeats the task and has it."""
    a, again = End("a"), End("again")
    desk = desk_with((a, 1))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1),)), 0, 0, 0)
    plan = desk.plan(0, 0)
    desk.begin(plan.parts, 0, 0)
    desk.lose(a, 1, 0)
    desk.finish(plan.parts, EverythingAtOnce().run(plan.parts), StepTiming(), 0)
    lost = told(desk)
    desk.open(again, Hello(1, 1, 5000, 2))
    desk.frame(again, 1, TaskFrame(tasks=(ask(1),)), 0, 0, 0)

    assert lost == []
    assert told(desk) == [("again", [(1, "Block")], False)]


def test_what_had_not_begun_dies_with_its_stream() -> None:
    """Nothing was changed, nobody waits; and the session made for it is gone."""
    a = End("a")
    desk = desk_with((a, 1))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1),)), 0, 0, 0)
    desk.lose(a, 1, 0)

    assert desk.plan(0, 0) == Plan()
    assert desk.sizes() == {
        "sessions": 0,
        "waiting": 0,
        "peers": 1,
        "tombstones": 0,
        "streams": 0,
        "due": 0,
        "turnarounds": 0,
        "out": 0,
    }


def test_frames_of_a_former_stream_are_ignored() -> None:
    """And its loss costs the new one nothing."""
    old, new = End("old"), End("new")
    desk = desk_with((old, 1))
    desk.open(new, Hello(1, 1, 5000, 2))
    ends = [(repr(d.stream), d.end, d.welcome) for d in desk.take_out()[0]]
    desk.frame(old, 1, TaskFrame(tasks=(ask(1),), closes=(SessionId(1, 2),)), 0, 0, 0)
    desk.lose(old, 1, 0)

    assert ends == [("old", "generation 2 of this stream took over", False), ("new", "", True)]
    assert told(desk) == []
    assert desk.sizes()["streams"] == 1
    assert desk.sizes()["tombstones"] == 0


def test_lateness_is_checked_at_the_start() -> None:
    """10 ms were left at reception; at 9 it starts, at 10 it does not."""
    a = End("a")
    for start_ms, expected in ((9, []), (10, [("a", [(1, "TOO_LATE")], False)])):
        desk = desk_with((a, 1))
        desk.frame(a, 1, TaskFrame(tasks=(ask(1, time_left_ms=10),)), 0, 0, 0)
        plan = desk.plan(0, start_ms * MS)

        assert told(desk) == expected
        assert len(plan.parts) == 1 - len(expected)


def test_a_deadline_holds_for_later_tasks_that_say_none() -> None:
    """The session's first task said 20 ms; the second waits too long."""
    desk = desk_with((a := End("a"), 1))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1, time_left_ms=20),)), 0, 0, 0)
    step(desk, 1 * MS)
    assert told(desk) == [("a", [(1, "Block")], True)]
    desk.frame(a, 1, TaskFrame(tasks=(ask(1, 2),)), 5 * MS, 5 * MS, 5 * MS)

    desk.plan(0, 19 * MS)
    assert told(desk) == []
    desk.plan(0, 20 * MS)
    assert told(desk) == [("a", [(1, "TOO_LATE")], False)]


def test_what_is_due_is_what_the_last_frame_of_each_coordinator_said() -> None:
    """One for each coordinator, until its time is over or a frame of tasks replaces it."""
    a, b = End("a"), End("b")
    desk = Desk(stepper := EverythingAtOnce(), 60.0, 600.0)
    for stream, incarnation in ((a, 1), (b, 2)):
        desk.open(stream, Hello(incarnation, 1, 5000, 1))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1),), due_sessions=3, due_us=2000), 0, 0, 0)
    desk.frame(b, 2, TaskFrame(due_sessions=4, due_us=5000), 0, 0, 0)
    desk.plan(0, MS)
    desk.plan(0, 3 * MS)
    desk.frame(b, 2, TaskFrame(tasks=(ask(1, incarnation=2),)), 0, 0, 0)
    desk.plan(0, 3 * MS)

    assert stepper.due == [[Due(3, 0.002), Due(4, 0.005)], [Due(4, 0.005)], []]


def test_who_is_due_is_told_with_the_group() -> None:
    """Of the last frame that said so; those that are only expected back are of none."""
    a, b = End("a"), End("b")
    desk = Desk(stepper := EverythingAtOnce(), 60.0, 600.0)
    for stream, incarnation in ((a, 1), (b, 2)):
        desk.open(stream, Hello(incarnation, 1, 5000, 1))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1),), due_sessions=3, due_us=20_000, due_group=2), 0, 0, 0)
    desk.frame(b, 2, TaskFrame(due_sessions=4, due_us=50_000, due_group=1), 0, 0, 0)
    step(desk, MS)
    desk.frame(a, 1, TaskFrame(tasks=(ask(1, 2),), due_sessions=3, due_us=20_000), 5 * MS, 5 * MS, 5 * MS)
    step(desk, 6 * MS)
    desk.frame(a, 1, TaskFrame(tasks=(ask(2),), due_sessions=1, due_us=20_000, due_group=1), 9 * MS, 9 * MS, 9 * MS)
    desk.plan(0, 9 * MS)

    assert stepper.due[0] == [Due(3, 0.020, 2), Due(4, 0.050, 1)]
    assert stepper.due[1] == [Due(3, 0.025, 0), Due(4, 0.050, 1)]
    assert [(each.sessions, each.group) for each in stepper.due[2]] == [(1, 1), (4, 1), (1, 0)]


def test_answered_sessions_are_due_within_the_time_they_took_so_far() -> None:
    """Nothing is expected before it was measured; a frame that brings one of them back ends the wait for all."""
    a = End("a")
    desk = Desk(stepper := EverythingAtOnce(), 60.0, 600.0)
    desk.open(a, Hello(1, 1, 5000, 1))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1),)), 0, 0, 0)
    step(desk, 10 * MS)
    desk.frame(a, 1, TaskFrame(tasks=(ask(1, 2),)), 0, 15 * MS, 15 * MS)  # 2 ms after its answer
    step(desk, 20 * MS)
    desk.frame(a, 1, TaskFrame(tasks=(ask(2),)), 0, 24 * MS, 24 * MS)
    desk.plan(0, 24 * MS)
    desk.frame(a, 1, TaskFrame(tasks=(ask(1, 3),)), 0, 25 * MS, 25 * MS)
    desk.plan(0, 25 * MS)

    assert stepper.due == [[], [], [Due(1, pytest.approx(0.029))], []]


def test_a_step_that_raised_fails_its_tasks_only() -> None:
    """Their sessions are gone, the other one stands."""
    a = End("a")
    desk = desk_with((a, 1))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1),)), 0, 0, 0)
    step(desk, 0)
    desk.frame(a, 1, TaskFrame(tasks=(ask(2),)), 0, 0, 0)
    desk.take_out()
    plan = desk.plan(0, 0)
    desk.begin(plan.parts, 0, 0)
    desk.fail(plan.parts, Failure("it broke"), StepTiming(), 0)

    assert told(desk) == [("a", [(2, "Failure")], True)]
    assert desk.session_of(SessionId(1, 2)) == "None"
    assert desk.table.get(SessionId(1, 1)) is not None


def test_reset_answers_everybody_and_forgets_everything() -> None:
    """The last resort."""
    a = End("a")
    desk = desk_with((a, 1))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1), ask(2), ask(2, number=2))), 0, 0, 0)
    desk.reset(Failure("internal error"))

    assert told(desk) == [("a", [(1, "Failure"), (2, "Failure"), (2, "Failure")], False)]
    assert len(desk.table) == 0


PROMPT = tuple(range(1, 8)) * 2
"""Long enough to be worth a copy."""


def filled_after(desk: Desk, stream: End, counter: int) -> int:
    """Tokens of the prompt that are cached for a new session when its task is taken up."""
    desk.frame(stream, 1, TaskFrame(tasks=(ask(counter, append=PROMPT, num_tokens=1),)), 0, 0, 0)
    plan = desk.plan(0, 0)
    desk.begin(plan.parts, 0, 0)
    session = desk.table.get(SessionId(1, counter))
    assert session is not None
    return session.filled


def test_a_beginning_is_copied_when_its_task_comes() -> None:
    """At once, before slots change again: two come in one frame, and begin like a third that lives. Each answer says how much."""
    desk = Desk(stepper := EverythingAtOnce(num_slots=3), 60.0, 600.0)
    desk.open(a := End("a"), Hello(1, 1, 5000, 1))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1, append=PROMPT),)), 0, 0, 0)
    step(desk, 0)
    desk.frame(a, 1, TaskFrame(tasks=(ask(2, append=PROMPT, num_tokens=1), ask(3, append=(*PROMPT[:9], 0)))), 0, 0, 0)

    assert [(0, 1, len(PROMPT)), (0, 2, 9)] == stepper.copies
    step(desk, 0)
    assert [0, len(PROMPT) - 1, 9] == [answer.reused for answer in desk.take_out()[1]]


def test_nothing_is_copied_where_the_slot_is_taken_over_or_caching_is_off() -> None:
    """One slot, cut to what is known of it; then many, with a worker that keeps prompts apart."""
    for slots, caching, expected in ((1, True, len(PROMPT) - 1), (3, False, 0)):
        desk = Desk(stepper := EverythingAtOnce(num_slots=slots), 60.0, 600.0, prefix_caching=caching)
        desk.open(a := End("a"), Hello(1, 1, 5000, 1))
        desk.frame(a, 1, TaskFrame(tasks=(ask(1, append=PROMPT),)), 0, 0, 0)
        step(desk, 0)
        if slots == 1:
            desk.frame(a, 1, TaskFrame(closes=(SessionId(1, 1),)), 0, 0, 0)

        assert expected == filled_after(desk, a, 2)
        assert [] == stepper.copies
        assert ([(0, len(PROMPT))] if caching else []) == stepper.cuts


@pytest.mark.parametrize("how", ["the step raised", "no law", "reset"])
def test_nothing_of_a_session_that_failed_is_used(how: str) -> None:
    """What its slot holds is not to be trusted, though all of its prompt was read in an earlier task."""
    desk = desk_with((a := End("a"), 1))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1, append=PROMPT),)), 0, 0, 0)
    step(desk, 0)
    session = desk.table.get(SessionId(1, 1))
    assert session is not None
    hash_there = session.prefix.hash_at(len(PROMPT))
    again = ProposeTask(session.id, 1, 2, len(PROMPT), hash_there, (2,))
    desk.frame(a, 1, TaskFrame(tasks=(again,)), 0, 0, 0)
    plan = desk.plan(0, 0)
    desk.begin(plan.parts, 0, 0)
    if how == "the step raised":
        desk.fail(plan.parts, Failure("it broke"), StepTiming(), 0)
    elif how == "no law":
        desk.finish(plan.parts, StepResult([Done(plan.parts[0].job, Failure("no"))]), StepTiming(), 0)
    else:
        desk.reset(Failure("internal error"))

    assert 0 == filled_after(desk, a, 2)


def test_a_copy_that_raises_is_never_taken_for_made() -> None:
    """The slot holds nothing of the beginning then; to go on as if it did would give wrong answers."""
    desk = Desk(stepper := EverythingAtOnce(num_slots=3), 60.0, 600.0)
    desk.open(a := End("a"), Hello(1, 1, 5000, 1))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1, append=PROMPT),)), 0, 0, 0)
    step(desk, 0)
    stepper.copy_raises = True
    with contextlib.suppress(RuntimeError):  # the engine logs what a frame raises, and goes on
        desk.frame(a, 1, TaskFrame(tasks=(ask(2, append=PROMPT),)), 0, 0, 0)
    session = desk.table.get(SessionId(1, 2))

    assert session is None or session.found == ()


def test_every_answer_is_told_to_observers_even_without_a_stream() -> None:
    """Counting does not depend on who listens."""
    a = End("a")
    desk = desk_with((a, 1))
    invalid = Answer(SessionId(1, 7), 1, 1, 0, Refusal(Reason.INVALID, detail="no value"))
    desk.frame(a, 1, TaskFrame(tasks=(ask(1),), invalid=(invalid,)), 0, 0, 0)
    plan = desk.plan(0, 0)
    desk.begin(plan.parts, 0, 0)
    desk.lose(a, 1, 0)
    desk.finish(plan.parts, EverythingAtOnce().run(plan.parts), StepTiming(), 0)

    assert [answer.session.counter for answer in desk.take_out()[1]] == [7, 1]


@pytest.mark.parametrize(("asked_ms", "expected"), [(5000, 5.0), (10**9, 60.0)])
def test_the_lease_is_the_coordinators_up_to_the_workers_limit(asked_ms: int, expected: float) -> None:
    """Nobody keeps slots for a year."""
    a = End("a")
    desk = Desk(EverythingAtOnce(), 60.0, 600.0)
    desk.open(a, Hello(1, 1, asked_ms, 1))
    desk.lose(a, 1, 0)

    assert desk.table.next_expiry() == expected
