"""What the driver tells those who watch: metrics and spans. They decide nothing and cannot fail a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from specwire.law.values import Source
from specwire.wire.stopwatch import Passage

if TYPE_CHECKING:
    from coordinator.session import Session

NO_TRACE = b""


class Observer(Protocol):
    """Called on the event loop; must be quick and must not raise."""

    def opened(self, session: Session) -> None:
        """A request was taken."""

    def round_begun(self, session: Session) -> tuple[bytes, bytes]:
        """A round begins. Returns the trace contexts for the draft's and the target's task; empty: not traced."""

    def drafted(self, session: Session, way: Passage, tokens: int) -> None:
        """A block came."""

    def round_done(
        self,
        session: Session,
        index: int,
        source: Source,
        drafted: int,
        accepted: int,
        committed: int,
        way: Passage,
    ) -> None:
        """A verdict was applied."""

    def fallback(self, session: Session, cause: str) -> None:
        """A round went on without the draft."""

    def ended(self, session: Session) -> None:
        """A request is over; `session.outcome` says how."""


class NullObserver:
    """Watches nothing."""

    def opened(self, session: Session) -> None:
        """Ignored."""

    def round_begun(self, session: Session) -> tuple[bytes, bytes]:
        """Not traced."""
        return NO_TRACE, NO_TRACE

    def drafted(self, session: Session, way: Passage, tokens: int) -> None:
        """Ignored."""

    def round_done(
        self, session: Session, index: int, source: Source, drafted: int, accepted: int, committed: int, way: Passage
    ) -> None:
        """Ignored."""

    def fallback(self, session: Session, cause: str) -> None:
        """Ignored."""

    def ended(self, session: Session) -> None:
        """Ignored."""
