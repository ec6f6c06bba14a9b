"""Less work, the same answer: the pruned race and the prefix of the filters against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.law import race
from specwire.law.errors import BadLaw
from specwire.law.noise import premix_table, row_key
from specwire.law.race import Prefix, fast_choice, fast_law, racers
from specwire.law.sampling import cut_to_sparse, law_of, scaled_scores, shared_noise_choice, survivors
from specwire.law.values import GREEDY, SamplingSpec
from specwire.lm.sampling_torch import (
    Draw,
    choose_rows,
    choose_rows_on_device,
    choose_shared_noise,
    draft_law,
    host_array,
)

SPECS = st.builds(
    SamplingSpec,
    temperature=st.sampled_from([0.0, 1e-5, 0.1, 0.7, 1.0, 1.5, 30.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 20, 300]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999, 1 - 2**-50]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
)
USUAL = [SamplingSpec(0.8, top_p=0.95), SamplingSpec(top_k=50), SamplingSpec(min_p=0.05), SamplingSpec(0.6, 20, 0.9)]
"""Filters as people set them."""


@st.composite
def rows(draw: st.DrawFn, count: int = 1) -> np.ndarray:
    """[count, vocab] scores, smooth or full of ties, with forbidden tokens, now and then with a fault."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    vocab = draw(st.sampled_from([1, 2, 3, 7, 60, 700, 3000]))
    scores = rng.normal(
        draw(st.sampled_from([0.0, -40.0, 300.0])), draw(st.sampled_from([0.0, 1e-3, 1.0, 5.0])), (count, vocab)
    )
    if draw(st.booleans()):
        scores = np.round(scores * 2) / 2
    scores[rng.random(scores.shape) < draw(st.sampled_from([0.0, 0.0, 0.3, 0.99]))] = -np.inf
    fault = draw(st.sampled_from([None, None, None, np.nan, np.inf]))
    if fault is not None:
        scores[rng.integers(count), rng.integers(vocab)] = fault
    return scores.astype(draw(st.sampled_from([np.float32, np.float64])))


def or_bad(function, *arguments):
    try:
        return function(*arguments)
    except BadLaw:
        return BadLaw


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows(), SPECS, st.integers(0, 2**64 - 1), st.booleans())
def test_fast_choice_is_the_references(scores, spec, seed, reduced):
    """Bit for bit: ties, forbidden tokens, faults, extreme temperatures, reduced vocabularies."""
    columns = (
        np.sort(np.random.default_rng(0).permutation(60_000)[: scores.shape[1]]).astype(np.int64) if reduced else None
    )
    for position in range(4):
        arguments = (scores[0], spec, seed, 0, position, columns)

        assert or_bad(fast_choice, *arguments) == or_bad(shared_noise_choice, *arguments)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows(), SPECS)
def test_fast_law_is_the_references(scores, spec):
    """The same doubles, not merely close ones."""
    actual, expected = (or_bad(function, scores[0], spec) for function in (fast_law, law_of))

    assert np.array_equal(actual, expected)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows(count=5), st.lists(SPECS, min_size=5, max_size=5), st.integers(0, 2**64 - 1))
def test_rows_on_a_device_are_the_references(scores, specs, seed):
    """The batched tensor path agrees row by row, whatever the rows' specs and faults beside it."""
    draws = [Draw(spec, seed, 1, position) for position, spec in enumerate(specs)]
    expected = [
        or_bad(shared_noise_choice, row, spec, seed, 1, p)
        for p, (row, spec) in enumerate(zip(scores, specs, strict=True))
    ]
    for choose in (choose_rows, choose_rows_on_device):
        actual = choose(torch.from_numpy(scores), draws)

        assert [BadLaw if isinstance(token, BadLaw) else token for token in actual] == expected


def test_a_full_vocabulary_row_agrees():
    """Rows of the size that is served, where pruning matters."""
    scores = np.random.default_rng(2).normal(0, 3, (7, 49_152)).astype(np.float32)
    specs = [SamplingSpec(), SamplingSpec(0.7), *USUAL, GREEDY]
    draws = [Draw(spec, 4, 0, position) for position, spec in enumerate(specs)]
    expected = [shared_noise_choice(row, d.spec, 4, 0, d.position) for row, d in zip(scores, draws, strict=True)]

    assert choose_rows(torch.from_numpy(scores), draws) == expected
    assert choose_rows_on_device(torch.from_numpy(scores), draws) == expected


def test_few_logarithms_are_taken():
    """The price: of 49,152 tokens hardly more than one is left to decide, at any spread of the scores."""
    for spread in (0.0, 1.0, 4.0):
        scores = np.random.default_rng(1).normal(0, spread, 49_152).astype(np.float32)
        left = [len(racers(scores, 1.0, row_key(8, 0, p), premix_table(49_152))) for p in range(40)]

        assert np.mean(left) < 1.5


def test_settled_rows_do_not_reach_the_reference(monkeypatch):
    """Usual filters on a usual row are settled by a prefix: no full sort."""
    monkeypatch.delattr(race, "survivors")
    scores = np.random.default_rng(3).normal(0, 2, 20_000)
    scores[:40] += 8.0
    for spec in USUAL:
        assert fast_choice(scores, spec, 1, 0, 0) == shared_noise_choice(scores, spec, 1, 0, 0)


def test_top_p_edge_uses_the_exact_total():
    """When rounding of the total could matter, the exact total decides."""
    spec = SamplingSpec(top_p=0.5)
    prefix = Prefix(np.arange(4), np.array([0.0, -0.1, -0.2, -9.0]))
    weights = np.exp(prefix.scaled)
    edge = float(np.cumsum(weights)[1] / spec.top_p)  # two tokens reach the share exactly at this total

    assert prefix.settled(spec, edge) is None
    assert prefix.settled(spec, edge, lambda: edge) == 2
    assert prefix.settled(spec, edge, lambda: edge * (1 + 1e-12)) == 3


def test_a_tie_with_the_end_of_the_prefix_is_not_settled():
    """A tied token outside could have the lower id."""
    prefix = Prefix(np.array([4, 7, 8]), np.array([1.0, 0.0, 0.0]))

    assert [prefix.kept(SamplingSpec(top_k=k), 0.0) for k in (1, 2, 3, 4)] == [1, None, None, None]


def test_rank_order_is_the_references():
    """Survivors come in the order of the reference, so sums over them round alike."""
    scores = np.round(np.random.default_rng(4).normal(0, 2, 500) * 4) / 4
    spec = SamplingSpec(top_p=0.9)

    assert race.fast_survivors(scores, spec)[0].tolist() == survivors(scaled_scores(scores, spec), spec).tolist()


def test_choose_shared_noise_raises_for_a_bad_row():
    """One row, one answer or one error."""
    assert choose_shared_noise(torch.tensor([0.0, 30.0]), SamplingSpec(), 1, 0, 0) == 1
    with pytest.raises(BadLaw):
        choose_shared_noise(torch.tensor([0.0, torch.nan]), SamplingSpec(), 1, 0, 0)


def test_draft_law_is_the_cut_reference_law():
    """What the draft samples from under rejection, in target ids."""
    scores = torch.from_numpy(np.random.default_rng(5).normal(0, 2, 300).astype(np.float32))
    spec, columns = SamplingSpec(0.7, top_p=0.9), np.arange(100, 400, dtype=np.int64)

    assert draft_law(scores, spec, 8, columns) == cut_to_sparse(law_of(scores.numpy(), spec), 8, columns)


def test_half_precision_rows_are_widened():
    """bfloat16 scores are judged as the same numbers in single precision."""
    scores = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)

    assert host_array(scores).tolist() == [[1.5, -2.0]]
