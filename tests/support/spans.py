"""Where spans go in tests: a list for units, and a real OTLP receiver over gRPC for whole services."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from specwire import telemetry
from specwire.spans import Kind, SpanRef, Value

PATIENCE_S = 30.0
POLL_S = 0.02


@dataclass(frozen=True)
class Written:
    """A span, wherever it was caught."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    """0: a root."""
    kind: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[int, int], ...]
    """(trace id, span id)."""
    error: str | None
    service: str = ""
    resource: dict[str, Any] = field(default_factory=dict)

    @property
    def us(self) -> float:
        """Duration."""
        return (self.end_ns - self.start_ns) / 1000


def check_tree(spans: Sequence[Written], parent_of_root: int = 0) -> None:
    """One request's spans: one trace, every parent there and of the right name, every span once, all names in the tables."""
    by_id = {span.span_id: span for span in spans}

    assert len(by_id) == len(spans)
    assert len({span.trace_id for span in spans}) == 1
    assert [span.parent_id for span in spans if span.name == telemetry.GENERATE] == [parent_of_root]
    for span in spans:
        row = telemetry.SPANS[span.name]
        assert span.kind == row.kind
        assert span.name == telemetry.GENERATE or by_id[span.parent_id].name == row.parent
        assert span.end_ns >= span.start_ns
        check_attributes(span)


def check_attributes(span: Written) -> None:
    """All of them are in the table, for this span, and never so many that some could be lost."""
    assert len(span.attributes) < 128
    for attribute in span.attributes:
        assert span.name in telemetry.ATTRIBUTES[attribute].spans, attribute


class ListSink:
    """A SpanSink that keeps them."""

    def __init__(self, sampled: bool = True) -> None:
        self.spans: list[Written] = []
        self.asked: list[tuple[str, SpanRef | None]] = []
        self._sampled = sampled

    def sampled(self, name: str, trace_id: int, parent: SpanRef | None) -> bool:
        """As told, and remembered."""
        self.asked.append((name, parent))
        return self._sampled

    def write(
        self,
        name: str,
        ref: SpanRef,
        parent: SpanRef | None,
        kind: Kind,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Value],
        links: Sequence[SpanRef] = (),
        error: str | None = None,
    ) -> None:
        """Kept."""
        above = parent.span_id if parent is not None else 0
        at = tuple((link.trace_id, link.span_id) for link in links)
        self.spans.append(
            Written(name, ref.trace_id, ref.span_id, above, kind, start_ns, end_ns, dict(attributes), at, error)
        )

    def close(self, timeout_s: float = 2.0) -> None:
        """Nothing to end."""

    def named(self, name: str) -> list[Written]:
        """Of that name, in the order of their ends."""
        return [span for span in self.spans if span.name == name]


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """An OTLP receiver. `hang`: takes calls and never answers."""

    def __init__(self, hang: bool = False) -> None:
        self.spans: list[Written] = []
        self.calls = 0
        self._released = threading.Event()
        if not hang:
            self._released.set()

    def Export(self, request: Any, context: Any) -> Any:
        """One batch."""
        self.calls += 1
        self._released.wait()
        for resource_spans in request.resource_spans:
            resource = _attributes(resource_spans.resource.attributes)
            for scope in resource_spans.scope_spans:
                self.spans += [_written(span, resource) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def release(self) -> None:
        """Answers what hangs."""
        self._released.set()

    def named(self, name: str) -> list[Written]:
        """Of that name, in the order of arrival."""
        return [span for span in list(self.spans) if span.name == name]

    def until(self, holds: Any) -> list[Written]:
        """Waits until `holds(spans)`; returns them."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            spans = list(self.spans)
            if holds(spans):
                return spans
            assert time.monotonic() < give_up, f"waited in vain; {len(spans)} spans: {sorted({s.name for s in spans})}"
            time.sleep(POLL_S)


@contextmanager
def receiving(hang: bool = False) -> Iterator[tuple[Receiver, str]]:
    """A receiver and the endpoint to give to OTEL_EXPORTER_OTLP_ENDPOINT."""
    receiver = Receiver(hang)
    with futures.ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield receiver, f"http://127.0.0.1:{port}"
        finally:
            receiver.release()
            server.stop(None).wait()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def _written(span: Any, resource: dict[str, Any]) -> Written:
    return Written(
        span.name,
        int.from_bytes(span.trace_id, "big"),
        int.from_bytes(span.span_id, "big"),
        int.from_bytes(span.parent_span_id, "big"),
        {1: "internal", 2: "server", 3: "client"}[span.kind],
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        tuple((int.from_bytes(link.trace_id, "big"), int.from_bytes(link.span_id, "big")) for link in span.links),
        span.status.message if span.status.code == 2 else None,
        resource["service.name"],
        resource,
    )
