"""The whole stack in this process: coordinator, drafts and targets with table models, over real gRPC, on one event loop.

Law. Nothing here replaces a part of the product: every frame is serialised, sent through a socket and parsed, and the client
is the shipped one. Readiness is asked for (`ready`, `until`, `quiet`), never slept for. A test that breaks something starts a
service of its own; services shared between tests are only asked.

The event loop runs on a thread and lives as long as the tests do, so that services can be shared; `on_the_loop` runs an async
test there. See `processes.py` for the same stack as processes, and `relay.py` for a bad wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coordinator import serve as coordinator_serve
from coordinator.config import CoordinatorConfig
from coordinator.driver import Driver
from draft_service.config import DraftConfig
from draft_service.role import DRAFT
from specwire.client import Client, Final, Started, Tokens
from specwire.lm.table_config import TableConfig
from specwire.settings import build_config
from specwire.v1 import inference_pb2 as pb
from specwire.worker.registration import Registration
from specwire.worker.service import Role, WorkerServer
from target_service.config import TargetConfig
from target_service.role import TARGET
from tests.contract.harness import model_of, plain, sizes, text
from tests.support.relay import Relay

T = TypeVar("T")

PATIENCE_S = 30.0
"""A test that waits longer has failed. Every wait ends with what it waits for, not with a time."""
LONGEST_S = 900.0
"""No test takes longer, the slow ones included: one that hangs must fail."""
POLL_S = 0.005
ROLES: dict[str, tuple[Role, Any]] = {"draft": (DRAFT, DraftConfig), "target": (TARGET, TargetConfig)}


class Loop:
    """An event loop on a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine there and waits for it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()


@functools.cache
def the_loop() -> Loop:
    """The one loop of this test run."""
    return Loop()


def on_the_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test on the shared loop."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def whole() -> None:
            async with asyncio.timeout(LONGEST_S):
                await test(*args, **kwargs)

        the_loop().run(whole())

    return run


@dataclass
class Answer:
    """One request's events, put together."""

    ids: tuple[int, ...] = ()
    text: str = ""
    """All of it, what the final event holds included."""
    chunks: list[Tokens] = field(default_factory=list)
    started: Started | None = None
    final: Final | None = None

    @property
    def reason(self) -> str:
        """Why it ended."""
        assert self.final is not None
        return self.final.finish_reason

    @property
    def speculation(self) -> pb.SpeculationStats:
        """What speculation did."""
        assert self.final is not None
        return self.final.speculation


async def ask(client: Client, prompt_ids: Iterable[int] | None = (1, 2, 3), **fields: Any) -> Answer:
    """One request, from its begin to its end. `prompt_ids` are left out when there is a `prompt` or `messages`."""
    if "prompt" not in fields and "messages" not in fields:
        fields["prompt_ids"] = prompt_ids
    answer = Answer()
    async for event in client.generate(**fields):
        if isinstance(event, Started):
            answer.started = event
        elif isinstance(event, Tokens):
            answer.chunks.append(event)
            answer.ids += event.ids
            answer.text += event.text
        else:
            answer.final = event
            answer.text += event.text
    return answer


def expected_ids(
    table: TableConfig, prompt: Iterable[int], count: int, seed: int = 0, **sampling: Any
) -> tuple[int, ...]:
    """What the model says when it decodes alone, token by token, with no service around it. Greedy: temperature=0."""
    return plain(table, text(tuple(prompt), seed=seed, **sampling), count)


@dataclass(frozen=True)
class WorkerPlan:
    """How a worker is started, and started again."""

    role: str
    name: str
    config: dict[str, Any]
    relay: Relay | None = None


class Service:
    """A running stack. Made by `service`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.address = ""
        self.client: Client
        self.driver: Driver
        """The coordinator's, for looking into it between two events."""
        self.workers: dict[str, WorkerServer] = {}
        """By name, those alive."""
        self.plans: dict[str, WorkerPlan] = {}
        self._settings = settings
        self._coordinator: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    # ---------------------------------------------------------------- starting and stopping

    async def start_coordinator(self) -> None:
        """At the address it had before, if there was one."""
        bind = self.address or "127.0.0.1:0"
        config = CoordinatorConfig.model_validate({"drain_s": 0, "heartbeat_s": 0.1, "bind": bind, **self._settings})
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        original = coordinator_serve.Driver

        def captured(*args: Any, **kwargs: Any) -> Driver:
            self.driver = original(*args, **kwargs)
            return self.driver

        coordinator_serve.Driver = captured  # type: ignore[assignment,misc]
        try:
            self._coordinator = asyncio.create_task(coordinator_serve.serve(config, self._stop, ready.set_result))
            await asyncio.wait((ready, self._coordinator), return_when=asyncio.FIRST_COMPLETED)
        finally:
            coordinator_serve.Driver = original  # type: ignore[misc]
        if not ready.done():
            await self._coordinator  # raises why
        self.address = ready.result()

    async def stop_coordinator(self) -> None:
        """As SIGTERM does, with no time to drain."""
        self._stop.set()
        if self._coordinator is not None:
            await self._coordinator
            self._coordinator = None

    async def start_worker(self, plan: WorkerPlan) -> WorkerServer:
        """A new life under the plan's name, registered as a worker registers itself; behind its relay if it has one."""
        self.plans[plan.name] = plan
        role, kind = ROLES[plan.role]
        server = WorkerServer(role, build_config(kind, {"name": plan.name, "profile": False, **plan.config}))
        await server.start()
        self.workers[plan.name] = server
        address = server.address
        if plan.relay is not None:
            plan.relay.worker = server.address
            address = await plan.relay.start()
        server.registration = Registration(self.address, plan.name, address, server.info, server.engine.trouble)
        server._tasks.append(asyncio.create_task(server.registration.run(), name=f"registration {plan.name}"))
        return server

    async def kill(self, name: str) -> None:
        """A worker ends at once: streams break, nothing is drained, its cache is gone."""
        server = self.workers.pop(name)
        for task in server._tasks:
            task.cancel()
        await asyncio.gather(*server._tasks, return_exceptions=True)
        relay = self.plans[name].relay
        if relay is not None:
            relay.worker = ""
            relay.cut()
        await server._server.stop(None)
        model_of(server).release()
        await asyncio.to_thread(server.engine.stop, PATIENCE_S)

    async def restart(self, name: str) -> WorkerServer:
        """A new life of a worker that was killed: new incarnation, new address."""
        return await self.start_worker(self.plans[name])

    async def close(self) -> None:
        """Ends everything."""
        await self.client.close()
        for name in list(self.workers):
            await self.kill(name)
        await self.stop_coordinator()
        for plan in self.plans.values():
            if plan.relay is not None:
                await plan.relay.stop()

    # ---------------------------------------------------------------- asking

    async def ask(self, prompt_ids: Iterable[int] | None = (1, 2, 3), **fields: Any) -> Answer:
        """One request by the shared client, see `ask`."""
        return await ask(self.client, prompt_ids, **fields)

    async def stats(self) -> pb.GetStatsResponse:
        """As a client sees the service."""
        return await self.client.stats()

    async def until(self, holds: Callable[[pb.GetStatsResponse], bool]) -> pb.GetStatsResponse:
        """Waits until the statistics say so."""
        give_up = time.monotonic() + PATIENCE_S
        while not holds(stats := await self.stats()):
            assert time.monotonic() < give_up, f"waited in vain; last seen:\n{stats}"
            await asyncio.sleep(POLL_S)
        return stats

    async def ready(self) -> None:
        """Waits until every worker that lives is ready in its present life."""
        lives = {name: server.incarnation for name, server in self.workers.items()}

        def all_ready(stats: pb.GetStatsResponse) -> bool:
            seen = {w.name: w.info.incarnation for w in stats.workers if w.state == "ready"}
            return lives.items() <= seen.items()

        await self.until(all_ready)

    async def quiet(self) -> None:
        """Waits until nothing is left of any request: not in the coordinator, and no session, task or slot in a worker."""
        give_up = time.monotonic() + PATIENCE_S
        while left := await self.left():
            assert time.monotonic() < give_up, f"never quiet; left over: {left}"
            await asyncio.sleep(POLL_S)

    async def left(self) -> dict[str, int]:
        """What holds anything on behalf of a request, and how many."""
        driver = self.driver
        found = {
            "coordinator.sessions": len(driver.sessions),
            "coordinator.running": len(driver.admission.running),
            "coordinator.waiting": len(driver.admission.waiting),
            "coordinator.drafting": len(driver.rounds.drafting),
            "coordinator.awaited": len(driver.rounds.awaited),
            "coordinator.groups": sum(map(len, driver.rounds.schedulers.values())),
        }
        for worker in driver.fleet.workers.values():
            found[f"coordinator.bound.{worker.name}"] = len(worker.sessions)
        for name, server in self.workers.items():
            inside = await sizes(server)
            found |= {f"{name}.{key}": inside[key] for key in ("sessions", "waiting", "out")}
        return {name: count for name, count in found.items() if count}


@contextlib.asynccontextmanager
async def service(
    target: TableConfig | None = None,
    *drafts: TableConfig,
    relays: dict[str, Relay] | None = None,
    target_settings: dict[str, Any] | None = None,
    draft_settings: dict[str, Any] | None = None,
    slots: int = 16,
    max_block: int = 8,
    worker_tokenizer: str | None = None,
    **settings: Any,
) -> AsyncIterator[Service]:
    """A stack with one target and any number of drafts, all ready. `relays` by worker name (target-0, draft-0, draft-1, ...).
    `settings` are the coordinator's; unless they say otherwise a draft may take its time, so that a busy machine does not
    turn it off."""
    settings.setdefault("speculation", {"draft_timeout_ms": 10_000})
    stack = Service(settings)
    await stack.start_coordinator()
    stack.client = Client(stack.address)
    tables = {"target-0": target or TableConfig()} | {f"draft-{n}": table for n, table in enumerate(drafts)}
    try:
        for name, table in tables.items():
            role = name.partition("-")[0]
            model = {"model": "table", "table": table, "max_sessions": slots, "max_block": max_block}
            model |= {"tokenizer": worker_tokenizer} if worker_tokenizer else {}
            more = (target_settings if role == "target" else draft_settings) or {}
            config = {"token_budget": max(512, 4 * (max_block + 9)), "model": model, **more}
            await stack.start_worker(WorkerPlan(role, name, config, (relays or {}).get(name)))
        await stack.ready()
        yield stack
    finally:
        await stack.close()


def like(table: TableConfig, **changes: Any) -> TableConfig:
    """The same table with other settings: a draft that disagrees, a model with a fault."""
    return dataclasses.replace(table, **changes)
