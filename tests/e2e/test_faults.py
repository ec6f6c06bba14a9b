"""SIGKILL and SIGSTOP in the middle of an answer, for each of the three processes, on real weights; a supervisor restarts the dead.

Every answer is compared with the plain answer that was given before anything broke. `tests/wired/test_signals.py` does the same
under load with table models.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from specwire.client import Client
from specwire.v1 import inference_pb2 as pb
from tests.e2e.conftest import DEMO
from tests.e2e.prompts import PROMPTS, chat
from tests.e2e.stack import Stack, Stream, lives, stack, streaming
from tests.support.near_tie import Tally
from tests.support.service import Answer

pytestmark = [pytest.mark.weights, pytest.mark.slow]

REQUEST: dict[str, Any] = {"messages": chat(PROMPTS[2]), "temperature": 0.0, "ignore_eos": True}
DRAFTED: dict[str, Any] = REQUEST | {"num_speculative_tokens": 4, "method": "draft_model"}
KNOWN = 96
"""Tokens of the plain answer. What an answer has beyond is not compared."""
MIDDLE = 8
"""Tokens after which something breaks."""


@pytest.fixture(scope="module")
def fragile(demo: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A service of this file's own. Tests leave it whole."""
    coordinator = {"settings": {"suspect_after_s": 1.0, "heartbeat_s": 0.2, "lease_s": 20.0}}
    with stack(tmp_path_factory.mktemp("fragile"), DEMO | {"coordinator": coordinator}) as running:
        yield running


class Expected:
    """The plain answer, and how to compare with it."""

    def __init__(self, prompt: list[int], ids: tuple[int, ...], tally: Tally) -> None:
        self.prompt, self.ids, self.tally = prompt, ids, tally

    def check(self, answer: Answer) -> None:
        """The answer is the plain one, as far as both go."""
        count = min(len(answer.ids), KNOWN)

        assert count > MIDDLE
        self.tally.compare(self.prompt, self.ids[:count], answer.ids[:count])


@pytest.fixture(scope="module")
def expected(fragile: Stack, tally: Tally) -> Expected:
    """Plain decoding by a service that nothing has happened to."""
    prompt = fragile.run(lambda client: client.tokenize(messages=REQUEST["messages"]))
    answer = fragile.answer(**REQUEST, max_tokens=KNOWN, num_speculative_tokens=0)
    return Expected(prompt, answer.ids, tally)


def accepted(stats: pb.GetStatsResponse) -> int:
    return stats.speculation.accepted_by_model


def state_of(stats: pb.GetStatsResponse, name: str) -> str:
    return next(worker.state for worker in stats.workers if worker.name == name)


async def whole(fragile: Stack, client: Client, before: dict[str, int] | None = None, killed: str = "") -> None:
    """Waits until both workers are ready; the killed one in another life."""

    def holds(stats: pb.GetStatsResponse) -> bool:
        now = lives(stats)
        return len(now) == 2 and (before is None or now[killed] != before[killed])

    await fragile.until(client, holds, "both workers")


async def read_until_accepted(client: Client, stream: Stream, killed: int) -> None:
    """Reads on until tokens of the killed draft's successor are accepted."""
    seen: int | None = None
    while not await stream.read(len(stream.answer.ids) + 1):
        stats = await client.stats()
        if lives(stats).get("draft-0", killed) == killed:
            continue
        seen = accepted(stats) if seen is None else seen
        if accepted(stats) > seen:
            return
    raise AssertionError("the answer ended before the draft was back and used")


def test_draft_killed(fragile: Stack, expected: Expected) -> None:
    """The answer goes on without the draft, another one begins and ends without it, and when it is back it is used again."""

    async def test(client: Client) -> tuple[Answer, Answer]:
        async with streaming(client, **DRAFTED, max_tokens=600) as stream:
            await stream.read(MIDDLE)
            before = await fragile.until(client, lambda stats: accepted(stats) > 0, "an accepted draft token")
            fragile.signal("draft-0", signal.SIGKILL)
            async with streaming(client, **DRAFTED, max_tokens=2 * MIDDLE) as short:
                await asyncio.gather(short.read(), stream.read(3 * MIDDLE))
            await asyncio.gather(
                whole(fragile, client, lives(before), "draft-0"),
                read_until_accepted(client, stream, lives(before)["draft-0"]),
            )
            return stream.answer, short.answer

    answer, short = fragile.run(test)

    expected.check(answer)
    expected.check(short)
    assert "length" == short.reason
    assert (2 * MIDDLE, 0) == (short.speculation.rounds, short.speculation.drafted_by_model)
    assert (1, "killed by SIGKILL") == (fragile.process("draft-0").restarts, fragile.process("draft-0").exit)


def test_target_killed(fragile: Stack, expected: Expected) -> None:
    """A pause, then the same tokens: the new target is given the text that was committed."""

    async def test(client: Client) -> Answer:
        async with streaming(client, **DRAFTED, max_tokens=6 * MIDDLE) as stream:
            await stream.read(MIDDLE)
            before = lives(await client.stats())
            fragile.signal("target-0", signal.SIGKILL)
            await stream.read()
            await whole(fragile, client, before, "target-0")
            return stream.answer

    answer = fragile.run(test)

    expected.check(answer)
    assert "length" == answer.reason
    assert answer.final.timing.recovery_us > 0
    assert fragile.stats().replays["target_lost"] > 0
    assert answer.speculation.accepted_by_model > 0


@pytest.mark.parametrize("name", ["draft-0", "target-0"])
def test_worker_stopped(name: str, fragile: Stack, expected: Expected) -> None:
    """SIGSTOP: a silent draft is done without, a silent target is waited for. SIGCONT: all is as before."""

    async def test(client: Client) -> tuple[Answer, Answer]:
        async with streaming(client, **DRAFTED, max_tokens=6 * MIDDLE) as stream:
            await stream.read(MIDDLE)
            fragile.signal(name, signal.SIGSTOP)
            try:
                await fragile.until(client, lambda stats: state_of(stats, name) != "ready", f"{name} to be missed")
                if name == "draft-0":
                    await stream.read()
            finally:
                fragile.signal(name, signal.SIGCONT)
            await stream.read()
        await whole(fragile, client)
        async with streaming(client, **DRAFTED, max_tokens=3 * MIDDLE) as after:
            await after.read()
        return stream.answer, after.answer

    answer, after = fragile.run(test)

    for each in (answer, after):
        expected.check(each)
        assert "length" == each.reason
    assert after.speculation.accepted_by_model > 0
    assert 0 == after.speculation.fallbacks


def test_coordinator_killed(fragile: Stack, expected: Expected) -> None:
    """The client asks the successor again with the same seed and skips what it has: one answer without a gap or a repeat."""

    async def test(client: Client) -> Answer:
        async with streaming(client, **DRAFTED, max_tokens=5 * MIDDLE) as stream:
            await stream.read(MIDDLE)
            fragile.signal("coordinator", signal.SIGKILL)
            await stream.read()
        await whole(fragile, client)
        return stream.answer

    answer = fragile.run(test)
    text = fragile.run(lambda client: client.detokenize(answer.ids, skip_special_tokens=True))

    expected.check(answer)
    assert 5 * MIDDLE == len(answer.ids)
    assert text == answer.text
    assert answer.final.retries > 0
