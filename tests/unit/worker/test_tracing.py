"""A worker's spans: below the call that brought the task, linked with the steps, on the worker's own clock."""

from __future__ import annotations

import pytest

from specwire import telemetry as names
from specwire.law.tasks import SessionId, StepTiming
from specwire.spans import SpanRef
from specwire.worker.observe import StepRecord, TaskRecord
from specwire.worker.tracing import MAX_OPEN_TASKS, WorkerTracing
from tests.support.spans import ListSink

WALL = 1_800_000_000_000_000_000
PARENT = SpanRef(2**127 + 1, 2**63 + 5)
OTHER = SpanRef(77, 78)


def task(parent: SpanRef | None, done: bool, began_ns: int = WALL, error: str = "") -> TaskRecord:
    trace = parent.pack() if parent is not None else b""
    return TaskRecord(SessionId(1, 1), trace, 3, done, began_ns, 20, 500, 4 if done else 0, 2 if done else 0, error)


def step(*tasks: TaskRecord, number: int = 1, began_ns: int = WALL, failed: bool = False) -> StepRecord:
    timing = StepTiming(prepare_us=10, compute_us=400, sample_us=90, rows=5, prefill_rows=2, sessions=9, step=number)
    return StepRecord(timing, began_ns, began_ns + 600_000, tasks, failed)


def watch(role: str = "target", sampled: bool = True) -> tuple[ListSink, WorkerTracing]:
    sink = ListSink(sampled)
    return sink, WorkerTracing(role, f"{role}-0", sink)


def test_tasks_of_two_requests_in_one_step() -> None:
    """Each task's span is in its request's trace; the step is a root of its own, linked both ways; untraced tasks have none."""
    sink, tracing = watch()
    tracing.step_done(step(task(PARENT, True), task(OTHER, True), task(None, True)))

    first, second, root = sink.spans
    assert [span.name for span in sink.spans] == ["target.compute", "target.compute", "target.step"]
    assert [(span.trace_id, span.parent_id) for span in (first, second)] == [
        (PARENT.trace_id, PARENT.span_id),
        (77, 78),
    ]
    assert (root.parent_id, root.attributes["specwire.sessions"]) == (0, 9)
    assert root.links == ((first.trace_id, first.span_id), (second.trace_id, second.span_id))
    assert first.links == second.links == ((root.trace_id, root.span_id),)
    assert first.attributes["specwire.accepted"] == 2
    for span in sink.spans:
        assert span.kind == names.SPANS[span.name].kind
        for attribute in span.attributes:
            assert span.name in names.ATTRIBUTES[attribute].spans, attribute


def test_a_task_of_many_steps_has_one_span_linked_to_all() -> None:
    """A draft makes a block token by token."""
    sink, tracing = watch("draft")
    for number in range(4):
        began = WALL + number * 1_000_000
        tracing.step_done(step(task(PARENT, number == 3), number=number, began_ns=began))

    (compute,) = sink.named("draft.compute")
    steps = sink.named("draft.step")
    assert compute.links == tuple((s.trace_id, s.span_id) for s in steps)
    assert all(s.links == ((compute.trace_id, compute.span_id),) for s in steps)
    assert compute.us == 3600
    assert (compute.attributes["specwire.steps"], compute.attributes["specwire.rows"]) == (4, 12)
    assert "open=0" in repr(tracing)


def test_a_task_asked_twice_in_a_round_has_two_spans() -> None:
    """Prompt chunks of one round carry the same parent."""
    sink, tracing = watch()
    tracing.step_done(step(task(PARENT, True)))
    tracing.step_done(step(task(PARENT, True, WALL + 9), began_ns=WALL + 9))

    one, two = sink.named("target.compute")
    assert one.span_id != two.span_id
    assert one.parent_id == two.parent_id


@pytest.mark.parametrize("skew_ms", [-200, 200])
def test_a_skewed_clock_moves_spans_and_changes_no_duration(skew_ms: int) -> None:
    """Spans say whose clock placed them (report 158)."""
    durations = []
    for skew in (0, skew_ms * 1_000_000):
        sink, tracing = watch()
        began = WALL + skew
        tracing.step_done(step(task(PARENT, True, began), began_ns=began))
        durations.append([span.us for span in sink.spans])
        assert all(span.attributes["specwire.clock"] for span in sink.spans)

    assert durations[0] == durations[1]


@pytest.mark.parametrize("trace", [b"", b"x" * 24, bytes(25)])
def test_what_is_no_trace_context_has_no_span(trace: bytes) -> None:
    """Nor has a step that holds nothing else."""
    sink, tracing = watch()
    record = TaskRecord(SessionId(1, 1), trace, 1, True, WALL, 0, 0, 0, 0, "")
    tracing.step_done(step(record))

    assert sink.spans == []


def test_the_workers_sampler_is_asked() -> None:
    """A worker told to record nothing records nothing, whatever the coordinator does."""
    sink, tracing = watch(sampled=False)
    tracing.step_done(step(task(PARENT, True)))

    assert sink.spans == []
    assert sink.asked == [("target.compute", PARENT)]


def test_tasks_that_never_end_are_forgotten() -> None:
    """Their sessions were closed under them."""
    sink, tracing = watch("draft")
    for number in range(MAX_OPEN_TASKS + 100):
        tracing.step_done(step(task(SpanRef(1, number + 1), False)))

    assert f"open={MAX_OPEN_TASKS}," in repr(tracing)
    assert sink.named("draft.compute") == []


def test_failures_are_errors() -> None:
    """Of the task that failed, and of the step that raised."""
    sink, tracing = watch()
    tracing.step_done(step(task(PARENT, True, error="the model failed (ValueError)"), failed=True))

    assert [span.error for span in sink.spans] == ["the model failed (ValueError)", "the model raised"]
