"""The Python client: async, and a sync face over it (an event loop on a thread, not a second copy).

A request whose coordinator goes away is repeated with the seed it already has; tokens that were delivered are compared by id
and skipped, so the caller sees one stream without a gap or a repeat. That is exact because the answer depends on the target,
the seed and the prompt alone. An answer drawn under `rejection` depends on how it was blocked as well: once tokens of it were
delivered it is not repeated, and the caller is told that the coordinator is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor

from specwire.law.errors import InvalidArgument, NoRoom, OurFault, TooLate, Unavailable
from specwire.v1 import inference_pb2 as pb
from specwire.v1 import inference_pb2_grpc, types_pb2
from specwire.wire import rpc

log = logging.getLogger(__name__)

T = TypeVar("T")
DEFAULT_ADDRESS = "127.0.0.1:8470"
RETRY_S = (0.2, 0.5, 1.0, 2.0)
"""Pauses before a lost request is repeated, by times repeated."""
MAX_AHEAD = 64
"""Events made but not yet taken by a synchronous reader: a slow one slows the request, not the memory."""


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted."""

    request_id: str
    model: str
    seed: int
    prompt_tokens: int
    max_tokens: int
    """In force: fewer than asked for where the target's context has no room for more."""
    sampling: types_pb2.Sampling
    law: Literal["shared_noise", "rejection"] = "shared_noise"
    ids_only: bool = False
    """The service has no tokenizer, and tokens come without text."""


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
    """The rest of the text, held back until now because a stop string might have begun in it. Often empty: the answer is the
    text of all events together."""
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
    messages: Sequence[Mapping[str, str]] | None = None,
    prompt_ids: Sequence[int] | None = None,
    max_tokens: int | None = None,
    stop: str | Sequence[str] | None = (),
    stop_token_ids: Sequence[int] | None = (),
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
    private_prompt: bool = False,
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
    request = pb.GenerateRequest(
        ignore_eos=_flag("ignore_eos", ignore_eos),
        return_rounds=_flag("return_rounds", return_rounds),
        request_id=_text("request_id", request_id),
        private_prompt=_flag("private_prompt", private_prompt),
    )
    if prompt is not None:
        request.prompt = _text("prompt", prompt)
    elif messages is not None:
        request.chat.CopyFrom(_chat(messages))
    else:
        _extend("prompt_ids", request.prompt_ids.ids, prompt_ids or ())
        request.prompt_ids.SetInParent()
    request.stop.extend(_text("stop", text) for text in ([stop] if isinstance(stop, str) else _list("stop", stop)))
    _extend("stop_token_ids", request.stop_token_ids, stop_token_ids or ())
    for name, value in (
        ("max_tokens", max_tokens),
        ("temperature", temperature),
        ("top_k", top_k),
        ("top_p", top_p),
        ("min_p", min_p),
        ("seed", seed),
    ):
        if value is not None:
            _set(request, name, value)
    if num_speculative_tokens == "auto":
        request.speculation.auto = True
    elif num_speculative_tokens is not None:
        _set(request.speculation, "num_speculative_tokens", num_speculative_tokens)
    if method is not None:
        request.speculation.method = _METHODS[method]
    if law is not None:
        request.speculation.law = _LAWS[law]
    return request


_FIELDS = frozenset(inspect.signature(make_request).parameters)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(name, value, "True or False")
    return value


def _list(name: str, value: Sequence[str] | None) -> Sequence[str]:
    if value is not None and (not isinstance(value, Iterable) or isinstance(value, bytes)):
        raise InvalidArgument(name, value, "text, or a list of texts")
    return value or ()


def _seconds(name: str, value: object, least: float, most: float, limit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidArgument(name, value, limit)
    return value


def _text(name: str, value: object) -> str:
    """What protobuf can hold as text. Raises InvalidArgument."""
    if not isinstance(value, str):
        raise InvalidArgument(name, value, "text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            name, value[error.start : error.end], "text in valid UTF-8, without lone surrogates"
        ) from error
    return value


def _chat(messages: Sequence[Mapping[str, str]]) -> pb.Chat:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidArgument("messages", messages, "a list of mappings with role and content")
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.keys() - {"role", "content"}:
            raise InvalidArgument(f"messages[{n}]", message, "a mapping of role and content alone")
    return pb.Chat(
        messages=[
            pb.ChatMessage(**{key: _text(f"messages[{n}].{key}", message.get(key)) for key in ("role", "content")})
            for n, message in enumerate(messages)
        ]
    )


def _extend(name: str, field: Any, ids: Iterable[int]) -> None:
    try:
        field.extend(ids)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(name, ids, "token ids in [0, 2^32)") from error


def _set(message: Any, name: str, value: object) -> None:
    kind = message.DESCRIPTOR.fields_by_name[name].cpp_type
    try:
        if kind == FieldDescriptor.CPPTYPE_FLOAT and LARGEST_FLOAT < abs(value) < math.inf:  # type: ignore[arg-type]
            raise InvalidArgument(name, value, f"a number of at most {LARGEST_FLOAT:g}")  # it would become infinite
        setattr(message, name, value)
    except (ValueError, TypeError) as error:
        bits = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}.get(kind)
        limit = "a number" if bits is None else f"a whole number in [0, {2**bits - 1}]"
        raise InvalidArgument(name, value, limit) from error


LARGEST_FLOAT = 3.4028234e38
"""Of 32 bits."""
LONGEST_TIMEOUT_S = 1e8
"""Three years: what lies beyond is no deadline, and too long for gRPC's clocks."""


class Client:
    """Asynchronous client. One channel for its whole life."""

    def __init__(self, address: str | None = None, *, retry_for_s: float = 60.0) -> None:
        """`address`: host:port; default SPECWIRE_ADDRESS or 127.0.0.1:8470. `retry_for_s`: how long a lost coordinator is
        waited for; 0 turns repeating off."""
        self.address = _text("address", address or os.environ.get("SPECWIRE_ADDRESS") or DEFAULT_ADDRESS)
        rpc.split_address(self.address)
        self.retry_for_s = _seconds("retry_for_s", retry_for_s, 0.0, math.inf, "seconds, 0 or more")
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
        try:
            request = make_request(**fields)
        except TypeError:
            if unknown := sorted(fields.keys() - _FIELDS):
                raise InvalidArgument("fields", unknown[0], f"of {', '.join(sorted(_FIELDS))}") from None
            raise
        if timeout is not None:
            most = LONGEST_TIMEOUT_S
            timeout = _seconds("timeout", timeout, -math.inf, most, f"at most {most:.0f} seconds, or None")
        if not request.HasField("seed"):
            request.seed = secrets.randbits(64)  # ours, so that a repeat gives the same answer
        give_up = None if timeout is None else time.monotonic() + timeout
        repeatable = True
        delivery = _Delivery()
        retries = 0
        lost_at: float | None = None
        while True:
            left = None if give_up is None else give_up - time.monotonic()
            if left is not None and left <= 0:
                raise TooLate("deadline exceeded")
            delivery.again()
            call = self._stub().Generate(request, timeout=left)
            try:
                async for response in call:
                    event = delivery.take(response, retries)
                    if event is not None:
                        lost_at = None  # it got further than before
                        yield event
                    if isinstance(event, Started):
                        repeatable = event.law != "rejection" or event.sampling.temperature == 0.0
                    if isinstance(event, Final):
                        return
                raise Unavailable("the stream ended without a final event")
            except (grpc.aio.AioRpcError, Unavailable) as error:
                mapped = rpc.error_of(error) if isinstance(error, grpc.aio.AioRpcError) else error
                now = time.monotonic()
                first, lost_at = lost_at is None, now if lost_at is None else lost_at
                passing = isinstance(mapped, Unavailable) or (isinstance(mapped, NoRoom) and retries > 0)
                lasting = delivery.started and (repeatable or not delivery.begun)
                if not passing or not lasting or now - lost_at >= self.retry_for_s:
                    raise mapped from error
                if first:
                    log.warning("%s is away (%s); asked again for up to %g s", self.address, mapped, self.retry_for_s)
                pause = RETRY_S[min(retries, len(RETRY_S) - 1)]
                if isinstance(mapped, NoRoom):
                    pause = max(pause, mapped.retry_after_s)
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

    async def tokenize(self, text: str | None = None, messages: Sequence[Mapping[str, str]] | None = None) -> list[int]:
        """Ids of a text, or of a conversation put through the chat template."""
        request = pb.TokenizeRequest()
        if (text is None) == (messages is None):
            raise InvalidArgument("input", [text, messages], "exactly one of text, messages")
        if messages is not None:
            request.chat.CopyFrom(_chat(messages))
        else:
            request.text = _text("text", text)
        return list((await self._unary("Tokenize", request, 30.0)).ids)

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        request = pb.DetokenizeRequest(skip_special_tokens=_flag("skip_special_tokens", skip_special_tokens))
        _extend("ids", request.ids, ids)
        return str((await self._unary("Detokenize", request, 30.0)).text)


class _Delivery:
    """What the caller has got of one answer, however often and in whatever pieces the answer is repeated."""

    def __init__(self) -> None:
        self.started = False
        self._ids: list[int] = []
        """Delivered. Only grows."""
        self._chars = 0
        """Characters of text delivered. Only grows."""
        self._seen_ids = 0
        """Of the present repetition."""
        self._seen_chars = 0

    @property
    def begun(self) -> bool:
        """Whether the caller has any token."""
        return bool(self._ids)

    def again(self) -> None:
        """The answer begins once more."""
        self._seen_ids = self._seen_chars = 0

    def take(self, response: pb.GenerateResponse, retries: int) -> Event | None:
        """What is new in this. Raises OurFault when the repeated answer is another one."""
        match response.WhichOneof("event"):
            case "started" if not self.started:
                self.started = True
                return _started(response.started)
            case "tokens":
                ids = self._fresh_ids(tuple(response.tokens.ids))
                text = self._fresh_text(response.tokens.text)
                return Tokens(ids, text) if ids or text else None
            case "final":
                if self._seen_ids < len(self._ids):
                    raise OurFault("the repeated answer is shorter than what was delivered")
                return _final(response.final, self._fresh_text(response.final.text), retries)
        return None

    def _fresh_ids(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        known = self._ids[self._seen_ids : self._seen_ids + len(ids)]
        if list(ids[: len(known)]) != known:
            raise OurFault("the repeated answer differs from what was delivered")
        fresh = ids[len(known) :]
        self._seen_ids += len(ids)
        self._ids.extend(fresh)
        return fresh

    def _fresh_text(self, text: str) -> str:
        known = max(0, min(self._chars - self._seen_chars, len(text)))
        self._seen_chars += len(text)
        self._chars = max(self._chars, self._seen_chars)
        return text[known:]


def _started(message: pb.Started) -> Started:
    return Started(
        message.request_id,
        message.model,
        message.seed,
        message.prompt_tokens,
        message.max_tokens,
        message.sampling,
        "rejection" if message.law == types_pb2.LAW_REJECTION else "shared_noise",
        message.ids_only,
    )


def _final(message: pb.Final, text: str, retries: int) -> Final:
    return Final(
        finish_reason="stop" if message.finish_reason == pb.FINISH_REASON_STOP else "length",
        stop=message.stop if message.HasField("stop") else None,
        text=text,
        usage=message.usage,
        seed=message.seed,
        speculation=message.speculation,
        timing=message.timing,
        rounds=tuple(message.rounds),
        retries=retries,
    )


class SyncClient:
    """The same client for code without an event loop. Every method may be called from any thread."""

    def __init__(self, address: str | None = None, *, retry_for_s: float = 60.0) -> None:
        self._client = Client(address, retry_for_s=retry_for_s)  # first: it may refuse the address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specwire client", daemon=True)
        self._lock = threading.Lock()
        self._closed = False
        self._thread.start()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the client's loop. Raises Unavailable once the client is closed."""
        with self._lock:
            if self._closed:
                coroutine.close()
                raise Unavailable("the client is closed")
            running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return running.result()
        except futures.CancelledError as error:
            raise Unavailable("the client was closed") from error

    def close(self) -> None:
        """Ends what is running, closes the channel and ends the thread. Whoever waits for an answer gets Unavailable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.close()

    def generate(self, *, timeout: float | None = None, **fields: Any) -> Iterator[Event]:
        """As `Client.generate`. Leaving the loop early cancels the request."""
        events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        room = asyncio.Semaphore(MAX_AHEAD)

        async def pump() -> None:
            stream = self._client.generate(timeout=timeout, **fields)
            try:
                async for event in stream:
                    await room.acquire()
                    events.put(event)
                events.put(None)
            except asyncio.CancelledError:
                events.put(Unavailable("the client was closed"))
                raise
            except BaseException as error:
                events.put(error)
            finally:
                await stream.aclose()  # type: ignore[attr-defined]

        task = self._run(_begin(pump))
        try:
            while True:
                event = events.get()
                if event is None:
                    return
                if isinstance(event, BaseException):
                    raise event
                with self._lock:
                    if not self._closed:
                        self._loop.call_soon_threadsafe(room.release)
                yield event
        finally:
            self._leave(task)

    def _leave(self, task: asyncio.Task[None]) -> None:
        """Cancels a request and waits until it is gone. Not from the loop's own thread, where a dropped generator may end."""
        if threading.current_thread() is self._thread:
            task.cancel()
            return
        with contextlib.suppress(Unavailable):  # closed: then it is gone
            self._run(_cancelled(task))

    def stats(self) -> pb.GetStatsResponse:
        """The state of the service."""
        return self._run(self._client.stats())

    def tokenize(self, text: str | None = None, messages: Sequence[Mapping[str, str]] | None = None) -> list[int]:
        """Ids of a text or a conversation."""
        return self._run(self._client.tokenize(text, messages))

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        return self._run(self._client.detokenize(ids, skip_special_tokens))


async def _begin(work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    return asyncio.create_task(work())


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
