"""Stamps and intervals, each on one host's monotonic clock.

Law. An interval is the difference of two stamps of the same clock; no number here ever compares two hosts. The transfer of a
task is the coordinator's time between written and received, less the worker's residence. Residence lies inside that span, so
transfer is never negative; what the clocks' grain would make of it is clamped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from specwire.law.tasks import Answer, StepTiming

now_ns = time.perf_counter_ns
"""The clock of every interval: monotonic, with nanosecond units."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """Raw bytes of one frame and when they came, before anything was parsed."""

    raw: bytes
    received_ns: int


def stamp(raw: bytes) -> Stamped:
    """Used as a gRPC deserialiser, so that the stamp is taken as early as Python sees the bytes."""
    return Stamped(raw, now_ns())


@dataclass(frozen=True, slots=True)
class Passage:
    """One task's way to a worker and back, in microseconds. The parts are disjoint and sum to `total_us`."""

    wait_us: int
    """Coordinator: ready but not yet written, and received but not yet taken up."""
    transfer_us: int
    queue_us: int
    compute_us: int
    overhead_us: int
    """Worker: parse, answer hand-over, and what else lies between the engine and the wire."""

    @property
    def total_us(self) -> int:
        """From ready to taken up."""
        return self.wait_us + self.transfer_us + self.queue_us + self.compute_us + self.overhead_us

    @property
    def way_us(self) -> int:
        """What is neither work nor waiting for the worker's turn."""
        return self.wait_us + self.transfer_us + self.overhead_us

    def last(self, us: int) -> Passage:
        """The last so many microseconds of it, as far as they can be told: transfer, before it compute, before that the rest."""
        parts = []
        for part in (self.transfer_us, self.compute_us, self.overhead_us, self.queue_us, self.wait_us):
            parts.append(min(part, us))
            us -= parts[-1]
        transfer, compute, overhead, queue, wait = parts
        return Passage(wait, transfer, queue, compute, overhead)

    def __add__(self, other: Passage) -> Passage:
        """Two ways one after the other."""
        return Passage(
            self.wait_us + other.wait_us,
            self.transfer_us + other.transfer_us,
            self.queue_us + other.queue_us,
            self.compute_us + other.compute_us,
            self.overhead_us + other.overhead_us,
        )


def passage(
    ready_ns: int, written_ns: int, received_ns: int, taken_ns: int, answer: Answer, step: StepTiming | None
) -> Passage:
    """Splits a task's way. Worker parts are measured by the worker's own stamps; what they leave of the residence is overhead."""
    timing = answer.timing
    span_us = max(0, received_ns - written_ns) // 1000
    residence = min(timing.residence_us, span_us)
    compute = timing.compute_us
    if compute == 0 and step is not None:
        compute = step.busy_us
    compute = min(compute, residence)
    queue = min(timing.queue_us, residence - compute)
    return Passage(
        wait_us=max(0, (written_ns - ready_ns) // 1000) + max(0, (taken_ns - received_ns) // 1000),
        transfer_us=span_us - residence,
        queue_us=queue,
        compute_us=compute,
        overhead_us=residence - compute - queue,
    )
