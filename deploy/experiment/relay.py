"""A relay with known truth: a TCP link between two services with a set delay and bandwidth in each direction.

Law. Bytes pass unchanged and in order. What arrives at time a leaves at a + delay, or, where the line has a bandwidth, once all
bytes before it and its own have gone over it and the delay is over. What this adds by itself is measured: `late_us` is how much
later than due bytes left. The relay is a process of its own, so that neither it nor the services wait for each other's
interpreter; its conditions may be changed at any time and hold for what arrives from then on.

Threads sleep until the moment; an event loop's timers would round it up to whole milliseconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from specwire.law.errors import InvalidArgument

CHUNK = 65_536
KEPT = 4096
"""Latenesses of so many chunks give the median that is told."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """One direction of a link."""

    delay_ms: float = 0.0
    """One way."""
    mbit_per_s: float = 0.0
    """0: no limit."""

    def __post_init__(self) -> None:
        for name in ("delay_ms", "mbit_per_s"):
            value = getattr(self, name)
            if not 0.0 <= value < 1e6:
                raise InvalidArgument(f"relay.{name}", value, "in [0, 1,000,000)")


NO_CONDITIONS = Conditions()


class Relay:
    """A relay process to one address. Use as a context manager, or `start` and `stop`."""

    def __init__(self, host: str, port: int, up: Conditions = NO_CONDITIONS, down: Conditions = NO_CONDITIONS) -> None:
        """`host`, `port`: where the bytes go. `up`: towards there; `down`: back."""
        self._to = (host, port)
        self._conditions = (up, down)
        self._process: Any = None
        self._pipe: Any = None
        self.port = 0
        """Where it listens, on 127.0.0.1, once started."""

    def __enter__(self) -> Relay:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """host:port to connect to."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of its process, once started."""
        return int(self._process.pid)

    def start(self) -> None:
        """Returns once it listens."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._to, self._conditions), daemon=True)
        self._process.start()
        self.port = self._pipe.recv()

    def set(self, up: Conditions, down: Conditions) -> None:
        """Holds for all bytes that arrive after this returns."""
        self._conditions = (up, down)
        self._ask(("set", up, down))

    def set_round_trip(self, round_trip_ms: float) -> None:
        """Half of it in each direction, without a bandwidth limit."""
        half = Conditions(delay_ms=round_trip_ms / 2)
        self.set(half, half)

    def late_us(self) -> float:
        """Median of how much later than due the last chunks left, in microseconds. 0: nothing has passed."""
        return float(self._ask(("late",)))

    def cut(self) -> None:
        """Breaks every connection; new ones are let through."""
        self._ask(("cut",))

    def _ask(self, message: tuple[Any, ...]) -> Any:
        self._pipe.send(message)
        return self._pipe.recv()

    def stop(self) -> None:
        """Ends it and every connection."""
        if self._process is not None:
            self._process.terminate()
            self._process.join()
            self._process = None


# ---------------------------------------------------------------- its process


class _Direction:
    """Conditions of one direction of all connections, and what it adds by itself."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self.late_us: deque[float] = deque(maxlen=KEPT)


class _Connection:
    """A client's socket and the one to the service, closed when both directions have ended."""

    def __init__(self, client: socket.socket, server: socket.socket, forget: Callable[[_Connection], object]) -> None:
        self._sockets = (client, server)
        self._forget = forget
        self._ended = 0
        self._lock = threading.Lock()

    def ended(self) -> None:
        """One direction has."""
        with self._lock:
            self._ended += 1
            both = self._ended == len(self._sockets)
        if both:
            self._forget(self)
            self.close()

    def close(self) -> None:
        """Whoever reads from it wakes."""
        for each in self._sockets:
            _close(each)


class _Pump:
    """One direction of one connection: a thread that receives and one that sends."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, direction: _Direction, ended: Callable[[], None]
    ) -> None:
        self._source, self._sink, self._direction = source, sink, direction
        self._ended = ended
        self._line: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        self._free_at = 0.0
        """When the line has carried all that has arrived."""
        for run in (self._receive, self._send):
            threading.Thread(target=run, daemon=True).start()

    def _receive(self) -> None:
        while True:
            try:
                chunk = self._source.recv(CHUNK)
            except OSError:
                chunk = b""
            now, conditions = time.monotonic(), self._direction.conditions
            carried_s = 8e-6 * len(chunk) / conditions.mbit_per_s if conditions.mbit_per_s else 0.0
            self._free_at = max(now, self._free_at) + carried_s
            self._line.put((self._free_at + conditions.delay_ms / 1e3, chunk))
            if not chunk:
                return

    def _send(self) -> None:
        try:
            self._send_all()
        finally:
            self._ended()

    def _send_all(self) -> None:
        while True:
            due, chunk = self._line.get()
            wait = due - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            try:
                if not chunk:
                    self._sink.shutdown(socket.SHUT_WR)
                    return
                late = time.monotonic() - due
                self._sink.sendall(chunk)
            except OSError:
                _close(self._source)
                return
            self._direction.late_us.append(1e6 * late)


def _close(connection: socket.socket) -> None:
    """Wakes whoever reads from it, then closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _serve(pipe: Connection, to: tuple[str, int], conditions: tuple[Conditions, Conditions]) -> None:
    up, down = map(_Direction, conditions)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    open_now: set[_Connection] = set()

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            try:
                server = socket.create_connection(to, timeout=5.0)
            except OSError:
                _close(client)
                continue
            server.settimeout(None)
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(client, server, open_now.discard)
            open_now.add(connection)
            _Pump(client, server, up, connection.ended)
            _Pump(server, client, down, connection.ended)

    threading.Thread(target=accept, daemon=True).start()
    pipe.send(listener.getsockname()[1])
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if message[0] == "set":
            up.conditions, down.conditions = message[1:]
            pipe.send(None)
        elif message[0] == "late":
            late = [*up.late_us, *down.late_us]
            pipe.send(statistics.median(late) if late else 0.0)
        elif message[0] == "cut":
            for connection in list(open_now):
                connection.close()
            pipe.send(None)
