"""The client against a scripted server over real gRPC: events, errors, repeating after a loss, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest

from specwire import client as module
from specwire.client import Client, Final, Started, SyncClient, Tokens, make_request
from specwire.law.errors import (
    CallerFault,
    InvalidArgument,
    NoRoom,
    OurFault,
    SpecwireError,
    TooLate,
    Unavailable,
    VersionMismatch,
)
from specwire.v1 import inference_pb2 as pb
from specwire.v1 import inference_pb2_grpc, types_pb2
from specwire.wire import rpc

Code = grpc.StatusCode
PATIENCE_S = 20.0

# ------------------------------------------------------------------ the scripted server


def started(**fields: Any) -> pb.GenerateResponse:
    """The first event."""
    return pb.GenerateResponse(started=pb.Started(**{"request_id": "r", "model": "m", "seed": 7, **fields}))


def tokens(*ids: int, text: str = "") -> pb.GenerateResponse:
    """Some tokens."""
    return pb.GenerateResponse(tokens=pb.Tokens(ids=ids, text=text))


def final(text: str = "", **fields: Any) -> pb.GenerateResponse:
    """The last event."""
    return pb.GenerateResponse(final=pb.Final(**{"finish_reason": pb.FINISH_REASON_LENGTH, "text": text, **fields}))


class Hang:
    """The server says nothing more until the client goes away."""


Line = pb.GenerateResponse | SpecwireError | grpc.StatusCode | Hang
HANG = Hang()


class Scripted(inference_pb2_grpc.InferenceServicer):
    """Plays one script per call; the last one is played again for every further call."""

    def __init__(self, scripts: tuple[list[Line], ...]) -> None:
        self.scripts = scripts
        self.requests: list[pb.GenerateRequest] = []
        self.unary: list[Any] = []
        self.gone = threading.Event()
        """A client went away before its script was over."""
        self.said = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """One answer."""
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        try:
            for line in script:
                match line:
                    case SpecwireError():
                        await rpc.abort(context, line)
                    case grpc.StatusCode():
                        await context.abort(line, "as scripted")
                    case Hang():
                        await asyncio.Event().wait()
                    case _:
                        yield line
                        self.said += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.gone.set()
            raise

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Remembers what was asked."""
        self.unary.append(request)
        return pb.TokenizeResponse(ids=[1, 2])

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Remembers what was asked."""
        self.unary.append(request)
        return pb.DetokenizeResponse(text="ab")

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        """Fails: this service is away."""
        await rpc.abort(context, Unavailable("no target"))
        raise AssertionError


class Server:
    """A scripted server on an event loop of its own, so that both kinds of client can call it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted server")
        self._thread.start()
        self._server: Any = None
        self.address = ""
        self.script: Scripted

    def run(self, coroutine: Any) -> Any:
        """Runs a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def play(self, *scripts: list[Line], address: str = "127.0.0.1:0") -> Scripted:
        """Serves these scripts."""
        self.script = Scripted(scripts)

        async def start() -> None:
            self._server = rpc.make_server()
            inference_pb2_grpc.add_InferenceServicer_to_server(self.script, self._server)
            self.address = f"127.0.0.1:{rpc.bind(self._server, address, insecure=False)}"
            await self._server.start()

        self.run(start())
        return self.script

    def stop(self) -> None:
        """Kills the server: every call breaks."""
        if self._server is not None:
            self.run(self._server.stop(None))
            self._server = None

    def close(self) -> None:
        """Ends the loop as well."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    """A server without a script yet."""
    each = Server()
    yield each
    each.close()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats come without a pause."""
    monkeypatch.setattr(module, "RETRY_S", (0.0,))


Ask = Callable[..., list[Any]]


def ask_async(
    address: str, *, timeout: float | None = PATIENCE_S, retry_for_s: float = 60.0, **fields: Any
) -> list[Any]:
    """All events of a request, the last of them an error if it ended in one."""

    async def main() -> list[Any]:
        events: list[Any] = []
        async with Client(address, retry_for_s=retry_for_s) as client:
            try:
                async for event in client.generate(timeout=timeout, **fields):
                    events.append(event)  # noqa: PERF401
            except SpecwireError as error:
                events.append(error)
        return events

    return asyncio.run(main())


def ask_sync(
    address: str, *, timeout: float | None = PATIENCE_S, retry_for_s: float = 60.0, **fields: Any
) -> list[Any]:
    """The same by the synchronous client."""
    events: list[Any] = []
    with SyncClient(address, retry_for_s=retry_for_s) as client:
        try:
            for event in client.generate(timeout=timeout, **fields):
                events.append(event)  # noqa: PERF402
        except SpecwireError as error:
            events.append(error)
    return events


@pytest.fixture(params=[ask_async, ask_sync], ids=["async", "sync"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Both faces."""
    face: Ask = request.param
    return face


def streamed(events: list[Any]) -> tuple[tuple[int, ...], str]:
    """All ids and all text that a caller has got."""
    ids = tuple(token for event in events if isinstance(event, Tokens) for token in event.ids)
    return ids, "".join(event.text for event in events if isinstance(event, Tokens | Final))


# ------------------------------------------------------------------ events and errors


def test_events_come_as_values(server: Server, ask: Ask) -> None:
    """Started, tokens, final, each with everything the server said."""
    usage = pb.Usage(prompt_tokens=2, completion_tokens=3)
    last = pb.Final(
        finish_reason=pb.FINISH_REASON_STOP, stop="\n", text="c", usage=usage, seed=7, rounds=[pb.Round(index=4)]
    )
    server.play(
        [started(prompt_tokens=2, max_tokens=9), tokens(1, 2, text="a"), tokens(3), pb.GenerateResponse(final=last)]
    )

    assert ask(server.address, prompt_ids=[5, 6]) == [
        Started("r", "m", 7, 2, 9, types_pb2.Sampling()),
        Tokens((1, 2), "a"),
        Tokens((3,), ""),
        Final("stop", "\n", "c", usage, 7, pb.SpeculationStats(), pb.Timing(), (pb.Round(index=4),), retries=0),
    ]


def test_no_stop_string_is_none(server: Server, ask: Ask) -> None:
    """An end token ended it, or the limit."""
    server.play([started(), tokens(1), final()])
    (*_, last) = ask(server.address, prompt="a")

    assert ("length", None) == (last.finish_reason, last.stop)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidArgument("top_p", 0, "in (0, 1]"), InvalidArgument),
        (CallerFault("not so"), CallerFault),
        (VersionMismatch("1 and 2"), VersionMismatch),
        (NoRoom("full", 2.5), NoRoom),
        (TooLate("over"), TooLate),
        (Unavailable("no target"), Unavailable),
        (OurFault("secret"), OurFault),
        (Code.UNIMPLEMENTED, SpecwireError),
    ],
)
def test_errors_come_as_ours(server: Server, ask: Ask, error: Any, kind: type[SpecwireError]) -> None:
    """Before anything was accepted nothing is repeated, whatever it was."""
    script = server.play([error])
    (raised,) = ask(server.address, prompt="a")

    assert (kind, 1) == (type(raised), len(script.requests))
    assert not isinstance(raised, NoRoom) or raised.retry_after_s == 2.5


def test_nobody_there_is_unavailable(server: Server, ask: Ask) -> None:
    """A wrong address is told at once, not waited for."""
    server.play([started()])
    server.stop()
    (raised,) = ask(server.address, prompt="a")

    assert Unavailable is type(raised)


def test_a_failure_of_the_answer_comes_after_its_tokens(server: Server, ask: Ask) -> None:
    """What was delivered stays delivered."""
    server.play([started(), tokens(1, text="a"), OurFault("nan")])
    *events, raised = ask(server.address, prompt="a")

    assert (((1,), "a"), OurFault) == (streamed(events), type(raised))


def test_a_seed_is_chosen_where_none_is_given(server: Server, ask: Ask) -> None:
    """By the client, so that a repeat can name it; a given one is taken as it is."""
    script = server.play([started(), final()])
    ask(server.address, prompt="a")
    ask(server.address, prompt="a")
    ask(server.address, prompt="a", seed=0)
    seeds = [request.seed for request in script.requests]

    assert (True, 0, True) == (seeds[0] != seeds[1], seeds[2], all(r.HasField("seed") for r in script.requests))


# ------------------------------------------------------------------ repeating


@pytest.mark.parametrize(
    "again",
    [
        [tokens(1, 2, text="ab"), tokens(3, 4, text="cd"), final("e")],
        [tokens(1, text="a"), tokens(2, 3, 4, text="bcd"), final("e")],
        [tokens(1, 2, 3, 4, text="abcd"), final("e")],
        [tokens(1, 2, 3, text=""), tokens(4, text="abcd"), final("e")],
        [tokens(1, 2, 3, 4, text="a"), final("bcde")],
        [tokens(1, 2, 3, 4), final("abcde")],
    ],
    ids=["same cuts", "finer", "at once", "later", "text held back", "text at the end"],
)
def test_a_lost_answer_is_repeated_without_a_gap_or_a_repeat(server: Server, ask: Ask, again: list[Line]) -> None:
    """However the repeated answer is cut, the caller sees each id and each character once."""
    script = server.play([started(), tokens(1, 2, text="ab"), Code.UNAVAILABLE], [started(), *again])
    events = ask(server.address, prompt="a")

    assert ((1, 2, 3, 4), "abcde") == streamed(events)
    assert [Started, 1] == [type(events[0]), events[-1].retries]
    assert 1 == sum(isinstance(event, Started) for event in events)
    assert script.requests[0] == script.requests[1]


def test_a_stream_that_ends_without_a_word_is_repeated(server: Server, ask: Ask) -> None:
    """Every accepted request ends in one terminal event; an end without one is a loss."""
    server.play([started(), tokens(1, text="a")], [started(), tokens(1, 2, text="ab"), final()])

    assert ((1, 2), "ab") == streamed(ask(server.address, prompt="a"))


def test_many_losses_are_repeated(server: Server, ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    """Each gets a little further, and once it got nothing new at all. Whoever waits is told, once for each loss that goes on."""
    server.play(
        [started(), tokens(1, text="a"), Code.UNAVAILABLE],
        [Code.UNAVAILABLE],
        [started(), Code.UNAVAILABLE],
        [started(), tokens(1, 2, text="ab"), Code.UNAVAILABLE],
        [started(), tokens(1, text="a"), tokens(2, 3, text="bc"), final()],
    )
    events = ask(server.address, prompt="a")

    assert (((1, 2, 3), "abc"), 4) == (streamed(events), events[-1].retries)
    told = [each.getMessage() for each in caplog.records if each.name == "specwire.client"]
    assert 2 == len(told)
    assert all(each.startswith(f"{server.address} is away (") and each.endswith("up to 60 s") for each in told)


def test_a_coordinator_that_comes_back_full_is_asked_again(server: Server, ask: Ask) -> None:
    """Everybody repeats at the same time after a restart; half an answer must not fail for that."""
    server.play([started(), tokens(1), Code.UNAVAILABLE], [NoRoom("full", 0.0)], [started(), tokens(1, 2), final()])

    assert streamed(ask(server.address, prompt="a"))[0] == (1, 2)


@pytest.mark.parametrize(
    "again",
    [
        [tokens(1, 9, 3), final()],
        [tokens(1), tokens(9), final()],
        [tokens(1), final()],
        [final()],
    ],
    ids=["another token", "another token later", "a shorter answer", "no answer"],
)
def test_a_repeat_that_differs_is_our_fault(server: Server, ask: Ask, again: list[Line]) -> None:
    """Exactness is the promise; an answer patched together from two would be neither."""
    server.play([started(), tokens(1, 2), Code.UNAVAILABLE], [started(), *again])
    *events, raised = ask(server.address, prompt="a")

    assert (((1, 2), ""), OurFault) == (streamed(events), type(raised))


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"law": "rejection", "temperature": 1.0}, 1),
        ({"law": "rejection"}, 1),
        ({"law": "rejection", "temperature": 0.0}, 2),
        ({"law": "shared_noise", "temperature": 1.0}, 2),
    ],
)
def test_a_drawn_answer_is_repeated_only_where_it_would_be_the_same(
    server: Server, ask: Ask, fields: dict[str, Any], asked: int
) -> None:
    """Under `rejection` an answer depends on how it was blocked: what was delivered cannot be continued by another draw."""
    law = types_pb2.LAW_REJECTION if fields["law"] == "rejection" else types_pb2.LAW_SHARED_NOISE
    told = started(law=law, sampling=types_pb2.Sampling(temperature=fields.get("temperature", 1.0)))
    script = server.play([told, tokens(1), Code.UNAVAILABLE], [told, tokens(1, 2), final()])
    *_, last = ask(server.address, prompt="a", **fields)

    assert (asked, Unavailable if asked == 1 else Final) == (len(script.requests), type(last))


def test_a_drawn_answer_that_has_not_begun_is_repeated(server: Server, ask: Ask) -> None:
    """Nothing was delivered that the other draw could contradict."""
    server.play([started(), Code.UNAVAILABLE], [started(), tokens(1, 2), final()])

    assert streamed(ask(server.address, prompt="a", law="rejection"))[0] == (1, 2)


def test_other_errors_are_not_repeated(server: Server, ask: Ask) -> None:
    """They would come again."""
    script = server.play([started(), tokens(1), OurFault("nan")])
    ask(server.address, prompt="a")

    assert len(script.requests) == 1


def test_repeating_can_be_turned_off(server: Server, ask: Ask) -> None:
    """`retry_for_s=0`: the first loss is told."""
    script = server.play([started(), tokens(1), Code.UNAVAILABLE], [started(), tokens(1), final()])
    *_, raised = ask(server.address, prompt="a", retry_for_s=0)

    assert (Unavailable, 1) == (type(raised), len(script.requests))


def test_repeating_ends(server: Server, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that accepts, delivers nothing new and is lost again is not asked for ever."""
    now = iter(range(10**6))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(now)))
    script = server.play([started(), tokens(1), Code.UNAVAILABLE])
    *_, raised = ask(server.address, prompt="a", retry_for_s=10.0, timeout=None)

    assert Unavailable is type(raised)
    assert 1 < len(script.requests) < 15


def test_a_restarted_coordinator_is_found_again(server: Server, ask: Ask) -> None:
    """The socket itself breaks, and another process listens at the same address."""
    server.play([started(), tokens(1, text="a"), HANG])
    came = threading.Event()

    def restart() -> None:
        came.wait(PATIENCE_S)
        address = server.address
        server.stop()
        server.play([started(), tokens(1, 2, text="ab"), final()], address=address)

    other = threading.Thread(target=restart)
    other.start()
    before = threading.Thread(target=_when_said, args=(server.script, 2, came))
    before.start()
    events = ask(server.address, prompt="a")
    for thread in (other, before):
        thread.join(PATIENCE_S)

    assert ((1, 2), "ab") == streamed(events)


def _when_said(script: Scripted, count: int, come: threading.Event) -> None:
    limit = time.monotonic() + PATIENCE_S
    while script.said < count and time.monotonic() < limit:
        time.sleep(0.001)
    come.set()


# ------------------------------------------------------------------ deadlines and leaving


@pytest.mark.parametrize("timeout", [1e9, float("inf"), float("nan")])
def test_a_deadline_beyond_all_clocks_is_refused(server: Server, ask: Ask, timeout: float) -> None:
    """gRPC would take it for one in the past. None means none."""
    script = server.play([started(), final()])

    assert [InvalidArgument] == [type(event) for event in ask(server.address, prompt="a", timeout=timeout)]
    assert script.requests == []


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_a_deadline_in_the_past_is_too_late(server: Server, ask: Ask, timeout: float) -> None:
    """Nothing is sent."""
    script = server.play([started(), final()])

    assert [TooLate] == [type(event) for event in ask(server.address, prompt="a", timeout=timeout)]
    assert script.requests == []


def test_the_deadline_ends_a_silent_answer(server: Server, ask: Ask) -> None:
    """Also one that has begun."""
    server.play([started(), tokens(1), HANG])
    *events, raised = ask(server.address, prompt="a", timeout=0.3)

    assert (((1,), ""), TooLate) == (streamed(events), type(raised))


def test_the_deadline_is_for_all_repeats_together(server: Server, ask: Ask) -> None:
    """A service that is lost over and over cannot stretch it."""
    server.play([started(), Code.UNAVAILABLE])
    began = time.monotonic()
    *_, raised = ask(server.address, prompt="a", timeout=0.3)

    assert TooLate is type(raised)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_leaving_early_cancels_the_call(server: Server) -> None:
    """The work behind it stops; async."""
    script = server.play([started(), tokens(1), HANG])

    async def main() -> None:
        async with Client(server.address) as client:
            async for event in client.generate(prompt="a"):
                if isinstance(event, Tokens):
                    break
            assert await asyncio.to_thread(script.gone.wait, PATIENCE_S)

    asyncio.run(main())


def test_cancelling_the_task_cancels_the_call(server: Server) -> None:
    """As a web server does when its own client leaves."""
    script = server.play([started(), tokens(1), HANG])

    async def main() -> None:
        async with Client(server.address) as client:
            got = asyncio.Event()

            async def read() -> None:
                async for event in client.generate(prompt="a"):
                    if isinstance(event, Tokens):
                        got.set()

            reading = asyncio.create_task(read())
            await got.wait()
            reading.cancel()
            await asyncio.wait([reading])
            assert reading.cancelled()
            assert await asyncio.to_thread(script.gone.wait, PATIENCE_S)

    asyncio.run(main())


def test_leaving_early_cancels_the_call_sync(server: Server) -> None:
    """Before the loop is left, so that closing the client afterwards finds nothing running."""
    script = server.play([started(), tokens(1), HANG])
    with SyncClient(server.address) as client:
        for event in client.generate(prompt="a"):
            if isinstance(event, Tokens):
                break

        assert script.gone.wait(PATIENCE_S)


def test_closing_wakes_a_reader(server: Server) -> None:
    """A thread that waits for the next event is told, not left waiting for ever."""
    server.play([started(), HANG])
    client = SyncClient(server.address)
    events: list[Any] = []
    begun = threading.Event()

    def read() -> None:
        try:
            for event in client.generate(prompt="a"):
                events.append(event)
                begun.set()
        except SpecwireError as error:
            events.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(PATIENCE_S)
    client.close()
    reader.join(PATIENCE_S)

    assert [Started, Unavailable] == [type(event) for event in events]
    assert not reader.is_alive()


def test_a_closed_client_says_so() -> None:
    """Closing twice is fine, asking afterwards is not."""
    client = SyncClient("127.0.0.1:1")
    client.close()
    client.close()

    with pytest.raises(Unavailable, match="closed"):
        client.stats()
    with pytest.raises(Unavailable, match="closed"):
        next(client.generate(prompt="a"))


def test_a_stream_outlives_its_client_quietly(server: Server) -> None:
    """A generator that is dropped after the client was closed raises nothing and hangs nowhere."""
    server.play([started(), tokens(1), HANG])
    client = SyncClient(server.address)
    stream = client.generate(prompt="a")
    next(stream)
    client.close()
    stream.close()

    assert list(stream) == []


def test_a_bad_address_leaves_nothing_behind() -> None:
    """It is refused before anything is started."""
    before = threading.active_count()
    for make in (Client, SyncClient):
        with pytest.raises(InvalidArgument, match="host:port"):
            make("nowhere")

    assert before == threading.active_count()


def test_a_hundred_requests_leave_nothing_behind(server: Server) -> None:
    """Finished, failed or left early: no task, no thread."""
    server.play([started(), tokens(1), final()], [NoRoom("full")], [started(), tokens(1), HANG])

    async def main() -> int:
        async with Client(server.address) as client:
            for turn in range(100):
                try:
                    async for event in client.generate(prompt="a"):
                        if turn > 1 and isinstance(event, Tokens):
                            break
                except NoRoom:
                    pass
            gc.collect()
            for _ in range(1000):  # turns of the loop, for calls that are just ending
                await asyncio.sleep(0)
        return len(asyncio.all_tasks()) - 1

    before = threading.active_count()
    left = asyncio.run(main())
    with SyncClient(server.address) as client:
        for _ in range(20):
            for event in client.generate(prompt="a"):
                if isinstance(event, Tokens):
                    break

    assert (0, before) == (left, threading.active_count())


def test_a_slow_reader_does_not_fill_memory(server: Server) -> None:
    """The synchronous client takes events up to a limit; after that the server waits."""
    script = server.play([started(), *[tokens(n, text="x" * 50_000) for n in range(400)], final()])
    with SyncClient(server.address) as client:
        stream = client.generate(prompt="a")
        next(stream)
        _when_said(script, 100, threading.Event())
        held = script.said
        rest = list(stream)

    assert held < 400
    assert len(rest) == 401


# ------------------------------------------------------------------ other calls


def test_tokenize_and_detokenize(server: Server) -> None:
    """Text, conversation and ids reach the server as they are."""
    script = server.play([])
    messages = [{"role": "user", "content": "hi"}]
    with SyncClient(server.address) as client:
        got = [client.tokenize("a"), client.tokenize(messages=messages), client.detokenize([3, 4], True)]

    assert [[1, 2], [1, 2], "ab"] == got
    assert script.unary == [
        pb.TokenizeRequest(text="a"),
        pb.TokenizeRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])),
        pb.DetokenizeRequest(ids=[3, 4], skip_special_tokens=True),
    ]


def test_unary_errors_come_as_ours(server: Server) -> None:
    """The same mapping as for answers."""
    server.play([])
    with SyncClient(server.address) as client, pytest.raises(Unavailable, match="no target"):
        client.stats()


def test_the_address_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given, else SPECWIRE_ADDRESS, else the default; read when a client is made, not at import."""
    monkeypatch.setenv("SPECWIRE_ADDRESS", "127.0.0.1:9")
    from_environment = Client().address
    monkeypatch.delenv("SPECWIRE_ADDRESS")

    assert ("127.0.0.1:9", "127.0.0.1:8470", "h:1") == (from_environment, Client().address, Client("h:1").address)


# ------------------------------------------------------------------ requests


def test_a_request_holds_what_was_given() -> None:
    """Field by field; what was left out is absent, so that the server's default counts."""
    request = make_request(
        prompt_ids=[1, 2],
        max_tokens=3,
        stop="x",
        stop_token_ids=[4],
        ignore_eos=True,
        temperature=0.5,
        top_k=5,
        top_p=0.25,
        min_p=0.125,
        seed=6,
        num_speculative_tokens=7,
        method="ngram",
        law="rejection",
        return_rounds=True,
        request_id="id",
    )

    assert request == pb.GenerateRequest(
        prompt_ids=pb.TokenIds(ids=[1, 2]),
        max_tokens=3,
        stop=["x"],
        stop_token_ids=[4],
        ignore_eos=True,
        temperature=0.5,
        top_k=5,
        top_p=0.25,
        min_p=0.125,
        seed=6,
        speculation=pb.Speculation(num_speculative_tokens=7, method=pb.METHOD_NGRAM, law=types_pb2.LAW_REJECTION),
        return_rounds=True,
        request_id="id",
    )
    assert pb.GenerateRequest(prompt="") == make_request(prompt="")


def test_auto_is_asked_for_by_name() -> None:
    """Not the same as leaving it out: the service may have a fixed length."""

    assert pb.Speculation(auto=True) == make_request(prompt="a", num_speculative_tokens="auto").speculation


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "input"),
        ({"prompt": "a", "prompt_ids": [1]}, "input"),
        ({"prompt": "a", "method": "magic"}, "method"),
        ({"prompt": "a", "law": "magic"}, "law"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "stop": ["b", "\udfff"]}, "stop"),
        ({"prompt": "a", "request_id": "\ud800"}, "request_id"),
        ({"messages": [{"role": "user", "content": "a\ud800b"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["part"]}]}, "messages[0].content"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "stop": [5]}, "stop"),
        ({"prompt_ids": [-1]}, "prompt_ids"),
        ({"prompt_ids": ["a"]}, "prompt_ids"),
        ({"prompt_ids": [2**32]}, "prompt_ids"),
        ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "top_k": -1}, "top_k"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"prompt": "a", "num_speculative_tokens": "atuo"}, "num_speculative_tokens"),
        ({"prompt": "a", "stop": 5}, "stop"),
        ({"prompt": "a", "ignore_eos": "no"}, "ignore_eos"),
        ({"prompt": "a", "private_prompt": 1}, "private_prompt"),
        ({"prompt": "a", "temperature": 1e39}, "temperature"),
        ({"prompt": "a", "top_p": -1e300}, "top_p"),
    ],
)
def test_what_the_wire_cannot_hold_is_named(fields: dict[str, Any], field: str) -> None:
    """By its field; the server never sees it."""
    with pytest.raises(InvalidArgument) as caught:
        make_request(**fields)

    assert field == caught.value.field


def test_nothing_given_is_nothing_asked() -> None:
    """None is the same as left out, in every field that may be."""
    optional = (
        "max_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "method",
        "law",
    )

    assert make_request(prompt="a") == make_request(prompt="a", **dict.fromkeys(optional))


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: Client(5), "address"),  # type: ignore[arg-type]
        (lambda: Client("http://127.0.0.1:8470"), "address"),
        (lambda: Client(retry_for_s="x"), "retry_for_s"),  # type: ignore[arg-type]
        (lambda: Client(retry_for_s=-1.0), "retry_for_s"),
        (lambda: Client(retry_for_s=float("nan")), "retry_for_s"),
        (lambda: SyncClient(retry_for_s=None), "retry_for_s"),  # type: ignore[arg-type]
        (lambda: asked(prompt="a", timeout="1"), "timeout"),
        (lambda: asked(prompt="a", timeout=True), "timeout"),
        (lambda: asked(prompt="a", tempreature=1.0), "fields"),
        (lambda: asked(tempreature=1.0), "fields"),
        (lambda: called(lambda client: client.tokenize()), "input"),
        (lambda: called(lambda client: client.tokenize("a", [])), "input"),
        (lambda: called(lambda client: client.detokenize([-1])), "ids"),
        (lambda: called(lambda client: client.detokenize("ab")), "ids"),
        (lambda: called(lambda client: client.detokenize([1.5])), "ids"),
        (lambda: called(lambda client: client.detokenize([1], "no")), "skip_special_tokens"),
    ],
)
def test_a_slip_of_the_pen_is_an_error_of_ours(call: Callable[[], object], field: str) -> None:
    """Named by its field, before anything is sent."""
    with pytest.raises(InvalidArgument) as caught:
        call()

    assert field == caught.value.field


def asked(**fields: Any) -> None:
    """A request to nobody."""
    with SyncClient("127.0.0.1:1", retry_for_s=0.0) as client:
        list(client.generate(**fields))


def called(call: Callable[[SyncClient], object]) -> None:
    """The same for anything else."""
    with SyncClient("127.0.0.1:1", retry_for_s=0.0) as client:
        call(client)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"text": "\ud800"}, "text"), ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content")],
)
def test_lone_surrogates_cannot_be_tokenized(fields: dict[str, Any], field: str) -> None:
    """The same words as for a prompt."""

    async def main() -> None:
        async with Client("127.0.0.1:1") as client:
            await client.tokenize(**fields)

    with pytest.raises(InvalidArgument) as caught:
        asyncio.run(main())

    assert field == caught.value.field
