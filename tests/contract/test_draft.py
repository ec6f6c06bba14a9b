"""What a draft promises beyond what all workers do: blocks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specwire.law.noise import Purpose, uniform
from specwire.law.sampling import cut_to_sparse, law_of, sample_sparse
from specwire.law.tasks import Answer, Reason
from specwire.law.values import Block, Law
from specwire.lm.port import Feed
from specwire.lm.table import TableModel
from specwire.lm.table_config import TableConfig
from tests.contract.harness import Peer, Steps, Text, on_a_loop, plain, refused, sizes, text, worker

TABLE = TableConfig(vocab_size=16, seed=3)


def block_of(answer: Answer) -> tuple[int, ...]:
    """The proposed tokens."""
    assert isinstance(answer.result, Block), answer
    return answer.result.tokens


@pytest.mark.parametrize("length", [1, 2, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@on_a_loop
async def test_a_draft_that_is_the_target_proposes_what_the_target_takes(length: int, temperature: float) -> None:
    """Same model, same noise at the same positions: every block is plain decoding (field reports 27, 32)."""
    async with worker("draft", TABLE) as server, Peer(server, "draft") as peer:
        session = text(temperature=temperature)
        expected = plain(TABLE, session, 3 * (length + 1))
        got: list[int] = []
        keep = 0
        while len(got) < len(expected):
            answer = await peer.one(session.propose(keep, length))
            got.extend(block_of(answer))
            assert answer.length == len(session.prefix) + length - 1  # the last one was never fed back
            session.prefix.extend(block_of(answer))
            keep = answer.length
            bonus = expected[len(got)]
            got.append(bonus)
            session.prefix.extend([bonus])

        assert tuple(got) == expected


@on_a_loop
async def test_drafting_paused_and_resumed() -> None:
    """Blocks, then fifty tokens the draft is not asked about, then a block: as good as before (field report 29)."""
    async with worker("draft", TABLE) as server, Peer(server, "draft") as peer:
        session = text()
        expected = plain(TABLE, session, 60)
        first = await peer.one(session.propose(0, 3))
        session.prefix.extend(expected[:55])
        second = await peer.one(session.propose(first.length, 5))

        assert block_of(first) == expected[:3]
        assert block_of(second) == expected[55:60]


@on_a_loop
async def test_a_refused_block_is_cut_and_the_correction_goes_on() -> None:
    """The target kept one token of four and corrected the second; nothing of the rest has any say."""
    async with worker("draft", TABLE) as server, Peer(server, "draft") as peer:
        session = text()
        first = await peer.one(session.propose(0, 4))
        correction = (block_of(first)[1] + 1) % 16
        session.prefix.extend([block_of(first)[0], correction])
        session.epoch += 1
        second = await peer.one(session.propose(4, 4))

        assert block_of(second) == plain(TABLE, session, 4)
        assert second.length == 5 + 3


@on_a_loop
async def test_the_drafts_cache_is_one_short_and_says_so() -> None:
    """Keeping the last drafted token too is refused with the true length."""
    async with worker("draft", TABLE) as server, Peer(server, "draft") as peer:
        session = text()
        answer = await peer.one(session.propose(0, 3))
        session.prefix.extend(block_of(answer))
        session.prefix.extend([0])

        assert refused(await peer.one(session.propose(6, 3))) == (Reason.LENGTH, 5, session.prefix.hash_at(5))


@on_a_loop
async def test_the_context_ends_blocks_and_is_no_error() -> None:
    """Shorter, then none (field report 16); past it the text itself does not fit and is refused."""
    async with worker("draft", dataclasses.replace(TABLE, max_context=12)) as server, Peer(server, "draft") as peer:
        session = text(tuple(range(10)))
        expected = plain(TABLE, session, 3)
        short = await peer.one(session.propose(0, 8))
        session.prefix.extend(expected[:2])
        none = await peer.one(session.propose(10, 8))
        session.prefix.extend(expected[2:])
        over = await peer.one(session.propose(12, 8))

        assert (block_of(short), short.length) == (expected[:2], 11)
        assert (block_of(none), none.length) == ((), 12)
        assert refused(over)[0] is Reason.INVALID


@on_a_loop
async def test_more_than_the_longest_block_is_cut_to_it() -> None:
    """Asking for too much is no fault."""
    async with worker("draft", TABLE, max_block=3) as server, Peer(server, "draft") as peer:
        session = text()

        assert block_of(await peer.one(session.propose(0, 100))) == plain(TABLE, session, 3)


@on_a_loop
async def test_sequences_join_and_leave_between_steps() -> None:
    """Blocks of 1 to 8 asked for together: as many steps as the longest needs, each block as if alone (report 20)."""
    steps = Steps()
    async with worker("draft", TABLE, slots=8, observers=(steps,)) as server, Peer(server, "draft") as peer:
        sessions = [text((n, 2 * n % 16), counter=n, temperature=n % 2, seed=n) for n in range(1, 9)]
        answers = await peer.ask(*(session.propose(0, session.counter) for session in sessions))
        await sizes(server)

        assert [block_of(answer) for answer in answers] == [
            plain(TABLE, session, session.counter) for session in sessions
        ]
        assert [record.timing.sessions for record in steps.records] == [8, 7, 6, 5, 4, 3, 2, 1]


@on_a_loop
async def test_long_prompts_are_read_in_pieces_beside_drafting() -> None:
    """A long prompt never takes the steps of those who draft."""
    steps = Steps()
    async with (
        worker("draft", TABLE, max_block=8, token_budget=68, observers=(steps,)) as server,
        Peer(server, "draft") as peer,
    ):
        long, short = text(tuple(n % 16 for n in range(200)), counter=1), text(counter=2)
        answers = await peer.ask(long.propose(0, 4), short.propose(0, 8))
        await sizes(server)

        assert block_of(answers[0]) == plain(TABLE, long, 4)
        assert block_of(answers[1]) == plain(TABLE, short, 8)
        assert len(steps.records) <= 4 + 8
        assert all(r.timing.rows + r.timing.prefill_rows <= 68 for r in steps.records)


def drafted_by_hand(session: Text, length: int, top_m: int) -> Block:
    """The reference: cut each row to its best, then draw from what is left."""
    model = TableModel(TABLE, 1)
    tokens, laws, seed = list(session.prompt), [], session.opening.seed
    for _ in range(length):
        scores = model.forward([Feed(0, 0, tokens, 1)])[0].numpy()
        law = cut_to_sparse(law_of(scores, session.opening.sampling), top_m)
        laws.append(law)
        tokens.append(sample_sparse(law, uniform(seed, 0, len(tokens), Purpose.DRAFT)))
    return Block(tuple(tokens[len(session.prompt) :]), tuple(laws))


@pytest.mark.parametrize("top_m", [1, 3, 16])
@on_a_loop
async def test_under_rejection_the_law_that_travels_is_the_law_that_was_drawn_from(top_m: int) -> None:
    """At most m ids a token, and the reference's block and laws exactly."""
    async with worker("draft", TABLE, draft_law_top_m=top_m) as server, Peer(server, "draft") as peer:
        for n in range(4):
            session = text((n, 1), counter=n + 1, law=Law.REJECTION, seed=n, temperature=0.8, top_p=0.9)
            answer = await peer.one(session.propose(0, 4))

            assert answer.result == drafted_by_hand(session, 4, top_m)


@on_a_loop
async def test_under_rejection_greedy_sends_no_laws() -> None:
    """A point mass needs none."""
    async with worker("draft", TABLE) as server, Peer(server, "draft") as peer:
        session = text(law=Law.REJECTION, temperature=0.0)

        assert (await peer.one(session.propose(0, 4))).result == Block(plain(TABLE, session, 4))


@on_a_loop
async def test_reduced_and_padded_vocabularies_propose_real_ids_only() -> None:
    """Columns speak target ids; padding never comes out, however high its scores (field report 18)."""
    columns = (1, 4, 5, 9, 14)
    table = dataclasses.replace(TABLE, columns=columns, padding_columns=7)
    async with worker("draft", table) as server, Peer(server, "draft") as peer:
        drawn = text(counter=1)
        cut = text(counter=2, law=Law.REJECTION)
        first, second = await peer.ask(drawn.propose(0, 8), cut.propose(0, 8))

        assert block_of(first) == plain(table, drawn, 8)
        assert set(block_of(first) + block_of(second)) <= set(columns)
        assert server.info.draft_vocab_size == 5
        assert np.all(np.diff(columns) > 0)
