"""Workers and coordinator that die in the middle of an answer and come back. Here they live in this process, see
test_signals.py for real processes. Every answer is compared with what the target says alone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from specwire.law.errors import Unavailable
from specwire.worker.service import WorkerServer
from tests.support.load import PROMPT, load
from tests.support.relay import Out, Relay, pass_on
from tests.support.service import PATIENCE_S, POLL_S, Service, expected_ids, like, on_the_loop, service
from tests.support.slow_reader import slow_reader
from tests.wired.conftest import DRAFTS, TARGET

SLOW = like(TARGET, step_ms=2.0)
"""The same target, slow enough that requests are surely under way when something happens to them."""


def state_of(stats: Any, name: str) -> str:
    """A worker's state."""
    return next(worker.state for worker in stats.workers if worker.name == name)


def lives_of(stats: Any) -> dict[str, int]:
    """Each worker's incarnation, as the coordinator sees it."""
    return {worker.name: worker.info.incarnation for worker in stats.workers}


async def connects_of(stack: Service, name: str) -> int:
    """Streams opened to a worker of this name so far."""
    return next(worker.connects for worker in (await stack.stats()).workers if worker.name == name)


async def registration_of(server: WorkerServer, words: str) -> None:
    """Waits until a worker's registration says so."""
    give_up = time.monotonic() + PATIENCE_S
    while words not in server.registration.state:
        assert time.monotonic() < give_up, server.registration.state
        await asyncio.sleep(POLL_S)


async def short_pause(seconds: float) -> None:
    """For a registration that would ask again in ten seconds."""
    await asyncio.sleep(min(seconds, 0.1))


async def read_all(stream: Any) -> None:
    """Reads on to the end."""
    async for _ in stream:
        pass


@on_the_loop
async def test_a_draft_dies_and_comes_back() -> None:
    """Rounds go on without it, its new life is used again: draft tokens are accepted before and after."""
    async with service(SLOW, DRAFTS["middling"]) as stack, load(stack.client, TARGET) as running:
        await running.until_accepted()
        await stack.kill("draft-0")
        await stack.until(lambda stats: state_of(stats, "draft-0") == "lost")
        await running.until_over(4)
        await stack.restart("draft-0")
        await stack.ready()
        await running.until_accepted()
        running.enough()
        await running.until_over(4)
        await stack.quiet()


@on_the_loop
async def test_a_target_dies_and_comes_back() -> None:
    """Requests under way wait, are replayed to its new life and say the same; nothing fails."""
    async with service(SLOW, DRAFTS["middling"]) as stack, load(stack.client, TARGET) as running:
        await running.until_accepted()
        await stack.kill("target-0")
        await stack.until(lambda stats: state_of(stats, "target-0") == "lost")
        await stack.restart("target-0")
        stats = await running.until_accepted()
        await running.until_over(4)

        assert stats.replays["target_lost"] == 4
        assert (stats.failed, stats.cancelled) == (0, 0)


@on_the_loop
async def test_both_die_again_and_again() -> None:
    """Four times over, in both orders, with the controller's own block lengths and both sources of guesses."""
    async with (
        service(SLOW, DRAFTS["middling"]) as stack,
        load(stack.client, TARGET, k="auto", method="auto") as running,
    ):
        for first, second in (("draft-0", "target-0"), ("target-0", "draft-0")) * 2:
            await running.until_over(2)
            await stack.kill(first)
            await stack.kill(second)
            await stack.restart(first)
            await stack.restart(second)
            await stack.ready()
        await running.until_over(4)
        stats = await stack.stats()

        assert (stats.failed, stats.cancelled) == (0, 0)


@on_the_loop
async def test_a_request_that_comes_while_the_target_is_away_is_told_so() -> None:
    """A request under way waits; a new one is refused at once, which leaves the choice to its client."""
    async with service(SLOW, DRAFTS["middling"]) as stack:
        running = asyncio.create_task(stack.ask(PROMPT, max_tokens=100, seed=1))
        await stack.until(lambda stats: stats.generated_tokens > 5)
        await stack.kill("target-0")
        await stack.until(lambda stats: not stats.ready)
        with pytest.raises(Exception, match="no target is ready"):
            await stack.ask(PROMPT, max_tokens=5)
        await stack.restart("target-0")

        assert expected_ids(TARGET, PROMPT, 100, seed=1) == (await running).ids


@on_the_loop
async def test_kind_46_a_block_that_was_judged_before_the_target_died_is_not_applied_twice() -> None:
    """The target dies after it has cached a block and before its verdict arrives. Its successor judges the same block again."""
    relay = Relay("target")
    stack: Service
    killed = asyncio.Event()
    seen = 0

    def lose_the_fourth(frame: Any) -> Out:
        nonlocal seen
        seen += 1
        if seen == 4:
            killed.set()
        return [] if seen >= 4 else [(0.0, frame.SerializeToString())]

    relay.to_coordinator = lose_the_fourth
    async with service(SLOW, DRAFTS["middling"], relays={"target-0": relay}) as stack:
        running = asyncio.create_task(stack.ask(PROMPT, max_tokens=60, seed=1, num_speculative_tokens=4))
        await killed.wait()
        await stack.kill("target-0")
        relay.to_coordinator = None
        await stack.restart("target-0")
        answer = await running

        assert expected_ids(TARGET, PROMPT, 60, seed=1) == answer.ids
        assert answer.speculation.accepted + answer.speculation.rounds == 60


@pytest.mark.parametrize("role", ["draft", "target"])
@on_the_loop
async def test_a_worker_that_wakes_after_its_replacement_changes_nothing(role: str) -> None:
    """Two lives under one name: the younger has it. The elder is told why and stays silent, so that the two do not take it
    from each other for ever; when the younger dies, the elder may come back."""
    name = f"{role}-0"
    async with service(SLOW, DRAFTS["middling"]) as stack, load(stack.client, TARGET) as running:
        await running.until_accepted()
        elder = stack.workers[name]
        elder.registration._sleep = short_pause
        await stack.restart(name)
        await stack.ready()
        younger = stack.workers[name]
        connects = await connects_of(stack, name)
        await registration_of(elder, "one worker at a time")
        await running.until_accepted()

        assert connects == await connects_of(stack, name)
        await stack.kill(name)
        await stack.until(lambda stats: lives_of(stats)[name] == elder.incarnation)
        stack.workers[name] = elder
        await stack.ready()
        await running.until_accepted()
        assert younger.incarnation != elder.incarnation


@pytest.mark.parametrize("k", [0, 4])
@on_the_loop
async def test_a_coordinator_that_restarts_is_asked_again_by_the_client(k: int) -> None:
    """The client repeats its request with the seed it chose and skips what it has, compared by id: no gap and no repeat."""
    async with service(like(TARGET, step_ms=4.0), DRAFTS["middling"]) as stack:
        asking = asyncio.create_task(stack.ask(PROMPT, max_tokens=100, num_speculative_tokens=k, method="draft_model"))
        await stack.until(lambda stats: stats.generated_tokens > 20)
        await stack.stop_coordinator()
        await stack.start_coordinator()
        answer = await asking
        await stack.quiet()

        assert answer.final is not None
        assert answer.final.retries > 0
        assert expected_ids(TARGET, PROMPT, 100, seed=answer.final.seed) == answer.ids


@on_the_loop
async def test_under_rejection_a_lost_coordinator_is_told_and_not_papered_over() -> None:
    """Under `rejection` a repeated answer is another one, since it depends on how it was blocked: a client that has tokens
    already is told that the coordinator is away; at temperature zero, where the answer is the same, it is asked again."""
    async with service(like(TARGET, step_ms=4.0), DRAFTS["middling"]) as stack:
        common = {"max_tokens": 100, "law": "rejection", "num_speculative_tokens": "auto", "method": "draft_model"}
        drawn = asyncio.create_task(stack.ask(PROMPT, seed=1, **common))
        greedy = asyncio.create_task(stack.ask(PROMPT, temperature=0.0, **common))
        await stack.until(lambda stats: stats.generated_tokens > 60 and stats.running == 2)
        await stack.stop_coordinator()
        await stack.start_coordinator()

        with pytest.raises(Unavailable):
            await drawn
        assert expected_ids(TARGET, PROMPT, 100, temperature=0.0) == (await greedy).ids


@on_the_loop
async def test_workers_find_a_restarted_coordinator_by_themselves() -> None:
    """They are told that they are unknown, register again and serve; the sessions of its former life go with the lease."""
    async with service(TARGET, DRAFTS["good"], lease_s=0.2) as stack:
        running = asyncio.create_task(stack.ask(PROMPT, max_tokens=400, seed=3))
        await stack.until(lambda stats: stats.generated_tokens > 20)
        await stack.stop_coordinator()
        running.cancel()
        await stack.start_coordinator()
        await stack.ready()
        answer = await stack.ask(PROMPT, max_tokens=20, seed=4, num_speculative_tokens=3, method="draft_model")
        await stack.quiet()

        assert expected_ids(TARGET, PROMPT, 20, seed=4) == answer.ids
        assert answer.speculation.accepted_by_model > 0


@on_the_loop
async def test_a_second_draft_takes_over() -> None:
    """Sessions bound to a draft that dies go on with another one."""
    async with service(SLOW, DRAFTS["good"], DRAFTS["good"]) as stack, load(stack.client, TARGET) as running:
        await running.until_accepted()
        await stack.kill("draft-0")
        await stack.until(lambda stats: state_of(stats, "draft-0") == "lost")
        await running.until_accepted(40)
        running.enough()
        await running.until_over(4)
        stats = await stack.stats()

        assert state_of(stats, "draft-1") == "ready"


@on_the_loop
async def test_a_target_that_is_lost_while_a_block_is_drafted_has_its_time_to_recover() -> None:
    """The wait begins when the block comes and finds no target; it ends with an error that names the target."""
    asked = asyncio.Event()

    def look(frame: Any) -> Out:
        asked.set()
        return [(0.3, frame.SerializeToString())]

    relay = Relay("draft", to_worker=look)
    async with service(SLOW, DRAFTS["middling"], relays={"draft-0": relay}, recovery_timeout_s=0.4) as stack:
        running = asyncio.create_task(
            stack.ask(PROMPT, max_tokens=60, seed=1, num_speculative_tokens=4, method="draft_model")
        )
        await asked.wait()
        (session,) = stack.driver.sessions.values()
        await stack.kill("target-0")
        await asyncio.wait_for(session.ended.wait(), PATIENCE_S)
        running.cancel()  # the client would ask again

        assert "the target was away for" in str(session.error)
        await asyncio.gather(running, return_exceptions=True)
        await stack.quiet()


@on_the_loop
async def test_a_target_that_is_lost_while_the_client_is_behind_has_its_time_to_recover() -> None:
    """A request that pauses for its reader finds no target when the reader comes back."""
    table = like(TARGET, max_context=8192, order=3)
    async with service(table, table, client_buffer_tokens=32, recovery_timeout_s=0.4) as stack:
        async with slow_reader(stack, prompt_ids=PROMPT, max_tokens=8000, seed=1) as (stream, _, session):
            await stack.kill("target-0")
            reading = asyncio.create_task(read_all(stream))
            await asyncio.wait_for(session.ended.wait(), PATIENCE_S)
            reading.cancel()  # the client would ask again
            await asyncio.gather(reading, return_exceptions=True)

            assert "the target was away for" in str(session.error)
        await stack.quiet()


@on_the_loop
async def test_the_second_ask_of_a_round_has_no_more_time_than_the_first() -> None:
    """A draft that forgot its text is told it again within the round; when that answer does not come, the round goes on alone."""
    frames = 0

    def forget_and_go_silent(frame: Any) -> Out:
        nonlocal frames
        frames += 1
        if frames == 3:
            frame.tasks[0].keep_hash += 1
        return [] if frames == 4 else pass_on(frame)

    relay = Relay("draft", to_worker=forget_and_go_silent)
    speculation = {"draft_timeout_ms": 300}
    async with service(TARGET, DRAFTS["good"], relays={"draft-0": relay}, speculation=speculation) as stack:
        answer = await stack.ask(PROMPT, max_tokens=60, seed=1, num_speculative_tokens=4, method="draft_model")
        stats = await stack.stats()

        assert expected_ids(TARGET, PROMPT, 60, seed=1) == answer.ids
        assert stats.replays["draft_hash"] == 1
        assert stats.speculation.fallbacks >= 1


@pytest.mark.parametrize("slots", [1, 2])
@on_the_loop
async def test_a_draft_without_room_is_left_alone_for_a_while(slots: int) -> None:
    """Four requests, fewer slots at the draft: those without one decode plainly, and do not ask it every round."""
    asks = 0

    def count(frame: Any) -> Out:
        nonlocal asks
        asks += len(frame.tasks)
        return pass_on(frame)

    relay = Relay("draft", to_worker=count)
    draft_settings = {"model": {"model": "table", "table": DRAFTS["middling"], "max_sessions": slots, "max_block": 8}}
    async with service(SLOW, DRAFTS["middling"], relays={"draft-0": relay}, draft_settings=draft_settings) as stack:
        answers = await asyncio.gather(
            *(stack.ask([n], max_tokens=60, seed=n, num_speculative_tokens=2, method="draft_model") for n in range(4))
        )
        rounds = sum(answer.speculation.rounds for answer in answers)

        assert [expected_ids(TARGET, [n], 60, seed=n) for n in range(4)] == [answer.ids for answer in answers]
        assert asks < rounds
