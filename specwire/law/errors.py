"""Every exception Specwire raises on purpose.

    SpecwireError
      CallerFault             the request is wrong; repeating it will not help
        InvalidArgument       names field, value and limit
        VersionMismatch       protocol versions differ
        VocabularyMismatch    token maps differ
      NoRoom                  right request, wrong moment; carries a retry hint
      TooLate                 its deadline is over
      Unavailable             a peer is away
      OurFault                a bug or a broken model; the text is for logs, not for callers
        BadLaw                a model gave not-a-number or an empty law

One place, `specwire.wire.rpc`, maps these to gRPC status codes and back. Any other exception is by definition our bug.
"""

from __future__ import annotations

import re


class SpecwireError(Exception):
    """Base of all errors raised on purpose."""


class CallerFault(SpecwireError):
    """The request itself is wrong."""


class InvalidArgument(CallerFault):
    """A field holds a value that is not allowed."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field}: got {shown}, must be {limit}")
        self.field = field
        self.value = value
        self.limit = limit

    @classmethod
    def told(cls, text: str) -> InvalidArgument | None:
        """One that another process told of, from its words; `value` is as it was shown. None: these are other words."""
        found = _REFUSAL.fullmatch(text)
        if found is None:
            return None
        error = cls(*found.groups())
        error.args = (text,)
        return error


_REFUSAL = re.compile(r"(\S+): got (.*?), must be (.*)", re.DOTALL)


class VersionMismatch(CallerFault):
    """Two processes speak different protocol versions."""


class VocabularyMismatch(CallerFault):
    """Draft and target disagree about what a token id means."""


class NoRoom(SpecwireError):
    """The service is full. `retry_after_s` is a hint."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLate(SpecwireError):
    """The deadline passed."""


class Unavailable(SpecwireError):
    """A peer cannot be reached; the same request may succeed later."""


class OurFault(SpecwireError):
    """Something of ours is broken."""


class BadLaw(OurFault):
    """A model produced a row of scores that is no law."""
