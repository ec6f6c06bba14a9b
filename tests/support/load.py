"""Requests that keep coming while a test breaks things, each compared with what the target says alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

from specwire.client import Client
from specwire.law.errors import Unavailable
from specwire.lm.table_config import TableConfig
from specwire.v1 import inference_pb2 as pb
from tests.support.service import PATIENCE_S, POLL_S, Answer, ask, expected_ids

PROMPT = tuple(range(1, 18))


class Load:
    """Several streams of requests, one after another in each, until the test has seen enough."""

    def __init__(self, client: Client, table: TableConfig, tokens: int, **fields: Any) -> None:
        self.client = client
        self.answers: list[Answer] = []
        """Of requests that are over, in order of ending. Each was right."""
        self.refused = 0
        """Requests that came while no target was ready."""
        self._table = table
        self._tokens = tokens
        self._fields = fields
        self._seeds = itertools.count(1)
        self._enough = False

    async def stream(self) -> None:
        """Asks until it is enough."""
        while not self._enough:
            seed = next(self._seeds)
            try:
                answer = await ask(self.client, PROMPT, max_tokens=self._tokens, seed=seed, **self._fields)
            except Unavailable:  # refused, for want of a target: nothing was begun
                self.refused += 1
                await asyncio.sleep(POLL_S)
                continue
            assert expected_ids(self._table, PROMPT, self._tokens, seed=seed) == answer.ids
            self.answers.append(answer)

    def enough(self) -> None:
        """Requests that run are let end; no new ones are made."""
        self._enough = True

    async def until_over(self, more: int) -> None:
        """Waits until so many more requests are over."""
        give_up = time.monotonic() + PATIENCE_S
        wanted = len(self.answers) + more
        while len(self.answers) < wanted:
            assert time.monotonic() < give_up, f"{len(self.answers)} requests are over, {wanted} awaited"
            await asyncio.sleep(POLL_S)

    async def until_accepted(self, more: int = 10) -> pb.GetStatsResponse:
        """Waits until the target has accepted so many more tokens of the draft model."""
        give_up = time.monotonic() + PATIENCE_S
        wanted = more + (stats := await self.client.stats()).speculation.accepted_by_model
        while stats.speculation.accepted_by_model < wanted:
            assert time.monotonic() < give_up, f"{wanted} accepted tokens awaited; last seen:\n{stats}"
            await asyncio.sleep(POLL_S)
            stats = await self.client.stats()
        return stats


@contextlib.asynccontextmanager
async def load(
    client: Client, table: TableConfig, streams: int = 4, tokens: int = 60, k: Any = 4, method: str = "draft_model"
) -> AsyncIterator[Load]:
    """Requests in the background, at temperature 1, for as long as the block lasts; at its end all must have been right."""
    running = Load(client, table, tokens, num_speculative_tokens=k, method=method)
    tasks = [asyncio.create_task(running.stream()) for _ in range(streams)]
    watch = asyncio.gather(*tasks)
    try:
        yield running
        running.enough()
        await asyncio.wait_for(watch, PATIENCE_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
