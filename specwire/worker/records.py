"""From the parts and the result of a step to what observers are told of its tasks."""

from __future__ import annotations

from collections.abc import Sequence

from specwire.law.tasks import Failure
from specwire.law.values import Block, Verdict
from specwire.worker.observe import TaskRecord
from specwire.worker.stepper import Part, StepResult


def task_records(parts: Sequence[Part], result: StepResult, failure: Failure | None) -> tuple[TaskRecord, ...]:
    """One record a part. `failure`: the step raised."""
    ends = {id(done.job): done.result for done in result.done}
    records = []
    for part in parts:
        job = part.job
        end: Verdict | Block | Failure | None = failure or ends.get(id(job))
        block = getattr(job.task, "block", None)
        records.append(
            TaskRecord(
                session=job.task.session,
                trace=job.task.trace,
                rows=part.rows,
                done=failure is not None or id(job) in ends,
                began_wall_ns=job.began_wall_ns,
                queue_us=job.queue_ns // 1000,
                compute_us=job.compute_ns // 1000,
                proposed=len(end)
                if isinstance(end, Block)
                else len(block)
                if block and isinstance(end, Verdict)
                else 0,
                accepted=end.accepted if isinstance(end, Verdict) else 0,
                error=end.detail if isinstance(end, Failure) else "",
            )
        )
    return tuple(records)
