"""The coordinator's metrics: raw counters, read when somebody asks, and a few histograms.

Law. Counters are the driver's own and are read at scrape time, so a round pays only for its histograms; they never fall. A chunk
is what one round commits: time per token divides by tokens, time per chunk does not, and they are separate metrics. Nothing here
can fail a request; a value that cannot be read is left out of that scrape.

Queries: draft acceptance rate = rate(spec_decode_num_accepted_tokens_total) / rate(spec_decode_num_draft_tokens_total); mean
acceptance length = 1 + rate(spec_decode_num_accepted_tokens_total) / rate(spec_decode_num_drafts_total); bytes per committed
token = rate(wire_bytes_total) / rate(generation_tokens_total).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from coordinator.clock import RequestClock
from coordinator.fleet import Standing
from coordinator.histogram import RawHistogram
from coordinator.observe import NO_TRACE, Call
from coordinator.session import Session
from specwire.law.errors import InvalidArgument, SpecwireError
from specwire.law.values import Source
from specwire.telemetry import METRICS, Metric
from specwire.wire.stopwatch import Passage, now_ns

if TYPE_CHECKING:
    from coordinator.driver import Driver

log = logging.getLogger(__name__)

REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
TOKEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
LINK_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
OUTCOMES = ("finished", "failed", "cancelled", "refused")

Sample = tuple[tuple[str, ...], float]
"""Label values in the metric's order, and the value."""


@dataclass(slots=True)
class _Pace:
    """When a request's chunks came."""

    first_ns: int
    first_tokens: int
    last_ns: int
    wire_bytes: int = 0
    """Of these, counted."""


class CoordinatorMetrics(Collector):
    """An Observer that counts, and what Prometheus collects from. Its only growing state is the requests in progress."""

    def __init__(self, vllm_names: bool = False) -> None:
        self.registry = CollectorRegistry()
        self._vllm_names = vllm_names
        self._driver: Driver | None = None
        self._paces: dict[int, _Pace] = {}
        self._prompt_tokens = 0
        self._wire_bytes = 0
        self._server: tuple[Any, Any] | None = None
        self._ttft, self._e2e, self._queue = (RawHistogram(REQUEST_S) for _ in range(3))
        self._per_output_token, self._per_token, self._per_chunk = (RawHistogram(TOKEN_S) for _ in range(3))
        self._draft, self._verify = RawHistogram(LINK_S), RawHistogram(LINK_S)
        self._transfer = {link: RawHistogram(LINK_S) for link in ("draft", "target")}
        self._compute = {link: RawHistogram(LINK_S) for link in ("draft", "target")}
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def __repr__(self) -> str:
        return f"CoordinatorMetrics(requests={len(self._paces)})"

    def watch(self, driver: Driver) -> None:
        """Whose counters are read."""
        self._driver = driver

    # ---------------------------------------------------------------- Observer

    def opened(self, session: Session) -> None:
        """See Observer."""
        self._prompt_tokens += len(session.spec.prompt)

    def round_begun(self, session: Session) -> tuple[bytes, bytes]:
        """See Observer."""
        if session.tally.rounds == 0:
            self._queue.observe(session.clock.admission_us / 1e6)
        return NO_TRACE, NO_TRACE

    def drafted(self, session: Session, way: Passage, tokens: int) -> None:
        """See Observer."""
        self._draft.observe(way.total_us / 1e6)
        self._transfer["draft"].observe(way.transfer_us / 1e6)
        self._compute["draft"].observe(way.compute_us / 1e6)

    def round_done(
        self, session: Session, index: int, source: Source, drafted: int, accepted: int, committed: int, way: Passage
    ) -> None:
        """See Observer."""
        self._verify.observe(way.total_us / 1e6)
        self._transfer["target"].observe(way.transfer_us / 1e6)
        self._compute["target"].observe(way.compute_us / 1e6)
        if committed <= 0:
            return
        now = now_ns()
        pace = self._paces.get(session.counter)
        if pace is None:
            pace = self._paces[session.counter] = _Pace(now, committed, now)
            self._ttft.observe((now - session.clock.arrived_ns) / 1e9)
        else:
            gap = (now - pace.last_ns) / 1e9
            self._per_chunk.observe(gap)
            self._per_token.observe(gap / committed, committed)
            pace.last_ns = now
        self._wire_bytes += session.clock.wire_bytes - pace.wire_bytes
        pace.wire_bytes = session.clock.wire_bytes

    def fallback(self, session: Session, cause: str) -> None:
        """See Observer."""

    def ended(self, session: Session) -> None:
        """See Observer."""
        pace = self._paces.pop(session.counter, None)
        if session.outcome != "finished":
            return
        self._e2e.observe((session.clock.ended_ns - session.clock.arrived_ns) / 1e9)
        if pace is not None and session.generated > pace.first_tokens:
            after_first = session.generated - pace.first_tokens
            self._per_output_token.observe((pace.last_ns - pace.first_ns) / 1e9 / after_first)

    def refused(self, call: Call, clock: RequestClock, error: SpecwireError) -> None:
        """See Observer."""

    # ---------------------------------------------------------------- reading

    def _counters(self, driver: Driver) -> dict[str, list[Sample]]:
        """Containers are copied first: the event loop goes on writing them."""
        tally, outcomes = driver.books.tally, dict(driver.books.outcomes)
        workers = list(driver.fleet.workers.values())
        links = [driver.roster.link(worker.name) for worker in workers]
        names = [(worker.name, worker.info.role) for worker in workers]
        trips = [0 if link is None else link.round_trip_us() for link in links]
        found: dict[str, list[Sample]] = {
            "spec_decode_num_drafts": [((), tally.drafts)],
            "spec_decode_num_draft_tokens": [((), tally.drafted)],
            "spec_decode_num_accepted_tokens": [((), tally.accepted)],
            "spec_decode_num_accepted_tokens_per_pos": [
                ((str(position),), count) for position, count in enumerate(list(tally.per_position))
            ],
            "draft_tokens_by_source": [
                (("draft_model",), tally.drafted_by_model),
                (("ngram",), tally.drafted_by_ngram),
            ],
            "accepted_tokens_by_source": [
                (("draft_model",), tally.accepted_by_model),
                (("ngram",), tally.accepted_by_ngram),
            ],
            "rounds": [((), tally.rounds)],
            "fallbacks": [((cause,), count) for cause, count in dict(driver.books.fallbacks).items()],
            "draft_guesses": [((result,), driver.books.guesses[result]) for result in ("hit", "miss")],
            "replays": [((cause,), count) for cause, count in dict(driver.books.replays).items()],
            "stale_answers": [((), driver.books.stale_answers)],
            "requests": [((outcome,), outcomes.get(outcome, 0)) for outcome in OUTCOMES],
            "generation_tokens": [((), driver.books.generated_tokens)],
            "prompt_tokens": [((), self._prompt_tokens)],
            "wire_bytes": [((), self._wire_bytes)],
            "num_requests_running": [((), len(driver.admission.running))],
            "num_requests_waiting": [((), len(driver.admission.waiting))],
            "sessions": [(name, len(w.sessions)) for name, w in zip(names, workers, strict=True)],
            "cache_slots": [(name, w.info.max_sessions) for name, w in zip(names, workers, strict=True)],
            "cache_tokens": [
                (name, w.info.max_sessions * w.info.max_context) for name, w in zip(names, workers, strict=True)
            ],
            "ready": [(name, w.standing is Standing.READY) for name, w in zip(names, workers, strict=True)],
            "link_round_trip_seconds": [(name, us / 1e6) for name, us in zip(names, trips, strict=True) if us],
        }
        return found

    def _histograms(self) -> dict[str, list[tuple[tuple[str, ...], RawHistogram]]]:
        return {
            "time_to_first_token_seconds": [((), self._ttft)],
            "time_per_output_token_seconds": [((), self._per_output_token)],
            "inter_token_latency_seconds": [((), self._per_token)],
            "inter_chunk_latency_seconds": [((), self._per_chunk)],
            "e2e_request_latency_seconds": [((), self._e2e)],
            "request_queue_time_seconds": [((), self._queue)],
            "draft_seconds": [((), self._draft)],
            "verify_seconds": [((), self._verify)],
            "transfer_seconds": [((link,), histogram) for link, histogram in self._transfer.items()],
            "compute_seconds": [((link,), histogram) for link, histogram in self._compute.items()],
        }

    def describe(self) -> Iterable[Any]:
        """Nothing: registering must not read what is not there yet."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Called by the scrape's thread."""
        counters: dict[str, list[Sample]] = {}
        if self._driver is not None:
            try:
                counters = self._counters(self._driver)
            except Exception:  # a scrape without counters is better than none
                log.exception("counters cannot be read")
        for name, samples in counters.items():
            yield from self._families(name, samples)
        for name, histograms in self._histograms().items():
            yield from self._families(name, histograms)

    def _families(self, name: str, samples: Sequence[tuple[tuple[str, ...], Any]]) -> Iterator[Any]:
        metric = METRICS[f"specwire:{name}"]
        yield _family(metric, metric.name, metric.labels, samples)
        if self._vllm_names and metric.vllm:
            model = _model(self._driver)
            labelled = [((*labels, model), value) for labels, value in samples]
            yield _family(metric, f"vllm:{name}", (*metric.labels, "model_name"), labelled)

    # ---------------------------------------------------------------- /metrics

    def serve(self, host: str, port: int) -> int:
        """Opens /metrics on a thread of its own. Returns the port. Raises InvalidArgument on one that is taken."""
        try:
            self._server = start_http_server(port, host, self.registry)
        except OSError as error:
            raise InvalidArgument("metrics_port", port, f"a free port of {host} ({error.strerror})") from error
        return int(self._server[0].server_port)

    def close(self) -> None:
        """Closes /metrics. Blocks for at most half a second."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()


def _model(driver: Driver | None) -> str:
    if driver is None or driver.config.model_name:
        return driver.config.model_name if driver is not None else ""
    target = driver.fleet.pick("target")
    return target.info.model if target is not None else ""


def _family(
    metric: Metric, name: str, labels: tuple[str, ...], samples: Sequence[tuple[tuple[str, ...], Any]]
) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(name, metric.meaning, labels=labels)
        for values, raw in samples:
            histogram.add_metric(values, raw.buckets(), raw.total)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(name, metric.meaning, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
