"""Field reports, section G: clients that leave, deadlines, queues, limits of messages and connections. Names carry the kind,
docstrings the reports."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator import driver
from specwire.client import Client, Tokens
from specwire.law.errors import CallerFault, NoRoom, SpecwireError, TooLate
from specwire.lm.table_config import Fault, TableConfig
from specwire.wire import rpc
from tests.support.load import load
from tests.support.relay import Out, Relay, pass_on
from tests.support.service import Service, expected_ids, like, model_of, on_the_loop, service
from tests.support.slow_reader import slow_reader
from tests.wired.conftest import DRAFTS, TARGET

SLOW = like(TARGET, step_ms=2.0)


async def leave_after(client: Client, events: int, **fields: Any) -> None:
    """Reads so many events and goes away."""
    stream = client.generate(**fields)
    try:
        async for _ in stream:
            events -= 1
            if events <= 0:
                return
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


# ------------------------------------------------------------------ kind 36


@on_the_loop
async def test_kind_36_fifty_streams_dropped_after_the_third_token() -> None:
    """Report 112: both workers stop within a step or two, caches and slots are free, all are counted as cancelled."""
    async with service(SLOW, DRAFTS["middling"], slots=50, max_running=50) as stack:
        await asyncio.gather(
            *(leave_after(stack.client, 4, prompt_ids=[n % 32], max_tokens=400, seed=n) for n in range(50))
        )
        await stack.quiet()
        stats = await stack.stats()

        assert (50, 0, 0) == (stats.cancelled, stats.finished, stats.failed)
        assert stats.generated_tokens < 50 * 100


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.slow)])
@on_the_loop
async def test_kind_36_random_cancels_leave_nothing(count: int) -> None:
    """Report 114: requests cancelled at random moments, before, during and after their answer: then nothing runs, waits or is
    cached."""
    dice = random.Random(3)
    async with service(TARGET, DRAFTS["middling"], max_waiting=1000) as stack:

        async def one(seed: int) -> None:
            asking = asyncio.create_task(stack.ask([1], max_tokens=40, seed=seed))
            await asyncio.wait((asking,), timeout=dice.random() * 0.2)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        for first in range(0, count, 100):
            await asyncio.gather(*(one(seed) for seed in range(first, first + 100)))
        await stack.quiet()
        stats = await stack.stats()

        assert stats.cancelled > 0
        assert stats.failed == 0
        assert expected_ids(TARGET, [1], 20, seed=1) == (await stack.ask([1], max_tokens=20, seed=1)).ids


# ------------------------------------------------------------------ kind 37


@on_the_loop
async def test_kind_37_a_prompt_of_a_million_and_a_half_ids(middling: Service) -> None:
    """Report 116: it arrives, since limits are set for it, and is refused for its length on that request alone."""
    with pytest.raises(CallerFault, match=r"got '1500000 tokens', must be at most 511 tokens \(context limit 512\)"):
        await middling.ask([1] * 1_500_000, max_tokens=5)

    assert expected_ids(TARGET, [1], 5, seed=1) == (await middling.ask([1], max_tokens=5, seed=1)).ids


@on_the_loop
async def test_kind_37_a_message_over_the_limit(middling: Service) -> None:
    """Report 116: more than 64 MiB in one message is refused with the limit's number, on that request alone."""
    with pytest.raises(CallerFault, match=str(rpc.MAX_MESSAGE_BYTES)):
        await middling.ask(prompt="x" * (rpc.MAX_MESSAGE_BYTES + 1), max_tokens=5)

    assert expected_ids(TARGET, [1], 5, seed=1) == (await middling.ask([1], max_tokens=5, seed=1)).ids


@on_the_loop
async def test_kind_37_draft_laws_of_a_large_vocabulary() -> None:
    """Report 116: k = 8 with the widest cut there is, 65,536 of 150,000 tokens a position: the frame passes."""
    table = TableConfig(vocab_size=150_000, seed=3, sharpness=1.0)
    async with service(table, table, draft_settings={"draft_law_top_m": 65_536}) as stack:
        answer = await stack.ask(
            [1], max_tokens=10, seed=1, law="rejection", num_speculative_tokens=8, method="draft_model"
        )

        assert 10 == len(answer.ids)
        assert 8 <= answer.speculation.drafted
        assert (await stack.stats()).workers[0].connects == 1


# ------------------------------------------------------------------ kind 38


def option(options: list[tuple[str, int]], name: str) -> int:
    """The value of a channel argument."""
    return dict(options)[name]


def test_kind_38_both_ends_agree_about_keepalive() -> None:
    """Report 118: a server allows pings at least as often as a channel sends them, with and without calls."""
    assert option(rpc.SERVER_OPTIONS, "grpc.http2.min_ping_interval_without_data_ms") <= option(
        rpc.CHANNEL_OPTIONS, "grpc.keepalive_time_ms"
    )
    for options in (rpc.SERVER_OPTIONS, rpc.CHANNEL_OPTIONS):
        assert 1 == option(options, "grpc.keepalive_permit_without_calls")
        assert 0 == option(options, "grpc.http2.max_pings_without_data")


async def idle_ends(server_options: list[tuple[str, int]], idle_s: float = 5.5) -> bool:
    """Whether a channel that pings as often as gRPC lets it, once a second, is cut while nothing is said for so long."""
    often = [(name, 200 if name == "grpc.keepalive_time_ms" else value) for name, value in rpc.CHANNEL_OPTIONS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc, "SERVER_OPTIONS", server_options)
        patch.setattr(rpc, "CHANNEL_OPTIONS", often)
        server = rpc.make_server()
        port = rpc.bind(server, "127.0.0.1:0", False)
        await server.start()
        async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
            changed = asyncio.create_task(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
            done, _ = await asyncio.wait((changed,), timeout=idle_s)
            changed.cancel()
        await server.stop(None)
        return bool(done)


@pytest.mark.slow
@on_the_loop
async def test_kind_38_an_idle_channel_stays() -> None:
    """Report 118, scaled down: five pings on an idle channel. With a server that allows pings as often as they come it stays;
    with gRPC's own default, one in five minutes, it is cut, so this test can fail."""
    interval = "grpc.http2.min_ping_interval_without_data_ms"
    scaled = [(name, 100 if name == interval else value) for name, value in rpc.SERVER_OPTIONS]
    default = [(name, value) for name, value in rpc.SERVER_OPTIONS if name != interval]

    assert [False, True] == [await idle_ends(scaled), await idle_ends(default)]


# ------------------------------------------------------------------ kinds 39, 44


@on_the_loop
async def test_kind_39_clients_that_leave_between_two_yields() -> None:
    """Report 120: more often than there could be threads, clients leave after their first event: handlers end, new calls are
    served."""
    async with service(SLOW, DRAFTS["good"]) as stack:
        for round_ in range(5):
            await asyncio.gather(
                *(leave_after(stack.client, 1 + n % 2, prompt_ids=[1], max_tokens=100, seed=n) for n in range(16))
            )
            answer = await stack.ask([1], max_tokens=5, seed=round_)
            assert expected_ids(TARGET, [1], 5, seed=round_) == answer.ids
        await stack.quiet()


@on_the_loop
async def test_kind_44_never_more_requests_than_cache_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its registration on a target's slots limit how many requests run, not only from the coordinator's next look at its
    workers."""
    monkeypatch.setattr(driver, "TICK_S", 3600.0)
    async with service(SLOW, slots=4) as stack:
        asking = [asyncio.create_task(stack.ask([n], max_tokens=20, seed=n)) for n in range(12)]
        most = 0
        while not all(request.done() for request in asking):
            most = max(most, (await stack.stats()).running)

        assert 4 == most
        assert [expected_ids(TARGET, [n], 20, seed=n) for n in range(12)] == [
            request.result().ids for request in asking
        ]


@on_the_loop
async def test_kind_44_health_answers_however_many_streams_there_are() -> None:
    """Report 130: 150 streams for 16 places while the target hangs, 100 may wait: the rest is refused with a hint, health and
    statistics answer at once, and in the end all that were taken are served."""
    async with (
        service(like(TARGET, faults=(Fault("hang", call=1),)), max_waiting=100) as stack,
        rpc.open_channel(stack.address) as channel,
    ):
        asking = [asyncio.create_task(stack.ask([1], max_tokens=5, seed=n)) for n in range(150)]
        full = await stack.until(lambda stats: stats.refused == 34)
        began = time.monotonic()
        check: Any = health_pb2_grpc.HealthStub(channel).Check
        health = await check(health_pb2.HealthCheckRequest(), timeout=5.0)
        took = time.monotonic() - began
        model_of(stack.workers["target-0"]).release()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        refused = [end for end in ends if isinstance(end, NoRoom)]

        assert (16, 100) == (full.running, full.waiting)
        assert health_pb2.HealthCheckResponse.SERVING == health.status
        assert took < 2.0
        assert 34 == len(refused)
        assert all(error.retry_after_s >= 0.1 for error in refused)
        assert {5} == {len(end.ids) for end in ends if not isinstance(end, BaseException)}


# ------------------------------------------------------------------ kind 40


@on_the_loop
async def test_kind_40_deadlines_in_the_queue() -> None:
    """Report 122, scaled down: a deadline of 0.4 s behind a long request in a queue of 30: each ends near it and was never
    begun."""
    counters: set[int] = set()

    def look(frame: Any) -> Out:
        counters.update(task.session for task in frame.tasks)
        return pass_on(frame)

    async with service(like(TARGET, step_ms=8.0), relays={"target-0": Relay("target", look)}, max_running=1) as stack:
        long = asyncio.create_task(stack.ask([1], max_tokens=400, seed=1))
        await stack.until(lambda stats: stats.generated_tokens > 0)

        async def late() -> float:
            began = time.monotonic()
            with pytest.raises(TooLate):
                await stack.ask([2], max_tokens=5, timeout=0.4)
            return time.monotonic() - began

        waits = await asyncio.gather(*(late() for _ in range(30)))
        begun = set(counters)
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        await stack.quiet()

        assert 0.35 < min(waits)
        assert max(waits) < 3.0
        assert 1 == len(begun)


@on_the_loop
async def test_kind_40_the_remaining_time_travels() -> None:
    """Report 122: draft and target are told with the session's first task how long the request is wanted, and count down by
    themselves; without a deadline they are told nothing."""
    left: dict[str, list[int]] = {"draft": [], "target": []}

    def look(role: str) -> Any:
        def hook(frame: Any) -> Out:
            left[role].extend(task.time_left_ms for task in frame.tasks)
            return pass_on(frame)

        return hook

    relays = {f"{role}-0": Relay(role, look(role)) for role in left}
    async with service(TARGET, DRAFTS["good"], relays=relays) as stack:
        await stack.ask([1], max_tokens=30, timeout=20.0, num_speculative_tokens=3, method="draft_model")
        timed = {role: list(seen) for role, seen in left.items()}
        await stack.ask([1], max_tokens=5)

        for role, seen in timed.items():
            assert len(seen) > 3
            assert 15_000 < seen[0] <= 21_000  # gRPC rounds a deadline up on its way
            assert {0} == set(seen[1:])
            assert {0} == set(left[role][len(seen) :])


@on_the_loop
async def test_kind_40_a_deadline_in_the_middle_of_an_answer() -> None:
    """It ends the request, whatever is in flight, and frees everything."""
    async with service(like(TARGET, step_ms=5.0), DRAFTS["middling"]) as stack:
        with pytest.raises(TooLate):
            await stack.ask([1], max_tokens=400, timeout=0.5)
        await stack.quiet()

        assert 5 == len((await stack.ask([1], max_tokens=5)).ids)


# ------------------------------------------------------------------ kind 41


@on_the_loop
async def test_kind_41_links_recycled_mid_stream() -> None:
    """Report 124, scaled down: workers end every connection after 0.3 s and its streams 0.1 s later: links resume where they
    were, no token is lost or doubled, nothing is replayed."""
    aged = [*rpc.SERVER_OPTIONS, ("grpc.max_connection_age_ms", 300), ("grpc.max_connection_age_grace_ms", 100)]
    async with service(like(TARGET, step_ms=4.0), DRAFTS["middling"]) as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rpc, "SERVER_OPTIONS", aged)
            for name in ("target-0", "draft-0"):
                await stack.kill(name)
                await stack.restart(name)
        await stack.ready()
        before = {worker.name: worker.connects for worker in (await stack.stats()).workers}
        async with load(stack.client, TARGET) as running:
            await stack.until(lambda stats: all(w.connects >= before[w.name] + 3 for w in stats.workers))
            await running.until_over(4)
        stats = await stack.stats()

        assert (0, 0) == (stats.failed, stats.replays["target_lost"])


@on_the_loop
async def test_kind_41_clients_connections_recycled() -> None:
    """Report 124: a coordinator that lets connections grow no older than 0.2 s lets streams finish: answers come whole at the
    first try."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc, "SERVER_OPTIONS", [*rpc.SERVER_OPTIONS, ("grpc.max_connection_age_ms", 200)])
        async with service(like(TARGET, step_ms=4.0), DRAFTS["middling"]) as stack:
            for seed in range(3):
                answer = await stack.ask([1], max_tokens=80, seed=seed, num_speculative_tokens=2)

                assert expected_ids(TARGET, [1], 80, seed=seed) == answer.ids
                assert answer.final is not None
                assert 0 == answer.final.retries


@on_the_loop
async def test_kind_41_a_coordinator_that_is_told_to_stop_finishes_what_runs() -> None:
    """Draining: the running answer comes whole, new requests are refused, then it ends."""
    async with service(SLOW, DRAFTS["middling"], drain_s=20) as stack:
        running = asyncio.create_task(stack.ask([1], max_tokens=100, seed=1))
        await stack.until(lambda stats: stats.generated_tokens > 5)
        stopping = asyncio.create_task(stack.stop_coordinator())
        await stack.until(lambda stats: stats.draining)
        with pytest.raises(SpecwireError, match="draining"):
            await stack.ask([1], max_tokens=5)
        answer = await running
        await stopping

        assert expected_ids(TARGET, [1], 100, seed=1) == answer.ids
        assert answer.final is not None
        assert 0 == answer.final.retries


# ------------------------------------------------------------------ kind 42


@on_the_loop
async def test_kind_42_a_slow_reader_is_waited_for_and_nobody_else() -> None:
    """Report 126: a client stops reading. What is kept for it stays bounded and its generation pauses; others are served;
    when it reads on it gets everything."""
    table = like(TARGET, max_context=8192, order=3)
    async with service(table, table, client_buffer_tokens=32) as stack:
        request = {"prompt_ids": [1], "max_tokens": 8000, "seed": 1, "num_speculative_tokens": 0}
        async with slow_reader(stack, **request) as (stream, got, session):
            paused_at = session.generated
            other = await stack.ask([2], max_tokens=30, seed=2)

            assert expected_ids(table, [2], 30, seed=2) == other.ids
            assert paused_at == session.generated
            assert session.behind <= 32 + 1
            async for event in stream:
                if isinstance(event, Tokens):
                    got.extend(event.ids)
                    if len(got) > paused_at + 200:
                        break
        await stack.quiet()

        assert expected_ids(table, [1], len(got), seed=1) == tuple(got)


# ------------------------------------------------------------------ kind 43


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@on_the_loop
async def test_kind_43_channels_and_files_stay_flat(count: int) -> None:
    """Report 128: one connection per peer whatever the number of requests; open files are as many at the end as at the
    beginning."""
    async with service(TARGET, DRAFTS["good"]) as stack:
        process = psutil.Process()

        async def some(requests: int) -> None:
            for _ in range(0, requests, 20):
                await asyncio.gather(*(stack.ask([1], max_tokens=2, seed=n) for n in range(20)))

        await some(40)
        files, sockets = process.num_fds(), len(process.net_connections())
        await some(count)

        assert files == process.num_fds()
        assert sockets == len(process.net_connections())
        assert [1, 1] == [worker.connects for worker in (await stack.stats()).workers]
