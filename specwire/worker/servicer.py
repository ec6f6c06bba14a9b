"""The stream shell: bytes in, commands to the engine; deliveries of the engine, bytes out. Info and Vocabulary beside it.

Law. A stream begins with Hello; a worker of another protocol version ends it and names both. An echo is answered at once, past
the engine. The reader stops reading while the engine or the other side lags behind, so that gRPC's own flow control holds the
sender back and memory stays bounded. However a stream ends, the engine is told, and nothing is freed but by leases and closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from typing import Any

from specwire.law.errors import InvalidArgument, SpecwireError, Unavailable, VersionMismatch
from specwire.v1 import types_pb2
from specwire.wire.codec import PROTOCOL_VERSION, Kind, decode_task_frame
from specwire.wire.info import WorkerInfo, encode_worker_info
from specwire.wire.rpc import Context, abort, mapped
from specwire.wire.stopwatch import Stamped, now_ns
from specwire.worker.engine import Engine
from specwire.worker.stream_end import FRAME_COST, StreamEnd

HELLO_PATIENCE_S = 1.0
"""How long a stream that will be refused may take to say Hello."""
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Worker:
    engine: Engine
    info: WorkerInfo
    vocabulary: tuple[bytes, ...]


class WorkerServicer:
    """Serves one worker's stream and tells what it is. Both services register it under their own names."""

    def __init__(self, kind: Kind, role: str) -> None:
        self._kind = kind
        self._role = role
        self._worker: _Worker | None = None
        self._streams: set[StreamEnd] = set()
        self._taking = True

    def __repr__(self) -> str:
        return f"WorkerServicer({self._role} streams={len(self._streams)} taking={self._taking})"

    def open(self, engine: Engine, info: WorkerInfo, vocabulary: tuple[bytes, ...]) -> None:
        """The model is loaded: from now on calls are served."""
        self._worker = _Worker(engine, info, vocabulary)

    def _ready(self) -> _Worker:
        if self._worker is None:
            raise Unavailable(f"the {self._role} is loading its model")
        if not self._taking:
            raise Unavailable(f"the {self._role} is shutting down")
        return self._worker

    def stop_taking(self) -> None:
        """From now on no frame is read and no stream accepted. Answers still go out."""
        self._taking = False

    def end_streams(self) -> None:
        """Ends every stream once what it has to say is said."""
        for stream in list(self._streams):
            stream.end(Unavailable("the worker is shutting down"))

    async def stream(self, requests: AsyncIterator[Stamped], context: Context) -> AsyncIterator[bytes]:
        """Propose or Verify."""
        try:
            worker = self._ready()
        except SpecwireError as error:
            # Refused only once the Hello has come: a status that meets a caller's write in flight reaches it as an
            # internal error of its gRPC library, without our code and words.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HELLO_PATIENCE_S):
                    await anext(requests, None)
            await abort(context, error)
            return
        stream = StreamEnd(self._kind, worker.info.incarnation)
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(requests, stream, worker.engine))
        failed: SpecwireError | None = None
        try:
            while True:
                try:
                    raw = await stream.next_bytes()
                except SpecwireError as error:
                    failed = error
                    break
                if raw is None:
                    break
                yield raw
        finally:
            stream.end(None)
            self._streams.discard(stream)
            reader.cancel()
            if stream.coordinator is not None:
                incarnation = stream.coordinator
                worker.engine.put(lambda desk, now: desk.lose(stream, incarnation, now))
        if failed is not None:
            await abort(context, failed)

    async def _read(self, requests: AsyncIterator[Stamped], stream: StreamEnd, engine: Engine) -> None:
        try:
            async for stamped in requests:
                if not self._taking:
                    return  # the worker drains; the stream is ended from there
                self._take(stamped, stream, engine)
                await stream.wait_for_room()
            stream.end(None)
        except SpecwireError as error:
            stream.end(error)
        except Exception as error:  # the call broke; gRPC says so by more than one kind of exception
            log.debug("stream lost: %r", error)
            stream.end(Unavailable("the stream broke"))

    def _take(self, stamped: Stamped, stream: StreamEnd, engine: Engine) -> None:
        frame = decode_task_frame(self._kind, stamped.raw, stream.coordinator)
        parsed_ns = now_ns()
        if frame.hello is not None:
            hello = frame.hello
            if hello.protocol_version != PROTOCOL_VERSION:
                raise VersionMismatch(
                    f"protocol versions differ: coordinator {hello.protocol_version}, {self._role} {PROTOCOL_VERSION}"
                )
            if stream.coordinator is not None:
                raise InvalidArgument("hello", hello.generation, "in the first frame only")
            stream.coordinator = hello.incarnation
            engine.put(lambda desk, now: desk.open(stream, hello))
        if frame.echo:
            stream.deliver(frame.echo)
        if not (frame.tasks or frame.closes or frame.invalid or frame.due_sessions):
            return
        incarnation = stream.coordinator
        assert incarnation is not None, "decoding refuses frames before Hello"
        cost = len(stamped.raw) + FRAME_COST
        stream.put_bytes += cost
        loop = asyncio.get_running_loop()

        def take(desk: Any, now: int) -> None:
            was_full = stream.full
            stream.taken_bytes += cost
            desk.frame(stream, incarnation, frame, stamped.received_ns, parsed_ns, now)
            if was_full:
                loop.call_soon_threadsafe(stream.made_room)

        engine.put(take)

    @mapped
    async def Info(self, request: types_pb2.InfoRequest, context: Context) -> types_pb2.InfoResponse:
        """What this worker is."""
        return types_pb2.InfoResponse(info=encode_worker_info(self._ready().info))

    @mapped
    async def Vocabulary(self, request: types_pb2.VocabularyRequest, context: Context) -> types_pb2.VocabularyResponse:
        """The vocabulary in id order."""
        return types_pb2.VocabularyResponse(tokens=self._ready().vocabulary)
