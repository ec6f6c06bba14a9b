"""What a span is to us: a reference, and a sink that takes spans that are over. No OpenTelemetry here.

Law. A span is written once, when it is over, with the begin and the end it had; its id is chosen when it begins, so that what
runs below it, in whatever process, can name it as its parent. So no span can be left open, none is current on a thread or a
coroutine, and a generator that is dropped half-way has no context to detach.

Begin and end are wall-clock nanoseconds that come from a monotonic clock: `wall_offset_ns` is read once per request and added
to stamps. Durations are therefore monotonic; two hosts' spans may lie askew, and nothing is computed from that.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from specwire.wire.stopwatch import now_ns

Kind = Literal["server", "client", "internal"]
Value = str | bool | int | float | Sequence[str] | Sequence[int]

TRACE_BYTES = 25
"""Trace id (16), span id (8), flags (1): how a task carries its parent."""
SAMPLED = 1
"""The one flag of W3C trace context that we read."""
MAX_LINKS = 128
"""Links of one span, as in OpenTelemetry's own default."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class SpanRef:
    """A span's name in the world."""

    trace_id: int
    """128 bits, never zero."""
    span_id: int
    """64 bits, never zero."""
    flags: int = SAMPLED

    def pack(self) -> bytes:
        """As a task carries it."""
        return self.trace_id.to_bytes(16, "big") + self.span_id.to_bytes(8, "big") + bytes((self.flags,))

    def child(self, span_id: int) -> SpanRef:
        """A span of the same trace."""
        return SpanRef(self.trace_id, span_id, self.flags)


def unpack(trace: bytes) -> SpanRef | None:
    """What a task carries. None: not traced, or not a trace context."""
    if len(trace) != TRACE_BYTES:
        return None
    trace_id, span_id = int.from_bytes(trace[:16], "big"), int.from_bytes(trace[16:24], "big")
    return SpanRef(trace_id, span_id, trace[24]) if trace_id and span_id else None


def parse_traceparent(text: str) -> SpanRef | None:
    """A client's W3C `traceparent`. None: absent, or one that the standard tells us to ignore."""
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    return SpanRef(trace_id, span_id, int(match[4], 16) & SAMPLED) if trace_id and span_id else None


def new_trace_id() -> int:
    """Random, never zero. From the system, so that processes started alike do not draw alike."""
    return int.from_bytes(os.urandom(16), "big") or 1


def new_span_ids(count: int) -> list[int]:
    """Random, never zero."""
    drawn = os.urandom(8 * count)
    return [int.from_bytes(drawn[at : at + 8], "big") or 1 for at in range(0, 8 * count, 8)]


def derived_span_id(trace: bytes, begun: int) -> int:
    """The id of a worker's span below a task's parent. Derived, because the steps that a task takes part in name the span
    before it is over, and a task that is never finished must not leave anything behind."""
    return int.from_bytes(hashlib.blake2b(trace + begun.to_bytes(8, "big"), digest_size=8).digest(), "big") or 1


def wall_offset_ns() -> int:
    """Add it to a stamp of `now_ns` to get wall-clock nanoseconds."""
    return time.time_ns() - now_ns()


class SpanSink(Protocol):
    """Where spans go. Absent (None) where tracing is off, so that nothing is built for it."""

    def sampled(self, name: str, trace_id: int, parent: SpanRef | None) -> bool:
        """Whether a span that begins here is recorded: asked once per request, and once per task at a worker. Does not
        mutate."""

    def write(
        self,
        name: str,
        ref: SpanRef,
        parent: SpanRef | None,
        kind: Kind,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Value],
        links: Sequence[SpanRef] = (),
        error: str | None = None,
    ) -> None:
        """Takes a span that is over. Never blocks; drops it where the queue is full. `error`: None, it went well."""

    def close(self, timeout_s: float = 2.0) -> None:
        """Sends what waits and ends, within the time, whatever the collector does. Blocks."""
