"""A worker makes itself known over real gRPC, to a coordinator that forgets, refuses and goes away. Time is an argument."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from specwire.law.errors import InvalidArgument, VersionMismatch
from specwire.v1 import fleet_pb2, fleet_pb2_grpc
from specwire.wire import rpc
from specwire.wire.codec import PROTOCOL_VERSION
from specwire.wire.info import WorkerInfo, decode_worker_info
from specwire.worker.registration import BACKOFF_S, REFUSED_S, Registration

INFO = WorkerInfo("draft", "m", "a", 9, "", "", 9, 1, 1, 1, "cpu", "float32", "0", PROTOCOL_VERSION, 77, "here")


class Fleet(fleet_pb2_grpc.FleetServicer):
    """A coordinator that plays a script: one entry an answer, and afterwards it knows everybody."""

    def __init__(self, script: list[Any]) -> None:
        self.script = script
        self.heard: list[str] = []
        self.registered: Any = None

    def next(self) -> Any:
        said = self.script.pop(0) if self.script else None
        if isinstance(said, Exception):
            raise said
        return said

    @rpc.mapped
    async def Register(self, request: Any, context: rpc.Context) -> Any:
        self.heard.append("register")
        self.registered = request
        self.next()
        return fleet_pb2.RegisterResponse(incarnation=5, heartbeat_ms=2000)

    @rpc.mapped
    async def Heartbeat(self, request: Any, context: rpc.Context) -> Any:
        self.heard.append("heartbeat")
        return fleet_pb2.HeartbeatResponse(unknown=self.next() == "unknown")


class Sleeper:
    """Counts what was waited for, and stops the world after so many waits."""

    def __init__(self, waits: int) -> None:
        self.slept: list[float] = []
        self.over = asyncio.Event()
        self._waits = waits

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) == self._waits:
            self.over.set()
            await asyncio.Event().wait()


async def live(fleet: Fleet | None, waits: int, trouble: Callable[[], str] = lambda: "") -> tuple[list[float], Any]:
    """Runs a registration until it has waited so often. `fleet` None: nobody listens."""
    server = rpc.make_server()
    if fleet is not None:
        fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    port = rpc.bind(server, "127.0.0.1:0", False)
    if fleet is not None:
        await server.start()
    sleeper = Sleeper(waits)
    registration = Registration(f"127.0.0.1:{port}", "draft-0", "here:1", INFO, trouble, sleeper, lambda: 1.0)
    running = asyncio.create_task(registration.run())
    await asyncio.wait_for(sleeper.over.wait(), 30)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)
    return sleeper.slept, registration


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test."""

    def run(caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "specwire.worker.registration"):
            asyncio.run(test(caplog))

    run.__doc__ = test.__doc__
    return run


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, after the coordinator's address."""
    return [record.getMessage().partition(": ")[2] for record in caplog.records if "draft-0" in record.getMessage()]


@on_a_loop
async def test_registers_then_lives(caplog: pytest.LogCaptureFixture) -> None:
    """Everything it is, then heartbeats at the coordinator's pace; one line in the log."""
    fleet = Fleet([])
    slept, _ = await live(fleet, 4)

    assert fleet.heard == ["register", "heartbeat", "heartbeat", "heartbeat"]
    assert slept == [2.0, 2.0, 2.0, 2.0]
    assert (fleet.registered.name, fleet.registered.address) == ("draft-0", "here:1")
    assert decode_worker_info(fleet.registered.info) == INFO
    assert said(caplog) == ["registered"]


@on_a_loop
async def test_a_coordinator_that_forgot_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    """After its restart."""
    fleet = Fleet([None, "unknown", None])
    await live(fleet, 5)

    assert fleet.heard == ["register", "heartbeat", "register", "heartbeat", "heartbeat"][: len(fleet.heard)]
    assert said(caplog) == ["registered", "unknown to the coordinator, registering again", "registered"]


@on_a_loop
async def test_a_coordinator_that_is_away_is_tried_later_and_later(caplog: pytest.LogCaptureFixture) -> None:
    """With one line in the log, and never without a wait."""
    slept, registration = await live(None, 8)

    assert slept == [*BACKOFF_S, BACKOFF_S[-1], BACKOFF_S[-1]]
    assert len(set(said(caplog))) == len(said(caplog))
    assert registration.state.startswith("away: unavailable")


@pytest.mark.parametrize(
    "error",
    [VersionMismatch("draft-0 speaks 1, this coordinator 2"), InvalidArgument("name", "draft-0", "unused")],
)
def test_a_refusal_is_said_once_and_asked_again_slowly(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Only people can change it, but they may."""
    fleet = Fleet([error, error, error, None])
    slept, registration = asyncio.run(live(fleet, 4))

    assert slept == [REFUSED_S] * 3 + [2.0]
    assert len([line for line in said(caplog) if line.startswith("refused")]) == 1
    assert str(error) in said(caplog)[0]
    assert registration.state == "registered"


@on_a_loop
async def test_a_worker_that_is_unwell_stays_silent(caplog: pytest.LogCaptureFixture) -> None:
    """No heartbeat for a worker of no use; when it is well again it registers."""
    troubles = iter(["", "", "stuck", "stuck", ""])
    fleet = Fleet([])
    await live(fleet, 6, lambda: next(troubles, ""))

    assert fleet.heard[:3] == ["register", "heartbeat", "register"]
    assert said(caplog) == ["registered", "silent: stuck", "registered"]
