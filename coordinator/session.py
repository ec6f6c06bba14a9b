"""One request while it is being generated: its ledger, its text, its clock, and what waits for its client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.clock import RequestClock
from coordinator.ledger import Ledger
from coordinator.observe import NO_CALL, Call
from coordinator.schedule import SYNCHRONOUS
from specwire.law.errors import SpecwireError
from specwire.law.values import MAX_U32, Law, SamplingSpec, Source
from specwire.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from coordinator.lookup import NgramLookup
    from coordinator.stops import Ending
    from coordinator.window import RequestWindow


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A checked request: nothing in it can be out of range any more."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingSpec
    law: Law
    seed: int
    max_tokens: int
    stops: tuple[str, ...]
    end_tokens: frozenset[int]
    num_speculative_tokens: int | None
    """None: the controller chooses."""
    max_block: int
    """Longest block for this request."""
    method: str
    """auto, draft_model or ngram."""
    return_rounds: bool = False
    private_prompt: bool = False


@dataclass
class Tally:
    """Raw counters of speculation: of one request, or of the service. They never fall."""

    rounds: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)
    drafted_by_model: int = 0
    accepted_by_model: int = 0
    drafted_by_ngram: int = 0
    accepted_by_ngram: int = 0
    fallbacks: int = 0

    def round(self, source: Source, drafted: int, accepted: int) -> None:
        """Counts one verify round."""
        self.rounds += 1
        if drafted == 0:
            return
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        while len(self.per_position) < accepted:
            self.per_position.append(0)
        for position in range(accepted):
            self.per_position[position] += 1
        if source is Source.NGRAM:
            self.drafted_by_ngram += drafted
            self.accepted_by_ngram += accepted
        else:
            self.drafted_by_model += drafted
            self.accepted_by_model += accepted

    def message(self) -> pb.SpeculationStats:
        """As protobuf."""
        return pb.SpeculationStats(
            rounds=self.rounds,
            drafts=self.drafts,
            drafted=self.drafted,
            accepted=self.accepted,
            accepted_per_position=self.per_position,
            drafted_by_model=self.drafted_by_model,
            accepted_by_model=self.accepted_by_model,
            drafted_by_ngram=self.drafted_by_ngram,
            accepted_by_ngram=self.accepted_by_ngram,
            fallbacks=self.fallbacks,
        )


@dataclass(slots=True)
class Journey:
    """Stamps of the task that is on its way to one worker."""

    ready_ns: int = 0
    written_ns: int = 0


class Session:
    """A request from its acceptance to its one terminal event."""

    def __init__(
        self, counter: int, spec: RequestSpec, clock: RequestClock, give_up_at: float | None, call: Call = NO_CALL
    ) -> None:
        self.counter = counter
        self.spec = spec
        self.call = call
        self.clock = clock
        self.give_up_at = give_up_at
        """Monotonic seconds of the request's deadline; None: none."""
        self.ledger: Ledger | None = None
        """None until admitted."""
        self.ending: Ending | None = None
        self.lookup: NgramLookup | None = None
        self.window: RequestWindow | None = None
        self.target_name = ""
        self.draft_name: str | None = None
        self.former_drafts: set[str] = set()
        """Drafts this session was taken away from: there it is closed, for good."""
        self.tally = Tally()
        self.generated = 0
        self.cached_tokens = 0
        self.replayed = False
        """A target was told the text again: what it held of it then says nothing of the prompt."""
        self.to_target = Journey()
        self.to_draft = Journey()
        self.draft_timer: asyncio.TimerHandle | None = None
        self.length = 0
        """Tokens that this round's plan asked the draft for."""
        self.guessed = 0.0
        """Chance, by acceptance, that what the draft was last asked for ahead is right."""
        self.ahead: tuple[float, int] | None = None
        """Microseconds that this round should take, with so many sessions; None: its block was not asked for ahead."""
        self.next_ahead: tuple[float, int] | None = None
        """The same of the next."""
        self.schedule = SYNCHRONOUS
        """Under which this round was planned, ..."""
        self.sharing = 1
        """... and with how many sessions at its target."""
        self.waiting_since_ns: int | None = None
        """Since when the target's stream is down under a round of this session."""
        self.paused_since_ns: int | None = None
        """Since when the client is too far behind."""
        self.over = False
        self.outcome = ""
        self.out: deque[pb.GenerateResponse] = deque()
        self.behind = 0
        """Tokens in `out`."""
        self.error: SpecwireError | None = None
        self.wake = asyncio.Event()
        """Set when there is something for the client."""
        self.ended = asyncio.Event()
        """Set when the session is over."""

    def __repr__(self) -> str:
        return f"Session({self.counter}, generated={self.generated}, outcome={self.outcome or 'open'}, {self.ledger!r})"

    def time_left_ms(self, now: float) -> int:
        """Milliseconds to the deadline, at least 1 and at most what the wire holds (49 days); 0: none."""
        return 0 if self.give_up_at is None else min(MAX_U32, max(1, int((self.give_up_at - now) * 1000)))

    def emit_tokens(self, ids: Sequence[int], text: str) -> None:
        """Puts tokens before the client."""
        if ids or text:
            self.out.append(pb.GenerateResponse(tokens=pb.Tokens(ids=ids, text=text)))
            self.behind += len(ids)
