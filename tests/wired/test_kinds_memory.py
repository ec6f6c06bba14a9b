"""Field reports, sections H and I: health, memory over many requests, and counters. Names carry the kind, docstrings the
reports."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
from collections import Counter
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.clock import RequestClock
from coordinator.ledger import Ledger
from coordinator.mirror import Mirror
from coordinator.session import Session
from specwire.law.errors import SpecwireError, Unavailable
from specwire.lm.table_config import Fault
from specwire.wire import rpc
from specwire.worker.jobs import Job
from specwire.worker.sessions import Session as WorkerSession
from tests.support.service import PATIENCE_S, POLL_S, Service, like, on_the_loop, service, the_loop
from tests.wired.conftest import DRAFTS, TARGET

PER_REQUEST = (Session, Ledger, Mirror, RequestClock, Job, WorkerSession)


@on_the_loop
async def test_kind_45_a_dead_target_shows_in_health() -> None:
    """Report 132: health turns to NOT_SERVING, requests fail at once and name the target; both recover when it is back."""
    async with service(TARGET, DRAFTS["good"]) as stack, rpc.open_channel(stack.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def health_becomes(status: int) -> None:
            for name in ("", "specwire.v1.Inference"):
                give_up = asyncio.get_running_loop().time() + PATIENCE_S
                while (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status != status:
                    assert asyncio.get_running_loop().time() < give_up
                    await asyncio.sleep(POLL_S)

        await health_becomes(health_pb2.HealthCheckResponse.SERVING)
        await stack.kill("target-0")
        await health_becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(Unavailable, match="target-0 is lost"):
            await stack.ask([1], max_tokens=3)
        await stack.restart("target-0")
        await health_becomes(health_pb2.HealthCheckResponse.SERVING)

        assert 3 == len((await stack.ask([1], max_tokens=3)).ids)


async def short_requests(stack: Service, count: int) -> Counter[str]:
    """Requests of 1 to 9 tokens that end by length, by a stop token, by leaving early or by being wrong. How many ended how."""
    dice = random.Random(8)
    numbers = iter(range(count))
    ends: Counter[str] = Counter()

    async def one(number: int) -> None:
        fields: dict[str, Any] = {
            "prompt_ids": [dice.randrange(32) for _ in range(dice.randrange(1, 6))],
            "max_tokens": dice.randrange(1, 10),
            "num_speculative_tokens": dice.choice((0, 3, 8, "auto")),
            "stop_token_ids": dice.sample(range(32), dice.choice((0, 8))),
        }
        leave_after = dice.choice((None, None, None, 0, 1, 2))
        if number % 50 == 0:
            fields["prompt_ids"] = []
        end = "left"
        stream = stack.client.generate(**fields)
        try:
            async for event in stream:
                if leave_after is not None:
                    if leave_after == 0:
                        break
                    leave_after -= 1
                end = getattr(event, "finish_reason", end)
        except SpecwireError:
            end = "refused"
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        ends[end] += 1

    async def stream_of_requests() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(stream_of_requests() for _ in range(24)))
    return ends


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_kind_49_nothing_of_a_request_stays(count: int) -> None:
    """Report 144: short requests that end at random points of a block. When idle every map that knows requests is empty, in
    all three services, and no object of any request is left anywhere in the process."""

    before = alive()  # parameters of other tests hold some

    async def run() -> None:
        async with service(TARGET, DRAFTS["middling"], lease_s=0.1, max_waiting=100) as stack:
            ends = await short_requests(stack, count)
            await stack.quiet()
            links = stack.driver.roster.links
            give_up = asyncio.get_running_loop().time() + PATIENCE_S
            while any(link._closed or link._closes or link._tasks for link in links.values()):
                assert asyncio.get_running_loop().time() < give_up
                await asyncio.sleep(POLL_S)

            assert {"left", "length", "stop", "refused"} == set(ends)
            assert count == ends.total()
            assert before == alive()

    the_loop().run(run())


def alive() -> dict[str, int]:
    """Objects that belong to a request, by type."""
    gc.collect()
    return dict(Counter(type(each).__qualname__ for each in gc.get_objects() if type(each) in PER_REQUEST))


@on_the_loop
async def test_kind_50_counters_never_fall() -> None:
    """Report 146: rounds that emit nothing (NaN, a client that leaves, a target that dies) among good ones: no counter falls,
    and serving goes on."""
    target = like(TARGET, step_ms=1.0, faults=(Fault("nan", first_token=9, position=20),))
    seen: list[list[int]] = []

    async with service(target, DRAFTS["middling"]) as stack:

        async def watch() -> None:
            while True:
                stats = await stack.stats()
                spec = stats.speculation
                seen.append(
                    [
                        *(stats.finished, stats.failed, stats.cancelled, stats.refused, stats.generated_tokens),
                        *(spec.rounds, spec.drafts, spec.drafted, spec.accepted, spec.fallbacks),
                        *(spec.drafted_by_model, spec.accepted_by_model, *spec.accepted_per_position[:1]),
                    ]
                )
                await asyncio.sleep(POLL_S)

        watching = asyncio.create_task(watch())
        good = [asyncio.create_task(stack.ask([n], max_tokens=100, seed=n)) for n in range(4)]
        with contextlib.suppress(SpecwireError):
            await stack.ask([9], max_tokens=100, seed=1, num_speculative_tokens=4)
        leaving = asyncio.create_task(stack.ask([4], max_tokens=400, seed=4))
        await stack.until(lambda stats: stats.running == 5)
        leaving.cancel()
        await stack.kill("target-0")
        await stack.restart("target-0")
        await asyncio.gather(*good)
        await stack.quiet()
        watching.cancel()
        stats = await stack.stats()

        assert len(seen) > 3
        assert all(a <= b for before, after in itertools.pairwise(seen) for a, b in zip(before, after, strict=False))
        assert (4, 1, 1) == (stats.finished, stats.failed, stats.cancelled)


@on_the_loop
async def test_kind_50_numbers_agree_with_each_other(perfect: Service, middling: Service) -> None:
    """Report 148: full acceptance at k = 4: 100 tokens in 20 chunks, counted as 100. By position, source and round the
    counters add up."""
    full = await perfect.ask([1], max_tokens=100, seed=1, num_speculative_tokens=4, method="draft_model")
    half = await middling.ask([1], max_tokens=100, seed=1, num_speculative_tokens=4, return_rounds=True)
    assert full.final is not None
    assert half.final is not None
    spec = half.speculation

    assert [5] * 20 == [len(chunk.ids) for chunk in full.chunks]
    assert (100, 20, 80) == (full.final.usage.completion_tokens, full.speculation.rounds, full.speculation.accepted)
    assert [20, 20, 20, 20] == list(full.speculation.accepted_per_position)
    assert spec.accepted == sum(spec.accepted_per_position) == spec.accepted_by_model + spec.accepted_by_ngram
    assert spec.drafted == spec.drafted_by_model + spec.drafted_by_ngram
    assert 100 == sum(round.committed for round in half.final.rounds) == spec.accepted + spec.rounds
    assert sum(round.accepted for round in half.final.rounds) == spec.accepted
    assert sorted(spec.accepted_per_position, reverse=True) == list(spec.accepted_per_position)
