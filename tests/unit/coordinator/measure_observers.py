"""Prints what watching costs: `python -m tests.unit.coordinator.measure_observers`. A measurement, not a test.

CPU microseconds of the thread that pays: the event loop for a round, the engine for a step. The best of five runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from coordinator.metrics import CoordinatorMetrics
from coordinator.observe import Observer, Observers
from coordinator.tracing import RequestTracing
from specwire import telemetry
from specwire.spans import SpanRef
from specwire.tracing import OtelSpans
from specwire.worker.metrics import WorkerMetrics
from specwire.worker.tracing import WorkerTracing
from tests.unit.coordinator.test_tracing import Play
from tests.unit.worker.test_tracing import step, task

ROUNDS, REPEATS = 1000, 5


class Nowhere(SpanExporter):
    """Takes everything."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Gone."""
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing to end."""


def rounds(*observers: Observer) -> float:
    """Microseconds of a round, what the play itself costs included."""
    best = float("inf")
    for _ in range(REPEATS):
        play = Play()
        play.tracing = Observers(observers)  # type: ignore[assignment]
        session = play.open()
        begun = time.thread_time()
        for _ in range(ROUNDS):
            play.round(session)
        best = min(best, (time.thread_time() - begun) / ROUNDS * 1e6)
        play.end(session, "finished")
    return best


def steps(observer: WorkerTracing | WorkerMetrics, traced: bool) -> float:
    """Microseconds of a step with one task."""
    best = float("inf")
    for _ in range(REPEATS):
        records = [step(task(SpanRef(5, n + 1) if traced else None, True)) for n in range(ROUNDS)]
        begun = time.thread_time()
        for record in records:
            observer.step_done(record)
        best = min(best, (time.thread_time() - begun) / ROUNDS * 1e6)
    return best


def main() -> None:
    """Prints the table."""
    spans = OtelSpans(Nowhere(), Resource({}))
    base = rounds()
    print(f"metrics              {rounds(CoordinatorMetrics()) - base:6.1f} us a round")
    print(f"detail request       {rounds(RequestTracing(spans, rounds=False)) - base:6.1f} us a round")
    telemetry.FIRST_ROUNDS, telemetry.MAX_ROUNDS = 0, ROUNDS
    print(f"detail round, 1 in 16{rounds(RequestTracing(spans, rounds=True)) - base:6.1f} us a round")
    telemetry.FIRST_ROUNDS = ROUNDS
    print(f"detail round, traced {rounds(RequestTracing(spans, rounds=True)) - base:6.1f} us a round")
    print(f"worker metrics       {steps(WorkerMetrics(), False):6.1f} us a step")
    print(f"worker, not traced   {steps(WorkerTracing('target', 't', spans), False):6.1f} us a step")
    print(f"worker, traced       {steps(WorkerTracing('target', 't', spans), True):6.1f} us a step with its task")
    spans.close()


if __name__ == "__main__":
    main()
