"""Drawn text follows the target's law: counts against exact probabilities, with fixed seeds.

Enumeration (`test_lossless.py`) proves the decisions; this holds the counter-based draws themselves to account: that one
seed's draws at neighbouring positions, purposes and rounds behave as if they were independent.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from specwire.law.accept import counter_uniforms, judge_rejection, judge_shared_noise
from specwire.law.noise import Purpose
from specwire.law.race import fast_choice
from specwire.law.sampling import cut_to_sparse, law_of, sample_sparse, shared_noise_choice
from specwire.law.values import EMPTY_BLOCK, Block, Law, Opening, SamplingSpec
from tests.law.enumeration import Tables, chi_square_z, plain_law

LIMIT = 4.75  # one in a million


def counts_z(drawn: list[int], law: np.ndarray) -> float:
    return chi_square_z(np.bincount(drawn, minlength=len(law)).astype(float), law * len(drawn))


@pytest.mark.parametrize("spec", [SamplingSpec(), SamplingSpec(0.5), SamplingSpec(1.5, top_k=5, top_p=0.9)])
def test_shared_noise_follows_the_law(spec):
    """One row, one seed, many positions: the choices are draws from the row's law."""
    scores = np.array([1.0, 0.2, -0.7, 1.4, 0.0, -3.0, 0.9, -0.1])

    drawn = [shared_noise_choice(scores, spec, 12, 0, position) for position in range(3000)]

    assert counts_z(drawn, law_of(scores, spec)) < LIMIT


def test_shared_noise_follows_the_law_over_seeds_and_choices():
    """The same over neighbouring seeds and choices at one position."""
    scores, spec = np.array([0.5, 0.0, -1.0, 1.0]), SamplingSpec()

    drawn = [shared_noise_choice(scores, spec, seed, choice, 3) for seed in range(800) for choice in range(3)]

    assert counts_z(drawn, law_of(scores, spec)) < LIMIT


def test_shared_noise_follows_the_law_of_a_full_vocabulary():
    """49,152 tokens in 32 groups of equal probability."""
    scores = np.random.default_rng(0).normal(0, 2.5, 49_152).astype(np.float32)
    law = law_of(scores, SamplingSpec())
    group = np.minimum((np.cumsum(law) * 32).astype(int), 31)

    drawn = [int(group[fast_choice(scores, SamplingSpec(), 5, 0, position)]) for position in range(1500)]

    assert counts_z(drawn, np.bincount(group, weights=law)) < LIMIT


@pytest.mark.parametrize("best", [False, True])
def test_rejection_follows_the_target_with_an_opposed_draft(best):
    """Target [.4 .3 .2 .1], draft the reverse: the first token is the target's, whether the draft samples or takes its best."""
    target = [np.array([0.4, 0.3, 0.2, 0.1])] * 2
    draft = cut_to_sparse(np.array([0.1, 0.2, 0.3, 0.4]), 4)
    drawn = []
    for seed in range(20_000):
        draws = counter_uniforms(Opening(Law.REJECTION, SamplingSpec(), seed, 0, 1))
        block = Block((3,)) if best else Block((sample_sparse(draft, draws(1, Purpose.DRAFT)),), (draft,))
        drawn.append(judge_rejection(target.__getitem__, block, 1, draws).committed(block)[0])

    assert counts_z(drawn, target[0]) < LIMIT


SETTINGS = {
    "plain": SamplingSpec(),
    "cold and cut": SamplingSpec(temperature=0.1, top_p=0.9),
    "hot": SamplingSpec(temperature=1.5),
}


@pytest.mark.parametrize("law", Law)
@pytest.mark.parametrize("name", SETTINGS)
def test_three_tokens_follow_the_joint_law(law, name):
    """Rounds of up to three drafted tokens over models that depend on the whole text, drafted again after each refusal.

    The joint table of three tokens is the target's at every setting, so positions drafted twice reuse their draws soundly."""
    tables, spec, k = Tables(4, seed=21, spread=0.8 if name != "cold and cut" else 0.15), SETTINGS[name], 3
    scores = functools.cache(tables.target)
    target = functools.cache(lambda text: law_of(scores(text), spec))
    draft = functools.cache(lambda text: cut_to_sparse(law_of(tables.draft(text), spec), 3))
    texts = list(itertools.product(range(4), repeat=3))
    counts = dict.fromkeys(texts, 0)
    for seed in range(2000 if law is Law.REJECTION else 800):
        text: tuple[int, ...] = ()
        draws = counter_uniforms(Opening(law, spec, seed, 0, 1))
        while len(text) < 3:
            block = EMPTY_BLOCK
            for j in range(k):
                cut = draft(text + block.tokens)
                token = sample_sparse(cut, draws(len(text) + j, Purpose.DRAFT))
                block = Block((*block.tokens, token), (*block.laws, cut))
            after = [text + block.tokens[:j] for j in range(k + 1)]
            if law is Law.REJECTION:
                verdict = judge_rejection(lambda j, a=after: target(a[j]), block, len(text), draws)
            else:
                verdict = judge_shared_noise(
                    lambda j, a=after, s=seed: fast_choice(scores(a[j]), spec, s, 0, len(a[j])), block
                )
            text += verdict.committed(block)
        counts[text[:3]] += 1
    expected = np.array([plain_law(tables, spec, 3)[t] for t in texts]) * sum(counts.values())

    assert chi_square_z(np.array([counts[t] for t in texts], dtype=float), expected) < LIMIT


def test_chi_square_notices_a_wrong_law():
    """The yardstick itself: a law off by two hundredths is seen in 20,000 draws."""
    drawn = np.random.default_rng(0).choice(4, 20_000, p=[0.38, 0.32, 0.2, 0.1]).tolist()

    assert counts_z(drawn, np.array([0.4, 0.3, 0.2, 0.1])) > LIMIT
