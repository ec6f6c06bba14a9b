"""Acts for the ledgers: sends what they say, tells them what happened, owns sessions, timers and deadlines.

Law. Everything runs on one event loop and nothing here blocks. All answers of a frame are applied before the next frame is
written. Each session ends once, in `_end`, whatever ends it. A ledger decides; this file only carries out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from coordinator.admission import Admission
from coordinator.clients import WorkerLink, Written
from coordinator.clock import RequestClock
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
from coordinator.lookup import NgramLookup
from coordinator.observe import NO_CALL, Call, Observer
from coordinator.roster import Roster
from coordinator.session import RequestSpec, Session, Tally
from coordinator.stops import Ending, FinishReason
from coordinator.text import Tokenizer
from coordinator.window import Plan, Room, ServiceCurves
from specwire.law.errors import OurFault, SpecwireError, TooLate, Unavailable
from specwire.law.tasks import Answer, SessionId
from specwire.law.values import Block, Law, Opening, Source
from specwire.v1 import inference_pb2 as pb
from specwire.wire.codec import AnswerFrame
from specwire.wire.stopwatch import Passage, now_ns, passage

log = logging.getLogger(__name__)

TICK_S = 0.25
RETRY_LATER_S = 0.05
MIN_DRAFT_TIMEOUT_S = 0.05

_NO_PLAN = Plan(Source.NONE, 0)


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
        self.curves = ServiceCurves()
        self.admission = Admission(config.max_running, config.max_waiting)
        self.sessions: dict[int, Session] = {}
        self.tally = Tally()
        self.outcomes: Counter[str] = Counter()
        self.replays: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.stale_answers = 0
        self.generated_tokens = 0
        self.draining = False
        self._counter = 0
        self._woken: list[Session] = []
        self._ticker: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- life of the service

    def start(self) -> None:
        """Begins to watch the workers."""
        self._ticker = asyncio.create_task(self._tick(), name="driver tick")

    async def stop(self) -> None:
        """Ends every session that is left, and every link."""
        if self._ticker is not None:
            self._ticker.cancel()
        for session in list(self.sessions.values()):
            self._fail(session, Unavailable("the coordinator is shutting down"))
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
        return self.curves.present_length(len(self.admission.running), longest)

    def step_us(self, role: str) -> int:
        """Compute of one step for one session; 0: not measured."""
        times = self.curves.draft_steps if role == "draft" else self.curves.verify
        if not times.known:
            return 0
        return int(self.curves.draft_us(1) if role == "draft" else times.at(1))

    def attach(self, worker: Worker) -> None:
        """A worker was registered, under a new address or in a new life: its link is opened anew."""
        self.roster.attach(worker)
        if worker.info.role == "target":
            self.curves.target_profile(worker.info.step_profile_us)
        else:
            self.curves.draft_profile(worker.info.step_profile_us)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._watch(time.monotonic())
            except Exception:  # a bug here must not end the watching
                log.exception("tick failed")

    def _watch(self, now: float) -> None:
        for worker in self.roster.judge(now):
            self._give_up_blocks(worker)
        places = self.roster.places()
        if places:
            self._admit(self.admission.resize(min(self.config.max_running, places)))
        for session in list(self.sessions.values()):
            if session.give_up_at is not None and now > session.give_up_at:
                self._fail(session, TooLate("the request's deadline passed"))
            elif session.waiting_since_ns is not None:
                waited = (now_ns() - session.waiting_since_ns) / 1e9
                if waited > self.config.recovery_timeout_s:
                    self._fail(session, Unavailable(f"the target was away for {waited:.0f} s"))
        self._flush()

    def _give_up_blocks(self, worker: Worker) -> None:
        """A silent draft is a lost one, whatever it may have drafted; so this is exact under `rejection` as well."""
        if worker.info.role == "draft":
            for counter in list(worker.sessions):
                session = self.sessions.get(counter)
                if session is not None and session.ledger is not None and session.ledger.phase is Phase.DRAFTING:
                    self._draft_wasted(session)
                    self._execute(session, session.ledger.draft_late())

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
            self._flush()
        return session

    def abandon(self, session: Session) -> None:
        """The client has gone away, or has got its last event."""
        if not session.over:
            self._end(session, "cancelled")
            self._flush()

    def resume(self, session: Session) -> None:
        """The client has caught up."""
        if session.paused_since_ns is not None and not session.over:
            now = now_ns()
            session.clock.client_us += (now - session.paused_since_ns) // 1000
            session.paused_since_ns = None
            self._next_round(session, now)
            self._flush()

    def _admit(self, counters: list[int]) -> None:
        for counter in counters:
            session = self.sessions[counter]
            taken = now_ns()
            session.clock.admission_us = (taken - session.clock.arrived_ns) // 1000 - session.clock.tokenize_us
            target = self.fleet.pick("target") or next(iter(self.fleet.of("target")), None)
            if target is None:
                self._fail(session, Unavailable("no target is ready"))
                continue
            spec = session.spec
            session.target_name = target.name
            target.sessions.add(counter)
            draft = self.fleet.pick("draft") if spec.max_block > 0 and spec.method != "ngram" else None
            session.ledger = Ledger(
                SessionId(self.incarnation, counter),
                Opening(spec.law, spec.sampling, spec.seed, 0, len(spec.prompt)),
                spec.prompt,
                self._limits(target, draft),
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
            self._next_round(session, taken)

    def _limits(self, target: Worker, draft: Worker | None) -> Limits:
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
        if spec.max_block == 0 or spec.method == "ngram" or not (ledger.draft.idle or not ledger.with_draft):
            return
        bound = self.fleet.workers.get(session.draft_name) if session.draft_name else None
        if bound is not None and bound.standing in (Standing.READY, Standing.CONNECTING):
            return
        draft = self.fleet.pick("draft")
        if draft is None or draft is bound:
            return
        if bound is not None:
            self.roster.close(bound.name, SessionId(self.incarnation, session.counter))
        session.draft_name = draft.name
        draft.sessions.add(session.counter)
        ledger.limits = self._limits(self.fleet.workers[session.target_name], draft)
        ledger.with_draft = True
        ledger.draft_up(same_worker=False)

    # ---------------------------------------------------------------- rounds

    def _next_round(self, session: Session, begun_ns: int) -> None:
        """Plans and begins the next round, unless the client is too far behind."""
        ledger, window, ending = session.ledger, session.window, session.ending
        assert ledger is not None
        assert window is not None
        assert ending is not None
        if session.behind > self.config.client_buffer_tokens:
            session.paused_since_ns = now_ns()
            return
        session.clock.begin_round(begun_ns)
        self._bind_draft(session)
        plan, guess = self._plan(session, ledger, ending)
        notes = session.clock.round
        now = time.monotonic()
        envelope = Envelope(session.time_left_ms(now), *self.observer.round_begun(session))
        notes.source = plan.source.value
        commands = ledger.begin(plan.source, plan.num_tokens, guess, envelope)
        if ledger.phase is Phase.DRAFTING:
            expected_s = self.curves.draft_seconds(plan.num_tokens)
            session.draft_due_ns = now_ns() + int(expected_s * 1e9)
            timeout = self._draft_timeout(session, expected_s)
            if timeout is not None:
                loop = asyncio.get_running_loop()
                session.draft_timer = loop.call_later(timeout, self._late, session, ledger.draft.number)
        self._execute(session, commands)
        ready = now_ns()
        session.clock.work(begun_ns, ready)

    def _plan(self, session: Session, ledger: Ledger, ending: Ending) -> tuple[Plan, tuple[int, ...]]:
        spec = session.spec
        assert session.window is not None
        longest = min(spec.max_block, ending.remaining - 1, self.fleet.workers[session.target_name].info.max_block)
        if longest <= 0:
            return _NO_PLAN, ()
        guess = session.lookup.propose(longest) if session.lookup is not None else None
        room = Room(
            longest=longest,
            draft=self._draft_room(session, ledger, longest),
            guess=guess,
            sessions=len(self.admission.running),
        )
        plan = session.window.plan(room)
        return plan, (guess.tokens[: plan.num_tokens] if guess is not None and plan.source is Source.NGRAM else ())

    def _draft_room(self, session: Session, ledger: Ledger, longest: int) -> int:
        """Most tokens the draft can propose now; 0 when it is away, behind, full or left alone."""
        if session.draft_name is None or session.spec.method == "ngram" or not ledger.draft_ready():
            return 0
        worker = self.roster.usable(session.draft_name, time.monotonic())
        if worker is None:
            return 0
        return max(0, min(longest, worker.info.max_block, worker.info.max_context - len(ledger.prefix)))

    def _draft_timeout(self, session: Session, expected_s: float) -> float | None:
        """Seconds until the round goes on without its block. None under `rejection`: see SpeculationConfig."""
        if session.spec.law is Law.REJECTION and not session.spec.sampling.greedy:
            return None
        configured = self.config.speculation.draft_timeout_ms
        if isinstance(configured, int):
            return configured / 1000
        return max(MIN_DRAFT_TIMEOUT_S, 4 * expected_s)

    def _late(self, session: Session, number: int) -> None:
        ledger = session.ledger
        if session.over or ledger is None or ledger.phase is not Phase.DRAFTING or ledger.draft.number != number:
            return
        if session.draft_name is not None:
            self.roster.was_late(session.draft_name, time.monotonic())
        self._draft_wasted(session)
        self._execute(session, ledger.draft_late())
        self._flush()

    def _draft_wasted(self, session: Session) -> None:
        """Time went by for a block that will not be used."""
        now = now_ns()
        wasted = max(0, now - session.to_draft.ready_ns) // 1000
        session.clock.recovery_us += wasted
        session.clock.round.draft_wait_us += wasted
        self._cancel_timer(session)
        session.to_draft.ready_ns = now

    def _execute(self, session: Session, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Send(role, task, _):
                    self._send(session, role, task)
                case Fallback(cause):
                    self.fallbacks[cause] += 1
                    session.tally.fallbacks += 1
                    self.tally.fallbacks += 1
                    self.observer.fallback(session, cause)
                case Replayed(_, cause):
                    self.replays[cause] += 1
                case Stale():
                    self.stale_answers += 1
                case Later():
                    asyncio.get_running_loop().call_later(RETRY_LATER_S, self._retry, session)
                case Fail(error):
                    self._fail(session, error)
                case Commit() | End():
                    raise AssertionError("handled by the caller")

    def _send(self, session: Session, role: Role, task: object) -> None:
        ledger = session.ledger
        assert ledger is not None
        name = session.target_name if role is Role.TARGET else session.draft_name
        mirror = ledger.target if role is Role.TARGET else ledger.draft
        link = self.roster.link(name)
        mirror.sent(task, link.generation if link is not None else 0)  # type: ignore[arg-type]
        journey = session.to_target if role is Role.TARGET else session.to_draft
        journey.ready_ns = now_ns()
        notes = session.clock.round
        if role is Role.TARGET:
            notes.target_ready_ns = notes.target_ready_ns or journey.ready_ns
        elif task.num_tokens:  # type: ignore[attr-defined]
            notes.draft_ready_ns = notes.draft_ready_ns or journey.ready_ns
        if link is not None and link.up:
            link.send(task)  # type: ignore[arg-type]
        else:
            mirror.stream_lost()
            if role is Role.TARGET and session.waiting_since_ns is None:
                session.waiting_since_ns = now_ns()

    def _retry(self, session: Session) -> None:
        if not session.over and session.ledger is not None:
            waited_from = session.to_target.ready_ns
            session.clock.recovery_us += (now_ns() - waited_from) // 1000
            self._execute(session, session.ledger.retry())
            self._flush()

    # ---------------------------------------------------------------- what links report

    def due(self, link: WorkerLink) -> tuple[int, int]:
        """Sessions of this target whose blocks are being drafted, and how long that takes at most."""
        now = now_ns()
        count = latest = 0
        worker = self.fleet.workers.get(link.name)
        if worker is None or len(worker.sessions) < 2:
            return 0, 0
        for counter in worker.sessions:
            session = self.sessions.get(counter)
            if session is not None and session.ledger is not None and session.ledger.phase is Phase.DRAFTING:
                count += 1
                latest = max(latest, session.draft_due_ns - now)
        return (count, max(1, latest // 1000)) if count else (0, 0)

    def link_up(self, link: WorkerLink, same_worker: bool) -> None:
        """A stream stands."""
        worker = self.fleet.workers.get(link.name)
        if worker is None or self.roster.link(link.name) is not link:
            return
        self.fleet.connected(worker)
        self.roster.was_prompt(link.name)
        now = now_ns()
        for counter in list(worker.sessions):
            session = self.sessions.get(counter)
            if session is None or session.ledger is None:
                worker.sessions.discard(counter)
                continue
            if link.role is Role.DRAFT:
                self._execute(session, session.ledger.draft_up(same_worker))
            else:
                if session.waiting_since_ns is not None:
                    session.clock.recovery_us += (now - session.waiting_since_ns) // 1000
                    session.waiting_since_ns = None
                self._execute(session, session.ledger.target_up(same_worker, link.generation))
        self._flush()

    def link_down(self, link: WorkerLink, reason: str) -> None:
        """A stream is lost."""
        worker = self.fleet.workers.get(link.name)
        if worker is None or self.roster.link(link.name) is not link:
            return
        self.fleet.disconnected(worker, reason)
        now = now_ns()
        for counter in list(worker.sessions):
            session = self.sessions.get(counter)
            if session is None or session.ledger is None:
                continue
            if link.role is Role.DRAFT:
                if session.ledger.phase is Phase.DRAFTING:
                    self._draft_wasted(session)
                self._execute(session, session.ledger.draft_down())
            else:
                self._execute(session, session.ledger.target_down())
                if session.ledger.phase is Phase.VERIFYING and session.waiting_since_ns is None:
                    session.waiting_since_ns = max(session.to_target.ready_ns, session.to_target.written_ns) or now
        self._flush()

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
        for answer in frame.answers:
            session = self.sessions.get(answer.session.counter)
            if session is None or session.ledger is None or session.over:
                self.stale_answers += 1
                continue
            session.clock.wire_bytes += share
            try:
                if link.role is Role.DRAFT:
                    self._draft_answer(session, session.ledger, link, answer, frame, received_ns)
                else:
                    self._target_answer(session, session.ledger, link, answer, frame, received_ns)
            except Exception as error:  # our bug, in one session: the others go on
                log.exception("session %d", session.counter)
                self._fail(session, OurFault(f"{type(error).__name__} while applying an answer"))
        self._flush()

    def _draft_answer(
        self, session: Session, ledger: Ledger, link: WorkerLink, answer: Answer, frame: AnswerFrame, received_ns: int
    ) -> None:
        taken = now_ns()
        name = session.draft_name
        awaited = ledger.phase is Phase.DRAFTING and ledger.draft.matches(answer, link.generation)
        if name != link.name:
            self.stale_answers += 1
            return
        asked = ledger.wanted
        commands = ledger.draft_answered(answer, link.generation)
        if awaited and ledger.phase is not Phase.DRAFTING:
            way = passage(
                session.to_draft.ready_ns, session.to_draft.written_ns, received_ns, taken, answer, frame.step
            )
            session.clock.draft_passage(way)
            self._cancel_timer(session)
            if isinstance(answer.result, Block):
                self.roster.was_prompt(link.name)
                self.curves.observe_draft(asked, len(answer.result), way)
                self.observer.drafted(session, way, len(answer.result))
        self._execute(session, commands)
        session.clock.work(taken, now_ns())

    def _target_answer(
        self, session: Session, ledger: Ledger, link: WorkerLink, answer: Answer, frame: AnswerFrame, received_ns: int
    ) -> None:
        taken = now_ns()
        if session.target_name != link.name or not ledger.target.matches(answer, link.generation):
            self.stale_answers += 1
            return
        block = ledger.block
        journey = session.to_target
        way = passage(journey.ready_ns, journey.written_ns, received_ns, taken, answer, frame.step)
        commands = ledger.target_answered(answer, link.generation)
        session.clock.target_passage(way)
        if len(commands) == 1 and isinstance(commands[0], Commit):
            self._commit(session, ledger, commands[0], block, frame, way, taken)
            return
        self._execute(session, commands)
        session.clock.work(taken, now_ns())

    def _commit(
        self,
        session: Session,
        ledger: Ledger,
        commit: Commit,
        block: Block,
        frame: AnswerFrame,
        way: Passage,
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
            self.curves.observe_verify(frame.step, way)
        session.window.observe(source, drafted, commit.accepted, clock.round.draft, way, first=prefilled > 0)
        if session.lookup is not None:
            session.lookup.extend(commit.tokens)
        kept_accepted = min(commit.accepted, len(result.ids))
        session.tally.round(source, drafted, kept_accepted)
        self.tally.round(source, drafted, kept_accepted)
        session.generated += len(result.ids)
        self.generated_tokens += len(result.ids)
        session.emit_tokens(result.ids, result.text)
        self._woken.append(session)
        now = now_ns()
        if clock.first_token_ns == 0:
            clock.first_token_ns = now
        rows, sessions = (frame.step.rows, frame.step.sessions) if frame.step is not None else (0, 0)
        index = session.tally.rounds - 1
        clock.end_round(index, kept_accepted, len(result.ids), now, rows, sessions)
        self.observer.round_done(session, index, source, drafted, kept_accepted, len(result.ids), way)
        if result.end is None:
            self._next_round(session, taken)
            return
        clock.work(taken, now_ns())
        self._finish(session, result.end.finish_reason, result.end.stop, result.end.text)

    # ---------------------------------------------------------------- ends

    def _finish(self, session: Session, reason: FinishReason, stop: str | None, text: str) -> None:
        clock = session.clock
        clock.ended_ns = now_ns()
        final = pb.Final(
            finish_reason=pb.FINISH_REASON_STOP if reason is FinishReason.STOP else pb.FINISH_REASON_LENGTH,
            text=text,
            usage=pb.Usage(prompt_tokens=len(session.spec.prompt), completion_tokens=session.generated),
            seed=session.spec.seed,
            speculation=session.tally.message(),
            timing=clock.timing(),
            rounds=clock.rounds,
        )
        if stop is not None:
            final.stop = stop
        session.out.append(pb.GenerateResponse(final=final))
        self._end(session, "finished")

    def _fail(self, session: Session, error: SpecwireError) -> None:
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
        self.outcomes[outcome] += 1
        clock = session.clock
        clock.ended_ns = clock.ended_ns or now_ns()
        self._cancel_timer(session)
        if session.ledger is not None:
            for command in session.ledger.finish():
                if isinstance(command, End):
                    name = session.target_name if command.role is Role.TARGET else session.draft_name
                    self.roster.close(name, session.ledger.session)
        del self.sessions[session.counter]
        took = (clock.ended_ns - clock.arrived_ns) / 1e9 if outcome == "finished" else None
        self.observer.ended(session)
        self._woken.append(session)
        self._admit(self.admission.leave(session.counter, took))

    def _cancel_timer(self, session: Session) -> None:
        if session.draft_timer is not None:
            session.draft_timer.cancel()
            session.draft_timer = None

    def _flush(self) -> None:
        """Frames were put before clients are woken, so the workers' next step does not wait for our clients."""
        woken, self._woken = self._woken, []
        for session in woken:
            session.wake.set()
