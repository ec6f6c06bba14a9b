"""The door: bounded running, bounded waiting, first come first served, and nothing left of those who have gone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.admission import Admission
from specwire.law.errors import NoRoom


def a_door(running: int = 2, waiting: int = 2) -> Admission:
    """Requests 1, 2, ... have entered until it was full."""
    door = Admission(running, waiting)
    for request in range(1, running + waiting + 1):
        door.enter(request)
    return door


def test_there_is_room_at_first() -> None:
    """As many as may run do, the next ones wait."""
    door = Admission(max_running=2, max_waiting=2)

    assert [door.enter(request) for request in range(1, 5)] == [True, True, False, False]


def test_who_cannot_even_wait_is_refused_with_a_hint() -> None:
    """And is not remembered."""
    door = a_door()
    with pytest.raises(NoRoom) as caught:
        door.enter(9)

    assert str(caught.value) == "2 requests running (limit 2) and 2 waiting (limit 2)"
    assert 0.1 <= caught.value.retry_after_s <= 60
    assert repr(door) == "Admission(running=2/2, waiting=2/2)"


def test_first_come_first_served() -> None:
    """A place goes to the one that waits longest, also when somebody new comes at the same time."""
    door = a_door()

    assert door.leave(1) == [3]
    assert door.leave(2) == [4]
    assert [door.enter(5), door.leave(3), door.leave(4)] == [False, [5], []]


def test_leaving_the_queue_frees_no_place() -> None:
    """A client that gave up while waiting."""
    door = a_door()

    assert door.leave(3) == []
    assert door.leave(1) == [4]


def test_nobody_passes_the_queue() -> None:
    """A place that became free by growth goes to the queue first."""
    door = a_door(running=1, waiting=2)

    assert [door.resize(2), door.enter(4)] == [[2], False]


def test_shrinking_ends_nobody() -> None:
    """Those that run go on; the places are gone when they leave."""
    door = a_door(running=3, waiting=1)

    assert [door.resize(1), door.leave(1), door.leave(2), door.leave(3)] == [[], [], [], [4]]


def test_the_hint_follows_how_long_requests_take() -> None:
    """Long requests and a long queue: come back later."""
    short, long = a_door(), a_door()
    for _ in range(50):
        short.leave(99, took_s=0.01)
        long.leave(99, took_s=20.0)
    hints = []
    for door in (short, long):
        with pytest.raises(NoRoom) as caught:
            door.enter(100)
        hints.append(caught.value.retry_after_s)

    assert hints[0] < 0.5 < 20 < hints[1]


def test_without_a_queue_the_next_one_is_refused() -> None:
    """max_waiting may be zero."""
    door = Admission(max_running=1, max_waiting=0)
    door.enter(1)

    with pytest.raises(NoRoom):
        door.enter(2)


def test_without_a_place_there_is_still_a_hint() -> None:
    """A service whose workers have all gone has no places for a while."""
    door = Admission(max_running=0, max_waiting=0)

    with pytest.raises(NoRoom):
        door.enter(1)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["enter", "leave", "resize"]), st.integers(1, 9)), max_size=40),
)
def test_limits_hold_and_nobody_is_lost(running: int, waiting: int, events: list[tuple[str, int]]) -> None:
    """Everyone who entered runs or waits until it leaves, runs at most once, and order is kept."""
    door = Admission(running, waiting)
    inside: list[int] = []
    began: list[int] = []
    queue: list[int] = []
    for kind, number in events:
        admitted: list[int] = []
        if kind == "enter" and number not in inside:
            try:
                at_once = door.enter(number)
            except NoRoom:
                assert len(queue) >= waiting
                continue
            inside.append(number)
            (began if at_once else queue).append(number)
        elif kind == "leave" and number in inside:
            inside.remove(number)
            if number in queue:
                queue.remove(number)
            else:
                began.remove(number)
            admitted = door.leave(number)
        elif kind == "resize":
            admitted = door.resize(1 + number % 4)
        assert queue[: len(admitted)] == admitted
        queue = queue[len(admitted) :]
        began += admitted
        assert (set(began), queue) == (door.running, list(door.waiting))
        assert not queue or len(began) >= door.max_running
    for number in inside:
        door.leave(number)

    assert (0, 0) == (len(door.running), len(door.waiting))
