"""How many share a step, as a round's plan sees it: the sessions of its own target, whatever others there are."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from typing import Any

import pytest

from coordinator.clock import RequestClock
from coordinator.config import CoordinatorConfig
from coordinator.curves import ServiceCurves
from coordinator.driver import Driver
from coordinator.observe import NullObserver
from coordinator.schedule import SYNCHRONOUS, Schedule, Scheduler
from tests.unit.coordinator.test_fleet import info
from tests.unit.coordinator.test_session import SPEC


class Asked(Scheduler):
    """Keeps what it was asked: sessions, and the longest block."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[tuple[int, int]] = []

    def round(self, curves: ServiceCurves, sessions: int, longest: int, able: bool = True) -> Schedule:
        """See Scheduler."""
        self.questions.append((sessions, longest))
        return SYNCHRONOUS


def service(targets: int) -> tuple[Driver, Asked]:
    """One whose workers are ready. They have no links, so nothing leaves."""
    made = Driver(CoordinatorConfig(), 1, None, NullObserver())
    for name, role in (("draft-0", "draft"), *((f"target-{number}", "target") for number in range(targets))):
        worker, _ = made.fleet.register(name, info(role), f"{name}:1", 0.0)
        made.fleet.connected(worker)
    asked = Asked()
    made.rounds.schedulers = defaultdict(lambda: asked)
    return made, asked


def seen(targets: int, requests: int, **spec: Any) -> tuple[list[tuple[int, int]], list[int]]:
    """What the scheduler was asked, and how many sessions were thought to share a step, as the first rounds of requests began."""

    async def works() -> tuple[list[tuple[int, int]], list[int]]:
        made, asked = service(targets)
        shares = []
        for _ in range(requests):
            made.open(dataclasses.replace(SPEC, **spec), RequestClock(), None)
            shares.append(made.curves.sessions)
        return asked.questions, shares

    return asyncio.run(works())


@pytest.mark.parametrize(("targets", "expected"), [(1, [1, 2, 3, 4, 5]), (2, [1, 1, 2, 2, 3]), (4, [1, 1, 1, 1, 2])])
def test_those_of_the_same_target_share_its_steps(targets: int, expected: list[int]) -> None:
    """For the plan, and for the choice of a schedule."""
    asked, shares = seen(targets, 5)

    assert expected == shares
    assert [(sessions, 8) for sessions in expected] == asked


@pytest.mark.parametrize(("max_tokens", "max_block", "expected"), [(3, 8, 8), (100, 8, 8), (100, 5, 5)])
def test_schedules_are_compared_for_requests_that_have_long_to_go(
    max_tokens: int, max_block: int, expected: int
) -> None:
    """What one leaves to be drafted at its end says nothing of the others."""
    asked, _ = seen(1, 1, max_tokens=max_tokens, max_block=max_block)

    assert [(1, expected)] == asked


@pytest.mark.parametrize(("targets", "sessions"), [(0, 6), (1, 6), (2, 3), (4, 2)])
def test_a_typical_block_is_one_of_those_who_share_a_target(
    targets: int, sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six that run, as many as are at one, rounded up; all of them where none is ready."""

    async def works() -> None:
        made, _ = service(targets)
        for session in range(6):
            made.admission.enter(session)
        monkeypatch.setattr(made.curves, "present_length", lambda *arguments: arguments)

        assert (sessions, 8) == made.typical_block()

    asyncio.run(works())
