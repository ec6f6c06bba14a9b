"""A worker's spans: one per traced task, below the coordinator's call, and one per engine step that held such a task.

Law. A task's span is written when the task ends, under the parent that came with it; its id is derived from that parent, so the
steps before could link to it. A step is a trace of its own, because it belongs to all requests in it alike: it links to every
traced task's span, and each of those links to its steps. Steps without a traced task have no span. What is kept between steps
is bounded, whatever becomes of the tasks.

Begin and end lie on this host's clock, which may differ from the coordinator's; durations are exact, and nothing is computed
across the two.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from dataclasses import dataclass, field

from specwire import telemetry as names
from specwire.law.tasks import Answer, StepTiming
from specwire.spans import (
    MAX_LINKS,
    SpanRef,
    SpanSink,
    Value,
    derived_span_id,
    new_span_ids,
    new_trace_id,
    unpack,
)
from specwire.worker.observe import StepRecord, TaskRecord

MAX_OPEN_TASKS = 4096
"""Traced tasks between their first and last step. A task that never ends is forgotten when so many younger ones came."""


@dataclass(slots=True)
class _OpenTask:
    """A traced task that has begun."""

    parent: SpanRef
    ref: SpanRef
    steps: int = 0
    rows: int = 0
    links: list[SpanRef] = field(default_factory=list)
    """Its steps, the first MAX_LINKS of them."""


class WorkerTracing:
    """An Observer of the engine that writes spans. Lives on the event loop."""

    def __init__(self, role: str, worker: str, spans: SpanSink) -> None:
        self._compute, self._step = names.COMPUTE[role], names.STEP[role]
        self._target = role == "target"
        self._place: dict[str, Value] = {"specwire.worker": worker, "specwire.clock": socket.gethostname()}
        self._spans = spans
        self._open: OrderedDict[tuple[bytes, int], _OpenTask] = OrderedDict()

    def __repr__(self) -> str:
        return f"WorkerTracing(open={len(self._open)}, spans={self._spans!r})"

    def step_done(self, record: StepRecord) -> None:
        """See Observer."""
        step: SpanRef | None = None
        links: list[SpanRef] = []
        for task in record.tasks:
            if not task.trace:
                continue
            opened = self._take_up(task)
            if opened is None:
                continue
            step = step or SpanRef(new_trace_id(), new_span_ids(1)[0])
            opened.steps += 1
            opened.rows += task.rows
            if len(opened.links) < MAX_LINKS:
                opened.links.append(step)
            if len(links) < MAX_LINKS:
                links.append(opened.ref)
            if task.done:
                del self._open[task.trace, task.began_wall_ns]
                self._write_task(task, opened, record.ended_wall_ns)
        if step is not None:
            self._write_step(record, step, links)

    def _take_up(self, task: TaskRecord) -> _OpenTask | None:
        """None: not sampled here, or not a trace context."""
        key = (task.trace, task.began_wall_ns)
        known = self._open.get(key)
        if known is not None:
            return known
        parent = unpack(task.trace)
        if parent is None or not self._spans.sampled(self._compute, parent.trace_id, parent):
            return None
        opened = _OpenTask(parent, parent.child(derived_span_id(task.trace, task.began_wall_ns)))
        self._open[key] = opened
        if len(self._open) > MAX_OPEN_TASKS:
            self._open.popitem(last=False)
        return opened

    def _write_task(self, task: TaskRecord, opened: _OpenTask, ended_ns: int) -> None:
        attributes: dict[str, Value] = {
            **self._place,
            "specwire.drafted": task.proposed,
            "specwire.queue_us": task.queue_us,
            "specwire.compute_us": task.compute_us,
            "specwire.steps": opened.steps,
            "specwire.rows": opened.rows,
        }
        if self._target:
            attributes["specwire.accepted"] = task.accepted
        if task.error:
            attributes["error.type"] = "failure"
        self._spans.write(
            self._compute,
            opened.ref,
            opened.parent,
            "server",
            task.began_wall_ns or ended_ns,
            ended_ns,
            attributes,
            opened.links,
            task.error or None,
        )

    def _write_step(self, record: StepRecord, step: SpanRef, links: list[SpanRef]) -> None:
        timing: StepTiming = record.timing
        attributes: dict[str, Value] = {
            **self._place,
            "specwire.step": timing.step,
            "specwire.rows": timing.rows,
            "specwire.prefill_rows": timing.prefill_rows,
            "specwire.sessions": timing.sessions,
            "specwire.prepare_us": timing.prepare_us,
            "specwire.compute_us": timing.compute_us,
            "specwire.sample_us": timing.sample_us,
        }
        error = None
        if record.failed:
            error = attributes["error.type"] = "the model raised"
        begin, end = record.began_wall_ns, record.ended_wall_ns
        self._spans.write(self._step, step, None, "internal", begin, end, attributes, links, error)

    def task_done(self, answer: Answer) -> None:
        """See Observer. A refused task has no span: it took no step."""

    def session_count(self, sessions: int, waiting: int) -> None:
        """See Observer."""
