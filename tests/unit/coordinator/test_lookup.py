"""Guesses from the text itself."""

from __future__ import annotations

import random

import pytest

from coordinator.lookup import EXPECTED, NgramGuess, NgramLookup


def test_longest_match_wins() -> None:
    """Four tokens that stood before beat three or two that stood later."""
    lookup = NgramLookup([1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 9, 3, 4, 70, 1, 2, 3, 4])

    assert NgramGuess((50, 9), 4) == lookup.propose(2)


def test_latest_place_wins_among_equals() -> None:
    """What followed last is more likely to follow again."""
    lookup = NgramLookup([1, 2, 50, 1, 2, 60, 1, 2])

    assert NgramGuess((60,), 2) == lookup.propose(1)


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3, 4, 5], [1, 2, 1]])
def test_no_match_no_guess(text: list[int]) -> None:
    """A tail that never stood before guesses nothing."""
    assert NgramLookup(text).propose(4) is None


def test_a_guess_goes_on_past_the_end_of_the_text() -> None:
    """A text of period 3 is guessed to go on with period 3."""
    lookup = NgramLookup([7, 8, 9] * 3)

    assert NgramGuess((7, 8, 9, 7, 8, 9, 7, 8), 6) == lookup.propose(8)


def test_nothing_is_guessed_where_nothing_fits() -> None:
    """Zero tokens are no guess."""
    assert NgramLookup([1, 1, 1]).propose(0) is None


def test_match_lengths_are_a_choice() -> None:
    """Single tokens can be made to count."""
    assert NgramGuess((2,), 1) == NgramLookup([1, 2, 3, 1], min_match=1, max_match=1).propose(1)
    with pytest.raises(ValueError, match="match lengths 3 to 2"):
        NgramLookup(min_match=3, max_match=2)


def test_growing_is_the_same_as_starting_over() -> None:
    """An index that grew by any steps guesses like one built at once, and proposing changes nothing."""
    rng = random.Random(5)
    text = [rng.randrange(5) for _ in range(300)]
    grown = NgramLookup()
    start = 0
    while start < len(text):
        step = rng.randrange(1, 7)
        grown.extend(text[start : start + step])
        start += step
        built = NgramLookup(text[:start])

        assert built.propose(6) == grown.propose(6) == grown.propose(6)
    assert len(grown) == 300


@pytest.mark.parametrize(("same", "expected"), [(4, 4), (5, 5), (9, 9), (16, 16), (40, 16)])
def test_a_match_is_as_long_as_it_is(same: int, expected: int) -> None:
    """Past the tokens that are looked up, as far as lengths are told apart."""
    run = list(range(100, 100 + same))

    found = NgramLookup([1, *run, 50, 2, *run]).propose(1)

    assert NgramGuess((50,), expected) == found
    assert expected <= len(EXPECTED)


def test_a_match_begins_within_the_text() -> None:
    """Nothing stands before the first token."""
    assert NgramGuess((9,), 5) == NgramLookup([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5]).propose(1)


def test_longer_matches_are_expected_to_be_better() -> None:
    """And none is certain."""
    assert sorted(set(EXPECTED)) == list(EXPECTED)
    assert 0.0 < EXPECTED[0] < EXPECTED[-1] < 1.0
