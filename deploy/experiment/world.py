"""A service on paper: what is true of its models, links and load. The controller sees of it what a real one would.

Times are microseconds. A value refuses to be built wrong, naming field, value and limit.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.schedule import MAX_GROUPS, Choice
from specwire.law.errors import InvalidArgument
from specwire.worker.profile import ROWS
from specwire.worker.shares import check_budget

CHOICES = ("auto", "synchronous", "rotation", "run_ahead")
MAX_SESSIONS = 100_000
"""More would take hours."""
Acceptance = float | tuple[float, ...] | Callable[[int], float]
"""One chance for every position of a block, one by position (the last one goes on), or a function of the position, from 0."""


def _check(field: str, value: float, least: float, most: float = math.inf) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        limit = f"in [{least:g}, {most:.10g}]" if most < math.inf else f"finite and at least {least:g}"
        raise InvalidArgument(field, value, limit)


@dataclass(frozen=True, slots=True)
class Steps:
    """How long an engine's step takes by its rows (a target) or its sessions (a draft): linear between points and beyond them."""

    points: tuple[tuple[int, float], ...]
    """(rows, microseconds), rising in rows and never falling in time. A single one: always so long."""

    def __post_init__(self) -> None:
        if not self.points:
            raise InvalidArgument("points", self.points, "one point or more")
        for rows, us in self.points:
            _check("points", rows, 1)
            _check("points", us, 0)
        for (x0, y0), (x1, y1) in itertools.pairwise(self.points):
            if x1 <= x0 or y1 < y0:
                raise InvalidArgument("points", self.points, "rising in rows and never falling in time")

    @classmethod
    def line(cls, us: float, row_us: float = 0.0) -> Steps:
        """A first row of `us`, and each further one of `row_us`."""
        return cls(((1, us), (2, us + row_us)))

    def at(self, rows: int) -> float:
        """A step of so many."""
        points = self.points
        if len(points) == 1:
            return points[0][1]
        right = min(max(1, bisect_right(points, (rows, math.inf))), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return max(0.0, y0 + (y1 - y0) * (rows - x0) / (x1 - x0))


@dataclass(frozen=True, slots=True)
class World:
    """What is true, and what the service is told to do."""

    target: Steps = Steps(((1, 20_000.0), (2, 20_500.0)))
    """The target's step by rows that are judged."""
    draft: Steps = Steps(((1, 2_000.0),))
    """The draft's step by sessions that grow in it."""
    draft_link_us: float = 0.0
    """r_d: from coordinator to draft and back."""
    target_link_us: float = 0.0
    """r_t: from coordinator to target and back."""
    coordinator_us: float = 0.0
    """The coordinator's work for a frame that it receives. It does one at a time."""
    coordinator_answer_us: float = 0.0
    """The same for each answer of the frame."""
    acceptance: Acceptance = 0.7
    """Chance that the token at a position of a block stands, given that all before it do."""
    jitter: float = 0.0
    """Steps and ways vary by this part of their time, up or down."""
    sessions: int = 1
    """Sessions at work. Closed loop: each asks again at once when its answer ends. Open loop: at most so many, others wait."""
    arrivals_per_s: float = 0.0
    """Requests that come in a second, at random (Poisson). 0: a closed loop."""
    answer_tokens: int = 256
    """Tokens of an answer."""
    prompt_tokens: int = 1
    target_read_us: float = 0.0
    """The target's time for a token of text that it only reads, in addition to the step."""
    draft_read_us: float = 0.0
    """The draft's."""
    longest: int = 8
    """Longest block."""
    k: int | None = None
    """Always so many tokens a block (0: plain decoding); None: the controller chooses."""
    schedule: Choice = "auto"
    groups: int = 2
    """Of a rotation that `schedule` asks for."""
    stretch: float = 1.0
    """Steps take so many times longer while draft and target work beside each other, on shared cores. 1: devices of their own."""
    targets: int = 1
    """A session stays with one, the one with the fewest sessions when it began."""
    drafts: int = 1
    """The same."""
    token_budget: int = 8192
    """Rows of one step."""
    step_sessions: int = 512
    """Sessions of one step."""
    linger: bool = True
    """Whether a target waits a moment for sessions that are due."""
    profiled: bool = True
    """Whether target and draft were measured at start, and the controller told."""

    def __post_init__(self) -> None:
        for field in ("draft_link_us", "target_link_us", "coordinator_us", "coordinator_answer_us", "arrivals_per_s"):
            _check(field, getattr(self, field), 0)
        for field in ("target_read_us", "draft_read_us"):
            _check(field, getattr(self, field), 0)
        for field in ("answer_tokens", "prompt_tokens", "targets", "drafts"):
            _check(field, getattr(self, field), 1)
        _check("sessions", self.sessions, 1, MAX_SESSIONS)
        _check("jitter", self.jitter, 0, 0.99)
        _check("stretch", self.stretch, 1)
        _check("longest", self.longest, 0, 64)
        _check("groups", self.groups, 1, MAX_GROUPS)
        _check("step_sessions", self.step_sessions, 2)
        if self.k is not None:
            _check("k", self.k, 0, self.longest)
        if self.schedule not in CHOICES:
            raise InvalidArgument("schedule", self.schedule, f"one of {', '.join(CHOICES)}")
        check_budget(self.token_budget, self.longest + 1)
        if self.target.at(1) <= 0.0:
            raise InvalidArgument("target", self.target.points, "longer than nothing for a single row")
        if self.acceptance == ():
            raise InvalidArgument("acceptance", self.acceptance, "one chance or more")
        for position in range(self.longest + 1):
            _check("acceptance", self.stands(position), 0, 1)

    def stands(self, position: int) -> float:
        """Chance of the token at this position of a block, given that all before it stand."""
        if callable(self.acceptance):
            return self.acceptance(position)
        if isinstance(self.acceptance, Sequence):
            return self.acceptance[min(position, len(self.acceptance) - 1)]
        return self.acceptance

    def tokens(self, k: int) -> float:
        """Expected tokens of a round with a block of `k`: E of design section 5."""
        return sum(math.prod(self.stands(n) for n in range(stand)) for stand in range(k + 1))

    def profiles(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What target and draft say of themselves at start."""
        target, draft = (tuple(max(1, round(steps.at(rows))) for rows in ROWS) for steps in (self.target, self.draft))
        return target, draft
