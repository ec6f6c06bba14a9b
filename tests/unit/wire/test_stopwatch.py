"""A task's way is split into disjoint parts that sum to the whole, by stamps that never cross hosts."""

from __future__ import annotations

import pytest

from specwire.law.tasks import Answer, SessionId, StepTiming, TaskTiming
from specwire.wire.stopwatch import Passage, passage, stamp

MS = 1_000_000


def way(
    timing: TaskTiming, step: StepTiming | None = None, stamps: tuple[int, int, int, int] = (0, MS, 11 * MS, 12 * MS)
) -> Passage:
    """The passage of one answer: ready at 0, written after 1 ms, received 10 ms later, taken up after another one."""
    return passage(*stamps, Answer(SessionId(1, 1), 1, 1, 3, None, timing), step)


def test_parts_are_where_the_time_was_spent() -> None:
    """Waiting on both sides, the link, queueing, computing, and what else the worker did."""
    timing = TaskTiming(residence_us=6_000, parse_us=100, queue_us=1_500, compute_us=4_000)

    assert way(timing) == Passage(wait_us=2_000, transfer_us=4_000, queue_us=1_500, compute_us=4_000, overhead_us=500)


def test_parts_sum_to_the_whole() -> None:
    """From ready to taken up, nothing twice and nothing left out."""

    assert way(TaskTiming(6_000, 100, 1_500, 4_000)).total_us == 12_000


def test_a_slower_link_shows_as_transfer_only() -> None:
    """Five milliseconds more between written and received, and nothing else has changed."""
    timing = TaskTiming(6_000, 100, 1_500, 4_000)
    near, far = way(timing), way(timing, stamps=(0, MS, 16 * MS, 17 * MS))

    assert (5_000, 0) == (far.transfer_us - near.transfer_us, far.compute_us - near.compute_us)


def test_a_slower_model_shows_as_compute_only() -> None:
    """Five milliseconds more at the worker, and the link is as fast as before."""
    near = way(TaskTiming(6_000, 100, 1_500, 4_000))
    slow = way(TaskTiming(11_000, 100, 1_500, 9_000), stamps=(0, MS, 16 * MS, 17 * MS))

    assert (0, 5_000) == (slow.transfer_us - near.transfer_us, slow.compute_us - near.compute_us)


def test_compute_of_one_step_may_stand_in_the_frame() -> None:
    """A task that does not tell its compute took the step of its frame."""

    assert way(TaskTiming(residence_us=6_000), StepTiming(100, 3_000, 900)).compute_us == 4_000


def test_its_own_compute_goes_before_the_steps() -> None:
    """A task of several steps tells their sum."""

    assert way(TaskTiming(residence_us=6_000, compute_us=5_000), StepTiming(100, 3_000, 900)).compute_us == 5_000


@pytest.mark.parametrize(
    ("timing", "stamps"),
    [
        (TaskTiming(10_001, 0, 0, 0), (0, MS, 11 * MS, 12 * MS)),
        (TaskTiming(6_000, 0, 9_000, 9_000), (0, MS, 11 * MS, 12 * MS)),
        (TaskTiming(6_000, 0, 1_000, 4_000), (MS, 0, 11 * MS, 10 * MS)),
        (TaskTiming(1, 0, 0, 0), (0, MS, MS - 5_000, MS)),
    ],
    ids=["residence over the span", "parts over the residence", "stamps in another order", "received before written"],
)
def test_no_part_is_negative(timing: TaskTiming, stamps: tuple[int, int, int, int]) -> None:
    """Clocks have grain and workers can lie; a negative time would be worse than a zero."""
    parts = way(timing, stamps=stamps)

    assert min(parts.wait_us, parts.transfer_us, parts.queue_us, parts.compute_us, parts.overhead_us) >= 0


def test_two_ways_add_up_part_by_part() -> None:
    """A text told in chunks takes several."""

    assert Passage(1, 20, 300, 4_000, 50_000) + Passage(1, 2, 3, 4, 5) == Passage(2, 22, 303, 4_004, 50_005)


def test_a_way_is_neither_work_nor_waiting_for_a_turn() -> None:
    """Link, coordinator, and what surrounds the engine."""

    assert 50_021 == Passage(wait_us=1, transfer_us=20, queue_us=300, compute_us=4_000, overhead_us=50_000).way_us


@pytest.mark.parametrize(
    ("us", "expected"),
    [
        (0, Passage(0, 0, 0, 0, 0)),
        (19, Passage(0, 19, 0, 0, 0)),
        (20, Passage(0, 20, 0, 0, 0)),
        (21, Passage(0, 20, 0, 1, 0)),
        (4_020, Passage(0, 20, 0, 4_000, 0)),
        (4_021, Passage(0, 20, 0, 4_000, 1)),
        (54_020, Passage(0, 20, 0, 4_000, 50_000)),
        (54_021, Passage(0, 20, 1, 4_000, 50_000)),
        (54_320, Passage(0, 20, 300, 4_000, 50_000)),
        (54_321, Passage(1, 20, 300, 4_000, 50_000)),
        (99_999, Passage(1, 20, 300, 4_000, 50_000)),
    ],
)
def test_the_last_of_a_way_is_its_transfer_and_before_that_its_compute(us: int, expected: Passage) -> None:
    """Then what surrounds that, the queue, and last of all the wait. No more than there is."""
    whole = Passage(wait_us=1, transfer_us=20, queue_us=300, compute_us=4_000, overhead_us=50_000)

    assert expected == whole.last(us)
    assert min(us, whole.total_us) == whole.last(us).total_us


@pytest.mark.parametrize("us", [0, 1, 7, 100])
def test_the_last_of_no_way_is_nothing(us: int) -> None:
    """Parts that took no time are not cut."""

    assert Passage(0, 0, 0, 0, 0) == Passage(0, 0, 0, 0, 0).last(us)
    assert Passage(0, 0, min(us, 9), 0, 0) == Passage(0, 0, 9, 0, 0).last(us)


def test_stamps_are_taken_of_raw_bytes() -> None:
    """And on a clock that only goes forward."""
    first, second = stamp(b"a"), stamp(b"b")

    assert (b"a", b"b", True) == (first.raw, second.raw, first.received_ns <= second.received_ns)
