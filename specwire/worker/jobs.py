"""One task at a worker, from its frame to its answer.

Law. A job belongs to the engine thread alone. Every job ends in exactly one answer, or in none when its session was closed or
its stream was lost before work on it began.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specwire.law.tasks import ProposeTask, Task, VerifyTask

if TYPE_CHECKING:
    from specwire.worker.session import Session


@dataclass(slots=True, eq=False)
class Job:
    """A task with its stamps. Two jobs are the same only if they are one object; see `same_task` for tasks."""

    task: Task
    received_ns: int = 0
    """When the raw frame came."""
    parse_us: int = 0
    mark_ns: int = 0
    """Since when the job waits for the engine: parsed, or the end of its last step."""
    away_ns: int = 0
    """From its session's last answer until it came; 0: there was none, or it came before."""
    queue_ns: int = 0
    """Waited so far, over all steps."""
    compute_ns: int = 0
    """Prepare, compute and sample of every step it took part in so far."""
    began_wall_ns: int = 0
    """Wall clock at its first step, for spans only. 0: not begun."""
    order: int = 0
    """Counts arrivals; the older of two jobs has the lower number."""
    reused: int = 0
    """Tokens of its text that the slot held already when the session's first task began."""
    begun: bool = False
    """The session's text was cut and extended for this task. Set by Session.begin, never unset."""
    session: Session | None = None
    """Set when the task gets its turn."""
    partial: Any = None
    """What the service keeps between the steps of one task."""

    @property
    def deadline_ns(self) -> int | None:
        """Stamp after which starting is wasted: by its own word, else by its session's. None: no limit."""
        if left := self.task.time_left_ms:
            return self.received_ns + left * 1_000_000
        return self.session.deadline_ns if self.session is not None else None


def cached(job: Job) -> int:
    """Tokens of the task's text that need not be computed again."""
    assert job.session is not None
    return job.session.filled if job.begun else job.session.standing(job.task)


def samples(task: Task) -> bool:
    """Whether the task needs a row of scores, and not only a cache that is up to date."""
    if isinstance(task, VerifyTask):
        return not task.prefill_only
    return isinstance(task, ProposeTask) and task.num_tokens > 0


def same_task(one: Task, other: Task) -> bool:
    """An exact repeat: all but what changes with the time of sending."""
    if one.number != other.number or one.epoch != other.epoch:
        return False
    neutral = {"time_left_ms": 0, "trace": b""}
    return dataclasses.replace(one, **neutral) == dataclasses.replace(other, **neutral)  # type: ignore[arg-type]
