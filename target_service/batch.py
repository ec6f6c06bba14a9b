"""Which waiting tasks go into the target's next step, and whether to wait a moment for more. Pure: `now` is an argument.

Law. `specwire.worker.shares` divides the token budget. Before a step the engine may linger for blocks that are announced, so
that groups in lockstep do not decay into fragments: lingering for `wait` seconds costs each waiting session `wait`, and saves
each due session the `v - wait` it would spend behind the step that starts without it. It lingers while

    waiting * wait < due * (v - wait)        v: time of a step, as measured

never while a prompt waits, and never so long that a session waits a whole step for company.
"""

from __future__ import annotations

from collections.abc import Sequence

from specwire.law.tasks import Task, VerifyTask
from specwire.worker.jobs import Job
from specwire.worker.shares import Claim, share
from specwire.worker.stepper import Due, Part, Plan


def claim_of(key: int, job: Job) -> Claim:
    """What a task still needs. A block's rows, and the row that judges its first token, go together."""
    task = job.task
    assert isinstance(task, VerifyTask)
    final = 0 if task.prefill_only else len(task.block) + 1
    filled = cached(job)
    return Claim(key, task.base + len(task.block) - filled - final, final)


def cached(job: Job) -> int:
    """Tokens of the task's text that need not be computed again."""
    assert job.session is not None
    if job.begun:
        return job.session.filled
    return min(job.session.filled, job.task.keep, last_needed(job.task))


def last_needed(task: Task) -> int:
    """Beyond this many tokens the cache is of no use to the task: the last confirmed token's row is wanted."""
    assert isinstance(task, VerifyTask)
    return task.base if task.prefill_only else task.base - 1


def linger_until(claims: Sequence[Claim], due: Due, step_s: float, since: float, now: float) -> float | None:
    """Until when to wait for announced blocks. None: start now. `since`: when the engine could have started."""
    wait = due.by - now
    if wait <= 0 or due.sessions <= 0 or not all(claim.urgent for claim in claims):
        return None
    if now - since + wait >= step_s or len(claims) * wait >= due.sessions * (step_s - wait):
        return None
    return due.by


def plan(
    jobs: Sequence[Job], due: Due, step_s: float, since: float, now: float, budget: int, max_sessions: int
) -> Plan:
    """The next step, of jobs in order of age. `step_s`: recent time of a step; 0 never lingers."""
    claims = [claim_of(key, job) for key, job in enumerate(jobs)]
    until = linger_until(claims, due, step_s, since, now)
    if until is not None:
        return Plan(wait_until=until)
    shares = share(claims, budget, max_sessions)
    return Plan(tuple(Part(jobs[each.key], each.rows, each.last) for each in shares))
