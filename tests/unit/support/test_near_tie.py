"""The rule that tells near-ties from bugs: what it lets pass is what rounding can do, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from specwire.law.noise import Floats, gumbel, noise_bits, row_key
from specwire.law.sampling import choose
from specwire.law.values import GREEDY, SamplingSpec
from tests.support.near_tie import Tally, may_win, part

SPECS = [
    GREEDY,
    SamplingSpec(temperature=1.0),
    SamplingSpec(temperature=0.5, top_k=4),
    SamplingSpec(temperature=0.8, top_p=0.7),
    SamplingSpec(temperature=1.3, min_p=0.2),
    SamplingSpec(temperature=1.1, top_k=6, top_p=0.8, min_p=0.1),
    SamplingSpec(temperature=1.0, min_p=1.0),
]
VOCAB = 12


def noise_of(seed: int, position: int, vocab: int = VOCAB) -> Floats:
    return gumbel(noise_bits(row_key(seed, 0, position), range(vocab)))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("difference", [1e-3, 0.1])
def test_whatever_a_disturbed_row_chooses_may_win(spec: SamplingSpec, difference: float) -> None:
    """No rounding within the difference is ever called a bug. Rows with ties and edges included."""
    rng = np.random.default_rng(1)
    for case in range(30):
        row = rng.normal(size=VOCAB) if case % 2 else rng.integers(-3, 3, size=VOCAB) * 2 * difference
        row[rng.integers(VOCAB)] = -np.inf
        noise = noise_of(case, 0)
        winners = may_win(row, spec, noise, difference)
        for _ in range(20):
            disturbed = row + difference * (rng.choice([-1.0, 1.0], VOCAB) if case % 3 else rng.uniform(-1, 1, VOCAB))

            assert winners[choose(disturbed, spec, noise)]


@pytest.mark.parametrize("spec", SPECS[:-1], ids=str)
def test_small_differences_excuse_one_token_nearly_always(spec: SamplingSpec) -> None:
    """With the rounding of float32 the winner is settled: a second candidate needs a coincidence."""
    rng = np.random.default_rng(2)
    rows = [rng.normal(size=VOCAB) for _ in range(300)]

    counts = [int(may_win(row, spec, noise_of(7, i), 1e-5).sum()) for i, row in enumerate(rows)]

    assert min(counts) == 1
    assert sum(count > 1 for count in counts) <= 3


def test_the_winner_without_any_difference_is_the_law_s() -> None:
    """Equal rows leave no excuse: of two equal scores only the lower id may win."""
    row = np.array([0.0, 2.0, 2.0])

    assert [False, True, False] == may_win(row, GREEDY, np.zeros(3), 0.0).tolist()
    assert [False, True, True] == may_win(row, GREEDY, np.zeros(3), 1e-9).tolist()


def test_noise_decides_between_sampled_tokens() -> None:
    """Two equal scores are no tie when their noise is far apart, and unequal ones are when it makes up for it."""
    spec = SamplingSpec(temperature=2.0)

    assert [True, False] == may_win(np.array([1.0, 1.0]), spec, np.array([1.0, 0.0]), 1e-4).tolist()
    assert [True, True] == may_win(np.array([1.0, 3.0]), spec, np.array([1.0, 0.0]), 1e-4).tolist()


@pytest.mark.parametrize(
    ("spec", "row"),
    [
        (SamplingSpec(top_k=2), [3.0, 1.0, 1.00001]),
        (SamplingSpec(top_p=0.6), np.log([0.6 + 1e-6, 0.3, 0.1 - 1e-6])),
        (SamplingSpec(min_p=0.5), np.log([0.5, 0.25 - 1e-6, 0.25 + 1e-6])),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_a_filter_s_edge_is_a_near_tie(spec: SamplingSpec, row: list[float]) -> None:
    """A token whose noise would win, and whom a filter keeps or drops by rounding, may win; and so may the runner-up."""
    row = np.array(row)
    noise = np.array([0.0, 20.0, 0.0])

    assert [True, True, False] == may_win(row, spec, noise, 1e-4).tolist()
    assert [True, False, False] == may_win(row, spec, noise, 1e-9).tolist()


class Rows:
    """A model whose rows are given by position, and whose rounding is known."""

    def __init__(self, rows: list[list[float]], difference: float) -> None:
        self.rows = [np.array(row) for row in rows]
        self.difference = difference
        self.asked: list[list[int]] = []

    def __call__(self, tokens: list[int]) -> tuple[Floats, float]:
        self.asked.append(list(tokens))
        return self.rows[len(tokens) - 1], self.difference


CLOSE = Rows([[0, 5, 1], [0, 1, 5], [3.0, 3.0001, 0]], 1e-3)


def test_equal_sequences_are_not_rescored() -> None:
    """Nothing is computed for what agrees."""
    rows = Rows([], 0.0)

    assert part([1], [1, 2], [1, 2], rows) is None
    assert [] == rows.asked


def test_a_tie_at_the_first_difference_passes_and_the_rest_is_left_alone() -> None:
    """The row is that of the common prefix; what follows may differ at will."""
    found = part([1], [1, 2, 0, 1, 1], [1, 2, 1, 0, 0], CLOSE)

    assert found is not None
    assert (2, (0, 1), True) == (found.index, found.tokens, found.near_tie)
    assert [1, 1, 2] == CLOSE.asked[-1]
    assert 1e-4 == pytest.approx(found.gap)


@pytest.mark.parametrize(
    ("actual", "why"),
    [
        ([1, 1, 0], "the other token is far behind"),
        ([1, 2, 2], "a tie of two others is no excuse for a third"),
        ([1, 2], "ends too soon"),
        ([1, 2, 0, 0], "does not end"),
    ],
)
def test_bugs_are_told_from_near_ties(actual: list[int], why: str) -> None:
    """Each of these fails at once."""
    tally = Tally(CLOSE)

    with pytest.raises(AssertionError, match="not a near-tie"):
        tally.compare([1], [1, 2, 0], actual)


def test_sampled_sequences_are_rescored_with_their_noise() -> None:
    """At temperature 1 the tie must lie where the noise of this seed and position puts it."""
    spec = SamplingSpec(temperature=1.0)
    noise = noise_of(99, 3, 3)
    level = Rows([[0, 0, 0], [0, 0, 0], (-noise).tolist()], 1e-3)

    assert part([1, 1], [0, 1], [0, 2], level, spec, seed=99).near_tie
    assert not part([1, 1], [0, 1], [0, 2], level, spec, seed=98).near_tie


def test_near_ties_are_counted_and_limited() -> None:
    """One is always allowed, more only among enough sequences."""
    tally = Tally(CLOSE, "test")
    for _ in range(38):
        tally.compare([1], [1, 2], [1, 2])
    tally.compare([1], [1, 2, 0], [1, 2, 1])
    tally.compare([1], [1, 2, 1], [1, 2, 0])
    tally.settle()

    assert "test: 2 near-ties in 40 sequences" in tally.report()

    tally.compare([1], [1, 2, 1], [1, 2, 0])
    with pytest.raises(AssertionError, match="3 near-ties in 41"):
        tally.settle()
