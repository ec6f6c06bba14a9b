"""The session table against a deliberately dumb second one, which compares whole texts where the table compares hashes."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from specwire.law.cursor import Prefix
from specwire.law.tasks import Answer, ProposeTask, Reason, Refusal, SessionId
from specwire.law.values import Block, Law, Opening, SamplingSpec
from specwire.worker.jobs import Job
from specwire.worker.sessions import Accept, Resend, SessionTable, Taken

SLOTS = 2
BEHIND = 2
"""Small, so that it is reached."""
LEASE_S = 5.0
IDLE_S = 40.0


def opening(seed: int = 0) -> Opening:
    """Any law will do."""
    return Opening(Law.SHARED_NOISE, SamplingSpec(), seed, 0, 1)


def task(session: SessionId, epoch: int, number: int, text: tuple[int, ...], keep: int, seed: int = 0) -> ProposeTask:
    """Continues `text[:keep]` to `text`."""
    hash_at_keep = Prefix(opening(seed).fingerprint(), text[:keep]).hash_at(keep)
    opened = None if keep else opening(seed)
    return ProposeTask(session, epoch, number, keep, hash_at_keep, text[keep:], opened, num_tokens=1)


@dataclass
class Known:
    """A session, dumbly: whole texts, a list of tasks that wait."""

    text: tuple[int, ...] = ()
    seed: int = 0
    epoch: int = 0
    number: int = -1
    done: tuple[ProposeTask, Answer] | None = None
    waiting: list[tuple[ProposeTask, tuple[int, ...], int]] = field(default_factory=list)  # task, its text, its seed
    begun: bool = False
    touched: float = 0.0


class Machine(RuleBasedStateMachine):
    """Two coordinators, three counters each, two slots."""

    tasks = Bundle("tasks")

    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(SLOTS, IDLE_S)
        self.known: dict[SessionId, Known] = {}
        self.closed: dict[SessionId, float] = {}
        self.lost: dict[int, float | None] = {}  # incarnation -> when its stream was lost
        self.generation = 0
        self.now = 0.0
        self.last_sent: list[tuple[ProposeTask, tuple[int, ...], int]] = []
        for incarnation in (1, 2):
            self.open_stream(incarnation)

    # ------------------------------------------------------------ streams and time

    @rule(incarnation=st.sampled_from([1, 2]))
    def reconnect(self, incarnation: int) -> None:
        self.open_stream(incarnation)

    def open_stream(self, incarnation: int) -> None:
        self.generation += 1
        assert self.table.leases.open_stream(incarnation, self.generation, LEASE_S)
        assert not self.table.leases.open_stream(incarnation, self.generation - 1, LEASE_S)
        self.lost[incarnation] = None

    @rule(incarnation=st.sampled_from([1, 2]))
    def lose_stream(self, incarnation: int) -> None:
        if self.lost.get(incarnation, 0.0) is not None:
            return
        self.table.leases.lose_stream(incarnation, self.now)
        self.table.purge_unbegun(incarnation)
        self.lost[incarnation] = self.now
        for session, known in list(self.known.items()):
            if session.incarnation == incarnation:
                known.waiting = known.waiting[:1] if known.begun else []
                if known.number < 0:
                    del self.known[session]

    @rule(seconds=st.sampled_from([0.5, LEASE_S, 0.6 * IDLE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire(self.now)
        self.closed = {s: until for s, until in self.closed.items() if until > self.now}
        over = {i for i, lost in self.lost.items() if lost is not None and lost + LEASE_S <= self.now}
        for incarnation in over:
            del self.lost[incarnation]
        for session, known in list(self.known.items()):
            idle = not known.waiting and known.touched + IDLE_S <= self.now
            if session.incarnation in over or idle:
                del self.known[session]

    # ------------------------------------------------------------ tasks

    @rule(
        target=tasks,
        who=st.sampled_from([(1, 1), (1, 1), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]),
        cut=st.sampled_from([0, 0, 1, 2, -1, None]),
        more=st.lists(st.integers(0, 2), min_size=1, max_size=3),
        epoch_step=st.sampled_from([0, 0, 0, 1, -1]),
        number_step=st.sampled_from([1, 1, 1, 5, 0, -1]),
        seed=st.integers(0, 1),
        spoil=st.sampled_from([False, False, False, True]),
    )
    def send(
        self,
        who: tuple[int, int],
        cut: int | None,
        more: list[int],
        epoch_step: int,
        number_step: int,
        seed: int,
        spoil: bool,
    ) -> tuple[ProposeTask, tuple[int, ...], int]:
        """A task that mostly follows what is known, and sometimes nearly does."""
        session = SessionId(*who)
        known = self.known.get(session, Known())
        newest, base, old_seed = known.waiting[-1] if known.waiting else (known, known.text, known.seed)
        keep = max(0, len(base) - cut) if cut is not None else 0
        text = (*base, 9, 9)[:keep] + tuple(more)
        if spoil and keep:
            text = (text[0] + 1, *text[1:])
        epoch, number = max(0, newest.epoch + epoch_step), max(0, newest.number + number_step)
        seed = old_seed if keep else seed
        made = task(session, epoch, number, text, keep, seed), text, seed
        self.admit(made)
        return made

    @rule(made=tasks)
    def repeat(self, made: tuple[ProposeTask, tuple[int, ...], int]) -> None:
        """A frame that came twice, or late."""
        self.admit(made)

    @precondition(lambda self: self.last_sent)
    @rule()
    def repeat_at_once(self) -> None:
        """A frame that came twice in a row."""
        self.admit(self.last_sent[-1])

    def admit(self, made: tuple[ProposeTask, tuple[int, ...], int]) -> None:
        """What the table says to a task, new or repeated, is what the dumb one says."""
        asked = made[0]
        if self.lost.get(asked.session.incarnation, 0.0) is not None:
            return  # frames of a lost stream never reach the table
        self.last_sent = [made]
        expected = self.expect(made)

        with mock.patch("specwire.worker.sessions.MAX_BEHIND", BEHIND):
            assert self.told(self.table.admit(Job(asked), self.now)) == expected

    def told(self, outcome: object) -> object:
        if isinstance(outcome, Accept):
            return "accept", [job.task.number for job in outcome.overtaken]
        if isinstance(outcome, Refusal):
            return outcome.reason, outcome.length, outcome.hash
        if isinstance(outcome, Resend):
            return outcome.answer
        assert isinstance(outcome, Taken)
        return "taken"

    def expect(self, made: tuple[ProposeTask, tuple[int, ...], int]) -> object:
        asked = made[0]
        session = asked.session
        if session in self.closed:
            return Reason.CLOSED, 0, 0
        known = self.known.get(session)
        if known is None:
            if asked.keep:
                return Reason.LENGTH, 0, 0
            if len(self.known) == SLOTS:
                leaves = self.makes_room()
                if leaves is None:
                    return Reason.NO_ROOM, 0, 0
                del self.known[leaves]
            self.known[session] = Known(waiting=[made], touched=self.now)
            return "accept", []
        known.touched = self.now
        if any(asked == other for other, _, _ in known.waiting):
            return "taken"
        if not known.waiting and known.done and known.done[0] == asked:
            return known.done[1]
        newest = known.waiting[-1][0] if known.waiting else known
        if asked.epoch < newest.epoch or asked.number <= newest.number:
            return Reason.STALE, *self.here(known)
        if known.waiting and asked.epoch == newest.epoch:
            if len(known.waiting) > BEHIND:
                return Reason.NO_ROOM, *self.here(known)
            known.waiting.append(made)
            return "taken"
        refusal = self.check(known, made)
        if refusal:
            return refusal
        overtaken = [other.number for other, _, _ in known.waiting]
        known.waiting, known.begun = [made], False
        return "accept", overtaken

    def makes_room(self) -> SessionId | None:
        orphans = [s for s in self.known if self.lost[s.incarnation] is not None]
        if orphans:
            return min(orphans, key=lambda s: self.lost[s.incarnation] or 0.0)
        quiet = [s for s, k in self.known.items() if not k.waiting and k.touched + LEASE_S < self.now]
        return min(quiet, key=lambda s: self.known[s].touched, default=None)

    def here(self, known: Known) -> tuple[int, int]:
        if known.number < 0:
            return 0, 0
        return len(known.text), Prefix(opening(known.seed).fingerprint(), known.text).hash_at(len(known.text))

    def check(self, known: Known, made: tuple[ProposeTask, tuple[int, ...], int]) -> object:
        asked, text, seed = made
        if asked.keep == 0:
            return None
        if asked.keep > len(known.text):
            return Reason.LENGTH, *self.here(known)
        if known.text[: asked.keep] != text[: asked.keep] or known.seed != seed:
            return Reason.HASH, *self.here(known)
        return None

    # ------------------------------------------------------------ the engine's part

    def working(self, begun: bool) -> list[SessionId]:
        return sorted(s for s, k in self.known.items() if k.waiting and k.begun == begun)

    @precondition(lambda self: self.working(False))
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.begin_one(data.draw(st.sampled_from(self.working(False))))

    def begin_one(self, session: SessionId) -> None:
        known = self.known[session]
        asked, text, seed = known.waiting[0]
        known.text, known.seed, known.begun = text, seed, True
        known.epoch, known.number, known.done = asked.epoch, asked.number, None
        found = self.table.get(session)
        assert found is not None
        found.begin()
        assert found.filled <= min(asked.keep, asked.base - 1)

    @precondition(lambda self: self.working(False))
    @rule(tail=st.lists(st.integers(0, 2), max_size=3))
    def work(self, tail: list[int]) -> None:
        """Everybody's front is begun and finished."""
        for session in self.working(False):
            self.begin_one(session)
        for session in self.working(True):
            self.finish_one(session, tail)

    @precondition(lambda self: self.working(True))
    @rule(data=st.data(), tail=st.lists(st.integers(0, 2), max_size=3))
    def finish(self, data: st.DataObject, tail: list[int]) -> None:
        self.finish_one(data.draw(st.sampled_from(self.working(True))), tail)

    def finish_one(self, session: SessionId, tail: list[int]) -> None:
        known = self.known[session]
        asked, _, _ = known.waiting.pop(0)
        answer = Answer(session, asked.epoch, asked.number, asked.base + len(tail), Block(tuple(tail)))
        known.text, known.begun, known.done = (*known.text, *tail), False, (asked, answer)
        found = self.table.get(session)
        assert found is not None
        found.finish(answer, tail)
        self.turn(known, [refusal.reason for _, refusal in self.table.turn(found)])

    @precondition(lambda self: self.working(False))
    @rule(data=st.data())
    def too_late(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.working(False)))
        known = self.known[session]
        known.waiting.pop(0)
        found = self.table.get(session)
        assert found is not None
        self.turn(known, [refusal.reason for _, refusal in self.table.withdraw(found)])
        if known.number < 0 and not known.waiting:
            del self.known[session]

    def turn(self, known: Known, told: list[Reason]) -> None:
        expected = []
        while known.waiting and (refusal := self.check(known, known.waiting[0])):
            expected.append(refusal[0])
            known.waiting.pop(0)
        assert told == expected

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.known)))
        assert len(self.table.drop(session)) == len(self.known.pop(session).waiting)

    @rule(incarnation=st.sampled_from([1, 2]), counter=st.integers(1, 3))
    def close(self, incarnation: int, counter: int) -> None:
        if self.lost.get(incarnation, 0.0) is not None:
            return
        session = SessionId(incarnation, counter)
        self.table.close(session, self.now)
        self.known.pop(session, None)
        self.closed[session] = self.now + LEASE_S

    # ------------------------------------------------------------ always

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        sizes = self.table.sizes()
        assert sizes["sessions"] == len(self.known)
        assert sizes["waiting"] == sum(len(known.waiting) for known in self.known.values())
        assert sizes["tombstones"] == len(self.closed)
        assert sizes["peers"] == len(self.lost)
        for session, known in self.known.items():
            found = self.table.get(session)
            assert found is not None
            if known.number >= 0:
                assert tuple(found.prefix.tokens) == known.text

    def teardown(self) -> None:
        """Everybody goes, time passes, nothing is left."""
        for incarnation in list(self.lost):
            self.table.leases.lose_stream(incarnation, self.now)
        self.table.expire(self.now + LEASE_S)
        assert not any(self.table.sizes().values())
        assert self.table.next_expiry() is None


Machine.TestCase.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestAgainstTheDumbOne = Machine.TestCase


def test_repr_tells_the_story() -> None:
    """What people read in a log."""
    table = SessionTable(2, IDLE_S)
    table.leases.open_stream(1, 1, LEASE_S)
    job = Job(task(SessionId(1, 7), 2, 3, (5, 6), 0))
    table.admit(job, 0.0)
    session = table.get(SessionId(1, 7))
    assert session is not None
    session.begin()

    assert repr(session) == "Session(7 epoch=2 number=3 slot=0 length=2 filled=0 front=3 behind=0)"
    assert repr(table) == (
        "SessionTable(sessions=1 working=1 SlotTable(held=1 free=1) Leases(peers=1 lost=0 tombstones=0))"
    )


def test_an_abandoned_task_leaves_a_cache_that_the_next_one_completes() -> None:
    """Half of the append was written when a later epoch came: it continues from what is written, not from what was meant."""
    table = SessionTable(1, IDLE_S)
    table.leases.open_stream(1, 1, LEASE_S)
    text = (1, 2, 3, 4, 5, 6)
    table.admit(Job(task(SessionId(1, 1), 1, 1, text, 0)), 0.0)
    session = table.get(SessionId(1, 1))
    assert session is not None
    session.begin()
    session.filled = 3
    table.admit(Job(task(SessionId(1, 1), 2, 2, (*text, 7), 5)), 0.0)
    session.begin()

    assert session.filled == 3
    assert tuple(session.prefix.tokens) == (*text[:5], 6, 7)


def test_a_session_nobody_speaks_of_is_dropped_and_speaking_of_it_keeps_it() -> None:
    """A close that was lost costs a slot for a while, not for ever."""
    table = SessionTable(2, IDLE_S)
    table.leases.open_stream(1, 1, LEASE_S)
    for counter in (1, 2):
        job = Job(task(SessionId(1, counter), 1, 1, (5,), 0))
        table.admit(job, 0.0)
        session = table.get(SessionId(1, counter))
        assert session is not None
        session.begin()
        session.finish(Answer(session.id, 1, 1, 1, Block()))
    table.admit(Job(task(SessionId(1, 2), 1, 1, (5,), 0)), 10.0)
    assert table.next_expiry() == IDLE_S
    table.expire(IDLE_S)

    assert table.ids() == [SessionId(1, 2)]
    assert table.next_expiry() == IDLE_S + 10.0
