"""From one row of scores to one law, and from a law to a token. This is the reference; faster code must agree with it.

Law. A row becomes a law in a fixed order:

    (penalties and bias change the row before it comes here) -> temperature -> top-k -> top-p -> min-p

Survivors of the filters are always the first n tokens in rank order: higher score first, ties to the lower id, implemented
here and nowhere hoped for. top-p counts shares of what top-k left; min-p compares with the best token, so it needs no total.
Temperature zero is a point mass on the first token in rank order. A row with not-a-number, plus infinity or
nothing but minus infinity is no law: `BadLaw`, never an invented token. Minus infinity alone forbids one token.

Vocabulary: `row` and `law` are indexed by column; column = token id unless `columns` (ascending ids) says otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specwire.law.errors import BadLaw
from specwire.law.noise import Floats, Ids, gumbel, noise_bits, row_key
from specwire.law.values import SamplingSpec, SparseLaw

Row = npt.NDArray[Any]
"""float32 or float64, [vocab]."""

SPARSE_SCALE = 2**20
"""Weights of a cut law add up to about this: three bytes each on the wire, 1e-6 of resolution."""


def check_best(best: float) -> None:
    """Refuses a row by its largest score, which is nan if any score is."""
    if not np.isfinite(best):
        raise BadLaw(f"row of scores has {best} as its best: not a number, infinite or empty")


def scaled_scores(row: Row, spec: SamplingSpec) -> Floats:
    """Scores over temperature, in double precision, nothing filtered. [vocab] -> [vocab]."""
    assert row.ndim == 1
    check_best(float(row.max()) if row.size else -np.inf)
    with np.errstate(over="ignore"):
        scaled: Floats = row.astype(np.float64) / (spec.temperature or 1.0)
    check_best(float(scaled.max()))  # a tiny temperature can overflow
    return scaled


def best_index(values: Row) -> int:
    """The first of the largest. [n] -> index."""
    return int(np.flatnonzero(values == values.max())[0])


def rank(scaled: Floats) -> Ids:
    """All columns that are not forbidden, best first, ties to the lower id. [vocab] -> [n]."""
    order = np.argsort(-scaled, kind="stable")  # stable: equal scores stay in column order
    return order[: np.count_nonzero(scaled > -np.inf)].astype(np.int64)


def mass(scaled: Floats, best: float) -> float:
    """What the weights exp(scaled - best) of a whole row add up to, in column order."""
    return float(np.exp(scaled - best).sum())


def prefix_length(ranked: Floats, spec: SamplingSpec, total: float) -> int:
    """How many of the best tokens the filters keep; at least 1. [n] scaled scores, best first.

    `total` is the row's mass and counts only when top-k does not cut."""
    n = len(ranked)
    if 0 < spec.top_k < n:
        n = spec.top_k
    weights = np.exp(ranked[:n] - ranked[0])
    if spec.top_p < 1.0:
        reached = np.cumsum(weights)
        share = spec.top_p * (total if n != spec.top_k else float(reached[-1]))
        n = 1 + int(np.count_nonzero(reached[:-1] < share))
    if spec.min_p > 0.0:
        n = int(np.count_nonzero(weights[:n] >= spec.min_p))
    return n


def survivors(scaled: Floats, spec: SamplingSpec) -> Ids:
    """Columns that may be sampled. [vocab] -> [n]: in rank order when filtered or greedy, in column order when not."""
    if spec.greedy:
        return np.array([best_index(scaled)], dtype=np.int64)
    if not spec.filtered:
        return np.flatnonzero(scaled > -np.inf).astype(np.int64)
    order = rank(scaled)
    ranked = scaled[order]
    return order[: prefix_length(ranked, spec, mass(scaled, ranked[0]))]


def spread(kept: Ids, scaled: Floats, vocab: int) -> Floats:
    """The law of the kept columns with these scaled scores; exact zeros elsewhere. [n], [n] -> [vocab]."""
    assert kept.shape == scaled.shape
    weights = np.exp(scaled - scaled.max())
    law = np.zeros(vocab)
    law[kept] = weights / weights.sum()
    return law


def law_of(row: Row, spec: SamplingSpec) -> Floats:
    """The law of one row. [vocab] -> [vocab], sums to 1."""
    scaled = scaled_scores(row, spec)
    kept = survivors(scaled, spec)
    return spread(kept, scaled[kept], len(row))


def choose(row: Row, spec: SamplingSpec, noise: Floats) -> int:
    """The column that wins the race: argmax of log probability plus noise. [vocab], [vocab] -> column.

    The law's normaliser is the same for all and is left out. Columns that did not survive are excluded by mask after
    the noise, so a single survivor wins whatever its noise. Greedy: the noise has no say."""
    assert row.shape == noise.shape
    scaled = scaled_scores(row, spec)
    race = np.full(len(row), -np.inf)
    kept = survivors(scaled, spec)
    race[kept] = scaled[kept] + noise[kept]
    return best_index(race)


def shared_noise_choice(
    row: Row, spec: SamplingSpec, seed: int, choice: int, position: int, columns: Ids | None = None
) -> int:
    """The token id that anyone with this row chooses at this position. [vocab] -> id."""
    ids: Ids | range = range(len(row)) if columns is None else columns
    column = choose(row, spec, gumbel(noise_bits(row_key(seed, choice, position), ids)))
    return int(ids[column])


def sample(law: Floats, uniform: float) -> int:
    """The column where the cumulated law passes `uniform`. [vocab] -> column; never one of probability zero."""
    reached = np.cumsum(law)
    assert 0.0 < uniform * reached[-1] < reached[-1]
    return int(np.searchsorted(reached, uniform * reached[-1], side="right"))


def cut_to_sparse(law: Floats, m: int, columns: Ids | None = None) -> SparseLaw:
    """The best m tokens of a law as integer weights. What comes back *is* the draft law: sample from it, judge with it.

    Tokens whose weight rounds to zero are left out; the best one never is. [vocab] -> at most m ids, best first."""
    assert m >= 1
    least = np.partition(law, len(law) - m)[len(law) - m] if m < len(law) else 0.0
    kept = np.flatnonzero((law >= least) & (law > 0.0))
    kept = kept[np.argsort(-law[kept], kind="stable")][:m]
    weights = np.rint(law[kept] * (SPARSE_SCALE / law[kept].sum())).astype(np.int64)
    kept, weights = kept[weights > 0], weights[weights > 0]
    ids = kept if columns is None else columns[kept]
    return SparseLaw(tuple(ids.tolist()), tuple(weights.tolist()))


def sample_sparse(law: SparseLaw, uniform: float) -> int:
    """A token id drawn from a cut law, by its exact integer weights."""
    left = int(uniform * sum(law.weights))
    for token, weight in zip(law.ids, law.weights, strict=True):
        left -= weight
        if left < 0:
            return token
    raise AssertionError("a uniform of 1 or more")
