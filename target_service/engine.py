"""What the target does in a step: feed, judge, cut its own text to what stands.

Law. A task's text is keep + append; its block follows. The block's rows and the row of the last confirmed token are computed
in one pass, so that one verdict judges them all. After it the cache holds keep + append + accepted: what was refused is
overwritten by the next task, and the added token is not in the cache, since nobody has fed it.

A row that is no law fails its own session alone. `base + block <= max_context` is a rule of the coordinator; a task that breaks
it is refused as invalid.
"""

from __future__ import annotations

from collections.abc import Sequence

from specwire.law.errors import BadLaw, InvalidArgument
from specwire.law.tasks import Failure, Task, VerifyTask
from specwire.law.values import Verdict
from specwire.lm.port import Feed, LanguageModel, ModelSpec
from specwire.wire.stopwatch import now_ns
from specwire.worker.jobs import Job
from specwire.worker.limits import check_task
from specwire.worker.stepper import Done, Due, Part, Plan, StepResult
from target_service import batch
from target_service.verify import JudgeItem, judge

RECENT = 0.25
"""Weight of the newest step in the recent time of a step that verifies."""


class TargetStepper:
    """Verifies blocks. One model, one budget."""

    def __init__(
        self, model: LanguageModel, token_budget: int, max_sessions: int, max_block: int, max_append: int, linger: bool
    ) -> None:
        self._model = model
        self._budget = token_budget
        self._max_sessions = max_sessions
        self._max_block = max_block
        self._max_append = max_append
        self._linger = linger
        self._step_s = 0.0

    @property
    def spec(self) -> ModelSpec:
        """The model's own."""
        return self._model.spec

    @property
    def num_slots(self) -> int:
        """The model's own."""
        return self._model.num_slots

    def copy(self, source: int, target: int, length: int) -> None:
        """The model's own."""
        self._model.copy(source, target, length)

    def cut(self, slot: int, length: int) -> None:
        """The model's own."""
        self._model.cut(slot, length)

    def check(self, task: Task) -> None:
        """Limits of context, block, append and vocabulary."""
        if not isinstance(task, VerifyTask):
            raise InvalidArgument("task", type(task).__name__, "a VerifyTask")
        check_task(task, task.base + len(task.block), self._max_append, self.spec)
        if len(task.block) > self._max_block:
            raise InvalidArgument("block", len(task.block), f"at most {self._max_block} tokens")
        vocab = self.spec.vocab_size
        if any(token >= vocab for token in task.block.tokens):
            raise InvalidArgument("block", max(task.block.tokens), f"token ids under {vocab}")
        if any(max(law.ids) >= vocab for law in task.block.laws):
            raise InvalidArgument(
                "draft_laws", max(max(law.ids) for law in task.block.laws), f"token ids under {vocab}"
            )

    def plan(self, jobs: Sequence[Job], due: Sequence[Due], free_since: float, now: float) -> Plan:
        """See batch.py."""
        since = max(free_since, jobs[0].mark_ns / 1e9)
        step_s = self._step_s if self._linger else 0.0
        return batch.plan(jobs, due, step_s, since, now, self._budget, self._max_sessions)

    def run(self, parts: Sequence[Part]) -> StepResult:
        """One forward pass, then verdicts."""
        began = now_ns()
        result = StepResult()
        feeds: list[Feed] = []
        judged: list[tuple[Job, VerifyTask]] = []
        for part in parts:
            task, session = part.job.task, part.job.session
            assert isinstance(task, VerifyTask)
            assert session is not None
            wanted = len(task.block) + 1 if part.last and not task.prefill_only else 0
            if part.rows:
                text = session.prefix.tokens[session.filled : session.filled + part.rows]
                tokens = [*text, *task.block.tokens] if wanted else text
                feeds.append(Feed(session.slot, session.filled, tokens, wanted))
            result.rows += wanted
            result.prefill_rows += part.rows - wanted
            if wanted:
                judged.append((part.job, task))
        prepared = now_ns()
        scores = self._model.forward(feeds) if feeds else None
        self._model.synchronize()
        computed = now_ns()
        for part in parts:
            if not part.last and part.job.session is not None:
                part.job.session.filled += part.rows
            elif isinstance(part.job.task, VerifyTask) and part.job.task.prefill_only:
                result.done.append(Done(part.job, None))
        if judged:
            assert scores is not None
            items = [JudgeItem(job.session.opening, task.block, task.base) for job, task in judged if job.session]
            for (job, task), verdict in zip(judged, judge(scores, items), strict=True):
                result.done.append(_done(job, task, verdict))
        result.prepare_ns, result.compute_ns, result.sample_ns = (
            prepared - began,
            computed - prepared,
            now_ns() - computed,
        )
        if result.prefill_rows <= result.rows > 0:  # a step that reads prompts says nothing of what lingering saves
            seconds = (now_ns() - began) / 1e9
            self._step_s = seconds if not self._step_s else (1 - RECENT) * self._step_s + RECENT * seconds
        return result


def _done(job: Job, task: VerifyTask, verdict: Verdict | BadLaw) -> Done:
    if isinstance(verdict, BadLaw):
        return Done(job, Failure("the target gave no usable law: not a number, infinite or empty", bad_law=True))
    return Done(job, verdict, task.block.tokens[: verdict.accepted])
