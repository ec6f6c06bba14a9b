"""What the coordinator asks of a worker, and what a worker answers: values, one for one with the protocol.

Law. A task names a session, the life of its text (`epoch`), its own `number`, and the place it continues from (`keep`, and
the hash there). A worker that is not exactly there refuses and changes nothing. See `specwire.worker.sessions` for the order
in which a worker checks, and `coordinator.mirror` for the other end.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from specwire.law.errors import InvalidArgument
from specwire.law.values import EMPTY_BLOCK, MAX_U32, Block, Opening, Verdict


@dataclass(frozen=True, slots=True, order=True)
class SessionId:
    """A generation, unique across restarts of the coordinator."""

    incarnation: int
    """Random 64 bits of the coordinator's process."""
    counter: int
    """Counts the sessions of that process, from 1."""


class Reason(enum.Enum):
    """Why a task was refused."""

    STALE = "stale"
    LENGTH = "length"
    HASH = "hash"
    NO_ROOM = "no_room"
    TOO_LATE = "too_late"
    INVALID = "invalid"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing was done and nothing was changed."""

    reason: Reason
    length: int = 0
    """Tokens in the worker's cache."""
    hash: int = 0
    """Prefix hash there."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """The model failed on this task; the worker has dropped the session."""

    detail: str
    bad_law: bool = False
    """Not-a-number or an empty law: a retry would fail alike."""


def _check_u32(name: str, value: int) -> None:
    if not 0 <= value <= MAX_U32:
        raise InvalidArgument(name, value, f"in [0, {MAX_U32}]")


@dataclass(frozen=True, slots=True)
class Task:
    """What both kinds of task have."""

    session: SessionId
    epoch: int
    number: int
    keep: int
    keep_hash: int
    append: tuple[int, ...] = ()
    opening: Opening | None = None
    """Present exactly when keep is 0."""
    time_left_ms: int = 0
    """Until the request's deadline. 0: what an earlier task of the session said still holds; if none did, no limit."""
    trace: bytes = b""
    """W3C trace context, 25 bytes; empty: not traced."""
    group: int = 0
    """Of the session, where groups of them take turns. 0: goes with any."""

    def __post_init__(self) -> None:
        for name in ("epoch", "number", "keep", "time_left_ms", "group"):
            _check_u32(name, getattr(self, name))
        if (self.opening is not None) != (self.keep == 0):
            raise InvalidArgument("open", self.opening, "present exactly when keep is 0")

    @property
    def base(self) -> int:
        """Length of the confirmed text once `append` is in."""
        return self.keep + len(self.append)


@dataclass(frozen=True, slots=True)
class ProposeTask(Task):
    """Bring the cache to the text, then propose."""

    num_tokens: int = 0
    """0: only bring the cache up to date."""

    def __post_init__(self) -> None:
        super(ProposeTask, self).__post_init__()
        _check_u32("num_tokens", self.num_tokens)


@dataclass(frozen=True, slots=True)
class VerifyTask(Task):
    """Bring the cache to the text, then judge `block`."""

    block: Block = EMPTY_BLOCK
    prefill_only: bool = False
    """True: nothing is sampled, `block` is empty."""

    def __post_init__(self) -> None:
        super(VerifyTask, self).__post_init__()
        if self.prefill_only and len(self.block):
            raise InvalidArgument("block", len(self.block), "empty when prefill_only")
        if not self.prefill_only and not self.append:
            raise InvalidArgument("append", (), "at least one token, whose row judges the first of the block")


@dataclass(frozen=True, slots=True)
class TaskTiming:
    """One task's time at the worker, microseconds on the worker's clock."""

    residence_us: int = 0
    """Raw frame received to answer handed over for serialisation."""
    parse_us: int = 0
    queue_us: int = 0
    compute_us: int = 0
    """Prepare, forward and sample of every step the task took part in."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One engine step, shared by the answers of one frame, microseconds."""

    prepare_us: int = 0
    compute_us: int = 0
    sample_us: int = 0
    answer_us: int = 0
    rows: int = 0
    prefill_rows: int = 0
    sessions: int = 0
    previous_serialise_us: int = 0
    step: int = 0

    @property
    def busy_us(self) -> int:
        """What the engine spent on it: preparing, computing and sampling."""
        return self.prepare_us + self.compute_us + self.sample_us


NO_TIMING = TaskTiming()


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one task."""

    session: SessionId
    epoch: int
    number: int
    length: int
    """Tokens in the worker's cache afterwards."""
    result: Verdict | Block | Refusal | Failure | None
    """Verdict from a target, Block from a draft, None after prefill_only."""
    timing: TaskTiming = NO_TIMING
    reused: int = 0
    """Tokens of the task's text that a target's cache held already, left there by another session."""
