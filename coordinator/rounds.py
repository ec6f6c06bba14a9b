"""Rounds: plans them, carries out what the ledgers say, and puts verdicts before clients.

Law. A ledger decides; this file only carries out. It blocks nowhere. Time is written down where it passes: every interval of a
request's critical path has its own pair of stamps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from coordinator.awaited import Awaited
from coordinator.books import Books
from coordinator.clients import WorkerLink
from coordinator.clock import NO_PASSAGE
from coordinator.config import CoordinatorConfig
from coordinator.fleet import Standing, Worker
from coordinator.ledger import (
    Command,
    Commit,
    End,
    Envelope,
    Fail,
    Fallback,
    Later,
    Ledger,
    Limits,
    Phase,
    Replayed,
    Role,
    Send,
    Stale,
)
from coordinator.mirror import State
from coordinator.observe import Observer
from coordinator.overlap import DraftWork
from coordinator.roster import Roster
from coordinator.schedule import SYNCHRONOUS, Scheduler
from coordinator.session import Session
from coordinator.stops import Ending, FinishReason
from coordinator.window import PLAIN, Plan, Room, ServiceCurves
from specwire.law.errors import SpecwireError
from specwire.law.tasks import Answer, ProposeTask, VerifyTask
from specwire.law.values import Block, Law, Source
from specwire.wire.codec import AnswerFrame
from specwire.wire.stopwatch import Passage, now_ns, passage

RETRY_LATER_S = 0.05
"""How long a round waits when the target has no room."""
MIN_DRAFT_TIMEOUT_S = 0.05
_DUE = 1.25
"""A target is told so many times the time that a block takes on average: one that lingers and starts just before it comes has
waited for nothing."""


class Ends(Protocol):
    """How a session's rounds come to an end."""

    def finish(self, session: Session, reason: FinishReason, stop: str | None, text: str) -> None:
        """The answer is complete."""

    def fail(self, session: Session, error: SpecwireError) -> None:
        """There will be no answer."""


class Rounds:
    """The rounds of all sessions."""

    def __init__(
        self,
        config: CoordinatorConfig,
        roster: Roster,
        books: Books,
        observer: Observer,
        ends: Ends,
    ) -> None:
        self.curves = ServiceCurves()
        self.schedulers = defaultdict[str, Scheduler](self.new_scheduler)
        """By target: those that share its steps take turns."""
        self.drafting = DraftWork()
        self.awaited = Awaited()
        self.woken: list[Session] = []
        """Sessions with something new for their clients, until `wake_clients`."""
        self._config = config
        self._roster = roster
        self._books = books
        self._observer = observer
        self._ends = ends

    def new_scheduler(self) -> Scheduler:
        """As the settings ask for."""
        return Scheduler(self._config.speculation.schedule, self._config.speculation.rotation_groups)

    def begin(self, session: Session, begun_ns: int) -> None:
        """Plans and begins the next round, unless the client is too far behind."""
        ledger, window, ending = session.ledger, session.window, session.ending
        assert ledger is not None
        assert window is not None
        assert ending is not None
        if session.behind > self._config.client_buffer_tokens:
            session.paused_since_ns = now_ns()
            return
        session.clock.begin_round(begun_ns)
        self._bind_draft(session)
        plan, guess, warm = self._plan(session, ledger, ending)
        notes = session.clock.round
        now = time.monotonic()
        scheduler, group = self.schedulers[session.target_name], 0
        if plan.source is Source.DRAFT_MODEL:
            group = scheduler.group(session.counter)
        else:  # who decodes plainly waits for no turn: its row goes along with any group's
            scheduler.leave(session.counter)
        envelope = Envelope(session.time_left_ms(now), *self._observer.round_begun(session), group)
        notes.source = plan.source.value
        session.length = plan.num_tokens
        commands = ledger.begin(plan.source, plan.num_tokens, guess, envelope, warm=warm)
        if ledger.phase is Phase.DRAFTING:
            expected_s = self.curves.draft_seconds(plan.num_tokens)
            due_ns = now_ns() + int(_DUE * expected_s * 1e9)
            self.awaited.begins(session.counter, session.target_name, envelope.group, due_ns)
            # in a rotation the draft may work for the other groups first
            timeout = self._draft_timeout(session, expected_s * session.schedule.groups)
            if timeout is not None:
                loop = asyncio.get_running_loop()
                session.draft_timer = loop.call_later(timeout, self._late, session, session.tally.rounds)
        self.execute(session, commands)
        self._run_ahead(session, ledger, ending)
        notes.waits_ns = _last_ready(session, begun_ns)
        session.clock.work(begun_ns, notes.waits_ns)

    def _run_ahead(self, session: Session, ledger: Ledger, ending: Ending) -> None:
        """Where the schedule says so, the draft goes on while its block is judged."""
        block = ledger.block
        if not session.schedule.ahead or block.source is not Source.DRAFT_MODEL or ledger.phase is not Phase.VERIFYING:
            return
        spec, window = session.spec, session.window
        assert window is not None
        length = min(session.length, spec.max_block, ending.remaining - len(block) - 2)
        draft = self._roster.usable(session.draft_name or "", time.monotonic())
        # a draft that can propose no more than a block has no room for the guess before it, and the next would be shorter
        if length <= 0 or _drawn(session) or draft is None or length >= draft.info.max_block:
            return
        if commands := ledger.run_ahead(length):
            whole, session.guessed = window.guessed(len(block))
            expected_us = self.curves.ahead_us(session.sharing, len(block), whole, session.guessed)
            session.next_ahead = expected_us, session.sharing
            self.execute(session, commands)

    def _note_guess(self, session: Session, ledger: Ledger) -> None:
        """What a draft that ran ahead had guessed is known to be right or wrong."""
        if ledger.ahead_outcome is not None:
            self._books.guesses["hit" if ledger.ahead_outcome else "miss"] += 1
            self.curves.observe_guess(session.guessed, ledger.ahead_outcome)
            ledger.ahead_outcome = None

    def _plan(self, session: Session, ledger: Ledger, ending: Ending) -> tuple[Plan, tuple[int, ...], bool]:
        """What the round does, the guess to be judged, and whether a draft that is far behind is to read."""
        spec, window = session.spec, session.window
        assert window is not None
        sessions = max(1, len(self._roster.fleet.workers[session.target_name].sessions))
        session.schedule, session.sharing = SYNCHRONOUS, sessions
        longest = min(
            spec.max_block, ending.remaining - 1, self._roster.fleet.workers[session.target_name].info.max_block
        )
        guess = session.lookup.propose(longest) if session.lookup is not None and longest > 0 else None
        draft = self._draft_room(session, ledger, longest) if longest > 0 else 0
        if draft:
            able = self._can_run_ahead(session)
            schedule = self.schedulers[session.target_name].round(self.curves, sessions, spec.max_block, able)
            session.schedule = SYNCHRONOUS if schedule.ahead and not able else schedule
        self.curves.turn_to(session.schedule, sessions)
        if longest <= 0:
            return PLAIN, (), False
        room = Room(longest, draft if ledger.draft_ready() else 0, guess, sessions)
        plan = window.plan(room)
        reads = ledger.to_read() if draft else 0
        warm = reads > 0 and window.worth_reading(Room(longest, draft, None, room.sessions), reads)
        return plan, (guess.tokens[: plan.num_tokens] if guess and plan.source is Source.NGRAM else ()), warm

    def _can_run_ahead(self, session: Session) -> bool:
        """What is drawn anew cannot be guessed; and a draft must have room for the bonus before the next block."""
        draft = self._roster.usable(session.draft_name or "", time.monotonic())
        least = session.spec.num_speculative_tokens or 1
        return not _drawn(session) and draft is not None and least < draft.info.max_block

    def _draft_room(self, session: Session, ledger: Ledger, longest: int) -> int:
        """Most tokens the draft could propose once it is up to date; 0 when it is away, full or left alone."""
        if session.draft_name is None or session.spec.method == "ngram":
            return 0
        worker = self._roster.usable(session.draft_name, time.monotonic())
        if worker is None:
            return 0
        return max(0, min(longest, worker.info.max_block, worker.info.max_context - len(ledger.prefix)))

    def _draft_timeout(self, session: Session, expected_s: float) -> float | None:
        """Seconds until the round goes on without its block. None under `rejection`: see SpeculationConfig."""
        if _drawn(session):
            return None
        configured = self._config.speculation.draft_timeout_ms
        if isinstance(configured, int):
            return configured / 1000
        return max(MIN_DRAFT_TIMEOUT_S, 4 * expected_s)

    def _late(self, session: Session, index: int) -> None:
        """The block of that round did not come in time, however often it was asked for."""
        ledger = session.ledger
        if session.over or ledger is None or ledger.phase is not Phase.DRAFTING or session.tally.rounds != index:
            return
        if session.draft_name is not None:
            self._roster.was_late(session.draft_name, time.monotonic())
        self.give_up_block(session, ledger.draft_late)
        self.wake_clients()

    def give_up_block(self, session: Session, decide: Callable[[], list[Command]]) -> None:
        """The round goes on without the block it waited for. `decide` is the ledger's word on why."""
        now = now_ns()
        wasted = max(0, now - max(session.to_draft.ready_ns, session.clock.round.waits_ns)) // 1000
        session.clock.recovery_us += wasted
        session.clock.round.draft_wait_us += wasted
        self.cancel_timer(session)
        self.execute(session, decide())

    def execute(self, session: Session, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Send(role, task, _):
                    self._send(session, role, task)
                case Fallback(cause):
                    self._books.fallbacks[cause] += 1
                    session.tally.fallbacks += 1
                    self._books.tally.fallbacks += 1
                    self._observer.fallback(session, cause)
                case Replayed(role, cause):
                    session.replayed = session.replayed or role is Role.TARGET
                    self._books.replays[cause] += 1
                case Stale():
                    self._books.stale_answers += 1
                case Later():
                    asyncio.get_running_loop().call_later(RETRY_LATER_S, self._retry, session, now_ns())
                case Fail(error):
                    self._ends.fail(session, error)
                case Commit() | End():
                    raise AssertionError("handled by the caller")
        ledger = session.ledger
        if ledger is None or ledger.phase is not Phase.DRAFTING:
            self.awaited.ends(session.counter)
        lost = ledger is not None and ledger.phase is Phase.VERIFYING and ledger.target.state is State.PROBE
        if lost and session.waiting_since_ns is None:
            session.waiting_since_ns = now_ns()

    def _send(self, session: Session, role: Role, task: ProposeTask | VerifyTask) -> None:
        ledger = session.ledger
        assert ledger is not None
        if task.time_left_ms:  # of now, not of the round's begin: it holds for the session's life at the worker
            task = dataclasses.replace(task, time_left_ms=session.time_left_ms(time.monotonic()))
        name = session.target_name if role is Role.TARGET else session.draft_name
        mirror = ledger.target if role is Role.TARGET else ledger.draft
        link = self._roster.link(name)
        mirror.sent(task, link.generation if link is not None else 0)
        journey = session.to_target if role is Role.TARGET else session.to_draft
        journey.ready_ns = now_ns()
        notes = session.clock.round
        if role is Role.TARGET:
            notes.target_ready_ns = notes.target_ready_ns or journey.ready_ns
        elif isinstance(task, ProposeTask) and task.num_tokens and ledger.ahead is None:
            notes.draft_ready_ns = notes.draft_ready_ns or journey.ready_ns
        if link is not None and link.up:
            link.send(task)
            if role is Role.DRAFT:
                self.drafting.begins(session.counter, task.number)
        else:
            mirror.stream_lost()

    def _retry(self, session: Session, since_ns: int) -> None:
        if not session.over and session.ledger is not None:
            session.clock.recovery_us += (now_ns() - since_ns) // 1000
            self.execute(session, session.ledger.retry())
            self.wake_clients()

    def wake_clients(self) -> None:
        """Called after frames were put, so that the workers' next step does not wait for our clients."""
        woken, self.woken = self.woken, []
        for session in woken:
            session.wake.set()

    def draft_answer(
        self, session: Session, ledger: Ledger, link: WorkerLink, answer: Answer, frame: AnswerFrame, received_ns: int
    ) -> None:
        taken = now_ns()
        name = session.draft_name
        if name != link.name:
            self._books.stale_answers += 1
            return
        self.curves.turn_to(session.schedule, session.sharing)
        matches = ledger.draft.matches(answer, link.generation)
        awaited, ahead = matches and ledger.phase is Phase.DRAFTING, matches and ledger.ahead is not None
        block = answer.result if isinstance(answer.result, Block) else None
        self.drafting.ends(session.counter, answer.number)
        if matches and block is None and not awaited and not ahead and session.window is not None:
            session.window.not_read()
        journey, clock = session.to_draft, session.clock
        way = passage(journey.ready_ns, journey.written_ns, received_ns, taken, answer, frame.step)
        commands = ledger.draft_answered(answer, link.generation)
        if (awaited or ahead) and block is not None:
            self._roster.was_prompt(link.name)
            self.curves.observe_draft(len(block), way)
        if ahead:  # what passed before the round began was beside a step of the target
            seen = way.last(max(0, taken - clock.round.waits_ns) // 1000) if awaited else NO_PASSAGE
            clock.hidden_us += way.total_us - seen.total_us
            way = seen
            self._note_guess(session, ledger)
        if awaited:
            clock.draft_passage(way)
        if awaited and ledger.phase is not Phase.DRAFTING:
            self.cancel_timer(session)
            if block is not None:
                self._observer.drafted(session, way, len(ledger.block))
            else:  # full or broken: asking again every round costs its way
                self._roster.was_late(link.name, time.monotonic())
        self.execute(session, commands)
        if awaited and session.ending is not None:
            self._run_ahead(session, ledger, session.ending)
        if awaited:  # else the request waits for its verdict, and that way is counted
            session.clock.work(taken, _last_ready(session, taken))

    def target_answer(
        self, session: Session, ledger: Ledger, link: WorkerLink, answer: Answer, frame: AnswerFrame, received_ns: int
    ) -> None:
        taken = now_ns()
        if session.target_name != link.name or not ledger.target.matches(answer, link.generation):
            self._books.stale_answers += 1
            return
        self.curves.turn_to(session.schedule, session.sharing)
        block = ledger.block
        journey = session.to_target
        way = passage(journey.ready_ns, journey.written_ns, received_ns, taken, answer, frame.step)
        commands = ledger.target_answered(answer, link.generation)
        self._note_guess(session, ledger)
        if not session.generated and not session.replayed:
            session.cached_tokens += answer.reused
        session.clock.target_passage(way)
        if len(commands) == 1 and isinstance(commands[0], Commit):
            self._commit(session, ledger, commands[0], block, frame, way, received_ns, taken)
            return
        self.execute(session, commands)
        session.clock.work(taken, _last_ready(session, taken))

    def _commit(
        self,
        session: Session,
        ledger: Ledger,
        commit: Commit,
        block: Block,
        frame: AnswerFrame,
        way: Passage,
        received_ns: int,
        taken: int,
    ) -> None:
        """A verdict became text: show it, count it, and end or go on."""
        ending, clock = session.ending, session.clock
        assert ending is not None
        assert session.window is not None
        result = ending.accept(commit.tokens)
        drafted, source = len(block), block.source if len(block) else Source.NONE
        clock.round.drafted = drafted
        clock.round.source = source.value
        prefilled = frame.step.prefill_rows if frame.step is not None else 0
        if frame.step is not None:
            beside = self.drafting.within(session.to_target.written_ns, received_ns)
            target = session.target_name
            self.curves.observe_verify(source, frame.step, way, beside=beside, target=target)
        if session.ahead is not None and source is Source.DRAFT_MODEL and frame.step is not None:
            expected_us, sharing = session.ahead
            self.curves.observe_ahead(sharing, expected_us, way, frame.step, (taken - clock.round.begun_ns) / 1e3)
        session.ahead, session.next_ahead = session.next_ahead, None
        session.window.observe(source, drafted, commit.accepted, clock.round.draft, way, first=prefilled > 0)
        if session.lookup is not None:
            session.lookup.extend(commit.tokens)
        kept_accepted = min(commit.accepted, len(result.ids))
        session.tally.round(source, drafted, kept_accepted)
        self._books.tally.round(source, drafted, kept_accepted)
        session.generated += len(result.ids)
        self._books.generated_tokens += len(result.ids)
        session.emit_tokens(result.ids, result.text)
        self.woken.append(session)
        now = now_ns()
        if clock.first_token_ns == 0:
            clock.first_token_ns = now
        rows, sessions = (frame.step.rows, frame.step.sessions) if frame.step is not None else (0, 0)
        index = session.tally.rounds - 1
        clock.end_round(index, kept_accepted, len(result.ids), now, rows, sessions)
        self._observer.round_done(session, index, source, drafted, kept_accepted, len(result.ids), way)
        if result.end is None:
            self.begin(session, taken)
            return
        clock.work(taken, now_ns())
        self._ends.finish(session, result.end.finish_reason, result.end.stop, result.end.text)

    def limits(self, target: Worker, draft: Worker | None) -> Limits:
        return Limits(
            target_max_append=target.info.max_append,
            draft_max_append=draft.info.max_append if draft is not None else 1,
            draft_max_context=draft.info.max_context if draft is not None else 0,
            vocab_size=target.info.vocab_size,
        )

    def _bind_draft(self, session: Session) -> None:
        """A session whose draft is gone for good takes another one, if there is one."""
        ledger = session.ledger
        assert ledger is not None
        spec = session.spec
        if spec.max_block == 0 or spec.method == "ngram" or ledger.draft.in_flight is not None:
            return
        bound = self._roster.fleet.workers.get(session.draft_name) if session.draft_name else None
        if bound is not None and bound.standing in (Standing.READY, Standing.CONNECTING):
            return
        draft = self._roster.fleet.pick("draft")
        if draft is None or draft is bound or draft.name in session.former_drafts:
            return
        if bound is not None:
            self._roster.close(bound.name, ledger.session)
            session.former_drafts.add(bound.name)
            self.drafting.ends(session.counter)
        session.draft_name = draft.name
        draft.sessions.add(session.counter)
        ledger.take_draft(self.limits(self._roster.fleet.workers[session.target_name], draft))

    def cancel_timer(self, session: Session) -> None:
        if session.draft_timer is not None:
            session.draft_timer.cancel()
            session.draft_timer = None


def _drawn(session: Session) -> bool:
    """Whether its tokens are drawn and corrected, so that lateness must not decide and nothing can run ahead."""
    return session.spec.law is Law.REJECTION and not session.spec.sampling.greedy


def _last_ready(session: Session, begun_ns: int) -> int:
    """When the work that began at `begun_ns` ended: its task was put then, or, if it made none, now."""
    for ready_ns in (session.to_target.ready_ns, session.to_draft.ready_ns):
        if ready_ns >= begun_ns:
            return ready_ns
    return now_ns()
