"""Frames that come twice, late, in another order or not at all, and streams that break: the answer stays the same.

A relay stands between the coordinator and the workers, see tests/support/relay.py. A frame is lost on a link to the target
only together with its stream, as it is with TCP; on a link to the draft frames are lost on their own as well, since there the
round need not wait."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from tests.support.relay import Mangler, Out, Relay, pass_on
from tests.support.service import PATIENCE_S, Service, expected_ids, like, on_the_loop, service
from tests.wired.conftest import DRAFTS, TARGET

COUNT = 8
TOKENS = 40
PROMPT = tuple(range(1, 18))
SAMPLING = {"temperature": 0.8, "top_p": 0.95}


async def ask_all(stack: Service, tokens: int = TOKENS, k: Any = 4) -> list[tuple[int, ...]]:
    """Several requests at once, by the draft alone."""
    answers = await asyncio.gather(
        *(
            stack.ask(PROMPT, max_tokens=tokens, seed=seed, num_speculative_tokens=k, method="draft_model", **SAMPLING)
            for seed in range(COUNT)
        )
    )
    return [answer.ids for answer in answers]


def expected_all(tokens: int = TOKENS) -> list[tuple[int, ...]]:
    """The same without any service."""
    return [expected_ids(TARGET, PROMPT, tokens, seed=seed, **SAMPLING) for seed in range(COUNT)]


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("what", ["twice", "late"])
@on_the_loop
async def test_frames_that_come_twice_or_late_change_nothing(role: str, what: str) -> None:
    """In both directions of either link; late frames are overtaken by younger ones, so this is reordering too."""
    up, down = Mangler(1, **{what: 0.5}), Mangler(2, **{what: 0.5})
    async with service(TARGET, DRAFTS["middling"], relays={f"{role}-0": Relay(role, up, down)}) as stack:
        got = await ask_all(stack)
        await stack.quiet()
        stats = await stack.stats()

        assert expected_all() == got
        assert up.counts[what] > 5
        assert down.counts[what] > 5
        assert stats.speculation.accepted_by_model > 0
        assert what == "late" or stats.stale_answers > 0


@on_the_loop
async def test_lost_frames_of_a_draft_cost_only_time() -> None:
    """One in twenty of the draft's frames vanish: rounds go on without their block, and the draft is asked again afterwards."""
    relay = Relay("draft", Mangler(1, lost=0.05), Mangler(2, lost=0.05))
    async with service(
        TARGET, DRAFTS["middling"], relays={"draft-0": relay}, speculation={"draft_timeout_ms": 100}
    ) as stack:
        accepted, at_first_loss = 0, None
        give_up = time.monotonic() + PATIENCE_S
        while at_first_loss is None or accepted == at_first_loss:
            assert expected_all() == await ask_all(stack)
            stats = await stack.stats()
            accepted = stats.speculation.accepted_by_model
            if at_first_loss is None and stats.fallbacks["draft_timeout"]:
                at_first_loss = accepted
            assert time.monotonic() < give_up


class CutAt:
    """A hook that loses the frames it is told to, by number, and breaks the stream with each. It counts from the frame with which
    all requests have been seen, since a new request is turned away while a target is lost."""

    def __init__(self, relay: Relay, frames: set[int]) -> None:
        self._relay = relay
        self._frames = frames
        self.seen = 0
        self.cuts = 0
        self._sessions: set[int] = set()

    def __call__(self, frame: Any) -> Out:
        self._sessions.update(each.session for each in getattr(frame, "tasks", None) or getattr(frame, "answers", ()))
        self.seen += len(self._sessions) == COUNT
        if self.seen not in self._frames:
            return pass_on(frame)
        self._frames.remove(self.seen)
        self.cuts += 1
        self._relay.cut()
        return []


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("towards", ["worker", "coordinator"])
@on_the_loop
async def test_a_broken_stream_is_taken_up_where_it_was(role: str, towards: str) -> None:
    """Streams break with a task, or with its answer, on the way; the worker lives, so nothing is replayed and nothing done
    twice."""
    relay = Relay(role)
    cut = CutAt(relay, {3, 9, 10, 14})
    setattr(relay, f"to_{towards}", cut)
    async with service(TARGET, DRAFTS["middling"], relays={f"{role}-0": relay}) as stack:
        got = await ask_all(stack, tokens=100)
        await stack.quiet()
        stats = await stack.stats()

        assert expected_all(tokens=100) == got
        assert cut.cuts >= 3
        assert relay.streams >= 3
        assert dict(stats.replays) == {}
        assert stats.speculation.accepted_by_model > 0


@on_the_loop
async def test_everything_at_once_on_both_links() -> None:
    """Twice, late and overtaken on both links while streams break again and again."""
    relays = {
        f"{role}-0": Relay(role, Mangler(seed, twice=0.3, late=0.3), Mangler(seed + 1, twice=0.3, late=0.3))
        for seed, role in enumerate(("draft", "target"))
    }
    async with service(TARGET, DRAFTS["middling"], relays=relays) as stack:
        asking = asyncio.create_task(ask_all(stack, tokens=100, k="auto"))
        dice = random.Random(5)
        while not asking.done():
            # on whichever link they are: the controller may leave the draft alone
            busy = [asyncio.create_task(relay.seen(relay.frames + 15)) for relay in relays.values()]
            await asyncio.wait((asking, *busy), return_when=asyncio.FIRST_COMPLETED)
            for each in busy:
                each.cancel()
            relays[dice.choice(list(relays))].cut()
        got = await asking
        await stack.quiet()

        assert expected_all(tokens=100) == got
        assert sum(relay.streams for relay in relays.values()) > 4


@pytest.mark.parametrize("role", ["draft", "target"])
@on_the_loop
async def test_a_close_that_is_lost_with_its_stream_is_said_again(role: str) -> None:
    """The frame that says a session is over goes down with the stream. The worker must not keep the session's slot."""
    relay = Relay(role)
    lost: list[Any] = []

    def lose_first_close(frame: Any) -> Out:
        if not frame.closes or lost:
            return pass_on(frame)
        lost.append(frame)
        relay.cut()
        return []

    relay.to_worker = lose_first_close
    async with service(TARGET, DRAFTS["middling"], relays={f"{role}-0": relay}) as stack:
        await stack.ask(PROMPT, max_tokens=10, num_speculative_tokens=2)
        await stack.ready()
        await stack.quiet()

        assert len(lost) == 1
        assert relay.streams == 2


@on_the_loop
async def test_requests_that_end_while_a_stream_is_down_leave_nothing_behind() -> None:
    """Clients go away while both streams are down. When they are back the workers learn of it: no slot stays taken."""
    relays = {"draft-0": Relay("draft"), "target-0": Relay("target")}
    async with service(TARGET, like(TARGET, disagreement=0.3), relays=relays) as stack:
        requests = [asyncio.create_task(stack.ask(PROMPT, max_tokens=400, seed=seed)) for seed in range(4)]
        await stack.until(lambda stats: stats.generated_tokens > 20 and stats.running == 4)
        addresses = {name: relay.worker for name, relay in relays.items()}
        for relay in relays.values():
            relay.worker = ""
            relay.cut()
        await stack.until(lambda stats: all(worker.state == "lost" for worker in stats.workers))
        for request in requests:
            request.cancel()
        await stack.until(lambda stats: stats.running == 0)
        for name, relay in relays.items():
            relay.worker = addresses[name]

        await stack.ready()
        await stack.quiet()
