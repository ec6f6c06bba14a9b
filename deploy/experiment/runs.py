"""Runs of a simulated service: one, and one against the best that could have been fixed, known in hindsight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.schedule import Choice
from deploy.experiment.meter import Results
from deploy.experiment.service import Service
from deploy.experiment.world import World
from specwire.law.errors import InvalidArgument

ROUNDS, WARM_UP = 3000, 1500
"""Rounds of all sessions together, measured and before ..."""
LEAST_ROUNDS, LEAST_WARM_UP = 20, 60
"""... and of each session at least: the controller thinks about the schedule every sixteen."""
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8)
_SCHEDULES: tuple[tuple[Choice, int], ...] = (("synchronous", 1), ("run_ahead", 1), ("rotation", 2), ("rotation", 3))


@dataclass(frozen=True, slots=True)
class Fixed:
    """A service that always does the same, and what came of it."""

    k: int
    schedule: Choice
    groups: int
    results: Results

    def __str__(self) -> str:
        if self.k == 0:
            return "plain"
        return f"k={self.k} {self.schedule.replace('_', '-')}{f' of {self.groups}' if self.groups > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Compared:
    """The controller against the best that can be fixed, known in hindsight."""

    auto: Results
    best: Fixed
    fixed: tuple[Fixed, ...]

    @property
    def ratio(self) -> float:
        """Tokens per second over those of the best."""
        return self.auto.tokens_per_s / self.best.results.tokens_per_s


def simulate(world: World, *, seed: int = 0, rounds: int | None = None, warm_up: int | None = None) -> Results:
    """Runs a service. `rounds`: of each session, on average, that are measured; `warm_up`: that come before."""
    if rounds is None:
        rounds = max(LEAST_ROUNDS, ROUNDS // world.sessions)
    if warm_up is None:
        warm_up = max(LEAST_WARM_UP, WARM_UP // world.sessions)
    if rounds < 1:
        raise InvalidArgument("rounds", rounds, "at least 1")
    if warm_up < 0:
        raise InvalidArgument("warm_up", warm_up, "at least 0")
    return Service(world, seed).run(rounds, warm_up)


def fix(world: World, k: int, schedule: Choice, groups: int = 1, **run: Any) -> Fixed:
    """The same world, always doing the same."""
    there = dataclasses.replace(world, k=k, schedule=schedule, groups=max(1, groups), longest=max(world.longest, k))
    return Fixed(k, schedule, groups, simulate(there, **run))


def best_fixed(world: World, lengths: Sequence[int] = LENGTHS, **run: Any) -> tuple[tuple[Fixed, ...], Fixed]:
    """Every block length under the world's schedule, or, where that is `auto`, under each there is; and the one with most tokens
    per second. Plain decoding is always among them. `run`: see `simulate`."""
    tried = [fix(world, 0, "synchronous", **run)]
    for k in sorted({k for k in lengths if 0 < k <= world.longest}):
        for schedule, groups in _SCHEDULES if world.schedule == "auto" else ((world.schedule, world.groups),):
            if schedule != "rotation" or 1 < groups <= world.sessions:
                tried.append(fix(world, k, schedule, groups if schedule == "rotation" else 1, **run))
    return tuple(tried), max(tried, key=lambda each: each.results.tokens_per_s)


def compare(world: World, lengths: Sequence[int] = LENGTHS, **run: Any) -> Compared:
    """The world as it is, its controller choosing, against the best that could have been fixed. `run`: see `simulate`."""
    fixed, best = best_fixed(world, lengths, **run)
    return Compared(simulate(world, **run), best, fixed)
