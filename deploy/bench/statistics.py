"""Ratios of interleaved runs: the median and its bootstrap interval. Pure; chance is a seeded argument."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float
    count: int

    def plain(self) -> dict[str, float]:
        """For JSON."""
        return {"value": self.value, "low": self.low, "high": self.high, "pairs": self.count}

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.count})"


def bootstrap(pairs: Sequence[tuple[float, float]], of: Callable[[Sequence[tuple[float, float]]], float]) -> Estimate:
    """`of` over the pairs, with an interval by resampling whole pairs (Efron 1979). Raises ValueError without pairs."""
    if not pairs:
        raise ValueError("no pairs were measured")
    chance = random.Random(7)
    draws = sorted(of([pairs[chance.randrange(len(pairs))] for _ in pairs]) for _ in range(RESAMPLES))
    return Estimate(of(pairs), draws[int(0.025 * RESAMPLES)], draws[int(0.975 * RESAMPLES) - 1], len(pairs))


def median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Median over the pairs of first / second."""
    return statistics.median(first / second for first, second in pairs)


def total_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Sum of firsts over sum of seconds: what a user who runs all of them sees."""
    return sum(first for first, _ in pairs) / sum(second for _, second in pairs)
