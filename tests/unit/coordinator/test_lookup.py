"""Guesses from the text itself."""

from __future__ import annotations

import random

import pytest

from coordinator.lookup import NgramGuess, NgramLookup, Trust


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

    assert NgramGuess((7, 8, 9, 7, 8, 9, 7, 8), 4) == lookup.propose(8)


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


def test_trust_starts_modest_and_follows_the_evidence() -> None:
    """Longer matches are trusted more; a dozen rounds turn trust either way."""
    trust = Trust()
    fresh = [trust.of(n) for n in (2, 3, 4)]

    assert fresh == sorted(fresh)
    for _ in range(12):
        trust.observe(3, accepted=0)
        trust.observe(4, accepted=5)
    assert trust.of(3) < 0.15
    assert trust.of(4) > 0.9
    for _ in range(12):
        trust.observe(3, accepted=1)
    assert trust.of(3) > 0.55
