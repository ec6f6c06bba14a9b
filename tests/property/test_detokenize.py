"""Streamed text equals the whole text, for every way of spelling and every way of cutting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.text import Tokenizer
from tests.support.tokenizers import byte_tokenizer, fallback_tokenizer, word_tokenizer, wordpiece_tokenizer

LIBRARIES = {
    "bytes": byte_tokenizer(),
    "fallback": fallback_tokenizer(),
    "words": word_tokenizer(),
    "wordpiece": wordpiece_tokenizer(),
}
TOKENIZERS = {name: Tokenizer(library) for name, library in LIBRARIES.items()}

names = st.sampled_from(sorted(TOKENIZERS))
texts = st.text(alphabet="hello ab你好𠀀안녕하세요👨\u200d👩\u200d👧é\n\u202e\x00", max_size=30)
chunk_sizes = st.lists(st.integers(1, 6), min_size=1, max_size=8)


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> str:
    """Ids pushed in chunks of the given sizes, over and over."""
    stream = tokenizer.stream(skip)
    out, start, turn = "", 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        out += stream.push(ids[start : start + size])
        start, turn = start + size, turn + 1
    return out + stream.flush()


@settings(max_examples=150, deadline=None)
@given(names, st.data(), chunk_sizes, st.booleans())
def test_any_ids_any_chunks(name: str, data: st.DataObject, sizes: list[int], skip: bool) -> None:
    """Whatever the model emits, sense or not, its stream joins to decode()."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))

    assert tokenizer.decode(ids, skip) == streamed(tokenizer, ids, sizes, skip)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["bytes", "fallback"]), texts, chunk_sizes)
def test_real_text_never_shows_a_mark(name: str, text: str, sizes: list[int]) -> None:
    """Well-formed text comes back whole: no piece of the stream holds half a character."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, allow_empty=True)

    assert text == streamed(tokenizer, ids, sizes, True)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, byte_tokenizer().get_vocab_size() - 1), max_size=40), st.booleans())
def test_bytes_as_the_library_decodes_them(ids: list[int], skip: bool) -> None:
    """Marks for malformed bytes are as many, and stand where, the library puts them."""
    assert LIBRARIES["bytes"].decode(ids, skip_special_tokens=skip) == streamed(TOKENIZERS["bytes"], ids, [1], skip)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(["fallback", "words", "wordpiece"]))
def test_pieces_as_the_library_decodes_them(data: st.DataObject, name: str) -> None:
    """Where the library sees no malformed run, its text is ours."""
    tokenizer, library = TOKENIZERS[name], LIBRARIES[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    theirs = library.decode(ids, skip_special_tokens=False)
    if "\ufffd" not in theirs:
        assert theirs == streamed(tokenizer, ids, [1], False)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", ["bytes", "fallback"])
@pytest.mark.parametrize("text", ["안녕하세요 세계", "你好,世界", "👨\u200d👩\u200d👧 👍🏽", "𠀀𠀁"])
def test_scripts_in_chunks(name: str, size: int, text: str) -> None:
    """Korean, Chinese, emoji and four-byte characters survive chunks of 1 to 6 tokens."""
    tokenizer = TOKENIZERS[name]

    assert text == streamed(tokenizer, tokenizer.encode(text), [size], True)
