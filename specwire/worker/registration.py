"""How a worker makes itself known: registers with the coordinator, says that it lives, and registers again when it must.

Law. Every attempt ends in waiting, so nothing here spins. A coordinator that is away is tried again soon, later and later; one
that refuses this worker is asked again slowly, since only people can change that. What went wrong is logged once per change.
A worker that is not well stays silent, so that its silence tells.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from specwire.v1 import fleet_pb2, fleet_pb2_grpc
from specwire.wire.info import WorkerInfo, encode_worker_info
from specwire.wire.rpc import jitter, open_channel

log = logging.getLogger(__name__)

BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
REFUSED_S = 10.0
CALL_S = 5.0
REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
LEAST_HEARTBEAT_S = 0.05


class Registration:
    """One worker's standing with one coordinator. `run` until cancelled."""

    def __init__(
        self,
        coordinator: str,
        name: str,
        address: str,
        info: WorkerInfo,
        trouble: Callable[[], str],
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        jitter: Callable[[], float] = jitter,
    ) -> None:
        self.state = "not registered"
        """For people and logs; changes are logged."""
        self._coordinator = coordinator
        self._name = name
        self._address = address
        self._info = info
        self._trouble = trouble
        self._sleep = sleep
        self._jitter = jitter

    def __repr__(self) -> str:
        return f"Registration({self._name} at {self._coordinator}: {self.state})"

    async def run(self) -> None:
        """Never returns."""
        channel = open_channel(self._coordinator)
        stub: Any = fleet_pb2_grpc.FleetStub(channel)
        attempt = 0
        try:
            while True:
                pause = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
                attempt += 1
                try:
                    if trouble := self._trouble():
                        self._say(f"silent: {trouble}")
                    else:
                        heartbeat_s = await self._register(stub)
                        attempt = 0
                        await self._heartbeats(stub, heartbeat_s)
                        pause = BACKOFF_S[0]
                except grpc.aio.AioRpcError as error:
                    refused = error.code() in REFUSALS
                    self._say(f"{'refused' if refused else 'away'}: {error.code().name.lower()}: {error.details()}")
                    if refused:
                        pause = REFUSED_S
                await self._sleep(pause * self._jitter())
        finally:
            await channel.close()

    async def _register(self, stub: Any) -> float:
        request = fleet_pb2.RegisterRequest(info=encode_worker_info(self._info), address=self._address, name=self._name)
        response = await stub.Register(request, timeout=CALL_S)
        self._say("registered")
        return max(LEAST_HEARTBEAT_S, float(response.heartbeat_ms) / 1e3)

    async def _heartbeats(self, stub: Any, heartbeat_s: float) -> None:
        """Until the coordinator no longer knows the worker, or cannot be reached (raises), or the worker is unwell."""
        request = fleet_pb2.HeartbeatRequest(name=self._name, incarnation=self._info.incarnation)
        while True:
            await self._sleep(heartbeat_s * self._jitter())
            if trouble := self._trouble():
                self._say(f"silent: {trouble}")
                return
            response = await stub.Heartbeat(request, timeout=CALL_S)
            if response.unknown:
                self._say("unknown to the coordinator, registering again")
                return

    def _say(self, state: str) -> None:
        if state != self.state:
            self.state = state
            level = logging.INFO if state == "registered" else logging.WARNING
            log.log(level, "%s at coordinator %s: %s", self._name, self._coordinator, state)
