"""The Python client: async, and a sync face over it (an event loop on a thread, not a second copy).

A request whose coordinator goes away is repeated with the seed it already has; tokens that were delivered are compared by id
and skipped, so the caller sees one stream without a gap or a repeat. That is exact because the answer depends on the target,
the seed and the prompt alone.
"""

from __future__ import annotations

import asyncio
import os
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

import grpc
import grpc.aio

from specwire.law.errors import InvalidArgument, OurFault, TooLate, Unavailable
from specwire.v1 import inference_pb2 as pb
from specwire.v1 import inference_pb2_grpc, types_pb2
from specwire.wire import rpc

T = TypeVar("T")
DEFAULT_ADDRESS = "127.0.0.1:8470"
RETRY_S = (0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted."""

    request_id: str
    model: str
    seed: int
    prompt_tokens: int
    max_tokens: int
    sampling: types_pb2.Sampling


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens committed in one round. `text` may lag behind `ids`."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Final:
    """The request is complete. Messages as in inference.proto."""

    finish_reason: Literal["stop", "length"]
    stop: str | None
    text: str
    """Text held back until now."""
    usage: pb.Usage
    seed: int
    speculation: pb.SpeculationStats
    timing: pb.Timing
    rounds: tuple[pb.Round, ...]
    retries: int = 0
    """How often the request was repeated after a lost coordinator."""


Event = Started | Tokens | Final

_METHODS = {
    None: pb.METHOD_UNSPECIFIED,
    "auto": pb.METHOD_AUTO,
    "draft_model": pb.METHOD_DRAFT_MODEL,
    "ngram": pb.METHOD_NGRAM,
}
_LAWS = {
    None: types_pb2.LAW_UNSPECIFIED,
    "shared_noise": types_pb2.LAW_SHARED_NOISE,
    "rejection": types_pb2.LAW_REJECTION,
}


def make_request(
    *,
    prompt: str | None = None,
    messages: Sequence[dict[str, str]] | None = None,
    prompt_ids: Sequence[int] | None = None,
    max_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    num_speculative_tokens: int | Literal["auto"] | None = None,
    method: str | None = None,
    law: str | None = None,
    return_rounds: bool = False,
    request_id: str = "",
) -> pb.GenerateRequest:
    """Builds a request. Raises InvalidArgument for what protobuf itself cannot hold; the server checks the rest."""
    given = [
        name
        for name, value in (("prompt", prompt), ("messages", messages), ("prompt_ids", prompt_ids))
        if value is not None
    ]
    if len(given) != 1:
        raise InvalidArgument("input", given, "exactly one of prompt, messages, prompt_ids")
    if method not in _METHODS:
        raise InvalidArgument("method", method, "auto, draft_model or ngram")
    if law not in _LAWS:
        raise InvalidArgument("law", law, "shared_noise or rejection")
    request = pb.GenerateRequest(ignore_eos=ignore_eos, return_rounds=return_rounds, request_id=request_id)
    texts = [("stop", text) for text in ([stop] if isinstance(stop, str) else stop)]
    texts += [("prompt", prompt)] if prompt is not None else []
    texts += [
        (f"messages[{i}].{key}", value) for i, message in enumerate(messages or ()) for key, value in message.items()
    ]
    for name, text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                name, text[error.start : error.end], "valid Unicode (a lone surrogate is not)"
            ) from error
    try:
        if prompt is not None:
            request.prompt = prompt
        elif messages is not None:
            request.chat.messages.extend(
                pb.ChatMessage(role=message.get("role", ""), content=message.get("content", "")) for message in messages
            )
            request.chat.SetInParent()
        else:
            request.prompt_ids.ids.extend(prompt_ids or ())
            request.prompt_ids.SetInParent()
        request.stop.extend([stop] if isinstance(stop, str) else stop)
        request.stop_token_ids.extend(stop_token_ids)
        for name, value in (
            ("max_tokens", max_tokens),
            ("temperature", temperature),
            ("top_k", top_k),
            ("top_p", top_p),
            ("min_p", min_p),
            ("seed", seed),
        ):
            if value is not None:
                setattr(request, name, value)
        if num_speculative_tokens == "auto":
            request.speculation.auto = True
        elif num_speculative_tokens is not None:
            request.speculation.num_speculative_tokens = num_speculative_tokens
    except (ValueError, TypeError) as error:
        raise InvalidArgument("request", str(error), "within the ranges of inference.proto") from error
    if method is not None:
        request.speculation.method = _METHODS[method]
    if law is not None:
        request.speculation.law = _LAWS[law]
    return request


class Client:
    """Asynchronous client. One channel for its whole life."""

    def __init__(self, address: str | None = None, *, retry_for_s: float = 60.0) -> None:
        """`address`: host:port; default SPECWIRE_ADDRESS or 127.0.0.1:8470. `retry_for_s`: how long a lost coordinator is
        waited for; 0 turns repeating off."""
        self.address = address or os.environ.get("SPECWIRE_ADDRESS") or DEFAULT_ADDRESS
        rpc.split_address(self.address)
        self.retry_for_s = retry_for_s
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def _stub(self) -> Any:
        if self._channel is None:
            self._channel = rpc.open_channel(self.address)
        return inference_pb2_grpc.InferenceStub(self._channel)

    async def generate(self, *, timeout: float | None = None, **fields: Any) -> AsyncIterator[Event]:
        """Yields Started, any number of Tokens, Final. Fields: see `make_request`. `timeout` in seconds, for the whole request.

        Raises CallerFault (bad input), NoRoom (with a retry hint), TooLate, Unavailable, OurFault."""
        request = make_request(**fields)
        if not request.HasField("seed"):
            request.seed = secrets.randbits(64)  # ours, so that a repeat gives the same answer
        give_up = None if timeout is None else time.monotonic() + timeout
        delivered: list[int] = []
        sent_chars = 0
        started = False
        retries = 0
        lost_at: float | None = None
        while True:
            left = None if give_up is None else give_up - time.monotonic()
            if left is not None and left <= 0:
                raise TooLate("deadline exceeded")
            seen: list[int] = []
            text_seen = 0
            call = self._stub().Generate(request, timeout=left)
            try:
                async for response in call:
                    lost_at = None
                    match response.WhichOneof("event"):
                        case "started":
                            if not started:
                                started = True
                                yield _started(response.started)
                        case "tokens":
                            ids, text = tuple(response.tokens.ids), response.tokens.text
                            skip = max(0, len(delivered) - len(seen))
                            if tuple(delivered[len(seen) : len(seen) + len(ids)]) != ids[:skip]:
                                raise OurFault("the repeated answer differs from what was delivered")
                            seen.extend(ids)
                            text_seen += len(text)
                            fresh = ids[skip:]
                            fresh_text = (
                                text[max(0, len(text) - (text_seen - sent_chars)) :] if text_seen > sent_chars else ""
                            )
                            sent_chars = max(sent_chars, text_seen)
                            delivered.extend(fresh)
                            if fresh or fresh_text:
                                yield Tokens(fresh, fresh_text)
                        case "final":
                            yield _final(response.final, retries)
                            return
                raise Unavailable("the stream ended without a final event")
            except (grpc.aio.AioRpcError, Unavailable) as error:
                mapped = rpc.error_of(error) if isinstance(error, grpc.aio.AioRpcError) else error
                now = time.monotonic()
                lost_at = lost_at or now
                if not isinstance(mapped, Unavailable) or not started or now - lost_at > self.retry_for_s:
                    raise mapped from error
                pause = RETRY_S[min(retries, len(RETRY_S) - 1)]
                retries += 1
                await asyncio.sleep(pause if give_up is None else max(0.0, min(pause, give_up - now)))
            finally:
                call.cancel()

    async def _unary(self, method: str, request: Any, timeout: float | None) -> Any:
        try:
            return await getattr(self._stub(), method)(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_of(error) from error

    async def stats(self, timeout: float | None = 10.0) -> pb.GetStatsResponse:
        """The state of the service."""
        response: pb.GetStatsResponse = await self._unary("GetStats", pb.GetStatsRequest(), timeout)
        return response

    async def tokenize(self, text: str | None = None, messages: Sequence[dict[str, str]] | None = None) -> list[int]:
        """Ids of a text, or of a conversation put through the chat template."""
        request = pb.TokenizeRequest()
        if messages is not None:
            request.chat.messages.extend(pb.ChatMessage(**message) for message in messages)
        else:
            request.text = text or ""
        return list((await self._unary("Tokenize", request, 30.0)).ids)

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        request = pb.DetokenizeRequest(ids=ids, skip_special_tokens=skip_special_tokens)
        return str((await self._unary("Detokenize", request, 30.0)).text)


def _started(message: pb.Started) -> Started:
    return Started(
        message.request_id, message.model, message.seed, message.prompt_tokens, message.max_tokens, message.sampling
    )


def _final(message: pb.Final, retries: int) -> Final:
    return Final(
        finish_reason="stop" if message.finish_reason == pb.FINISH_REASON_STOP else "length",
        stop=message.stop if message.HasField("stop") else None,
        text=message.text,
        usage=message.usage,
        seed=message.seed,
        speculation=message.speculation,
        timing=message.timing,
        rounds=tuple(message.rounds),
        retries=retries,
    )


class SyncClient:
    """The same client for code without an event loop."""

    def __init__(self, address: str | None = None, *, retry_for_s: float = 60.0) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specwire client", daemon=True)
        self._thread.start()
        self._client = Client(address, retry_for_s=retry_for_s)

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Closes the channel and ends the thread."""
        if self._thread.is_alive():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def generate(self, *, timeout: float | None = None, **fields: Any) -> Iterator[Event]:
        """As `Client.generate`. Leaving the loop early cancels the request."""
        events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        room = asyncio.Semaphore(64)  # events made but not yet taken: a slow reader slows the request, not the memory

        async def pump() -> None:
            stream = self._client.generate(timeout=timeout, **fields)
            try:
                async for event in stream:
                    await room.acquire()
                    events.put(event)
                events.put(None)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                events.put(error)
            finally:
                await stream.aclose()  # type: ignore[attr-defined]

        task = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while True:
                event = events.get()
                if event is None:
                    return
                if isinstance(event, BaseException):
                    raise event
                self._loop.call_soon_threadsafe(room.release)
                yield event
        finally:
            task.cancel()

    def stats(self) -> pb.GetStatsResponse:
        """The state of the service."""
        return self._run(self._client.stats())

    def tokenize(self, text: str | None = None, messages: Sequence[dict[str, str]] | None = None) -> list[int]:
        """Ids of a text or a conversation."""
        return self._run(self._client.tokenize(text, messages))

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        return self._run(self._client.detokenize(ids, skip_special_tokens))
