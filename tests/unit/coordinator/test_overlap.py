"""Whether a draft worked while something else went on."""

from __future__ import annotations

import pytest

from coordinator import overlap
from coordinator.overlap import DraftWork


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stamp that is given next."""
    now = [0]
    monkeypatch.setattr(overlap, "now_ns", lambda: now[0])
    return now


def test_work_is_from_the_task_to_its_answer(clock: list[int]) -> None:
    """One task between 10 and 20."""
    work = DraftWork()
    clock[0] = 10
    work.begins(1, 1)

    assert [work.within(0, end) for end in (5, 10, 11)] == [False, False, True]
    clock[0] = 20
    work.ends(1)
    assert [work.within(begin, 30) for begin in (0, 19, 20, 21)] == [True, True, False, False]
    assert len(work) == 0


def test_one_after_another_is_work_all_the_time(clock: list[int]) -> None:
    """The second was begun before the first ended."""
    work = DraftWork()
    for clock[0], call, session in ((10, work.begins, 1), (20, work.begins, 2), (30, work.ends, 1)):
        call(session, 1)

    assert work.within(12, 15)
    assert work.within(31, 40)


def test_what_begins_after_the_verdict_came_is_not_beside_it(clock: list[int]) -> None:
    """Of verdicts that came in one frame, the first one's next draft task says nothing of the others' step."""
    work = DraftWork()
    clock[0] = 50
    work.begins(1, 1)

    assert not work.within(10, 40)


def test_an_end_without_a_begin_is_none(clock: list[int]) -> None:
    """A session that never asked a draft ends, at some time."""
    work = DraftWork()
    clock[0] = 5
    work.ends(7)

    assert not work.within(0, 10)


def test_the_end_of_a_former_task_is_none(clock: list[int]) -> None:
    """A draft that ran ahead was asked anew: the first answer says nothing of the second task. Who leaves ends all."""
    work = DraftWork()
    clock[0] = 10
    work.begins(1, 4)
    work.begins(1, 5)
    clock[0] = 20
    work.ends(1, 4)

    assert (1, True) == (len(work), work.within(15, 30))
    work.ends(1)
    assert (0, False) == (len(work), work.within(21, 30))
