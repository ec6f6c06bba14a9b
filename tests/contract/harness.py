"""Both services over real gRPC in this process, and a coordinator in miniature that speaks their streams by hand."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from draft_service.config import DraftConfig
from draft_service.role import DRAFT
from specwire.law.cursor import Prefix
from specwire.law.sampling import shared_noise_choice
from specwire.law.tasks import Answer, ProposeTask, Reason, Refusal, SessionId, Task, VerifyTask
from specwire.law.values import Block, Law, Opening, SamplingSpec, Verdict
from specwire.lm.port import Feed
from specwire.lm.table import TableModel
from specwire.lm.table_config import TableConfig
from specwire.settings import build_config
from specwire.wire import rpc
from specwire.wire.codec import (
    PROTOCOL_VERSION,
    AnswerFrame,
    Hello,
    Kind,
    TaskFrame,
    decode_answer_frame,
    encode_task_frame,
)
from specwire.wire.stopwatch import now_ns
from specwire.worker.observe import StepRecord
from specwire.worker.service import Role, WorkerServer
from target_service.config import TargetConfig
from target_service.role import TARGET

ROLES: dict[str, tuple[Role, Any]] = {"draft": (DRAFT, DraftConfig), "target": (TARGET, TargetConfig)}
PATIENCE_S = 20.0
"""A test that waits longer has failed. Nothing here waits for luck: every wait ends with an event."""


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Steps:
    """An observer that keeps every step. A step is told after its answers went out: `await sizes(server)` before reading."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.answers: list[Answer] = []

    def step_done(self, record: StepRecord) -> None:
        self.records.append(record)

    def task_done(self, answer: Answer) -> None:
        self.answers.append(answer)

    def session_count(self, sessions: int, waiting: int) -> None:
        pass


@contextlib.asynccontextmanager
async def worker(role: str, table: TableConfig | None = None, **settings: Any) -> AsyncIterator[WorkerServer]:
    """A serving worker with a table model. `slots` and `max_block` are the model's, `observers` watch."""
    observers = settings.pop("observers", ())
    model = {
        "model": "table",
        "table": table or TableConfig(),
        "max_sessions": settings.pop("slots", 4),
        "max_block": settings.pop("max_block", 8),
    }
    service, kind = ROLES[role]
    config = build_config(kind, {"profile": False, "model": model, **settings})
    server = WorkerServer(service, config, observers)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def opening(prompt_length: int, **fields: Any) -> Opening:
    """Shared noise at temperature 1, seed 7, unless told otherwise."""
    law = fields.pop("law", Law.SHARED_NOISE)
    seed = fields.pop("seed", 7)
    return Opening(law, SamplingSpec(**fields), seed, 0, prompt_length)


@dataclass
class Text:
    """One session as its coordinator knows it: makes the tasks, by hand."""

    counter: int
    prompt: tuple[int, ...]
    opening: Opening
    incarnation: int = 1
    epoch: int = 1
    number: int = 0
    prefix: Prefix = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = Prefix(self.opening.fingerprint(), self.prompt)

    @property
    def id(self) -> SessionId:
        return SessionId(self.incarnation, self.counter)

    def _head(self, keep: int, end: int | None) -> dict[str, Any]:
        self.number += 1
        return {
            "session": self.id,
            "epoch": self.epoch,
            "number": self.number,
            "keep": keep,
            "keep_hash": self.prefix.hash_at(keep),
            "append": tuple(self.prefix.tokens[keep:end]),
            "opening": None if keep else self.opening,
        }

    def verify(self, keep: int, block: tuple[int, ...] = (), end: int | None = None, **more: Any) -> VerifyTask:
        """Everything from `keep` (to `end`), then the block."""
        laws = more.pop("laws", ())
        return VerifyTask(**self._head(keep, end), block=Block(block, laws), **more)

    def propose(self, keep: int, num_tokens: int, end: int | None = None, **more: Any) -> ProposeTask:
        """Everything from `keep` (to `end`), then so many tokens."""
        return ProposeTask(**self._head(keep, end), num_tokens=num_tokens, **more)

    def ask(self, role: str, keep: int, num_tokens: int = 1, **more: Any) -> Task:
        """A task of either role that yields tokens: a plain step of a target, a proposal of a draft."""
        return self.verify(keep, **more) if role == "target" else self.propose(keep, num_tokens, **more)

    def feed(self, role: str, keep: int, end: int | None = None, **more: Any) -> Task:
        """A task of either role that only brings the cache up to date."""
        if role == "target":
            return self.verify(keep, end=end, prefill_only=True, **more)
        return self.propose(keep, 0, end=end, **more)


def text(prompt: tuple[int, ...] = (1, 2, 3), counter: int = 1, incarnation: int = 1, **fields: Any) -> Text:
    """A session with that prompt."""
    return Text(counter, tuple(prompt), opening(len(prompt), **fields), incarnation)


def plain(table: TableConfig, start: Text, count: int) -> tuple[int, ...]:
    """What the text goes on with when one model decodes alone, token by token: the reference of every claim."""
    model = TableModel(table, 1)
    tokens = list(start.prefix.tokens)
    spec, seed, choice = start.opening.sampling, start.opening.seed, start.opening.choice
    out: list[int] = []
    fed = 0
    for _ in range(count):
        scores = model.forward([Feed(0, fed, tokens[fed:], 1)])
        fed = len(tokens)
        out.append(shared_noise_choice(scores[0].numpy(), spec, seed, choice, len(tokens), model.spec.columns))
        tokens.append(out[-1])
    return tuple(out)


class Peer:
    """A coordinator's end of one stream."""

    def __init__(
        self, server: WorkerServer, role: str, incarnation: int = 1, generation: int = 1, lease_ms: int = 60_000
    ) -> None:
        self._server = server
        self._kind = Kind.VERIFY if role == "target" else Kind.PROPOSE
        self._method = "/specwire.v1.Target/Verify" if role == "target" else "/specwire.v1.Draft/Propose"
        self.hello = Hello(incarnation, PROTOCOL_VERSION, lease_ms, generation)
        self.frames: list[AnswerFrame] = []
        """Every frame that came and was not asked for yet."""
        self.welcome: int | None = None

    async def __aenter__(self) -> Peer:
        await self.connect()
        frame = await self.frame()
        self.welcome = frame.welcome
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.drop()

    async def connect(self, hello: Hello | None = None) -> None:
        """Opens the stream and says Hello; does not wait for the answer."""
        self._channel = rpc.open_channel(self._server.address)
        self._call = rpc.raw_stream_call(self._channel, self._method)()
        await self._call.write(encode_task_frame(self._kind, TaskFrame(hello=hello or self.hello)))

    async def drop(self) -> None:
        """The stream breaks."""
        self._call.cancel()
        await self._channel.close()

    async def send(self, *tasks: Task, **fields: Any) -> None:
        """One frame."""
        await self._call.write(encode_task_frame(self._kind, TaskFrame(tasks=tasks, **fields)))

    async def send_raw(self, raw: bytes) -> None:
        """One frame that need not be one."""
        await self._call.write(raw)

    async def frame(self) -> AnswerFrame:
        """The next frame. Raises AioRpcError when the stream ended."""
        read = await asyncio.wait_for(self._call.read(), PATIENCE_S)
        if read is grpc.aio.EOF:
            code, details = await self._call.code(), await self._call.details()
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
        return decode_answer_frame(self._kind, read.raw, self.hello.incarnation)

    async def ask(self, *tasks: Task, **fields: Any) -> list[Answer]:
        """Sends one frame and waits for the answers of all its tasks, in the order of the tasks."""
        await self.send(*tasks, **fields)
        return await self.answers(*tasks)

    async def one(self, task: Task, **fields: Any) -> Answer:
        """Sends one task and waits for its answer."""
        return (await self.ask(task, **fields))[0]

    async def answers(self, *tasks: Task) -> list[Answer]:
        """Waits for the answers of tasks that were sent."""
        wanted = [(task.session, task.number) for task in tasks]
        found: dict[tuple[SessionId, int], Answer] = {}
        missing = set(wanted)
        while missing:
            frame = await self.frame()
            self.frames.append(frame)
            for answer in frame.answers:
                key = (answer.session, answer.number)
                assert key not in found, f"answered twice: {answer}"
                found[key] = answer
                missing.discard(key)
        return [found[key] for key in wanted]

    async def echo(self, number: int = 99) -> None:
        """Sends an echo and waits for it. Frames before it are kept."""
        await self.send(echo=number)
        while (frame := await self.frame()).echo != number:
            self.frames.append(frame)


async def at_desk(server: WorkerServer, look: Any) -> Any:
    """What `look(desk)` sees between two steps."""
    loop = asyncio.get_running_loop()
    seen: asyncio.Future[Any] = loop.create_future()
    server.engine.put(lambda desk, now: loop.call_soon_threadsafe(seen.set_result, look(desk)))
    return await asyncio.wait_for(seen, PATIENCE_S)


async def sizes(server: WorkerServer) -> dict[str, int]:
    """Entries of every map of the worker, integrity checked."""

    def look(desk: Any) -> dict[str, int]:
        desk.table.check()
        found: dict[str, int] = desk.sizes()
        return found

    sizes: dict[str, int] = await at_desk(server, look)
    return sizes


def model_of(server: WorkerServer) -> TableModel:
    """The table model inside, to let go of a hang."""
    stepper: Any = server.engine.ready.result()
    model: TableModel = stepper._model if hasattr(stepper, "_model") else stepper._proposer._model
    return model


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Gives way to others until the condition holds. Ends with an event; the clock only bounds a test that has failed."""
    deadline = now_ns() + PATIENCE_S * 1e9
    while not await condition():
        assert now_ns() < deadline
        await asyncio.sleep(0.001)


async def until_busy(server: WorkerServer) -> None:
    """Returns once the engine is in a step."""

    async def busy() -> bool:
        return server.engine._busy_since_ns is not None

    await until(busy)


async def until_empty(server: WorkerServer) -> None:
    """Returns once the worker remembers nothing at all."""

    async def empty() -> bool:
        return not any((await sizes(server)).values())

    await until(empty)


def tokens_of(answer: Answer) -> tuple[int, ...]:
    """The tokens that a task without a block yields, whichever role answered."""
    if isinstance(answer.result, Verdict):
        assert answer.result.accepted == 0
        return (answer.result.added,)
    assert isinstance(answer.result, Block), answer
    return answer.result.tokens


def refused(answer: Answer) -> tuple[Reason, int, int]:
    """Reason, length, hash."""
    assert isinstance(answer.result, Refusal), answer
    return answer.result.reason, answer.result.length, answer.result.hash
