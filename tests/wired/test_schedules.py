"""Schedules decide who works when, and nothing else: every answer is plain decoding's, whatever the weather."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from typing import Any

import pytest

from specwire.lm.table_config import TableConfig
from tests.support.relay import Mangler, Relay
from tests.support.service import Answer, Service, expected_ids, like, on_the_loop, service
from tests.wired.conftest import DRAFTS, TARGET

SCHEDULES: dict[str, dict[str, Any]] = {
    "synchronous": {"schedule": "synchronous"},
    "rotation of 2": {"schedule": "rotation", "rotation_groups": 2},
    "rotation of 3": {"schedule": "rotation", "rotation_groups": 3},
    "run-ahead": {"schedule": "run_ahead"},
}
IN_TROUBLE = [
    "rotation of 2",
    "run-ahead",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("synchronous", "rotation of 3")),
]
"""In step the same is tested elsewhere, and three groups are as two."""
PROMPT = (1, 2, 3, 4)
TOKENS = 40
SAMPLING = {"temperature": 0.9, "top_p": 0.95}


def speculation(schedule: str, **more: Any) -> dict[str, Any]:
    """The coordinator's settings."""
    return {"draft_timeout_ms": 10_000, **SCHEDULES[schedule], **more}


async def ask_all(stack: Service, lengths: tuple[Any, ...], count: int = 8, **fields: Any) -> list[Answer]:
    """Requests at once, by the draft alone, with these block lengths in turn."""
    fields = {"max_tokens": TOKENS, "method": "draft_model", **SAMPLING, **fields}
    each = zip(range(count), itertools.cycle(lengths), strict=False)
    return list(
        await asyncio.gather(*(stack.ask(PROMPT, seed=seed, num_speculative_tokens=k, **fields) for seed, k in each))
    )


def expected_all(table: TableConfig = TARGET, count: int = 8) -> list[tuple[int, ...]]:
    """The same without any service."""
    return [expected_ids(table, PROMPT, TOKENS, seed=seed, **SAMPLING) for seed in range(count)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "draft", ["middling", *(pytest.param(d, marks=pytest.mark.slow) for d in ("good", "stubborn"))]
)
@on_the_loop
async def test_a_schedule_never_changes_the_answer(schedule: str, draft: str) -> None:
    """Good, middling and stubborn drafts; blocks of every length together, plain decoding among them; one request and many.
    Afterwards nothing is left of them."""
    async with service(TARGET, DRAFTS[draft], speculation=speculation(schedule)) as stack:
        for lengths, count in (((3,), 1), ((4,), 8), ((0, 1, 2, 5, 8, "auto"), 12)):
            answers = await ask_all(stack, lengths, count)
            assert expected_all(count=count) == [answer.ids for answer in answers]
        await stack.quiet()
        stats = await stack.stats()

        assert draft == "stubborn" or stats.speculation.accepted_by_model > 100
        assert {"synchronous": 0, "run-ahead": 1}.get(schedule, 0) == min(1, sum(stats.draft_guesses.values()))
        assert {} == dict(stats.replays)
        assert schedule == stats.schedule_setting


@on_the_loop
async def test_a_perfect_draft_that_runs_ahead_always_hits() -> None:
    """Every round but the first has its block from before; the draft's time is hidden, and the parts still make up the whole."""
    async with service(TARGET, DRAFTS["good"], speculation=speculation("run-ahead")) as stack:
        (answer,) = await ask_all(stack, (4,), 1, return_rounds=True)
        stats = await stack.stats()
        assert answer.final is not None
        timing = answer.final.timing

        assert expected_all(count=1) == [answer.ids]
        assert [5] * 8 == [each.committed for each in answer.final.rounds]
        assert (7, 0) == (stats.draft_guesses["hit"], stats.draft_guesses["miss"])
        parts = sum(
            getattr(timing, field.name)
            for field in timing.DESCRIPTOR.fields
            if field.name.endswith("_us")
            and field.name not in ("total_us", "hidden_us", "unattributed_us", "time_to_first_token_us")
        )
        assert timing.hidden_us > 0
        assert timing.unattributed_us <= 0.02 * timing.total_us + 1000
        assert parts <= timing.total_us + 1  # no moment is in two parts; each is cut to whole microseconds


@pytest.mark.parametrize("others", [{"method": "ngram"}, {"law": "rejection"}, {"num_speculative_tokens": 0}])
@on_the_loop
async def test_who_can_run_ahead_does_whoever_else_is_there(others: dict[str, Any]) -> None:
    """What one session cannot, its neighbours still can."""
    async with service(TARGET, DRAFTS["good"], speculation=speculation("run-ahead")) as stack:
        lengths = (others.get("num_speculative_tokens", 4),)
        more = {name: value for name, value in others.items() if name != "num_speculative_tokens"}
        mine, _ = await asyncio.gather(ask_all(stack, (4,), 2), ask_all(stack, lengths, 6, **more))

        assert expected_all(count=2) == [answer.ids for answer in mine]
        assert 14 == (await stack.stats()).draft_guesses["hit"]


@on_the_loop
async def test_nothing_runs_ahead_under_rejection() -> None:
    """Its bonus is drawn anew; a guess of it could be right only by luck. Greedy requests of that law may."""
    async with service(TARGET, DRAFTS["good"], speculation=speculation("run-ahead")) as stack:
        await ask_all(stack, (4,), 2, law="rejection")
        assert {} == dict((await stack.stats()).draft_guesses)
        answers = await ask_all(stack, (4,), 2, law="rejection", temperature=0.0, top_p=1.0)

        assert [expected_ids(TARGET, PROMPT, TOKENS, temperature=0.0)] * 2 == [answer.ids for answer in answers]
        assert (await stack.stats()).draft_guesses["hit"] > 0


@on_the_loop
async def test_each_target_has_groups_of_its_own() -> None:
    """Two targets share their sessions out; at each they take turns, half of them in either group."""
    async with service(TARGET, DRAFTS["good"], speculation=speculation("rotation of 2")) as stack:
        plan = dataclasses.replace(stack.plans["target-0"], name="target-1")
        await stack.start_worker(plan)
        await stack.ready()
        asked = asyncio.create_task(ask_all(stack, (4,)))
        sizes: dict[str, list[int]] = {}
        while not asked.done():
            sizes |= {name: each._size for name, each in stack.driver.rounds.schedulers.items() if sum(each._size) == 4}
            await asyncio.sleep(0)
        answers = await asked

        assert expected_all() == [answer.ids for answer in answers]
        assert {"target-0", "target-1"} == set(sizes)


@pytest.mark.parametrize("schedule", IN_TROUBLE)
@pytest.mark.parametrize("role", ["draft", "target"])
@on_the_loop
async def test_bad_wire_under_every_schedule(schedule: str, role: str) -> None:
    """Frames that come twice, late and in another order, in both directions."""
    up, down = Mangler(1, twice=0.3, late=0.3), Mangler(2, twice=0.3, late=0.3)
    relays = {f"{role}-0": Relay(role, up, down)}
    async with service(TARGET, DRAFTS["middling"], relays=relays, speculation=speculation(schedule)) as stack:
        answers = await ask_all(stack, (1, 3, 4))
        await stack.quiet()

        assert expected_all() == [answer.ids for answer in answers]
        assert (await stack.stats()).speculation.accepted_by_model > 0


@pytest.mark.parametrize("schedule", IN_TROUBLE)
@on_the_loop
async def test_lost_frames_of_a_draft_under_every_schedule(schedule: str) -> None:
    """What was asked for ahead and never comes is given up like any block."""
    relay = Relay("draft", Mangler(1, lost=0.05), Mangler(2, lost=0.05))
    settings = speculation(schedule, draft_timeout_ms=100)
    async with service(TARGET, DRAFTS["middling"], relays={"draft-0": relay}, speculation=settings) as stack:
        answers = await ask_all(stack, (4,))

        assert expected_all() == [answer.ids for answer in answers]


@pytest.mark.parametrize("schedule", IN_TROUBLE)
@pytest.mark.parametrize("role", ["draft", "target"])
@on_the_loop
async def test_a_worker_dies_under_every_schedule(schedule: str, role: str) -> None:
    """In the middle of eight answers, and comes back: the same tokens, and the draft is of use before and after."""
    slow = like(TARGET, step_ms=2.0)
    draft = like(slow, disagreement=0.1)
    relay = Relay(role, lambda frame: [(0.0, frame.SerializeToString())])
    async with service(slow, draft, relays={f"{role}-0": relay}, speculation=speculation(schedule)) as stack:
        asked = asyncio.create_task(ask_all(stack, (4,)))
        await relay.seen(30)
        before = (await stack.stats()).speculation.accepted_by_model
        await stack.kill(f"{role}-0")
        await stack.restart(f"{role}-0")
        answers = await asked
        await stack.quiet()

        assert expected_all(slow) == [answer.ids for answer in answers]
        assert before > 0
        after = await ask_all(stack, (4,), 2)
        assert sum(answer.speculation.accepted_by_model for answer in after) > 0
