"""What a worker makes of prompts that begin alike: the same tokens, for fewer rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specwire.law.tasks import Answer, Failure, SessionId
from specwire.lm.table_config import Fault, TableConfig
from tests.contract.harness import Peer, Steps, Text, on_a_loop, plain, sizes, text, tokens_of, worker

TABLE = TableConfig(vocab_size=16, seed=3)
SYSTEM = tuple(7 * n % 16 for n in range(40))
"""What all prompts begin with."""
FIRST, SECOND = (*SYSTEM, 1, 2, 3), (*SYSTEM, 1, 5, 6, 7)
FOUND = len(SYSTEM) + 1
"""Tokens of the second that the first has too."""


@dataclasses.dataclass
class Asked:
    """What became of the second session."""

    tokens: tuple[int, ...]
    prefill_rows: int
    """Of all its steps."""
    reused: int
    """By its first answer."""


async def goes_on(peer: Peer, role: str, session: Text, count: int = 6) -> tuple[list[Answer], tuple[int, ...]]:
    """So many tokens or a few more, task after task."""
    answers, keep = [], 0
    while len(session.prefix) < len(session.prompt) + count:
        answers.append(await peer.one(session.ask(role, keep, 3)))
        session.prefix.extend(tokens_of(answers[-1]))
        keep = answers[-1].length
    return answers, tuple(session.prefix.tokens[len(session.prompt) :])


async def ask_second(role: str, *, closed: bool, slots: int = 4, **settings: Any) -> Asked:
    """One session, and another with the same beginning while the first lives or after it is `closed`."""
    steps = Steps()
    async with (
        worker(role, TABLE, slots=slots, observers=(steps,), **settings) as server,
        Peer(server, role) as peer,
    ):
        first, second = text(FIRST, counter=1), text(SECOND, counter=2, seed=8)
        await goes_on(peer, role, first)
        if closed:
            await peer.send(closes=(first.id,))
        await sizes(server)
        before = sum(record.timing.prefill_rows for record in steps.records)
        answers, tokens = await goes_on(peer, role, second)
        await sizes(server)
        rows = sum(record.timing.prefill_rows for record in steps.records) - before
        return Asked(tokens, rows, answers[0].reused)


@pytest.mark.parametrize("closed", [True, False], ids=["left", "busy"])
@pytest.mark.parametrize("role", ["target", "draft"])
@on_a_loop
async def test_the_second_prompt_is_read_from_where_they_part(role: str, closed: bool) -> None:
    """The slot taken over, or its beginning copied while the first lives on: the same tokens as where prompts are read whole."""
    whole = await ask_second(role, closed=closed, prefix_caching=False)
    cached = await ask_second(role, closed=closed)

    assert plain(TABLE, text(SECOND, seed=8), len(whole.tokens)) == whole.tokens == cached.tokens
    assert len(SECOND) - 1 <= whole.prefill_rows
    assert FOUND == whole.prefill_rows - cached.prefill_rows
    assert 0 == whole.reused
    assert role == "draft" or FOUND == cached.reused


@pytest.mark.parametrize("role", ["target", "draft"])
@on_a_loop
async def test_the_only_slot_serves_one_text_after_the_other(role: str) -> None:
    """Whatever they have in common, each is answered as alone."""
    texts = [FIRST, SECOND, (3, 2, 1), FIRST, SECOND[:20], FIRST[:20], (*SECOND, *FIRST)]
    async with worker(role, TABLE, slots=1) as server, Peer(server, role) as peer:
        for counter, prompt in enumerate(texts, 1):
            session = text(prompt, counter=counter, seed=counter)
            _, tokens = await goes_on(peer, role, session)
            await peer.send(closes=(session.id,))

            assert plain(TABLE, text(prompt, seed=counter), len(tokens)) == tokens


@pytest.mark.parametrize("role", ["target", "draft"])
@on_a_loop
async def test_a_prompt_that_is_there_already_needs_no_pass(role: str) -> None:
    """It is asked for in pieces that only fill the cache, as long prompts are; then one row gives the next token."""
    steps = Steps()
    async with worker(role, TABLE, slots=1, observers=(steps,)) as server, Peer(server, role) as peer:
        first = text(FIRST, counter=1)
        await goes_on(peer, role, first)
        await peer.send(closes=(first.id,))
        await sizes(server)
        steps.records.clear()
        second = text(FIRST, counter=2)
        pieces = [await peer.one(second.feed(role, 0, 16)), await peer.one(second.feed(role, 16, 40))]
        answer = await peer.one(second.ask(role, 40))
        await sizes(server)

        assert [16, 40] == [piece.length for piece in pieces]
        assert plain(TABLE, text(FIRST), 1) == tokens_of(answer)
        assert [(0, 0), (0, 0), (1, 0)] == [(r.timing.rows, r.timing.prefill_rows) for r in steps.records]


@pytest.mark.parametrize("kind", ["raise", "nan"])
@pytest.mark.parametrize("role", ["target", "draft"])
@on_a_loop
async def test_nothing_of_a_session_that_failed_is_used(role: str, kind: str) -> None:
    """Its prompt comes again, and is read whole."""
    table = dataclasses.replace(TABLE, faults=(Fault(kind, call=1),))
    steps = Steps()
    async with worker(role, table, observers=(steps,)) as server, Peer(server, role) as peer:
        failed = await peer.one(text(FIRST, counter=1).ask(role, 0))
        second = text(FIRST, counter=2)
        answer = await peer.one(second.ask(role, 0))
        await sizes(server)

        assert isinstance(failed.result, Failure)
        assert plain(TABLE, text(FIRST), 1) == tokens_of(answer)
        assert len(FIRST) - 1 == steps.records[-1].timing.prefill_rows
        assert SessionId(1, 2) == answer.session
