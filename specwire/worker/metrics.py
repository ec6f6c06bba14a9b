"""Raw counters of a worker, by prometheus_client. Rates and means are queries.

The names stand in one table. A registry belongs to one worker, so that two in one process do not mix.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from specwire.law.tasks import Answer, Failure, Refusal
from specwire.law.values import Block, Verdict
from specwire.worker.observe import StepRecord

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

NAMES = {
    "steps": ("specwire_worker_steps", "Engine steps"),
    "failed_steps": ("specwire_worker_failed_steps", "Engine steps whose model raised"),
    "rows": ("specwire_worker_rows", "Rows computed for verification, drafting or decoding"),
    "prefill_rows": ("specwire_worker_prefill_rows", "Rows of prompts and replays computed"),
    "tasks": ("specwire_worker_tasks", "Tasks answered, by outcome"),
    "bad_laws": ("specwire_worker_bad_laws", "Tasks that failed on a row of scores that is no law"),
    "drafted": ("specwire_worker_proposed_tokens", "Tokens of blocks judged (target) or made (draft)"),
    "accepted": ("specwire_worker_accepted_tokens", "Tokens of judged blocks that stand"),
    "compute": ("specwire_worker_compute_seconds", "Model time of a step"),
    "step": ("specwire_worker_step_seconds", "Prepare, compute and sample time of a step"),
    "queue": ("specwire_worker_queue_seconds", "Time a task waited for the engine, over all its steps"),
    "sessions": ("specwire_worker_sessions", "Sessions that hold a cache slot"),
    "waiting": ("specwire_worker_waiting_tasks", "Tasks that wait for a step"),
}


class WorkerMetrics:
    """An Observer that counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(key: str, *labels: str) -> Counter:
            return Counter(*NAMES[key], labels, registry=self.registry)

        def histogram(key: str) -> Histogram:
            return Histogram(*NAMES[key], registry=self.registry, buckets=SECONDS)

        self._steps, self._failed_steps = counter("steps"), counter("failed_steps")
        self._rows, self._prefill_rows = counter("rows"), counter("prefill_rows")
        self._tasks, self._bad_laws = counter("tasks", "outcome"), counter("bad_laws")
        self._drafted, self._accepted = counter("drafted"), counter("accepted")
        self._compute, self._step, self._queue = histogram("compute"), histogram("step"), histogram("queue")
        self._sessions = Gauge(*NAMES["sessions"], registry=self.registry)
        self._waiting = Gauge(*NAMES["waiting"], registry=self.registry)

    def step_done(self, record: StepRecord) -> None:
        """See Observer."""
        timing = record.timing
        self._steps.inc()
        self._failed_steps.inc(record.failed)
        self._rows.inc(timing.rows)
        self._prefill_rows.inc(timing.prefill_rows)
        self._compute.observe(timing.compute_us / 1e6)
        self._step.observe((timing.prepare_us + timing.compute_us + timing.sample_us) / 1e6)
        for task in record.tasks:
            if task.done:
                self._queue.observe(task.queue_us / 1e6)
                self._drafted.inc(task.proposed)
                self._accepted.inc(task.accepted)

    def task_done(self, answer: Answer) -> None:
        """See Observer."""
        result = answer.result
        if isinstance(result, Refusal):
            self._tasks.labels(f"refused_{result.reason.value}").inc()
        elif isinstance(result, Failure):
            self._tasks.labels("failed").inc()
            self._bad_laws.inc(result.bad_law)
        else:
            outcome = "verdict" if isinstance(result, Verdict) else "block" if isinstance(result, Block) else "prefill"
            self._tasks.labels(outcome).inc()

    def session_count(self, sessions: int, waiting: int) -> None:
        """See Observer."""
        self._sessions.set(sessions)
        self._waiting.set(waiting)

    def serve(self, host: str, port: int) -> tuple[int, object]:
        """Opens /metrics. Returns the port and the server, to be shut down."""
        server, _thread = start_http_server(port, host, self.registry)
        return int(server.server_port), server
