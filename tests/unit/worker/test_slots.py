"""Cache slots by the rules in which they are given, and against a dumb cache that knows what each really holds."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specwire.law.cursor import common
from specwire.worker.slots import LEAST_COPIED, Grant, Slots

Text = tuple[int, ...]
A = tuple(range(100, 100 + LEAST_COPIED))
"""A beginning that is just worth a copy."""
B = tuple(range(200, 200 + LEAST_COPIED))
C = tuple(range(300, 300 + LEAST_COPIED))
LONG = (7,) * (LEAST_COPIED + 1)
"""So much that to overwrite it is to lose more than half, where it stands behind A."""


def remembering(*texts: Text, remember: bool = True) -> Slots:
    """Slots that hold these texts and are free since then, the first for longest."""
    slots = Slots(len(texts), remember=remember)
    for _ in texts:
        slots.acquire((), {})
    for slot, tokens in enumerate(texts):
        slots.release(slot, tokens)
    return slots


# ---------------------------------------------------------------- a beginning that lies in a free slot


@pytest.mark.parametrize("found", [1, LEAST_COPIED])
def test_the_free_slot_with_the_best_beginning_is_taken_over(found: int) -> None:
    """However short that is: nothing is copied. What the text parts from is cut off: nobody may have judged it."""
    slots = remembering(B, (*A[:found], 5), A[: found - 1])

    assert Grant(1, A[:found]) == slots.acquire((*A[:found], 6), {})


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        (LONG[:-1], Grant(0, A)),
        (LONG, Grant(1, A, 0)),
    ],
    ids=["half", "more than half"],
)
def test_a_text_is_left_alone_where_more_than_half_of_it_would_go(behind: Text, expected: Grant) -> None:
    """A long conversation is worth more than the copy that a short one with the same beginning costs."""
    slots = remembering((*A, *behind), B)

    assert expected == slots.acquire((*A, 1), {})


def test_the_only_free_slot_is_taken_over_whatever_goes() -> None:
    """It is overwritten in any case; what it has in common with the text need not be read."""
    slots = remembering((*A, *LONG, *LONG))

    assert Grant(0, A[:3]) == slots.acquire((*A[:3], 1), {})


def test_of_slots_that_begin_alike_the_one_that_loses_least_is_taken_over() -> None:
    """One of them holds the beginning and little more: a copy over a third text would lose that one for nothing."""
    slots = remembering((*A, *LONG), B, (*A, 5))

    assert Grant(2, A) == slots.acquire((*A, 1), {})


# ---------------------------------------------------------------- a beginning that is copied


def test_the_lowest_empty_slot_goes_first() -> None:
    """Busy slots stay next to each other, whatever the order in which they became free."""
    slots = Slots(4, remember=True)
    given = [slots.acquire(text, {}) for text in (A, B, C, A)]
    for slot, tokens in ((3, ()), (0, B), (2, ()), (1, ())):
        slots.release(slot, tokens)

    assert [Grant(0), Grant(1), Grant(2), Grant(3)] == given
    assert [Grant(1), Grant(2), Grant(3)] == [slots.acquire(A, {}) for _ in range(3)]


def test_else_the_one_that_was_free_for_longest() -> None:
    """Nothing is known of the text: what was left first is forgotten first."""
    slots = Slots(3, remember=True)
    for _ in range(3):
        slots.acquire((), {})
    for slot, tokens in ((2, A), (0, B), (1, C)):
        slots.release(slot, tokens)

    assert [2, 0, 1] == [grant and grant.slot for grant in (slots.acquire((9,), {}) for _ in range(3))]


def test_the_slot_that_is_copied_from_is_not_the_one_that_is_given() -> None:
    """Though it was free for longest."""
    slots = remembering((*A, *LONG), B, C)

    assert Grant(1, A, 0) == slots.acquire((*A, 1), {})
    assert Grant(2, A, 0) == slots.acquire((*A, 2), {})


def test_a_beginning_is_copied_from_a_busy_slot() -> None:
    """Two requests with one prompt at a time: the second need not wait for the end of the first."""
    slots = Slots(3, remember=True)
    first = slots.acquire(A, {})

    assert Grant(0) == first
    assert Grant(1, A, 0) == slots.acquire((*A, 3), {0: (*A, 1, 2)})


def test_of_a_text_that_goes_on_more_may_be_wanted_than_has_come() -> None:
    """Its first piece is all there: what follows is kept, or copied too, up to the length it will have; nobody asks again."""
    slots, whole = remembering((*A, *LONG), B, C, B), (*A, *LONG)

    assert Grant(0, whole) == slots.acquire(A, {}, length=len(whole) + 9)
    assert Grant(1, whole, 0) == slots.acquire(A, {0: whole}, length=len(whole) + 9)
    assert Grant(2, whole[:-1], 0) == slots.acquire(A, {0: whole}, length=len(whole) - 1)
    assert Grant(3, A, 0) == slots.acquire((*A, 1), {0: whole}, length=len(whole) + 9)


def test_a_short_text_leaves_the_long_one_alone_that_it_begins() -> None:
    """All of it is there, and no more will come: the conversation behind it stays where it is."""
    slots = remembering((*A, *LONG), ())

    assert Grant(1, A, 0) == slots.acquire(A, {}, length=len(A))


def test_a_text_of_nothing_finds_nothing() -> None:
    """Not sent by anybody, but it can be."""
    assert Grant(1) == remembering(A, ()).acquire((), {})


def test_the_longest_beginning_is_copied_busy_or_free() -> None:
    """The busy one holds more of it here, and the free one is too good to be overwritten with that."""
    slots = Slots(3, remember=True)
    for _ in range(2):
        slots.acquire((), {})
    slots.release(1, (*A, *LONG))

    assert Grant(2, (*A, 1), 0) == slots.acquire((*A, 1, 2), {0: (*A, 1, 1)})


@pytest.mark.parametrize(
    ("length", "expected"),
    [(LEAST_COPIED - 1, Grant(1)), (LEAST_COPIED, Grant(1, A, 0))],
)
def test_a_few_tokens_are_not_worth_a_copy(length: int, expected: Grant) -> None:
    """They are read within a step that is made anyway."""
    slots = Slots(2, remember=True)
    slots.acquire((), {})

    assert expected == slots.acquire((*A[:length], 1), {0: (*A[:length], 2)})


# ---------------------------------------------------------------- whatever the text


def test_who_remembers_nothing_finds_nothing() -> None:
    """Neither what was left nor what is there; the lowest free slot goes first."""
    slots = remembering(B, A, remember=False)

    assert "Slots(held=0 free=2 remembered=0)" == repr(slots)
    assert Grant(0) == slots.acquire(A, {})
    assert Grant(1) == slots.acquire(A, {0: A})


def test_what_was_taken_over_is_not_found_again() -> None:
    """It is known to whoever holds the slot, and to nobody else until he says."""
    slots = remembering(A, B)

    assert Grant(0, A) == slots.acquire(A, {})
    assert Grant(1) == slots.acquire(A, {})
    assert slots.acquire(A, {}) is None


@pytest.mark.parametrize("slot", [-1, 0, 2])
def test_only_a_held_slot_can_be_given_back(slot: int) -> None:
    """A slot freed twice would serve two texts. What is known of free ones stays."""
    slots = remembering(A, B)
    slots.acquire(B, {})
    with pytest.raises(ValueError, match=f"slot {slot} is not held"):
        slots.release(slot, C)

    slots.check([1])
    assert Grant(0, A) == slots.acquire(A, {})


@pytest.mark.parametrize("held", [[], [0, 0], [0, 1], [2]])
def test_the_check_notices_slots_that_are_held_twice_or_not_at_all(held: list[int]) -> None:
    slots = Slots(2, remember=True)
    slots.acquire((), {})
    with pytest.raises(AssertionError):
        slots.check(held)


def test_repr_tells_the_story() -> None:
    """What people read in a log."""
    slots = remembering(A, (1, 2, 3), ())
    slots.acquire(A, {})

    assert "Slots(held=1 free=2 remembered=3)" == repr(slots)


# ---------------------------------------------------------------- against a dumb one


class Cache(RuleBasedStateMachine):
    """A cache that holds real tokens: three slots, texts of few tokens, a copy worth while from two on."""

    texts = st.lists(st.integers(0, 1), max_size=9).map(tuple)

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(3, remember=True)
        self.cells: list[Text] = [()] * 3
        self.held: list[int] = []
        self.freed: list[int] = [0, 1, 2]  # oldest first

    @rule(text=texts)
    def acquire(self, text: Text) -> None:
        """What is granted is there once the copy is made, and worth it; who is read from is not overwritten."""
        with mock.patch("specwire.worker.slots.LEAST_COPIED", 2):
            grant = self.slots.acquire(text, {slot: self.cells[slot] for slot in self.held})
        if not self.freed:
            assert grant is None
            return
        assert grant is not None
        assert grant.slot in self.freed
        before = self.cells[grant.slot]
        if grant.source is not None:
            assert grant.source != grant.slot
            assert len(grant.found) >= 2
            assert grant.found == text[: len(grant.found)]
            self.cells[grant.slot] = self.cells[grant.source][: len(grant.found)]
        self.cells[grant.slot] = self.cells[grant.slot][: len(grant.found)]  # what is not found is cut off
        assert grant.found == self.cells[grant.slot]
        assert grant.found == text[: len(grant.found)]
        if not grant.found:
            assert common(before, text) == 0 or len(self.freed) > 1
        self.freed.remove(grant.slot)
        self.held.append(grant.slot)
        same = common(grant.found, text)
        self.cells[grant.slot] = self.cells[grant.slot][:same] + text[same:]  # what is found is not written

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=texts, keep=st.integers(0, 9))
    def goes_on(self, data: st.DataObject, more: Text, keep: int) -> None:
        """A text is cut and extended while its slot is held."""
        slot = data.draw(st.sampled_from(self.held))
        self.cells[slot] = self.cells[slot][:keep] + more

    @precondition(lambda self: self.held)
    @rule(data=st.data(), failed=st.booleans())
    def release(self, data: st.DataObject, failed: bool) -> None:
        slot = data.draw(st.sampled_from(self.held))
        self.held.remove(slot)
        self.freed.append(slot)
        if failed:
            self.cells[slot] = ()
        self.slots.release(slot, self.cells[slot])

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def release_twice(self, data: st.DataObject) -> None:
        with pytest.raises(ValueError, match="is not held"):
            self.slots.release(data.draw(st.sampled_from(self.freed)), (1, 1, 1))

    @invariant()
    def every_slot_is_held_or_free(self) -> None:
        self.slots.check(self.held)
        remembered = sum(len(self.cells[slot]) for slot in self.freed)
        assert f"Slots(held={len(self.held)} free={len(self.freed)} remembered={remembered})" == repr(self.slots)


Cache.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestAgainstTheDumbOne = Cache.TestCase


few = st.lists(st.integers(0, 1), max_size=12).map(tuple)


@given(few, few, few)
def test_common_is_what_a_loop_counts(beginning: Text, one: Text, other: Text) -> None:
    """Of texts that begin alike for a while, one within the other too."""
    one, other = beginning + one, beginning + other
    expected = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))

    assert expected == common(one, other) == common(other, one)
