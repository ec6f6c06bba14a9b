"""A relay between the coordinator and one worker: a real gRPC server and a real gRPC client, with a hook between them.

Law. Without a hook, bytes are passed on as they are. A hook is asked for each frame that carries tasks, closes or answers and
says what becomes of it: a list of (delay in seconds, frame), so a frame can be lost (empty list), doubled, late, split, and
overtaken when delays differ. Frames of equal delay keep their order. Hello, Welcome and echoes pass untouched: without them
there is no stream to disturb. `cut` breaks every stream at once, with whatever is on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from specwire.v1 import draft_pb2, target_pb2, types_pb2
from specwire.wire import rpc

Out = list[tuple[float, bytes]]
"""Frames to pass on, each after so many seconds."""
Hook = Callable[[Any], Out]
"""A parsed frame to what becomes of it."""

SERVICES = {"draft": "specwire.v1.Draft", "target": "specwire.v1.Target"}
METHODS = {"draft": "Propose", "target": "Verify"}
REQUESTS: dict[str, Any] = {"draft": draft_pb2.ProposeRequest, "target": target_pb2.VerifyRequest}
RESPONSES: dict[str, Any] = {"draft": draft_pb2.ProposeResponse, "target": target_pb2.VerifyResponse}


def pass_on(frame: Any) -> Out:
    """The hook that does nothing."""
    return [(0.0, frame.SerializeToString())]


class Relay:
    """Stands where the coordinator looks for the worker. `worker` may change between streams."""

    def __init__(self, role: str, to_worker: Hook | None = None, to_coordinator: Hook | None = None) -> None:
        self.role = role
        self.to_worker = to_worker
        self.to_coordinator = to_coordinator
        self.worker = ""
        """host:port of the worker. Empty: every stream is turned away."""
        self.address = ""
        self.streams = 0
        """Opened so far."""
        self.frames = 0
        """Frames with tasks or answers seen so far, in both directions."""
        self._moved = asyncio.Event()
        """Set with each such frame."""
        self._server: grpc.aio.Server | None = None
        self._open: set[asyncio.Task[Any]] = set()

    async def start(self) -> str:
        """Binds once; returns the address."""
        if self._server is None:
            self._server = rpc.make_server()
            self._server.add_generic_rpc_handlers((self._handlers(),))
            self.address = f"127.0.0.1:{rpc.bind(self._server, '127.0.0.1:0', False)}"
            await self._server.start()
        return self.address

    async def stop(self) -> None:
        """Ends everything."""
        if self._server is not None:
            self.cut()
            await self._server.stop(None)
            self._server = None

    def cut(self) -> None:
        """Breaks every stream. The next one is let through."""
        for task in list(self._open):
            task.cancel()

    async def seen(self, frames: int) -> None:
        """Returns once so many frames with tasks or answers have been seen."""
        while self.frames < frames:
            self._moved.clear()
            await self._moved.wait()

    def _handlers(self) -> grpc.GenericRpcHandler:
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICES[self.role],
            {
                METHODS[self.role]: grpc.stream_stream_rpc_method_handler(self._stream),
                "Vocabulary": unary(
                    self._vocabulary,
                    types_pb2.VocabularyRequest.FromString,
                    types_pb2.VocabularyResponse.SerializeToString,
                ),
            },
        )

    async def _vocabulary(self, request: Any, context: Any) -> Any:
        async with rpc.open_channel(self.worker) as channel:
            call = channel.unary_unary(
                f"/{SERVICES[self.role]}/Vocabulary",
                types_pb2.VocabularyRequest.SerializeToString,
                types_pb2.VocabularyResponse.FromString,
            )
            return await call(request)

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        if not self.worker:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "nobody behind the relay")
        self.streams += 1
        up: asyncio.Queue[bytes | None] = asyncio.Queue()
        down: asyncio.Queue[bytes | None] = asyncio.Queue()
        async with rpc.open_channel(self.worker) as channel:
            call: Any = channel.stream_stream(f"/{SERVICES[self.role]}/{METHODS[self.role]}")()

            async def read_coordinator() -> None:
                async for raw in requests:
                    self._put(up, raw, REQUESTS[self.role], self.to_worker)
                up.put_nowait(None)

            async def write_worker() -> None:
                while (raw := await up.get()) is not None:
                    await call.write(raw)
                await call.done_writing()

            async def read_worker() -> None:
                while (raw := await call.read()) is not grpc.aio.EOF:
                    self._put(down, raw, RESPONSES[self.role], self.to_coordinator)

            async def until_one_ends() -> None:
                pumps = [asyncio.create_task(each()) for each in (read_coordinator, write_worker, read_worker)]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
                    down.put_nowait(None)

            watch = asyncio.create_task(until_one_ends())
            self._open.add(watch)
            try:
                while (raw := await down.get()) is not None:
                    yield raw
            finally:
                self._open.discard(watch)
                watch.cancel()
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the relay's stream is over")

    def _put(self, queue: asyncio.Queue[bytes | None], raw: bytes, kind: Any, hook: Hook | None) -> None:
        if hook is None:
            queue.put_nowait(raw)
            return
        frame = kind.FromString(raw)
        first = "hello" if kind is REQUESTS[self.role] else "welcome"
        work = frame.answers if first == "welcome" else (*frame.tasks, *frame.closes)
        if frame.HasField(first) or not work:
            queue.put_nowait(raw)
            return
        self.frames += 1
        self._moved.set()
        for delay, out in hook(frame):
            if delay > 0.0:
                asyncio.get_running_loop().call_later(delay, queue.put_nowait, out)
            else:
                queue.put_nowait(out)


class Mangler:
    """A hook that does everything at random, from a seed: frames come twice, late, in another order, or not at all."""

    def __init__(
        self, seed: int, twice: float = 0.0, late: float = 0.0, lost: float = 0.0, late_s: float = 0.01
    ) -> None:
        self._random = random.Random(seed)
        self._chances = (twice, late, lost)
        self._late_s = late_s
        self.counts = {"twice": 0, "late": 0, "lost": 0}
        """What was done so far."""

    def __call__(self, frame: Any) -> Out:
        raw = frame.SerializeToString()
        dice = [self._random.random() < chance for chance in self._chances]
        for name, did in zip(self.counts, dice, strict=True):
            self.counts[name] += did
        twice, late, lost = dice
        if lost:
            return []
        delay = self._random.random() * self._late_s if late else 0.0
        copies: Out = [(delay, raw)]
        if twice:
            copies.append((self._random.random() * self._late_s, raw))
        return copies
