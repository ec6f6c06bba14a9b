"""Field reports, section A: the output is the target's. Names carry the kind of fault, docstrings the reports; see
docs/field_reports.md."""

from __future__ import annotations

import asyncio

import pytest

from specwire.law.errors import OurFault
from specwire.lm.table_config import Fault
from specwire.worker.service import WorkerServer
from tests.support.service import Service, expected_ids, like, on_the_loop, service
from tests.wired.conftest import DRAFTS, TARGET


@on_the_loop
async def test_kind_01_a_one_token_prompt(middling: Service) -> None:
    """Report 1: greedy from the prompt [7], 24 tokens: with a draft and without the ids are equal."""
    drafted = await middling.ask([7], temperature=0, max_tokens=24, num_speculative_tokens=4, method="draft_model")
    plain = await middling.ask([7], temperature=0, max_tokens=24, num_speculative_tokens=0)

    assert plain.ids == drafted.ids
    assert expected_ids(TARGET, [7], 24, temperature=0) == plain.ids
    assert drafted.speculation.drafted > 0


@pytest.mark.parametrize("tokens", [60, pytest.param(500, marks=pytest.mark.slow)])
@on_the_loop
async def test_kind_01_long_greedy_answers(middling: Service, tokens: int) -> None:
    """Report 3: ten prompts, k = 2: no difference at any index."""
    tokens = min(tokens, TARGET.max_context - 10)
    prompts = [[n, n + 1, 31 - n] for n in range(10)]
    answers = await asyncio.gather(
        *(middling.ask(p, temperature=0, max_tokens=tokens, num_speculative_tokens=2) for p in prompts)
    )

    assert [expected_ids(TARGET, p, tokens, temperature=0) for p in prompts] == [answer.ids for answer in answers]


@on_the_loop
async def test_kind_03_not_a_number_at_the_third_verified_row() -> None:
    """Report 9: the request that meets it fails with INTERNAL after nothing but right tokens; three others are as ever, and a
    counter shows it."""
    broken = like(TARGET, faults=(Fault("nan", first_token=9, row=2),))
    async with service(broken, DRAFTS["good"]) as stack:
        shown: list[int] = []

        async def doomed() -> None:
            fields = {"max_tokens": 40, "seed": 1, "num_speculative_tokens": 4, "method": "draft_model"}
            async for event in stack.client.generate(prompt_ids=[9, 9], **fields):
                shown.extend(getattr(event, "ids", ()))

        others = [
            asyncio.create_task(stack.ask([n], max_tokens=40, seed=n, num_speculative_tokens=4)) for n in (1, 2, 3)
        ]
        with pytest.raises(OurFault, match="internal error"):
            await doomed()
        answers = await asyncio.gather(*others)
        await stack.quiet()
        stats = await stack.stats()
        bad_laws = counter(stack.workers["target-0"], "bad_laws")

        assert expected_ids(TARGET, [9, 9], 40, seed=1)[: len(shown)] == tuple(shown)
        assert [expected_ids(TARGET, [n], 40, seed=n) for n in (1, 2, 3)] == [answer.ids for answer in answers]
        assert (stats.failed, stats.finished) == (1, 3)
        assert bad_laws == 1


def counter(server: WorkerServer, name: str) -> float:
    """The counter of a worker whose name ends so."""
    samples = [sample for family in server._metrics.registry.collect() for sample in family.samples]
    return next(sample.value for sample in samples if sample.name.endswith(f"{name}_total"))


@on_the_loop
async def test_kind_03_not_a_number_from_the_draft_is_no_error() -> None:
    """A draft without a law at one place proposes nothing there; the answer is the target's all the same."""
    broken = like(TARGET, faults=(Fault("nan", position=9), Fault("nan", position=20)))
    async with service(TARGET, broken) as stack:
        answer = await stack.ask(max_tokens=40, seed=4, num_speculative_tokens=3, method="draft_model")

        assert expected_ids(TARGET, (1, 2, 3), 40, seed=4) == answer.ids
        assert (await stack.stats()).fallbacks["draft_failed"] > 0
        assert answer.speculation.accepted_by_model > 0


@pytest.mark.parametrize("law", ["shared_noise", "rejection"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.1, "top_p": 0.9},
        {"temperature": 1.5},
        {"top_k": 3},
        {"min_p": 0.3},
        {"top_k": 9, "top_p": 0.5},
    ],
    ids=str,
)
@on_the_loop
async def test_kind_04_settings_shape_both_sides(law: str, sampling: dict[str, float]) -> None:
    """Report 11: a draft that is the target and applies the same settings is always right; tokens are those without a draft."""
    async with service(TARGET, DRAFTS["good"], draft_settings={"draft_law_top_m": 32}) as stack:
        common = {"max_tokens": 40, "seed": 6, "law": law, **sampling}
        drafted = await stack.ask(num_speculative_tokens=4, method="draft_model", **common)

        assert drafted.speculation.accepted == drafted.speculation.drafted > 0
        if law == "shared_noise":
            assert expected_ids(TARGET, (1, 2, 3), 40, seed=6, **sampling) == drafted.ids


@on_the_loop
async def test_kind_04_leaving_the_temperature_out_does_not_turn_sampling_off(middling: Service) -> None:
    """Report 13: {top_k: 50} and nothing else, 50 runs without a seed: the outputs vary, and the default is told."""
    answers = await asyncio.gather(
        *(middling.ask(top_k=50, max_tokens=8, num_speculative_tokens=k) for k in (0, 4) for _ in range(25))
    )

    assert len({answer.ids for answer in answers}) > 40
    assert {1.0} == {answer.started.sampling.temperature for answer in answers if answer.started}
    assert len({answer.final.seed for answer in answers if answer.final}) == 50


@on_the_loop
async def test_kind_07_a_seed_alone_and_among_others(middling: Service) -> None:
    """Report 23: seed 7 twice alone, then among 8 other requests: the same ids all three times."""
    first = await middling.ask(seed=7, max_tokens=30)
    second = await middling.ask(seed=7, max_tokens=30)
    among, *_ = await asyncio.gather(
        middling.ask(seed=7, max_tokens=30), *(middling.ask(seed=n, max_tokens=30, temperature=0.7) for n in range(8))
    )

    assert first.ids == second.ids == among.ids


@on_the_loop
async def test_kind_07_seeds_count(middling: Service) -> None:
    """Report 25: seeds 1 to 20 give twenty answers."""
    answers = await asyncio.gather(*(middling.ask(seed=seed, max_tokens=12) for seed in range(1, 21)))

    assert len({answer.ids for answer in answers}) == 20


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@on_the_loop
async def test_kind_08_the_bonus_token_is_not_lost_on_the_draft(k: int, perfect: Service) -> None:
    """Report 27: draft = target, greedy: everything is accepted at every block length, round after round."""
    answer = await perfect.ask(
        temperature=0, max_tokens=60, num_speculative_tokens=k, method="draft_model", return_rounds=True
    )
    assert answer.final is not None

    assert answer.speculation.accepted == answer.speculation.drafted
    assert -(-60 // (k + 1)) == answer.speculation.rounds
    assert [round.drafted for round in answer.final.rounds] == [round.accepted for round in answer.final.rounds]
