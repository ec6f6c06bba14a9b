"""When answered sessions are expected back."""

from __future__ import annotations

import pytest

from specwire.law.tasks import SessionId
from specwire.worker.stepper import Due
from specwire.worker.turnaround import Turnaround

ONE, TWO, THREE = (SessionId(1, counter) for counter in (1, 2, 3))


def after(*gaps: float) -> Turnaround:
    """One that saw sessions come back after these seconds."""
    turnaround = Turnaround()
    for gap in gaps:
        turnaround.answered([ONE], 0.0)
        turnaround.heard([ONE], (), False, gap)
    return turnaround


def test_nothing_is_expected_before_it_was_measured() -> None:
    """The first step of all starts at once."""
    turnaround = Turnaround()
    turnaround.answered([ONE], 1.0)
    assert turnaround.due() == []


@pytest.mark.parametrize(
    ("gaps", "seconds"),
    [
        ((0.002,), 0.002 + 4 * 0.001),
        ((0.002, 0.002), 0.002 + 4 * 0.00075),
        ((0.002, 0.004), 0.00225 + 4 * 0.00125),
        ((0.002, 60.0), 0.002 + 0.010 / 8 + 4 * (0.001 + 0.009 / 4)),  # as if 12 ms
    ],
)
def test_mean_and_deviation(gaps: tuple[float, ...], seconds: float) -> None:
    """As in RFC 6298, and one pause does not spoil it."""
    turnaround = after(*gaps)
    turnaround.answered([ONE, TWO], 5.0)
    assert turnaround.due() == [Due(2, pytest.approx(5.0 + seconds))]


@pytest.mark.parametrize(
    ("tasks", "closes", "announces", "left"),
    [
        ([THREE], [], False, 2),  # it was under way before the answers came
        ([ONE], [], False, 0),  # the frame after the answers: it tells of all
        ([], [], True, 0),
        ([THREE], [], True, 2),  # what it announces was so before the step ended
        ([], [ONE], False, 1),
        ([], [ONE, TWO], False, 0),
    ],
)
def test_what_ends_the_wait(tasks: list[SessionId], closes: list[SessionId], announces: bool, left: int) -> None:
    """Return, announcement or close."""
    turnaround = after(0.002)
    turnaround.answered([ONE, TWO], 5.0)
    turnaround.heard(tasks, closes, announces, 5.001)
    assert sum(due.sessions for due in turnaround.due()) == left


def test_a_frame_that_came_during_a_later_step_tells_of_the_earlier_one() -> None:
    """The engine hears of it after the step, with the stamp of its arrival."""
    turnaround = after(0.002)
    turnaround.answered([ONE, TWO], 5.0)
    turnaround.answered([THREE], 5.1)
    turnaround.heard([], (), True, 5.002)

    assert [due.sessions for due in turnaround.due()] == [1]
    assert repr(turnaround) == "Turnaround(2.0 +- 0.8 ms, away=[1])"


def test_only_the_latest_steps_are_remembered() -> None:
    """Whoever never comes back costs nothing for ever."""
    turnaround = after(0.002)
    for number in range(100):
        turnaround.answered([SessionId(1, number)], float(number))

    assert [due.by for due in turnaround.due()] == pytest.approx([number + 0.006 for number in range(96, 100)])


def test_a_frame_that_crossed_a_later_answer_is_measured_from_its_own_step() -> None:
    """Two groups take turns over a long link: what answers the first step arrives just after the second one ended."""
    turnaround = after(0.010)
    turnaround.answered([ONE], 5.0)
    turnaround.answered([TWO], 5.0098)
    turnaround.heard([ONE], (), True, 5.010)

    assert [due.sessions for due in turnaround.due()] == [1]
    assert turnaround.due()[0].by > 5.0098 + 0.010
