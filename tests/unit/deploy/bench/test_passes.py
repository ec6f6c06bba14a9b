"""A pass through a service: who is asked when, and what is measured. The client here answers by its own clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deploy.bench.bench import Settings
from deploy.bench.passes import Load, arrivals, ask, run
from deploy.bench.workload import Item
from specwire.client import Event, Started, Tokens
from specwire.law.errors import Unavailable
from specwire.v1 import types_pb2
from tests.unit.deploy.bench.made import record

ITEMS = [Item("chat", f"question {n}", 4) for n in range(5)]


class Service:
    """Answers in four events. Remembers what was asked, and how many were asked at once."""

    def __init__(self, fails: str = "") -> None:
        self.asked: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.fails = fails

    async def generate(self, **fields: Any) -> AsyncIterator[Event]:
        self.asked.append(fields)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await asyncio.sleep(0)
            if fields["messages"][0]["content"] == self.fails:
                raise Unavailable("gone")
            yield Started("r", "m", 1, 3, 4, types_pb2.Sampling())
            for ids in ((1, 2), (), (3,)):
                await asyncio.sleep(0)
                yield Tokens(ids, "")
            yield record(1.0).final
        finally:
            self.at_once -= 1


def test_one_answer() -> None:
    """Greedy, of the item's length; events without tokens are no arrivals."""
    service = Service()
    found = asyncio.run(ask(service, ITEMS[0], {"num_speculative_tokens": 0}))  # type: ignore[arg-type]

    assert found.ids == (1, 2, 3)
    assert len(found.gaps) == 1
    assert 0.0 < found.ttft_s < found.total_s
    assert found.tpot_s == pytest.approx((found.total_s - found.ttft_s) / 2)
    asked = {key: service.asked[0][key] for key in ("temperature", "max_tokens", "num_speculative_tokens")}
    assert asked == {"temperature": 0.0, "max_tokens": 4, "num_speculative_tokens": 0}


@pytest.mark.parametrize("concurrency", [1, 2, 5, 8])
def test_a_closed_loop_asks_so_many_at_once(concurrency: int) -> None:
    """And all of them in the end, in order."""
    service, answered = Service(), []
    load = Load(concurrency=concurrency)
    done = asyncio.run(run(service, "auto", {}, load, ITEMS, lambda: answered.append(1)))  # type: ignore[arg-type]

    assert service.most_at_once == min(concurrency, len(ITEMS))
    assert [each.item for each in done.records] == ITEMS
    assert len(answered) == len(ITEMS)
    assert done.tokens_per_s == pytest.approx(15 / done.wall_s)


def test_an_open_loop_waits_for_nobody() -> None:
    """Arrivals are Poisson, and the same for every variant of a repeat."""
    times = arrivals(Load(rate=2.0), 2_000, seed=3)

    assert times == sorted(arrivals(Load(rate=2.0), 2_000, seed=3))
    assert times != arrivals(Load(rate=2.0), 2_000, seed=4)
    assert times[-1] / 1_999 == pytest.approx(0.5, rel=0.1)
    assert arrivals(Load(concurrency=3), 2, seed=3) == [0.0, 0.0]


def test_an_open_loop_counts_from_the_arrival() -> None:
    """What a request waits for being asked is its wait too."""
    service = Service()
    done = asyncio.run(run(service, "plain", {}, Load(rate=10_000.0), ITEMS, lambda: None))  # type: ignore[arg-type]

    assert len(done.records) == len(ITEMS)
    assert all(each.ttft_s > 0.0 for each in done.records)


def test_a_failure_ends_the_pass_and_is_told_as_it_is() -> None:
    """Not as a group of failures."""
    service = Service(fails="question 1")
    with pytest.raises(Unavailable, match="gone"):
        asyncio.run(run(service, "auto", {}, Load(concurrency=5), ITEMS, lambda: None))  # type: ignore[arg-type]
    assert service.at_once == 0


def test_more_at_once_than_the_workload_has_asks_it_again() -> None:
    """So that the load is what it says."""
    settings = Settings(ITEMS, [1, 8], [0.5], [], "auto", repeats=1)

    assert [settings.requests(load) for load in (Load(1), Load(8), Load(rate=0.5))] == [5, 8, 5]
