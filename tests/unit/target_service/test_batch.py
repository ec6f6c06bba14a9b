"""The target's next step: what a task needs, and when waiting for company pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from target_service.batch import claim_of, linger_until, plan, turn

OPENING = Opening(Law.SHARED_NOISE, SamplingSpec(), 0, 0, 1)


def job(
    text: int,
    filled: int,
    keep: int,
    append: int,
    block: int = 0,
    prefill_only: bool = False,
    begun: bool = False,
    group: int = 0,
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
        group=group,
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


# ------------------------------------------------------------------ groups that take turns


def of_groups(*groups: int, waited_s: float = 0.0) -> list[Job]:
    """Blocks of sessions in these groups, the oldest first. `waited_s`: all have waited for so long."""
    made = [job(10, 10, 10, 1, block=4, group=group) for group in groups]
    for each in made:
        each.mark_ns = round((1.0 - waited_s) * 1e9)
    return made


def group_of(made: Job) -> int:
    """As its task says."""
    assert isinstance(made.task, VerifyTask)
    return made.task.group


def step_of(jobs: Sequence[Job], due: Sequence[Due] = (), max_sessions: int = 64) -> tuple[list[int], float | None]:
    """Places in the queue of those that are served, and until when to wait."""
    planned = plan(jobs, due, 0.02, 1.0, 1.0, 512, max_sessions)
    return [jobs.index(part.job) for part in planned.parts], planned.wait_until


@pytest.mark.parametrize(
    ("groups", "served"),
    [
        ((1, 2, 1, 2), [0, 2]),  # of equals the one that has waited longest
        ((2, 1, 1), [1, 2]),
        ((2, 1, 3, 1), [1, 3]),
        ((3, 3, 3), [0, 1, 2]),
        ((0, 1, 2, 0, 2), [0, 2, 3, 4]),  # who is in none goes with any, and has no turn
        ((0, 0, 0, 2), [0, 1, 2, 3]),
        ((1, 0, 2, 0), [0, 1, 3]),
        ((0, 0), [0, 1]),
        ((7,), [0]),
        ((), []),
    ],
    ids=str,
)
def test_a_step_serves_the_group_of_which_most_wait(groups: tuple[int, ...], served: list[int]) -> None:
    """And those that are in none."""
    jobs = of_groups(*groups)

    assert (served, None) == step_of(jobs)


@pytest.mark.parametrize(("waited_s", "served"), [(0.0, [1, 2]), (0.059, [1, 2]), (0.061, [0]), (5.0, [0])])
def test_who_has_lost_its_group_waits_for_three_steps(waited_s: float, served: list[int]) -> None:
    """A step takes 20 ms. Then it is its turn, whoever else waits."""

    assert (served, None) == step_of(of_groups(2, 1, 1, waited_s=waited_s))


@pytest.mark.parametrize(
    ("groups", "waited_s", "step_s", "expected"),
    [
        ((), 9.0, 0.02, 0),
        ((0, 0), 9.0, 0.02, 0),
        ((0, 3), 0.0, 0.02, 3),
        ((3, 1, 1), 0.0, 0.02, 1),
        ((0, 3, 1, 1), 0.06, 0.02, 3),
        ((3, 1, 1), 0.0, 0.0, 3),  # no step was measured yet
    ],
)
def test_whose_turn_it_is(groups: tuple[int, ...], waited_s: float, step_s: float, expected: int) -> None:
    """Of the tasks that wait, the oldest first."""

    assert expected == turn(groups, waited_s, step_s)


def test_only_the_oldest_that_is_in_a_group_loses_patience() -> None:
    """One that is in none goes along with any."""
    jobs = of_groups(0, 2, 1, 1)
    jobs[0].mark_ns = 0

    assert ([0, 2, 3], None) == step_of(jobs)


def test_groups_come_one_after_the_other() -> None:
    """Step by step: what was served leaves, and the next oldest has its turn."""
    jobs, steps = of_groups(2, 1, 2, 3, 1, 0), []
    while jobs:
        served, _ = step_of(jobs)
        steps.append([group_of(jobs[place]) for place in served])
        jobs = [each for place, each in enumerate(jobs) if place not in served]

    assert [[2, 2, 0], [1, 1], [3]] == steps


@pytest.mark.parametrize(
    ("groups", "due", "expected"),
    [
        ((1,), [Due(6, 1.002, 1)], 1.002),
        ((1,), [Due(6, 1.002, 2)], None),  # they have a turn of their own
        ((1,), [Due(6, 1.002, 0)], None),  # nobody knows whose turn would be theirs
        ((0, 2), [Due(6, 1.002, 1), Due(6, 1.004, 2)], 1.004),
        ((2, 1), [Due(6, 1.002, 1)], None),  # of the group that waits, but not in this turn
        ((2, 1), [Due(6, 1.002, 1), Due(6, 1.004, 2)], 1.004),
        ((1, 2, 3), [Due(1, 1.008, 1)], 1.008),  # one waits 8 ms, one saves 12; the others wait in any case
        ((1, 2, 2, 2), [Due(1, 1.008, 1)], None),  # it is their turn
        ((1, 1, 1, 1), [Due(1, 1.008, 1)], None),
        ((0,), [Due(6, 1.002, 0)], 1.002),
        ((0,), [Due(6, 1.002, 2)], 1.002),  # without a group at work all is as without groups
        ((0, 0), [Due(6, 1.002, 1), Due(6, 1.003, 2)], 1.003),
    ],
)
def test_only_those_of_the_turn_are_lingered_for(
    groups: tuple[int, ...], due: Sequence[Due], expected: float | None
) -> None:
    """waiting * wait < due * (v - wait), both of one group."""

    assert expected == step_of(of_groups(*groups), due)[1]


@pytest.mark.parametrize(("max_sessions", "expected"), [(1, None), (2, 1.002)])
def test_those_of_another_turn_take_no_room(max_sessions: int, expected: float | None) -> None:
    """One of the group waits: there is room for one more, whoever stands behind."""

    assert expected == step_of(of_groups(1, 2, 3), [Due(6, 1.002, 1)], max_sessions)[1]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("more", [{"prefill_only": True}, {"block": 0}])
def test_prompts_go_along_with_any_group(place: int, more: dict[str, Any]) -> None:
    """Wherever they stand; and nobody lingers while one waits."""
    jobs = of_groups(2, 1)
    jobs.insert(place, job(0, 0, 0, 100, **more))
    planned = plan(jobs, [Due(6, 1.002, 2)], 0.02, 1.0, 1.0, 512, 64)

    assert [(0, 100), (2, 5)] == sorted((group_of(part.job), part.rows) for part in planned.parts)
    assert planned.wait_until is None
