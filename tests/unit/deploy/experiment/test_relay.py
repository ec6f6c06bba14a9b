"""What a relay does to the bytes that pass: nothing but what it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from deploy.experiment.relay import Conditions, Relay
from specwire.law.errors import InvalidArgument


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    """Port of a server that says back what it hears."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(65_536):
                connection.sendall(data)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


@pytest.fixture(scope="module")
def relay(echo: int) -> Iterator[Relay]:
    """One in front of it."""
    with Relay("127.0.0.1", echo) as found:
        yield found


@pytest.fixture
def line(relay: Relay) -> Iterator[socket.socket]:
    """A connection through it."""
    relay.set_round_trip(0.0)
    with socket.create_connection(("127.0.0.1", relay.port), timeout=30.0) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def round_trip_s(line: socket.socket, data: bytes = b"x") -> float:
    """Until all of it is back."""
    begun = time.monotonic()
    line.sendall(data)
    left = len(data)
    while left:
        left -= len(line.recv(left))
    return time.monotonic() - begun


def test_bytes_pass_unchanged_and_in_order(line: socket.socket) -> None:
    """A megabyte in odd pieces."""
    data = bytes(n * n % 251 for n in range(1_000_000))
    back = bytearray()

    def read() -> None:
        while len(back) < len(data):
            back.extend(line.recv(65_536))

    reader = threading.Thread(target=read)
    reader.start()
    for at in range(0, len(data), 7919):
        line.sendall(data[at : at + 7919])
    reader.join(30.0)

    assert data == bytes(back)


@pytest.mark.parametrize("round_trip_ms", [1.0, 5.0, 20.0])
def test_delay_is_added_and_nothing_else(relay: Relay, line: socket.socket, round_trip_ms: float) -> None:
    """Never less; and in the best of some tries, which other work on the machine did not disturb, hardly more."""
    bare = min(round_trip_s(line) for _ in range(20))
    relay.set_round_trip(round_trip_ms)
    times = [round_trip_s(line) for _ in range(20)]

    assert min(times) >= round_trip_ms / 1e3
    assert min(times) <= round_trip_ms / 1e3 + bare + 1e-3
    assert 0.0 < relay.late_us() < 5000.0


def test_bandwidth_holds_for_what_is_sent_together(relay: Relay, line: socket.socket) -> None:
    """80 Mbit/s up: 100 kB take 10 ms, and a byte behind them waits for them."""
    relay.set(Conditions(mbit_per_s=80.0), Conditions())

    assert 0.010 <= round_trip_s(line, bytes(100_000)) < 0.5
    assert round_trip_s(line) < 0.010


def test_conditions_change_while_it_runs(relay: Relay, line: socket.socket) -> None:
    """The same connection, first slow and then not."""
    relay.set_round_trip(60.0)
    slow = round_trip_s(line)
    relay.set_round_trip(0.0)
    fast = min(round_trip_s(line) for _ in range(5))

    assert slow >= 0.060 > fast


def test_a_cut_breaks_connections_and_lets_new_ones_through(relay: Relay, line: socket.socket) -> None:
    """Both ends see it."""
    assert round_trip_s(line) > 0.0
    relay.cut()
    with contextlib.suppress(ConnectionResetError):
        assert line.recv(1) == b""
    with socket.create_connection(("127.0.0.1", relay.port), timeout=30.0) as again:
        assert round_trip_s(again) > 0.0


def test_an_address_without_anybody_closes_the_connection() -> None:
    """As a refused connection does, one step later."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Relay("127.0.0.1", port) as relay, socket.create_connection(("127.0.0.1", relay.port), timeout=30.0) as line:
        assert line.recv(1) == b""


@pytest.mark.parametrize("name", ["delay_ms", "mbit_per_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_conditions_are_checked(name: str, value: float) -> None:
    """The error names the field."""
    with pytest.raises(InvalidArgument, match=name):
        Conditions(**{name: value})


def test_connections_that_end_leave_nothing_behind(relay: Relay) -> None:
    """A hundred, one after the other, each ended by its client: as many open files as before."""
    process = psutil.Process(relay.pid)

    def one() -> None:
        with socket.create_connection(("127.0.0.1", relay.port), timeout=30.0) as line:
            assert round_trip_s(line) > 0.0
            line.shutdown(socket.SHUT_WR)
            assert line.recv(1) == b""

    relay.set_round_trip(0.0)
    one()
    before = process.num_fds()
    for _ in range(100):
        one()

    assert process.num_fds() <= before + 4
