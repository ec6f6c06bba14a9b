"""What gRPC alone takes of a round: the same three processes and streams with nothing of ours between them but the model's step.

    python -m deploy.bench.floor

A client reads from a relay what the relay reads from an engine; the relay sends the next message when it has the last one. Messages
are bytes of the size of a plain round's, the engine takes plain steps of the target in a thread of its own. What a token takes at
the client beyond a step is the floor that the service cannot go below, whatever it does with the messages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from deploy.bench import tool
from deploy.bench.bars import shipped
from deploy.bench.engine_loop import EngineLoop
from specwire.process import prepare_to_compute

CONTEXT = 64
"""Tokens cached before the first step."""
WARM = 10
"""Steps that are not counted."""
TASK, ANSWER, TOKEN = b"t" * 40, b"a" * 50, b"c" * 30
"""About what a plain round's frames and a client's event weigh."""


def _same(message: bytes) -> bytes:
    return message


class _Service(grpc.GenericRpcHandler):
    """One method that streams bytes both ways."""

    def __init__(self, behave: Any) -> None:
        self._behave = behave

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.stream_stream_rpc_method_handler(self._behave, _same, _same)


async def _serve(behave: Any) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Service(behave),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def engine(count: int) -> None:
    """A step for every message; at the end the median of a step, as JSON."""
    loop, target = asyncio.get_running_loop(), EngineLoop(shipped()[0], None)
    target.plain_steps(CONTEXT, 1)
    inbox: queue.SimpleQueue[asyncio.Future[None]] = queue.SimpleQueue()
    seconds: list[float] = []

    def work() -> None:
        for step in target.steps(CONTEXT, count):
            waiting = inbox.get()
            seconds.append(step())
            loop.call_soon_threadsafe(waiting.set_result, None)

    threading.Thread(target=work, daemon=True).start()

    async def answer(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for _message in requests:
            done = loop.create_future()
            inbox.put(done)
            await done
            yield ANSWER
        yield json.dumps(statistics.median(seconds[WARM:])).encode()

    await _serve(answer)


async def relay(address: str, count: int) -> None:
    """Asks the engine, and tells the client."""

    async def tell(_requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream("/floor/step", _same, _same)()
            for _step in range(count):
                await call.write(TASK)
                await call.read()
                yield TOKEN
            await call.done_writing()
            median: Any = await call.read()
            yield median

    await _serve(tell)


async def client(address: str) -> tuple[float, float]:
    """Median seconds of a token here, and of a step there."""
    times: list[float] = []
    last: Any = b""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/floor/tell", _same, _same)()
        await call.done_writing()
        while (message := await call.read()) is not grpc.aio.EOF:
            times.append(time.perf_counter())
            last = message
    gaps = [after - before for before, after in zip(times[WARM:-2], times[WARM + 1 : -1], strict=True)]
    return statistics.median(gaps), float(json.loads(last))


@contextmanager
def _process(*arguments: str) -> Iterator[str]:
    """Another one of these, and the address that it serves."""
    command = [sys.executable, "-m", "deploy.bench.floor", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    return tool.run(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = tool.parser("deploy.bench.floor", __doc__)
    parser.add_argument("--steps", type=int, default=150, help="of one run")
    parser.add_argument("--runs", type=int, default=3, help="one after the other")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--relay", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    tool.count("--steps", args.steps, WARM + 4)
    tool.count("--runs", args.runs)
    if args.engine:
        asyncio.run(engine(args.steps))
    elif args.relay:
        asyncio.run(relay(args.relay, args.steps))
    else:
        for _ in range(args.runs):
            steps = ("--steps", str(args.steps))
            with _process("--engine", *steps) as there, _process("--relay", there, *steps) as between:
                token, step = asyncio.run(client(between))
            print(f"token {1e3 * token:.2f} ms, step {1e3 * step:.2f} ms, between them {1e3 * (token - step):.2f} ms")
    return 0


if __name__ == "__main__":
    prepare_to_compute()  # before torch loads, as the services do
    sys.exit(main())
