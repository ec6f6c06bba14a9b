"""Where an answer ends, and which text may be shown before that is known.

Law. Tokens are judged one by one, so an answer ends at the same token however they were blocked. At each token: an end token
first, then a stop string, then the limit. The token that ends an answer is generated and counted; an end token's text is not
shown. No character of a stop string is ever given out: text that may be the beginning of one is held back.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from coordinator.detokenize import TextStream
from specwire.law.errors import InvalidArgument

MAX_STOPS = 16


class FinishReason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class EndOfAnswer:
    """The answer is complete."""

    kept_tokens: int
    """Tokens of the last round that belong to the answer, from its first. At least 1."""
    finish_reason: FinishReason
    stop: str | None = None
    """The stop string that ended it."""
    text: str = ""
    """Text held back until now."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one round adds to the answer."""

    ids: tuple[int, ...]
    text: str
    """Text that became certain, without `end.text`."""
    end: EndOfAnswer | None = None


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces. A constant per character and stop (Knuth, Morris, Pratt 1977)."""

    __slots__ = ("_fallbacks", "_held", "_matched", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > MAX_STOPS:
            raise InvalidArgument("stop", f"{len(stops)} strings", f"at most {MAX_STOPS}")
        if "" in stops:
            raise InvalidArgument("stop", "", "without empty strings")
        self._stops = tuple(dict.fromkeys(stops))
        self._fallbacks = [_fallback(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        """Of each stop, how many of its characters end the text so far. Less than its length between pushes."""
        self._held = ""
        """Text not given out: as long as the longest of `_matched`."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown, and the stop string that ended the answer, if one did.

        The stop whose end comes first wins; of those that end together the one that began first. What follows it is dropped."""
        if not self._stops:
            return text, None
        whole = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            found: str | None = None
            for n, stop in enumerate(self._stops):
                state = self._matched[n]
                fallback = self._fallbacks[n]
                while state and stop[state] != char:
                    state = fallback[state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    if found is None or len(stop) > len(found):
                        found = stop
                    state = fallback[state - 1]
                self._matched[n] = state
            if found is not None:
                self._held = ""
                self._matched = [0] * len(self._stops)
                return whole[: end - len(found)], found
        certain = len(whole) - max(self._matched)
        self._held = whole[certain:]
        return whole[:certain], None

    def flush(self) -> str:
        """The text held back: no stop string came of it."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


class Ending:
    """Watches one answer grow and says when it is complete."""

    __slots__ = ("_end_ids", "_max_tokens", "_over", "_stops", "_stream", "generated")

    def __init__(
        self,
        max_tokens: int,
        end_ids: Collection[int] = (),
        stops: Sequence[str] = (),
        stream: TextStream | None = None,
    ) -> None:
        """`end_ids`: the model's end tokens (unless ignored) and the request's own. `stream`: None without a tokenizer; then there
        is no text, and stop strings are refused."""
        if max_tokens < 1:
            raise InvalidArgument("max_tokens", max_tokens, "at least 1")
        if stops and stream is None:
            raise InvalidArgument("stop", list(stops), "absent: this service has no tokenizer; use stop_token_ids")
        self._max_tokens = max_tokens
        self._end_ids = frozenset(end_ids)
        self._stops = StopMatcher(stops) if stops else None
        self._stream = stream
        self._over = False
        self.generated = 0
        """Tokens of the answer so far, the end token included. At most max_tokens."""

    def __repr__(self) -> str:
        return f"Ending(generated={self.generated}, max_tokens={self._max_tokens}, over={self._over})"

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self._max_tokens - self.generated

    def accept(self, tokens: Sequence[int]) -> Accepted:
        """Takes the tokens a round committed. With an end, later tokens of the round are not part of the answer."""
        if self._over:
            raise ValueError("the answer is over")
        if self._stops is None:
            return self._accept_ids(tokens)
        shown = ""
        for kept, token in enumerate(tokens, start=1):
            self.generated += 1
            if token in self._end_ids:
                return self._end(tokens[:kept], shown, FinishReason.STOP)
            text, stop = self._push(token)
            shown += text
            if stop is not None:
                self._over = True
                return Accepted(tuple(tokens[:kept]), shown, EndOfAnswer(kept, FinishReason.STOP, stop))
            if self.generated == self._max_tokens:
                return self._end(tokens[:kept], shown, FinishReason.LENGTH)
        return Accepted(tuple(tokens), shown)

    def _accept_ids(self, tokens: Sequence[int]) -> Accepted:
        """The same without stop strings: text need not be looked at token by token."""
        for kept, token in enumerate(tokens, start=1):
            self.generated += 1
            if token in self._end_ids:
                return self._end(tokens[:kept], self._text(tokens[: kept - 1]), FinishReason.STOP)
            if self.generated == self._max_tokens:
                return self._end(tokens[:kept], self._text(tokens[:kept]), FinishReason.LENGTH)
        return Accepted(tuple(tokens), self._text(tokens))

    def _text(self, tokens: Sequence[int]) -> str:
        return self._stream.push(tokens) if self._stream is not None else ""

    def _push(self, token: int) -> tuple[str, str | None]:
        assert self._stops is not None
        text = self._text((token,))
        return self._stops.push(text) if text else ("", None)

    def _end(self, kept: Sequence[int], shown: str, reason: FinishReason) -> Accepted:
        """Ends without a stop string, unless the last incomplete character completes one (a stop string can be a mark)."""
        self._over = True
        text = self._stream.flush() if self._stream is not None else ""
        stop: str | None = None
        if self._stops is not None:
            text, stop = self._stops.push(text)
            if stop is None:
                text += self._stops.flush()
            else:
                reason = FinishReason.STOP
        return Accepted(tuple(kept), shown, EndOfAnswer(len(kept), reason, stop, text))


def _fallback(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that also ends it."""
    table = [0] * len(stop)
    length = 0
    for n in range(1, len(stop)):
        while length and stop[n] != stop[length]:
            length = table[length - 1]
        if stop[n] == stop[length]:
            length += 1
        table[n] = length
    return table
