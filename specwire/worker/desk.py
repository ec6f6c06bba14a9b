"""The engine's paperwork: frames in, plans and answers out. Everything an engine does that is neither a thread nor a model.

Law. Every task ends in one answer, and the answer goes to the newest stream of its coordinator, whichever stream brought the
task. A task of a closed session, or one that had not begun when its stream was lost, ends in none. `now_ns` is an argument.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specwire.law.errors import InvalidArgument
from specwire.law.tasks import Answer, Failure, Reason, Refusal, SessionId, StepTiming
from specwire.law.values import Block, Verdict
from specwire.wire.codec import Hello, TaskFrame
from specwire.worker.jobs import Job
from specwire.worker.session import Session
from specwire.worker.sessions import Accept, Resend, SessionTable
from specwire.worker.slots import Grant
from specwire.worker.stepper import Done, Due, Part, Plan, Stepper, StepResult
from specwire.worker.turnaround import Turnaround

log = logging.getLogger(__name__)

Result = Verdict | Block | Refusal | Failure | None


class Stream(Protocol):
    """A connected stream, as the engine sees it: something to give deliveries to."""

    def deliver(self, delivery: Delivery) -> None:
        """Called on the event loop. Must not block."""


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer, with what the stream needs to complete its timing."""

    answer: Answer
    received_ns: int = 0
    parse_us: int = 0
    queue_us: int = 0
    compute_us: int = 0


@dataclass(slots=True)
class Delivery:
    """What one stream is to send. Answers of one step, or of none."""

    stream: Stream
    finished: list[Finished] = field(default_factory=list)
    step: StepTiming | None = None
    ended_ns: int = 0
    """When the engine's work on it ended."""
    welcome: bool = False
    """The stream's Hello is accepted."""
    end: str = ""
    """The stream must end, for this reason. Empty: it goes on."""


class Desk:
    """Sessions, streams and the answers that wait to be handed over."""

    def __init__(self, stepper: Stepper, max_lease_s: float, idle_s: float, *, prefix_caching: bool = True) -> None:
        self.table = SessionTable(stepper.num_slots, idle_s, prefix_caching=prefix_caching)
        self._stepper = stepper
        self._max_lease_s = max_lease_s
        self._streams: dict[int, Stream] = {}  # incarnation -> its newest stream, while connected
        self._due: dict[int, Due] = {}  # incarnation -> what it said is coming
        self._turnarounds: dict[int, Turnaround] = {}  # incarnation -> when those answered last will be back
        self._order = 0
        self._out: list[Delivery] = []
        self._answered: list[Answer] = []

    def __repr__(self) -> str:
        return f"Desk({self.table!r} streams={len(self._streams)})"

    # ---------------------------------------------------------------- what arrives

    def open(self, stream: Stream, hello: Hello) -> None:
        """A stream said Hello: it becomes its coordinator's, or is told that it is stale."""
        lease_s = min(hello.lease_ms / 1e3, self._max_lease_s)
        if not self.table.leases.open_stream(hello.incarnation, hello.generation, lease_s):
            self._out.append(Delivery(stream, end=f"stale stream: generation {hello.generation} after a higher one"))
            return
        former = self._streams.get(hello.incarnation)
        if former is not None and former is not stream:
            self._out.append(Delivery(former, end=f"generation {hello.generation} of this stream took over"))
        self._streams[hello.incarnation] = stream
        self._turnarounds[hello.incarnation] = Turnaround()
        self._out.append(Delivery(stream, welcome=True))

    def lose(self, stream: Stream, incarnation: int, now_ns: int) -> None:
        """A stream ended. Only the newest one of a coordinator matters: its sessions live on for a lease."""
        if self._streams.get(incarnation) is not stream:
            return
        del self._streams[incarnation]
        self._due.pop(incarnation, None)
        self._turnarounds.pop(incarnation, None)
        self.table.leases.lose_stream(incarnation, now_ns / 1e9)
        self.table.purge_unbegun(incarnation)

    def frame(
        self, stream: Stream, incarnation: int, frame: TaskFrame, received_ns: int, parsed_ns: int, now_ns: int
    ) -> None:
        """A frame of tasks. One from a stream that is no longer its coordinator's is ignored."""
        if self._streams.get(incarnation) is not stream:
            return
        for session in frame.closes:
            self.table.close(session, now_ns / 1e9)
        if frame.tasks or frame.due_sessions:
            self._due[incarnation] = Due(frame.due_sessions, (parsed_ns + frame.due_us * 1000) / 1e9, frame.due_group)
        returned = (task.session for task in frame.tasks)
        self._turnarounds[incarnation].heard(returned, frame.closes, frame.due_sessions > 0, parsed_ns / 1e9)
        parse_us = max(0, parsed_ns - received_ns) // 1000
        for answer in frame.invalid:
            job_less = Finished(answer, received_ns, parse_us, max(0, now_ns - parsed_ns) // 1000)
            self._give([job_less])
        for task in frame.tasks:
            self._order += 1
            self._admit(Job(task, received_ns, parse_us, mark_ns=parsed_ns, order=self._order), now_ns)

    def _admit(self, job: Job, now_ns: int) -> None:
        try:
            self._stepper.check(job.task)
        except InvalidArgument as error:
            self._refuse(job, self.table.place(job.task.session, Reason.INVALID, str(error)), now_ns)
            return
        outcome = self.table.admit(job, now_ns / 1e9)
        if isinstance(outcome, Refusal):
            self._refuse(job, outcome, now_ns)
        elif isinstance(outcome, Resend):
            job.queue_ns = max(0, now_ns - job.mark_ns)
            self._give([_finished(job, outcome.answer)])
        elif isinstance(outcome, Accept):
            if outcome.session.answered_ns:
                job.away_ns = max(0, job.mark_ns - outcome.session.answered_ns)
            if outcome.grant is not None and outcome.grant.found:
                self._prepare(outcome.session, outcome.grant)
            for old in outcome.overtaken:
                self._refuse(old, outcome.session.place(Reason.STALE, "overtaken by a task of a later epoch"), now_ns)

    def _prepare(self, session: Session, grant: Grant) -> None:
        """The slot of a new session shall hold what was found for it, and nothing else."""
        length = len(grant.found)
        try:
            if grant.source is None:
                self._stepper.cut(grant.slot, length)
            else:
                self._stepper.copy(grant.source, grant.slot, length)
        except Exception:
            log.exception("what slot %d should hold is read again", grant.slot)
            session.found = ()

    def expire(self, now_ns: int) -> None:
        """Lets leases run out."""
        self.table.expire(now_ns / 1e9)

    # ---------------------------------------------------------------- a step

    def plan(self, free_since_ns: int, now_ns: int) -> Plan:
        """What to do next. Refuses tasks whose time is over before they began."""
        while late := self._late(now_ns):
            session = late.session
            assert session is not None
            refusal = session.place(Reason.TOO_LATE, "the request's deadline passed before it began")
            self._refuse_all(self.table.withdraw(session), now_ns)
            self._refuse(late, refusal, now_ns)
        jobs = self.table.fronts()
        if not jobs:
            return Plan()
        now = now_ns / 1e9
        due = [*self._due.values(), *(due for each in self._turnarounds.values() for due in each.due())]
        return self._stepper.plan(jobs, [each for each in due if each.by > now], free_since_ns / 1e9, now)

    def _late(self, now_ns: int) -> Job | None:
        for job in self.table.fronts():
            deadline = job.deadline_ns
            if deadline is not None and deadline <= now_ns and not job.begun:
                return job
        return None

    def begin(self, parts: Sequence[Part], now_ns: int, wall_ns: int) -> None:
        """The jobs of a step are taken up."""
        for part in parts:
            job = part.job
            job.queue_ns += max(0, now_ns - job.mark_ns)
            if not job.begun:
                assert job.session is not None
                assert job.session.front is job
                job.began_wall_ns = wall_ns
                job.session.begin()

    def finish(self, parts: Sequence[Part], result: StepResult, timing: StepTiming, now_ns: int) -> None:
        """A step is over: its finished jobs are answered, those that failed lose their session."""
        compute_ns = result.prepare_ns + result.compute_ns + result.sample_ns
        for part in parts:
            part.job.mark_ns = now_ns
            part.job.compute_ns += compute_ns
        finished = [self._conclude(done, now_ns) for done in result.done]
        self._give(finished, timing, now_ns)
        answered: dict[int, list[SessionId]] = {}
        for each in finished:
            session = self.table.get(each.answer.session)
            if session is not None and session.front is None:  # else it is gone, or here already
                answered.setdefault(session.id.incarnation, []).append(session.id)
        for incarnation, sessions in answered.items():
            if incarnation in self._turnarounds:
                self._turnarounds[incarnation].answered(sessions, now_ns / 1e9)

    def _conclude(self, done: Done, now_ns: int) -> Finished:
        job = done.job
        session = job.session
        assert session is not None
        if isinstance(done.result, Failure):
            return self._failed(job, done.result)
        task = job.task
        length = task.base + len(done.tail)
        answer = Answer(task.session, task.epoch, task.number, length, done.result, reused=job.reused)
        session.finish(answer, done.tail)
        session.answered_ns = now_ns
        self._refuse_all(self.table.turn(session), now_ns)
        return _finished(job, answer)

    def fail(self, parts: Sequence[Part], failure: Failure, timing: StepTiming, now_ns: int) -> None:
        """The step raised: its tasks fail, their sessions are gone, all others stay as they were."""
        self._give([self._failed(part.job, failure) for part in parts], timing, now_ns)

    def _failed(self, job: Job, failure: Failure) -> Finished:
        task = job.task
        others = self.table.drop(task.session, failed=True)
        gone = Refusal(Reason.LENGTH, detail="the session failed in an earlier task")
        self._give([_finished(other, _answer(other, gone)) for other in others if other is not job])
        return _finished(job, _answer(job, failure))

    def reset(self, failure: Failure) -> None:
        """The paperwork itself is broken: every task fails and every session is dropped, so that the worker can go on."""
        for session in self.table.ids():
            self._give([_finished(job, _answer(job, failure)) for job in self.table.drop(session, failed=True)])

    # ---------------------------------------------------------------- answers

    def take_out(self) -> tuple[list[Delivery], list[Answer]]:
        """What is to be handed over, by stream, and every answer given since the last call."""
        out, self._out = self._out, []
        answered, self._answered = self._answered, []
        return out, answered

    def _refuse_all(self, refused: list[tuple[Job, Refusal]], now_ns: int) -> None:
        for job, refusal in refused:
            self._refuse(job, refusal, now_ns)

    def _refuse(self, job: Job, refusal: Refusal, now_ns: int) -> None:
        job.queue_ns += max(0, now_ns - job.mark_ns)
        job.mark_ns = now_ns
        self._give([_finished(job, _answer(job, refusal))])

    def _give(self, finished: list[Finished], step: StepTiming | None = None, now_ns: int = 0) -> None:
        """Sorts answers by stream. Those of one step and one stream share a delivery; so do those of none."""
        for each in finished:
            self._answered.append(each.answer)
            stream = self._streams.get(each.answer.session.incarnation)
            if stream is None:
                continue  # stored with the session, and sent when the coordinator comes back and repeats its task
            for delivery in self._out:
                if delivery.stream is stream and delivery.step is step and not delivery.end:
                    delivery.finished.append(each)
                    break
            else:
                self._out.append(Delivery(stream, [each], step, now_ns))

    def sizes(self) -> dict[str, int]:
        """Entries of every map."""
        return {
            **self.table.sizes(),
            "streams": len(self._streams),
            "due": len(self._due),
            "turnarounds": len(self._turnarounds),
            "out": len(self._out),
        }

    def session_of(self, session: SessionId) -> str:
        """A session's repr, for people."""
        return repr(self.table.get(session))


def _answer(job: Job, result: Refusal | Failure) -> Answer:
    length = result.length if isinstance(result, Refusal) else 0
    return Answer(job.task.session, job.task.epoch, job.task.number, length, result)


def _finished(job: Job, answer: Answer) -> Finished:
    return Finished(answer, job.received_ns, job.parse_us, job.queue_ns // 1000, job.compute_ns // 1000)
