"""Spans of real services over real gRPC, caught by a real OTLP receiver.

The draft's clock is 200 ms fast, the target's 200 ms slow.
The reference for what spans say is the final event that the client got; for tokens, the table model decoded by itself."""

from __future__ import annotations

import secrets
import socket
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from specwire import telemetry
from specwire.client import make_request
from specwire.lm.table_config import TableConfig
from specwire.v1 import inference_pb2 as pb
from tests.support.service import Service, expected_ids, like, on_the_loop, service
from tests.support.spans import Receiver, Written, check_attributes, check_tree, receiving
from tests.support.traced import TracedProcesses, processes

TARGET = TableConfig(vocab_size=32, seed=3, sharpness=3.0, order=2, max_context=2300)
DRAFT = like(TARGET, disagreement=0.3)
SKEW_MS = {"draft": 200, "target": -200}
SPECULATION = {"num_speculative_tokens": 4, "method": "draft_model", "draft_timeout_ms": 10_000}
COLLECTOR = "OTEL_EXPORTER_OTLP_ENDPOINT"
QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
ENDED_S = 20.0
"""Far above what ending takes on a busy machine, and far below what waiting for a collector's time-outs would."""
EDGES = {("specwire-coordinator", "specwire-draft"), ("specwire-coordinator", "specwire-target")}
"""Directed edges between services that a trace must show."""


@dataclass
class Traced:
    """Three processes and where their spans arrive."""

    stack: TracedProcesses
    receiver: Receiver

    def ask(self, traceparent: str = "", timeout: float = 30.0, **fields: Any) -> tuple[tuple[int, ...], pb.Final]:
        """One request to its end."""
        metadata = (("traceparent", traceparent),) if traceparent else ()
        channel, stub = self.stack.stub()
        ids: list[int] = []
        with channel:
            for event in stub.Generate(make_request(**fields), timeout=timeout, metadata=metadata):
                ids.extend(event.tokens.ids)
        return tuple(ids), event.final

    def request(self, request_id: str) -> Written:
        """The one `generate` span of a request; waits for it."""
        spans = self.receiver.until(lambda spans: any(_of(span, request_id) for span in spans))
        (found,) = [span for span in spans if _of(span, request_id)]
        return found

    def trace(self, request_id: str) -> list[Written]:
        """All spans of a request's trace, once the workers' have come too."""
        top = self.request(request_id)

        def whole(spans: list[Written]) -> bool:
            ours = [span for span in spans if span.trace_id == top.trace_id]
            parents = {span.parent_id for span in ours}
            calls = [span for span in ours if span.kind == "client"]
            return (
                all(call.span_id in parents for call in calls) and len([s for s in ours if s.name == "round"]) == traced
            )

        traced = top.attributes["specwire.rounds_traced"]
        return [span for span in self.receiver.until(whole) if span.trace_id == top.trace_id]


def _of(span: Written, request_id: str) -> bool:
    return span.name == "generate" and span.attributes["specwire.request_id"] == request_id


def fresh_id() -> str:
    """Marks one request among the spans of all."""
    return secrets.token_hex(8)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """Detail `round`, four tokens a block."""
    with receiving() as (receiver, endpoint):
        environ = {COLLECTOR: endpoint, **QUICK}
        logs = tmp_path_factory.mktemp("logs")
        with processes(logs, environ, TARGET, DRAFT, SKEW_MS, trace_detail="round", speculation=SPECULATION) as stack:
            yield Traced(stack, receiver)


def children(spans: list[Written], parent: Written, name: str) -> list[Written]:
    """In the order of their begins."""
    return sorted((s for s in spans if s.parent_id == parent.span_id and s.name == name), key=lambda s: s.start_ns)


# ---------------------------------------------------------------- one request


def test_one_request_is_one_trace_through_three_services(traced: Traced) -> None:
    """Every span's parent exists, the draft's and the target's work under the calls, the calls under rounds (report 150)."""
    name = fresh_id()
    traced.ask(prompt_ids=[1, 2, 3], max_tokens=30, seed=5, request_id=name)
    spans = traced.trace(name)

    check_tree(spans)
    by_id = {span.span_id: span for span in spans}
    services = {span.service for span in spans}
    edges = {
        (by_id[s.parent_id].service, s.service)
        for s in spans
        if s.parent_id and by_id[s.parent_id].service != s.service
    }
    assert services == set(telemetry.SERVICES.values())
    assert edges == EDGES
    for span in spans:
        assert span.service == telemetry.SERVICES[telemetry.SPANS[span.name].role]
        if span.kind == "client":
            assert len(children(spans, span, span.name.replace("propose", "compute").replace("verify", "compute"))) == 1


def test_spans_come_from_the_processes_themselves(traced: Traced) -> None:
    """Each names its own process and worker (report 167)."""
    name = fresh_id()
    traced.ask(prompt_ids=[1, 2, 3], max_tokens=6, request_id=name)
    pids = {span.service: span.resource["process.pid"] for span in traced.trace(name)}
    names = {span.service: span.resource["service.instance.id"] for span in traced.trace(name)}

    assert pids == {f"specwire-{name.partition('-')[0]}": p.pid for name, p in traced.stack.running.items()}
    assert names == {"specwire-coordinator": "coordinator", "specwire-target": "target-0", "specwire-draft": "draft-0"}


def test_spans_and_the_final_event_tell_the_same(traced: Traced) -> None:
    """Counts, seeds, timings, and round by round."""
    name = fresh_id()
    ids, final = traced.ask(
        prompt_ids=[1, 2, 3], max_tokens=40, temperature=0.5, seed=2**63, request_id=name, return_rounds=True
    )
    spans = traced.trace(name)
    (top,) = [span for span in spans if span.name == "generate"]
    said = top.attributes

    assert ids == expected_ids(TARGET, (1, 2, 3), 40, seed=2**63, temperature=0.5)
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (3, 40)
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert said["specwire.seed"] == str(2**63)
    assert said["gen_ai.request.temperature"] == 0.5
    for field in ("rounds", "drafts", "drafted", "accepted", "fallbacks"):
        assert said[f"specwire.{field}"] == getattr(final.speculation, field), field
    for field in pb.Timing.DESCRIPTOR.fields:
        dotted = field.name.replace("draft_", "draft.", 1).replace("target_", "target.", 1)
        assert said[f"specwire.{dotted}"] == getattr(final.timing, field.name), field.name
    assert top.us == pytest.approx(final.timing.total_us, abs=2)

    rounds = children(spans, top, "round")
    assert len(rounds) == len(final.rounds) == final.speculation.rounds
    for span, told in zip(rounds, final.rounds, strict=True):
        assert span.attributes["specwire.round"] == told.index
        assert span.attributes["specwire.drafted"] == told.drafted
        assert span.attributes["specwire.accepted"] == told.accepted
        assert span.attributes["specwire.committed"] == told.committed
        assert span.attributes["specwire.block_source"] == told.source
        (verify,) = children(spans, span, "target.verify")
        assert verify.attributes["specwire.transfer_us"] == told.target_transfer_us
        assert verify.attributes["specwire.compute_us"] == told.target_compute_us
        for propose in children(spans, span, "draft.propose"):
            assert propose.attributes["specwire.transfer_us"] == told.draft_transfer_us
            assert propose.attributes["specwire.compute_us"] == told.draft_compute_us


def test_skewed_clocks_change_no_duration_and_no_split(traced: Traced) -> None:
    """The workers' spans lie 200 ms beside their calls; parts are disjoint, fill the call, and are never negative (report 158)."""
    name = fresh_id()
    traced.ask(prompt_ids=[1, 2, 3], max_tokens=30, request_id=name)
    spans = traced.trace(name)
    calls = [span for span in spans if span.kind == "client"]
    parts = ("wait", "transfer", "queue", "compute", "overhead")

    assert {call.name for call in calls} == {"draft.propose", "target.verify"}
    for call in calls:
        role = call.name.partition(".")[0]
        (work,) = children(spans, call, f"{role}.compute")
        assert (work.start_ns - call.start_ns) / 1e6 == pytest.approx(SKEW_MS[role], abs=100)
        assert 0 < work.us <= call.us
        assert work.attributes["specwire.clock"]
        assert work.attributes["specwire.compute_us"] == pytest.approx(call.attributes["specwire.compute_us"], abs=50)
        split = [call.attributes[f"specwire.{part}_us"] for part in parts]
        assert min(split) >= 0
        assert sum(split) == pytest.approx(call.us, abs=2)


def test_steps_are_roots_linked_with_the_work_in_them(traced: Traced) -> None:
    """Both ways, and each step once."""
    name = fresh_id()
    traced.ask(prompt_ids=[1, 2, 3], max_tokens=20, request_id=name)
    work = {s.span_id: s for s in traced.trace(name) if s.name.endswith(".compute")}
    wanted = {link for span in work.values() for link in span.links}
    all_spans = traced.receiver.until(lambda spans: wanted <= {(s.trace_id, s.span_id) for s in spans})
    steps = {(s.trace_id, s.span_id): s for s in all_spans if (s.trace_id, s.span_id) in wanted}

    assert all(span.links for span in work.values())
    for (trace_id, span_id), step in steps.items():
        assert step.name.endswith(".step")
        assert step.parent_id == 0
        check_attributes(step)
        linked = {link_id for _, link_id in step.links}
        assert {s.span_id for s in work.values() if (trace_id, span_id) in s.links} == linked & set(work)
    assert all(span.service == steps[span.links[0]].service for span in work.values())


def test_a_clients_trace_goes_on(traced: Traced) -> None:
    """Sampled by the client: its span is the parent. Not sampled: nothing is recorded and nothing is on the wire."""
    name, unseen = fresh_id(), fresh_id()
    trace_id, span_id = secrets.randbits(128) | 1, secrets.randbits(64) | 1
    traced.ask(f"00-{trace_id:032x}-{span_id:016x}-00", prompt_ids=[1], max_tokens=4, request_id=unseen)
    traced.ask(f"00-{trace_id:032x}-{span_id:016x}-01", prompt_ids=[1], max_tokens=4, request_id=name)
    spans = traced.trace(name)

    check_tree(spans, span_id)
    assert {span.trace_id for span in spans} == {trace_id}
    assert not [span for span in traced.receiver.spans if _of(span, unseen)]


def test_a_large_request_keeps_its_key_attributes(traced: Traced) -> None:
    """Many fields set and a long id: far below 128 attributes, nothing of the prompt (report 162)."""
    name = fresh_id() + "x" * 112
    traced.ask(
        prompt_ids=[7] * 200,
        max_tokens=5,
        temperature=1.5,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        stop_token_ids=list(range(8, 32)),
        num_speculative_tokens=3,
        method="draft_model",
        law="rejection",
        request_id=name,
    )
    said = traced.request(name).attributes

    assert len(said) < 70
    assert (said["specwire.law"], said["specwire.method"]) == ("rejection", "draft_model")
    assert said["gen_ai.request.top_k"] == 20
    assert {"specwire.rounds", "specwire.drafted", "specwire.accepted", "gen_ai.usage.output_tokens"} <= set(said)


# ---------------------------------------------------------------- requests that do not finish


def test_refused_requests_have_one_span(traced: Traced) -> None:
    """With field and limit, without the value."""
    name = fresh_id()
    with pytest.raises(grpc.RpcError):
        traced.ask(prompt_ids=[1], temperature=1000.0, request_id=name)
    span = traced.request(name)

    assert (span.attributes["specwire.outcome"], span.attributes["rpc.response.status_code"]) == (
        "refused",
        "INVALID_ARGUMENT",
    )
    assert span.error is not None
    assert "temperature" in span.error


def test_cancelled_requests_end_once_and_log_nothing(traced: Traced) -> None:
    """Before, at and after the first token, and streams that are never read: one ended span each, no words in the log, and the next
    request's tree is whole (reports 152, 154)."""
    names = [fresh_id() for _ in range(60)]
    channel, stub = traced.stack.stub()
    with channel:
        for number, name in enumerate(names):
            call = stub.Generate(make_request(prompt_ids=[1, 2], max_tokens=2000, request_id=name), timeout=20)
            if number % 6 != 5:  # every sixth is never read
                for _ in range(number % 3 + 1):
                    next(call)
            call.cancel()
    last = fresh_id()
    traced.ask(prompt_ids=[1, 2, 3], max_tokens=10, request_id=last)
    check_tree(traced.trace(last))

    read = {name for number, name in enumerate(names) if number % 6 != 5}
    spans = traced.receiver.until(lambda spans: read <= {s.attributes.get("specwire.request_id") for s in spans})
    ended = [span for span in spans if span.name == "generate" and span.attributes["specwire.request_id"] in names]
    assert len({span.attributes["specwire.request_id"] for span in ended}) == len(ended)
    for span in ended:
        assert (span.attributes["specwire.outcome"], span.error) == ("cancelled", "cancelled")
        check_tree(
            [s for s in traced.receiver.spans if s.trace_id == span.trace_id and s.service == "specwire-coordinator"]
        )
    for service_name in traced.stack.running:
        log = traced.stack.log(service_name)
        assert "detach" not in log
        assert "different Context" not in log
        assert "Traceback" not in log


# ---------------------------------------------------------------- what tracing must not change


@pytest.fixture
def otel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables for services in this process."""
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


async def stop_workers(stack: Service) -> None:
    """As SIGTERM does, so that the last spans are sent."""
    for name in list(stack.workers):
        await stack.workers.pop(name).stop()


@pytest.mark.slow
def test_a_long_answer_has_a_bounded_number_of_spans(traced: Traced) -> None:
    """2,000 tokens: sums of all rounds, spans of the first 64 and one in 16 (report 160)."""
    name = fresh_id()
    _, final = traced.ask(prompt_ids=[1, 2, 3], max_tokens=2000, request_id=name, num_speculative_tokens=8, timeout=120)
    spans = traced.trace(name)
    rounds = final.speculation.rounds
    expected = 64 + len([index for index in range(64, rounds) if index % 16 == 0])

    check_tree(spans)
    assert traced.request(name).attributes["specwire.rounds"] == rounds
    assert len([span for span in spans if span.name == "round"]) == expected
    assert len(spans) <= 1 + 5 * expected


@pytest.mark.parametrize("detail", ["off", "request", "round"])
def test_tokens_are_the_same_at_every_detail(otel: pytest.MonkeyPatch, detail: str) -> None:
    """And the detail decides which spans there are (report 156)."""
    with receiving() as (receiver, endpoint):
        otel.setenv(COLLECTOR, endpoint)

        @on_the_loop
        async def play() -> None:
            async with service(TARGET, DRAFT, trace_detail=detail, speculation=SPECULATION) as stack:
                answer = await stack.ask((1, 2, 3), max_tokens=40, seed=11, temperature=0.8)
                await stop_workers(stack)
                assert answer.ids == expected_ids(TARGET, (1, 2, 3), 40, seed=11, temperature=0.8)
                assert answer.speculation.accepted > 0

        play()
        names = {span.name for span in receiver.spans}

    assert names == {"off": set(), "request": {"generate"}, "round": set(telemetry.SPANS)}[detail]


def test_without_the_variables_no_span_is_made(otel: pytest.MonkeyPatch) -> None:
    """Not one object, at the highest detail."""
    made: list[Any] = []
    otel.delenv(COLLECTOR, raising=False)
    otel.setattr(ReadableSpan, "__init__", lambda *args, **kwargs: made.append(args))

    @on_the_loop
    async def play() -> None:
        async with service(TARGET, DRAFT, trace_detail="round", speculation=SPECULATION) as stack:
            await stack.ask((1, 2, 3), max_tokens=40)
            assert repr(stack.driver.observer) == "Observers([])"

    play()

    assert made == []


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def refusing() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("collector", ["refusing", "black_hole"])
def test_a_dead_collector_slows_nothing(
    otel: pytest.MonkeyPatch, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, collector: str
) -> None:
    """Answers take as long as with tracing off, however long the spans have waited, and it is told once (report 163)."""
    otel.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "128")
    otel.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "64")

    async def timed(stack: Service) -> float:
        answer = await stack.ask((1, 2, 3), max_tokens=60)
        assert answer.final is not None
        return answer.final.timing.total_us / 1e3

    @on_the_loop
    async def play() -> None:
        settings: dict[str, Any] = {"trace_detail": "request", "speculation": SPECULATION}
        otel.delenv(COLLECTOR, raising=False)
        async with service(TARGET, DRAFT, **settings) as off:
            otel.setenv(COLLECTOR, request.getfixturevalue(collector))
            async with service(TARGET, DRAFT, **settings) as on:
                times = [(await timed(off), await timed(on)) for _ in range(8)]
                await stop_workers(on)
        plain, watched = (statistics.median(column) for column in zip(*times, strict=True))
        assert watched < 2 * plain + 50, times

    play()

    assert len([r for r in caplog.records if "no spans reach" in r.getMessage()]) <= 3
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


@pytest.mark.slow
def test_processes_end_in_time_without_their_collector(tmp_path: Any, black_hole: str) -> None:
    """With spans that nobody takes, all three end soon after SIGTERM, with status 0 (report 165)."""
    with processes(tmp_path, {COLLECTOR: black_hole, **QUICK}, TARGET, DRAFT, trace_detail="round") as stack:
        channel, stub = stack.stub()
        with channel:
            list(stub.Generate(make_request(prompt_ids=[1, 2], max_tokens=50), timeout=30))
        took = stack.end_all()

    assert max(took.values()) < ENDED_S
