"""Owns the sessions from acceptance to their one end, and hears what the links report.

Law. Everything runs on one event loop and nothing here blocks. All answers of a frame are applied before the next frame is
written. Each session ends once, in `_end`, whatever ends it. What happens within a round is `rounds.py`'s affair.
"""

from __future__ import annotations

import asyncio
import logging
import time

from coordinator.admission import Admission
from coordinator.books import Books
from coordinator.clients import WorkerLink, Written
from coordinator.clock import RequestClock
from coordinator.config import CoordinatorConfig
from coordinator.fleet import Standing, Worker
from coordinator.ledger import (
    End,
    Ledger,
    Phase,
    Role,
)
from coordinator.lookup import NgramLookup
from coordinator.observe import NO_CALL, Call, Observer
from coordinator.roster import Roster
from coordinator.rounds import Rounds
from coordinator.schedule import SYNCHRONOUS
from coordinator.session import RequestSpec, Session
from coordinator.stops import Ending, FinishReason
from coordinator.text import Tokenizer
from specwire.law.errors import OurFault, SpecwireError, TooLate, Unavailable
from specwire.law.tasks import SessionId
from specwire.law.values import Opening
from specwire.v1 import inference_pb2 as pb
from specwire.wire.codec import AnswerFrame
from specwire.wire.stopwatch import now_ns

log = logging.getLogger(__name__)

TICK_S = 0.25


class Driver:
    """The coordinator's acting half. Also what its links report to (`LinkEvents`)."""

    def __init__(
        self, config: CoordinatorConfig, incarnation: int, tokenizer: Tokenizer | None, observer: Observer
    ) -> None:
        self.config = config
        self.incarnation = incarnation
        self.tokenizer = tokenizer
        self.observer = observer
        self.roster = Roster(config, incarnation, self)
        self.fleet = self.roster.fleet
        self.admission = Admission(config.max_running, config.max_waiting)
        self.sessions: dict[int, Session] = {}
        self.books = Books()
        self.rounds = Rounds(config, self.roster, self.books, observer, self)
        self.curves = self.rounds.curves
        self.draining = False
        self.changed = asyncio.Event()
        """Set when a link came or went; whoever looks clears it."""
        self._counter = 0
        self._ticker: asyncio.Task[None] | None = None
        self._told: dict[str, str] = {}
        """Schedule last logged of each target."""

    # ---------------------------------------------------------------- life of the service

    def start(self) -> None:
        """Begins to watch the workers."""
        self._ticker = asyncio.create_task(self._tick(), name="driver tick")

    async def stop(self) -> None:
        """Ends every session that is left, and every link."""
        if self._ticker is not None:
            self._ticker.cancel()
        for session in list(self.sessions.values()):
            self.fail(session, Unavailable("the coordinator is shutting down"))
        await self.roster.stop()

    async def idle(self) -> None:
        """Returns when no session is left."""
        while self.sessions:
            await next(iter(self.sessions.values())).ended.wait()

    def ready(self) -> bool:
        """Whether requests are served."""
        return not self.draining and self.fleet.pick("target") is not None

    def typical_block(self) -> int:
        """Block length that a new request would begin with now."""
        settings = self.config.speculation
        if isinstance(settings.num_speculative_tokens, int):
            return settings.num_speculative_tokens
        longest = settings.max_num_speculative_tokens if self.fleet.pick("draft") is not None else 0
        targets = max(1, sum(worker.standing is Standing.READY for worker in self.fleet.of("target")))
        return self.curves.present_length(-(-len(self.admission.running) // targets), longest)

    def schedule(self) -> tuple[str, str]:
        """(how sessions share draft and target now, what the settings ask for), at the target that has most sessions."""
        busiest = max(self.fleet.of("target"), key=lambda worker: len(worker.sessions), default=None)
        scheduler = self.rounds.schedulers[busiest.name] if busiest is not None else self.rounds.new_scheduler()
        return str(scheduler.chosen), scheduler.asked

    def step_us(self, role: str) -> int:
        """Compute of one step for one session; 0: not measured."""
        times = self.curves.draft_steps if role == "draft" else self.curves.verify
        if not times.known:
            return 0
        return int(self.curves.draft_us(1) if role == "draft" else times.at(1))

    def attach(self, worker: Worker) -> None:
        """A worker was registered, under a new address or in a new life: its link is opened anew."""
        self.roster.attach(worker)
        self._resize()
        if worker.info.role == "target":
            self.curves.target_profile(worker.info.step_profile_us)
        else:
            self.curves.draft_profile(worker.info.step_profile_us)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            try:
                self._watch(time.monotonic(), lag_s=loop.time() - due)
            except Exception:  # a bug here must not end the watching
                log.exception("tick failed")

    def _tell_schedules(self) -> None:
        """Logs where the schedule has become another; what changes and changes back between two ticks is not told."""
        for target, scheduler in self.rounds.schedulers.items():
            before, stands = self._told.get(target, str(SYNCHRONOUS)), str(scheduler.standing)
            if stands != before:
                sessions = len(self.fleet.workers[target].sessions) if target in self.fleet.workers else 0
                log.info("%s: schedule %s, was %s; %d sessions", target, stands, before, sessions)
                self._told[target] = stands

    def _watch(self, now: float, lag_s: float) -> None:
        if lag_s < TICK_S:  # else the silence may be our own: what was said in the meantime has not been heard yet
            for worker in self.roster.judge(now):
                self._give_up_blocks(worker)
        self._resize()
        self._tell_schedules()
        for session in list(self.sessions.values()):
            if session.give_up_at is not None and now > session.give_up_at:
                self.fail(session, TooLate("the request's deadline passed"))
            elif session.waiting_since_ns is not None:
                waited = (now_ns() - session.waiting_since_ns) / 1e9
                if waited > self.config.recovery_timeout_s:
                    self.fail(session, Unavailable(f"the target was away for {waited:.0f} s"))
        self.rounds.wake_clients()

    def _resize(self) -> None:
        """As many requests run as targets have cache slots, and no more than the setting."""
        places = self.roster.places()
        if places:
            self._admit(self.admission.resize(min(self.config.max_running, places)))

    def _give_up_blocks(self, worker: Worker) -> None:
        """A silent draft is a lost one, whatever it may have drafted; so this is exact under `rejection` as well."""
        if worker.info.role == "draft":
            for counter in list(worker.sessions):
                session = self.sessions.get(counter)
                if session is not None and session.ledger is not None and session.ledger.phase is Phase.DRAFTING:
                    self.rounds.give_up_block(session, session.ledger.draft_late)

    # ---------------------------------------------------------------- requests

    def open(self, spec: RequestSpec, clock: RequestClock, give_up_at: float | None, call: Call = NO_CALL) -> Session:
        """Takes a request. Raises NoRoom, Unavailable."""
        if self.draining:
            raise Unavailable("the coordinator is draining")
        if self.fleet.pick("target") is None:
            reasons = "; ".join(f"{w.name} is {w.standing.value}: {w.reason}" for w in self.fleet.of("target"))
            raise Unavailable(f"no target is ready ({reasons or 'none has registered'})")
        self._counter += 1
        session = Session(self._counter, spec, clock, give_up_at, call)
        at_once = self.admission.enter(session.counter)
        self.sessions[session.counter] = session
        self.observer.opened(session)
        if at_once:
            self._admit([session.counter])
            self.rounds.wake_clients()
        return session

    def abandon(self, session: Session) -> None:
        """The client has gone away, or has got its last event."""
        if not session.over:
            self._end(session, "cancelled")
            self.rounds.wake_clients()

    def resume(self, session: Session) -> None:
        """The client has caught up."""
        if session.paused_since_ns is not None and not session.over:
            now = now_ns()
            session.clock.client_us += (now - session.paused_since_ns) // 1000
            session.paused_since_ns = None
            self.rounds.begin(session, now)
            self.rounds.wake_clients()

    def _admit(self, counters: list[int]) -> None:
        for counter in counters:
            session = self.sessions[counter]
            taken = now_ns()
            session.clock.admission_us = (taken - session.clock.arrived_ns) // 1000 - session.clock.tokenize_us
            target = self.fleet.pick("target") or next(iter(self.fleet.of("target")), None)
            if target is None:
                self.fail(session, Unavailable("no target is ready"))
                continue
            spec = session.spec
            session.target_name = target.name
            target.sessions.add(counter)
            draft = self.fleet.pick("draft") if spec.max_block > 0 and spec.method != "ngram" else None
            session.ledger = Ledger(
                SessionId(self.incarnation, counter),
                Opening(spec.law, spec.sampling, spec.seed, 0, len(spec.prompt), spec.private_prompt),
                spec.prompt,
                self.rounds.limits(target, draft),
                with_draft=draft is not None,
            )
            if draft is not None:
                session.draft_name = draft.name
                draft.sessions.add(counter)
            stream = self.tokenizer.stream() if self.tokenizer is not None else None
            session.ending = Ending(spec.max_tokens, spec.end_tokens, spec.stops, stream)
            if spec.max_block > 0 and spec.method != "draft_model":
                session.lookup = NgramLookup(spec.prompt)
            session.window = self.curves.request(spec.num_speculative_tokens, spec.max_block)
            self.rounds.begin(session, taken)

    # ---------------------------------------------------------------- what links report

    def due(self, link: WorkerLink, group: int | None) -> tuple[int, int, int]:
        """Sessions of this target whose blocks are being drafted, how long that takes at most, and their group: this one, or the
        one that is due first."""
        worker = self.fleet.workers.get(link.name)
        if worker is None or len(worker.sessions) < 2:
            return 0, 0, 0
        count, due_ns, group = self.rounds.awaited.due(link.name, group)
        return (count, max(1, (due_ns - now_ns()) // 1000), group) if count else (0, 0, 0)

    def link_up(self, link: WorkerLink, same_worker: bool) -> None:
        """A stream stands."""
        worker = self.fleet.workers.get(link.name)
        if worker is None or self.roster.link(link.name) is not link:
            return
        self.fleet.connected(worker)
        self.changed.set()
        self.roster.was_prompt(link.name)
        now = now_ns()
        for counter in list(worker.sessions):
            session = self.sessions.get(counter)
            if session is None or session.ledger is None:
                worker.sessions.discard(counter)
                continue
            if link.role is Role.DRAFT:
                self.rounds.execute(session, session.ledger.draft_up(same_worker))
            else:
                if session.waiting_since_ns is not None:
                    session.clock.recovery_us += (now - session.waiting_since_ns) // 1000
                    session.waiting_since_ns = None
                self.rounds.execute(session, session.ledger.target_up(same_worker, link.generation))
        self.rounds.wake_clients()

    def link_down(self, link: WorkerLink, reason: str) -> None:
        """A stream is lost."""
        worker = self.fleet.workers.get(link.name)
        if worker is None or self.roster.link(link.name) is not link:
            return
        self.fleet.disconnected(worker, reason)
        self.changed.set()
        now = now_ns()
        for counter in list(worker.sessions):
            session = self.sessions.get(counter)
            if session is None or session.ledger is None:
                continue
            if link.role is Role.DRAFT:
                self.rounds.drafting.ends(counter)
                if session.ledger.phase is Phase.DRAFTING:
                    self.rounds.give_up_block(session, session.ledger.draft_down)
                else:
                    self.rounds.execute(session, session.ledger.draft_down())
            else:
                self.rounds.execute(session, session.ledger.target_down())
                if session.ledger.phase is Phase.VERIFYING and session.waiting_since_ns is None:
                    session.waiting_since_ns = max(session.to_target.ready_ns, session.to_target.written_ns) or now
        self.rounds.wake_clients()

    def frame_written(self, link: WorkerLink, written: Written) -> None:
        """A frame with tasks went out."""
        share = written.frame_bytes // len(written.sessions)
        for counter in written.sessions:
            session = self.sessions.get(counter)
            if session is not None:
                journey = session.to_target if link.role is Role.TARGET else session.to_draft
                journey.written_ns = written.written_ns
                session.clock.wire_bytes += share

    def frame_received(self, link: WorkerLink, frame: AnswerFrame, received_ns: int, frame_bytes: int) -> None:
        """Answers came: all are applied, then frames go out."""
        share = frame_bytes // len(frame.answers)
        if link.role is Role.DRAFT and frame.step is not None:
            self.rounds.curves.observe_read(frame.step)
        for answer in frame.answers:
            session = self.sessions.get(answer.session.counter)
            if session is None or session.ledger is None or session.over:
                self.books.stale_answers += 1
                continue
            session.clock.wire_bytes += share
            try:
                if link.role is Role.DRAFT:
                    self.rounds.draft_answer(session, session.ledger, link, answer, frame, received_ns)
                else:
                    self.rounds.target_answer(session, session.ledger, link, answer, frame, received_ns)
            except Exception as error:  # our bug, in one session: the others go on
                log.exception("session %d", session.counter)
                self.fail(session, OurFault(f"{type(error).__name__} while applying an answer"))
        if link.role is Role.TARGET:
            link.announce()  # of the sessions judged just now some draft again
        self.rounds.wake_clients()

    # ---------------------------------------------------------------- ends

    def finish(self, session: Session, reason: FinishReason, stop: str | None, text: str) -> None:
        """The answer is complete."""
        clock = session.clock
        clock.ended_ns = now_ns()
        final = pb.Final(
            finish_reason=pb.FINISH_REASON_STOP if reason is FinishReason.STOP else pb.FINISH_REASON_LENGTH,
            text=text,
            usage=pb.Usage(
                prompt_tokens=len(session.spec.prompt),
                completion_tokens=session.generated,
                cached_tokens=session.cached_tokens,
            ),
            seed=session.spec.seed,
            speculation=session.tally.message(),
            timing=clock.timing(),
            rounds=clock.rounds,
        )
        if stop is not None:
            final.stop = stop
        session.out.append(pb.GenerateResponse(final=final))
        self._end(session, "finished")

    def fail(self, session: Session, error: SpecwireError) -> None:
        """There will be no answer. Does nothing to a session that is over."""
        if session.over:
            return
        session.error = error
        if isinstance(error, OurFault):
            log.error("session %d failed: %s", session.counter, error)
        self._end(session, "failed")

    def _end(self, session: Session, outcome: str) -> None:
        """The one end of a session. Never raises, never ends twice."""
        assert not session.over
        session.over = True
        session.ended.set()
        session.outcome = outcome
        self.books.outcomes[outcome] += 1
        clock = session.clock
        clock.ended_ns = clock.ended_ns or now_ns()
        self.rounds.cancel_timer(session)
        self.rounds.drafting.ends(session.counter)
        self.rounds.awaited.ends(session.counter)
        if session.target_name:
            self.rounds.schedulers[session.target_name].leave(session.counter)
        if session.ledger is not None:
            for command in session.ledger.finish():
                if isinstance(command, End):
                    name = session.target_name if command.role is Role.TARGET else session.draft_name
                    self.roster.close(name, session.ledger.session)
        del self.sessions[session.counter]
        took = (clock.ended_ns - clock.arrived_ns) / 1e9 if outcome == "finished" else None
        self.observer.ended(session)
        self.rounds.woken.append(session)
        self._admit(self.admission.leave(session.counter, took))
