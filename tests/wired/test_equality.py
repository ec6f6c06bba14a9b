"""Under shared noise the service says what its target says alone, token for token, whatever the draft and the schedule.

The reference is the table model decoded by itself, with no service around it; see `expected_ids`."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest

from specwire.lm.table_config import TableConfig
from tests.support.service import Service, expected_ids, like, on_the_loop, service
from tests.wired.conftest import TARGET

TOKENS = 24
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
]
LENGTHS: list[Any] = [*range(9), "auto"]


@pytest.mark.parametrize("k", LENGTHS)
@on_the_loop
async def test_block_length_and_draft_never_change_the_answer(any_draft: Service, k: Any) -> None:
    """Every block length, `auto` included, with good, middling, random, stubborn and absent drafts: plain decoding's tokens."""
    cases = list(zip(SAMPLINGS, (0, 7, 2**64 - 1), strict=True))
    answers = await asyncio.gather(
        *(
            any_draft.ask(
                (1, 2, 3), max_tokens=TOKENS, num_speculative_tokens=k, method="draft_model", seed=seed, **sampling
            )
            for sampling, seed in cases
        )
    )

    expected = [expected_ids(TARGET, (1, 2, 3), TOKENS, seed=seed, **sampling) for sampling, seed in cases]
    assert expected == [answer.ids for answer in answers]
    assert [TOKENS] * len(cases) == [answer.final.usage.completion_tokens for answer in answers if answer.final]


@pytest.mark.parametrize("method", ["auto", "draft_model", "ngram"])
@on_the_loop
async def test_the_source_of_guesses_never_changes_the_answer(method: str) -> None:
    """A text that repeats itself, so that lookup has something to find: each method uses its own source, all say the same."""
    table = TableConfig(vocab_size=6, seed=4, sharpness=4.0, order=1, max_context=512)
    async with service(table, like(table, disagreement=0.2)) as stack:
        lengths = [1, 4, 8, "auto"]
        answers = await asyncio.gather(
            *(
                stack.ask((1, 2), max_tokens=60, seed=seed, temperature=0.5, num_speculative_tokens=k, method=method)
                for k, seed in itertools.product(lengths, (1, 2))
            )
        )
        total = (await stack.stats()).speculation

        expected = [
            expected_ids(table, (1, 2), 60, seed=seed, temperature=0.5)
            for _, seed in itertools.product(lengths, (1, 2))
        ]
        assert expected == [answer.ids for answer in answers]
        assert (total.accepted_by_model > 0) == (method != "ngram")
        assert (total.accepted_by_ngram > 0) == (method != "draft_model")


@pytest.mark.parametrize("together", [1, 2, 3, 4, 6, 8, 11, 16])
@on_the_loop
async def test_company_never_changes_the_answer(middling: Service, together: int) -> None:
    """1 to 16 requests at once, all different in prompt, sampling, seed, length, block length and method."""
    dice = random.Random(together)
    cases = [
        {
            "prompt_ids": tuple(dice.randrange(32) for _ in range(dice.choice((1, 2, 17, 40)))),
            "max_tokens": dice.randrange(1, 30),
            "seed": dice.getrandbits(64),
            **dice.choice(SAMPLINGS),
        }
        for _ in range(together)
    ]
    answers = await asyncio.gather(
        *(
            middling.ask(
                num_speculative_tokens=dice.choice(LENGTHS),
                method=dice.choice(("auto", "draft_model", "ngram")),
                **case,
            )
            for case in cases
        )
    )

    assert [alone(case) for case in cases] == [answer.ids for answer in answers]


def alone(case: dict[str, Any]) -> tuple[int, ...]:
    """The reference for a case."""
    case = dict(case)
    return expected_ids(TARGET, case.pop("prompt_ids"), case.pop("max_tokens"), **case)


@on_the_loop
async def test_drafts_were_really_used(middling: Service) -> None:
    """The equality above is not that of a service that never speculates: about half of what the draft says is accepted."""
    answer = await middling.ask(max_tokens=200, num_speculative_tokens=4, method="draft_model", seed=11)
    spec = answer.speculation

    assert spec.drafted_by_model > 100
    assert 0.2 < spec.accepted_by_model / spec.drafted_by_model < 0.9
    assert spec.accepted + spec.rounds == 200
