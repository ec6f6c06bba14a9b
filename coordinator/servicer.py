"""What clients and workers call. A handler decodes, calls, encodes; errors rise as our own types and are mapped in one place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from coordinator.clients import WorkerLink
from coordinator.clock import RequestClock
from coordinator.driver import Driver
from coordinator.fleet import Standing, Worker
from coordinator.observe import Call
from coordinator.pairing import Pairing
from coordinator.requests import MAX_REQUEST_ID, check_request, encode_chat, encode_text
from coordinator.session import Session
from specwire import __version__
from specwire.law.errors import InvalidArgument, SpecwireError, Unavailable, VersionMismatch, VocabularyMismatch
from specwire.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2_grpc
from specwire.v1 import inference_pb2 as pb
from specwire.wire import rpc
from specwire.wire.codec import encode_law, encode_sampling
from specwire.wire.info import WorkerInfo, decode_worker_info, encode_worker_info

log = logging.getLogger(__name__)

INFERENCE = "specwire.v1.Inference"
FLEET = "specwire.v1.Fleet"


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """The clients' door."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._started = time.monotonic()

    def _target(self) -> WorkerInfo:
        worker = self._driver.fleet.pick("target")
        if worker is None:
            known = [f"{w.name} is {w.standing.value} ({w.reason})" for w in self._driver.fleet.of("target")]
            raise Unavailable(f"no target is ready: {'; '.join(known) or 'none has registered'}")
        return worker.info

    async def Generate(self, request: pb.GenerateRequest, context: rpc.Context) -> AsyncIterator[pb.GenerateResponse]:
        """One answer."""
        clock = RequestClock(keep_rounds=request.return_rounds)
        driver = self._driver
        call = _call(request, context, driver)
        session: Session | None = None
        error: BaseException | None = None
        try:
            left = context.time_remaining()
            give_up_at = None if left is None or left > 1e8 else time.monotonic() + left
            if driver.draining:
                raise Unavailable("the coordinator is draining")
            target = self._target()
            spec = await check_request(request, clock, driver.config, driver.tokenizer, target)
            session = driver.open(spec, clock, give_up_at, call)
            yield pb.GenerateResponse(
                started=pb.Started(
                    request_id=spec.request_id,
                    model=call.model,
                    seed=spec.seed,
                    prompt_tokens=len(spec.prompt),
                    sampling=encode_sampling(spec.sampling),
                    max_tokens=spec.max_tokens,
                    law=encode_law(spec.law),
                    ids_only=driver.tokenizer is None,
                )
            )
            async for response in self._events(session):
                yield response
            error = session.error
        except SpecwireError as refused:
            driver.books.outcomes["refused"] += 1
            driver.observer.refused(call, clock, refused)
            error = refused
        except Exception as bug:
            error = bug
        finally:
            if session is not None:
                driver.abandon(session)
        if error is not None:
            await rpc.abort(context, error)

    async def _events(self, session: Session) -> AsyncIterator[pb.GenerateResponse]:
        """What the session puts before its client, until it is over."""
        while True:
            while session.out:
                response = session.out.popleft()
                session.behind -= len(response.tokens.ids)
                yield response
            if session.over:
                return
            self._driver.resume(session)
            session.wake.clear()
            if not session.out and not session.over:
                await session.wake.wait()

    @rpc.mapped
    async def Tokenize(self, request: pb.TokenizeRequest, context: rpc.Context) -> pb.TokenizeResponse:
        """Text to ids."""
        tokenizer = self._driver.tokenizer
        if request.WhichOneof("input") == "chat":
            return pb.TokenizeResponse(ids=await encode_chat(tokenizer, request.chat))
        return pb.TokenizeResponse(ids=await encode_text(tokenizer, request.text, "text"))

    @rpc.mapped
    async def Detokenize(self, request: pb.DetokenizeRequest, context: rpc.Context) -> pb.DetokenizeResponse:
        """Ids to text."""
        tokenizer = self._driver.tokenizer
        if tokenizer is None:
            raise InvalidArgument("ids", len(request.ids), "absent: this service has no tokenizer")
        return pb.DetokenizeResponse(text=tokenizer.decode(request.ids, request.skip_special_tokens))

    @rpc.mapped
    async def GetStats(self, request: pb.GetStatsRequest, context: rpc.Context) -> pb.GetStatsResponse:
        """The state of the service."""
        driver = self._driver
        schedule, schedule_setting = driver.schedule()
        response = pb.GetStatsResponse(
            version=__version__,
            uptime_s=time.monotonic() - self._started,
            ready=driver.ready(),
            draining=driver.draining,
            running=len(driver.admission.running),
            waiting=len(driver.admission.waiting),
            finished=driver.books.outcomes["finished"],
            failed=driver.books.outcomes["failed"],
            cancelled=driver.books.outcomes["cancelled"],
            refused=driver.books.outcomes["refused"],
            generated_tokens=driver.books.generated_tokens,
            speculation=driver.books.tally.message(),
            workers=[
                _worker_stats(worker, driver.roster.link(worker.name), driver)
                for worker in driver.fleet.workers.values()
            ],
            stale_answers=driver.books.stale_answers,
            replays=driver.books.replays,
            fallbacks=driver.books.fallbacks,
            num_speculative_tokens=driver.typical_block(),
            max_running=driver.admission.max_running,
            max_waiting=driver.admission.max_waiting,
            schedule=schedule,
            schedule_setting=schedule_setting,
            draft_guesses=driver.books.guesses,
        )
        recent = driver.curves.recent_acceptance()
        if recent is not None:
            response.recent_acceptance = recent
        return response


def _call(request: pb.GenerateRequest, context: rpc.Context, driver: Driver) -> Call:
    """What observers want to know. More than one traceparent counts as none, as the standard has it."""
    parents = [value for key, value in context.invocation_metadata() or () if key == "traceparent"]
    parent = parents[0] if len(parents) == 1 and isinstance(parents[0], str) else ""
    operation = "chat" if request.WhichOneof("input") == "chat" else "text_completion"
    target = driver.fleet.pick("target")
    model = driver.config.model_name or (target.info.model if target is not None else "")
    return Call(operation, model, request.request_id[:MAX_REQUEST_ID], parent)


def _worker_stats(worker: Worker, link: WorkerLink | None, driver: Driver) -> pb.WorkerStats:
    return pb.WorkerStats(
        name=worker.name,
        info=encode_worker_info(worker.info),
        address=worker.address,
        state=worker.standing.value,
        sessions=len(worker.sessions),
        round_trip_us=link.round_trip_us() if link is not None else 0,
        connects=worker.connects,
        compute_us=driver.step_us(worker.info.role),
        reason=worker.reason or (link.reason if link is not None else ""),
    )


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """The workers' door."""

    def __init__(self, driver: Driver, pairing: Pairing) -> None:
        self._driver = driver
        self._pairing = pairing

    @rpc.mapped
    async def Register(self, request: fleet_pb2.RegisterRequest, context: rpc.Context) -> fleet_pb2.RegisterResponse:
        """A worker announces itself."""
        driver = self._driver
        info = decode_worker_info(request.info)
        rpc.split_address(request.address)
        worker, fresh = driver.fleet.register(request.name, info, request.address, time.monotonic())
        if fresh:
            try:
                await self._pairing.check(worker)
            except (VocabularyMismatch, VersionMismatch) as error:
                driver.fleet.refuse(worker, str(error))
                driver.roster.detach(worker.name, "refused")
                log.error("refused %s: %s", worker.name, error)
                raise
            if driver.fleet.workers.get(worker.name) is worker:
                driver.attach(worker)
        return fleet_pb2.RegisterResponse(
            incarnation=driver.incarnation, heartbeat_ms=int(driver.config.heartbeat_s * 1000)
        )

    @rpc.mapped
    async def Heartbeat(self, request: fleet_pb2.HeartbeatRequest, context: rpc.Context) -> fleet_pb2.HeartbeatResponse:
        """A worker lives."""
        known = self._driver.fleet.heartbeat(request.name, request.incarnation, time.monotonic())
        return fleet_pb2.HeartbeatResponse(unknown=not known)


async def watch_health(driver: Driver, health: Any, names: Sequence[str], interval_s: float = 0.25) -> None:
    """Health follows readiness: a coordinator without a target lives, but does not serve."""
    last: bool | None = None
    while True:
        serving = driver.ready()
        if serving != last:
            await rpc.set_health(health, tuple(names), serving)
            log.info("ready" if serving else "not ready")
            last = serving
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):  # wait_for may swallow the cancellation that ends this task
                await driver.changed.wait()
        driver.changed.clear()


__all__ = ["FLEET", "INFERENCE", "FleetServicer", "InferenceServicer", "Standing", "watch_health"]
