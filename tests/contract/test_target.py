"""What a target promises beyond what all workers do: verdicts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specwire.law.accept import judge
from specwire.law.noise import Purpose, uniform
from specwire.law.sampling import cut_to_sparse, law_of, sample_sparse
from specwire.law.tasks import Answer, Failure, Reason, Refusal
from specwire.law.values import Block, Law, Verdict
from specwire.lm.port import Feed
from specwire.lm.table import TableModel
from specwire.lm.table_config import Fault, TableConfig
from tests.contract.harness import (
    Peer,
    Steps,
    Text,
    model_of,
    on_a_loop,
    plain,
    sizes,
    text,
    until_busy,
    worker,
)

TABLE = TableConfig(vocab_size=16, seed=3)


def wrong(token: int) -> int:
    """Another token."""
    return (token + 1) % 16


def spoiled(right: tuple[int, ...], at: int) -> tuple[int, ...]:
    """The right tokens, but for one."""
    return (*right[:at], wrong(right[at]), *right[at + 1 :])


@pytest.mark.parametrize("length", [0, 1, 2, 4, 8])
@on_a_loop
async def test_a_right_block_stands_whole(length: int) -> None:
    """All accepted, the bonus added; the cache holds base + accepted."""
    async with worker("target", TABLE) as server, Peer(server, "target") as peer:
        session = text()
        right = plain(TABLE, session, length + 1)
        answer = await peer.one(session.verify(0, right[:length]))

        assert answer.result == Verdict(length, right[length])
        assert answer.length == 3 + length


@pytest.mark.parametrize("at", [0, 1, 3])
@on_a_loop
async def test_a_block_stands_up_to_its_first_wrong_token_and_the_text_goes_on_from_there(at: int) -> None:
    """k = 1 and more (field report 15): the cut takes effect in the very next step."""
    async with worker("target", TABLE) as server, Peer(server, "target") as peer:
        session = text()
        right = plain(TABLE, session, 12)
        answer = await peer.one(session.verify(0, spoiled(right[: max(1, 2 * at)], at)))
        assert answer.result == Verdict(at, right[at])
        assert answer.length == 3 + at
        session.prefix.extend(right[: at + 1])
        session.epoch += 1
        answer = await peer.one(session.verify(answer.length, right[at + 1 : at + 4]))

        assert answer.result == Verdict(3, right[at + 4])
        assert answer.length == 3 + at + 1 + 3


@on_a_loop
async def test_ragged_and_plain_side_by_side_are_as_alone() -> None:
    """Sixteen prompts, blocks of 0 to 8, right and wrong, greedy and drawn, in one step (field reports 20, 21)."""
    steps = Steps()
    table = dataclasses.replace(TABLE, faults=(Fault("hang", call=1),))
    async with worker("target", table, slots=17, observers=(steps,)) as server, Peer(server, "target") as peer:
        blocker = text(counter=99).verify(0)
        await peer.send(blocker)
        await until_busy(server)
        sessions: list[Text] = []
        tasks, expected = [], []
        for n in range(16):
            session = text(tuple(range(n % 5 + 1)), counter=n + 1, temperature=n % 3 / 2, seed=n, top_p=1 - n / 40)
            right = plain(TABLE, session, 9)
            length = n % 9
            bad = n % 4 < length
            block = spoiled(right[:length], n % 4) if bad else right[:length]
            sessions.append(session)
            tasks.append(session.verify(0, block))
            accepted = n % 4 if bad else length
            expected.append(Verdict(accepted, right[accepted]))
        await peer.send(*tasks)
        await peer.echo()
        model_of(server).release()
        await peer.answers(blocker)
        answers = await peer.answers(*tasks)
        await sizes(server)

        assert [answer.result for answer in answers] == expected
        assert steps.records[-1].timing.sessions == 16
        assert steps.records[-1].timing.rows == sum(n % 9 + 1 for n in range(16))


@pytest.mark.parametrize("length", [41, 65, 97])
@on_a_loop
async def test_long_prompts_are_read_in_pieces_beside_running_sessions(length: int) -> None:
    """A budget of 40 rows; the last piece of one token is no plain decode (field report 23)."""
    steps = Steps()
    async with (
        worker("target", TABLE, max_block=1, token_budget=40, observers=(steps,)) as server,
        Peer(server, "target") as peer,
    ):
        long = text(tuple(n % 16 for n in range(length)), counter=1)
        running = [text((n,), counter=n) for n in (2, 3)]
        expected_long = plain(TABLE, long, 1)
        expected = [plain(TABLE, session, 1) for session in running]
        answers = await peer.ask(long.verify(0), *(session.verify(0) for session in running))
        await sizes(server)

        assert [answer.result for answer in answers] == [Verdict(0, token) for (token,) in (expected_long, *expected)]
        assert all(r.timing.rows + r.timing.prefill_rows <= 40 for r in steps.records)
        assert len(steps.records) > 1


@on_a_loop
async def test_a_block_after_a_long_append_is_judged_whole() -> None:
    """Replay and verification in one task, over several steps; one verdict."""
    async with worker("target", TABLE, max_block=4, token_budget=52) as server, Peer(server, "target") as peer:
        session = text(tuple(n % 16 for n in range(120)))
        right = plain(TABLE, session, 5)
        answer = await peer.one(session.verify(0, right[:4]))

        assert answer.result == Verdict(4, right[4])
        assert answer.length == 124
        assert answer.timing.compute_us > 0


@on_a_loop
async def test_text_up_to_the_last_position_of_the_context() -> None:
    """base + block may reach the context and not pass it (field reports 17, 34)."""
    table = dataclasses.replace(TABLE, max_context=12)
    async with worker("target", table) as server, Peer(server, "target") as peer:
        session = text(tuple(range(10)))
        right = plain(dataclasses.replace(table, max_context=20), session, 4)
        over = await peer.one(session.verify(0, right[:3]))
        full = await peer.one(session.verify(0, right[:2]))

        assert isinstance(over.result, Refusal)
        assert over.result.reason is Reason.INVALID
        assert over.result.detail == "keep + append + block: got 13, must be at most the context of 12 tokens"
        assert full.result == Verdict(2, right[2])


@on_a_loop
async def test_blocks_too_long_or_of_unknown_ids_are_refused() -> None:
    """With field, value and limit."""
    async with worker("target", TABLE, max_block=2, token_budget=64) as server, Peer(server, "target") as peer:
        details = []
        for counter, block in enumerate([(1, 2, 3), (1, 16)], 1):
            answer = await peer.one(text(counter=counter).verify(0, block))
            assert isinstance(answer.result, Refusal)
            details.append(answer.result.detail)

        assert details == ["block: got 3, must be at most 2 tokens", "block: got 16, must be token ids under 16"]


@on_a_loop
async def test_not_a_number_in_a_late_row_counts_only_when_it_is_reached() -> None:
    """Third row of a block: with the first token wrong nobody looks at it, with all right the session fails."""
    table = dataclasses.replace(TABLE, faults=(Fault("nan", row=2),))
    async with worker("target", table) as server, Peer(server, "target") as peer:
        session, other = text(counter=1), text(counter=2)
        right = plain(TABLE, session, 3)
        refused_early = await peer.one(session.verify(0, spoiled(right, 0)))
        reached = await peer.one(other.verify(0, right))

        assert refused_early.result == Verdict(0, right[0])
        assert isinstance(reached.result, Failure)
        assert reached.result.bad_law


def rejection(n: int) -> tuple[Text, Block]:
    """A session under `rejection`, and a block drawn from the target's own law cut to four tokens."""
    session = text((n % 16, 2, 3), counter=n + 1, law=Law.REJECTION, seed=n, temperature=1.0)
    model = TableModel(TABLE, 1)
    tokens, laws = list(session.prompt), []
    for _ in range(3):
        scores = model.forward([Feed(0, 0, tokens, 1)])[0].numpy()
        laws.append(cut_to_sparse(law_of(scores, session.opening.sampling), 4))
        tokens.append(sample_sparse(laws[-1], uniform(n, 0, len(tokens), Purpose.DRAFT)))
    return session, Block(tuple(tokens[3:]), tuple(laws))


@on_a_loop
async def test_rejection_gives_the_references_verdict_and_the_same_one_again() -> None:
    """Eight sessions; judging is a function of scores, seed and positions."""
    async with worker("target", TABLE, slots=8) as server, Peer(server, "target") as peer:
        model = TableModel(TABLE, 1)
        tasks, expected = [], []
        for n in range(8):
            session, block = rejection(n)
            scores = model.forward([Feed(0, 0, [*session.prompt, *block.tokens], 4)]).numpy()
            expected.append(judge(scores, session.opening, block, 3))
            tasks.append(session.verify(0, block.tokens, laws=block.laws))
        answers = await peer.ask(*tasks)
        again = await peer.ask(*(dataclasses.replace(task, epoch=2, number=9) for task in tasks))

        assert [answer.result for answer in answers] == expected
        assert [answer.result for answer in again] == expected
        assert {verdict.accepted for verdict in expected} >= {0, 3}


@on_a_loop
async def test_the_parts_of_a_tasks_time_lie_within_its_residence() -> None:
    """parse + queue + compute <= residence, step parts are there, the last frame's serialisation is told by the next."""
    async with worker("target", dataclasses.replace(TABLE, step_ms=3.0)) as server, Peer(server, "target") as peer:
        session = text(tuple(range(8)))
        first: Answer = await peer.one(session.verify(0))
        await peer.one(session.verify(7))
        frames = [frame for frame in peer.frames if frame.answers]
        timing, step = first.timing, frames[0].step

        assert step is not None
        assert timing.parse_us + timing.queue_us + timing.compute_us <= timing.residence_us
        assert 3000 <= step.compute_us <= timing.compute_us
        assert (step.rows, step.prefill_rows, step.sessions, step.step) == (1, 7, 1, 1)
        assert frames[1].step is not None
        assert frames[1].step.previous_serialise_us > 0


@on_a_loop
async def test_announced_blocks_are_waited_for_and_verified_together() -> None:
    """The hint says three more are due: the first waits, and starts with whoever came when no more is announced."""
    steps = Steps()
    async with worker("target", TABLE, observers=(steps,)) as server, Peer(server, "target") as peer:
        sessions = [text((n, 2, 3), counter=n) for n in (1, 2, 3)]
        tasks = [session.verify(0) for session in sessions]
        stepper: Any = server.engine.ready.result()
        stepper._step_s = 1e6  # as if steps took so long; then waiting for company is worth while
        await peer.send(tasks[0], due_sessions=3, due_us=900_000_000)
        await peer.send(tasks[1], due_sessions=2, due_us=800_000_000)
        await peer.echo()
        waited = (await sizes(server))["waiting"]
        await peer.send(tasks[2])
        answers = await peer.answers(*tasks)
        await sizes(server)

        assert waited == 2
        assert [answer.result for answer in answers] == [Verdict(0, *plain(TABLE, s, 1)) for s in sessions]
        assert [record.timing.sessions for record in steps.records] == [3]
