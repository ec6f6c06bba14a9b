"""What Prometheus reads: raw counters that never fall, and times that know tokens from chunks."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.histogram import RawHistogram
from coordinator.metrics import CoordinatorMetrics
from coordinator.session import Session, Tally
from specwire import telemetry
from specwire.law.errors import InvalidArgument
from specwire.law.values import Source
from tests.unit.coordinator.test_tracing import WAY, Play


class Clock:
    """Nanoseconds that move when told."""

    def __init__(self) -> None:
        self.now = 1_000_000_000_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("coordinator.metrics.now_ns", clock)
    monkeypatch.setattr("tests.unit.coordinator.test_tracing.now_ns", clock)
    return clock


def driver(**changes: Any) -> Any:
    """What the scrape reads of a driver."""
    books = SimpleNamespace(
        tally=Tally(),
        outcomes=Counter(),
        replays=Counter(),
        fallbacks=Counter(),
        guesses=Counter(),
        stale_answers=0,
        generated_tokens=0,
    )
    info = SimpleNamespace(role="target", max_sessions=8, max_context=256, model="m")
    worker = SimpleNamespace(name="target-0", info=info, sessions={1, 2}, standing=None)
    link = SimpleNamespace(round_trip_us=lambda: 1500)
    parts = {
        "books": books,
        "fleet": SimpleNamespace(workers={"target-0": worker}, pick=lambda role: worker),
        "roster": SimpleNamespace(link=lambda name: link),
        "admission": SimpleNamespace(running={1: 0, 2: 0}, waiting=[3]),
        "config": SimpleNamespace(model_name=""),
    }
    return SimpleNamespace(**{**parts, **changes})


def scrape(metrics: CoordinatorMetrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Values by sample name and label values, labels in order of their names."""
    text = generate_latest(metrics.registry).decode()
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def commit(metrics: CoordinatorMetrics, session: Session, tokens: int) -> None:
    session.generated += tokens
    metrics.round_done(session, 0, Source.DRAFT_MODEL, 4, max(0, tokens - 1), tokens, WAY)


def test_time_per_token_uses_token_counts(clock: Clock) -> None:
    """100 tokens in 20 chunks, 50 ms apart: 10 ms a token, 50 ms a chunk (report 148)."""
    metrics, play = CoordinatorMetrics(), Play()
    session = play.open()
    session.clock.arrived_ns = clock.now - 200_000_000
    for _ in range(20):
        commit(metrics, session, 5)
        clock.now += 50_000_000
    clock.now -= 50_000_000
    session.outcome, session.clock.ended_ns = "finished", clock.now
    metrics.ended(session)

    found = scrape(metrics)
    assert found["specwire:inter_token_latency_seconds_count", ()] == 95
    assert found["specwire:inter_token_latency_seconds_sum", ()] == pytest.approx(0.95)
    assert found["specwire:inter_chunk_latency_seconds_count", ()] == 19
    assert found["specwire:inter_chunk_latency_seconds_sum", ()] == pytest.approx(0.95)
    assert found["specwire:time_per_output_token_seconds_count", ()] == 1
    assert found["specwire:time_per_output_token_seconds_sum", ()] == pytest.approx(0.01)
    assert found["specwire:time_to_first_token_seconds_sum", ()] == pytest.approx(0.2)
    assert found["specwire:e2e_request_latency_seconds_sum", ()] == pytest.approx(1.15)
    assert repr(metrics) == "CoordinatorMetrics(requests=0)"


def test_a_round_without_tokens_throws_nothing_and_counts_no_chunk(clock: Clock) -> None:
    """Cancelled, pushed out, or not a number (report 146)."""
    metrics, play = CoordinatorMetrics(), Play()
    session = play.open()
    commit(metrics, session, 0)
    session.outcome = "cancelled"
    metrics.ended(session)
    metrics.ended(session)

    found = scrape(metrics)
    assert found["specwire:time_to_first_token_seconds_count", ()] == 0
    assert found["specwire:e2e_request_latency_seconds_count", ()] == 0
    assert found["specwire:verify_seconds_count", ()] == 1


def test_the_drivers_counters_are_read_when_asked() -> None:
    """Under the names that tools know, with positions from 0."""
    metrics, watched = CoordinatorMetrics(), driver()
    metrics.watch(watched)
    for accepted in (4, 2, 0):
        watched.books.tally.round(Source.DRAFT_MODEL, 4, accepted)
    watched.books.tally.round(Source.NGRAM, 3, 1)
    watched.books.tally.round(Source.NONE, 0, 0)
    watched.books.fallbacks["draft_timeout"] += 2
    watched.books.guesses["miss"] += 4
    watched.books.outcomes["finished"] += 1

    found = scrape(metrics)
    assert found["specwire:spec_decode_num_drafts_total", ()] == 4
    assert found["specwire:spec_decode_num_draft_tokens_total", ()] == 15
    assert found["specwire:spec_decode_num_accepted_tokens_total", ()] == 7
    per_position = "specwire:spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[per_position, (str(position),)] for position in range(4)] == [3, 2, 1, 1]
    assert found["specwire:accepted_tokens_by_source_total", ("ngram",)] == 1
    assert found["specwire:rounds_total", ()] == 5
    assert found["specwire:fallbacks_total", ("draft_timeout",)] == 2
    assert (0, 4) == tuple(found["specwire:draft_guesses_total", (result,)] for result in ("hit", "miss"))
    assert found["specwire:requests_total", ("finished",)] == 1
    assert found["specwire:requests_total", ("cancelled",)] == 0
    assert (found["specwire:num_requests_running", ()], found["specwire:num_requests_waiting", ()]) == (2, 1)
    assert found["specwire:sessions", ("target", "target-0")] == 2
    assert found["specwire:link_round_trip_seconds", ("target", "target-0")] == 0.0015


def test_every_metric_of_the_table_is_there_and_no_other() -> None:
    """The coordinator's part of it; `process_` metrics are prometheus_client's."""
    metrics, watched = CoordinatorMetrics(), driver()
    metrics.watch(watched)
    watched.books.replays["target_lost"] += 1
    watched.books.fallbacks["draft_lost"] += 1
    families = {f.name: f for f in metrics.collect()}

    assert set(families) == {name for name in telemetry.METRICS if not name.startswith("specwire:worker_")}
    for name, family in families.items():
        assert (family.type, family.documentation) == (telemetry.METRICS[name].kind, telemetry.METRICS[name].meaning)


def test_vllm_names_are_a_setting() -> None:
    """The same numbers, with the label that its dashboards ask for."""
    metrics, watched = CoordinatorMetrics(vllm_names=True), driver()
    metrics.watch(watched)
    watched.books.tally.round(Source.DRAFT_MODEL, 4, 2)

    found = scrape(metrics)
    assert found["vllm:spec_decode_num_accepted_tokens_total", ("m",)] == 2
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", ("m", "1")] == 1
    assert ("vllm:rounds_total", ("m",)) not in found


def test_counters_that_cannot_be_read_leave_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    """A scrape is never an error."""
    metrics = CoordinatorMetrics()
    metrics.watch(driver(books=None))

    assert ("specwire:verify_seconds_count", ()) in scrape(metrics)
    assert "counters cannot be read" in caplog.text


def test_a_port_that_is_taken_is_named() -> None:
    """And the one that was opened can be closed and opened again."""
    first, second = CoordinatorMetrics(), CoordinatorMetrics()
    port = first.serve("127.0.0.1", 0)
    with pytest.raises(InvalidArgument, match="metrics_port"):
        second.serve("127.0.0.1", port)
    first.close()
    first.close()

    assert second.serve("127.0.0.1", port) == port
    second.close()


def test_a_histogram_counts_at_its_bounds() -> None:
    """A bound belongs to its bucket; what is above all goes to the last."""
    histogram = RawHistogram((1.0, 2.0))
    histogram.observe(1.0)
    histogram.observe(1.5, 3)
    histogram.observe(9.0)

    assert histogram.buckets() == [("1.0", 1.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 14.5
