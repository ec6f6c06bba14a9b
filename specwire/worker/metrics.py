"""Raw counters of a worker, by prometheus_client. Rates and means are queries.

The names stand in `specwire.telemetry`. A registry belongs to one worker, so that two in one process do not mix.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from specwire.law.tasks import Answer, Failure, Refusal
from specwire.law.values import Block, Verdict
from specwire.telemetry import METRICS
from specwire.worker.observe import StepRecord

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class WorkerMetrics:
    """An Observer that counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def named(key: str) -> tuple[str, str, tuple[str, ...]]:
            metric = METRICS[f"specwire:worker_{key}"]
            return metric.name, metric.meaning, metric.labels

        def counter(key: str) -> Counter:
            return Counter(*named(key), registry=self.registry)

        def histogram(key: str) -> Histogram:
            return Histogram(*named(key), registry=self.registry, buckets=SECONDS)

        def gauge(key: str) -> Gauge:
            return Gauge(*named(key), registry=self.registry)

        self._steps, self._failed_steps = counter("steps"), counter("failed_steps")
        self._rows, self._prefill_rows = counter("rows"), counter("prefill_rows")
        self._reused = counter("reused_tokens")
        self._tasks, self._bad_laws = counter("tasks"), counter("bad_laws")
        self._outcomes: dict[str, Counter] = {}
        self._drafted, self._accepted = counter("proposed_tokens"), counter("accepted_tokens")
        self._compute, self._step, self._queue = (
            histogram("compute_seconds"),
            histogram("step_seconds"),
            histogram("queue_seconds"),
        )
        self._sessions = gauge("sessions")
        self._waiting = gauge("waiting_tasks")

    def step_done(self, record: StepRecord) -> None:
        """See Observer."""
        timing = record.timing
        self._steps.inc()
        self._failed_steps.inc(record.failed)
        self._rows.inc(timing.rows)
        self._prefill_rows.inc(timing.prefill_rows)
        self._compute.observe(timing.compute_us / 1e6)
        self._step.observe(timing.busy_us / 1e6)
        done = [task for task in record.tasks if task.done]
        for task in done:
            self._queue.observe(task.queue_us / 1e6)
        self._drafted.inc(sum(task.proposed for task in done))
        self._accepted.inc(sum(task.accepted for task in done))

    def task_done(self, answer: Answer) -> None:
        """See Observer."""
        result = answer.result
        self._reused.inc(answer.reused)
        if isinstance(result, Refusal):
            self._outcome(f"refused_{result.reason.value}")
        elif isinstance(result, Failure):
            self._outcome("failed")
            self._bad_laws.inc(result.bad_law)
        else:
            outcome = "verdict" if isinstance(result, Verdict) else "block" if isinstance(result, Block) else "prefill"
            self._outcome(outcome)

    def _outcome(self, outcome: str) -> None:
        child = self._outcomes.get(outcome)
        if child is None:  # labels() checks its argument each time
            child = self._outcomes[outcome] = self._tasks.labels(outcome)
        child.inc()

    def session_count(self, sessions: int, waiting: int) -> None:
        """See Observer."""
        self._sessions.set(sessions)
        self._waiting.set(waiting)

    def serve(self, host: str, port: int) -> tuple[int, object]:
        """Opens /metrics. Returns the port and the server, to be shut down."""
        server, _thread = start_http_server(port, host, self.registry)
        return int(server.server_port), server
