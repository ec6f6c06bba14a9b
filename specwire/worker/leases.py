"""How long a worker remembers: streams of coordinators, and tombstones of closed sessions.

Law. A coordinator's process is an incarnation; its streams are numbered by `generation`. The newest stream owns the
incarnation's sessions. While one is connected the sessions live; once it is lost they live for one lease, and a stream of the
same incarnation that comes in time finds them all. A closed session leaves a tombstone for one lease. `now` is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from specwire.law.tasks import SessionId


@dataclass(slots=True)
class Peer:
    """One coordinator's process as this worker sees it."""

    generation: int
    """Of its newest stream."""
    lease_s: float
    lost_at: float | None = None
    """When the newest stream ended. None: it is connected."""


class Leases:
    """Peers and tombstones, both bounded in time."""

    def __init__(self) -> None:
        self._peers: dict[int, Peer] = {}
        self._tombstones: dict[SessionId, float] = {}  # session -> when it may be forgotten; in order of closing

    def __repr__(self) -> str:
        lost = sum(1 for peer in self._peers.values() if peer.lost_at is not None)
        return f"Leases(peers={len(self._peers)} lost={lost} tombstones={len(self._tombstones)})"

    def open_stream(self, incarnation: int, generation: int, lease_s: float) -> bool:
        """A stream says Hello. False: it is older than one already seen, and must end."""
        peer = self._peers.get(incarnation)
        if peer is None:
            self._peers[incarnation] = Peer(generation, lease_s)
            return True
        if generation < peer.generation:
            return False
        peer.generation, peer.lease_s, peer.lost_at = generation, lease_s, None
        return True

    def lose_stream(self, incarnation: int, now: float) -> None:
        """The newest stream of an incarnation ended."""
        peer = self._peers.get(incarnation)
        if peer is not None and peer.lost_at is None:
            peer.lost_at = now

    def lost_at(self, session: SessionId) -> float | None:
        """Since when nobody speaks for the session. None: somebody does."""
        peer = self._peers.get(session.incarnation)
        return peer.lost_at if peer else 0.0

    def lease_s(self, session: SessionId) -> float:
        """The lease of the session's coordinator."""
        peer = self._peers.get(session.incarnation)
        return peer.lease_s if peer else 0.0

    def closed(self, session: SessionId) -> bool:
        """Whether a tombstone stands."""
        return session in self._tombstones

    def bury(self, session: SessionId, now: float) -> None:
        """Raises a tombstone."""
        self._tombstones.pop(session, None)
        self._tombstones[session] = now + self.lease_s(session)

    def expire(self, now: float) -> set[int]:
        """Forgets what is over. Returns the incarnations whose sessions are over too."""
        while self._tombstones:
            session, until = next(iter(self._tombstones.items()))
            if until > now:
                break
            del self._tombstones[session]
        gone = {i for i, p in self._peers.items() if p.lost_at is not None and p.lost_at + p.lease_s <= now}
        for incarnation in gone:
            del self._peers[incarnation]
        return gone

    def next_expiry(self) -> float | None:
        """When `expire` has something to do next. None: nothing is running out."""
        times = [p.lost_at + p.lease_s for p in self._peers.values() if p.lost_at is not None]
        if self._tombstones:
            times.append(next(iter(self._tombstones.values())))
        return min(times, default=None)

    def sizes(self) -> dict[str, int]:
        """Entries of every map."""
        return {"peers": len(self._peers), "tombstones": len(self._tombstones)}
