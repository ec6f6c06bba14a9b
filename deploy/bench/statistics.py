"""Ratios of interleaved runs: the median and its bootstrap interval. Pure; chance is a seeded argument."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % bootstrap interval."""

    value: float
    low: float | None
    """None, as `high` is: a single pair has no spread that could be resampled."""
    high: float | None
    count: int

    def plain(self) -> dict[str, float | None]:
        """For JSON."""
        return {"value": self.value, "low": self.low, "high": self.high, "pairs": self.count}

    def __str__(self) -> str:
        return f"{shown(self.plain(), 3)} (n={self.count})"


def shown(ratio: Mapping[str, float | None], digits: int = 2) -> str:
    """An estimate's plain values as people read it: the value and, where there is one, its interval."""
    return f"{ratio['value']:.{digits}f}{spread(ratio, digits)}"


def spread(ratio: Mapping[str, float | None], digits: int = 2) -> str:
    """The interval alone, with a space before it; nothing of a single pair."""
    low, high = ratio["low"], ratio["high"]
    return "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"


def bootstrap(pairs: Sequence[tuple[float, float]], of: Callable[[Sequence[tuple[float, float]]], float]) -> Estimate:
    """`of` over the pairs, with an interval by resampling whole pairs (Efron 1979). Raises ValueError without pairs."""
    if not pairs:
        raise ValueError("no pairs were measured")
    if len(pairs) == 1:
        return Estimate(of(pairs), None, None, 1)
    chance = random.Random(7)
    draws = sorted(of([pairs[chance.randrange(len(pairs))] for _ in pairs]) for _ in range(RESAMPLES))
    return Estimate(of(pairs), draws[int(0.025 * RESAMPLES)], draws[int(0.975 * RESAMPLES) - 1], len(pairs))


def median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Median over the pairs of first / second."""
    return statistics.median(first / second for first, second in pairs)


def total_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Sum of firsts over sum of seconds: what a user who runs all of them sees."""
    return sum(first for first, _ in pairs) / sum(second for _, second in pairs)
