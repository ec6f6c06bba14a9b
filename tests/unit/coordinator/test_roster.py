"""Drafts that are left alone for a while."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.config import CoordinatorConfig
from coordinator.roster import SNOOZE_S, Roster
from specwire.wire.info import WorkerInfo
from tests.unit.coordinator.test_rounds import info


@pytest.fixture
def roster() -> Roster:
    """One with a draft that is ready."""
    found: WorkerInfo = info("draft")
    events: Any = None
    made = Roster(CoordinatorConfig(), 1, events)
    worker, _ = made.fleet.register("draft-0", found, "draft-0:1", 0.0)
    made.fleet.connected(worker)
    return made


def alone_for(roster: Roster, now: float) -> float:
    """Seconds from now on in which the draft is not asked."""
    steps = (now + 0.01 * n for n in range(1000))
    return round(next(at for at in steps if roster.usable("draft-0", at) is not None) - now, 2)


def test_it_is_left_alone_for_longer_each_time_in_a_row(roster: Roster) -> None:
    """Up to five seconds; a block from it ends that."""
    now, seen = 100.0, []
    for _ in range(6):
        roster.was_late("draft-0", now)
        seen.append(alone_for(roster, now))
        now += 10.0

    assert [*SNOOZE_S, SNOOZE_S[-1]] == seen
    roster.was_prompt("draft-0")
    roster.was_late("draft-0", now)
    assert SNOOZE_S[0] == alone_for(roster, now)


def test_many_blocks_late_at_a_time_are_one_slow_moment(roster: Roster) -> None:
    """Eight sessions wait for a draft that stalls: a quarter of a second, as if one had, and half a second the next time."""
    for n in range(8):
        roster.was_late("draft-0", 100.0 + 0.01 * n)

    assert SNOOZE_S[0] == alone_for(roster, 100.0)
    roster.was_late("draft-0", 101.0)
    assert SNOOZE_S[1] == alone_for(roster, 101.0)
