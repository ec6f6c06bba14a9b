"""The service as real processes, started and kept alive as `specwire up --no-ray` does it, and asked by the shipped client.

Law. Nothing of the service runs in the test's process. Every wait is for a condition of the service and has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from deploy.state import Process, StateFolder
from specwire.client import Client, Final, Started, Tokens
from specwire.law.errors import SpecwireError
from specwire.v1 import inference_pb2 as pb
from tests.support.service import Answer, ask, the_loop

T = TypeVar("T")

START_S = 300.0
PATIENCE_S = 90.0
"""A test that waits longer has failed; long enough for a restart on a busy machine."""
LOOK_EVERY_S = 0.05


class Stack:
    """A running service. Made by `stack`."""

    def __init__(self, folder: StateFolder, address: str) -> None:
        self.folder = folder
        self.address = address

    # ---------------------------------------------------------------- asking

    def run(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine with a client of its own."""

        async def whole() -> T:
            async with Client(self.address) as client:
                return await work(client)

        return the_loop().run(whole())

    def answer(self, **fields: Any) -> Answer:
        """One request by itself."""
        return self.answers([fields])[0]

    def answers(self, requests: Sequence[dict[str, Any]], at_once: bool = False) -> list[Answer]:
        """One after the other, or all at once."""

        async def work(client: Client) -> list[Answer]:
            if at_once:
                return list(await asyncio.gather(*(ask(client, **fields) for fields in requests)))
            return [await ask(client, **fields) for fields in requests]

        return self.run(work)

    def stats(self) -> pb.GetStatsResponse:
        """What the service says of itself."""
        return self.run(lambda client: client.stats())

    # ---------------------------------------------------------------- breaking

    def process(self, name: str) -> Process:
        """The present process of a service."""
        running = self.folder.read()
        assert running is not None
        return next(process for process in running.processes if process.name == name)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a service."""
        os.kill(self.process(name).pid, number)

    async def until(
        self, client: Client, holds: Callable[[pb.GetStatsResponse], bool], what: str
    ) -> pb.GetStatsResponse:
        """Waits until the service says so; a coordinator that is away says nothing."""
        give_up = time.monotonic() + PATIENCE_S
        stats = None
        while True:
            with contextlib.suppress(SpecwireError):
                if holds(stats := await client.stats(timeout=5.0)):
                    return stats
            assert time.monotonic() < give_up, f"waited in vain for {what}; last seen:\n{stats}"
            await asyncio.sleep(LOOK_EVERY_S)


def lives(stats: pb.GetStatsResponse) -> dict[str, int]:
    """Incarnation of each worker that is ready, by name."""
    return {worker.name: worker.info.incarnation for worker in stats.workers if worker.state == "ready"}


@contextlib.contextmanager
def stack(folder: Path, document: dict[str, Any]) -> Iterator[Stack]:
    """Starts what a topology says, at a free port, by the command line, and stops it."""
    file = folder / "topology.yaml"
    # A busy machine must not turn rounds with a block into plain ones: that the draft is used is a claim of these tests.
    patient = {"port": 0, "speculation": {"draft_timeout_ms": 60_000}}
    file.write_text(yaml.safe_dump(document | {"coordinator": patient | document.get("coordinator", {})}))
    state = StateFolder(folder / "state")
    _specwire(state, "up", str(file), "--no-ray", "--timeout", str(START_S))
    try:
        running = state.read()
        assert running is not None
        yield Stack(state, running.endpoint)
    finally:
        _specwire(state, "down", "--grace", "2")


def _specwire(state: StateFolder, *arguments: str) -> None:
    done = subprocess.run(
        (sys.executable, "-m", "deploy.cli", *arguments),
        env={**os.environ, "SPECWIRE_STATE": str(state.path)},
        capture_output=True,
        text=True,
    )

    assert 0 == done.returncode, done.stderr


class Stream:
    """A request that is read event by event, so that a test can act in its middle."""

    def __init__(self, client: Client, **fields: Any) -> None:
        self.answer = Answer()
        self._events = client.generate(**fields)

    async def read(self, tokens: int | None = None) -> bool:
        """Reads until so many tokens have come, or to the end. True at the end."""
        while tokens is None or len(self.answer.ids) < tokens:
            try:
                event = await asyncio.wait_for(anext(self._events), PATIENCE_S)
            except StopAsyncIteration:
                return True
            match event:
                case Started():
                    self.answer.started = event
                case Tokens():
                    self.answer.chunks.append(event)
                    self.answer.ids += event.ids
                    self.answer.text += event.text
                case Final():
                    self.answer.final = event
                    self.answer.text += event.text
        return False

    async def cancel(self) -> None:
        """Leaves the rest."""
        await self._events.aclose()  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def streaming(client: Client, **fields: Any) -> AsyncIterator[Stream]:
    """A stream that is left behind when the test fails."""
    stream = Stream(client, **fields)
    try:
        yield stream
    finally:
        await stream.cancel()
