"""The session table against a deliberately dumb second one, which compares whole texts where the table compares hashes, and
against cache slots that hold real tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from specwire.law.cursor import Prefix, common
from specwire.law.tasks import Answer, ProposeTask, Reason, Refusal, SessionId
from specwire.law.values import Block, Law, Opening, SamplingSpec
from specwire.worker.jobs import Job
from specwire.worker.session import Session
from specwire.worker.sessions import Accept, Resend, SessionTable, Taken
from specwire.worker.slots import Grant

SLOTS = 2
BEHIND = 2
"""Small, so that it is reached."""
COPIED = 2
"""As small."""
PRIVATE = 3
"""Counter of the sessions that share nothing with others."""
LEASE_S = 5.0
IDLE_S = 40.0


def opening(seed: int = 0, private: bool = False) -> Opening:
    """Any law will do."""
    return Opening(Law.SHARED_NOISE, SamplingSpec(), seed, 0, 9, private)


def task(
    session: SessionId, epoch: int, number: int, text: tuple[int, ...], keep: int, seed: int = 0, num_tokens: int = 1
) -> ProposeTask:
    """Continues `text[:keep]` to `text`."""
    opened = opening(seed, session.counter == PRIVATE)
    hash_at_keep = Prefix(opened.fingerprint(), text[:keep]).hash_at(keep)
    return ProposeTask(
        session, epoch, number, keep, hash_at_keep, text[keep:], None if keep else opened, num_tokens=num_tokens
    )


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
    slot: int = -1
    left: tuple[int, ...] = ()
    """What others left in its slot, as long as it has not begun to write there."""
    drafted: tuple[int, ...] = ()
    """What the task at hand has drafted so far. All but the newest token was fed back."""


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
        self.texts: list[tuple[int, ...]] = [()]
        self.cells: list[list[int]] = [[] for _ in range(SLOTS)]
        """What the model's cache holds, by slot."""
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
                if not known.begun:
                    known.drafted = ()
                if known.number < 0:
                    self.forget(session)

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
                self.forget(session)

    # ------------------------------------------------------------ tasks

    @rule(
        target=tasks,
        who=st.sampled_from([(1, 1), (1, 1), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]),
        cut=st.sampled_from([0, 0, 1, 2, -1, None]),
        more=st.lists(st.integers(0, 2), max_size=3),
        like=st.integers(0, 5),
        num_tokens=st.sampled_from([0, 1, 1]),
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
        like: int,
        num_tokens: int,
        epoch_step: int,
        number_step: int,
        seed: int,
        spoil: bool,
    ) -> tuple[ProposeTask, tuple[int, ...], int]:
        """A task that mostly follows what is known, and sometimes nearly does. A new text often begins like an earlier one."""
        session = SessionId(*who)
        known = self.known.get(session, Known())
        newest, base, old_seed = known.waiting[-1] if known.waiting else (known, known.text, known.seed)
        keep = max(0, len(base) - cut) if cut is not None else 0
        begins = (*base, 9, 9)[:keep] if keep else self.texts[-1 - like % len(self.texts)]
        text = begins + tuple(more) or (0,)
        if spoil and keep:
            text = (text[0] + 1, *text[1:])
        epoch, number = max(0, newest.epoch + epoch_step), max(0, newest.number + number_step)
        seed = old_seed if keep else seed
        made = task(session, epoch, number, text, keep, seed, num_tokens), text, seed
        self.texts.append(text)
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

        with (
            mock.patch("specwire.worker.sessions.MAX_BEHIND", BEHIND),
            mock.patch("specwire.worker.slots.LEAST_COPIED", COPIED),
        ):
            outcome = self.table.admit(Job(asked), self.now)
        assert self.told(outcome) == expected
        if isinstance(outcome, Accept) and outcome.grant is not None:
            self.granted(asked.session, outcome.grant)

    def granted(self, session: SessionId, grant: Grant) -> None:
        """A slot for a new session, copied to as the grant says: it holds what it is said to hold."""
        private = [known.slot for other, known in self.known.items() if other.counter == PRIVATE]
        assert grant.slot not in [known.slot for known in self.known.values()]
        assert grant.source is None or grant.source not in (grant.slot, *private)
        if grant.source is not None:
            self.cells[grant.slot] = self.cells[grant.source][: len(grant.found)]
        assert list(grant.found) == self.cells[grant.slot][: len(grant.found)]
        assert session.counter != PRIVATE or not grant.found
        self.known[session].slot, self.known[session].left = grant.slot, grant.found

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
                self.forget(leaves)
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
        known.waiting, known.begun, known.drafted = [made], False, ()
        return "accept", overtaken

    def forget(self, session: SessionId, failed: bool = False) -> Known:
        """A session goes. What must serve nobody afterwards is wiped, so that any claim on it is wrong."""
        gone = self.known.pop(session)
        if failed or session.counter == PRIVATE:
            self.cells[gone.slot] = []
        return gone

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
        found = self.table.get(session)
        assert found is not None
        assert found.front is not None
        written = min(found.filled, asked.keep)
        expected = min(common(known.left, text) if known.left else written, asked.base - (asked.num_tokens > 0))
        known.text, known.seed, known.begun = text, seed, True
        known.epoch, known.number, known.done = asked.epoch, asked.number, None
        assert expected == found.standing(asked)
        found.begin()
        assert expected == found.filled
        assert max(0, expected - written) == found.front.reused
        if asked.num_tokens or expected < asked.base:
            known.left = ()  # something will be written

    def write(self, session: SessionId, tokens: tuple[int, ...]) -> None:
        """Feeds tokens that follow what is filled: whatever the slot held from there on is gone."""
        if tokens:
            known, found = self.known[session], self.table.get(session)
            assert found is not None
            assert found.filled <= len(self.cells[known.slot]), "a hole in the cache"
            self.cells[known.slot][found.filled :] = tokens
            found.filled += len(tokens)

    def catch_up(self, session: SessionId, most: int) -> None:
        """Feeds up to so many tokens of the text, but for a last one that is sampled from."""
        known, found = self.known[session], self.table.get(session)
        assert found is not None
        asked = known.waiting[0][0]
        last = asked.base - (asked.num_tokens > 0)
        self.write(session, known.text[found.filled : min(last, found.filled + most)])

    @precondition(lambda self: self.working(True))
    @rule(data=st.data(), most=st.integers(1, 3))
    def step(self, data: st.DataObject, most: int) -> None:
        """A piece of a text that is read over several steps; it may be the last that is ever read of it."""
        self.catch_up(data.draw(st.sampled_from(self.working(True))), most)

    @precondition(lambda self: self.working(True))
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=2).map(tuple))
    def run_ahead(self, data: st.DataObject, tokens: tuple[int, ...]) -> None:
        """A draft feeds what it drafted, past the text, but for the newest token."""
        session = data.draw(st.sampled_from(self.working(True)))
        known, found = self.known[session], self.table.get(session)
        assert found is not None
        asked = known.waiting[0][0]
        if asked.num_tokens:
            known.drafted += tokens
            self.write(session, (*known.text, *known.drafted)[found.filled : -1])

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
        """As a draft, whose newest token was never fed, or as a target, of whose block `tail` stands and the rest does not."""
        known, found = self.known[session], self.table.get(session)
        assert found is not None
        asked = known.waiting[0][0]
        self.catch_up(session, asked.base)
        if known.drafted:
            tail = list(known.drafted[:-1])
        elif asked.num_tokens:
            self.write(session, (*known.text, *tail, 7, 7)[found.filled :])
        else:
            tail = []
        known.waiting.pop(0)
        answer = Answer(session, asked.epoch, asked.number, asked.base + len(tail), Block(tuple(tail)))
        known.text, known.begun, known.done, known.drafted = (*known.text, *tail), False, (asked, answer), ()
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
            self.forget(session)

    def turn(self, known: Known, told: list[Reason]) -> None:
        expected = []
        while known.waiting and (refusal := self.check(known, known.waiting[0])):
            expected.append(refusal[0])
            known.waiting.pop(0)
        assert told == expected

    @precondition(lambda self: self.known)
    @rule(data=st.data(), failed=st.booleans())
    def drop(self, data: st.DataObject, failed: bool) -> None:
        """One whose model failed leaves nothing behind."""
        session = data.draw(st.sampled_from(sorted(self.known)))
        gone = self.forget(session, failed)
        assert len(self.table.drop(session, failed=failed)) == len(gone.waiting)

    @rule(incarnation=st.sampled_from([1, 2]), counter=st.integers(1, 3))
    def close(self, incarnation: int, counter: int) -> None:
        if self.lost.get(incarnation, 0.0) is not None:
            return
        session = SessionId(incarnation, counter)
        self.table.close(session, self.now)
        if session in self.known:
            self.forget(session)
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

    @invariant()
    def what_counts_as_cached_is_there(self) -> None:
        """The one thing that must never be wrong: a token that is not computed since another stands in its place."""
        for session, known in self.known.items():
            found, cells = self.table.get(session), tuple(self.cells[known.slot])
            assert found is not None
            assert known.slot == found.slot
            assert found.cached() == cells[: len(found.cached())]
            if known.begun:
                assert (*known.text, *known.drafted)[: found.filled] == cells[: found.filled]
            if known.waiting and not known.begun:
                asked, text, _ = known.waiting[0]
                assert text[: found.standing(asked)] == cells[: found.standing(asked)]

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
        "SessionTable(sessions=1 working=1 Slots(held=1 free=1 remembered=0) Leases(peers=1 lost=0 tombstones=0))"
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


# ---------------------------------------------------------------- what another session left


LEFT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def table_with_leftovers(slots: int = 1, **settings: bool) -> SessionTable:
    """A session with the text `LEFT` was here and has gone."""
    table = SessionTable(slots, IDLE_S, **settings)
    table.leases.open_stream(1, 1, LEASE_S)
    session = begun(table, 1, 1, 1, LEFT, 0)
    session.finish(Answer(session.id, 1, 1, len(LEFT), Block()))
    table.close(session.id, 0.0)
    return table


def begun(
    table: SessionTable, counter: int, epoch: int, number: int, text: tuple[int, ...], keep: int, num_tokens: int = 1
) -> Session:
    """The session, once this task of it is taken up."""
    outcome = table.admit(Job(task(SessionId(1, counter), epoch, number, text, keep, num_tokens=num_tokens)), 0.0)
    assert isinstance(outcome, Accept)
    outcome.session.begin()
    return outcome.session


def done(session: Session) -> None:
    """Its front is answered; nothing stands after the append."""
    assert session.front is not None
    asked = session.front.task
    session.finish(Answer(session.id, asked.epoch, asked.number, asked.base, Block()))


def test_a_prompt_that_comes_in_pieces_is_found_piece_by_piece() -> None:
    """As long as all of it is there nothing is written, so what lies behind it stays; the first token computed ends that."""
    table = table_with_leftovers()
    found: list[tuple[int, int]] = []  # (filled, reused) of each task
    for number, (keep, text, num_tokens) in enumerate(
        [(0, LEFT[:3], 0), (3, LEFT[:3], 0), (3, LEFT[:6], 0), (6, LEFT[:8], 1), (8, LEFT, 0)]
    ):
        session = begun(table, 2, 1, number, text, keep, num_tokens)
        assert session.front is not None
        found.append((session.filled, session.front.reused))
        done(session)

    assert [(3, 3), (3, 0), (6, 3), (7, 1), (8, 0)] == found


def test_a_session_that_begins_anew_before_it_wrote_finds_the_same_again() -> None:
    """Its first text was all there, so the slot still holds what it held: the second parts from it later, or earlier."""
    table = table_with_leftovers()
    done(begun(table, 2, 1, 1, LEFT[:3], 0, num_tokens=0))
    again = begun(table, 2, 2, 2, (*LEFT[:7], 0), 0, num_tokens=0)
    assert again.front is not None

    assert (7, 7) == (again.filled, again.front.reused)
    again = begun(table, 2, 3, 3, LEFT, 0, num_tokens=0)
    assert (0, ()) == (again.filled, again.found)  # something was to be written behind the seven


def test_a_cut_before_anything_was_written_goes_on_with_what_is_there() -> None:
    """Back to one token, and on as the other text does, or not."""
    table = table_with_leftovers()
    done(begun(table, 2, 1, 1, LEFT[:5], 0, num_tokens=0))
    done(begun(table, 2, 2, 2, LEFT[:2], 1, num_tokens=0))
    session = begun(table, 2, 3, 3, (*LEFT[:4], 0, 0), 1)

    assert 4 == session.filled


def test_a_task_that_overtakes_the_first_finds_what_that_would_have_found() -> None:
    """Begun and wholly there, or not begun at all: nothing was written yet."""
    for begins in (False, True):
        table = table_with_leftovers()
        first = Job(task(SessionId(1, 2), 1, 1, LEFT[:3], 0, num_tokens=0))
        outcome = table.admit(first, 0.0)
        assert isinstance(outcome, Accept)
        if begins:
            outcome.session.begin()

        assert len(LEFT) - 1 == begun(table, 2, 2, 2, LEFT, 0).filled


def test_who_is_withdrawn_before_it_began_leaves_what_it_found() -> None:
    """It wrote nothing, so the next finds it too."""
    table = table_with_leftovers()
    outcome = table.admit(Job(task(SessionId(1, 2), 1, 1, (*LEFT[:6], 0), 0)), 0.0)
    assert isinstance(outcome, Accept)
    assert Grant(0, LEFT[:6]) == outcome.grant
    table.withdraw(outcome.session)

    assert 6 == begun(table, 4, 1, 1, LEFT, 0).filled


@pytest.mark.parametrize(("failed", "expected"), [(False, 3), (True, 0)])
def test_who_failed_leaves_nothing(failed: bool, expected: int) -> None:
    """Half of its text was read. After a failure nobody knows what the slot holds."""
    table = table_with_leftovers()
    session = begun(table, 2, 1, 1, (7, 7, 7, 7, 7), 0)
    session.filled = 3
    table.drop(session.id, failed=failed)

    assert expected == begun(table, 4, 1, 1, (7, 7, 7, 7, 7), 0).filled


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize(
    ("prefix_caching", "counter", "expected"),
    [(True, 2, (9, 17)), (True, PRIVATE, (0, 9)), (False, 2, (0, 0)), (False, PRIVATE, (0, 0))],
)
def test_nothing_is_found_where_that_is_switched_off(
    prefix_caching: bool, counter: int, expected: tuple[int, int], closed: bool
) -> None:
    """At the worker, or for a session, which then leaves nothing either: neither while it lives nor afterwards."""
    table = table_with_leftovers(3, prefix_caching=prefix_caching)
    done(begun(table, 4, 1, 1, (*LEFT, 0), 0))  # so that the leftovers are in a slot that nobody takes over from it
    first = begun(table, counter, 1, 1, (*LEFT, *LEFT), 0)
    filled = first.filled
    done(first)
    if closed:
        table.close(first.id, 0.0)

    assert expected == (filled, begun(table, 5, 1, 1, (*LEFT, *LEFT), 0).filled)
