"""What people see: tables and lines made of the service's own numbers. Pure: messages in, rich renderables out.

Rates are formed here and nowhere else: acceptance rate = accepted / drafted; tokens per round = (accepted + rounds) / rounds, the
correction or bonus of each round counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from deploy.state import Running
    from specwire.client import Final
    from specwire.v1 import inference_pb2 as pb

_TIMING_PARTS: tuple[tuple[str, str], ...] = (
    ("admission", "admission_us"),
    ("tokenize, template", "tokenize_us"),
    ("draft compute", "draft_compute_us"),
    ("draft queue", "draft_queue_us"),
    ("draft parse, answer", "draft_overhead_us"),
    ("draft transfer", "draft_transfer_us"),
    ("target compute", "target_compute_us"),
    ("target queue", "target_queue_us"),
    ("target parse, answer", "target_overhead_us"),
    ("target transfer", "target_transfer_us"),
    ("coordinator", "coordinator_us"),
    ("coordinator waiting", "wait_us"),
    ("slow client", "client_us"),
    ("lost worker", "recovery_us"),
    ("unattributed", "unattributed_us"),
)


TELLING_US = 100_000
"""Time lost from which on a summary tells of it."""


def console(stderr: bool = False) -> Console:
    """Where to print. A pipe has no width, so it gets one in which no table is cut."""
    found = Console(stderr=stderr, highlight=False, markup=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=140)


def _table(title: str = "") -> Table:
    return Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def ratio(part: float, whole: float) -> str:
    """A rate, or a dash where there is nothing to divide by."""
    return f"{part / whole:.2f}" if whole else "-"


def counted(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def milliseconds(us: float) -> str:
    """Microseconds as milliseconds, in three figures or so."""
    ms = us / 1000
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"


def summary(final: Final) -> str:
    """One line about one answer."""
    usage, timing, spec = final.usage, final.timing, final.speculation
    seconds = timing.total_us / 1e6
    parts = [
        f"{counted(usage.completion_tokens, 'token')} in {seconds:.2f} s ({ratio(usage.completion_tokens, seconds)} per s, "
        f"first after {timing.time_to_first_token_us / 1e6:.2f} s)",
        speculation(spec),
        f"{usage.prompt_tokens} prompt tokens" + (f", {usage.cached_tokens} cached" if usage.cached_tokens else ""),
        f"finish {final.finish_reason}" + (f" at {final.stop!r}" if final.stop is not None else ""),
        f"seed {final.seed}",
    ]
    if timing.recovery_us >= TELLING_US:
        parts.append(f"{timing.recovery_us / 1e6:.1f} s for lost workers and late drafts")
    if final.retries:
        parts.append(f"{final.retries} repeats after a lost coordinator")
    return "; ".join(parts)


def speculation(spec: pb.SpeculationStats) -> str:
    """What guessing brought."""
    if not spec.drafted:
        return f"plain decoding, {counted(spec.rounds, 'round')}"
    sources = [
        f"{name} {accepted}/{drafted}"
        for name, accepted, drafted in (
            ("draft", spec.accepted_by_model, spec.drafted_by_model),
            ("n-gram", spec.accepted_by_ngram, spec.drafted_by_ngram),
        )
        if drafted
    ]
    fallbacks = f", {counted(spec.fallbacks, 'fallback')}" if spec.fallbacks else ""
    return (
        f"{counted(spec.rounds, 'round')} of {ratio(spec.accepted + spec.rounds, spec.rounds)} tokens, "
        f"acceptance {ratio(spec.accepted, spec.drafted)} ({', '.join(sources)}){fallbacks}"
    )


def timing(message: pb.Timing, rounds: int) -> Table:
    """A request's critical path. The parts add up to the total; what ran beside it is named below the line."""
    table = _table("Where the time went")
    for heading in ("part", "ms", "share", "ms per round"):
        table.add_column(heading, justify="left" if heading == "part" else "right")

    def row(name: str, us: int, style: str = "") -> None:
        per_round = f"{us / 1000 / rounds:.2f}" if rounds else "-"
        share = f"{100 * us / message.total_us:.1f} %" if message.total_us else "-"
        table.add_row(name, milliseconds(us), share, per_round, style=style)

    for name, field in _TIMING_PARTS:
        us = getattr(message, field)
        if us or field == "unattributed_us":
            row(name, us)
    table.add_section()
    row("total", message.total_us, "bold")
    if message.hidden_us:
        row("hidden (draft beside target)", message.hidden_us, "dim")
    table.add_section()
    table.add_row("first token after", milliseconds(message.time_to_first_token_us), "", "")
    table.add_row(
        "bytes to and from workers", f"{message.wire_bytes:,}", "", f"{message.wire_bytes / max(1, rounds):.0f} B"
    )
    return table


def rounds(listed: Sequence[pb.Round]) -> Table:
    """One line per round, milliseconds."""
    table = _table("Rounds (ms)")
    for heading in ("#", "source", "drafted", "accepted", "out", "total", "draft", "link", "other"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for heading in ("target", "link", "other", "coord.", "rows", "sessions"):
        table.add_column(heading, justify="right")
    for each in listed:
        times = (
            each.total_us,
            each.draft_compute_us,
            each.draft_transfer_us,
            each.draft_other_us,
            each.target_compute_us,
            each.target_transfer_us,
            each.target_other_us,
            each.coordinator_us,
        )
        table.add_row(
            str(each.index),
            each.source or "none",
            str(each.drafted),
            str(each.accepted),
            str(each.committed),
            *(milliseconds(us) for us in times),
            str(each.step_rows),
            str(each.step_sessions),
        )
    return table


def status(stats: pb.GetStatsResponse, endpoint: str, running: Running | None = None) -> RenderableType:
    """The service at a glance."""
    word = "draining" if stats.draining else "ready" if stats.ready else "not ready"
    head = Text.assemble(
        ("Specwire ", "bold"),
        f"{stats.version} at {endpoint}: ",
        (word, "bold green" if word == "ready" else "bold yellow"),
        f", up {duration(stats.uptime_s)}" + (f", {how_started(running)}" if running else ""),
    )
    requests = (
        f"requests: {stats.running}/{stats.max_running} running, {stats.waiting}/{stats.max_waiting} waiting; since start "
        f"{stats.finished} finished, {stats.failed} failed, {stats.cancelled} cancelled, {stats.refused} refused"
    )
    recent = f"; recently {stats.recent_acceptance:.2f}" if stats.HasField("recent_acceptance") else ""
    tokens = f"tokens: {stats.generated_tokens:,} generated; {speculation(stats.speculation)}{recent}"
    asked = f" ({stats.schedule_setting} asked for)" if stats.schedule_setting not in ("", stats.schedule) else ""
    block = f"block length for a new request: {stats.num_speculative_tokens}; schedule now: {stats.schedule}{asked}"
    lines = [head, Text(requests), Text(tokens), Text(block)]
    told = (("replays", stats.replays), ("fallbacks", stats.fallbacks), ("drafted ahead", stats.draft_guesses))
    for name, counts in told:
        if counts:
            lines.append(Text(f"{name}: " + ", ".join(f"{cause} {count}" for cause, count in sorted(counts.items()))))
    if stats.stale_answers:
        lines.append(Text(f"answers dropped as stale: {stats.stale_answers}"))
    return Group(*lines, workers(stats.workers))


def workers(listed: Iterable[pb.WorkerStats]) -> Table:
    """Who computes what, where. `step` is its compute, `link` the round trip of an echo."""
    table = _table()
    for heading in ("worker", "state", "model", "device", "sessions", "step ms", "link ms", "process", "address"):
        numeric = heading in {"sessions", "step ms", "link ms"}
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=heading not in {"state", "model"})
    for each in listed:
        info = each.info
        threads = f" x{info.threads}" if info.threads else ""
        state = Text(each.state, style="green" if each.state == "ready" else "yellow")
        table.add_row(
            each.name,
            state + (f": {each.reason}" if each.reason else ""),
            info.model.rstrip("/").rpartition("/")[2],
            f"{info.device}{threads} {info.precision}",
            f"{each.sessions}/{info.max_sessions}",
            milliseconds(each.compute_us) if each.compute_us else "-",
            milliseconds(each.round_trip_us) if each.round_trip_us else "-",
            info.node,
            each.address,
        )
    return table


def actors(report: Sequence[Mapping[str, Any]]) -> Table:
    """What Ray says of each actor."""
    table = _table("Actors")
    for heading in ("actor", "state", "node", "process", "address", "GPUs"):
        table.add_column(heading)
    for each in report:
        table.add_row(*(str(each.get(key, "-")) for key in ("name", "state", "node", "pid", "address", "gpus")))
    return table


def plain(message: Message) -> dict[str, Any]:
    """A message as plain values, named as in its proto file. What can be absent and is absent is left out.

    Not by protobuf's own JSON, which writes 64-bit integers as text."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            continue
        if field.enum_type is not None:
            found[field.name] = field.enum_type.values_by_number[value].name
        elif isinstance(value, Mapping):
            found[field.name] = dict(value)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            found[field.name] = [plain(each) if field.message_type is not None else each for each in value]
        else:
            found[field.name] = plain(value) if field.message_type is not None else value
    return found


def how_started(running: Running) -> str:
    """By what means it runs."""
    if running.ray is not None:
        return f"Ray at {running.ray.address}" + (" (ours)" if running.ray.started else "")
    restarts = sum(process.restarts for process in running.processes)
    kept = any(process.name == "supervisor" and process.alive for process in running.processes)
    return (
        "plain processes"
        + (f", {counted(restarts, 'restart')}" if restarts else "")
        + ("" if kept else ", NOT supervised any more")
    )
