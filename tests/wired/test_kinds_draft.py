"""Field reports, section E: the draft worker and its state. Names carry the kind, docstrings the reports."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from coordinator.config import load
from specwire.law.errors import InvalidArgument
from specwire.law.values import Source
from specwire.lm.table_config import Fault
from tests.support.relay import Hook, Out, Relay, pass_on
from tests.support.service import Answer, Service, expected_ids, like, model_of, on_the_loop, service
from tests.wired.conftest import DRAFTS, TARGET


async def four(stack: Service, tokens: int = 40, **fields: Any) -> list[Answer]:
    """Four requests at once, each compared with the target alone."""
    fields = {"num_speculative_tokens": 3, "method": "draft_model", **fields}
    answers = await asyncio.gather(*(stack.ask([n], max_tokens=tokens, seed=n, **fields) for n in range(4)))
    assert [expected_ids(TARGET, [n], tokens, seed=n) for n in range(4)] == [answer.ids for answer in answers]
    return answers


@on_the_loop
async def test_kind_28_acceptance_does_not_wear_off(perfect: Service) -> None:
    """Report 87, scaled down: the same prompts again and again: acceptance is what it was in the first round, not an average."""
    shares = []
    for _ in range(6):
        answers = await four(perfect)
        shares.append(sum(a.speculation.accepted for a in answers) / sum(a.speculation.drafted for a in answers))

    assert [1.0] * 6 == shares


@on_the_loop
async def test_kind_28_a_long_request_does_not_end_drafting_for_others(perfect: Service) -> None:
    """Report 89, scaled down: one request past 256 tokens, then short ones: they draft as before."""
    long = await perfect.ask([1], max_tokens=500, seed=1, num_speculative_tokens=8, method="draft_model")
    short = await four(perfect)

    assert long.speculation.accepted == long.speculation.drafted > 256
    assert all(answer.speculation.accepted == answer.speculation.drafted > 0 for answer in short)


@on_the_loop
async def test_kind_29_drafting_that_paused_resumes_where_the_text_is() -> None:
    """Report 91: draft = target; k = 3, then 0 for 50 tokens, then 3: all is accepted again from the first round after the
    pause."""
    async with service(like(TARGET, step_ms=1.0), DRAFTS["good"]) as stack:
        asking = asyncio.create_task(
            stack.ask([1], max_tokens=150, seed=3, num_speculative_tokens=3, method="draft_model", return_rounds=True)
        )

        async def length(k: int, at: int) -> None:
            await stack.until(lambda stats: stats.generated_tokens >= at)
            (session,) = stack.driver.sessions.values()
            assert session.window is not None
            session.window._fixed = k

        await length(0, 20)
        await length(3, 70)
        answer = await asking
        assert answer.final is not None
        rounds = [round.drafted for round in answer.final.rounds]

        assert expected_ids(TARGET, [1], 150, seed=3) == answer.ids
        assert [3, 0, 3] == [k for k, _ in itertools.groupby(k for k in rounds[:-1])]
        assert [round.drafted for round in answer.final.rounds] == [round.accepted for round in answer.final.rounds]


@on_the_loop
async def test_a_draft_that_does_not_pay_is_not_told_the_text() -> None:
    """Nothing of it stands and the allowance for trials is used up: the prompt is not read either, until it is wanted."""
    async with service(like(TARGET, step_ms=1.0), like(DRAFTS["random"], step_ms=5.0)) as stack:
        engine, curves = stack.workers["draft-0"].engine, stack.driver.curves
        for _ in range(60):
            curves.observe_block(Source.DRAFT_MODEL, 1, 0)
        curves.allowance = -100.0
        await stack.ask(range(30), max_tokens=30, seed=1)
        unread = engine._steps
        await stack.ask(range(30), max_tokens=30, seed=1, num_speculative_tokens=1, method="draft_model")

        assert unread == 0 < engine._steps
        assert curves.draft_read.known


@on_the_loop
async def test_what_is_seen_beside_a_draft_is_told_apart() -> None:
    """Two sessions, one of them drafting for most of the time: of the other's steps some had a draft beside them."""
    async with service(like(TARGET, step_ms=2.0), like(DRAFTS["good"], step_ms=5.0)) as stack:
        crowded = stack.driver.curves.beside.at(2)
        drafts = {"num_speculative_tokens": 3, "method": "draft_model"}
        plain = {"num_speculative_tokens": 0}
        await asyncio.gather(
            *(stack.ask([n], max_tokens=80, seed=n, **fields) for n, fields in enumerate((drafts, plain)))
        )

        assert stack.driver.curves.beside.at(2) != crowded
        assert stack.driver.curves.block_link.knows(2)
        assert stack.driver.curves.crowding.at(2) == pytest.approx(1.0, abs=0.3)


@on_the_loop
async def test_kind_30_a_draft_that_raises() -> None:
    """Report 93: it raises on its third pass under four open streams. They go on, the draft is used again."""
    async with service(TARGET, like(TARGET, faults=(Fault("raise", call=3),))) as stack:
        await four(stack)
        stats = await stack.stats()

        assert 0 < stats.fallbacks["draft_failed"] <= 4
        while not (await stack.stats()).speculation.accepted_by_model:  # it is left alone for a moment after a failure
            await four(stack)


@on_the_loop
async def test_kind_30_a_draft_that_hangs() -> None:
    """Report 95: it sleeps in a pass while the time-out is 1 ms: streams go on without it at once; when it wakes it is used
    again."""
    async with service(
        TARGET, like(TARGET, faults=(Fault("hang", call=4),)), speculation={"draft_timeout_ms": 50}
    ) as stack:
        while not (await stack.stats()).fallbacks["draft_timeout"]:
            await four(stack)
        without = (await stack.stats()).speculation.accepted_by_model
        model_of(stack.workers["draft-0"]).release()
        while (await stack.stats()).speculation.accepted_by_model == without:
            await four(stack)


@pytest.mark.parametrize("timeout", [-1, 0, 600_001, 0.5, "never"])
def test_kind_30_time_outs_that_make_no_sense_are_refused(timeout: object) -> None:
    """Report 95: -1 and 0 mean neither "for ever" nor "at once": the service does not start with them. 1 ms is a time-out."""
    with pytest.raises(InvalidArgument, match="draft_timeout_ms"):
        load(None, {"speculation.draft_timeout_ms": timeout})

    assert load(None, {"speculation.draft_timeout_ms": 1}).speculation.draft_timeout_ms == 1


def spoiled(change: Any) -> tuple[Relay, list[int]]:
    """A relay that changes blocks on their way, and the numbers of the tasks that asked for tokens."""
    asked: dict[tuple[int, int], int] = {}
    blocks: list[int] = []

    def to_worker(frame: Any) -> Out:
        asked.update({(task.session, task.number): task.num_tokens for task in frame.tasks})
        return pass_on(frame)

    def to_coordinator(frame: Any) -> Out:
        for answer in frame.answers:
            if asked.get((answer.session, answer.number)):
                blocks.append(answer.number)
                change(answer, len(blocks))
        return pass_on(frame)

    return Relay("draft", to_worker, to_coordinator), blocks


@on_the_loop
async def test_kind_30_empty_blocks_are_plain_steps() -> None:
    """Report 97: the draft answers rounds 1 and 5 with no tokens at all."""

    def empty(answer: Any, number: int) -> None:
        if number in (1, 5):
            del answer.tokens[:]

    relay, blocks = spoiled(empty)
    async with service(TARGET, DRAFTS["good"], relays={"draft-0": relay}) as stack:
        answer = await stack.ask(
            [1], max_tokens=40, seed=1, num_speculative_tokens=3, method="draft_model", return_rounds=True
        )
        assert answer.final is not None

        assert expected_ids(TARGET, [1], 40, seed=1) == answer.ids
        assert [0, 3, 3, 3, 0, 3] == [round.drafted for round in answer.final.rounds[:6]]
        assert len(blocks) > 6


def _too_many(answer: Any, number: int) -> None:
    answer.tokens.extend([1] * 9)


def _longer_than_true(answer: Any, number: int) -> None:
    answer.length += 7


def _another_task(answer: Any, number: int) -> None:
    answer.number += 1 if number % 2 else 0


def _other_tokens(answer: Any, number: int) -> None:
    answer.tokens[:] = [(token + 1) % 32 for token in answer.tokens]


@pytest.mark.parametrize("lie", [_too_many, _longer_than_true, _another_task, _other_tokens])
@on_the_loop
async def test_kind_30_a_draft_that_talks_nonsense(lie: Any) -> None:
    """More tokens than asked, a cache length that is not true, answers to what nobody asked, tokens it never drew: no answer
    changes and none hangs."""
    relay, blocks = spoiled(lie)
    async with service(
        TARGET, DRAFTS["middling"], relays={"draft-0": relay}, speculation={"draft_timeout_ms": 300}
    ) as stack:
        await four(stack)

        assert blocks


@on_the_loop
async def test_kind_30_frames_that_are_no_protobuf() -> None:
    """A stream that carries garbage is given up and opened anew; the answers are as ever."""
    garbage: Hook = lambda frame: [(0.0, b"\xff\xff\xff\xff")]  # noqa: E731
    relay = Relay("draft")
    async with service(TARGET, DRAFTS["good"], relays={"draft-0": relay}) as stack:
        relay.to_coordinator = garbage
        await four(stack)
        relay.to_coordinator = None
        await stack.ready()
        answers = await four(stack)

        assert relay.streams > 1
        assert sum(answer.speculation.accepted for answer in answers) > 0


@on_the_loop
async def test_kind_31_no_tokens_means_off() -> None:
    """Report 99: a service whose block length is 0 starts, serves and never drafts; a request may still ask for more within
    limits."""
    async with service(TARGET, DRAFTS["good"], speculation={"num_speculative_tokens": 0}) as stack:
        plain = await stack.ask([1], max_tokens=20, seed=1)
        asked = await stack.ask([1], max_tokens=20, seed=1, num_speculative_tokens=4)

        assert expected_ids(TARGET, [1], 20, seed=1) == plain.ids == asked.ids
        assert (0, 20) == (plain.speculation.drafted, plain.speculation.rounds)
        assert asked.speculation.accepted > 0


@pytest.mark.parametrize("k", [9, 65, 2**32 - 1])
@on_the_loop
async def test_kind_31_longer_than_the_limit_is_refused(middling: Service, k: int) -> None:
    """A block length past the service's limit is refused with both numbers."""
    with pytest.raises(Exception, match=rf"num_speculative_tokens: got {k}, must be in \[0, 8\]"):
        await middling.ask(max_tokens=5, num_speculative_tokens=k)


@pytest.mark.parametrize("tokens", [4, 200])
@on_the_loop
async def test_kind_32_a_draft_that_is_the_target(perfect: Service, tokens: int) -> None:
    """Report 103: greedy, full length, everything accepted, k + 1 tokens a round."""
    answer = await perfect.ask([1], temperature=0, max_tokens=tokens, num_speculative_tokens=3, method="draft_model")

    assert tokens == len(answer.ids)
    assert answer.speculation.accepted == answer.speculation.drafted > 0
    assert -(-tokens // 4) == answer.speculation.rounds


@pytest.mark.parametrize(
    "feature",
    [
        {"law": "rejection"},
        {"temperature": 0.0},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"stop_token_ids": [31]},
        {"ignore_eos": True},
        {"return_rounds": True},
        {"method": "auto"},
        {"num_speculative_tokens": "auto"},
    ],
    ids=str,
)
@on_the_loop
async def test_kind_32_no_feature_turns_the_draft_off(perfect: Service, feature: dict[str, Any]) -> None:
    """Report 105: with each feature in turn the draft is asked and accepted."""
    fields = {"num_speculative_tokens": 4, "method": "draft_model", **feature}
    answer = await perfect.ask([1], max_tokens=60, seed=2, **fields)

    assert answer.speculation.accepted_by_model > 0
