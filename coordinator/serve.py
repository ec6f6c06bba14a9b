"""Builds a coordinator and serves it until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from coordinator.config import CoordinatorConfig
from coordinator.driver import Driver
from coordinator.pairing import Pairing
from coordinator.servicer import FLEET, INFERENCE, FleetServicer, InferenceServicer, watch_health
from coordinator.text import Tokenizer
from coordinator.watching import Watching
from specwire.v1 import fleet_pb2_grpc, inference_pb2_grpc
from specwire.wire import rpc

log = logging.getLogger(__name__)


async def serve(config: CoordinatorConfig, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """Serves until `stop` is set, then drains: new requests are refused, running ones may finish within `drain_s`.

    `on_ready` gets host:port once the port is open. Raises InvalidArgument before anything is served."""
    tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer is not None else None
    host, _ = rpc.split_address(config.bind)
    server = rpc.make_server()
    port = rpc.bind(server, config.bind, config.insecure)
    watching = Watching(config, host)
    driver = Driver(config, rpc.new_incarnation(), tokenizer, watching.observers)
    watching.read(driver)
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(driver), server)
    fleet_pb2_grpc.add_FleetServicer_to_server(
        FleetServicer(driver, Pairing(driver.fleet, tokenizer, config.tokenizer or "none")), server
    )
    names = (INFERENCE, FLEET)
    health = rpc.add_health_and_reflection(server, names)
    await server.start()
    driver.start()
    watcher = asyncio.create_task(watch_health(driver, health, names), name="health")
    try:
        on_ready(f"{host}:{port}")
        await stop.wait()
        log.info("draining %d requests", len(driver.sessions))
        driver.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(config.drain_s):
                await driver.idle()
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        await driver.stop()
        await server.stop(grace=1.0)
        await asyncio.to_thread(watching.close)
