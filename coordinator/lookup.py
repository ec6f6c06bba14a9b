"""Guesses from the text itself: what followed the last time these words stood here.

Law. The guess follows the most recent earlier place where the longest possible tail of the text (4, 3 or 2 tokens) stood. It is a
function of the committed text alone, so it is the same on every run, costs no worker's time, and is exact under either acceptance
law (its draft law is a point mass). A guess that reaches the end of the text goes on with its own tokens, so a text that repeats
itself is guessed to go on repeating: on period-3 text with blocks of 8 this accepts 8 a round instead of 3, and on text that
does not repeat the difference is nil, since such guesses seldom reach the end.

Trust is the chance that the first token of a guess stands, by length of match, from this session's own rounds (the last dozen
or so count), starting from modest priors. The controller (`window.py`) keeps it and weighs it against the draft's acceptance.

An appended token costs one dictionary write per match length; memory is about 0.3 kB per token. Committed text only grows, so
nothing is ever cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_PRIOR = (0.25, 0.35, 0.5, 0.65)
"""Trust before any evidence, for matches of 1, 2, 3 and 4 or more tokens."""
_PRIOR_WEIGHT = 3.0
"""Rounds of evidence that weigh as much as the prior."""
_MEMORY = 0.92
"""What a round's evidence is worth one such round later: a dozen rounds count."""


@dataclass(frozen=True, slots=True)
class NgramGuess:
    """Tokens that may come next."""

    tokens: tuple[int, ...]
    """At least one."""
    match_length: int
    """Tokens of the tail that stood there before."""


class Trust:
    """How far one session's guesses are to be believed."""

    __slots__ = ("_hits", "_tries")

    def __init__(self) -> None:
        self._tries: dict[int, float] = {}
        """By length of match: guesses judged, older ones counting less."""
        self._hits: dict[int, float] = {}
        """Of these, guesses whose first token stands. At most as many."""

    def __repr__(self) -> str:
        return f"Trust({ {length: round(self.of(length), 2) for length in sorted(self._tries)} })"

    def of(self, match_length: int) -> float:
        """Chance that the first token of a guess with such a match stands."""
        prior = _PRIOR[min(match_length, len(_PRIOR)) - 1]
        tries, hits = self._tries.get(match_length, 0.0), self._hits.get(match_length, 0.0)
        return (hits + _PRIOR_WEIGHT * prior) / (tries + _PRIOR_WEIGHT)

    def observe(self, match_length: int, accepted: int) -> None:
        """A guess with such a match was judged; so many of its tokens stand."""
        self._tries[match_length] = self._tries.get(match_length, 0.0) * _MEMORY + 1.0
        self._hits[match_length] = self._hits.get(match_length, 0.0) * _MEMORY + (accepted > 0)


class NgramLookup:
    """The index of one session's text."""

    __slots__ = ("_earlier", "_places", "_sizes", "_tokens")

    def __init__(self, tokens: Iterable[int] = (), *, min_match: int = 2, max_match: int = 4) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"match lengths {min_match} to {max_match}")
        self._sizes = tuple(range(max_match, min_match - 1, -1))
        self._tokens: list[int] = []
        self._places: list[dict[int, int]] = [{} for _ in self._sizes]
        """For each size: what stood there last, as one number, to the position after it."""
        self._earlier: list[int | None] = [None] * len(self._sizes)
        """For each size: the position after the latest earlier place of the text's tail."""
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        return f"NgramLookup(length={len(self)}, places={[len(p) for p in self._places]})"

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds committed tokens (ids below 2^32)."""
        text, earlier, places = self._tokens, self._earlier, self._places
        kinds = [(n, size, (1 << (32 * size)) - 1) for n, size in enumerate(self._sizes)]
        longest = self._sizes[0]
        tail = 0
        for token in text[-longest:]:
            tail = tail << 32 | token
        mask = kinds[0][2]
        for token in tokens:
            text.append(token)
            tail = (tail << 32 | token) & mask
            end = len(text)
            for n, size, low in kinds:
                if end < size:
                    continue
                key = tail & low
                earlier[n] = places[n].get(key)
                places[n][key] = end

    def propose(self, max_tokens: int) -> NgramGuess | None:
        """A guess of exactly `max_tokens` tokens, or None when the tail never stood before. Does not change anything."""
        if max_tokens < 1:
            return None
        for size, start in zip(self._sizes, self._earlier, strict=True):
            if start is not None:
                return NgramGuess(self._copy(start, max_tokens), size)
        return None

    def _copy(self, start: int, count: int) -> tuple[int, ...]:
        source = self._tokens[start : start + count]
        if len(source) == count:
            return tuple(source)
        repeats = -(-count // len(source))
        return tuple((source * repeats)[:count])
