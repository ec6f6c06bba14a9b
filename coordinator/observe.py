"""What the driver tells those who watch: metrics and spans. They decide nothing and cannot fail a request.

Law. Observers are called on the event loop, must be quick, and see every request from `opened` to exactly one `ended`, or one
`refused`. One that raises is logged once and never asked again; serving goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from specwire.law.errors import SpecwireError
from specwire.law.values import Source
from specwire.wire.stopwatch import Passage

if TYPE_CHECKING:
    from coordinator.clock import RequestClock
    from coordinator.session import Session

log = logging.getLogger(__name__)

NO_TRACE = b""


@dataclass(frozen=True, slots=True)
class Call:
    """What only observers want to know of a client's call."""

    operation: str = "text_completion"
    """chat or text_completion."""
    model: str = ""
    """The model as told to the client. Empty: turned away before that was known."""
    request_id: str = ""
    """As the client gave it. Empty: not given."""
    trace_parent: str = ""
    """W3C traceparent as the client sent it. Empty: none."""


NO_CALL = Call()


class Observer(Protocol):
    """Watches the coordinator."""

    def opened(self, session: Session) -> None:
        """A request was taken."""

    def round_begun(self, session: Session) -> tuple[bytes, bytes]:
        """A round begins. Returns the trace contexts for the draft's and the target's task; empty: not traced."""

    def drafted(self, session: Session, way: Passage, tokens: int) -> None:
        """A block came."""

    def round_done(
        self, session: Session, index: int, source: Source, drafted: int, accepted: int, committed: int, way: Passage
    ) -> None:
        """A verdict was applied."""

    def fallback(self, session: Session, cause: str) -> None:
        """A round went on without the draft."""

    def ended(self, session: Session) -> None:
        """A request is over; `session.outcome` says how."""

    def refused(self, call: Call, clock: RequestClock, error: SpecwireError) -> None:
        """A request was turned away; nothing was begun."""


class Observers:
    """Any number of observers as one, and the guard around them."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def __repr__(self) -> str:
        return f"Observers({list(self._observers)!r})"

    def _failed(self, observer: Observer) -> None:
        log.exception("observer %r failed and is not asked again", observer)
        self._observers = tuple(other for other in self._observers if other is not observer)

    def _each(self, method: str, *args: Any) -> None:
        for observer in self._observers:
            try:
                getattr(observer, method)(*args)
            except Exception:
                self._failed(observer)

    def opened(self, session: Session) -> None:
        """See Observer."""
        self._each("opened", session)

    def round_begun(self, session: Session) -> tuple[bytes, bytes]:
        """See Observer. The first trace context wins."""
        traces = (NO_TRACE, NO_TRACE)
        for observer in self._observers:
            try:
                said = observer.round_begun(session)
            except Exception:
                self._failed(observer)
                continue
            traces = traces if traces[1] else said
        return traces

    def drafted(self, session: Session, way: Passage, tokens: int) -> None:
        """See Observer."""
        self._each("drafted", session, way, tokens)

    def round_done(
        self, session: Session, index: int, source: Source, drafted: int, accepted: int, committed: int, way: Passage
    ) -> None:
        """See Observer."""
        self._each("round_done", session, index, source, drafted, accepted, committed, way)

    def fallback(self, session: Session, cause: str) -> None:
        """See Observer."""
        self._each("fallback", session, cause)

    def ended(self, session: Session) -> None:
        """See Observer."""
        self._each("ended", session)

    def refused(self, call: Call, clock: RequestClock, error: SpecwireError) -> None:
        """See Observer."""
        self._each("refused", call, clock, error)


class NullObserver(Observers):
    """Watches nothing."""
