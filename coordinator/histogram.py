"""A histogram for an event loop: no locks, no look-ups by label, and one observation can count many times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class RawHistogram:
    """Counts by bucket. Written by one thread, read by any: a reader may see the last observation in part."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """`value` was seen so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus has them."""
        counts, seen = list(self.counts), 0
        found = []
        for bound, count in zip((*self.bounds, float("inf")), counts, strict=True):
            seen += count
            found.append(("+Inf" if bound == float("inf") else str(float(bound)), float(seen)))
        return found
