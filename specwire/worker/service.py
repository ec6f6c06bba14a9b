"""One worker as a server: engine, stream shell, health, registration and metrics, put together and taken apart in order.

Law. The port is bound before the model is loaded, so that a bad address is told at once; until the engine is ready health says
NOT_SERVING and calls are turned away. Stopping goes the other way round: health first, then no more tasks are taken, those at
hand are answered within `drain_s`, then streams end, then the engine thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

import specwire
from specwire.law.errors import InvalidArgument
from specwire.lm.load import build_model
from specwire.lm.port import LanguageModel
from specwire.settings import show_config
from specwire.spans import SpanSink
from specwire.telemetry import SERVICES, setup_tracing
from specwire.v1 import types_pb2
from specwire.wire import rpc
from specwire.wire.codec import PROTOCOL_VERSION, Kind
from specwire.wire.info import WorkerInfo, vocabulary_fingerprint
from specwire.worker.config import WorkerConfig
from specwire.worker.engine import Engine
from specwire.worker.metrics import WorkerMetrics
from specwire.worker.observe import Observer, Observers
from specwire.worker.profile import step_profile
from specwire.worker.registration import Registration
from specwire.worker.servicer import WorkerServicer
from specwire.worker.stepper import Stepper
from specwire.worker.tracing import WorkerTracing

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""The interpreter's: a busy engine thread must not look like a slow network."""
HEALTH_INTERVAL_S = 1.0
STREAM_GRACE_S = 0.5
"""For answers that were handed over to reach the other side."""


@dataclass(frozen=True, slots=True)
class Role:
    """What differs between the two services."""

    name: str
    """draft or target."""
    kind: Kind
    service: str
    """Full name of the gRPC service."""
    method: str
    """Its stream."""
    build: Callable[[Any, LanguageModel], Stepper]
    """(config, model) -> stepper. Called in the engine thread; imports torch late, so that a process binds before it loads."""


@dataclass(slots=True)
class _Built:
    stepper: Stepper
    profile: tuple[int, ...]


class WorkerServer:
    """A worker in this process. `start`, then `stop`; both once, on one event loop."""

    def __init__(self, role: Role, config: WorkerConfig, observers: tuple[Observer, ...] = ()) -> None:
        self.config = config
        self.incarnation = rpc.new_incarnation()
        self.address = ""
        """Where it can be reached; set by `start`."""
        self.metrics_port: int | None = None
        self._role = role
        self._metrics = WorkerMetrics()
        self._watchers: tuple[Observer, ...] = (self._metrics, *observers)
        self._spans: SpanSink | None = None
        self._profile: tuple[int, ...] = ()
        self._metrics_server: Any = None
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Binds, loads, measures, serves. Raises InvalidArgument on settings, and whatever loading raises."""
        config, role = self.config, self._role
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        loop = asyncio.get_running_loop()
        self._server = rpc.make_server()
        self._health = rpc.add_health_and_reflection(self._server, (role.service,))
        self._servicer = WorkerServicer(role.kind, role.name)
        self._server.add_generic_rpc_handlers((self._handlers(),))
        port = rpc.bind(self._server, config.bind, config.insecure)
        await rpc.set_health(self._health, (role.service,), False)
        await self._server.start()
        host, _ = rpc.split_address(config.bind)
        self.address = _advertised(config, host, port)
        log.info("%s loads its model; settings:\n%s", config.name, show_config(config))
        self._spans = setup_tracing(SERVICES[role.name], config.name)
        if self._spans is not None:
            self._watchers = (*self._watchers, WorkerTracing(role.name, config.name, self._spans))
        self._observers = Observers(self._watchers)
        self.engine = Engine(
            *(self._build, loop, self._observers, config.max_lease_s, config.idle_s, config.hang_s),
            prefix_caching=config.prefix_caching,
        )
        try:
            await self._open(host)
        except BaseException:
            await self._server.stop(0)
            self.engine.stop(0)
            raise

    async def _open(self, host: str) -> None:
        config = self.config
        stepper = await self.engine.wait_ready()
        self.info = self._describe(stepper)
        self._servicer.open(self.engine, self.info, stepper.spec.vocabulary)
        if config.metrics_port is not None:
            self.metrics_port, self._metrics_server = self._metrics.serve(host, config.metrics_port)
        await rpc.set_health(self._health, (self._role.service,), True)
        self._tasks.append(asyncio.create_task(self._watch_health(), name="health"))
        if config.coordinator is not None:
            self.registration = Registration(
                config.coordinator, config.name, self.address, self.info, self.engine.trouble
            )
            self._tasks.append(asyncio.create_task(self.registration.run(), name="registration"))

    def _build(self) -> Stepper:
        model = build_model(self.config.model)
        stepper = self._role.build(self.config, model)
        if self.config.profile:
            self._profile = step_profile(model, self.config.model.max_block + 1)
        return stepper

    def _handlers(self) -> grpc.GenericRpcHandler:
        servicer = self._servicer
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            self._role.service,
            {
                self._role.method: rpc.raw_stream_handler(servicer.stream),
                "Info": unary(
                    servicer.Info, types_pb2.InfoRequest.FromString, types_pb2.InfoResponse.SerializeToString
                ),
                "Vocabulary": unary(
                    servicer.Vocabulary,
                    types_pb2.VocabularyRequest.FromString,
                    types_pb2.VocabularyResponse.SerializeToString,
                ),
            },
        )

    def _describe(self, stepper: Stepper) -> WorkerInfo:
        spec, config = stepper.spec, self.config
        return WorkerInfo(
            role=self._role.name,
            model=spec.name,
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            vocab_fingerprint=vocabulary_fingerprint(spec.vocabulary),
            model_fingerprint=spec.fingerprint,
            max_context=spec.max_context,
            max_sessions=stepper.num_slots,
            max_block=config.model.max_block,
            max_append=config.max_append,
            device=spec.device,
            precision=spec.precision,
            version=specwire.__version__,
            protocol_version=PROTOCOL_VERSION,
            incarnation=self.incarnation,
            node=f"{rpc.host_name()}:{os.getpid()}",
            eos_token_ids=spec.eos_token_ids,
            default_sampling=spec.default_sampling,
            draft_vocab_size=len(spec.columns) if spec.columns is not None else 0,
            step_profile_us=self._profile,
            threads=spec.threads,
        )

    async def _watch_health(self) -> None:
        said = ""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            trouble = self.engine.trouble()
            if trouble != said and bool(trouble) != bool(said):
                log.warning("%s: %s", self.config.name, trouble or "well again")
                await rpc.set_health(self._health, (self._role.service,), not trouble)
            said = trouble

    async def stop(self) -> None:
        """Drains and ends. Returns when nothing of the worker runs any more, but for a step that hangs. The second call
        does nothing."""
        if self._stopped:
            return
        self._stopped = True
        await rpc.set_health(self._health, (self._role.service,), False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._servicer.stop_taking()
        idle = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.engine.when_idle(lambda: loop.call_soon_threadsafe(idle.set))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                await idle.wait()
        self._servicer.end_streams()
        await self._server.stop(STREAM_GRACE_S)
        if not await asyncio.to_thread(self.engine.stop, STREAM_GRACE_S):
            log.warning("%s: a step is still running and is left behind", self.config.name)
        if self._metrics_server is not None:
            await asyncio.to_thread(_close, self._metrics_server)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)


def _close(server: Any) -> None:
    server.shutdown()
    server.server_close()


def _advertised(config: WorkerConfig, host: str, port: int) -> str:
    """host:port for the coordinator: what was said, completed by what is bound."""
    said = config.advertise
    if said is None:
        said = rpc.host_name() if host in ("0.0.0.0", "::") else host
    else:
        with contextlib.suppress(InvalidArgument):
            rpc.split_address(said, "advertise")
            return said
    return f"[{said}]:{port}" if ":" in said else f"{said}:{port}"
