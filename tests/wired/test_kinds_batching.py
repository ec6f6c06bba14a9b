"""Field reports, section D: batching and scheduling. Names carry the kind, docstrings the reports."""

from __future__ import annotations

import asyncio

import pytest

from specwire.lm.table_config import TableConfig
from tests.support.service import Service, expected_ids, like, on_the_loop, service
from tests.wired.conftest import DRAFTS, TARGET


@on_the_loop
async def test_kind_20_sixteen_different_requests_at_once() -> None:
    """Report 65: half of them repeat themselves and draft long blocks, half do not: each equals its solo run."""
    table = TableConfig(vocab_size=24, seed=6, sharpness=5.0, order=2, max_context=256)
    prompts = [[n, n + 1] * 6 if n % 2 else [(7 * n + i * i) % 24 for i in range(11)] for n in range(16)]
    async with service(table, like(table, disagreement=0.3)) as stack:
        answers = await asyncio.gather(
            *(stack.ask(prompt, max_tokens=40, temperature=0, num_speculative_tokens=8) for prompt in prompts)
        )
        drafted = {answer.speculation.drafted for answer in answers}

        assert [expected_ids(table, prompt, 40, temperature=0) for prompt in prompts] == [a.ids for a in answers]
        assert len(drafted) > 3  # blocks of many lengths met in the same steps


@on_the_loop
async def test_kind_20_a_greedy_request_among_sampled_ones(middling: Service) -> None:
    """Report 67: one greedy request with seven sampled ones beside it: all are as they would be alone."""
    answers = await asyncio.gather(
        middling.ask([4], max_tokens=40, temperature=0, num_speculative_tokens=4),
        *(middling.ask([4], max_tokens=40, seed=seed, num_speculative_tokens=4) for seed in range(7)),
    )

    assert expected_ids(TARGET, [4], 40, temperature=0) == answers[0].ids
    assert [expected_ids(TARGET, [4], 40, seed=seed) for seed in range(7)] == [answer.ids for answer in answers[1:]]


@on_the_loop
async def test_kind_21_plain_and_speculative_requests_side_by_side(middling: Service) -> None:
    """Report 69: speculation off for requests 1, 3 and 5 of 6: all are served and equal their solo runs."""
    answers = await asyncio.gather(
        *(
            middling.ask([n], max_tokens=40, seed=n, num_speculative_tokens=0 if n % 2 else 4, method="draft_model")
            for n in range(6)
        )
    )

    assert [expected_ids(TARGET, [n], 40, seed=n) for n in range(6)] == [answer.ids for answer in answers]
    assert [n % 2 == 0 for n in range(6)] == [answer.speculation.drafted > 0 for answer in answers]


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@on_the_loop
async def test_kind_23_a_last_chunk_of_one_token(n: int) -> None:
    """Report 73: prompts are read in chunks of 16, and 16n + 1 tokens leave a last chunk of one, while two requests decode:
    all are as they would be alone. Once by the coordinator's chunks, once by the workers' own."""
    prompt = [i % 32 for i in range(16 * n + 1)]
    chunked = {"max_append": 16}
    small = {"token_budget": 4 * 17, "max_append": 4096}
    for settings in (chunked, small):
        async with service(
            like(TARGET, step_ms=1.0), DRAFTS["middling"], target_settings=settings, draft_settings=settings
        ) as stack:
            running = [
                asyncio.create_task(stack.ask([s], max_tokens=60, seed=s, num_speculative_tokens=4)) for s in (1, 2)
            ]
            await stack.until(lambda stats: stats.generated_tokens >= 4)
            late = await asyncio.gather(
                *(stack.ask(prompt, max_tokens=20, seed=s, num_speculative_tokens=4) for s in (3, 4))
            )
            early = await asyncio.gather(*running)

            assert [expected_ids(TARGET, prompt, 20, seed=s) for s in (3, 4)] == [answer.ids for answer in late]
            assert [expected_ids(TARGET, [s], 60, seed=s) for s in (1, 2)] == [answer.ids for answer in early]


@pytest.mark.parametrize(("k", "method"), [(0, "auto"), (2, "draft_model"), ("auto", "auto")])
@on_the_loop
async def test_requests_that_came_apart_find_together(k: int | str, method: str) -> None:
    """Six requests that begin one after the other, in the middle of each other's steps: after a few rounds one step serves them
    all, and goes on to, since the target waits for those it has just answered. Alone each would wait for every other's step."""
    target = like(TARGET, step_ms=25.0)
    async with service(target, like(DRAFTS["middling"], step_ms=1.0), target_settings={"linger": True}) as stack:
        tasks = []
        for seed in range(6):
            tasks.append(
                asyncio.create_task(
                    stack.ask(
                        [seed], max_tokens=60, seed=seed, num_speculative_tokens=k, method=method, return_rounds=True
                    )
                )
            )
            await asyncio.sleep(0.035)
        answers = await asyncio.gather(*tasks)
        shortest = min(len(answer.final.rounds) for answer in answers)
        late = [each.step_sessions for answer in answers for each in answer.final.rounds[shortest // 2 : shortest - 6]]

        assert [expected_ids(TARGET, [seed], 60, seed=seed) for seed in range(6)] == [answer.ids for answer in answers]
        assert sum(late) / len(late) > 5.0
