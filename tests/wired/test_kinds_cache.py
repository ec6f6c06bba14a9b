"""Field reports, section C: caches, lengths and vocabularies. Names carry the kind, docstrings the reports."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from specwire.lm.table_config import TableConfig
from tests.support.relay import Out, Relay, pass_on
from tests.support.service import expected_ids, like, on_the_loop, service
from tests.support.tokenizers import BOS, byte_tokenizer, save_model_folder
from tests.wired.conftest import DRAFTS, TARGET


@pytest.mark.parametrize("k", [1, 3])
@on_the_loop
async def test_kind_15_after_every_round_the_cache_holds_what_is_committed_but_one(k: int) -> None:
    """Reports 47 and 101: temperature 1, a draft that is wrong half the time, 200 tokens. After every verdict the target's
    cache holds the prompt and all committed tokens but the last; the next task brings exactly that one."""
    asked: dict[int, Any] = {}
    lengths: list[tuple[int, int]] = []  # (cached, committed) after each verdict
    appended: list[int] = []

    def to_worker(frame: Any) -> Out:
        for task in frame.tasks:
            asked[task.number] = task
            appended.append(len(task.append))
        return pass_on(frame)

    def to_coordinator(frame: Any) -> Out:
        for answer in frame.answers:
            task = asked[answer.number]
            lengths.append((answer.length, task.keep + len(task.append) + answer.accepted + 1))
        return pass_on(frame)

    relay = Relay("target", to_worker, to_coordinator)
    async with service(TARGET, DRAFTS["middling"], relays={"target-0": relay}) as stack:
        answer = await stack.ask((1, 2, 3), max_tokens=200, seed=5, num_speculative_tokens=k, method="draft_model")

        assert expected_ids(TARGET, (1, 2, 3), 200, seed=5) == answer.ids
        assert [committed - 1 for _, committed in lengths] == [cached for cached, _ in lengths]
        assert lengths[-1][1] == 203
        assert [3] + [1] * (len(appended) - 1) == appended
        assert 0 < answer.speculation.accepted < answer.speculation.drafted


@on_the_loop
async def test_kind_16_text_longer_than_the_drafts_context() -> None:
    """Report 51: draft limit 64, target limit 256; prompt 60, 50 new tokens. Drafting ends with the draft's context, the answer
    does not."""
    target, draft = like(TARGET, max_context=256), like(TARGET, max_context=64)
    prompt = [n % 32 for n in range(60)]
    async with service(target, draft) as stack:
        answer = await stack.ask(
            prompt, max_tokens=50, seed=1, num_speculative_tokens=4, method="draft_model", return_rounds=True
        )
        longer = await stack.ask(prompt + prompt, max_tokens=10, seed=1, num_speculative_tokens=4)
        assert answer.final is not None

        assert expected_ids(target, prompt, 50, seed=1) == answer.ids
        assert expected_ids(target, prompt + prompt, 10, seed=1) == longer.ids
        assert 0 < sum(round.drafted for round in answer.final.rounds) <= 4
        base = len(prompt)
        for round in answer.final.rounds:  # how soon the draft has read the prompt is its own affair
            assert round.drafted <= max(0, 64 - base)
            base += round.committed
        assert dict((await stack.stats()).fallbacks) == {}


@pytest.mark.parametrize(("prompt", "tokens", "k"), [(120, 8, 5), (28, 100, 3), (127, 1, 8), (1, 127, 8)])
@on_the_loop
async def test_kind_17_up_to_the_last_position_of_the_context(prompt: int, tokens: int, k: int) -> None:
    """Reports 53 and 55: a limit of 128 tokens and answers that end at it: all are delivered, looking ahead shrinks near the
    end."""
    table = like(TARGET, max_context=128)
    ids = [n % 32 for n in range(prompt)]
    async with service(table, table) as stack:
        answer = await stack.ask(ids, max_tokens=tokens, seed=2, num_speculative_tokens=k, method="draft_model")
        beyond = await stack.ask(ids, max_tokens=tokens + 50, seed=2, num_speculative_tokens=k, method="draft_model")

        assert expected_ids(table, ids, tokens, seed=2) == answer.ids == beyond.ids
        assert ["length", "length"] == [answer.reason, beyond.reason]


@on_the_loop
async def test_kind_18_padding_columns_differ_and_never_come_out() -> None:
    """Reports 57 and 59: target rows 152, draft rows 144, real tokens 140: accepted as a pair; with 1 to 16 requests at once
    no padding id is proposed or emitted, though the padding has the best scores of all."""
    target = TableConfig(vocab_size=140, seed=3, padding_columns=12, max_context=128)
    draft = like(target, padding_columns=4, disagreement=0.2)
    proposed: list[int] = []

    def look(frame: Any) -> Out:
        for answer in frame.answers:
            proposed.extend(answer.tokens)
        return pass_on(frame)

    async with service(target, draft, relays={"draft-0": Relay("draft", to_coordinator=look)}) as stack:
        for together in (1, 4, 16):
            answers = await asyncio.gather(
                *(stack.ask([n], max_tokens=12, seed=n, num_speculative_tokens=4) for n in range(together))
            )
            assert [expected_ids(target, [n], 12, seed=n) for n in range(together)] == [a.ids for a in answers]

        assert proposed
        assert max(proposed) < 140
        assert (await stack.stats()).speculation.accepted_by_model > 0


@on_the_loop
async def test_kind_18_ids_a_draft_should_not_have_proposed_never_reach_the_target() -> None:
    """A draft that proposes ids past the vocabulary in the middle of its blocks: they are cut off there, and nothing fails."""

    def spoil(frame: Any) -> Out:
        for answer in frame.answers:
            if len(answer.tokens) > 2:
                answer.tokens[2] = 40
        return pass_on(frame)

    async with service(TARGET, TARGET, relays={"draft-0": Relay("draft", to_coordinator=spoil)}) as stack:
        answer = await stack.ask(max_tokens=40, seed=2, num_speculative_tokens=6, method="draft_model")

        assert expected_ids(TARGET, (1, 2, 3), 40, seed=2) == answer.ids
        assert answer.speculation.accepted > 0
        assert (await stack.stats()).replays == {}


@on_the_loop
async def test_kind_19_a_draft_of_another_family_is_refused() -> None:
    """Report 61: the refusal names both models and the first entry that differs; the target serves without it."""
    names = [f"<{n}>" for n in range(32)]
    stranger = like(TARGET, name="stranger", tokens=(*names[:7], "seven", *names[8:]))
    async with service(like(TARGET, name="large")) as stack:
        await stack.start_worker(
            type(stack.plans["target-0"])("draft", "draft-0", {"model": {"model": "table", "table": stranger}})
        )
        stats = await stack.until(lambda stats: any(worker.state == "refused" for worker in stats.workers))
        reason = next(worker.reason for worker in stats.workers if worker.name == "draft-0")
        answer = await stack.ask(max_tokens=20, seed=2)

        for part in ("stranger", "large", "7", "seven", "<7>"):
            assert part in reason
        assert expected_ids(TARGET, (1, 2, 3), 20, seed=2) == answer.ids
        assert answer.speculation.drafted_by_model == 0


@on_the_loop
async def test_kind_19_special_tokens_are_added_once(tmp_path: Path) -> None:
    """Report 63: of all the ids that go to the draft over a whole answer, the begin token is the first and no other."""
    library = byte_tokenizer(bos=True)
    folder = str(save_model_folder(tmp_path / "bos", library))
    begin = library.token_to_id(BOS)
    table = TableConfig(
        vocab_size=library.get_vocab_size(with_added_tokens=True), seed=3, script=(104, 105) * 10, script_at=4
    )
    sent: list[int] = []

    def look(frame: Any) -> Out:
        for task in frame.tasks:
            sent.extend(task.append)
        return pass_on(frame)

    relays = {"draft-0": Relay("draft", to_worker=look)}
    async with service(table, table, relays=relays, tokenizer=folder, worker_tokenizer=folder) as stack:
        answer = await stack.ask(
            prompt="abc", max_tokens=20, temperature=0, num_speculative_tokens=3, method="draft_model"
        )
        assert answer.started is not None

        assert answer.started.prompt_tokens == 4
        assert (begin, 1) == (sent[0], sent.count(begin))
        assert "hi" * 10 == answer.text
