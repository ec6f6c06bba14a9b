"""A request's critical path: disjoint intervals, each with its own pair of stamps.

Law. Every interval is added with its begin and its end, both read from the coordinator's monotonic clock, or as the split of
one such interval by the worker's own measurements (`Passage`). Nothing is computed as what remains; what the intervals leave
of the total is `unattributed`, and is reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specwire.law.values import MAX_U32
from specwire.v1 import inference_pb2 as pb
from specwire.wire.stopwatch import Passage, now_ns

MAX_ROUNDS_KEPT = 4096
NO_PASSAGE = Passage(0, 0, 0, 0, 0)


@dataclass(slots=True)
class RoundNotes:
    """What one round is made of, until its verdict is applied. Microseconds."""

    begun_ns: int = 0
    waits_ns: int = 0
    """When the coordinator had done what there was to do at its begin."""
    draft_ready_ns: int = 0
    """When its first task for a block was ready to be sent; 0: no block was asked for."""
    target_ready_ns: int = 0
    """When its first task for the target was ready to be sent; 0: not yet."""
    source: str = "none"
    drafted: int = 0
    draft: Passage | None = None
    target: Passage | None = None
    """Of all its tasks: a long text takes several."""
    coordinator_us: int = 0
    draft_wait_us: int = 0
    """Spent on a draft that gave nothing."""


@dataclass(slots=True)
class RequestClock:
    """Sums of one request, in microseconds, and its rounds where asked for."""

    arrived_ns: int = field(default_factory=now_ns)
    keep_rounds: bool = False
    first_token_ns: int = 0
    ended_ns: int = 0
    admission_us: int = 0
    tokenize_us: int = 0
    coordinator_us: int = 0
    wait_us: int = 0
    client_us: int = 0
    recovery_us: int = 0
    wire_bytes: int = 0
    draft_compute_us: int = 0
    draft_queue_us: int = 0
    draft_overhead_us: int = 0
    draft_transfer_us: int = 0
    target_compute_us: int = 0
    target_queue_us: int = 0
    target_overhead_us: int = 0
    target_transfer_us: int = 0
    hidden_us: int = 0
    round: RoundNotes = field(default_factory=RoundNotes)
    rounds: list[pb.Round] = field(default_factory=list)

    def work(self, begin_ns: int, end_ns: int) -> None:
        """The coordinator worked on this request."""
        spent = (end_ns - begin_ns) // 1000
        self.coordinator_us += spent
        self.round.coordinator_us += spent

    def draft_passage(self, way: Passage) -> None:
        """A block came by this way."""
        self.round.draft = way if self.round.draft is None else self.round.draft + way
        self.wait_us += way.wait_us
        self.draft_transfer_us += way.transfer_us
        self.draft_queue_us += way.queue_us
        self.draft_compute_us += way.compute_us
        self.draft_overhead_us += way.overhead_us

    def target_passage(self, way: Passage) -> None:
        """A verdict, or a prompt chunk's answer, came by this way."""
        self.round.target = way if self.round.target is None else self.round.target + way
        self.wait_us += way.wait_us
        self.target_transfer_us += way.transfer_us
        self.target_queue_us += way.queue_us
        self.target_compute_us += way.compute_us
        self.target_overhead_us += way.overhead_us

    def begin_round(self, begun_ns: int) -> None:
        """A round begins at its plan."""
        self.round = RoundNotes(begun_ns=begun_ns)

    def end_round(self, index: int, accepted: int, committed: int, end_ns: int, rows: int, sessions: int) -> None:
        """A verdict was applied."""
        if not self.keep_rounds or len(self.rounds) >= MAX_ROUNDS_KEPT:
            return
        notes, draft, target = self.round, self.round.draft or NO_PASSAGE, self.round.target or NO_PASSAGE
        self.rounds.append(
            pb.Round(
                index=index,
                drafted=notes.drafted,
                accepted=accepted,
                committed=committed,
                source=notes.source,
                step_rows=rows,
                step_sessions=sessions,
                # A round may have waited for a lost target for longer than a field holds.
                **{
                    name: min(duration_us, MAX_U32)
                    for name, duration_us in (
                        ("total_us", (end_ns - notes.begun_ns) // 1000),
                        ("draft_compute_us", draft.compute_us),
                        ("draft_transfer_us", draft.transfer_us),
                        ("draft_other_us", draft.queue_us + draft.overhead_us + notes.draft_wait_us),
                        ("target_compute_us", target.compute_us),
                        ("target_transfer_us", target.transfer_us),
                        ("target_other_us", target.queue_us + target.overhead_us),
                        ("coordinator_us", notes.coordinator_us + draft.wait_us + target.wait_us),
                    )
                },
            )
        )

    def timing(self) -> pb.Timing:
        """The report. Call after `ended_ns` is set."""
        parts = {
            name: getattr(self, name)
            for name in (
                "admission_us",
                "tokenize_us",
                "draft_compute_us",
                "draft_queue_us",
                "draft_overhead_us",
                "draft_transfer_us",
                "target_compute_us",
                "target_queue_us",
                "target_overhead_us",
                "target_transfer_us",
                "coordinator_us",
                "wait_us",
                "client_us",
                "recovery_us",
            )
        }
        total = (self.ended_ns - self.arrived_ns) // 1000
        return pb.Timing(
            total_us=total,
            unattributed_us=max(0, total - sum(parts.values())),
            hidden_us=self.hidden_us,
            time_to_first_token_us=max(0, (self.first_token_ns - self.arrived_ns) // 1000),
            wire_bytes=self.wire_bytes,
            **parts,
        )
