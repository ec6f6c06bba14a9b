"""Text to ids and back."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from coordinator.text import Tokenizer
from specwire.law.errors import InvalidArgument
from tests.support.tokenizers import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    byte_tokenizer,
    fallback_tokenizer,
    save_model_folder,
    word_tokenizer,
)


def test_begin_token_is_added_once() -> None:
    """Raw text gets the tokenizer's own begin token, once."""
    library = byte_tokenizer(bos=True)
    tokenizer = Tokenizer(library)

    assert [library.token_to_id(BOS), ord("a")] == tokenizer.encode("a")


def test_begin_token_of_a_template_is_not_added_again(tmp_path: Path) -> None:
    """A conversation's special tokens are the template's affair."""
    library = byte_tokenizer(bos=True)
    config = {"bos_token": BOS, "eos_token": {"content": EOS}}
    folder = save_model_folder(tmp_path, library, tokenizer_config=config, chat_template=CHAT_TEMPLATE)
    ids = Tokenizer.load(folder).encode_chat([{"role": "user", "content": "a"}])

    assert f"{BOS}<turn>user\na<turn>assistant\n" == library.decode(ids, skip_special_tokens=False)
    assert ids.count(library.token_to_id(BOS)) == 1


@pytest.mark.parametrize("text", ["", "a", "abc" * 50, "👨\u200d👩\u200d👧 你好", "<turn>user\n" * 9])
def test_fewest_tokens_is_a_lower_bound(text: str) -> None:
    """It refuses texts unseen, so it must never be too many."""
    tokenizer = Tokenizer(byte_tokenizer())

    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, allow_empty=True))
    assert tokenizer.fewest_tokens("x" * 10_000) > 100


@pytest.mark.parametrize("library", [fallback_tokenizer(), word_tokenizer()])
def test_fewest_tokens_says_nothing_where_text_is_changed_before(library: Library) -> None:
    """A normalizer may leave little of a long text."""
    assert 0 == Tokenizer(library).fewest_tokens("x" * 10_000)


def test_others_run_while_a_long_text_is_tokenized() -> None:
    """The library holds the interpreter in one of its two ways, for seconds a megabyte."""
    tokenizer = Tokenizer(byte_tokenizer())
    text = "ab" * 200_000

    async def turns() -> int:
        count, encoding = 0, asyncio.create_task(asyncio.to_thread(tokenizer.encode, text))
        while not encoding.done():
            count += 1
            await asyncio.sleep(0.001)
        return count

    assert asyncio.run(turns()) > 10


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"], ids=["high", "low"])
def test_lone_surrogate_is_the_callers_fault(text: str) -> None:
    """Text that is no Unicode is refused by name."""
    with pytest.raises(InvalidArgument, match=r"prompt: .* lone surrogates"):
        Tokenizer(byte_tokenizer()).encode(text)


def test_lone_surrogate_in_a_message_names_it(tmp_path: Path) -> None:
    """The message that holds it is named."""
    tokenizer = Tokenizer.load(save_model_folder(tmp_path, byte_tokenizer(), chat_template=CHAT_TEMPLATE))
    with pytest.raises(InvalidArgument, match=r"chat\.messages\[1\]\.content"):
        tokenizer.encode_chat([{"role": "user", "content": "a"}, {"role": "user", "content": "\ud83d"}])


@pytest.mark.parametrize("text", ["a\x00b", "\u202eabc\u202c", "👨\u200d👩\u200d👧", "𠀀𠀁", "\ufffd", "\ufeffa"])
def test_odd_unicode_comes_back(text: str) -> None:
    """NUL, right-to-left marks, joined emoji and four-byte characters pass both ways."""
    tokenizer = Tokenizer(byte_tokenizer())

    assert text == tokenizer.decode(tokenizer.encode(text))


def test_empty_prompt_without_begin_token_is_refused() -> None:
    """There is nothing to start from."""
    with pytest.raises(InvalidArgument, match="prompt: got '', must be at least one token"):
        Tokenizer(byte_tokenizer()).encode("")


def test_empty_prompt_with_begin_token_starts_from_it() -> None:
    """The begin token is a prompt."""
    assert Tokenizer(fallback_tokenizer()).encode("")[:1] == [1]


def test_empty_text_may_be_allowed() -> None:
    """Tokenizing nothing gives nothing, where that makes sense."""
    assert Tokenizer(byte_tokenizer()).encode("", field="text", allow_empty=True) == []


def test_files_that_cut_or_pad_do_not() -> None:
    """A truncation or padding rule saved in tokenizer.json never touches a prompt."""
    library = word_tokenizer()
    library.enable_truncation(2)
    library.enable_padding(length=8)

    assert len(Tokenizer(library).encode("the green sky")) == 3


def test_end_tokens_prefer_the_generation_config(tmp_path: Path) -> None:
    """generation_config.json, else config.json, else the tokenizer's own."""
    library = byte_tokenizer()
    own = {"eos_token": EOS}
    first = save_model_folder(
        tmp_path / "a",
        library,
        generation_config={"eos_token_id": [5, 6]},
        config={"eos_token_id": 7},
        tokenizer_config=own,
    )
    second = save_model_folder(tmp_path / "b", library, config={"eos_token_id": 7}, tokenizer_config=own)
    third = save_model_folder(tmp_path / "c", library, tokenizer_config=own)
    fourth = save_model_folder(tmp_path / "d", library)

    assert [(5, 6), (7,), (library.token_to_id(EOS),), ()] == [
        Tokenizer.load(folder).eos_token_ids for folder in (first, second, third, fourth)
    ]


@pytest.mark.parametrize("bad", [{"eos_token_id": "</s>"}, {"eos_token_id": [1, None]}, {"eos_token_id": -1}, ["x"]])
def test_bad_config_is_refused_by_name(tmp_path: Path, bad: object) -> None:
    """A malformed file is never ignored."""
    folder = save_model_folder(tmp_path, byte_tokenizer(), generation_config=bad)
    with pytest.raises(InvalidArgument, match=r"generation_config\.json"):
        Tokenizer.load(folder)


def test_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    """The path is in the message."""
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json or a folder"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidArgument, match="a file that the tokenizers library reads"):
        Tokenizer.load(tmp_path)


def test_loads_from_a_file_too(tmp_path: Path) -> None:
    """tokenizer.json itself is as good as its folder."""
    save_model_folder(tmp_path, word_tokenizer())

    assert Tokenizer.load(tmp_path).vocabulary() == Tokenizer.load(tmp_path / "tokenizer.json").vocabulary()


def test_vocabulary_has_holes_where_ids_have_no_token() -> None:
    """Ids count from 0 to the highest; one without a token spells nothing."""
    tokenizer = Tokenizer(Library(models.WordLevel({"a": 0, "é": 3}, unk_token="a")))
    expected = hashlib.sha256(b"\1\0\0\0a" + b"\0\0\0\0" * 2 + b"\2\0\0\0" + "é".encode()).hexdigest()

    assert ([b"a", b"", b"", "é".encode()], 4) == (tokenizer.vocabulary(), tokenizer.vocab_size)
    assert expected == tokenizer.fingerprint()


@pytest.mark.parametrize("ids", [[0, 10_000], [-1]])
def test_decode_refuses_unknown_ids(ids: list[int]) -> None:
    """An id outside the vocabulary is the caller's fault."""
    with pytest.raises(InvalidArgument, match="ids: got"):
        Tokenizer(byte_tokenizer()).decode(ids)


def test_special_tokens_show_only_when_asked() -> None:
    """decode and stream agree on what is shown."""
    library = byte_tokenizer()
    tokenizer = Tokenizer(library)
    ids = [ord("a"), library.token_to_id(EOS)]

    assert ("a", f"a{EOS}") == (tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False))
    assert ("a", f"a{EOS}") == (tokenizer.stream().push(ids), tokenizer.stream(skip_special=False).push(ids))


def test_half_a_character_waits() -> None:
    """Bytes of one character come out together, and as one mark when nothing follows."""
    stream = Tokenizer(byte_tokenizer()).stream()

    assert [
        *(stream.push([b]) for b in "你".encode()),
        stream.push([0xE4]),
        stream.flush(),
    ] == ["", "", "你", "", "\ufffd"]


def test_hopeless_bytes_do_not_wait() -> None:
    """A byte that can never become a character is a mark as soon as that is certain."""
    stream = Tokenizer(byte_tokenizer()).stream()

    assert [stream.push([0xFF]), stream.push([0xE4]), stream.push([ord("a")])] == ["\ufffd", "", "\ufffda"]


def test_newline_spelled_as_a_byte_does_not_wait() -> None:
    """Vocabularies that spell a newline <0x0A> can still stop at it in time."""
    library = fallback_tokenizer()
    stream = Tokenizer(library).stream()

    assert [stream.push([library.token_to_id("▁a")]), stream.push([library.token_to_id("<0x0A>")])] == ["a", "\n"]


def test_good_characters_of_a_malformed_run_stay() -> None:
    """A run of byte tokens keeps its characters: what was shown cannot be taken back."""
    tokenizer = Tokenizer(fallback_tokenizer())
    ids = [3 + b for b in "你".encode() + b"\xff\n"]

    assert tokenizer.decode(ids) == "你\ufffd\n"


def test_bytes_behind_other_decoders_wait_too() -> None:
    """A decoder that does more than bytes is streamed by decoding again, and no half character gets out."""
    library = byte_tokenizer()
    library.decoder = decoders.Sequence([decoders.Replace("!", "?"), decoders.ByteLevel()])
    stream = Tokenizer(library).stream()

    assert [stream.push([b]) for b in [*"你".encode(), ord("!")]] == ["", "", "你", "?"]


def test_endless_marks_do_not_pile_up() -> None:
    """Bytes that never become a character are given out at last, so the cost per token stays bounded."""
    library = byte_tokenizer()
    library.decoder = decoders.Sequence([decoders.Replace("!", "?"), decoders.ByteLevel()])
    stream = Tokenizer(library).stream()
    pieces = [stream.push([0xFF]) for _ in range(32)]

    assert "".join(pieces) == "\ufffd" * 32


def test_unknown_ids_have_no_text_in_a_stream() -> None:
    """A model with more rows than tokens cannot break an answer that is under way."""
    assert Tokenizer(byte_tokenizer()).stream().push([ord("a"), 10_000, ord("b")]) == "ab"
