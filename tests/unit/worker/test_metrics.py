"""What is counted: raw, monotone, and served."""

from __future__ import annotations

import asyncio
import dataclasses
import urllib.request

from specwire.law.tasks import Answer, Failure, Reason, Refusal, SessionId, StepTiming
from specwire.law.values import Block, Verdict
from specwire.telemetry import METRICS
from specwire.worker.metrics import WorkerMetrics
from specwire.worker.observe import StepRecord, TaskRecord

TASK = TaskRecord(SessionId(1, 1), b"", 5, True, 1, 300, 2000, proposed=4, accepted=3, error="")
STEP = StepRecord(StepTiming(100, 2000, 30, rows=5, prefill_rows=7, sessions=1, step=1), 1, 2, (TASK,), failed=False)


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float:
    """One sample; zero when there is none."""
    return metrics.registry.get_sample_value(name, labels) or 0.0


def test_steps_and_their_tasks() -> None:
    """Rows by kind, blocks when they are done, times in seconds."""
    metrics = WorkerMetrics()
    metrics.step_done(STEP)
    unfinished = dataclasses.replace(TASK, done=False)
    metrics.step_done(dataclasses.replace(STEP, tasks=(unfinished,), failed=True))
    metrics.session_count(3, 2)

    assert value(metrics, "specwire:worker_steps_total") == 2
    assert value(metrics, "specwire:worker_failed_steps_total") == 1
    assert value(metrics, "specwire:worker_rows_total") == 10
    assert value(metrics, "specwire:worker_prefill_rows_total") == 14
    assert value(metrics, "specwire:worker_proposed_tokens_total") == 4
    assert value(metrics, "specwire:worker_accepted_tokens_total") == 3
    assert value(metrics, "specwire:worker_compute_seconds_sum") == 0.004
    assert value(metrics, "specwire:worker_queue_seconds_sum") == 0.0003
    assert value(metrics, "specwire:worker_sessions") == 3
    assert value(metrics, "specwire:worker_waiting_tasks") == 2


def test_tasks_by_outcome() -> None:
    """Refusals by reason; a law that is none is counted apart."""
    metrics = WorkerMetrics()
    results = [Verdict(0, 1), Block(), None, Refusal(Reason.HASH), Failure("x"), Failure("y", bad_law=True)]
    for result in results:
        metrics.task_done(Answer(SessionId(1, 1), 1, 1, 0, result))

    for outcome, count in {"verdict": 1, "block": 1, "prefill": 1, "refused_hash": 1, "failed": 2}.items():
        assert value(metrics, "specwire:worker_tasks_total", outcome=outcome) == count
    assert value(metrics, "specwire:worker_bad_laws_total") == 1


def test_served_over_http() -> None:
    """On its own port, and every name is there."""
    metrics = WorkerMetrics()

    async def run() -> str:
        port, server = metrics.serve("127.0.0.1", 0)
        try:
            with await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/metrics") as response:
                return str(response.read().decode())
        finally:
            server.shutdown()  # type: ignore[attr-defined]
            server.server_close()  # type: ignore[attr-defined]

    shown = asyncio.run(run())

    assert all(f"# HELP {name}" in shown for name in METRICS if name.startswith("specwire:worker_"))
