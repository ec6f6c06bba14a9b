"""Where a text stands, and whether a task follows it.

Law. A prefix is a list of tokens with a 64-bit hash for every length. The hash at length 0 is the opening's fingerprint, the
hash at n + 1 is `step(hash at n, token n)`. Two parties that agree on (length, hash) agree on every token before it and on the
law under which it is continued. A prefix only grows by `extend` and only shrinks by `cut`.

Facts, tested in tests/unit/law/test_cursor.py:
- the token a verdict adds (correction or bonus) is not yet in the target's cache;
- after full acceptance the draft's cache is one token short of the block's end, since its last proposal was never fed back;
- the last drafted token is in the draft's cache only if the draft ran ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def step(prefix_hash: int, token: int) -> int:
    """Hash of a prefix with one more token: splitmix64's finaliser (Steele et al. 2014) over hash + odd multiple of token + 1."""
    z = (prefix_hash + (token + 1) * 0x9E37_79B9_7F4A_7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a session's text: which life of the text, how long, and what it says."""

    epoch: int
    length: int
    hash: int


class Prefix:
    """Tokens with the hash of every length. Grows at the end, is cut at the end, never changes in between."""

    __slots__ = ("_hashes", "_tokens")

    def __init__(self, fingerprint: int, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._hashes: list[int] = [fingerprint]
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        return f"Prefix(length={len(self)}, hash={self._hashes[-1]:016x})"

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens. A view: not to be changed by the reader."""
        return self._tokens

    def hash_at(self, length: int) -> int:
        """Hash of the first `length` tokens. Raises IndexError past the end."""
        if length < 0:
            raise IndexError(length)
        return self._hashes[length]

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens at the end."""
        prefix_hash = self._hashes[-1]
        for token in tokens:
            prefix_hash = step(prefix_hash, token)
            self._tokens.append(token)
            self._hashes.append(prefix_hash)

    def cut(self, length: int) -> None:
        """Keeps the first `length` tokens. Raises ValueError when there are fewer."""
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"cut to {length} of {len(self._tokens)} tokens")
        del self._tokens[length:]
        del self._hashes[length + 1 :]

    def common(self, tokens: Sequence[int], start: int = 0) -> int:
        """How many tokens from `start` on are equal to `tokens`."""
        return common(tuple(self._tokens[start : start + len(tokens)]), tuple(tokens))


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens that two texts have in common, from the first on. Takes time for these, not for the texts."""
    most, low, step = min(len(one), len(other)), 0, 16
    while low < most:
        high = min(low + step, most)
        if one[low:high] == other[low:high]:  # slices are compared without a loop of ours
            low, step = high, 2 * step
        elif high - low == 1:
            break
        else:
            step = (high - low) // 2
    return low
