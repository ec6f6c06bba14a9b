"""Rounds of sessions on paper: planned and judged in virtual time as coordinator/rounds.py and coordinator/ledger.py do it.

Law. Decisions are the product's own: block lengths (coordinator/window.py), schedules and groups (coordinator/schedule.py), from
what was learnt (coordinator/curves.py). The controller is told what it is told there, and nothing else. What is true of a session
and not known yet (whether a guess is right) is not looked at before the coordinator would know.

Left out: lost workers, draft time-outs, stop texts, n-gram guesses.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.awaited import Awaited
from coordinator.curves import ServiceCurves
from coordinator.ledger import WARM_TOKENS
from coordinator.schedule import SYNCHRONOUS, Schedule, Scheduler
from coordinator.window import PLAIN, Plan, RequestWindow, Room
from deploy.experiment.clock import Clock
from deploy.experiment.drafting import DraftWork
from deploy.experiment.engines import DraftEngine, Engine, TargetEngine
from deploy.experiment.jobs import Job
from deploy.experiment.meter import Meter
from deploy.experiment.world import World
from specwire.law.tasks import SessionId, StepTiming
from specwire.law.values import Source
from specwire.wire.stopwatch import Passage

_DUE = 1.25
"""As in coordinator/rounds.py."""


@dataclass(slots=True, eq=False)
class Session:
    """An answer that is being generated."""

    id: SessionId
    text: random.Random
    """Says of each position of the text how easily it is guessed, whatever the blocks."""
    target: TargetEngine
    draft: DraftEngine
    window: RequestWindow
    wanted: int
    """Tokens still to be committed."""
    behind: int
    """Committed tokens that the draft has not read."""
    unread: int
    """Tokens of the prompt that the target has not read and does not judge from."""
    committed: int = 0
    group: int = 0
    length: int = 0
    """Tokens that this round's plan asks for."""
    waits: bool = False
    """The round waits for its block."""
    block: int = 0
    """Tokens of the block that is being judged."""
    begun_us: float = 0.0
    draft_way: Passage | None = None
    """By which the round's block came; of a guess that was wrong, and of the block that was asked for then, both."""
    asked: Job | None = None
    """The draft's task in flight."""
    ahead: Job | None = None
    """What the draft was asked for beyond the block, while it is not known what it is worth."""
    ahead_tokens: int | None = None
    """The next block's, once it is here."""
    guessed: float = 0.0
    """Chance, by acceptance, that the guess is right."""
    expected: tuple[float, int] | None = None
    """What this round should take, with so many sessions, as its block was asked for ahead; None: it was not."""
    next_expected: tuple[float, int] | None = None
    """The same of the next."""
    schedule: Schedule = SYNCHRONOUS
    """Under which this round was planned, ..."""
    sharing: int = 1
    """... and with how many sessions at its target."""
    right: bool = False
    """Whether it is. The coordinator knows it once verdict and guess are here."""
    judged: bool = False
    """The verdict on what the draft went on from is here, and all of it stands."""


class Rounds:
    """The rounds of all sessions."""

    def __init__(
        self,
        world: World,
        clock: Clock,
        meter: Meter,
        put: Callable[[Engine, Job], None],
        finish: Callable[[Session], None],
    ) -> None:
        """`put`: a task leaves with this turn's frame. `finish`: the answer is complete."""
        self.curves = ServiceCurves()
        self.schedulers = defaultdict[str, Scheduler](lambda: Scheduler(world.schedule, world.groups))
        self.drafting = DraftWork()
        self.awaited = Awaited()
        self.longest = world.longest if world.k is None else world.k
        self._stands = [world.stands(position) for position in range(self.longest + 1)]
        self._clock, self._meter = clock, meter
        self._put, self._finish = put, finish
        if world.profiled:
            target, draft = world.profiles()
            self.curves.target_profile(target)
            self.curves.draft_profile(draft)

    def begin(self, session: Session) -> None:
        """Plans and begins the next round."""
        now = self._clock.now
        session.begun_us, session.draft_way, session.block = now, None, 0
        plan, reads = self._plan(session)
        scheduler, session.group = self.schedulers[session.target.name], 0
        if plan.source is Source.DRAFT_MODEL:
            session.group = scheduler.group(session.id.counter)
        else:
            scheduler.leave(session.id.counter)
        session.length = plan.num_tokens
        if plan.source is Source.DRAFT_MODEL:
            due_ns = int(1e3 * now + _DUE * 1e9 * self.curves.draft_seconds(plan.num_tokens))
            self.awaited.begins(session.id.counter, session.target.name, session.group, due_ns)
            session.waits = True
            if session.ahead is None:
                self._ask(session, session.behind - 1, plan.num_tokens, session.group)
            elif session.ahead_tokens is not None:
                self._take_ahead(session, session.ahead_tokens)
        else:
            if session.ahead is not None:
                self._drop_ahead(session)
            if reads:
                self._ask(session, reads, 0)
            self._verify(session)
        self._run_ahead(session)

    def _plan(self, session: Session) -> tuple[Plan, int]:
        """The round's plan, and how many tokens a draft far behind is to read."""
        longest = min(self.longest, session.wanted - 1)
        sessions, behind, idle = len(session.target.bound), session.behind, session.asked is None
        session.schedule, session.sharing = SYNCHRONOUS, sessions
        if longest > 0:
            session.schedule = self.schedulers[session.target.name].round(self.curves, sessions, self.longest)
        self.curves.turn_to(session.schedule, sessions)
        if longest <= 0:
            return PLAIN, 0
        ready = session.ahead is not None or (idle and behind <= WARM_TOKENS)
        plan = session.window.plan(Room(longest, longest if ready else 0, None, sessions))
        far = session.ahead is None and idle and behind > WARM_TOKENS
        reads = far and session.window.worth_reading(Room(longest, longest, None, sessions), behind)
        return plan, behind if reads else 0

    def _ask(self, session: Session, reads: int, num_tokens: int, group: int = 0) -> Job:
        """Asks the draft to read, and to propose."""
        job = session.asked = Job(session.id, session, reads, num_tokens, group)
        self.drafting.begins(session.id.counter, job, self._clock.now)
        self._put(session.draft, job)
        return job

    def _verify(self, session: Session) -> None:
        """Sends the target what there is to judge."""
        self.awaited.ends(session.id.counter)
        session.waits = False
        unread, session.unread = session.unread, 0
        self._put(session.target, Job(session.id, session, unread, session.block + 1, session.group))

    # ---------------------------------------------------------------- running ahead

    def _run_ahead(self, session: Session) -> None:
        """Where the schedule says so, the draft goes on while its block is judged."""
        block = session.block
        if not session.schedule.ahead or not block or session.asked is not None or session.ahead is not None:
            return
        length = min(session.length, self.longest, session.wanted - block - 2)
        if length > 0:
            whole, session.guessed = session.window.guessed(block)
            expected_us = self.curves.ahead_us(session.sharing, block, whole, session.guessed)
            session.next_expected = expected_us, session.sharing
            session.ahead, session.ahead_tokens, session.judged = self._ask(session, 0, length + 1), None, False

    def _take_ahead(self, session: Session, tokens: int) -> None:
        """It is the block of this round."""
        session.ahead = session.ahead_tokens = None
        session.block = tokens
        self._verify(session)

    def _drop_ahead(self, session: Session) -> None:
        """It is of no use, and goes on until a new task overtakes it at the draft."""
        session.ahead = session.ahead_tokens = session.asked = None
        session.behind = 1

    def _decide_ahead(self, session: Session, right: bool) -> None:
        """It is known what the guess is worth."""
        self._meter.ahead(session.judged, right)
        self.curves.observe_guess(session.guessed, right)
        if not right:
            self._drop_ahead(session)

    # ---------------------------------------------------------------- answers

    def draft_answered(self, session: Session, job: Job, way: Passage) -> None:
        """A block, or word that a text was read."""
        self.drafting.ends(session.id.counter, self._clock.now, job)
        if session.asked is not job:
            return
        self.curves.turn_to(session.schedule, session.sharing)
        session.asked = None
        awaited = session.waits
        if job.wants:
            self.curves.observe_draft(job.wants, way)
        if session.ahead is job:
            session.ahead_tokens = job.wants - 1
            if session.judged:
                self._ahead_came(session, session.ahead_tokens, way)
        elif awaited:
            session.draft_way = way if session.draft_way is None else session.draft_way + way
            session.block = job.wants
            self._verify(session)
        else:
            session.behind -= job.reads
            if session.behind > WARM_TOKENS:
                self._ask(session, session.behind, 0)
        if awaited:
            self._run_ahead(session)

    def _ahead_came(self, session: Session, tokens: int, way: Passage) -> None:
        """The round waits for what the draft has proposed ahead. What passed before it began was beside a step of the target."""
        session.draft_way = way.last(max(0, round(self._clock.now - session.begun_us)))
        self._decide_ahead(session, session.right)
        if session.right:
            self._take_ahead(session, tokens)
        else:
            self._ask(session, session.behind - 1, session.length, session.group)

    def target_answered(self, session: Session, job: Job, way: Passage, step: StepTiming, received_us: float) -> None:
        """A verdict."""
        self.curves.turn_to(session.schedule, session.sharing)
        drafted = session.block
        accepted = self._accepted(session, drafted)
        if session.ahead is None:
            session.behind = (1 if accepted < drafted else 2) if drafted else session.behind + 1
        elif accepted < drafted:
            self._decide_ahead(session, False)
        else:
            session.judged = True
            if session.ahead_tokens is not None:
                self._decide_ahead(session, session.right)
        source = Source.DRAFT_MODEL if drafted else Source.NONE
        beside = self.drafting.within(job.written_us, received_us)
        self.curves.observe_verify(source, step, way, beside=beside, target=session.target.name)
        session.window.observe(source, drafted, accepted, session.draft_way, way, first=step.prefill_rows > 0)
        if session.expected is not None and drafted:
            expected_us, sharing = session.expected
            self.curves.observe_ahead(sharing, expected_us, way, step, self._clock.now - session.begun_us)
        session.expected, session.next_expected = session.next_expected, None
        session.committed += accepted + 1
        session.wanted -= accepted + 1
        self._meter.round(session.id.counter, session.schedule, drafted, accepted, self._clock.now)
        if session.wanted > 0:
            self.begin(session)
        else:
            self.schedulers[session.target.name].leave(session.id.counter)
            self.drafting.ends(session.id.counter, self._clock.now)
            self._finish(session)

    def _accepted(self, session: Session, drafted: int) -> int:
        """How much of a block stands. One number is drawn for each token of the text, so that runs that differ can be compared."""
        chance = session.text.random
        for position in range(drafted):
            if chance() >= self._stands[position]:
                return position
        session.right = chance() < self._stands[drafted]  # had the draft gone on
        return drafted
