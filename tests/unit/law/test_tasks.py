"""Tasks and answers refuse to be built wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specwire.law.errors import InvalidArgument
from specwire.law.tasks import Answer, ProposeTask, SessionId, Task, TaskTiming, VerifyTask
from specwire.law.values import GREEDY, MAX_U32, Block, Law, Opening, Verdict

OPENING = Opening(Law.SHARED_NOISE, GREEDY, seed=1, choice=0, prompt_length=2)
PLACE: dict[str, Any] = {"session": SessionId(1, 2), "epoch": 1, "number": 1, "keep": 2, "keep_hash": 3, "append": (4,)}


@pytest.mark.parametrize("kind", [ProposeTask, VerifyTask])
@pytest.mark.parametrize("field", ["epoch", "number", "keep", "time_left_ms"])
@pytest.mark.parametrize("value", [-1, MAX_U32 + 1])
def test_numbers_outside_the_wire_name_their_field(kind: type[Task], field: str, value: int) -> None:
    """What the wire cannot carry is refused where it is made, not where the whole frame breaks on it."""
    with pytest.raises(InvalidArgument) as caught:
        kind(**PLACE | {field: value})

    assert field == caught.value.field


@pytest.mark.parametrize("value", [-1, MAX_U32 + 1])
def test_number_of_tokens_must_fit_the_wire(value: int) -> None:
    """As above, for what only a draft is asked."""
    with pytest.raises(InvalidArgument) as caught:
        ProposeTask(**PLACE, num_tokens=value)

    assert caught.value.field == "num_tokens"


@pytest.mark.parametrize("kind", [ProposeTask, VerifyTask])
@pytest.mark.parametrize(("keep", "opening"), [(0, None), (2, OPENING)])
def test_opening_goes_with_keep_zero(kind: type[Task], keep: int, opening: Opening | None) -> None:
    """A task that keeps nothing begins anew and needs the law; one that keeps something must not change it."""
    with pytest.raises(InvalidArgument, match="open"):
        kind(**PLACE | {"keep": keep, "opening": opening})


@pytest.mark.parametrize("kind", [ProposeTask, VerifyTask])
def test_base_is_keep_and_append(kind: type[Task]) -> None:
    """Length of the confirmed text once the task has begun."""

    assert kind(**PLACE | {"append": (7, 8, 9)}).base == 5


def test_prefill_judges_nothing() -> None:
    """A block in a task that samples nothing would never be judged."""
    with pytest.raises(InvalidArgument, match="block"):
        VerifyTask(**PLACE, block=Block((5,)), prefill_only=True)


def test_judging_needs_a_row() -> None:
    """The row of the last confirmed token judges the block's first: at least that one is sent."""
    with pytest.raises(InvalidArgument, match="append"):
        VerifyTask(**PLACE | {"append": ()})


def test_nothing_to_append_is_fine_for_a_prefill_and_a_draft() -> None:
    """Only a verdict needs a row."""
    tasks = [VerifyTask(**PLACE | {"append": ()}, prefill_only=True), ProposeTask(**PLACE | {"append": ()})]

    assert [task.base for task in tasks] == [2, 2]


def test_sessions_are_ordered_by_process_then_counter() -> None:
    """A restart of the coordinator makes other sessions of the same counters."""

    assert [SessionId(1, 1), SessionId(1, 2), SessionId(2, 1)] == sorted(
        [SessionId(2, 1), SessionId(1, 2), SessionId(1, 1)]
    )


@pytest.mark.parametrize("value", [VerifyTask(**PLACE), Answer(SessionId(1, 2), 1, 1, 3, Verdict(0, 1)), TaskTiming()])
def test_tasks_and_answers_never_change(value: Any) -> None:
    """A retry sends the very task that was sent."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)
