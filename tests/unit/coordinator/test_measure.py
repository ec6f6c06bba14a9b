"""Estimates from observations."""

from __future__ import annotations

import random

import pytest

from coordinator.measure import PRIOR, Acceptance, Average, ByLoad, ErrorByLoad, StepTimes


def test_profile_is_met_and_interpolated() -> None:
    """Measured row counts come back as they are, others lie between, later ones go on as steeply."""
    times = StepTimes()
    times.profile([100, 120, 160, 240, 400])

    assert [times.at(n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 32, 1024)] == pytest.approx(
        [100, 120, 140, 160, 200, 240, 320, 400, 720, 20_560]
    )


@pytest.mark.parametrize("profile", [(), (0,), (5, -1)])
def test_a_profile_that_says_nothing_changes_nothing(profile: tuple[int, ...]) -> None:
    """Absent or impossible measurements leave the guess."""
    times = StepTimes()
    times.profile(profile)

    assert (False, StepTimes().at(9)) == (times.known, times.at(9))


def test_first_observation_sets_the_scale() -> None:
    """Without a profile the first step says how fast the machine is."""
    times = StepTimes()
    times.observe(1, 40_000)

    assert pytest.approx(times.at(1)) == 40_000
    assert times.at(5) > times.at(1)


def test_a_wrong_profile_is_corrected_where_steps_are_seen() -> None:
    """Observed row counts become right; the others keep most of what was measured for them."""
    times = StepTimes()
    times.profile([37_000, 38_000, 40_000, 44_000])
    for _ in range(40):
        times.observe(5, 80_000)

    assert pytest.approx(times.at(5), rel=0.03) == 80_000
    assert times.at(1) < 42_000


def test_one_pause_does_not_overturn_the_table() -> None:
    """A step a hundred times too long moves its row count by less than half."""
    times = StepTimes()
    times.profile([37_000, 38_000, 40_000, 44_000])
    times.observe(1, 3_700_000)

    assert times.at(1) < 1.5 * 37_000


def test_table_never_falls_whatever_is_seen() -> None:
    """More rows never look cheaper, nor any step free."""
    rng = random.Random(1)
    times = StepTimes()
    for _ in range(500):
        times.observe(rng.randrange(-1, 700), rng.uniform(-10, 100_000))
        table = [times.at(n) for n in range(1, 800, 7)]

        assert table == sorted(table)
        assert table[0] > 0


def test_average_starts_at_its_first_value_and_follows() -> None:
    """No warm-up from a guess; single pauses count little; zero can be left."""
    average = Average(5_000.0)
    average.observe(100.0)
    first = average.value
    average.observe(1e9)
    after_pause = average.value
    for _ in range(60):
        average.observe(0.0)
    low = average.value
    for _ in range(60):
        average.observe(20_000.0)

    assert first == 100.0
    assert after_pause < 300.0
    assert low < 1.0
    assert average.value > 15_000.0


@pytest.mark.parametrize(("rounds", "expected"), [(0, 11.0), (20, 27.39), (1_000, 51.0)])
def test_what_was_measured_long_ago_gives_way_to_what_is_new(rounds: int, expected: float) -> None:
    """A draft measured under load would be shunned for its times of then."""
    average = Average()
    average.observe(1.0)
    average.idle(rounds)
    average.observe(101.0)

    assert average.value == pytest.approx(expected, abs=1e-2)


def test_positions_after_a_refusal_say_nothing() -> None:
    """a_i counts only where all before it were accepted."""
    acceptance = Acceptance(memory=1.0)
    acceptance.observe(4, 1)
    acceptance.observe(4, 4)
    acceptance.observe(2, 0)

    assert (acceptance.tries, acceptance.hits) == ([3.0, 2.0, 1.0, 1.0], [2.0, 1.0, 1.0, 1.0])


def test_curve_shrinks_toward_the_position_before() -> None:
    """A position seen once is expected to be like its neighbour, and one seen often is itself."""
    acceptance = Acceptance(memory=1.0)
    assert acceptance.curve() == []
    for _ in range(100):
        acceptance.observe(1, 1)
    acceptance.observe(2, 1)
    first, second = acceptance.curve()

    assert first > 0.95
    assert PRIOR < second < first
    for _ in range(100):
        acceptance.observe(2, 1)
    assert acceptance.curve()[1] < 0.1


def test_blocks_may_begin_at_positions_of_their_own() -> None:
    """What is past the last position counts as the last, and once for each block; nothing is known of those before the first."""
    acceptance = Acceptance(1.0, expected=(0.2, 0.4, 0.6, 0.8))
    acceptance.observe(3, 3, first=1)
    acceptance.observe(6, 2, first=2)
    acceptance.observe(5, 4, first=9)

    assert acceptance.tries == [0.0, 1.0, 2.0, 3.0]
    assert acceptance.hits == [0.0, 1.0, 2.0, 1.0 + 0.5 + 0.8]


def test_what_is_expected_holds_until_something_is_seen() -> None:
    """Of each position by itself."""
    acceptance = Acceptance(1.0, expected=(0.2, 0.4, 0.6))
    assert [0.2, 0.4, 0.6] == acceptance.curve()
    for _ in range(100):
        acceptance.observe(1, 0, first=1)

    low, seen, high = acceptance.curve()
    assert (0.2, 0.6) == (low, high)
    assert 0.02 < seen < 0.05


def test_old_evidence_fades_but_never_to_nothing() -> None:
    """After a long pause a few rounds can change the picture; without any, the picture stays."""
    acceptance = Acceptance(memory=0.995)
    for _ in range(200):
        acceptance.observe(1, 0)
    before = acceptance.curve()[0]
    acceptance.idle(10_000)

    assert acceptance.curve() == [before]
    for _ in range(6):
        acceptance.observe(1, 1)
    assert acceptance.tries[0] < 12
    assert acceptance.curve()[0] > 0.5


def test_loads_are_told_apart_by_powers_of_two() -> None:
    """1, 2, 3-4, 5-8; one that was never seen is like the nearest that was."""
    links = ByLoad(1.0)
    assert (links.at(1), links.known) == (1.0, False)
    links.observe(1, 100.0)
    links.observe(5, 900.0, 900.0)

    assert [links.at(n) for n in (1, 2, 3, 5, 8, 9, 300, 5000)] == [100, 100, 900, 900, 900, 900, 900, 900]
    assert [links.knows(n) for n in (1, 2, 4, 8, 9)] == [True, False, False, True, False]


@pytest.mark.parametrize(("expected", "found"), [(None, 4 * 100.0 + 1000.0), (500.0, 4 * 500.0 + 1000.0), (1e9, 1e6)])
def test_the_first_at_a_load_may_be_a_pause(expected: float | None, found: float) -> None:
    """It moves what was thought no further than a later one could."""
    links = ByLoad()
    links.observe(1, 100.0)
    links.observe(8, 1e6, expected)

    assert links.at(8) == found


def test_an_average_of_long_ago_follows_quickly_at_its_own_load_alone() -> None:
    """What was not seen for hundreds of rounds says little of now."""
    links = ByLoad()
    for sessions in (1, 8):
        links.observe(sessions, 100.0, 100.0)
    links.idle(8, 1000)
    for sessions in (1, 8):
        links.observe(sessions, 200.0)

    assert [links.at(1), links.at(8)] == pytest.approx([110.0, 150.0], rel=0.01)


def test_an_error_is_that_of_the_formula_until_it_is_seen() -> None:
    """Sixteen observations weigh as much as the formula; a few say nothing to other loads."""
    errors = ErrorByLoad()
    assert [1.0, 1.0] == [errors.at(1), errors.at(300)]
    for _ in range(3):
        errors.observe(8, 2.0)

    assert 1.0 < errors.at(8) < 1.2
    assert errors.at(8) == errors.at(5) != errors.at(4) == 1.0
    for _ in range(500):
        errors.observe(8, 2.0)
    assert errors.at(4) == errors.at(8) == pytest.approx(2.0, abs=0.1)


def test_an_error_fades_while_nothing_is_seen() -> None:
    """Half of its weight is gone after 1400 rounds."""
    errors = ErrorByLoad()
    for _ in range(1000):
        errors.observe(2, 1.5)
    before = errors.at(2)
    errors.idle(1386)
    half = errors.at(2)
    errors.idle(100_000)

    assert pytest.approx((1.5 * 100 + 16) / 116, abs=0.01) == half
    assert before > half > errors.at(2) == pytest.approx(1.0)
