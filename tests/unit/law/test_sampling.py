"""One row to one law, one law to one token."""

from __future__ import annotations

import numpy as np
import pytest

from specwire.law.errors import BadLaw
from specwire.law.noise import gumbel, noise_bits, row_key
from specwire.law.sampling import choose, cut_to_sparse, law_of, sample, sample_sparse, shared_noise_choice
from specwire.law.values import GREEDY, SamplingSpec, SparseLaw

NAN, INF = float("nan"), float("inf")


def row(*probabilities: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities))


def kept(law: np.ndarray) -> list[int]:
    return np.flatnonzero(law).tolist()


def test_plain_law_is_softmax():
    """No filter, temperature one."""
    assert law_of(row(0.4, 0.3, 0.2, 0.1), SamplingSpec()) == pytest.approx([0.4, 0.3, 0.2, 0.1], abs=1e-15)


def test_temperature_divides_scores():
    """Half the temperature squares the odds."""
    assert law_of(row(0.75, 0.25), SamplingSpec(temperature=0.5)) == pytest.approx([0.9, 0.1], abs=1e-15)


def test_float32_rows_are_read_in_double_precision():
    """The law of a float32 row is that of the same numbers as doubles."""
    scores = np.array([0.1, 0.7, -3.3], dtype=np.float32)

    assert law_of(scores, SamplingSpec()).tolist() == law_of(scores.astype(np.float64), SamplingSpec()).tolist()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SamplingSpec(top_k=2), [0, 1]),
        (SamplingSpec(top_k=9), [0, 1, 2, 3]),
        (SamplingSpec(top_p=0.5), [0, 1]),
        (SamplingSpec(top_p=0.39), [0]),
        (SamplingSpec(top_p=0.91), [0, 1, 2, 3]),
        (SamplingSpec(min_p=0.45), [0, 1, 2]),
        (SamplingSpec(min_p=1.0), [0]),
        (SamplingSpec(top_k=3, top_p=0.7), [0, 1]),  # of the 0.9 that top-k left, 0.63
        (SamplingSpec(top_k=3, top_p=0.79), [0, 1, 2]),  # two have 7/9 of what is left; of the whole row 0.7
        (SamplingSpec(temperature=2.0, top_p=0.6), [0, 1]),
        (GREEDY, [0]),
    ],
)
def test_filters_keep(spec, expected):
    """Temperature, top-k, top-p of what is left, min-p against the best; the rest is exactly zero."""
    law = law_of(row(0.4, 0.3, 0.2, 0.1), spec)

    assert kept(law) == expected
    assert law.sum() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("spec", [SamplingSpec(top_k=2), SamplingSpec(top_p=0.4)])
def test_ties_go_to_the_lower_id(spec):
    """Where equal scores straddle a filter's edge, lower ids stay."""
    assert kept(law_of(np.array([0.0, 1.0, 0.0, 1.0, 1.0, 1.0]), spec)) == [1, 3]


def test_greedy_tie_goes_to_the_lower_id():
    """Greedy is a point mass on the first of the best."""
    assert law_of(np.array([1.0, 2.0, 2.0]), GREEDY).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "spec", [SamplingSpec(), SamplingSpec(top_k=3), SamplingSpec(top_p=0.9999), SamplingSpec(min_p=0.01)]
)
def test_forbidden_tokens_stay_forbidden(spec):
    """Minus infinity survives no filter."""
    assert kept(law_of(np.array([-INF, 1.0, -INF, 0.0]), spec)) == [1, 3]


@pytest.mark.parametrize("scores", [[0.0, NAN], [INF, 0.0], [-INF, -INF], [], [NAN, INF]])
@pytest.mark.parametrize("spec", [SamplingSpec(), GREEDY, SamplingSpec(top_k=1)])
def test_a_row_that_is_no_law_is_refused(scores, spec):
    """Not a number, plus infinity or empty: an error, never a token."""
    with pytest.raises(BadLaw):
        law_of(np.array(scores), spec)
    with pytest.raises(BadLaw):
        choose(np.array(scores), spec, np.zeros(len(scores)))


def test_overflowing_temperature_is_refused():
    """Scores that overflow when divided are no law either."""
    with pytest.raises(BadLaw):
        law_of(np.array([1e300, 0.0]), SamplingSpec(temperature=1e-20))


def test_choice_is_the_noisy_best():
    """Argmax of log probability plus noise."""
    assert choose(row(0.5, 0.3, 0.2), SamplingSpec(), np.array([0.0, 0.6, 0.0])) == 1


def test_a_single_survivor_wins_whatever_its_noise():
    """Exclusion is by mask after the noise."""
    assert choose(np.array([-INF, 0.0, -INF]), SamplingSpec(), np.array([22.0, -2.8, 22.0])) == 1


def test_greedy_choice_ignores_noise():
    """Temperature zero makes no draw."""
    assert choose(row(0.6, 0.4), GREEDY, np.array([-2.0, 20.0])) == 0


def test_noise_of_a_reduced_vocabulary_is_that_of_its_target_ids():
    """A draft that lacks some tokens sees the others with the target's noise, so equal scores give equal choices."""
    scores = np.random.default_rng(0).normal(0, 1, 50)
    columns = np.arange(0, 50, 2, dtype=np.int64)
    without = np.where(np.arange(50) % 2 == 0, scores, -INF)
    spec = SamplingSpec(temperature=0.8, top_k=10)

    reduced = [shared_noise_choice(scores[columns], spec, 3, 0, p, columns) for p in range(40)]

    assert reduced == [shared_noise_choice(without, spec, 3, 0, p) for p in range(40)]


def test_shared_noise_choice_spells_out():
    """Row key, bits, noise, race."""
    scores = row(0.5, 0.2, 0.2, 0.1)
    noise = gumbel(noise_bits(row_key(11, 2, 9), range(4)))

    assert shared_noise_choice(scores, SamplingSpec(), 11, 2, 9) == int(np.argmax(scores + noise))


@pytest.mark.parametrize(("uniform", "token"), [(1e-16, 1), (0.2499, 1), (0.2501, 3), (1 - 2**-52, 3)])
def test_sample_never_takes_a_token_of_probability_zero(uniform, token):
    """Inverse of the cumulated law, at its edges too."""
    assert sample(np.array([0.0, 0.25, 0.0, 0.75, 0.0]), uniform) == token


def test_cut_keeps_the_best_and_renormalises():
    """The cut law is a law of its own, best first."""
    assert cut_to_sparse(np.array([0.1, 0.3, 0.0, 0.6]), 2) == SparseLaw((3, 1), (699051, 349525))


def test_cut_breaks_ties_to_the_lower_id_and_maps_columns():
    """Equal probabilities at the edge: the lower column stays; ids are the target's."""
    columns = np.array([10, 20, 30, 40], dtype=np.int64)

    assert cut_to_sparse(np.array([0.2, 0.4, 0.2, 0.2]), 2, columns).ids == (20, 10)


def test_cut_leaves_out_what_rounds_to_nothing():
    """A weight is a positive integer; a probability of 1e-9 has none."""
    assert cut_to_sparse(np.array([1.0 - 1e-9, 1e-9]), 2) == SparseLaw((0,), (2**20,))


def test_sample_sparse_inverts_the_integer_weights():
    """Four equal slices of (0, 1): one for 5, three for 2."""
    law = SparseLaw((5, 2), (1, 3))

    assert [sample_sparse(law, u) for u in (2**-52, 0.2499, 0.25, 0.75, 1 - 2**-52)] == [5, 5, 2, 2, 2]
