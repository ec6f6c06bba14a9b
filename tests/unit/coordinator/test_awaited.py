"""What a target is told of blocks that are coming."""

from __future__ import annotations

import random
from collections import Counter

from coordinator.awaited import Awaited


def test_nothing_is_awaited_at_first() -> None:
    """Zeros, for any target and group."""
    awaited = Awaited()

    assert [(0, 0, 0)] * 3 == [awaited.due("target-0", group) for group in (None, 0, 1)]


def test_those_of_one_target_and_group_are_one_company() -> None:
    """How many, until when the last; without a group the company that is due first."""
    awaited = Awaited()
    for session, target, group, due in ((1, "a", 1, 30), (2, "a", 1, 20), (3, "a", 2, 25), (4, "b", 1, 10)):
        awaited.begins(session, target, group, due)

    assert (2, 30, 1) == awaited.due("a", 1)
    assert (1, 25, 2) == awaited.due("a", None)
    assert (1, 10, 1) == awaited.due("b", None)
    assert (0, 0, 0) == awaited.due("a", 3)
    assert len(awaited) == 4


def test_who_waits_anew_counts_once() -> None:
    """The next round, perhaps in another group."""
    awaited = Awaited()
    awaited.begins(1, "a", 1, 30)
    awaited.begins(1, "a", 2, 40)

    assert [(0, 0, 0), (1, 40, 2)] == [awaited.due("a", group) for group in (1, 2)]


def test_nothing_is_left_when_all_have_ended() -> None:
    """In any order, with ends of sessions that never waited among them; counts are right all the way."""
    dice = random.Random(1)
    awaited, truth = Awaited(), dict[int, tuple[str, int]]()
    for _ in range(2000):
        session, place = dice.randrange(40), (dice.choice("ab"), dice.randrange(3))
        if dice.random() < 0.5:
            awaited.begins(session, *place, dice.randrange(1, 100))
            truth[session] = place
        else:
            awaited.ends(session)
            truth.pop(session, None)
        counts = Counter(truth.values())
        assert {place: counts[place] for place in counts} == {
            place: awaited.due(*place)[0]
            for place in ((t, g) for t in "ab" for g in range(3))
            if awaited.due(*place)[0]
        }
    for session in range(40):
        awaited.ends(session)

    assert (0, "Awaited({})") == (len(awaited), repr(awaited))
