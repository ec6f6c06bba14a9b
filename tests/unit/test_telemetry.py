"""Names and their document, the switch, and an exporter that cannot hurt."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specwire import telemetry
from specwire.spans import SpanRef, derived_span_id, new_span_ids, parse_traceparent, unpack
from specwire.tracing import GuardedExporter, OtelSpans

DOCUMENT = Path(__file__).parents[2] / "docs" / "telemetry.md"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


# ---------------------------------------------------------------- names


def document_rows() -> list[str]:
    """The tables as docs/telemetry.md has them."""
    spans = [
        (
            f"`{s.name}`",
            telemetry.SERVICES[s.role],
            s.kind,
            f"`{s.parent}`" if s.parent in telemetry.SPANS else s.parent or "none",
            s.meaning,
        )
        for s in telemetry.SPANS.values()
    ]
    attributes = [
        (f"`{a.name}`", a.unit or "-", ", ".join(f"`{name}`" for name in a.spans), a.meaning)
        for a in telemetry.ATTRIBUTES.values()
    ]
    metrics = [
        (
            f"`{m.name}{'_total' if m.kind == 'counter' else ''}`",
            m.kind,
            m.unit or "-",
            ", ".join(m.labels) or "-",
            m.meaning,
        )
        for m in telemetry.METRICS.values()
    ]
    return [f"| {' | '.join(row)} |" for row in (*spans, *attributes, *metrics)]


def test_the_document_shows_the_tables() -> None:
    """Each name has its row in docs/telemetry.md, with unit and meaning, and no other name has."""
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]

    assert rows == document_rows()


def test_names_are_well_formed() -> None:
    """Prefixes and kinds are what the header says; spans and attributes refer to spans that exist."""
    assert all(name == span.name and span.role in telemetry.SERVICES for name, span in telemetry.SPANS.items())
    for name, attribute in telemetry.ATTRIBUTES.items():
        assert name.split(".")[0] in ("specwire", "gen_ai", "rpc", "error")
        assert set(attribute.spans) <= set(telemetry.SPANS)
        assert attribute.meaning
    for name, metric in telemetry.METRICS.items():
        assert name.startswith("specwire:")
        assert not name.endswith("_total")
        assert metric.kind in ("counter", "gauge", "histogram")
    assert max(sum(name in a.spans for a in telemetry.ATTRIBUTES.values()) for name in telemetry.SPANS) < 128


def test_names_alone_load_nothing_heavy() -> None:
    """Neither OpenTelemetry nor gRPC nor prometheus_client."""
    code = "import sys, specwire.telemetry; print([m for m in sys.modules if m.split('.')[0] in sys.argv[1:]])"
    heavy = ("opentelemetry", "grpc", "prometheus_client", "google")
    found = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"


# ---------------------------------------------------------------- references


def test_a_reference_survives_its_25_bytes() -> None:
    """Ids at the ends of their ranges included."""
    for ref in (SpanRef(1, 1), SpanRef(2**128 - 1, 2**64 - 1, 0), SpanRef(2**127, 2**63)):
        assert len(ref.pack()) == 25
        assert unpack(ref.pack()) == ref


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", 1),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", 0),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-ff", 1),
        ("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-later", 1),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-later", None),
        ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", None),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", None),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", None),
        ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", None),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331", None),
        ("", None),
        ("nonsense", None),
    ],
)
def test_traceparent(text: str, flags: int | None) -> None:
    """As W3C has it; what is malformed begins a new trace."""
    found = parse_traceparent(text)

    if flags is None:
        assert found is None
    else:
        assert found == SpanRef(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, flags)


def test_ids_are_not_zero_and_not_repeated() -> None:
    """Drawn and derived ones."""
    drawn = [span_id for _ in range(300) for span_id in new_span_ids(3)]
    derived = [derived_span_id(SpanRef(1, span_id).pack(), 5) for span_id in drawn]

    assert len({0, *drawn, *derived}) == 1 + 2 * len(drawn)


# ---------------------------------------------------------------- the switch


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({}, None),
        ({ENDPOINT: ""}, None),
        ({ENDPOINT: "http://c:4317"}, "http://c:4317"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:4317", ENDPOINT: "http://c:4317"}, "http://t:4317"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "http://localhost:4317"),
        ({"OTEL_TRACES_EXPORTER": "none", ENDPOINT: "http://c:4317"}, None),
        ({"OTEL_TRACES_EXPORTER": "console", ENDPOINT: "http://c:4317"}, None),
        ({"OTEL_SDK_DISABLED": "true", ENDPOINT: "http://c:4317"}, None),
        ({"OTEL_SDK_DISABLED": "false", ENDPOINT: "http://c:4317"}, "http://c:4317"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", ENDPOINT: "http://c:4318"}, None),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", ENDPOINT: "http://c:4317"}, "http://c:4317"),
    ],
)
def test_the_standard_variables_decide(environ: dict[str, str], endpoint: str | None) -> None:
    """Nothing else turns tracing on."""
    assert telemetry._endpoint(environ) == endpoint


def test_off_means_that_nothing_is_made() -> None:
    """No variable, no sink, no OpenTelemetry."""
    code = """
import sys
from specwire.telemetry import setup_tracing
print(setup_tracing("specwire-draft", "d", {}), [m for m in sys.modules if m.startswith("opentelemetry")])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "None []"


def test_a_missing_extra_is_told_and_serving_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked for, but not installed."""
    monkeypatch.setitem(sys.modules, "specwire.tracing", None)

    assert telemetry.setup_tracing("specwire-draft", "d", {ENDPOINT: "http://127.0.0.1:1"}) is None
    assert "specwire[otel]" in caplog.text


def test_variables_that_cannot_be_used_are_told_and_serving_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown compression, say."""
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli")

    assert telemetry.setup_tracing("specwire-draft") is None
    assert "OTEL variables cannot be used" in caplog.text


# ---------------------------------------------------------------- the exporter


class Fake(SpanExporter):
    """Does with each batch what it is told."""

    def __init__(self, act: Callable[[], SpanExportResult]) -> None:
        self.batches = 0
        self.closed = Event()
        self._act = act

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batches += 1
        return self._act()

    def shutdown(self) -> None:
        self.closed.set()


def fail() -> SpanExportResult:
    return SpanExportResult.FAILURE


def raise_() -> SpanExportResult:
    raise OSError("no route")


def write(spans: OtelSpans, count: int = 1) -> None:
    for number in range(count):
        spans.write("round", SpanRef(7, number + 1), SpanRef(7, 99), "internal", 10, 20, {"specwire.round": number})


def test_what_is_written_arrives_whole() -> None:
    """Names, ids, kinds, times, links, status and resource."""
    memory = InMemorySpanExporter()
    spans = OtelSpans(memory, Resource({"service.name": "specwire-draft"}))
    spans.write("a", SpanRef(7, 8), SpanRef(7, 6), "server", 10, 5, {"specwire.round": 1}, [SpanRef(3, 4)], "broken")
    spans.write("b", SpanRef(7, 9), None, "client", 10, 30, {})
    spans.flush()
    spans.close()

    first, second = sorted(memory.get_finished_spans(), key=lambda span: span.name)
    assert first.context is not None
    assert first.parent is not None
    assert (first.context.trace_id, first.context.span_id, first.parent.span_id) == (7, 8, 6)
    assert (first.start_time, first.end_time) == (10, 10)
    assert [(link.context.trace_id, link.context.span_id) for link in first.links] == [(3, 4)]
    assert (first.status.is_ok, first.status.description) == (False, "broken")
    assert first.resource.attributes["service.name"] == "specwire-draft"
    assert (second.parent, second.end_time, second.status.description) == (None, 30, None)


@pytest.mark.parametrize("act", [fail, raise_])
def test_a_dead_collector_is_told_once_and_then_left_alone(
    act: Callable[[], SpanExportResult], caplog: pytest.LogCaptureFixture
) -> None:
    """One warning; while it rests, spans are dropped without an attempt (report 163)."""
    fake = Fake(act)
    guard = GuardedExporter(fake, "http://c:4317")
    spans = [ReadableSpan("x")] * 5
    for _ in range(10):
        guard.export(spans)

    assert fake.batches == 1
    assert guard.dropped == 50
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "http://c:4317" in caplog.text


def test_a_collector_that_comes_back_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the rest."""
    results = [SpanExportResult.FAILURE, SpanExportResult.SUCCESS]
    fake = Fake(lambda: results.pop(0))
    guard = GuardedExporter(fake, "c")
    now = [100.0]
    monkeypatch.setattr("specwire.tracing.time.monotonic", lambda: now[0])
    guard.export([ReadableSpan("x")])
    now[0] += 60

    assert guard.export([ReadableSpan("x")]) is SpanExportResult.SUCCESS


def test_writing_and_closing_never_wait_for_a_collector_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is full drops; close is over in time; what is written afterwards is ignored (reports 163, 165)."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "32")
    released = Event()

    def hang() -> SpanExportResult:
        released.wait()
        return SpanExportResult.FAILURE

    fake = Fake(hang)
    spans = OtelSpans(fake, Resource({}))
    begun = time.monotonic()
    write(spans, 2000)
    written = time.monotonic()
    spans.close(timeout_s=0.4)
    closed = time.monotonic()
    write(spans)
    spans.close()
    released.set()

    assert written - begun < 1.0
    assert closed - written < 0.6
    assert fake.closed.is_set()


def test_a_ratio_is_decided_once_per_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_TRACES_SAMPLER is honoured; a sampled parent is followed, and so is one that is not."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    spans = OtelSpans(InMemorySpanExporter(), Resource({}))
    roots = [spans.sampled("generate", trace_id << 100 | trace_id, None) for trace_id in range(1, 2**20, 4097)]
    spans.close()

    assert spans.sampled("generate", 5, SpanRef(5, 6, 1))
    assert not spans.sampled("generate", 5, SpanRef(5, 6, 0))
    assert {True, False} >= set(roots)


def test_always_off_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even below a parent that is recorded."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    spans = OtelSpans(InMemorySpanExporter(), Resource({}))
    spans.close()

    assert not spans.sampled("draft.compute", 5, SpanRef(5, 6, 1))
