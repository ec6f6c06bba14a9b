"""The order of work, for both services alike: epoch and number, length, hash; then the work. A refusal changes nothing."""

from __future__ import annotations

import dataclasses

import pytest

from specwire.law.tasks import Reason, Refusal
from specwire.lm.table_config import Fault, TableConfig
from specwire.wire.stopwatch import now_ns
from tests.contract.harness import (
    Peer,
    Steps,
    at_desk,
    model_of,
    on_a_loop,
    plain,
    refused,
    text,
    tokens_of,
    until_busy,
    worker,
)

pytestmark = pytest.mark.parametrize("role", ["draft", "target"])
TABLE = TableConfig(vocab_size=16, seed=3)
HANGS_ONCE = dataclasses.replace(TABLE, faults=(Fault("hang", call=1),))


@on_a_loop
async def test_a_session_goes_on_token_by_token(role: str) -> None:
    """Each task appends the token of the last one; together they are the model's plain decoding."""
    async with worker(role, TABLE) as server, Peer(server, role) as peer:
        session = text()
        expected = plain(TABLE, session, 6)
        got: list[int] = []
        keep = 0
        for _ in range(6):
            answer = await peer.one(session.ask(role, keep))
            keep = answer.length
            got.extend(tokens_of(answer))
            assert keep == len(session.prefix)
            session.prefix.extend(tokens_of(answer))

        assert tuple(got) == expected


@on_a_loop
async def test_a_prompt_of_one_token(role: str) -> None:
    """Nothing is special about the shortest prompt."""
    async with worker(role, TABLE) as server, Peer(server, role) as peer:
        session = text((7,))

        assert tokens_of(await peer.one(session.ask(role, 0))) == plain(TABLE, session, 1)


@on_a_loop
async def test_a_stranger_is_told_that_nothing_is_here(role: str) -> None:
    """A task that keeps something of a session the worker does not have is refused with length zero."""
    async with worker(role, TABLE) as server, Peer(server, role) as peer:
        assert refused(await peer.one(text().ask(role, 2))) == (Reason.LENGTH, 0, 0)


@on_a_loop
async def test_refusals_name_the_place_and_change_nothing(role: str) -> None:
    """Too long a keep, then the wrong tokens: both refusals tell the true place, and the right task then succeeds."""
    async with worker(role, TABLE) as server, Peer(server, role) as peer:
        session = text((1, 2, 3, 4))
        expected = plain(TABLE, session, 1)
        await peer.one(session.feed(role, 0))
        here = (4, session.prefix.hash_at(4))
        too_long = text((1, 2, 3, 4, 5, 6))
        too_long.number = 1
        wrong = text((1, 2, 9, 4))
        wrong.number = 2
        before = await at_desk(server, lambda desk: desk.session_of(session.id))

        assert refused(await peer.one(too_long.ask(role, 5))) == (Reason.LENGTH, *here)
        assert refused(await peer.one(wrong.ask(role, 3))) == (Reason.HASH, *here)
        assert await at_desk(server, lambda desk: desk.session_of(session.id)) == before
        session.number = 3
        assert tokens_of(await peer.one(session.ask(role, 3))) == expected


@on_a_loop
async def test_lower_epochs_and_numbers_are_stale(role: str) -> None:
    """Whatever lies behind what the worker has seen is refused, keep = 0 included."""
    async with worker(role, TABLE) as server, Peer(server, role) as peer:
        session = text()
        session.epoch, session.number = 5, 9
        await peer.one(session.ask(role, 0))
        session.number = 8
        same_number = session.ask(role, 2)
        session.number = 6
        lower_number = session.ask(role, 2)
        session.epoch, session.number = 4, 19
        lower_epoch = session.ask(role, 0)

        for task in (lower_number, same_number, lower_epoch):
            assert refused(await peer.one(task))[0] is Reason.STALE
        session.epoch, session.number = 5, 29
        assert tokens_of(await peer.one(session.ask(role, 2))) == plain(TABLE, session, 1)


@on_a_loop
async def test_an_exact_repeat_is_answered_without_work(role: str) -> None:
    """The stored answer comes again, however often; time left and trace are not part of the task."""
    steps = Steps()
    async with worker(role, TABLE, observers=(steps,)) as server, Peer(server, role) as peer:
        session = text()
        task = session.ask(role, 0)
        first = await peer.one(task)
        again = await peer.one(task)
        later = await peer.one(dataclasses.replace(task, time_left_ms=5000, trace=b"\1" * 25))
        calls = await at_desk(server, lambda desk: model_of(server).calls)

        assert (again.length, again.result) == (first.length, first.result)
        assert (later.length, later.result) == (first.length, first.result)
        assert calls == 1
        assert len(steps.records) == 1


@on_a_loop
async def test_a_repeat_of_a_task_in_work_is_that_task(role: str) -> None:
    """Two copies, one answer: the second copy finds the first read half."""
    async with worker(role, HANGS_ONCE, max_block=1, token_budget=40) as server, Peer(server, role) as peer:
        session = text(tuple(range(16)) * 6)
        task = session.ask(role, 0)
        await peer.send(task)
        await until_busy(server)
        await peer.send(task)
        await peer.echo()
        model_of(server).release()
        answer = await peer.one(session.ask(role, 90))

        assert tokens_of(answer) == plain(TABLE, session, 1)
        assert [a.number for frame in peer.frames for a in frame.answers] == [1, 2]


@on_a_loop
async def test_tasks_of_one_session_keep_their_order(role: str) -> None:
    """A prompt in three pieces and a question, all sent before the first answer."""
    async with worker(role, TABLE) as server, Peer(server, role) as peer:
        session = text(tuple(range(1, 13)))
        tasks = [session.feed(role, keep, end=keep + 4) for keep in (0, 4, 8)]
        tasks.append(session.ask(role, 11))
        for task in tasks:
            await peer.send(task)
        answers = await peer.answers(*tasks)

        assert [answer.length for answer in answers] == [4, 8, 12, 12]
        assert tokens_of(answers[-1]) == plain(TABLE, session, 1)


@on_a_loop
async def test_a_task_behind_one_that_leaves_no_ground_is_refused(role: str) -> None:
    """What waited is checked when its turn comes, against what is there then."""
    async with worker(role, HANGS_ONCE) as server, Peer(server, role) as peer:
        session = text((1, 2, 3, 4))
        first = session.feed(role, 0, end=2)
        await peer.send(first)
        await until_busy(server)
        beyond = session.ask(role, 3)
        await peer.send(beyond)
        await peer.echo()
        model_of(server).release()
        answers = await peer.answers(first, beyond)

        assert answers[0].length == 2
        assert refused(answers[1]) == (Reason.LENGTH, 2, session.prefix.hash_at(2))


@on_a_loop
async def test_a_later_epoch_overtakes(role: str) -> None:
    """A task nobody waits for any more is answered as stale at once, and the newer one is done."""
    async with worker(role, HANGS_ONCE) as server, Peer(server, role) as peer:
        blocker, session = text(counter=1), text((4, 5, 6), counter=2)
        blocked = blocker.ask(role, 0)
        await peer.send(blocked)
        await until_busy(server)
        old = session.ask(role, 0)
        session.epoch += 1
        session.prefix.cut(2)
        session.prefix.extend([9])
        new = session.ask(role, 0)
        await peer.send(old)
        await peer.send(new)
        await peer.echo()
        model_of(server).release()
        _, old_answer, new_answer = await peer.answers(blocked, old, new)

        assert refused(old_answer)[0] is Reason.STALE
        assert tokens_of(new_answer) == plain(TABLE, session, 1)


@on_a_loop
async def test_a_task_with_nothing_to_compute_costs_no_pass(role: str) -> None:
    """Bringing up to date a cache that is up to date."""
    async with worker(role, TABLE) as server, Peer(server, role) as peer:
        session = text()
        await peer.one(session.feed(role, 0))
        answer = await peer.one(session.feed(role, 3))

        assert answer.length == 3
        assert not isinstance(answer.result, Refusal)
        assert await at_desk(server, lambda desk: model_of(server).calls) == 1


@on_a_loop
async def test_tasks_against_the_limits_are_refused_with_field_value_and_limit(role: str) -> None:
    """Append, context and token ids; the session is left as it was."""
    async with (
        worker(role, dataclasses.replace(TABLE, max_context=12), max_append=8) as server,
        Peer(server, role) as peer,
    ):
        cases = {
            "append: got '9 tokens', must be at most 8": text(tuple(range(9))),
            "append: got 16, must be token ids under 16": text((1, 16)),
        }
        for counter, (message, session) in enumerate(cases.items(), 1):
            session.counter = counter
            answer = await peer.one(session.ask(role, 0))
            assert isinstance(answer.result, Refusal)
            assert (answer.result.reason, answer.result.detail) == (Reason.INVALID, message)
        session = text(tuple(range(13)), counter=9)
        await peer.one(session.feed(role, 0, end=8))
        answer = await peer.one(session.feed(role, 8))
        assert refused(answer) == (Reason.INVALID, 8, session.prefix.hash_at(8))
        assert isinstance(answer.result, Refusal)
        assert answer.result.detail == "keep + append + block: got 13, must be at most the context of 12 tokens"


@on_a_loop
async def test_time_that_is_over_before_the_start(role: str) -> None:
    """A task whose time ran out while it waited is refused, not begun, and changes nothing."""
    async with worker(role, HANGS_ONCE) as server, Peer(server, role) as peer:
        blocker, session = text(counter=1), text(counter=2)
        blocked = blocker.ask(role, 0)
        await peer.send(blocked)
        await until_busy(server)
        late, patient = session.ask(role, 0, time_left_ms=1), text(counter=3).ask(role, 0, time_left_ms=60_000)
        await peer.send(late, patient)
        sent = now_ns()
        while now_ns() < sent + 2_000_000:
            await peer.echo()
        await peer.echo()
        model_of(server).release()
        _, late_answer, patient_answer = await peer.answers(blocked, late, patient)

        assert refused(late_answer) == (Reason.TOO_LATE, 0, 0)
        assert tokens_of(patient_answer) == plain(TABLE, session, 1)
        assert await at_desk(server, lambda desk: desk.table.get(session.id)) is None
