"""Ids to text, a few at a time, never half a character.

Law. Whatever the pushes, their texts joined with the flush are the text of all ids together (`Tokenizer.decode`). What was
given out never changes. Bytes that can no longer become a character come out as replacement marks as soon as that is certain.

Two streams, because vocabularies spell bytes in two ways:

- `ByteLevelStream`: every token is a string of bytes (GPT-2 and most after it). The text is UTF-8 decoding of those bytes.
- `PieceStream`: tokens are pieces of text that may look different at the start or after another token (SentencePiece, WordPiece,
  words); some vocabularies add one token per byte (`<0x0A>`).

Both cost a constant per token. `tokenizers.decoders.DecodeStream` is not used: it decodes all it holds again while the text ends in
a mark (quadratic on bytes that never become a character) and stops with an error when a character it gave out is later
swallowed by a malformed run of byte tokens.

Where we differ from the library, on purpose: it turns a whole run of byte tokens into marks when one of its bytes is malformed,
so nothing of a run would be certain before the run ends, and a newline spelled `<0x0A>` could not end an answer in time. Here
the good characters of such a run stay and each malformed byte is one mark. Runs that are well-formed, or malformed throughout,
come out alike.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

MARK = "\ufffd"

_CONTEXT = 4
"""Tokens decoded again before new ones, so that new ones look as they do inside a text. One is enough for every decoder known;
four survive tokens without text."""

_LONGEST_HOLD = 8
"""Tokens held while a text ends in a mark. A character has at most four bytes, so at most three tokens can wait for its last."""


class TextStream(Protocol):
    """Text of one answer as its ids come."""

    def push(self, ids: Iterable[int]) -> str:
        """Takes ids and returns the text that became certain. Ids without a token have no text."""

    def flush(self) -> str:
        """Ends the stream and returns the rest: an incomplete character becomes a replacement mark."""


class ByteLevelStream:
    """UTF-8 decoding across token borders."""

    __slots__ = ("_bytes_of", "_decoder", "_skip")

    def __init__(self, bytes_of: Callable[[int], bytes], skip: Collection[int]) -> None:
        self._bytes_of = bytes_of
        self._skip = skip
        # Marks one maximal ill-formed part at a time, as Unicode recommends and as the library does.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """See TextStream."""
        skip, bytes_of = self._skip, self._bytes_of
        return self._decoder.decode(b"".join([bytes_of(i) for i in ids if i not in skip]))

    def flush(self) -> str:
        """See TextStream."""
        return self._decoder.decode(b"", final=True)


class PieceStream:
    """Decodes new tokens behind the few before them and gives out what that adds."""

    __slots__ = ("_byte_of", "_context", "_decode", "_held", "_hold_marks", "_partial", "_skip")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        skip: Collection[int],
        byte_of: Mapping[int, int],
        hold_marks: bool,
    ) -> None:
        self._decode = decode
        self._skip = skip
        self._byte_of = byte_of
        """Byte of each byte token. Empty: the vocabulary has none."""
        self._hold_marks = hold_marks
        """True when a mark at the end may be an incomplete character of ordinary tokens."""
        self._context: list[int] = []
        """Last tokens whose text was given out."""
        self._held: list[int] = []
        """Ordinary tokens not given out yet. Empty while `_partial` is not."""
        self._partial: list[int] = []
        """Byte tokens of an incomplete character: at most three between pushes."""

    def push(self, ids: Iterable[int]) -> str:
        """See TextStream."""
        out: list[str] = []
        for i in ids:
            if i in self._skip:
                continue
            if i in self._byte_of:
                out.append(self._release(last=True))
                out.append(self._push_byte(i))
            else:
                out.append(self._spoil())
                self._held.append(i)
        out.append(self._release(last=False))
        return "".join(out)

    def flush(self) -> str:
        """See TextStream."""
        return self._spoil() + self._release(last=True)

    def _release(self, last: bool) -> str:
        """Text of the held tokens. Holds on while it ends in a mark that more tokens may heal, unless `last`."""
        if not self._held:
            return ""
        before = self._decode(self._context) if self._context else ""
        after = self._decode(self._context + self._held)
        if self._hold_marks and not last and after.endswith(MARK) and len(self._held) < _LONGEST_HOLD:
            return ""
        text = after[len(before) :] if after.startswith(before) else self._decode(self._held)
        self._move_on(self._held)
        self._held = []
        return text

    def _push_byte(self, i: int) -> str:
        """Text that one more byte token makes certain."""
        self._partial.append(i)
        out = ""
        while self._partial:
            try:
                text = bytes([self._byte_of[p] for p in self._partial]).decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    return out
                out += MARK  # the first byte can never be part of a character; the rest may begin one
                self._move_on([self._partial.pop(0)])
            else:
                # The library may trim the very start of a text (Llama drops one space), so the start is left to it.
                out += text if self._context else self._decode(self._partial)
                self._move_on(self._partial)
                self._partial = []
        return out

    def _spoil(self) -> str:
        """Marks for an incomplete character that nothing can complete any more."""
        marks = MARK * len(self._partial)
        self._move_on(self._partial)
        self._partial = []
        return marks

    def _move_on(self, ids: list[int]) -> None:
        if ids:
            self._context = [*self._context, *ids][-_CONTEXT:]
