"""One pass of a workload through a running service, and what was seen of every request.

Closed loop: so many requests at any time, the next one when one ends. Open loop: requests come when they come (Poisson), however
busy the service is; arrivals are seeded, so that variants meet the same ones.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.bench.hf import HuggingFace
from deploy.bench.workload import Item
from specwire.client import Client, Final, Tokens

Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: exactly one of the two is set."""

    concurrency: int | None = None
    rate: float | None = None
    """Requests a second, open loop."""

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.concurrency else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Record:
    """One answer as the client saw it, and what the service says of it."""

    item: Item
    ids: tuple[int, ...]
    ttft_s: float
    """From the request, in an open loop from its arrival, to its first token."""
    total_s: float
    """To its final event."""
    gaps: tuple[float, ...]
    """Seconds between events with tokens."""
    final: Final | None
    """None: no service of ours gave it."""

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None: there is no other."""
        return (self.total_s - self.ttft_s) / (len(self.ids) - 1) if len(self.ids) > 1 else None


@dataclass(frozen=True, slots=True)
class Pass:
    """All answers to a workload, asked in one way."""

    variant: str
    load: Load
    wall_s: float
    records: tuple[Record, ...]
    """In the order of the workload."""

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together."""
        return sum(len(record.ids) for record in self.records) / self.wall_s


async def ask(client: Client, item: Item, options: Options, arrived: float | None = None) -> Record:
    """One greedy answer to a prompt that is read whole, whoever asked it before. `arrived`: when it should have been asked; absent:
    now. Raises what the service answers."""
    begun = time.perf_counter() if arrived is None else arrived
    arrivals: list[float] = []
    ids: list[int] = []
    messages = [{"role": "user", "content": item.prompt}]
    fields = {"temperature": 0.0, "max_tokens": item.max_tokens, "private_prompt": True, **options}
    record: Record | None = None
    async for event in client.generate(messages=messages, **fields):
        if isinstance(event, Tokens) and event.ids:
            arrivals.append(time.perf_counter())
            ids.extend(event.ids)
        elif isinstance(event, Final):
            ended = time.perf_counter()
            first = arrivals[0] if arrivals else ended
            gaps = tuple(after - before for before, after in itertools.pairwise(arrivals))
            record = Record(item, tuple(ids), first - begun, ended - begun, gaps, event)
    assert record is not None, "a stream ends with its final event"
    return record


async def run(
    client: Client,
    variant: str,
    options: Options,
    load: Load,
    items: Sequence[Item],
    advance: Callable[[], None],
    seed: int = 0,
) -> Pass:
    """All items once. `advance` is called after each answer. One failure cancels all others, and is raised."""
    room = asyncio.Semaphore(load.concurrency or len(items))
    begun = time.perf_counter()

    async def one(item: Item, after_s: float) -> Record:
        arrived = None
        if load.rate is not None:
            arrived = begun + after_s
            await asyncio.sleep(max(0.0, arrived - time.perf_counter()))
        async with room:
            record = await ask(client, item, options, arrived)
        advance()
        return record

    after = arrivals(load, len(items), seed)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item, after_s)) for item, after_s in zip(items, after, strict=True)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the others are its cancelled neighbours, or failed for the same reason
    return Pass(variant, load, time.perf_counter() - begun, tuple(task.result() for task in tasks))


async def run_alone(
    variant: str, engine: HuggingFace, load: Load, items: Sequence[Item], advance: Callable[[], None]
) -> Pass:
    """All items once, one after the other, by an engine that knows no batches."""
    begun = time.perf_counter()
    records = []
    for item in items:
        ids, times, total_s = await engine.ask(variant, item)
        gaps = tuple(after - before for before, after in itertools.pairwise(times))
        records.append(Record(item, ids, times[0] if times else total_s, total_s, gaps, None))
        advance()
    return Pass(variant, load, time.perf_counter() - begun, tuple(records))


def arrivals(load: Load, count: int, seed: int) -> list[float]:
    """Seconds from the begin at which requests come; all zero in a closed loop."""
    if load.rate is None:
        return [0.0] * count
    chance = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += chance.expovariate(load.rate)
    return times
