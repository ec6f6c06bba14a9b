"""What the coordinator of a service on paper sends to its workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specwire.law.tasks import SessionId


@dataclass(slots=True, eq=False)
class Job:
    """A task at a worker."""

    session: SessionId
    owner: Any
    """What the coordinator knows it by. Workers do not look."""
    reads: int
    """Tokens of text that are to be read first."""
    wants: int
    """Target: rows to judge, in one step. Draft: tokens to propose, one a step."""
    group: int = 0
    written_us: float = 0.0
    arrived_us: float = 0.0
    mark_us: float = 0.0
    """Since when it waits for a step."""
    away_us: float = 0.0
    """From its session's last answer until it came."""
    queue_us: float = 0.0
    compute_us: float = 0.0
    gone: bool = False
    """Done, overtaken or closed: it leaves after the step that it is in."""
    bulk: int = field(init=False)
    """Of `reads`, what is left."""
    final: int = field(init=False)
    """The same of `wants`."""

    def __post_init__(self) -> None:
        self.bulk, self.final = self.reads, self.wants


@dataclass(slots=True)
class Frame:
    """What one turn of the coordinator sends to one worker."""

    jobs: list[Job] = field(default_factory=list)
    closes: list[SessionId] = field(default_factory=list)
    due: tuple[int, float, int] = (0, 0.0, 0)
    """Sessions that draft for this target, within how many microseconds they are to come, and their group."""
