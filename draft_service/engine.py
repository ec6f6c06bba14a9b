"""What the draft does in a step: every sequence reads what it lacks or grows by what the proposer gives, all in one pass.

Law. Sequences join and leave between steps. A task first catches up (its append, split over steps when it is long), then
proposes until it has what was asked for or the context ends; fewer tokens, or none, is no error. How many it proposes depends
on the number asked for and the lengths only, never on what was drafted. After a block of n tokens from a token-by-token
proposer the cache holds base + n - 1 tokens: the last one was never fed back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.proposers.base import Line, Proposal, Proposer, Want
from draft_service.turns import Turns
from specwire.law.errors import BadLaw, InvalidArgument
from specwire.law.tasks import Failure, ProposeTask, Task
from specwire.law.values import Block, Source, SparseLaw
from specwire.lm.port import ModelSpec
from specwire.wire.stopwatch import now_ns
from specwire.worker.jobs import Job, cached
from specwire.worker.limits import check_task
from specwire.worker.shares import Claim, share
from specwire.worker.stepper import Done, Due, Part, Plan, StepResult


@dataclass(slots=True)
class Drafted:
    """What a task has proposed so far."""

    tokens: list[int] = field(default_factory=list)
    laws: list[SparseLaw] = field(default_factory=list)

    def block(self) -> Block:
        """As a value."""
        return Block(tuple(self.tokens), tuple(self.laws), Source.DRAFT_MODEL)


class DraftStepper:
    """Proposes blocks. One proposer, one budget."""

    def __init__(
        self, proposer: Proposer, token_budget: int, max_sessions: int, max_block: int, max_append: int
    ) -> None:
        self._proposer = proposer
        self._budget = token_budget
        self._max_sessions = max_sessions
        self._max_block = max_block
        self._max_append = max_append
        self._turns = Turns()

    @property
    def spec(self) -> ModelSpec:
        """The proposer's own."""
        return self._proposer.spec

    @property
    def num_slots(self) -> int:
        """The proposer's own."""
        return self._proposer.num_slots

    def copy(self, source: int, target: int, length: int) -> None:
        """The proposer's own."""
        self._proposer.copy(source, target, length)

    def cut(self, slot: int, length: int) -> None:
        """The proposer's own."""
        self._proposer.cut(slot, length)

    def check(self, task: Task) -> None:
        """Limits of context, append and vocabulary. Asking for too long a block is fine: it comes out shorter."""
        if not isinstance(task, ProposeTask):
            raise InvalidArgument("task", type(task).__name__, "a ProposeTask")
        check_task(task, task.base, self._max_append, self.spec)
        if task.num_tokens and not task.base:
            raise InvalidArgument("append", (), "at least one token to propose from")

    def length(self, task: ProposeTask) -> int:
        """Tokens this task's block will have."""
        return min(task.num_tokens, self._max_block, self.spec.max_context - task.base)

    def plan(self, jobs: Sequence[Job], due: Sequence[Due], free_since: float, now: float) -> Plan:
        """Sequences that need one row first, those that catch up beside them; see `specwire.worker.shares`. Of groups that take
        turns perhaps one only; see `turns.py`."""
        if alone := self._turns.whose([job.task.group for job in jobs]):
            jobs = [job for job in jobs if job.task.group in (0, alone)]
        claims = [self._claim(key, job) for key, job in enumerate(jobs)]
        shares = share(claims, self._budget, self._max_sessions)
        return Plan(tuple(Part(jobs[each.key], each.rows, each.last) for each in shares))

    def _claim(self, key: int, job: Job) -> Claim:
        task = job.task
        assert isinstance(task, ProposeTask)
        drafted = len(job.partial.tokens) if job.partial else 0
        final = 1 if self.length(task) > drafted else 0
        return Claim(key, task.base + drafted - cached(job) - final, final)

    def run(self, parts: Sequence[Part]) -> StepResult:
        """One pass, and one token or more for each sequence that is up to date."""
        began = now_ns()
        result = StepResult()
        lines: list[Line] = []
        wanting: list[bool] = []
        for part in parts:
            wants = part.last and self.length(_task(part.job)) > len(_drafted(part.job).tokens)
            wanting.append(wants)
            if part.rows:
                lines.append(self._line(part, wants))
            result.rows += wants
            result.prefill_rows += part.rows - wants
        prepared = now_ns()
        result.prepare_ns = prepared - began
        proposals: Sequence[Proposal | BadLaw | None] = ()
        if lines:
            advance = self._proposer.advance(lines)
            proposals, result.compute_ns, result.sample_ns = advance.proposals, advance.compute_ns, advance.sample_ns
            if not result.prefill_rows:
                self._turns.observe(len(lines), (now_ns() - prepared) / 1e9)
        answers = iter(proposals)
        for part, wants in zip(parts, wanting, strict=True):
            proposal = next(answers) if part.rows else None
            done = self._advanced(part, proposal if wants else None)
            if done is not None:
                result.done.append(done)
        return result

    def _line(self, part: Part, wants: bool) -> Line:
        job, task, session = part.job, _task(part.job), part.job.session
        assert session is not None
        drafted = _drafted(job).tokens
        first, last = session.filled, session.filled + part.rows
        tokens = session.prefix.tokens[first:last]
        if last > task.base:
            tokens = [*tokens, *drafted[max(0, first - task.base) : last - task.base]]
        want = None
        if wants:
            want = Want(session.opening, task.base + len(drafted), self.length(task) - len(drafted))
        return Line(session.slot, first, tokens, want)

    def _advanced(self, part: Part, proposal: Proposal | BadLaw | None) -> Done | None:
        """Books what a step did for one job. The finished job, or None while there is more to do."""
        job, task, session, drafted = part.job, _task(part.job), part.job.session, _drafted(part.job)
        assert session is not None
        session.filled += part.rows
        if isinstance(proposal, BadLaw):
            return Done(job, Failure("the draft gave no usable law: not a number, infinite or empty", bad_law=True))
        if proposal is not None:
            drafted.tokens.extend(proposal.tokens)
            drafted.laws.extend(proposal.laws)
        if not part.last or len(drafted.tokens) < self.length(task):
            return None
        fed = max(0, session.filled - task.base)
        return Done(job, drafted.block(), tuple(drafted.tokens[:fed]))


def _task(job: Job) -> ProposeTask:
    assert isinstance(job.task, ProposeTask)
    return job.task


def _drafted(job: Job) -> Drafted:
    if job.partial is None:
        job.partial = Drafted()
    assert isinstance(job.partial, Drafted)
    return job.partial
