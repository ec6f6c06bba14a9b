"""A client that reads the first tokens of a long answer and then stops reading."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator.session import Session
from specwire.client import Client, Tokens
from specwire.wire import rpc
from tests.support.service import PATIENCE_S, POLL_S, Service

NARROW = (
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.experimental.tcp_read_chunk_size", 256),
)
"""Little fits between server and client, so that a client which does not read is soon felt."""


@contextlib.asynccontextmanager
async def slow_reader(stack: Service, **fields: Any) -> AsyncIterator[tuple[Any, list[int], Session]]:
    """The stream, what was read of it, and the session, which pauses for its reader."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc, "CHANNEL_OPTIONS", [*rpc.CHANNEL_OPTIONS, *NARROW])
        client = Client(stack.address)
        stream: Any = client.generate(**fields)
        got: list[int] = []
        async for event in stream:
            if isinstance(event, Tokens):
                got.extend(event.ids)
                break
    (session,) = stack.driver.sessions.values()
    give_up = time.monotonic() + PATIENCE_S
    while session.paused_since_ns is None:
        assert time.monotonic() < give_up, f"{session.generated} tokens made for a client that has read one"
        await asyncio.sleep(POLL_S)
    yield stream, got, session
    await stream.aclose()
    await client.close()
