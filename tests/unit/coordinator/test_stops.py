"""Where answers end."""

from __future__ import annotations

from itertools import pairwise

import pytest

from coordinator.stops import Accepted, Ending, EndOfAnswer, FinishReason, StopMatcher
from coordinator.text import Tokenizer
from specwire.law.errors import InvalidArgument
from tests.support.tokenizers import byte_tokenizer, word_tokenizer

BYTES = Tokenizer(byte_tokenizer())
WORDS = Tokenizer(word_tokenizer())
EOS = 1


def words(text: str) -> list[int]:
    """One id per word."""
    return WORDS.encode(text)


def matched(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What is shown for each piece, and the stop that was found."""
    matcher = StopMatcher(stops)
    shown: list[str] = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.flush()], None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        ([], ["ab", "c"], (["ab", "c", ""], None)),
        (["een sky"], ["gr", "een", " s", "ky is"], (["gr", "", "", ""], "een sky")),
        (["een sky"], ["green", " s", "un"], (["gr", "", "een sun", ""], None)),
        (["ab"], ["xaab"], (["xa"], "ab")),
        (["aab"], ["aaa", "b"], (["a", ""], "aab")),
        (["\n\n"], ["a\n", "\n", "b"], (["a", ""], "\n\n")),
        (["abc"], ["xab"], (["x", "ab"], None)),
        (["bcd", "c"], ["abcd"], (["ab"], "c")),
        (["c", "bc"], ["abcd"], (["a"], "bc")),
        (["bc", "c"], ["abcd"], (["a"], "bc")),
        (["abcx", "bc"], ["a", "b", "c"], (["", "", "a"], "bc")),
        (["你好"], ["他你", "好"], (["他", ""], "你好")),
    ],
    ids=lambda value: repr(value) if isinstance(value, list) else None,
)
def test_matcher(stops: list[str], pieces: list[str], expected: tuple[list[str], str | None]) -> None:
    """The stop that ends first wins, of those the one that began first; what may begin one is held back."""
    assert expected == matched(stops, pieces)


def test_long_self_similar_stops_cost_a_constant_per_character() -> None:
    """A stop like aaaa...b against a text of a's is the worst case, and is followed without looking back."""
    stop = "a" * 5_000 + "b"
    matcher = StopMatcher([stop])
    shown = "".join(matcher.push("a")[0] for _ in range(6_000))

    assert (1_000, ("", stop)) == (len(shown), matcher.push("b"))


@pytest.mark.parametrize("stops", [["a", ""], [str(n) for n in range(17)]], ids=["empty", "many"])
def test_bad_stops_are_refused(stops: list[str]) -> None:
    """Empty strings and more than sixteen are the caller's fault."""
    with pytest.raises(InvalidArgument, match="stop: got"):
        StopMatcher(stops)


@pytest.mark.parametrize("offset", range(5))
def test_end_token_ends_at_every_offset_of_a_block(offset: int) -> None:
    """The end token is generated and counted, its text is not shown, and nothing after it exists."""
    block = words("the green sky is blue")
    block[offset] = EOS
    shown = " ".join(["the", "green", "sky", "is", "blue"][:offset])
    ending = Ending(100, {EOS}, (), WORDS.stream())

    assert (
        Accepted(tuple(block[: offset + 1]), shown, EndOfAnswer(offset + 1, FinishReason.STOP)),
        offset + 1,
    ) == (ending.accept(block), ending.generated)


def test_ordinary_token_as_end_token_is_not_shown() -> None:
    """A request's own stop_token_ids hide their text like the model's end tokens."""
    block = words("the sky STOP home")
    ending = Ending(100, {block[2]}, (), WORDS.stream())

    assert Accepted(tuple(block[:3]), "the sky", EndOfAnswer(3, FinishReason.STOP)) == ending.accept(block)


def test_stop_within_the_limit_wins() -> None:
    """Stop string complete at token 2 of a five-token block, max_tokens 4: finish is stop."""
    block = words("the STOP sky is blue")
    ending = Ending(4, (), ["STOP"], WORDS.stream())

    assert Accepted(tuple(block[:2]), "the ", EndOfAnswer(2, FinishReason.STOP, "STOP")) == ending.accept(block)


def test_stop_past_the_limit_does_not() -> None:
    """Stop string complete at token 5, max_tokens 4: finish is length with exactly four tokens."""
    block = words("the green sky is STOP")
    ending = Ending(4, (), ["STOP"], WORDS.stream())

    assert Accepted(tuple(block[:4]), "the green sky is", EndOfAnswer(4, FinishReason.LENGTH)) == ending.accept(block)


def test_stop_at_the_limit_is_a_stop() -> None:
    """At the same token the stop comes before the limit, and so does an end token."""
    block = words("the green sky STOP")
    by_string = Ending(4, (), ["STOP"], WORDS.stream()).accept(block)
    by_token = Ending(4, {block[3]}, (), WORDS.stream()).accept(block)

    assert [r.end.finish_reason for r in (by_string, by_token) if r.end is not None] == [FinishReason.STOP] * 2


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_limit_is_exact(limit: int) -> None:
    """A block of nine never gives more than max_tokens."""
    ending = Ending(limit)
    block = tuple(range(10, 19))

    assert Accepted(block[:limit], "", EndOfAnswer(limit, FinishReason.LENGTH)) == ending.accept(block)
    assert ending.remaining == 0


def test_text_held_back_comes_with_the_end() -> None:
    """The beginning of a stop string, and half a character, are released when nothing can come of them."""
    ending = Ending(4, (), ["ab!"], BYTES.stream())

    assert Accepted((ord("a"), ord("b"), 0xE4), "", None) == ending.accept([ord("a"), ord("b"), 0xE4])
    assert Accepted((0xBD,), "", EndOfAnswer(1, FinishReason.LENGTH, None, "ab\ufffd")) == ending.accept([0xBD])


def test_a_mark_that_completes_a_stop_is_a_stop() -> None:
    """Even at the very end no stop string is shown."""
    ending = Ending(2, (), ["a\ufffd"], BYTES.stream())

    assert Accepted((ord("a"), 0xE4), "", EndOfAnswer(2, FinishReason.STOP, "a\ufffd", "")) == ending.accept(
        [ord("a"), 0xE4]
    )


def test_without_tokenizer_there_is_no_text() -> None:
    """Ids alone can be limited and ended; stop strings are refused by name."""
    assert Accepted((7, 8), "", None) == Ending(5, {9}).accept([7, 8])
    with pytest.raises(InvalidArgument, match=r"stop: .* no tokenizer"):
        Ending(5, {9}, ["x"])


def test_an_answer_that_is_over_takes_nothing_more() -> None:
    """Tokens after the end are a bug of the caller."""
    ending = Ending(1)
    ending.accept([1])
    with pytest.raises(ValueError, match="over"):
        ending.accept([2])


def test_zero_tokens_cannot_be_asked_for() -> None:
    """max_tokens is at least 1."""
    with pytest.raises(InvalidArgument, match="max_tokens: got 0"):
        Ending(0)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("stop", ["een sky", "sky is", "\n", "안"])
def test_blocking_changes_nothing(k: int, stop: str) -> None:
    """Blocks of 1 to 6 give the same ids, text and end as token by token, and never a character of the stop string."""
    ids = BYTES.encode("The green sky is\nblue 안녕")

    def run(size: int) -> tuple[list[int], str, EndOfAnswer]:
        ending = Ending(100, (), [stop], BYTES.stream())
        kept: list[int] = []
        text = ""
        for start, end in pairwise([*range(0, len(ids), size), len(ids)]):
            result = ending.accept(ids[start:end])
            kept += result.ids
            text += result.text
            if result.end is not None:
                return kept, text + result.end.text, EndOfAnswer(1, result.end.finish_reason, result.end.stop)
        raise AssertionError("no end")

    expected, actual = run(1), run(k)

    assert expected == actual
    assert actual[1] == "The green sky is\nblue 안녕".partition(stop)[0]
