"""A model that raises, hangs or gives no law: who suffers and who does not. For both services alike."""

from __future__ import annotations

import dataclasses

import pytest

from specwire.law.tasks import Failure, Reason
from specwire.lm.table_config import Fault, TableConfig
from tests.contract.harness import (
    Peer,
    Steps,
    model_of,
    on_a_loop,
    plain,
    refused,
    sizes,
    text,
    tokens_of,
    until_busy,
    worker,
)

pytestmark = pytest.mark.parametrize("role", ["draft", "target"])
TABLE = TableConfig(vocab_size=16, seed=3)


@on_a_loop
async def test_not_a_number_fails_its_own_session_alone(role: str) -> None:
    """Four sessions in one step, one of them poisoned: it gets a failure and no token, the others their own."""
    steps = Steps()
    faults = (Fault("hang", call=1), Fault("nan", first_token=13))
    table = dataclasses.replace(TABLE, faults=faults)
    async with worker(role, table, slots=5, observers=(steps,)) as server, Peer(server, role) as peer:
        blocker = text(counter=9).ask(role, 0)
        await peer.send(blocker)
        await until_busy(server)
        sessions = [text((first, 2, 3), counter=first) for first in (11, 12, 13, 14)]
        tasks = [session.ask(role, 0) for session in sessions]
        await peer.send(*tasks)
        await peer.echo()
        model_of(server).release()
        await peer.answers(blocker)
        answers = await peer.answers(*tasks)
        sessions_left = (await sizes(server))["sessions"]
        poisoned = answers.pop(2)

        assert isinstance(poisoned.result, Failure)
        assert (poisoned.result.bad_law, poisoned.length) == (True, 0)
        assert poisoned.result.detail == f"the {role} gave no usable law: not a number, infinite or empty"
        assert [tokens_of(answer) for answer in answers] == [
            plain(TABLE, session, 1) for session in sessions if session.counter != 13
        ]
        assert steps.records[-1].timing.sessions == 4
        assert sessions_left == 4
        gone = await peer.one(sessions[2].ask(role, 2))
        assert refused(gone) == (Reason.LENGTH, 0, 0)


@on_a_loop
async def test_a_step_that_raises_fails_its_tasks_and_nobody_else(role: str) -> None:
    """The engine lives on, sessions outside the step keep their cache, slots of the failed ones are free."""
    table = dataclasses.replace(TABLE, faults=(Fault("raise", call=2),))
    async with worker(role, table, slots=2) as server, Peer(server, role) as peer:
        safe, unlucky = text(counter=1), text(counter=2)
        first = await peer.one(safe.ask(role, 0))
        failed = await peer.one(unlucky.ask(role, 0))
        again = await peer.one(unlucky.ask(role, 0))
        safe.prefix.extend(tokens_of(first))
        further = await peer.one(safe.ask(role, 3))

        assert failed.result == Failure("the model failed (RuntimeError)")
        assert tokens_of(again) == plain(TABLE, unlucky, 1)
        assert tokens_of(further) == plain(TABLE, safe, 1)


@on_a_loop
async def test_a_model_that_only_raises_makes_the_worker_unwell(role: str) -> None:
    """Every task is answered with a failure; after three the health turns bad; no slot is lost."""
    table = dataclasses.replace(TABLE, faults=(Fault("raise"),))
    async with worker(role, table) as server, Peer(server, role) as peer:
        assert server.engine.trouble() == ""
        answers = [await peer.one(text(counter=counter).ask(role, 0)) for counter in range(1, 12)]

        assert all(isinstance(answer.result, Failure) for answer in answers)
        assert server.engine.trouble() == "11 steps failed in a row"
        assert (await sizes(server))["sessions"] == 0


@on_a_loop
async def test_a_step_that_hangs_makes_the_worker_unwell_until_it_ends(role: str) -> None:
    """Alive, connected, and of no use: that must show."""
    table = dataclasses.replace(TABLE, faults=(Fault("hang", call=1),))
    async with worker(role, table, hang_s=0.001) as server, Peer(server, role) as peer:
        task = text().ask(role, 0)
        await peer.send(task)
        await until_busy(server)
        while not server.engine.trouble():
            await peer.echo()
        assert server.engine.trouble() == "a step has taken 0 s"
        model_of(server).release()
        await peer.answers(task)
        await sizes(server)

        assert server.engine.trouble() == ""


@on_a_loop
async def test_tasks_behind_a_failed_one_are_refused(role: str) -> None:
    """The session is gone; whoever waited behind it learns so at once and nobody waits for ever."""
    table = dataclasses.replace(TABLE, faults=(Fault("hang", call=1), Fault("nan", first_token=1)))
    async with worker(role, table) as server, Peer(server, role) as peer:
        session = text((1, 2, 3))
        first = session.ask(role, 0)
        await peer.send(first)
        await until_busy(server)
        second = session.ask(role, 2)
        await peer.send(second)
        await peer.echo()
        model_of(server).release()
        answers = await peer.answers(first, second)

        assert isinstance(answers[0].result, Failure)
        assert refused(answers[1]) == (Reason.LENGTH, 0, 0)
