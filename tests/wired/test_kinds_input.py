"""Field reports, section F: edges of the input. Names carry the kind, docstrings the reports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specwire.law.errors import CallerFault, InvalidArgument
from specwire.lm.table_config import TableConfig
from tests.support.service import Service, expected_ids, like, on_the_loop, service
from tests.support.tokenizers import byte_tokenizer, save_model_folder
from tests.wired.conftest import TARGET, shared


@pytest.fixture(scope="module", params=[False, True], ids=["no begin token", "begin token"])
def text_service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, bool]]:
    """A service with a byte tokenizer, and whether that adds a begin token."""
    library = byte_tokenizer(bos=request.param)
    folder = str(save_model_folder(tmp_path_factory.mktemp("text"), library))
    table = TableConfig(vocab_size=library.get_vocab_size(with_added_tokens=True), seed=3)
    with shared(service(table, table, tokenizer=folder, worker_tokenizer=folder)) as stack:
        yield stack, request.param


@on_the_loop
async def test_kind_33_empty_prompts(text_service: tuple[Service, bool]) -> None:
    """Report 106: an empty text runs from the begin token where there is one and is refused where there is none; empty ids
    are refused; one id runs. The service lives on."""
    stack, begins = text_service
    with pytest.raises(CallerFault, match="prompt_ids: got \\[\\], must be at least one token"):
        await stack.ask([], max_tokens=3)
    if begins:
        answer = await stack.ask(prompt="", max_tokens=3)
        assert answer.started is not None
        assert 1 == answer.started.prompt_tokens
    else:
        with pytest.raises(CallerFault, match="at least one token"):
            await stack.ask(prompt="", max_tokens=3)
    with pytest.raises(CallerFault, match=r"max_tokens: got 0, must be at least 1"):
        await stack.ask([1], max_tokens=0)

    assert 3 == len((await stack.ask([1], max_tokens=3)).ids)


@pytest.mark.parametrize("k", [0, 4])
@on_the_loop
async def test_kind_34_prompts_at_the_limit(k: int) -> None:
    """Report 108: with a limit of 64, 63 tokens leave room for one; 64 and 65 are refused with both numbers; the same in both
    modes."""
    table = like(TARGET, max_context=64)
    async with service(table, table) as stack:
        answer = await stack.ask([1] * 63, max_tokens=5, seed=1, num_speculative_tokens=k)
        for length in (64, 65):
            with pytest.raises(
                CallerFault, match=rf"got '{length} tokens', must be at most 63 tokens \(context limit 64\)"
            ):
                await stack.ask([1] * length, max_tokens=5, num_speculative_tokens=k)

        assert (expected_ids(table, [1] * 63, 1, seed=1), "length") == (answer.ids, answer.reason)


ODD_TEXTS = {
    "nul": "a\0b",
    "right to left marks": "\u202eabc\u202c \u200f",
    "joined emoji": "👩‍👩‍👧‍👦",
    "plane two": "𠀋𡈽",
    "combining": "e\u0301\u0301\u0301",
    "noncharacter": "\uffff\ufffe",
}


@pytest.mark.parametrize("name", ODD_TEXTS)
@on_the_loop
async def test_kind_35_odd_texts_come_through(name: str, text_service: tuple[Service, bool]) -> None:
    """Report 110: every byte of it becomes a token, and back; it is served."""
    stack, begins = text_service
    text = ODD_TEXTS[name]
    ids = await stack.client.tokenize(text)
    answer = await stack.ask(prompt=text, max_tokens=3)

    assert text == await stack.client.detokenize(ids, skip_special_tokens=True)
    assert begins + len(text.encode()) >= len(ids) > 0
    assert 3 == len(answer.ids)


@on_the_loop
async def test_kind_35_a_lone_surrogate_is_an_invalid_argument(text_service: tuple[Service, bool]) -> None:
    """Report 110: it names the field; nothing is sent."""
    stack, _ = text_service
    before = await stack.stats()
    for fields in ({"prompt": "a\ud800b"}, {"messages": [{"role": "user", "content": "\udfff"}]}):
        with pytest.raises(InvalidArgument, match="surrogate"):
            await stack.ask(max_tokens=3, **fields)
    with pytest.raises(InvalidArgument, match="stop: got"):
        await stack.ask(prompt="a", stop="\ud800", max_tokens=3)

    assert (await stack.stats()).refused == before.refused
