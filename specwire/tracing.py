"""OpenTelemetry, behind the port of `specwire.spans`. Imported only where tracing is on; the only file that imports it.

Law. Serving never waits for the collector. Spans go to a bounded queue and from there, on a thread of its own, to the collector;
an export takes at most EXPORT_TIMEOUT_S; after a failed one spans are dropped unencoded for a while, so that a dead collector
costs no computing either; `close` returns in time whatever happens. One warning tells of it, and no more.

The standard OTEL variables decide endpoint, headers, sampler, resource and queue. The sampler is asked once per request and
once per task at a worker, not for every span below: a ratio is decided by the trace id, so it would say the same. Spans are
built as values when they are over (`ReadableSpan`) rather than started and ended: by 12 attributes 10 us instead of 180 us
each (opentelemetry-sdk 1.45, one core of a shared x86 server), and the event loop pays for it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from specwire import __version__
from specwire.spans import Kind, SpanRef, Value

log = logging.getLogger(__name__)

EXPORT_TIMEOUT_S = 2
SCHEDULE_DELAY_MS = 1000
MAX_QUEUE = 4096
MAX_BATCH = 256
REST_S = (1.0, 5.0, 15.0, 60.0)
"""How long spans are dropped after so many failed exports in a row."""
SWITCH_INTERVAL_S = 0.0005
"""Encoding runs beside an event loop or an engine; the default would hold those up for 5 ms at a time."""

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_SCOPE = InstrumentationScope("specwire", __version__)
_UNSET = Status(StatusCode.UNSET)


class GuardedExporter(SpanExporter):
    """An exporter that may fail: says so once, and rests after a failure. Called by one thread."""

    def __init__(self, inner: SpanExporter, where: str) -> None:
        self.dropped = 0
        """Spans that were not delivered."""
        self._inner = inner
        self._where = where
        self._strikes = 0
        self._rest_until = 0.0
        self._warned = False
        self._closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends a batch, or drops it."""
        if self._closed or time.monotonic() < self._rest_until:
            self.dropped += len(spans)
            return SpanExportResult.FAILURE
        reason = "no answer, or refused"
        try:
            result = self._inner.export(spans)
        except Exception as error:  # whatever an exporter raises, it is a failed export
            result, reason = SpanExportResult.FAILURE, repr(error)
        if result is SpanExportResult.SUCCESS:
            self._strikes = 0
            return result
        self.dropped += len(spans)
        self._rest_until = time.monotonic() + REST_S[min(self._strikes, len(REST_S) - 1)]
        self._strikes += 1
        if not self._warned and not self._closed:
            self._warned = True
            log.warning("no spans reach %s (%s); serving goes on, spans are dropped until they do", self._where, reason)
        return result

    def give_up(self) -> None:
        """Ends the export in progress. Callable from any thread, any number of times."""
        if not self._closed:
            self._closed = True
            self._inner.shutdown()

    def shutdown(self) -> None:
        """Called by the processor when its queue is empty."""
        self.give_up()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept here."""
        return True


class OtelSpans:
    """A SpanSink before OpenTelemetry's batch processor."""

    def __init__(self, exporter: SpanExporter, resource: Resource, where: str = "the exporter") -> None:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # reads OTEL_TRACES_SAMPLER
        self._sampler = provider.sampler
        self._resource = provider.resource
        self._guard = GuardedExporter(exporter, where)
        self._processor: SpanProcessor = BatchSpanProcessor(
            self._guard,
            max_queue_size=_unless("OTEL_BSP_MAX_QUEUE_SIZE", MAX_QUEUE),
            schedule_delay_millis=_unless("OTEL_BSP_SCHEDULE_DELAY", SCHEDULE_DELAY_MS),
            max_export_batch_size=_unless("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", MAX_BATCH),
        )
        self._closed = False

    def __repr__(self) -> str:
        return f"OtelSpans(closed={self._closed}, dropped={self._guard.dropped})"

    def sampled(self, name: str, trace_id: int, parent: SpanRef | None) -> bool:
        """See SpanSink."""
        context = Context()
        if parent is not None:
            context = trace.set_span_in_context(NonRecordingSpan(_context(parent, remote=True)), context)
        return self._sampler.should_sample(context, trace_id, name).decision is Decision.RECORD_AND_SAMPLE

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
        """See SpanSink."""
        if self._closed:
            return
        self._processor.on_end(
            ReadableSpan(
                name,
                context=_context(ref, remote=False),
                parent=None if parent is None else _context(parent, remote=kind == "server"),
                resource=self._resource,
                attributes=attributes,
                links=[Link(_context(link, remote=False)) for link in links],
                kind=_KINDS[kind],
                status=_UNSET if error is None else Status(StatusCode.ERROR, error),
                start_time=start_ns,
                end_time=max(start_ns, end_ns),
                instrumentation_scope=_SCOPE,
            )
        )

    def flush(self) -> None:
        """Sends what waits. For tests."""
        self._processor.force_flush()

    def close(self, timeout_s: float = 2.0) -> None:
        """See SpanSink."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + timeout_s
        sender = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        sender.start()
        sender.join(0.75 * timeout_s)
        self._guard.give_up()
        sender.join(max(0.0, end - time.monotonic()))
        if self._guard.dropped:
            log.info("%d spans were not delivered", self._guard.dropped)


def _context(ref: SpanRef, remote: bool) -> SpanContext:
    return SpanContext(ref.trace_id, ref.span_id, remote, TraceFlags(ref.flags))


def _unless(variable: str, value: int) -> int | None:
    """Our default, unless the standard variable says something: then None, and OpenTelemetry reads it."""
    return None if os.environ.get(variable) else value


def _resource(service: str, instance: str) -> Resource:
    """Who emits. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over our names, as the standard has it."""
    ours: dict[str, str | int] = {"service.name": service, "service.version": __version__, "process.pid": os.getpid()}
    if instance:
        ours["service.instance.id"] = instance
    if os.environ.get("OTEL_SERVICE_NAME"):
        del ours["service.name"]
    named = [part.partition("=")[0].strip() for part in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")]
    return Resource.create({key: value for key, value in ours.items() if key not in named})


def otlp_spans(service: str, instance: str, endpoint: str) -> OtelSpans:
    """Spans to the collector that the OTEL variables name. Raises whatever they hold that cannot be used."""
    settings: dict[str, Any] = {}
    if not (os.environ.get("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT") or os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT")):
        settings["timeout"] = EXPORT_TIMEOUT_S
    spans = OtelSpans(OTLPSpanExporter(**settings), _resource(service, instance), endpoint)
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
    library = logging.getLogger("opentelemetry")
    if library.level == logging.NOTSET:
        library.setLevel(logging.CRITICAL)  # GuardedExporter speaks for it, once
    return spans
