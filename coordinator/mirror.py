"""What the coordinator believes of one worker's cache for one session, in the manner of etcd-raft's `Progress`.

Law. `match` tokens of the committed text are confirmed in the worker's cache; everything after them is hope. One task is in
flight at most. An answer counts only if it answers that task: same epoch, same number, same stream generation. Anything else
is stale, is counted by the caller, and changes nothing. The worker checks the hash at `keep`, so a belief that is wrong costs
a refusal, never a wrong token.

      task sent            answer                 stream lost
    STREAM ----------> STREAM (in flight) ----> PROBE ----> STREAM    same worker: the task is sent again as it was
                                                     \\---> REPLAY    another life of the worker: match falls to 0

This module knows nothing of gRPC, clocks or models. Its transitions are its methods; nobody else sets a field.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from specwire.law.cursor import Prefix
from specwire.law.tasks import Answer, ProposeTask, Reason, Refusal, VerifyTask

Sent = ProposeTask | VerifyTask


class State(enum.Enum):
    """How sure we are of the worker."""

    REPLAY = "replay"
    """Its cache is empty or unknown: the next task begins at 0."""
    STREAM = "stream"
    """We know where it stands."""
    PROBE = "probe"
    """Its stream is lost; it may or may not have done the task in flight."""


class Mirror:
    """Belief about one worker's cache for one session."""

    __slots__ = ("generation", "in_flight", "match", "number", "state", "tail")

    def __init__(self) -> None:
        self.state = State.REPLAY
        self.match = 0
        """Tokens of committed text confirmed in the worker's cache. Moves up on answers and `settle`, down in `lost_cache`,
        `cut` and `refused`. Invariant: 0 <= match <= length of the committed text."""
        self.tail: tuple[int, ...] = ()
        """Uncommitted tokens in the worker's cache right after `match`: a draft's own proposals. Judged by `settle`."""
        self.in_flight: Sent | None = None
        """The one task that is sent and not answered."""
        self.number = 0
        """Number of the last task made. Only rises, also across replays."""
        self.generation = 0
        """Stream on which `in_flight` was sent last. Answers of another stream are stale."""

    def __repr__(self) -> str:
        flight = f"#{self.in_flight.number}" if self.in_flight else "none"
        return f"Mirror({self.state.value}, match={self.match}, tail={len(self.tail)}, in_flight={flight})"

    @property
    def idle(self) -> bool:
        """True when a new task may be made."""
        return self.in_flight is None and self.state is not State.PROBE

    def next_number(self) -> int:
        """Number for a new task."""
        self.number += 1
        return self.number

    def place(self, prefix: Prefix) -> tuple[int, int, Sequence[int]]:
        """(keep, hash at keep, tokens from keep on) for the next task. At least one token is always sent again, because the
        row of the last one is what judges or drafts the next."""
        keep = min(self.match, len(prefix) - 1)
        return keep, prefix.hash_at(keep), prefix.tokens[keep:]

    def sent(self, task: Sent, generation: int) -> None:
        """A task goes out, for the first time or again on a new stream."""
        assert self.in_flight is None or self.in_flight is task, "one task in flight"
        self.in_flight = task
        self.generation = generation
        self.state = State.STREAM

    def matches(self, answer: Answer, generation: int) -> bool:
        """Whether this answers the task in flight."""
        task = self.in_flight
        return (
            task is not None
            and self.state is State.STREAM
            and generation == self.generation
            and answer.epoch == task.epoch
            and answer.number == task.number
        )

    def answered(self, answer: Answer, prefix: Prefix, tail: Sequence[int]) -> None:
        """The task in flight was done. `tail` holds uncommitted tokens that the worker now caches after the task's base;
        the answer's length, not a rule of thumb, says how many of them."""
        task = self.in_flight
        assert task is not None
        self.in_flight = None
        confirmed = min(answer.length, task.base, len(prefix))
        self.match = confirmed
        self.tail = tuple(tail[: max(0, answer.length - task.base)]) if confirmed == task.base else ()

    def settle(self, prefix: Prefix) -> None:
        """Committed text has grown: what of the tail has become text is now confirmed, the rest will be cut by the next task."""
        if self.in_flight is None:
            self.match += prefix.common(self.tail, self.match)
            self.tail = ()

    def ran_ahead(self, answer: Answer, prefix: Prefix, beyond: Sequence[int]) -> None:
        """The task in flight was done; its text went past the committed text. `beyond`: block and proposals, what the worker may
        cache after `match`."""
        assert self.in_flight is not None
        self.in_flight = None
        self.tail = tuple(beyond[: max(0, answer.length - self.match)])
        self.match = min(self.match, answer.length, len(prefix))

    def caught_up(self, prefix: Prefix) -> None:
        """Committed text has come to be all of what the tail begins with; what is left of it are proposals that follow."""
        confirmed = prefix.common(self.tail, self.match)
        self.match += confirmed
        self.tail = self.tail[confirmed:]

    def overtaken(self, prefix: Prefix) -> None:
        """The task in flight is not waited for any more, and what it built on stands: only what is confirmed of it counts."""
        self.in_flight = None
        self.settle(prefix)

    def refused(self, refusal: Refusal, prefix: Prefix) -> None:
        """Nothing was done. Continue from where the worker stands if the hash there is ours, else from 0."""
        self.in_flight = None
        self.tail = ()
        if refusal.reason not in (Reason.LENGTH, Reason.HASH):
            return
        agrees = refusal.length <= len(prefix) and prefix.hash_at(refusal.length) == refusal.hash
        self.match = refusal.length if agrees else 0
        self.state = State.STREAM if self.match else State.REPLAY

    def abandoned(self) -> None:
        """The caller no longer waits for the task in flight. What the worker's cache holds past `match` is unknown; the
        hash at `keep` protects the next task."""
        self.in_flight = None
        self.tail = ()

    def stream_lost(self) -> None:
        """The stream broke. The worker may have done the task in flight."""
        if self.state is not State.REPLAY or self.in_flight is not None:
            self.state = State.PROBE

    def stream_back(self, same_worker: bool) -> Sent | None:
        """A stream is up. The same life of the worker gets its task again, exactly as it was; another one knows nothing."""
        task = self.in_flight
        if same_worker:
            self.state = State.STREAM if (task is not None or self.match) else State.REPLAY
            return task
        self.lost_cache()
        return None

    def lost_cache(self) -> None:
        """The worker holds nothing of this session."""
        self.state = State.REPLAY
        self.match = 0
        self.tail = ()
        self.in_flight = None

    def check(self, prefix: Prefix) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert 0 <= self.match <= len(prefix), repr(self)
        assert self.in_flight is None or self.in_flight.number == self.number, repr(self)
        assert self.state is not State.REPLAY or self.match == 0, repr(self)
