"""Who drafts beside whom."""

from __future__ import annotations

import pytest

from draft_service.turns import Turns


def measured(step_ms: float, session_ms: float, *sizes: int) -> Turns:
    """A draft whose steps take so long."""
    turns = Turns()
    for size in sizes:
        turns.observe(size, (step_ms + session_ms * size) / 1e3)
    return turns


@pytest.mark.parametrize(
    ("step_ms", "session_ms", "expected"), [(10.0, 0.0, 0), (10.0, 0.1, 0), (0.0, 1.0, 1), (1.5, 1.5, 1), (8.0, 1.0, 0)]
)
def test_the_first_group_goes_alone_where_rows_take_their_time(
    step_ms: float, session_ms: float, expected: int
) -> None:
    """Four and four: alone if a step for all takes more than one and a half times as long as a step for one."""
    turns = measured(step_ms, session_ms, 4, 8)

    assert expected == turns.whose([1, 1, 2, 1, 2, 2, 2, 1])


def test_the_first_is_the_one_that_has_waited_longest() -> None:
    """Whatever its number; sessions without a group go along with any."""
    turns = measured(0.0, 1.0, 1, 2, 3)

    assert [2, 3, 0, 0, 0] == [turns.whose(groups) for groups in ([0, 2, 1], [3, 1, 1], [0, 0], [1, 1, 0], [])]


def test_a_small_group_waits_for_a_large_one_less_than_the_large_one_would_for_it() -> None:
    """One before seven: together they lose less."""
    turns = measured(4.0, 1.0, 1, 7, 8)

    assert [0, 2] == [turns.whose([1, *[2] * 7]), turns.whose([*[2] * 7, 1])]


def test_what_was_never_measured_is_done_together() -> None:
    """Then it is measured. Sizes that differ by one in eight are the same."""
    assert measured(0.0, 1.0, 4).whose([1, 1, 1, 1, 2, 2, 2, 2]) == 0
    assert measured(0.0, 1.0, 8).whose([1, 1, 1, 1, 2, 2, 2, 2]) == 0
    assert measured(0.0, 1.0, 4, 9).whose([1, 1, 1, 1, 2, 2, 2, 2]) == 1


def test_times_follow_what_is_seen() -> None:
    """A quarter of each new one."""
    turns = measured(1.0, 0.0, 4)
    turns.observe(4, 0.005)

    assert repr(turns) == "Turns({4: 2.0} ms)"
