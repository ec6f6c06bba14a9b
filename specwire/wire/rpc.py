"""Servers, channels, limits, health and the one mapping between our errors and gRPC status codes.

Both ends of a link take their settings from here, so keepalive and message limits always agree. Anything that is not a
SpecwireError is our bug: the caller gets INTERNAL without its text, the log gets the traceback.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import random
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specwire.law.errors import (
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
from specwire.wire.stopwatch import stamp

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Both directions, all links. A prompt of 1.5 million ids takes about 5 MB."""
KEEPALIVE_MS = 20_000
"""Idle time after which a peer is asked for a sign of life. Servers allow half of it, so no link is cut for pinging."""
KEEPALIVE_TIMEOUT_MS = 10_000
RETRY_AFTER_KEY = "retry-after-ms"
"""Trailing metadata of RESOURCE_EXHAUSTED: when to try again."""

_COMMON = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.so_reuseport", 0),
]
CHANNEL_OPTIONS = [
    *_COMMON,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]

T = TypeVar("T")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_chance = random.Random()
"""Our own: the module's belongs to the program that we are a part of."""


def jitter() -> float:
    """What a pause before another attempt is multiplied by, so that not everybody comes back at once."""
    return _chance.uniform(0.7, 1.3)


def new_incarnation() -> int:
    """Random, never zero: names one life of one process."""
    return secrets.randbits(64) | 1


def split_address(address: str, field: str = "address") -> tuple[str, int]:
    """`host:port` or `[v6]:port` to its parts. Raises InvalidArgument."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or "/" in host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument(field, address, "host:port with a port in [0, 65535]")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """True when nobody outside this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(address: str, insecure: bool, field: str = "bind") -> None:
    """Refuses to open an unprotected port to the network unless it was asked for by name."""
    host, _ = split_address(address, field)
    if not insecure and not is_loopback(host):
        raise InvalidArgument(
            field, address, "a loopback address, or say `insecure: true` (--insecure): there is no TLS yet"
        )


def make_server(max_concurrent_rpcs: int | None = None) -> grpc.aio.Server:
    """A server with the shared limits."""
    return grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=max_concurrent_rpcs)


def bind(server: grpc.aio.Server, address: str, insecure: bool, field: str = "bind") -> int:
    """Binds and returns the port. Raises InvalidArgument on a foreign address without `insecure` or a port that is taken."""
    check_bind(address, insecure, field)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise InvalidArgument(field, address, "a free port of this host") from error
    if port == 0:
        raise InvalidArgument(field, address, "a free port of this host")
    return port


def open_channel(address: str) -> grpc.aio.Channel:
    """A long-lived channel with the shared limits. One per peer."""
    split_address(address)
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def raw_stream_handler(
    behaviour: Callable[[AsyncIterator[Any], Context], AsyncIterator[bytes]],
) -> grpc.RpcMethodHandler[Any, Any]:
    """A two-way stream that carries bytes. Requests arrive as `Stamped`, stamped before parsing; responses are bytes."""
    return grpc.stream_stream_rpc_method_handler(behaviour, request_deserializer=stamp, response_serializer=None)


def raw_stream_call(channel: grpc.aio.Channel, method: str) -> grpc.aio.StreamStreamMultiCallable[bytes, Any]:
    """The client's end of `raw_stream_handler`: writes bytes, reads `Stamped`."""
    return channel.stream_stream(method, request_serializer=None, response_deserializer=stamp)


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Our errors to gRPC's codes."""
    match error:
        case InvalidArgument():
            return grpc.StatusCode.INVALID_ARGUMENT, str(error)
        case VersionMismatch() | VocabularyMismatch():
            return grpc.StatusCode.FAILED_PRECONDITION, str(error)
        case CallerFault():
            return grpc.StatusCode.INVALID_ARGUMENT, str(error)
        case NoRoom():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        case TooLate():
            return grpc.StatusCode.DEADLINE_EXCEEDED, str(error)
        case Unavailable():
            return grpc.StatusCode.UNAVAILABLE, str(error)
        case SpecwireError():
            return grpc.StatusCode.INTERNAL, "internal error"
        case _:
            return grpc.StatusCode.INTERNAL, "internal error"


def error_of(call: grpc.RpcError) -> SpecwireError:
    """gRPC's codes back to our errors, for clients."""
    code, text = call.code(), call.details() or ""
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidArgument.told(text) or CallerFault(text)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return VersionMismatch(text)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            if "message larger than max" in text:  # gRPC's own limit: it would not fit later either
                return CallerFault(text)
            return NoRoom(text, _retry_after_s(call))
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return TooLate(text or "deadline exceeded")
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(text)
        case grpc.StatusCode.INTERNAL | grpc.StatusCode.UNKNOWN | grpc.StatusCode.DATA_LOSS:
            return OurFault(f"{code.name}: {text}")
        case _:
            return SpecwireError(f"{code.name}: {text}")


def _retry_after_s(call: grpc.RpcError) -> float:
    pairs: Any = call.trailing_metadata() or ()
    said = str(dict(pairs).get(RETRY_AFTER_KEY, ""))
    return int(said) / 1000 if said.isdecimal() else 1.0


async def abort(context: Context, error: BaseException) -> None:
    """Ends a call with the status of an error. Always raises."""
    code, text = status_of(error)
    if code is grpc.StatusCode.INTERNAL:
        log.error("call failed", exc_info=error)
    if isinstance(error, NoRoom):
        context.set_trailing_metadata(((RETRY_AFTER_KEY, str(int(error.retry_after_s * 1000))),))
    await context.abort(code, text)


def mapped(method: Callable[[Any, Any, Context], Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Decorates a unary handler: our errors become status codes."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: Context) -> T:
        try:
            return await method(self, request, context)
        except (grpc.aio.AbortError, grpc.RpcError):
            raise
        except Exception as error:
            await abort(context, error)
            raise AssertionError("abort raises") from error

    return handler


def add_health_and_reflection(server: grpc.aio.Server, service_names: tuple[str, ...]) -> health.aio.HealthServicer:
    """Standard health (empty name and each service, NOT_SERVING until told) and reflection."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return servicer


async def set_health(servicer: health.aio.HealthServicer, service_names: tuple[str, ...], serving: bool) -> None:
    """Ready is not the same as alive: a process that answers NOT_SERVING lives."""
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", *service_names):
        await servicer.set(name, status)


def host_name() -> str:
    """This host, for people."""
    return socket.gethostname()
