"""The product's own ledger, desks, engines and table models joined without a wire: many generations in lockstep, cheaply.

Law. Nothing is imitated but the transport: the coordinator's ledger makes the tasks, the workers' desks check and keep them,
the steppers compute and judge. Every frame is delivered at once and in order. What depends on timing is not seen here; see
test_whole_stack.py for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from coordinator.ledger import NO_ENVELOPE, Command, Commit, End, Ledger, Limits, Phase, Role, Send
from draft_service.engine import DraftStepper
from draft_service.proposers.model import ModelProposer
from specwire.law.tasks import Answer, SessionId, StepTiming, Task
from specwire.law.values import Opening, Source
from specwire.lm.table import TableModel
from specwire.lm.table_config import TableConfig
from specwire.wire.codec import Hello, TaskFrame
from specwire.worker.desk import Desk
from specwire.worker.stepper import Stepper
from target_service.engine import TargetStepper

COORDINATOR = 1
MAX_BLOCK = 8
BUDGET = 4096
GROUP = 256
"""Generations at a time."""


class Worker:
    """A desk and its stepper, run until nothing waits."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.desk = Desk(stepper, 60.0, 3600.0)
        self.desk.open(self, Hello(COORDINATOR, 1, 60_000, 1))
        self.desk.take_out()

    def deliver(self, delivery: Any) -> None:
        """See Stream; here answers are taken from the desk."""

    def work(self, tasks: Sequence[Task], closes: Sequence[SessionId]) -> list[Answer]:
        """Delivers a frame and returns every answer to it."""
        self.desk.frame(self, COORDINATOR, TaskFrame(tasks=tuple(tasks), closes=tuple(closes)), 0, 0, 0)
        while parts := self.desk.plan(0, 0).parts:
            self.desk.begin(parts, 0, 0)
            self.desk.finish(parts, self.stepper.run(parts), StepTiming(), 0)
        _, answered = self.desk.take_out()
        return answered


class Bench:
    """One target and one draft."""

    def __init__(self, target: TableConfig, draft: TableConfig, top_m: int = 32) -> None:
        self._vocab = target.vocab_size
        proposer = ModelProposer(TableModel(draft, GROUP), top_m)
        self._workers = {
            Role.TARGET: Worker(TargetStepper(TableModel(target, GROUP), BUDGET, GROUP, MAX_BLOCK, 4096, False)),
            Role.DRAFT: Worker(DraftStepper(proposer, BUDGET, GROUP, MAX_BLOCK, 4096)),
        }
        self._counter = 0
        self.drafted = 0
        self.accepted = 0

    def run(self, openings: Iterable[Opening], prompt: Sequence[int], length: int, k: int) -> list[tuple[int, ...]]:
        """What each opening goes on with."""
        waiting = list(openings)
        texts: list[tuple[int, ...]] = []
        while waiting:
            group, waiting = waiting[:GROUP], waiting[GROUP:]
            texts += self._group(group, prompt, length, k)
        return texts

    def _group(self, openings: list[Opening], prompt: Sequence[int], length: int, k: int) -> list[tuple[int, ...]]:
        limits = Limits(4096, 4096, 256, self._vocab)
        ledgers: dict[SessionId, Ledger] = {}
        for opening in openings:
            self._counter += 1
            session = SessionId(COORDINATOR, self._counter)
            ledgers[session] = Ledger(session, opening, prompt, limits, with_draft=k > 0)
        outbox: dict[Role, list[Task]] = {role: [] for role in Role}
        closes: dict[Role, list[SessionId]] = {role: [] for role in Role}
        texts: dict[SessionId, tuple[int, ...]] = dict.fromkeys(ledgers, ())

        def begin(ledger: Ledger) -> None:
            block = min(k, length - len(texts[ledger.session]) - 1)
            source = Source.DRAFT_MODEL if block > 0 else Source.NONE
            execute(ledger, ledger.begin(source, block, (), NO_ENVELOPE))

        def execute(ledger: Ledger, commands: Sequence[Command]) -> None:
            for command in commands:
                match command:
                    case Send(role, task, _):
                        (ledger.target if role is Role.TARGET else ledger.draft).sent(task, 1)
                        outbox[role].append(task)
                    case Commit(tokens, block, accepted):
                        self.drafted += len(block)
                        self.accepted += accepted
                        texts[ledger.session] += tokens
                        if len(texts[ledger.session]) < length:
                            begin(ledger)
                        else:
                            execute(ledger, ledger.finish())
                    case End(role):
                        closes[role].append(ledger.session)
                    case _:
                        raise AssertionError(command)

        for ledger in ledgers.values():
            begin(ledger)
        while any(ledger.phase is not Phase.OVER for ledger in ledgers.values()) or any(closes.values()):
            for role, worker in self._workers.items():
                tasks, outbox[role] = outbox[role], []
                over, closes[role] = closes[role], []
                for answer in worker.work(tasks, over):
                    ledger = ledgers[answer.session]
                    answered = ledger.target_answered if role is Role.TARGET else ledger.draft_answered
                    execute(ledger, answered(answer, 1))
        return list(texts.values())
