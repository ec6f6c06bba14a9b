"""A worker's life as a server: what it says while it loads, serves and ends; and the same inside another process."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.actor import DraftActor
from specwire.law.errors import InvalidArgument
from specwire.lm.load import build_model
from specwire.settings import build_config
from specwire.v1 import types_pb2
from specwire.wire import rpc
from specwire.worker import service
from specwire.worker.service import WorkerServer
from target_service.actor import TargetActor
from target_service.config import TargetConfig
from target_service.role import TARGET

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def make(**settings: Any) -> WorkerServer:
    """A target with a table model, not started."""
    return WorkerServer(TARGET, build_config(TargetConfig, {"profile": False, **settings}))


async def health(channel: grpc.aio.Channel, name: str = "specwire.v1.Target") -> int:
    """What standard health says."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)).status)


def test_not_serving_while_it_loads_then_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is open, health answers, calls are turned away."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(config: Any) -> Any:
        entered.set()
        assert go_on.wait(20)
        return build_model(config)

    monkeypatch.setattr(service, "build_model", slow)

    async def run() -> None:
        server = make()
        starting = asyncio.create_task(server.start())
        await asyncio.to_thread(entered.wait, 20)
        channel = rpc.open_channel(server.address)
        info = channel.unary_unary(
            "/specwire.v1.Target/Info", types_pb2.InfoRequest.SerializeToString, types_pb2.InfoResponse.FromString
        )
        loading = [await health(channel), await health(channel, "")]
        with pytest.raises(grpc.aio.AioRpcError, match="the target is loading its model"):
            await info(types_pb2.InfoRequest())
        go_on.set()
        await starting
        ready = [await health(channel), await health(channel, "")]
        assert (await info(types_pb2.InfoRequest())).info.model == "table"
        await channel.close()
        await server.stop()
        await server.stop()

        assert loading == [NOT_SERVING, NOT_SERVING]
        assert ready == [SERVING, SERVING]

    asyncio.run(run())


def test_a_start_that_fails_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader's own exception, no thread, no port."""

    def broken(config: Any) -> Any:
        raise MemoryError("too large")

    monkeypatch.setattr(service, "build_model", broken)

    async def run() -> None:
        server = make()
        with pytest.raises(MemoryError, match="too large"):
            await server.start()

        assert not server.engine.alive
        async with rpc.open_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health(channel)

    asyncio.run(run())


def test_a_port_that_is_taken_is_named() -> None:
    """Before any model is loaded."""

    async def run() -> None:
        first = make()
        await first.start()
        second = make(bind=first.address)
        with pytest.raises(InvalidArgument, match=f"bind: got '{first.address}', must be a free port"):
            await second.start()
        await first.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("bind", "advertise", "expected"),
    [
        ("127.0.0.1:0", None, "127.0.0.1:{port}"),
        ("127.0.0.1:0", "node-7", "node-7:{port}"),
        ("127.0.0.1:0", "node-7:99", "node-7:99"),
        ("[::1]:0", None, "[::1]:{port}"),
    ],
)
def test_the_address_that_is_advertised(bind: str, advertise: str | None, expected: str) -> None:
    """What was said, completed by what was bound."""
    host, _ = rpc.split_address(bind)
    config = build_config(TargetConfig, {"bind": bind, "advertise": advertise})

    assert service._advertised(config, host, 4242) == expected.format(port=4242)


@pytest.mark.parametrize("actor", [DraftActor, TargetActor])
def test_an_actors_constructor_ends_with_a_serving_worker(actor: Any) -> None:
    """Ray re-runs nothing else after a crash."""
    made = actor({"name": "it", "profile": False})
    ping = made.ping()

    async def serving() -> int:
        async with rpc.open_channel(made.address()) as channel:
            return await health(channel, "")

    assert asyncio.run(serving()) == SERVING
    made.stop()
    assert (ping["name"], ping["address"], ping["trouble"]) == ("it", made.address(), "")
    assert made.ping()["trouble"] == "stopped"


def test_an_actor_that_cannot_start_raises_in_its_constructor() -> None:
    """With the setting at fault."""
    with pytest.raises(InvalidArgument, match="device: got 'cuda', must be cpu for model 'table'"):
        TargetActor({"model": {"device": "cuda"}})
