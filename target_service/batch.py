"""Which waiting tasks go into the target's next step, and whether to wait a moment for more. Pure: `now` is an argument.

Law. `specwire.worker.shares` divides the token budget. Before a step the engine may linger for sessions that are announced
or expected back (turnaround.py), so that groups in lockstep do not decay into fragments, and fragments find together again.
Lingering for `wait` seconds costs each waiting session `wait`. Starting at once leaves each due session behind the step for
`v - wait`, and then for `away` more, since it lingers in its turn for those that have just been served. So the engine lingers while

    waiting * wait < due * (v - wait + away)        v: time of a step; away: how long the waiting sessions were away; measured

never while a prompt waits, and never so long that a session waits a whole step for company. Two sessions that draft find
together whenever that takes less than a step, as is best for them in the long run; one that drafts among many that do not is
not waited for in every step.

Sessions may be in groups that take turns, so that a draft works for one while the target judges another (rotation). A step then
serves one group, the one of which most wait, and tasks that are in none; and only sessions of that group are lingered for. One that
has lost its group waits for it rather than cost a step of its own, but not for more than three steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from specwire.law.tasks import VerifyTask
from specwire.worker.jobs import Job, cached
from specwire.worker.shares import Claim, share
from specwire.worker.stepper import Due, Part, Plan

_PATIENCE = 3.0
"""Steps that the oldest task waits for its group."""


def claim_of(key: int, job: Job) -> Claim:
    """What a task still needs. A block's rows, and the row that judges its first token, go together."""
    task = job.task
    assert isinstance(task, VerifyTask)
    final = 0 if task.prefill_only else len(task.block) + 1
    filled = cached(job)
    return Claim(key, task.base + len(task.block) - filled - final, final)


def linger_until(
    claims: Sequence[Claim], due: Sequence[Due], room: int, step_s: float, away_s: float, since: float, now: float
) -> float | None:
    """Until when to wait for sessions that are to come: the moment that saves most. None: start now. `room`: how many more the
    step can take. `away_s`: how long a waiting session was away before. `since`: when the engine could have started."""
    if room <= 0 or not all(claim.urgent for claim in claims):
        return None
    best: float | None = None
    most_saved, coming = 0.0, 0
    for each in sorted(due, key=lambda each: each.by):
        wait = each.by - now
        if wait <= 0:
            continue
        if each.by >= since + step_s:
            break
        coming = min(coming + each.sessions, room)
        saved = coming * (step_s - wait + away_s) - len(claims) * wait
        if saved > most_saved:
            best, most_saved = each.by, saved
    return best


def plan(
    jobs: Sequence[Job], due: Sequence[Due], step_s: float, since: float, now: float, budget: int, max_sessions: int
) -> Plan:
    """The next step, of jobs in order of age. `step_s`: recent time of a step; 0 never lingers."""
    jobs, due = _in_turn(jobs, due, step_s, now)
    claims = [claim_of(key, job) for key, job in enumerate(jobs)]
    room = min(
        max_sessions - len(claims), budget - sum(claim.total for claim in claims)
    )  # a session takes one row or more
    # One that was away for long, its client perhaps, says nothing of the next time; and no wait is longer than a step.
    away_s = sum(min(job.away_ns / 1e9, step_s) for job in jobs) / max(1, len(jobs))
    until = linger_until(claims, due, room, step_s, away_s, since, now)
    if until is not None:
        return Plan(wait_until=until)
    shares = share(claims, budget, max_sessions)
    return Plan(tuple(Part(jobs[each.key], each.rows, each.last) for each in shares))


def turn(groups: Sequence[int], waited_s: float, step_s: float) -> int:
    """Which group a step serves; 0: there are none. `groups`: of the tasks that wait, the oldest first; 0: in none. `waited_s`: how
    long the oldest that is in one has waited."""
    waiting = Counter(filter(None, groups))
    if not waiting:
        return 0
    if waited_s >= _PATIENCE * step_s:
        return next(filter(None, groups))
    return waiting.most_common(1)[0][0]  # of equals the one that has waited longest


def _in_turn(jobs: Sequence[Job], due: Sequence[Due], step_s: float, now: float) -> tuple[Sequence[Job], Sequence[Due]]:
    """Tasks that a step may serve, and who may be waited for."""
    groups = [job.task.group for job in jobs if isinstance(job.task, VerifyTask)]
    oldest = next((job for job, group in zip(jobs, groups, strict=True) if group), None)
    if oldest is None:
        return jobs, due
    chosen = turn(groups, now - oldest.mark_ns / 1e9, step_s)
    mine = [job for job, group in zip(jobs, groups, strict=True) if group in (0, chosen)]
    return mine, [each for each in due if each.group == chosen]
