"""A request's spans: `generate`, and below it `round`, `draft.propose` and `target.verify`.

Law. `generate` is written once, when the request ends, whatever ended it; its sums are the final event's own numbers. A round
below it is traced or not from its begin: then its three span ids are drawn, two of them travel in the tasks, and what the
workers do hangs below them. A traced round is written when its verdict is applied, or when its request ends under it, and then
every call that was sent has a span, so no worker's span is without its parent. A request that is not sampled puts no trace on
the wire and costs a look-up per event.

Begins and ends are the stamps of the request's clock, plus one offset to wall-clock time that is read when it is opened.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.attributes import (
    DRAFT_METHOD,
    TARGET_METHOD,
    add_error,
    add_sampling,
    add_sums,
    call_attributes,
    request_attributes,
)
from coordinator.clock import RequestClock
from coordinator.observe import NO_TRACE, Call
from coordinator.session import Session
from specwire import telemetry as names
from specwire.law.errors import SpecwireError
from specwire.law.values import Source
from specwire.spans import Kind, SpanRef, SpanSink, Value, new_span_ids, new_trace_id, parse_traceparent, wall_offset_ns
from specwire.v1 import inference_pb2 as pb
from specwire.wire.stopwatch import Passage, now_ns


@dataclass(slots=True)
class _Round:
    """A traced round in progress."""

    index: int
    ref: SpanRef
    propose: SpanRef
    verify: SpanRef
    proposed: bool = False
    """`draft.propose` was written."""
    fallback: str = ""


@dataclass(slots=True)
class _Trace:
    """A sampled request in progress."""

    ref: SpanRef
    parent: SpanRef | None
    offset_ns: int
    rounds: int = 0
    """Rounds that have spans."""
    round: _Round | None = None


def traced_round(index: int, so_far: int) -> bool:
    """Whether a round has spans: the first ones, then a few, and never more than so many in all."""
    return (index < names.FIRST_ROUNDS or index % names.ONE_ROUND_IN == 0) and so_far < names.MAX_ROUNDS


class RequestTracing:
    """An Observer that writes spans. Its only state is the requests in progress."""

    def __init__(self, spans: SpanSink, rounds: bool) -> None:
        """`rounds`: whether rounds have spans, or only their sums on the request's."""
        self._spans = spans
        self._rounds = rounds
        self._traces: dict[int, _Trace] = {}

    def __repr__(self) -> str:
        return f"RequestTracing(requests={len(self._traces)}, spans={self._spans!r})"

    def _begin(self, call: Call) -> _Trace | None:
        parent = parse_traceparent(call.trace_parent) if call.trace_parent else None
        trace_id = parent.trace_id if parent is not None else new_trace_id()
        if not self._spans.sampled(names.GENERATE, trace_id, parent):
            return None
        return _Trace(SpanRef(trace_id, new_span_ids(1)[0]), parent, wall_offset_ns())

    def opened(self, session: Session) -> None:
        """See Observer."""
        trace = self._begin(session.call)
        if trace is not None:
            self._traces[session.counter] = trace

    def round_begun(self, session: Session) -> tuple[bytes, bytes]:
        """See Observer."""
        trace = self._traces.get(session.counter)
        index = session.tally.rounds
        if trace is None or not self._rounds or not traced_round(index, trace.rounds):
            return NO_TRACE, NO_TRACE
        trace.rounds += 1
        own, propose, verify = map(trace.ref.child, new_span_ids(3))
        trace.round = _Round(index, own, propose, verify)
        return propose.pack(), verify.pack()

    def drafted(self, session: Session, way: Passage, tokens: int) -> None:
        """See Observer."""
        trace = self._traces.get(session.counter)
        if trace is not None and trace.round is not None:
            self._propose(session, trace, trace.round, way, tokens, None)

    def fallback(self, session: Session, cause: str) -> None:
        """See Observer."""
        trace = self._traces.get(session.counter)
        if trace is not None and trace.round is not None:
            trace.round.fallback = cause
            self._propose(session, trace, trace.round, None, 0, cause)

    def _propose(
        self, session: Session, trace: _Trace, round_: _Round, way: Passage | None, tokens: int, error: str | None
    ) -> None:
        """Writes `draft.propose` of the round in progress, if it was sent and is not written."""
        begun = session.clock.round.draft_ready_ns
        if round_.proposed or not begun:
            return
        round_.proposed = True
        # of all tasks that the block took, as in the final event: a guess that was wrong is drafted anew
        whole = None if way is None else session.clock.round.draft or way
        attributes = call_attributes(DRAFT_METHOD, session.draft_name or "", whole)
        attributes["specwire.drafted"] = tokens
        end = now_ns() if way is None else session.to_draft.ready_ns + way.total_us * 1000
        if whole is not None and whole is not way:  # as long as they were together, what lay between them left out
            begun = end - whole.total_us * 1000
        self._write(trace, names.PROPOSE, round_.propose, round_.ref, "client", begun, end, attributes, error)

    def _write(
        self,
        trace: _Trace,
        name: str,
        ref: SpanRef,
        parent: SpanRef | None,
        kind: Kind,
        begun_ns: int,
        ended_ns: int,
        attributes: dict[str, Value],
        error: str | None,
    ) -> None:
        if error is not None:
            attributes.setdefault("error.type", error)
        offset = trace.offset_ns
        self._spans.write(name, ref, parent, kind, begun_ns + offset, ended_ns + offset, attributes, error=error)

    def round_done(
        self, session: Session, index: int, source: Source, drafted: int, accepted: int, committed: int, way: Passage
    ) -> None:
        """See Observer."""
        trace = self._traces.get(session.counter)
        if trace is None or trace.round is None:
            return
        attributes: dict[str, Value] = {
            "specwire.block_source": source.value,
            "specwire.drafted": drafted,
            "specwire.accepted": accepted,
            "specwire.committed": committed,
        }
        self._round(session, trace, trace.round, way, attributes, None)

    def _round(
        self,
        session: Session,
        trace: _Trace,
        round_: _Round,
        way: Passage | None,
        attributes: dict[str, Value],
        error: str | None,
    ) -> None:
        """Writes the round in progress, and of its calls those that were sent and are not written."""
        trace.round = None
        self._propose(session, trace, round_, None, 0, error)
        notes = session.clock.round
        if notes.target_ready_ns:
            call = call_attributes(TARGET_METHOD, session.target_name, way)
            call |= {name: attributes[name] for name in ("specwire.drafted", "specwire.accepted") if name in attributes}
            end = now_ns() if way is None else session.to_target.ready_ns + way.total_us * 1000
            self._write(
                trace, names.VERIFY, round_.verify, round_.ref, "client", notes.target_ready_ns, end, call, error
            )
        attributes["specwire.round"] = round_.index
        if round_.fallback:
            attributes["specwire.fallback"] = round_.fallback
        if error is not None:
            attributes["specwire.outcome"] = error
        self._write(trace, names.ROUND, round_.ref, trace.ref, "internal", notes.begun_ns, now_ns(), attributes, error)

    def ended(self, session: Session) -> None:
        """See Observer."""
        trace = self._traces.pop(session.counter, None)
        if trace is None:
            return
        if trace.round is not None:
            self._round(session, trace, trace.round, None, {}, session.outcome)
        attributes = request_attributes(session.call, session.spec.request_id, session.outcome)
        add_sampling(attributes, session)
        add_sums(attributes, session)
        attributes["specwire.rounds_traced"] = trace.rounds
        if session.outcome == "finished":
            length = session.out[-1].final.finish_reason == pb.FINISH_REASON_LENGTH
            attributes["gen_ai.response.finish_reasons"] = ["length" if length else "stop"]
        self._generate(trace, session.clock, attributes, session.outcome, session.error)

    def refused(self, call: Call, clock: RequestClock, error: SpecwireError) -> None:
        """See Observer."""
        trace = self._begin(call)
        if trace is not None:
            self._generate(trace, clock, request_attributes(call, call.request_id, "refused"), "refused", error)

    def _generate(
        self,
        trace: _Trace,
        clock: RequestClock,
        attributes: dict[str, Value],
        outcome: str,
        error: SpecwireError | None,
    ) -> None:
        trouble = add_error(attributes, outcome, error)
        ended = clock.ended_ns or now_ns()
        self._write(
            trace, names.GENERATE, trace.ref, trace.parent, "server", clock.arrived_ns, ended, attributes, trouble
        )
