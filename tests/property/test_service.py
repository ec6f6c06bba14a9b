"""Whatever is asked together and whatever breaks meanwhile, each answer is what the target says alone.

Hypothesis chooses a handful of requests and a handful of mishaps; the whole stack serves them over real gRPC, with a relay
that can break streams, and workers that can be killed. One stack serves all examples, so that what an earlier example left
behind would show."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from specwire.lm.table_config import TableConfig
from tests.support.relay import Mangler, Relay
from tests.support.service import Service, expected_ids, like, service, the_loop

TARGET = TableConfig(vocab_size=24, seed=11, sharpness=3.0, max_context=128)
MISHAPS = ("cut draft-0", "cut target-0", "kill draft-0", "kill target-0")


@dataclass(frozen=True)
class Asked:
    """One request, and after how many events its client leaves; None: it stays."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    sampling: dict[str, float]
    stop_token_ids: tuple[int, ...]
    block: Any
    method: str
    leaves_after: int | None

    def expected(self) -> tuple[tuple[int, ...], str]:
        """Tokens and reason, from the target alone."""
        count = min(self.max_tokens, TARGET.max_context - len(self.prompt))
        ids = expected_ids(TARGET, self.prompt, count, seed=self.seed, **self.sampling)
        for place, token in enumerate(ids, 1):
            if token in self.stop_token_ids:
                return ids[:place], "stop"
        return ids, "length"


def an_example(dice: random.Random) -> tuple[list[Asked], list[tuple[int, str]]]:
    """Up to eight requests, and up to three mishaps, each after so many more tokens. Not by Hypothesis: the stack has threads
    of its own, which use the random module that Hypothesis watches."""
    plan = [(dice.randrange(1, 40), dice.choice(MISHAPS)) for _ in range(dice.randrange(4))]
    return [a_request(dice) for _ in range(dice.randrange(1, 9))], plan


def a_request(dice: random.Random) -> Asked:
    """Anything a client may ask for; one in four leaves early."""
    sampling: dict[str, float] = {"temperature": dice.choice((0.0, 0.3, 1.0, 2.0))}
    for name, values in (("top_k", (1, 3, 30)), ("top_p", (0.3, 0.9)), ("min_p", (0.01, 0.2))):
        if dice.random() < 0.3:
            sampling[name] = dice.choice(values)
    return Asked(
        prompt=tuple(dice.randrange(TARGET.vocab_size) for _ in range(dice.choice((1, 2, 5, 40, 100)))),
        max_tokens=dice.choice((1, 2, 9, 60)),
        seed=dice.getrandbits(64),
        sampling=sampling,
        stop_token_ids=tuple(dice.sample(range(TARGET.vocab_size), dice.choice((0, 0, 1, 3)))),
        block=dice.choice((*range(9), "auto", "auto")),
        method=dice.choice(("auto", "draft_model", "ngram")),
        leaves_after=dice.choice((None, None, None, dice.randrange(5))),
    )


@pytest.fixture(scope="module")
def stack() -> Iterator[Service]:
    """All three, over links on which frames come twice or late now and then."""
    relays = {
        f"{role}-0": Relay(role, Mangler(n, twice=0.05, late=0.05), Mangler(n + 9, twice=0.05, late=0.05))
        for n, role in enumerate(("draft", "target"))
    }
    manager = service(TARGET, like(TARGET, disagreement=0.3), relays=relays)
    stack = the_loop().run(manager.__aenter__())
    yield stack
    the_loop().run(manager.__aexit__(None, None, None))


async def ask(stack: Service, asked: Asked) -> tuple[tuple[int, ...], str]:
    """Tokens and reason; "left" when the client did not stay."""
    stream = stack.client.generate(
        prompt_ids=asked.prompt,
        max_tokens=asked.max_tokens,
        seed=asked.seed,
        stop_token_ids=asked.stop_token_ids,
        num_speculative_tokens=asked.block,
        method=asked.method,
        **asked.sampling,
    )
    ids: tuple[int, ...] = ()
    left = asked.leaves_after
    try:
        async for event in stream:
            if left is not None:
                if left == 0:
                    break
                left -= 1
            ids += getattr(event, "ids", ())
            reason = getattr(event, "finish_reason", None)
            if reason is not None:
                return ids, reason
        return ids, "left"
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


async def break_things(stack: Service, plan: list[tuple[int, str]], asking: asyncio.Task[Any]) -> None:
    """Each mishap once so many tokens more are there, or when nothing runs any more."""
    for more, what in plan:
        wanted = (await stack.stats()).generated_tokens + more
        await stack.until(lambda stats, wanted=wanted: stats.generated_tokens >= wanted or asking.done())
        act, _, name = what.partition(" ")
        if act == "kill":
            await stack.kill(name)
            await stack.restart(name)
            await stack.ready()
        else:
            relay = stack.plans[name].relay
            assert relay is not None
            relay.cut()


async def play(stack: Service, asked: list[Asked], plan: list[tuple[int, str]]) -> None:
    """Serves one example."""
    await stack.ready()
    asking = asyncio.ensure_future(asyncio.gather(*(ask(stack, each) for each in asked)))
    breaking = asyncio.create_task(break_things(stack, plan, asking))
    answers = await asking
    await breaking
    await stack.quiet()

    for each, (ids, reason) in zip(asked, answers, strict=True):
        expected, why = each.expected()
        if reason == "left":
            assert expected[: len(ids)] == ids
        else:
            assert (expected, why) == (ids, reason)


@pytest.mark.parametrize("seed", range(12))
def test_any_requests_and_any_mishaps(stack: Service, seed: int) -> None:
    """Tokens and reasons are the target's, and when all is over nothing is left anywhere."""
    the_loop().run(play(stack, *an_example(random.Random(seed))))


@pytest.mark.slow
def test_many_requests_and_many_mishaps(stack: Service) -> None:
    """Three hundred examples more."""
    for seed in range(1000, 1300):
        the_loop().run(play(stack, *an_example(random.Random(seed))))
