"""The torch twin: the reference's verdict for every item, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.law import accept
from specwire.law.errors import BadLaw
from specwire.law.sampling import cut_to_sparse, law_of, shared_noise_choice
from specwire.law.values import GREEDY, Block, Law, Opening, SamplingSpec, Verdict
from target_service.verify import JudgeItem, choose_ahead, judge, judge_item

SPECS = [
    GREEDY,
    SamplingSpec(),
    SamplingSpec(0.3),
    SamplingSpec(1.2, top_k=5),
    SamplingSpec(0.9, top_p=0.8, min_p=0.02),
]


def on_device(scores: torch.Tensor, items: list[JudgeItem]) -> list[Verdict | BadLaw]:
    """What `judge` does where scores are not on the host."""
    ahead, verdicts, start = choose_ahead(scores, items), [], 0
    for item in items:
        try:
            verdicts.append(judge_item(scores, start, item, ahead))
        except BadLaw as bad:
            verdicts.append(bad)
        start += item.rows
    return verdicts


def known(verdicts: list[Verdict | BadLaw]) -> list[object]:
    return [BadLaw if isinstance(verdict, BadLaw) else verdict for verdict in verdicts]


def reference(scores: np.ndarray, item: JudgeItem) -> object:
    try:
        return accept.judge(scores, item.opening, item.block, item.first_position)
    except BadLaw:
        return BadLaw


def random_item(rng: np.random.Generator, vocab: int) -> tuple[np.ndarray, JudgeItem]:
    """An item of any law and spec, with a block that is half right, and its rows."""
    k, position = int(rng.integers(0, 5)), int(rng.integers(0, 100))
    law, spec = list(Law)[rng.integers(2)], SPECS[rng.integers(len(SPECS))]
    session = Opening(law, spec, int(rng.integers(2**63)), int(rng.integers(3)), 1)
    scores = np.round(rng.normal(0, 2, (k + 1, vocab)), 1)
    chosen = [
        shared_noise_choice(row, spec, session.seed, session.choice, position + j) for j, row in enumerate(scores)
    ]
    tokens = tuple(token if rng.random() < 0.7 else int(rng.integers(vocab)) for token in chosen[:k])
    laws = tuple(cut_to_sparse(law_of(row, SamplingSpec(1.5)), vocab) for row in scores[:k])
    if law is Law.SHARED_NOISE or rng.random() < 0.3:
        laws = ()
    return scores, JudgeItem(session, Block(tokens, laws), position)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from([np.float32, np.float64]))
def test_a_mixed_batch_gives_the_references_verdicts(seed, dtype):
    """Laws, specs, seeds, positions and block lengths mixed; each item as if it were alone, on the host and on a device."""
    rng = np.random.default_rng(seed)
    parts = [random_item(rng, 12) for _ in range(6)]
    scores = np.concatenate([rows for rows, _ in parts]).astype(dtype)
    items = [item for _, item in parts]
    expected = [reference(rows.astype(dtype), item) for rows, item in parts]

    assert known(judge(torch.from_numpy(scores), items)) == expected
    assert known(on_device(torch.from_numpy(scores), items)) == expected


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("way", [judge, on_device])
def test_a_bad_row_fails_its_item_alone(way, fault):
    """A fault at the third row of one request among four: that one gets BadLaw, no token is invented, others are untouched."""
    rng = np.random.default_rng(6)
    scores = rng.normal(0, 1, (16, 10)).astype(np.float32)
    items = []
    for n, law in enumerate([Law.SHARED_NOISE, Law.SHARED_NOISE, Law.REJECTION, Law.SHARED_NOISE]):
        session = Opening(law, SPECS[n], 3 + n, 0, 1)
        tokens = tuple(shared_noise_choice(scores[4 * n + j], SPECS[n], 3 + n, 0, 5 + j) for j in range(3))
        items.append(JudgeItem(session, Block(tokens), 5))
    before = known(way(torch.from_numpy(scores), items))
    scores[6] = fault

    after = known(way(torch.from_numpy(scores), items))

    assert after == [before[0], BadLaw, before[2], before[3]]


@pytest.mark.parametrize("way", [judge, on_device])
def test_a_bad_row_behind_a_refusal_does_not_count(way):
    """Plain decoding would not have computed it."""
    scores = torch.tensor([[9.0, 0.0], [torch.nan, 0.0]])

    assert way(scores, [JudgeItem(Opening(Law.SHARED_NOISE, GREEDY, 0, 0, 1), Block((1,)), 0)]) == [Verdict(0, 0)]


def test_rows_behind_a_refusal_are_not_computed_on_the_host(monkeypatch):
    """On the CPU noise is paid for reached rows only."""
    reached = []

    def counting(row, draw):
        reached.append(draw.position)
        return 1

    monkeypatch.setattr("target_service.verify.choose_row", counting)
    item = JudgeItem(Opening(Law.SHARED_NOISE, SamplingSpec(), 0, 0, 1), Block((1, 0, 1, 1)), 30)

    assert judge(torch.zeros(5, 2), [item]) == [Verdict(1, 1)]
    assert reached == [30, 31]


def test_an_empty_batch_has_no_verdicts():
    """A step of prompt chunks only."""
    assert judge(torch.zeros(0, 5), []) == []


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(SPECS))
def test_shared_noise_equals_plain_decoding(seed, spec):
    """Token by token, for any blocks over scores that depend on the whole text: a random draft changes nothing."""
    rng = np.random.default_rng(seed)
    session = Opening(Law.SHARED_NOISE, spec, seed, 0, 1)

    def scores_after(text: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([seed, *text]).normal(0, 1, 5)

    def decode(block_for) -> tuple[int, ...]:
        text: tuple[int, ...] = (0,)
        while len(text) < 13:
            block = Block(block_for(text))
            rows = np.stack([scores_after(text + block.tokens[:j]) for j in range(len(block) + 1)])
            verdict = judge(torch.from_numpy(rows), [JudgeItem(session, block, len(text))])[0]
            assert isinstance(verdict, Verdict)
            text += verdict.committed(block)
        return text[:13]

    plain = decode(lambda text: ())
    speculative = decode(lambda text: tuple(int(t) for t in rng.integers(0, 5, rng.integers(0, 9))))
    perfect = decode(lambda text: plain[len(text) : len(text) + 4])

    assert speculative == plain
    assert perfect == plain
