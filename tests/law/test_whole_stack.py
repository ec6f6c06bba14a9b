"""The law of whole answers through the whole stack: coordinator, draft and target over real gRPC, the shipped client, many at
once.

Four symbols and four tokens make 256 texts. The table models depend on every cached token and its place; the draft disagrees
so far that about half of what it proposes stands; its law is cut to two tokens, a top-p cuts as well, and its answers come
the later the higher the drafted token. Counts are held against the exact joint law, which is computed from the target alone.

The default run takes a few thousand samples, the ones marked slow 20,000 per law."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from specwire.law.values import SamplingSpec
from specwire.v1 import draft_pb2
from tests.law.joint import SIGNIFICANT, chi_square_p, joint_law
from tests.law.mutants import DRAFT, PROMPT, SPEC, TARGET, TOKENS, TOP_M
from tests.support.relay import Out, Relay
from tests.support.service import Service, expected_ids, on_the_loop, service

AT_ONCE = 48
LATER_S = 0.002
"""By so much later comes a block for each unit of its first token."""
SAMPLING = {"temperature": SPEC.temperature, "top_p": SPEC.top_p}


def later_by_token(frame: draft_pb2.ProposeResponse) -> Out:
    """Each answer in a frame of its own, the later the higher its first token: which blocks share a step depends on what was
    drafted."""
    out: Out = []
    for answer in frame.answers:
        alone = draft_pb2.ProposeResponse(step=frame.step, answers=[answer])
        out.append((LATER_S * answer.tokens[0] if answer.tokens else 0.0, alone.SerializeToString()))
    return out


@dataclass
class Samples:
    """What many requests said."""

    texts: list[tuple[int, ...]]
    drafted: int
    accepted: int

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that stands."""
        return self.accepted / self.drafted if self.drafted else 0.0


async def sample(stack: Service, seeds: Iterable[int], **fields: Any) -> Samples:
    """One request per seed, with blocks of 1, 2 and 3 in turn unless told otherwise."""
    waiting = iter(seeds)
    found: dict[int, tuple[int, ...]] = {}
    lengths = itertools.cycle((1, 2, 3))

    async def ask_on() -> None:
        for seed in waiting:
            block = fields.get("num_speculative_tokens", next(lengths))
            asked = {**SAMPLING, **fields, "num_speculative_tokens": block}
            answer = await stack.ask(PROMPT, max_tokens=TOKENS, seed=seed, method="draft_model", **asked)
            found[seed] = answer.ids

    before = (await stack.stats()).speculation
    await asyncio.gather(*(ask_on() for _ in range(AT_ONCE)))
    after = (await stack.stats()).speculation
    return Samples(
        [found[seed] for seed in sorted(found)], after.drafted - before.drafted, after.accepted - before.accepted
    )


def the_stack(draft_timeout_ms: int = 60_000) -> Any:
    """The service of all tests here."""
    return service(
        TARGET,
        DRAFT,
        slots=AT_ONCE,
        max_running=AT_ONCE,
        relays={"draft-0": Relay("draft", to_coordinator=later_by_token)},
        draft_settings={"draft_law_top_m": TOP_M},
        speculation={"draft_timeout_ms": draft_timeout_ms},
    )


def p_value(samples: Samples, spec: SamplingSpec = SPEC) -> float:
    """Of whole answers against the exact joint law of the target."""
    return chi_square_p(samples.texts, joint_law(TARGET, PROMPT, spec, TOKENS))


def sizes(default: int) -> pytest.MarkDecorator:
    """A sample for every day, and the full one."""
    return pytest.mark.parametrize("count", [default, pytest.param(20_000, marks=pytest.mark.slow)])


@sizes(600)
@on_the_loop
async def test_rejection_follows_the_target(count: int) -> None:
    """About half of the drafted tokens are refused and corrected; whole answers follow the target's joint law. The draft's
    time-out, a millisecond here, has no say under this law: a block that is late would be given up for what it holds."""
    async with the_stack(draft_timeout_ms=1) as stack:
        samples = await sample(stack, range(count), law="rejection")
        fallbacks = dict((await stack.stats()).fallbacks)
    p = p_value(samples)
    print(f"{count} samples, acceptance {samples.acceptance:.3f}, p = {p:.3g}")

    assert p >= SIGNIFICANT
    assert 0.4 < samples.acceptance < 0.65
    assert fallbacks == {}


@sizes(250)
@on_the_loop
async def test_shared_noise_follows_the_target(count: int) -> None:
    """The same under the default law, where each answer is known as well: the target's own for its seed."""
    async with the_stack() as stack:
        samples = await sample(stack, range(count), law="shared_noise")
    p = p_value(samples)
    print(f"{count} samples, acceptance {samples.acceptance:.3f}, p = {p:.3g}")

    assert p >= SIGNIFICANT
    assert 0.3 < samples.acceptance < 0.65
    assert [expected_ids(TARGET, PROMPT, TOKENS, seed=seed, **SAMPLING) for seed in range(count)] == samples.texts


@sizes(250)
@on_the_loop
async def test_target_alone_follows_its_own_law(count: int) -> None:
    """The control: what is measured above is not the instrument."""
    async with the_stack() as stack:
        samples = await sample(stack, range(count), law="rejection", num_speculative_tokens=0)
    p = p_value(samples)
    print(f"{count} samples, acceptance {samples.acceptance:.3f}, p = {p:.3g}")

    assert p >= SIGNIFICANT
    assert samples.drafted == 0


@on_the_loop
async def test_greedy_is_a_point_mass() -> None:
    """At temperature zero under either law every seed gives the one best text, drafts or not."""
    async with the_stack() as stack:
        samples = [
            await sample(stack, range(24), law=law, temperature=0.0, top_p=1.0, **fields)
            for law, fields in itertools.product(("shared_noise", "rejection"), ({}, {"num_speculative_tokens": 0}))
        ]

    assert {expected_ids(TARGET, PROMPT, TOKENS, temperature=0.0)} == {text for each in samples for text in each.texts}
    assert samples[0].accepted > 0
    assert samples[2].accepted > 0
