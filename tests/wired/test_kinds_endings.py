"""Field reports, section B: endings inside a block, streams and characters. Names carry the kind, docstrings the reports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from specwire.lm.table_config import TableConfig
from tests.support.service import Answer, Service, expected_ids, like, on_the_loop, service
from tests.support.tokenizers import byte_tokenizer, save_model_folder
from tests.wired.conftest import TARGET, shared

LIBRARY = byte_tokenizer()
EOS_ID = LIBRARY.token_to_id("</s>")
START = 0
"""A byte that no prompt holds but at its end: what is scripted comes after it."""
KOREAN = "안녕하세요 🙂 你好, 세계!"


def scripted(says: str | tuple[int, ...], **more: Any) -> TableConfig:
    """A model of the byte tokenizer's vocabulary that says this, text byte by byte, after START."""
    script = tuple(says.encode()) if isinstance(says, str) else says
    size = LIBRARY.get_vocab_size(with_added_tokens=True)
    return TableConfig(vocab_size=size, seed=8, script=script, script_after=START, **more)


def speaking(
    folder: Path, table: TableConfig, draft: TableConfig | None = None
) -> AbstractAsyncContextManager[Service]:
    """A service with a tokenizer. The draft is the target unless one is given."""
    return service(table, draft or table, tokenizer=str(folder), worker_tokenizer=str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer's."""
    return save_model_folder(tmp_path_factory.mktemp("bytes"), LIBRARY)


@pytest.fixture(scope="module")
def korean(folder: Path) -> Iterator[Service]:
    """Says KOREAN; its draft leaves out every third token or so."""
    draft = like(scripted(KOREAN), disagreement=0.3)
    with shared(speaking(folder, scripted(KOREAN), draft)) as stack:
        yield stack


# ------------------------------------------------------------------ kind 9


@pytest.mark.parametrize("k", [1, 4, 8])
@on_the_loop
async def test_kind_09_an_end_token_at_every_offset_of_a_block(k: int, perfect: Service) -> None:
    """Report 29: each token of a plain greedy run is declared the end in turn: the answer stops there, nothing after it is
    streamed or counted, whatever the block had beyond it."""
    plain = expected_ids(TARGET, (1, 2, 3), 14, temperature=0)
    places = [n for n in range(14) if plain[n] not in plain[:n]]
    answers = await asyncio.gather(
        *(
            perfect.ask(
                temperature=0, max_tokens=40, stop_token_ids=[plain[n]], num_speculative_tokens=k, method="draft_model"
            )
            for n in places
        )
    )
    await perfect.quiet()

    assert len(places) > k
    assert [plain[: n + 1] for n in places] == [answer.ids for answer in answers]
    assert ["stop"] * len(places) == [answer.reason for answer in answers]
    assert [n + 1 for n in places] == [answer.final.usage.completion_tokens for answer in answers if answer.final]
    assert all(answer.speculation.accepted <= n + 1 for n, answer in zip(places, answers, strict=True))


@on_the_loop
async def test_kind_09_the_models_own_end_token(folder: Path) -> None:
    """The model's end token ends the answer and its text is not shown; told to ignore it, the answer goes on past it."""
    async with speaking(folder, scripted((97, 98, EOS_ID, 99), eos_token_ids=(EOS_ID,))) as stack:
        common = {"max_tokens": 4, "temperature": 0, "num_speculative_tokens": 3, "method": "draft_model"}
        ended = await stack.ask([5, START], **common)
        on = await stack.ask([5, START], ignore_eos=True, **common)

        assert ((97, 98, EOS_ID), "ab", "stop") == (ended.ids, ended.text, ended.reason)
        assert ((97, 98, EOS_ID, 99), "length") == (on.ids, on.reason)


# ------------------------------------------------------------------ kind 10


@pytest.mark.parametrize(("text", "stop", "expected"), [
    ("aZbcdefgh", "aZ", ("", "stop", 2)),
    ("abcdZfgh", "dZ", ("abcd", "length", 4)),
])  # fmt: skip
@on_the_loop
async def test_kind_10_a_stop_string_within_the_limit_and_one_beyond_it(
    folder: Path, text: str, stop: str, expected: tuple[str, str, int]
) -> None:
    """Report 33: blocks of 5 and max_tokens 4. Complete at the second token, the stop string ends the answer there; complete only
    at the fifth, the limit does, and what was held back is shown."""
    async with speaking(folder, scripted(text)) as stack:
        for k in (0, 5):
            answer = await stack.ask(
                [5, START], max_tokens=4, stop=[stop], temperature=0, num_speculative_tokens=k, method="draft_model"
            )
            assert expected == (answer.text, answer.reason, len(answer.ids))
            assert answer.final is not None
            assert (stop if expected[1] == "stop" else None) == answer.final.stop


@on_the_loop
async def test_kind_10_no_character_of_a_stop_string_is_sent(folder: Path) -> None:
    """Report 35: stop "een sky" in "the green sky": for every block length the stream ends before its first character."""
    async with speaking(folder, scripted("the green sky is blue")) as stack:
        for k in range(1, 7):
            answer = await stack.ask(
                [5, START], max_tokens=30, stop="een sky", temperature=0, num_speculative_tokens=k, method="draft_model"
            )
            assert "the gr" == answer.text
            assert answer.final is not None
            assert ("een sky", "stop") == (answer.final.stop, answer.reason)


# ------------------------------------------------------------------ kind 11


@pytest.mark.parametrize("limit", [1, 2, 3])
@on_the_loop
async def test_kind_11_never_more_than_max_tokens(limit: int, perfect: Service) -> None:
    """Report 37: k = 8 and a perfect draft: exactly so many tokens, those of plain decoding; reason and usage agree."""
    answer = await perfect.ask(max_tokens=limit, seed=3, num_speculative_tokens=8, method="draft_model")

    assert expected_ids(TARGET, (1, 2, 3), limit, seed=3) == answer.ids
    assert answer.final is not None
    assert ("length", limit) == (answer.reason, answer.final.usage.completion_tokens)


# ------------------------------------------------------------------ kinds 13, 14


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("k", [2, 6])
@on_the_loop
async def test_kind_13_streams_are_complete(k: int, count: int, korean: Service) -> None:
    """Report 43: many streams at once: chunks joined are all the tokens and all the text, and usage counts them."""
    lengths = [8 + n % 5 for n in range(count)]
    answers: list[Answer] = []
    for first in range(0, count, 50):
        answers += await asyncio.gather(
            *(
                korean.ask([1 + n, START], max_tokens=lengths[n], seed=n, num_speculative_tokens=k)
                for n in range(first, first + 50)
            )
        )
    texts = [await korean.client.detokenize(answer.ids) for answer in answers]

    assert texts == [answer.text for answer in answers]
    assert lengths == [len(answer.ids) for answer in answers]
    assert lengths == [answer.final.usage.completion_tokens for answer in answers if answer.final]
    assert any(len(chunk.ids) > 1 for answer in answers for chunk in answer.chunks)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 5, 6])
@on_the_loop
async def test_kind_14_no_half_characters(k: int, korean: Service) -> None:
    """Report 45: Korean, Chinese and an emoji, byte by byte: the joined stream is the text and no chunk holds a replacement
    mark."""
    answer = await korean.ask(
        [5, START], max_tokens=len(KOREAN.encode()), temperature=0, num_speculative_tokens=k, method="draft_model"
    )

    assert KOREAN == answer.text
    assert "�" not in "".join(chunk.text for chunk in answer.chunks)
    assert k == 0 or answer.speculation.accepted > 0
