"""Waiting until the service really serves: it answers, and every worker that was asked for has announced itself.

Alive is not ready. Both ways of starting (`processes.py`, `cluster.py`) end here; each brings its own way to see that something
died, so that a failed start is told at once with its reason and not by a time-out.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from deploy.topology import TopologyError
from specwire.client import Client
from specwire.law.errors import OurFault, SpecwireError, Unavailable
from specwire.wire.rpc import split_address

if TYPE_CHECKING:
    from specwire.v1 import inference_pb2 as pb

T = TypeVar("T")
LOOK_EVERY_S = 0.25
CANNOT_START = " cannot start: "
"""In the one line that a service prints before it gives up; what comes before it are its settings."""
TAIL_LINES = 12


class StartError(OurFault):
    """The service did not come up; the text says which part and why."""


def wait_ready(
    endpoint: str,
    workers: Sequence[str],
    timeout_s: float,
    failed: Callable[[], str | None],
    progress: Callable[[str], None],
) -> pb.GetStatsResponse:
    """The service's state once it is ready with all `workers`. `failed` tells why it will never be; `progress` gets a line.

    Raises StartError."""
    return asyncio.run(_wait(endpoint, workers, timeout_s, failed, progress))


async def _wait(
    endpoint: str,
    workers: Sequence[str],
    timeout_s: float,
    failed: Callable[[], str | None],
    progress: Callable[[str], None],
) -> pb.GetStatsResponse:
    give_up = time.monotonic() + timeout_s
    stats: pb.GetStatsResponse | None = None
    while True:
        if reason := failed():
            raise StartError(reason)
        # One that answered and is now busy is not taken for absent.
        fresh = await probe(endpoint)
        stats = fresh or stats
        missing = _missing(stats, workers)
        progress("ready" if not missing else "waiting for " + ", ".join(missing))
        if fresh is not None and not missing:
            return fresh
        if refused := [each for each in missing if "(refused" in each]:
            raise StartError(f"not accepted: {', '.join(refused)}")  # for what it is: waiting would not mend it
        if time.monotonic() > give_up:
            raise StartError(f"not ready after {timeout_s:.0f} s: still waiting for {', '.join(missing)}")
        await asyncio.sleep(LOOK_EVERY_S)


async def probe(endpoint: str, timeout_s: float = 5.0) -> pb.GetStatsResponse | None:
    """The state of the service, or None when nobody answers.

    A new channel each time: one that failed would wait longer and longer before it tries again."""
    async with Client(endpoint, retry_for_s=0) as client:
        with contextlib.suppress(SpecwireError):
            return await client.stats(timeout=timeout_s)
    return None


def _missing(stats: pb.GetStatsResponse | None, workers: Sequence[str]) -> list[str]:
    """What is not there yet, with what is known of it."""
    if stats is None:
        return ["coordinator", *workers]
    known = {worker.name: worker for worker in stats.workers}
    found = []
    for name in workers:
        worker = known.get(name)
        if worker is None:
            found.append(name)
        elif worker.state != "ready":
            reason = f": {worker.reason}" if worker.reason not in ("", worker.state) else ""
            found.append(f"{name} ({worker.state}{reason})")
    return found or ([] if stats.ready else ["coordinator (not ready)"])


def check_port(endpoint: str, field: str = "coordinator.port") -> None:
    """Refuses an address that somebody else listens on, by name where the system tells it. Raises TopologyError."""
    host, port = split_address(endpoint)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind((host, port))
        except OSError as error:
            owner = _listener(port)
            raise TopologyError(
                f"{field}: got {port}, must be a free port of {host}: {error.strerror}"
                + (f" (by {owner})" if owner else "")
            ) from None


def free_port(host: str) -> int:
    """A port that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as chosen:
        chosen.bind((host, 0))
        return int(chosen.getsockname()[1])


def _listener(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr[1] == port and each.pid:
                return f"process {each.pid}, {psutil.Process(each.pid).name()}"
    return ""


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def last_words(path: Path) -> str:
    """Why a service could not start: the line in which it says so, or else the end of its log."""
    text = tail(path)
    said = [line for line in text.splitlines() if CANNOT_START in line]
    return said[-1] if said else text


def unavailable(endpoint: str) -> Unavailable:
    """Nobody answers where the service should be."""
    return Unavailable(f"no service answers at {endpoint}; start one with `specwire up`, or look at `specwire logs`")


def explained(error: Unavailable, endpoint: str) -> Unavailable:
    """The same, for somebody who sees only the command: whether anybody answers there at all."""
    return error if asyncio.run(probe(endpoint)) is not None else unavailable(endpoint)


def within(seconds: float, what: str, act: Callable[[], T]) -> T:
    """What `act` returns, or StartError: Ray waits for minutes for a peer that is gone."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise StartError(f"{what} cannot be used: {str(failed[0]).strip().splitlines()[0]}") from failed[0]
    if not found:
        raise StartError(f"{what} does not answer within {seconds:.0f} s")
    return found[0]


def cause(error: BaseException) -> str:
    """The line that matters of an account of many lines, as Ray gives it: the last one that names an exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0] or line.startswith("specwire.")]
    return (named or lines or [type(error).__name__])[-1]
