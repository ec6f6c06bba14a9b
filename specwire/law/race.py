"""The same answers as `sampling.py` for less work: a few tokens of a row that provably hold the answer.

Law. Nothing is decided here in arithmetic of its own. A cheap bound with a proven error picks the few tokens that can win
or survive, and the reference's arithmetic on those decides; when the few do not settle it, the whole row goes to the reference. So
the answer for a row is the reference's bit for bit, and never depends on which rows were judged with it.

The bound. With s the score, t the temperature and x the token's 32 bits, the race is for the largest s + t*g(x). Since E >= u,
g <= -log u, and reading a float's bits as an integer I gives log2(x) >= I(x)/2^23 - 127 with an error of at most 0.0861. So

    s + t*g  <=  s - t*log(2)/2^23 * I(x)  +  t*159*log(2)

costs two conversions, a multiplication and an addition per token, and no logarithm. The token with the best bound sets the mark;
whatever has a bound under the mark has lost. In 19 rows of 20 nothing else remains.

The prefix. Survivors of the filters are a prefix of the rank order, so the scores within a few nats of the best settle
them: top-k by count, min-p by distance, top-p by a single-precision total whose error is allowed for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import log

import numpy as np
import numpy.typing as npt

from specwire.law.noise import Bits, Floats, Ids, gumbel, halves, mix_into, noise_bits, premix, premix_table, row_key
from specwire.law.sampling import (
    Row,
    check_best,
    law_of,
    mass,
    prefix_length,
    scaled_scores,
    shared_noise_choice,
    spread,
    survivors,
)
from specwire.law.values import SamplingSpec

LOG2 = float(np.log(2.0))
STEP = LOG2 / 2**23
"""Nats per unit of I."""
OFFSET = 159 * LOG2
SLACK = 2e-6
"""Of |score| + 256 t: ten times what the roundings to single precision can add up to."""
MASS_ERROR = 4e-6
"""Relative, of a single-precision total: arguments 2e-6 (mean depth is at most log vocab), exp 2e-7, pairwise sum 2e-6."""
COLDEST = 1e-3
"""Under this temperature single precision says too little: the reference alone."""
FIRST_DEPTH = 4.0
"""Nats under the best score where the search for survivors begins."""
DEEPER, LAST_DEPTH = 1.3, 100.0
"""It goes on in these steps until they are settled, and gives up there: a longer sort costs more than a look."""


class _Scratch(threading.local):
    """Buffers of the calling thread, so that a row costs no page faults."""

    def __init__(self) -> None:
        self.size = 0

    def of(self, size: int) -> tuple[Bits, Bits, npt.NDArray[np.float32]]:
        if self.size != size:
            self.size = size
            self.bits, self.spare = np.empty(size, np.uint32), np.empty(size, np.uint32)
            self.bound = np.empty(size, np.float32)
        return self.bits, self.spare, self.bound


_scratch = _Scratch()


def race_mark(score: float, temperature: float, noise: float) -> float:
    """A bound under this has lost to a token with this score and noise."""
    return score + temperature * (noise - OFFSET) - SLACK * (abs(score) + 256 * temperature)


def racers(row: Row, temperature: float, key: int, premixed: Bits) -> Ids | None:
    """Columns that can win the unfiltered race; None when the row is odd. [vocab], [vocab] -> [n]."""
    bits, spare, bound = _scratch.of(len(row))
    mix_into(premixed, *halves(key), bits, spare)
    np.copyto(bound, bits, casting="same_kind")
    np.copyto(bound, bound.view(np.int32), casting="same_kind")
    np.multiply(bound, np.float32(-temperature * STEP), out=bound)
    np.add(bound, row, out=bound, casting="same_kind")
    first = int(bound.argmax())  # the first nan, if there is one
    if not np.isfinite(bound[first]):
        return None
    mark = race_mark(float(row[first]), temperature, float(gumbel(bits[first : first + 1])[0]))
    bound[first] = -np.inf
    if bound[bound.argmax()] < mark:
        return np.array([first], dtype=np.int64)
    others = np.flatnonzero(bound >= np.float32(mark))
    return np.sort(np.append(others, first)).astype(np.int64)


def finish(ids: Ids, scaled: Floats, key: int) -> int:
    """The reference's race among a few tokens; ties to the lower id. [n], [n] -> id."""
    if len(ids) == 1:
        return int(ids[0])
    race = scaled + gumbel(noise_bits(key, ids))
    return int(ids[race == race.max()].min())


@dataclass(frozen=True, eq=False)
class Prefix:
    """The best of a row. A token outside scores no more than the last one inside."""

    columns: Ids
    """In rank order, [n]."""
    scaled: Floats
    """Scores over temperature, [n], descending."""

    def kept(self, spec: SamplingSpec, total: float) -> int | None:
        """How many survive; None when tokens outside could have a say. `total` as in `prefix_length`."""
        if len(self.scaled) < spec.top_k:
            return None
        n = prefix_length(self.scaled, spec, total)
        # a survivor tied with the last token might have to give way to one outside that is tied as well
        return n if self.scaled[n - 1] > self.scaled[-1] else None

    def settled(self, spec: SamplingSpec, rough: float, exact: Callable[[], float] | None = None) -> int | None:
        """The same by a rough total, when its error cannot matter; else by the exact one."""
        low, high = self.kept(spec, rough * (1 - MASS_ERROR)), self.kept(spec, rough * (1 + MASS_ERROR))
        if low == high:
            return low
        return None if exact is None else self.kept(spec, exact())


def rough_weights(row: Row, temperature: float, best: float) -> npt.NDArray[np.float32]:
    """exp of the scaled distance from the best; adds up to `sampling.mass` within MASS_ERROR. [vocab] -> [vocab]."""
    weights = np.subtract(row, best, dtype=np.float32, casting="same_kind")
    np.divide(weights, np.float32(temperature), out=weights)
    return np.exp(weights, out=weights)


def prefixes(row: Row, spec: SamplingSpec, best: float, weights: npt.NDArray[np.float32] | None) -> Iterator[Prefix]:
    """Ever longer prefixes that could settle the survivors. [vocab]; `weights` only where their total decides."""
    share, depth = 0.0, FIRST_DEPTH
    if spec.min_p > 0.0:
        depth = max(depth, 1.0 - log(spec.min_p))  # nothing deeper survives
    elif weights is not None:
        share = spec.top_p * (1 - 2 * MASS_ERROR) * float(weights.sum())
    while depth < LAST_DEPTH:
        columns = np.flatnonzero(row >= best - depth * spec.temperature)
        if len(columns) > spec.top_k and (weights is None or weights[columns].sum() >= share):
            scaled = row[columns].astype(np.float64) / spec.temperature
            order = np.argsort(-scaled, kind="stable")
            yield Prefix(columns[order], scaled[order])
        depth *= DEEPER


def exact_mass(row: Row, spec: SamplingSpec, best: float) -> float:
    """`sampling.mass` of a row; `best` is its best scaled score. [vocab]."""
    return mass(row.astype(np.float64) / spec.temperature, best)


def fast_survivors(row: Row, spec: SamplingSpec) -> tuple[Ids, Floats]:
    """Survivors of a filtered spec that is not greedy, in rank order, and their scaled scores. [vocab] -> [n], [n]."""
    best = float(row.max())
    check_best(best)
    if spec.temperature >= COLDEST:
        needs_total = spec.top_p < 1.0 and not spec.top_k  # top-k left a total of its own
        weights = rough_weights(row, spec.temperature, best) if needs_total else None
        rough = 0.0 if weights is None else float(weights.sum())
        for prefix in prefixes(row, spec, best, weights):
            n = prefix.settled(spec, rough, partial(exact_mass, row, spec, float(prefix.scaled[0])))
            if n is not None:
                return prefix.columns[:n], prefix.scaled[:n]
    scaled = scaled_scores(row, spec)
    kept = survivors(scaled, spec)
    return kept, scaled[kept]


def fast_law(row: Row, spec: SamplingSpec) -> Floats:
    """`sampling.law_of` for less work when filtered. [vocab] -> [vocab]."""
    if spec.greedy or not spec.filtered:
        return law_of(row, spec)
    with np.errstate(over="ignore", invalid="ignore"):
        kept, scaled = fast_survivors(row, spec)
        return spread(kept, scaled, len(row))


_premixed: dict[int, tuple[Ids, Bits]] = {}
"""By identity of the columns; the columns are kept, so that the identity stays theirs."""


def premixed_columns(size: int, columns: Ids | None) -> Bits:
    """`premix` of a row's token ids, computed once. [vocab]."""
    if columns is None:
        return premix_table(size)
    if id(columns) not in _premixed:
        if len(_premixed) >= 8:
            _premixed.clear()
        _premixed[id(columns)] = (columns, premix(columns))
    return _premixed[id(columns)][1]


def fast_choice(row: Row, spec: SamplingSpec, seed: int, choice: int, position: int, columns: Ids | None = None) -> int:
    """`sampling.shared_noise_choice` for less work. [vocab] -> token id."""
    assert row.ndim == 1
    if spec.greedy:
        column = int(row.argmax())  # the first of the largest, or the first nan
        check_best(float(row[column]))
        return column if columns is None else int(columns[column])
    key = row_key(seed, choice, position)
    with np.errstate(over="ignore", invalid="ignore"):
        if spec.filtered:
            few, scaled = fast_survivors(row, spec)
        else:
            racing = racers(row, spec.temperature, key, premixed_columns(len(row), columns))
            if racing is None:
                return shared_noise_choice(row, spec, seed, choice, position, columns)
            few, scaled = racing, row[racing].astype(np.float64) / spec.temperature
    ids = few if columns is None else columns[few]
    return finish(ids, scaled, key)
