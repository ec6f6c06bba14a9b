"""Field reports, section D: shared caches, caches that are taken away, long prompts, and load. Names carry the kind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from specwire.client import Tokens
from specwire.law.tasks import SessionId
from specwire.lm.table_config import TableConfig
from tests.contract.harness import at_desk
from tests.support.relay import Mangler, Relay
from tests.support.service import Service, ask, expected_ids, like, on_the_loop, service
from tests.wired.conftest import DRAFTS, TARGET


@pytest.mark.parametrize("slots", [2, 3, 16])
@on_the_loop
async def test_kind_22_prompts_that_begin_alike_answer_as_cold_ones(slots: int) -> None:
    """Report 71: 100 tokens are shared, then prompts differ; slots are few, so that what one leaves is taken over or overwritten by
    the next. Greedy and sampled, one after the other and together: each answer equals a cold run, and cells were really shared."""
    dice = random.Random(slots)
    shared = [dice.randrange(32) for _ in range(100)]
    prompts = [[*shared, *(dice.randrange(32) for _ in range(n))] for n in (1, 5, 17, 5, 1, 30)] + [shared]
    sampling: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}]
    async with service(TARGET, DRAFTS["middling"], slots=slots) as stack:
        cases = [(prompt, fields) for prompt in prompts for fields in sampling]
        one_by_one = [await stack.ask(prompt, max_tokens=24, **fields) for prompt, fields in cases]
        together = await asyncio.gather(*(stack.ask(prompt, max_tokens=24, **fields) for prompt, fields in cases))
        expected = [expected_ids(TARGET, prompt, 24, **fields) for prompt, fields in cases]
        cached = [answer.final.usage.cached_tokens for answer in one_by_one if answer.final]

        assert expected == [answer.ids for answer in one_by_one]
        assert expected == [answer.ids for answer in together]
        assert cached[0] == 0
        assert min(cached[1:]) >= 99


@on_the_loop
async def test_kind_24_a_cache_taken_away_under_a_block_in_flight() -> None:
    """Report 75: two slots, eight long requests, verdicts that come late at random, and sessions that lose their cache at the
    target at any moment. What was in flight is thrown away, the text is told again, and each output equals its solo run."""
    relay = Relay("target", None, Mangler(4, late=0.5, late_s=0.005))
    slow = like(TARGET, step_ms=0.5)
    async with service(slow, DRAFTS["middling"], relays={"target-0": relay}, slots=2) as stack:
        taken: list[SessionId] = []
        thief = asyncio.create_task(_take_away(stack, relay, taken))
        answers = await asyncio.gather(
            *(stack.ask([n, n + 1], max_tokens=80, seed=n, num_speculative_tokens=4) for n in range(8))
        )
        thief.cancel()
        stats = await stack.stats()
        await stack.quiet()

        assert [expected_ids(slow, [n, n + 1], 80, seed=n) for n in range(8)] == [answer.ids for answer in answers]
        assert len(taken) > 5
        assert stats.replays["target_length"] > 0


async def _take_away(stack: Service, relay: Relay, taken: list[SessionId]) -> None:
    """Every few frames a session of the target loses its cache, between two steps; one whose block has come is left alone, as it
    is where room is made for another."""
    dice = random.Random(3)

    def drop(desk: Any) -> list[SessionId]:
        ids: list[SessionId] = [each for each in desk.table.ids() if desk.table._sessions[each].front is None]
        for session in dice.sample(ids, min(1, len(ids))):
            desk.table.drop(session)
            taken.append(session)
        return ids

    while True:
        await relay.seen(relay.frames + 12)
        await at_desk(stack.workers["target-0"], drop)


@on_the_loop
async def test_kind_26_a_huge_prompt_holds_nobody_up() -> None:
    """Report 82: a prompt of 8,000 tokens is read, then a request of 8 tokens comes. Two streams that run go on all the while, and
    the short one has all of its answer before the long one has its first token."""
    table = TableConfig(vocab_size=32, seed=3, sharpness=3.0, order=2, max_context=8400, row_ms=0.05)
    long_prompt = [n % 31 for n in range(8000)]
    async with service(table, like(table, disagreement=0.3), slots=6) as stack:
        running = [asyncio.create_task(stack.ask([n], max_tokens=400, seed=n)) for n in (1, 2)]
        await stack.until(lambda stats: stats.generated_tokens >= 8)
        first, meanwhile = asyncio.Event(), 0

        async def long() -> tuple[int, ...]:
            ids: tuple[int, ...] = ()
            async for event in stack.client.generate(prompt_ids=long_prompt, max_tokens=8, seed=9):
                if isinstance(event, Tokens):
                    first.set()
                    ids += event.ids
            return ids

        asked = asyncio.create_task(long())
        await stack.until(lambda stats: stats.running == 3)
        before = (await stack.stats()).generated_tokens
        short = await ask(stack.client, [7, 8], max_tokens=8, seed=7)
        in_time = not first.is_set()
        await first.wait()
        meanwhile = (await stack.stats()).generated_tokens - before - 8
        answers = [*(await asyncio.gather(*running)), short]

        assert in_time
        assert meanwhile >= 10
        assert expected_ids(table, long_prompt, 8, seed=9) == await asked
        expected = [expected_ids(table, [n], 400, seed=n) for n in (1, 2)] + [expected_ids(table, [7, 8], 8, seed=7)]
        assert expected == [answer.ids for answer in answers]


@on_the_loop
async def test_kind_27_blocks_get_shorter_with_load() -> None:
    """Report 83: where every row costs, acceptance of about one half is worth a block alone and not in a crowd. The controller
    drafts far less for thirty-two than for one; answers stay the same. In step: in turns, what the service adds is hidden."""
    target = like(TARGET, step_ms=8.0, row_ms=2.0)
    draft = like(DRAFTS["middling"], step_ms=0.4, row_ms=0.1)
    drafted = []
    settings = {"method": "draft_model", "schedule": "synchronous"}
    async with service(target, draft, slots=32, speculation=settings) as stack:
        for count in (1, 32):
            await asyncio.gather(*(stack.ask([n], max_tokens=24, seed=n) for n in range(count)))
            before = (await stack.stats()).speculation
            answers = await asyncio.gather(*(stack.ask([n], max_tokens=24, seed=n) for n in range(count)))
            after = (await stack.stats()).speculation
            drafted.append((after.drafted - before.drafted) / (after.rounds - before.rounds))
            assert [expected_ids(target, [n], 24, seed=n) for n in range(count)] == [each.ids for each in answers]

    alone, in_a_crowd = drafted
    assert alone > 1.0
    assert in_a_crowd < 0.6 * alone
