"""A service on paper: clients, a coordinator that sends and receives frames, and workers. See rounds.py for what it decides.

Law. All answers of a frame are applied before the next frames leave, and what one turn of the coordinator has for a worker leaves
in one frame, with word of the sessions that are due (coordinator/clients.py, driver.py).
"""

from __future__ import annotations

import random

from deploy.experiment.clock import Clock, Devices, Jitter, Way
from deploy.experiment.engines import DraftEngine, Engine, TargetEngine
from deploy.experiment.jobs import Frame, Job
from deploy.experiment.meter import Meter, Results
from deploy.experiment.rounds import Rounds, Session
from deploy.experiment.world import World
from specwire.law.tasks import SessionId, StepTiming
from specwire.wire.stopwatch import Passage


class Service:
    """Everything that is simulated."""

    def __init__(self, world: World, seed: int = 0) -> None:
        self.world = world
        self.clock = Clock()
        self.meter = Meter()
        self.sessions: dict[int, Session] = {}
        """At work now."""
        self.answers: list[int] = []
        """Tokens of every answer that is complete."""
        self.rounds = Rounds(world, self.clock, self.meter, self._put, self._finish)
        jitter, devices = Jitter(world.jitter, seed), Devices(self.clock, world.stretch)
        common = (self.clock, devices, jitter)
        sizes = (world.token_budget, world.step_sessions)
        self.targets = [
            TargetEngine(f"target-{number}", *common, world.target, world.target_read_us, *sizes, linger=world.linger)
            for number in range(world.targets)
        ]
        self.drafts = [
            DraftEngine(f"draft-{number}", *common, world.draft, world.draft_read_us, *sizes)
            for number in range(world.drafts)
        ]
        self._ways: dict[Engine, Way] = {}
        for engine in self.engines:
            link_us = world.draft_link_us if engine.drafts else world.target_link_us
            self._ways[engine] = engine.connect(self._received, self.meter, link_us)
        self._frames: dict[Engine, Frame] = {}
        """What leaves at the end of this turn."""
        self._free_us = 0.0
        """When the coordinator will have done all that it has received."""
        self._seed = seed
        self._arrivals = random.Random(f"arrivals {seed}")
        self._texts: list[random.Random] = []
        """Of clients that ask for nothing now."""
        self._clients = self._counter = self._waiting = 0

    @property
    def engines(self) -> list[Engine]:
        """All workers."""
        return [*self.targets, *self.drafts]

    def run(self, rounds: int, warm_up: int) -> Results:
        """Serves until each session, on average, has done `warm_up` rounds, and then `rounds` more, which are measured."""
        if self.world.arrivals_per_s:
            self._arrive()
        else:
            for _ in range(self.world.sessions):
                self._open()
            self._send()
        self._pass(warm_up)
        self.meter.start(self.clock.now)
        self._pass(rounds)
        return self.meter.results(self.engines, self.clock.now)

    def _pass(self, rounds: int) -> None:
        until = self.meter.rounds_seen + rounds * self.world.sessions
        while self.meter.rounds_seen < until:
            self.clock.step()

    # ---------------------------------------------------------------- requests

    def _arrive(self) -> None:
        """Another request comes, and the next one will."""
        if len(self.sessions) < self.world.sessions:
            self._open()
            self._send()
        else:
            self._waiting += 1
        wait_us = 1e6 * self._arrivals.expovariate(self.world.arrivals_per_s)
        self.clock.at(self.clock.now + wait_us, self._arrive)

    def _open(self) -> None:
        """A request begins, at the workers with the fewest sessions (coordinator/fleet.py)."""
        if not self._texts:
            self._texts.append(random.Random(f"client {self._clients} {self._seed}"))
            self._clients += 1
        self._counter += 1
        world, counter = self.world, self._counter
        target = min(self.targets, key=lambda each: len(each.bound))
        draft = min(self.drafts, key=lambda each: len(each.bound))
        window = self.rounds.curves.request(world.k, self.rounds.longest)
        answer, prompt = world.answer_tokens, world.prompt_tokens
        session = Session(SessionId(1, counter), self._texts.pop(), target, draft, window, answer, prompt, prompt - 1)
        target.bound.add(counter)
        draft.bound.add(counter)
        self.sessions[counter] = session
        self.rounds.begin(session)

    def _finish(self, session: Session) -> None:
        """An answer is complete. Who waits is next; in a closed loop its own client."""
        counter = session.id.counter
        del self.sessions[counter]
        self.answers.append(session.committed)
        self._texts.append(session.text)
        for engine in (session.target, session.draft):
            engine.bound.discard(counter)
            self._frame(engine).closes.append(session.id)
        if self._waiting or not self.world.arrivals_per_s:
            self._waiting = max(0, self._waiting - 1)
            self._open()

    # ---------------------------------------------------------------- frames

    def _frame(self, engine: Engine) -> Frame:
        return self._frames.setdefault(engine, Frame())

    def _put(self, engine: Engine, job: Job) -> None:
        self._frame(engine).jobs.append(job)

    def _send(self, announce: Engine | None = None) -> None:
        """What was decided goes out. `announce`: a target that is told what is due though it gets no task."""
        if announce is not None:
            self._frame(announce)
        frames, self._frames = self._frames, {}
        for engine, frame in frames.items():
            if isinstance(engine, TargetEngine) and (frame.jobs or engine is announce):
                frame.due = self._due(engine, next((job.group for job in frame.jobs if job.group), None))
            if frame.jobs or frame.closes or frame.due[0]:
                for job in frame.jobs:
                    job.written_us = self.clock.now
                self._ways[engine].carry(engine.frame, frame)

    def _due(self, target: TargetEngine, group: int | None) -> tuple[int, float, int]:
        """Sessions of this target that wait for their blocks, how long that takes at most, and their group: this one, or that which
        is due first."""
        if len(target.bound) < 2:
            return 0, 0.0, 0
        count, due_ns, group = self.rounds.awaited.due(target.name, group)
        return (count, max(1.0, due_ns / 1e3 - self.clock.now), group) if count else (0, 0.0, 0)

    def _received(self, engine: Engine, jobs: list[Job], step: StepTiming) -> None:
        """An answer frame came. It is taken up when the coordinator comes to it."""
        world, now = self.world, self.clock.now
        work_us = world.coordinator_us + len(jobs) * world.coordinator_answer_us
        if work_us:
            self._free_us = max(now, self._free_us) + work_us
            self.clock.at(self._free_us, self._answered, engine, jobs, step, now)
        else:
            self._answered(engine, jobs, step, now)

    def _answered(self, engine: Engine, jobs: list[Job], step: StepTiming, received_us: float) -> None:
        """Applies a frame; then frames go out."""
        rounds, wait_us = self.rounds, round(self.clock.now - received_us)
        if engine.drafts:
            rounds.curves.observe_read(step)
        for job in jobs:
            session: Session = job.owner
            if session.id.counter not in self.sessions:
                continue
            transfer_us = received_us - job.written_us - job.queue_us - job.compute_us
            way = Passage(wait_us, max(0, round(transfer_us)), round(job.queue_us), round(job.compute_us), 0)
            if engine.drafts:
                rounds.draft_answered(session, job, way)
            else:
                rounds.target_answered(session, job, way, step, received_us)
        self._send(None if engine.drafts else engine)
