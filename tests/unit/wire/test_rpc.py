"""Addresses, what may be bound, and the one mapping between our errors and gRPC's codes, both ways."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire.law.errors import (
    BadLaw,
    CallerFault,
    InvalidArgument,
    NoRoom,
    OurFault,
    SpecwireError,
    TooLate,
    Unavailable,
    VersionMismatch,
    VocabularyMismatch,
)
from specwire.wire import rpc
from specwire.wire.stopwatch import Stamped

Code = grpc.StatusCode
METADATA = grpc.aio.Metadata


def failed_call(code: grpc.StatusCode, text: str = "", **trailing: str) -> grpc.aio.AioRpcError:
    """What a client's call raises."""
    pairs = [(key.replace("_", "-"), value) for key, value in trailing.items()]
    return grpc.aio.AioRpcError(code, METADATA(), METADATA(*pairs), text)


# ------------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:8470", ("127.0.0.1", 8470)),
        ("host.example:0", ("host.example", 0)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_addresses_have_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    """Names, both versions of IP, and any port."""

    assert parts == rpc.split_address(address)


@pytest.mark.parametrize(
    "address", ["", "host", ":80", "host:", "host:-1", "host:65536", "host:http", "unix:/a/b", "[]:80"]
)
def test_bad_addresses_are_named(address: str) -> None:
    """With the field they stand in."""
    with pytest.raises(InvalidArgument) as caught:
        rpc.split_address(address, "coordinator")

    assert ("coordinator", address) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1"])
def test_loopback_needs_no_permission(host: str) -> None:
    """Nobody outside can reach it."""

    assert rpc.is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.example", "::ffff:10.0.0.1"])
def test_everything_else_is_foreign(host: str) -> None:
    """Also a name that only looks local."""

    assert not rpc.is_loopback(host)


def test_a_foreign_address_is_refused_unless_asked_for() -> None:
    """The message names the setting and the flag that allows it."""
    with pytest.raises(InvalidArgument, match="--insecure") as caught:
        rpc.check_bind("0.0.0.0:8470", insecure=False)
    rpc.check_bind("0.0.0.0:8470", insecure=True)

    assert caught.value.field == "bind"


def test_permission_does_not_mend_an_address() -> None:
    """A port is needed either way."""
    with pytest.raises(InvalidArgument, match="host:port"):
        rpc.check_bind("0.0.0.0", insecure=True)


def test_a_taken_port_is_a_bad_setting() -> None:
    """Not a traceback, and not a second server on the same port that gets half of the calls."""

    async def main() -> None:
        server = rpc.make_server()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(InvalidArgument, match="a free port"):
                rpc.bind(server, f"127.0.0.1:{taken.getsockname()[1]}", insecure=False, field="metrics")
        await server.stop(None)

    asyncio.run(main())


def test_incarnations_are_never_zero_and_never_the_same() -> None:
    """Zero would mean absent on the wire."""
    seen = {rpc.new_incarnation() for _ in range(100)}

    assert (100, True) == (len(seen), all(0 < each < 2**64 for each in seen))


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InvalidArgument("top_k", -1, "at least 0"), Code.INVALID_ARGUMENT, "top_k: got -1, must be at least 0"),
        (CallerFault("no"), Code.INVALID_ARGUMENT, "no"),
        (VersionMismatch("1, not 2"), Code.FAILED_PRECONDITION, "1, not 2"),
        (VocabularyMismatch("at 7"), Code.FAILED_PRECONDITION, "at 7"),
        (NoRoom("full"), Code.RESOURCE_EXHAUSTED, "full"),
        (TooLate("over"), Code.DEADLINE_EXCEEDED, "over"),
        (Unavailable("away"), Code.UNAVAILABLE, "away"),
        (OurFault("secret"), Code.INTERNAL, "internal error"),
        (BadLaw("secret"), Code.INTERNAL, "internal error"),
        (SpecwireError("secret"), Code.INTERNAL, "internal error"),
        (KeyError("secret"), Code.INTERNAL, "internal error"),
    ],
)
def test_errors_have_codes(error: Exception, code: grpc.StatusCode, text: str) -> None:
    """The caller's faults keep their text, ours do not show it."""

    assert (code, text) == rpc.status_of(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.INVALID_ARGUMENT, CallerFault),
        (Code.FAILED_PRECONDITION, VersionMismatch),
        (Code.RESOURCE_EXHAUSTED, NoRoom),
        (Code.DEADLINE_EXCEEDED, TooLate),
        (Code.UNAVAILABLE, Unavailable),
        (Code.INTERNAL, OurFault),
        (Code.UNKNOWN, OurFault),
        (Code.DATA_LOSS, OurFault),
        (Code.CANCELLED, SpecwireError),
        (Code.UNIMPLEMENTED, SpecwireError),
    ],
)
def test_codes_have_errors(code: grpc.StatusCode, kind: type[SpecwireError]) -> None:
    """What a client can act upon has a type of its own."""
    error = rpc.error_of(failed_call(code, "why"))

    assert kind is type(error)
    assert "why" in str(error)


@pytest.mark.parametrize(
    "error", [CallerFault("a"), VersionMismatch("b"), NoRoom("c", 2.5), TooLate("d"), Unavailable("e")]
)
def test_there_and_back(error: SpecwireError) -> None:
    """A caller's error means on this side what it meant on the other."""
    code, text = rpc.status_of(error)
    back = rpc.error_of(failed_call(code, text, retry_after_ms="2500"))

    assert (type(error), str(error)) == (type(back), str(back))
    assert getattr(error, "retry_after_s", None) == getattr(back, "retry_after_s", None)


@pytest.mark.parametrize("value", [1.5, "x", "a\nb, must be c", [1, 2], None])
def test_a_refusal_names_field_and_limit_on_this_side_too(value: object) -> None:
    """As if the check had been made here; the value is as it was shown."""
    error = InvalidArgument("chat.messages[0].role", value, "one of a, b (not c)")
    back = rpc.error_of(failed_call(*rpc.status_of(error)))

    assert isinstance(back, InvalidArgument)
    assert str(error) == str(back)
    assert (error.field, error.limit) == (back.field, back.limit) or "must be" in str(value)


@pytest.mark.parametrize("trailing", [{}, {"retry_after_ms": "soon"}])
def test_a_missing_hint_is_a_second(trailing: dict[str, str]) -> None:
    """gRPC's own refusals bring none, and what a proxy writes there is not ours."""
    error = rpc.error_of(failed_call(Code.RESOURCE_EXHAUSTED, "concurrent RPC limit exceeded", **trailing))

    assert isinstance(error, NoRoom)
    assert error.retry_after_s == 1.0


@pytest.mark.parametrize("side", ["CLIENT: Sent", "SERVER: Received"])
def test_too_long_a_message_is_the_callers_fault(side: str) -> None:
    """It would not fit later either, so it must not look like a full house. The text names the limit."""
    error = rpc.error_of(
        failed_call(Code.RESOURCE_EXHAUSTED, f"{side} message larger than max (70000000 vs. 67108864)")
    )

    assert type(error) is CallerFault
    assert "67108864" in str(error)


# ------------------------------------------------------------------ over a real wire


class Handlers:
    """Unary calls that fail as told, and a stream of bytes that repeats what it hears."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    @rpc.mapped
    async def Call(self, request: bytes, context: rpc.Context) -> bytes:
        """Raises the error, or repeats the request."""
        if self._error is not None:
            raise self._error
        return request

    async def Stream(self, requests: AsyncIterator[Stamped], context: rpc.Context) -> AsyncIterator[bytes]:
        """Repeats bytes."""
        async for stamped in requests:
            yield stamped.raw


async def over_the_wire(handlers: Handlers, client: Any) -> Any:
    """Runs `client(channel)` against a server with these handlers."""
    server = rpc.make_server()
    methods = {
        "Call": grpc.unary_unary_rpc_method_handler(handlers.Call),
        "Stream": rpc.raw_stream_handler(handlers.Stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", methods),))
    port = rpc.bind(server, "127.0.0.1:0", insecure=False)
    await server.start()
    try:
        async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
            return await client(channel)
    finally:
        await server.stop(None)


async def call(channel: grpc.aio.Channel) -> Any:
    """The unary call's answer, or its error as one of ours."""
    try:
        return await channel.unary_unary("/test.Echo/Call")(b"hello")
    except grpc.aio.AioRpcError as error:
        return rpc.error_of(error)


def test_a_handler_raises_our_errors() -> None:
    """The mapping stands around the handler; the hint travels in the trailing metadata."""
    error = asyncio.run(over_the_wire(Handlers(NoRoom("full", retry_after_s=0.25)), call))

    assert isinstance(error, NoRoom)
    assert ("full", 0.25) == (str(error), error.retry_after_s)


def test_our_bugs_are_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    """The caller gets INTERNAL without the text, the log gets the traceback."""
    with caplog.at_level(logging.ERROR):
        error = asyncio.run(over_the_wire(Handlers(ZeroDivisionError("secret")), call))

    assert (OurFault, False) == (type(error), "secret" in str(error))
    assert "ZeroDivisionError: secret" in caplog.text


def test_a_sound_handler_is_left_alone() -> None:
    """Decorating changes nothing where nothing is raised."""

    assert asyncio.run(over_the_wire(Handlers(None), call)) == b"hello"


def test_streams_carry_stamped_bytes_both_ways() -> None:
    """Neither end parses before the stamp is taken."""

    async def talk(channel: grpc.aio.Channel) -> list[Stamped]:
        stream = rpc.raw_stream_call(channel, "/test.Echo/Stream")()
        heard = []
        for raw in (b"one", b"", b"three"):
            await stream.write(raw)
            heard.append(await stream.read())
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        return heard

    heard = asyncio.run(over_the_wire(Handlers(None), talk))

    assert [each.raw for each in heard] == [b"one", b"", b"three"]
    assert sorted(each.received_ns for each in heard) == [each.received_ns for each in heard]


def test_health_tells_ready_from_alive() -> None:
    """Not serving until told, then serving, for the whole and for each service."""

    async def main() -> list[int]:
        server = rpc.make_server()
        servicer = rpc.add_health_and_reflection(server, ("test.Echo",))
        port = rpc.bind(server, "127.0.0.1:0", insecure=False)
        await server.start()
        said = []
        async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for serving in (False, True, False):
                await rpc.set_health(servicer, ("test.Echo",), serving)
                asked = [health_pb2.HealthCheckRequest(service=name) for name in ("", "test.Echo")]
                said.extend([(await stub.Check(each)).status for each in asked])
        await server.stop(None)
        return said

    no, yes = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING

    assert [no, no, yes, yes, no, no] == asyncio.run(main())
