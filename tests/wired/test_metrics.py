"""/metrics of real services: what it says is what clients were told, and it never falls."""

from __future__ import annotations

import asyncio
import itertools
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from coordinator.metrics import CoordinatorMetrics
from coordinator.observe import Observers
from specwire import telemetry
from specwire.lm.table_config import TableConfig
from tests.support.service import Service, like, on_the_loop, service

TARGET = TableConfig(vocab_size=32, seed=3, sharpness=3.0, order=2, max_context=512)
DRAFT = like(TARGET, disagreement=0.3)
SPECULATION = {"num_speculative_tokens": 4, "method": "draft_model", "draft_timeout_ms": 10_000}
WITH_METRICS: dict[str, Any] = {
    "metrics_port": 0,
    "target_settings": {"metrics_port": 0},
    "draft_settings": {"metrics_port": 0},
    "speculation": SPECULATION,
}

Scrape = dict[tuple[str, tuple[str, ...]], float]


def metrics_port(stack: Service) -> int:
    """The coordinator's; it was free to choose."""
    observers = stack.driver.observer
    assert isinstance(observers, Observers)
    (metrics,) = (each for each in observers._observers if isinstance(each, CoordinatorMetrics))
    assert metrics._server is not None
    return int(metrics._server[0].server_port)


def read(port: int) -> Scrape:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(stack: Service, name: str = "") -> Scrape:
    """The coordinator's metrics, or a worker's by name."""
    port = stack.workers[name].metrics_port if name else metrics_port(stack)
    assert port is not None
    return await asyncio.to_thread(read, port)


def total(found: Scrape, name: str) -> float:
    """Over all labels."""
    return sum(value for (sample, _), value in found.items() if sample == f"specwire:{name}")


@on_the_loop
async def test_metrics_say_what_clients_were_told() -> None:
    """Sums over requests, at the coordinator; and the workers counted the same tokens."""
    async with service(TARGET, DRAFT, **WITH_METRICS) as stack:
        answers = await asyncio.gather(
            *(stack.ask((1, 2, 3), max_tokens=30, seed=seed, temperature=seed / 4) for seed in range(6))
        )
        await stack.quiet()
        found, target, draft = await scrape(stack), await scrape(stack, "target-0"), await scrape(stack, "draft-0")

        told = [answer.speculation for answer in answers]
        assert total(found, "spec_decode_num_drafts_total") == sum(each.drafts for each in told)
        assert total(found, "spec_decode_num_draft_tokens_total") == sum(each.drafted for each in told) > 0
        assert total(found, "spec_decode_num_accepted_tokens_total") == sum(each.accepted for each in told) > 0
        assert total(found, "spec_decode_num_accepted_tokens_per_pos_total") == sum(each.accepted for each in told)
        assert total(found, "rounds_total") == sum(each.rounds for each in told)
        assert total(found, "generation_tokens_total") == sum(len(answer.ids) for answer in answers)
        assert total(found, "prompt_tokens_total") == 18
        assert found["specwire:requests_total", ("finished",)] == 6
        assert total(found, "e2e_request_latency_seconds_count") == 6
        assert total(found, "time_to_first_token_seconds_count") == 6
        assert total(found, "request_queue_time_seconds_count") == 6
        assert total(found, "verify_seconds_count") == sum(each.rounds for each in told)
        assert total(found, "draft_seconds_count") == sum(each.drafts for each in told)
        chunks = sum(len(answer.chunks) for answer in answers)
        after_first = sum(len(answer.ids) - len(answer.chunks[0].ids) for answer in answers)
        assert total(found, "inter_chunk_latency_seconds_count") == chunks - 6
        assert total(found, "inter_token_latency_seconds_count") == after_first
        assert 0 < total(found, "wire_bytes_total") <= sum(a.final.timing.wire_bytes for a in answers if a.final)
        assert total(target, "worker_proposed_tokens_total") == total(found, "spec_decode_num_draft_tokens_total")
        assert total(target, "worker_accepted_tokens_total") >= total(found, "spec_decode_num_accepted_tokens_total")
        assert total(draft, "worker_proposed_tokens_total") >= total(found, "spec_decode_num_draft_tokens_total")
        for role, worker in (("target", target), ("draft", draft)):
            assert found["specwire:cache_slots", (role, f"{role}-0")] == 16
            assert found["specwire:cache_tokens", (role, f"{role}-0")] == 16 * TARGET.max_context
            assert found["specwire:sessions", (role, f"{role}-0")] == total(worker, "worker_sessions") == 0
            assert total(worker, "worker_steps_total") > 0


@on_the_loop
async def test_what_is_emitted_is_in_the_table() -> None:
    """Every sample of every service; vLLM's names only where they were asked for."""
    async with service(TARGET, DRAFT, vllm_metric_names=True, **WITH_METRICS) as stack:
        await stack.ask((1, 2, 3), max_tokens=20)
        found = [await scrape(stack), await scrape(stack, "target-0"), await scrape(stack, "draft-0")]

    emitted = {name for each in found for name, _ in each if not name.startswith(("process_", "python_"))}
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
    made_by_the_library = {"counter": ("_created",), "gauge": (), "histogram": ("_created",)}
    listed = {m.name + end for m in telemetry.METRICS.values() for end in suffixes[m.kind]}
    extra = {m.name + end for m in telemetry.METRICS.values() for end in made_by_the_library[m.kind]}
    theirs = {name.replace("specwire:", "vllm:") for name in listed}

    assert emitted <= listed | extra | theirs
    assert {name for name in emitted if name.startswith("vllm:")} >= {
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    }


@on_the_loop
async def test_counters_never_fall_and_gauges_return_to_nothing() -> None:
    """Scraped while requests run, finish and are dropped (reports 114, 146)."""
    async with service(TARGET, DRAFT, **WITH_METRICS) as stack:

        async def drop(after: int) -> None:
            stream = stack.client.generate(prompt_ids=(1, 2), max_tokens=400)
            async for _ in stream:
                after -= 1
                if after < 0:
                    break
            await stream.aclose()  # type: ignore[attr-defined]

        work = asyncio.gather(
            *(drop(n) for n in range(6)), *(stack.ask((1, 2, 3), max_tokens=60, seed=n) for n in range(4))
        )
        scrapes = [await scrape(stack)]
        while not work.done():
            scrapes.append(await scrape(stack))
        await work
        await stack.quiet()
        scrapes.append(await scrape(stack))

        for before, after in itertools.pairwise(scrapes):
            for (name, labels), value in before.items():
                if name.endswith(("_total", "_count", "_bucket")) and name.startswith("specwire:"):
                    assert after[name, labels] >= value, name
        last = scrapes[-1]
        assert last["specwire:requests_total", ("finished",)] == 4
        assert last["specwire:requests_total", ("cancelled",)] == 6
        assert (
            total(last, "num_requests_running") == total(last, "num_requests_waiting") == total(last, "sessions") == 0
        )
        assert total(last, "ready") == 2


@on_the_loop
async def test_without_a_port_there_are_no_metrics() -> None:
    """Nobody watches, and the service is as quick as it can be."""
    async with service(TARGET, DRAFT, trace_detail="off") as stack:
        assert repr(stack.driver.observer) == "Observers([])"
        assert stack.workers["target-0"].metrics_port is None
