"""The target's next step: what a task needs, and when waiting for company pays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.law.cursor import Prefix
from specwire.law.tasks import SessionId, VerifyTask
from specwire.law.values import Block, Law, Opening, SamplingSpec
from specwire.worker.jobs import Job
from specwire.worker.session import Session
from specwire.worker.shares import Claim
from specwire.worker.stepper import Due
from target_service.batch import claim_of, linger_until, plan

OPENING = Opening(Law.SHARED_NOISE, SamplingSpec(), 0, 0, 1)


def job(
    text: int, filled: int, keep: int, append: int, block: int = 0, prefill_only: bool = False, begun: bool = False
) -> Job:
    """A job of a session with `text` tokens, `filled` of them cached."""
    prefix = Prefix(OPENING.fingerprint(), range(text))
    session = Session(SessionId(1, 1), OPENING, 0, prefix, filled)
    task = VerifyTask(
        SessionId(1, 1),
        1,
        1,
        keep,
        prefix.hash_at(min(keep, text)),
        tuple(range(append)),
        None if keep else OPENING,
        block=Block(tuple(range(block))),
        prefill_only=prefill_only,
    )
    made = Job(task, begun=begun, session=session)
    session.front = made
    return made


@pytest.mark.parametrize(
    ("made", "bulk", "final"),
    [
        (job(10, 10, 10, 1, block=4), 0, 5),
        (job(10, 10, 10, 3, block=4), 2, 5),
        (job(10, 4, 10, 1, block=4), 6, 5),
        (job(10, 10, 6, 1), 0, 1),
        (job(0, 0, 0, 100), 99, 1),
        (job(0, 0, 0, 100, prefill_only=True), 100, 0),
        (job(10, 10, 10, 0, prefill_only=True), 0, 0),
        (job(100, 60, 0, 100, begun=True), 39, 1),
        (job(100, 99, 0, 100, block=8, begun=True), 0, 9),
    ],
)
def test_what_a_task_needs(made: Job, bulk: int, final: int) -> None:
    """Rows not yet cached, with the block's rows and the row before it together at the end."""
    assert claim_of(0, made) == Claim(0, bulk, final)


BLOCKS = [Claim(0, 0, 5), Claim(1, 0, 5)]


@pytest.mark.parametrize(
    ("due", "step_s", "expected"),
    [
        ([Due(6, 1.002)], 0.020, 1.002),  # 2 wait 2 ms, 6 save 18 ms
        ([Due(1, 1.015)], 0.020, None),  # 2 wait 15 ms, 1 saves 5 ms
        ([Due(6, 1.021)], 0.020, None),  # they come when the step would be over anyway
        ([Due(6, 0.999)], 0.020, None),  # their time is over
        ([], 0.020, None),
        ([Due(6, 1.019), Due(4, 1.003)], 0.020, 1.003),  # the far ones are not worth it, the near ones are
        ([Due(1, 1.003), Due(6, 1.005)], 0.020, 1.005),  # 1 saves 17 - 6 ms; 7 save 7 * 15 - 10 ms
        ([Due(6, 1.002)], 0.0, None),  # no step was measured yet
    ],
)
def test_when_to_linger(due: Sequence[Due], step_s: float, expected: float | None) -> None:
    """waiting * wait < due * (v - wait)."""
    assert linger_until(BLOCKS, due, 60, step_s, away_s=0.0, since=1.0, now=1.0) == expected


@pytest.mark.parametrize(
    ("waiting", "due", "within_s", "away_s", "expected"),
    [
        (1, 1, 0.018, 0.018, True),  # two that draft for 18 ms: 18 < 33 - 18 + 18, and they stay together
        (1, 1, 0.018, 0.000, False),  # if it were over with this one: 18 > 33 - 18
        (1, 1, 0.032, 0.032, True),  # whenever that is less than a step
        (7, 1, 0.009, 0.004, False),  # one that drafts among seven that do not: it goes along every second step
        (1, 7, 0.004, 0.018, True),  # there it waits for them
        (1, 1, 0.009, 0.004, True),  # one beside one
    ],
)
def test_those_who_draft_alike_find_together(
    waiting: int, due: int, within_s: float, away_s: float, expected: bool
) -> None:
    """waiting * wait < due * (v - wait + away), v = 33 ms: who starts at once is waited for in his turn."""
    claims = [Claim(key, 0, 2) for key in range(waiting)]
    until = linger_until(claims, [Due(due, 1.0 + within_s)], 60, 0.033, away_s, since=1.0, now=1.0)

    assert until == (1.0 + within_s if expected else None)


def test_who_was_away_for_long_counts_for_one_step() -> None:
    """A client that paused says nothing of the next time."""
    long_away, back = job(10, 10, 10, 1, block=4), job(10, 10, 10, 1, block=4)
    long_away.away_ns, back.away_ns = 10**12, 0
    due = [Due(1, 1.018)]

    assert plan([long_away], due, 0.033, 1.0, 1.0, 512, 64).wait_until == 1.018
    assert plan([long_away, back], due, 0.033, 1.0, 1.0, 512, 64).wait_until is None


def test_nobody_lingers_while_a_prompt_waits_or_for_longer_than_a_step() -> None:
    """There is work; and what was waited already counts."""
    assert linger_until([*BLOCKS, Claim(2, 100, 1)], [Due(6, 1.002)], 60, 0.02, 0.0, 1.0, 1.0) is None
    assert linger_until(BLOCKS, [Due(6, 1.002)], 60, 0.02, 0.0, 0.981, 1.0) is None


@pytest.mark.parametrize(("room", "expected"), [(-1, None), (0, None), (1, None), (2, 1.012)])
def test_nobody_lingers_for_more_than_the_step_can_take(room: int, expected: float | None) -> None:
    """One waits 12 ms: one more would save 8 ms, two save 16."""
    assert linger_until([BLOCKS[0]], [Due(6, 1.012)], room, 0.02, 0.0, 1.0, 1.0) == expected


@given(
    st.integers(1, 20),
    st.floats(0.0001, 0.1),
    st.floats(0.0, 0.1),
    st.lists(st.tuples(st.integers(0, 20), st.floats(-0.01, 0.1)), max_size=50),
)
def test_lingering_ends_whatever_is_announced(
    waiting: int, step_s: float, away_s: float, hints: list[tuple[int, float]]
) -> None:
    """Hint after hint, the wait never exceeds one step."""
    now = since = 5.0
    for sessions, within in hints:
        until = linger_until([Claim(0, 0, 1)] * waiting, [Due(sessions, now + within)], 60, step_s, away_s, since, now)
        if until is None:
            break
        assert now < until < since + step_s
        now = until


def test_a_plan_is_a_wait_or_a_step() -> None:
    """Never both."""
    jobs = [job(10, 10, 10, 1, block=4)]
    waits = plan(jobs, [Due(6, 1.002)], 0.02, 1.0, 1.0, 512, 64)
    steps = plan(jobs, [], 0.02, 1.0, 1.0, 512, 64)

    assert (waits.parts, waits.wait_until) == ((), 1.002)
    assert [(part.job, part.rows, part.last) for part in steps.parts] == [(jobs[0], 5, True)]
    assert steps.wait_until is None
