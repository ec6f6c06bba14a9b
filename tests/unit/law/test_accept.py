"""The acceptance laws on one block."""

from __future__ import annotations

import numpy as np
import pytest

from specwire.law.accept import (
    accept_probability,
    counter_uniforms,
    judge,
    judge_rejection,
    judge_shared_noise,
    residual,
)
from specwire.law.errors import BadLaw
from specwire.law.noise import Purpose
from specwire.law.sampling import shared_noise_choice
from specwire.law.values import EMPTY_BLOCK, GREEDY, Block, Law, Opening, SamplingSpec, SparseLaw, Verdict

TARGET = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
PLAIN = SamplingSpec()
EVEN = SparseLaw((0, 1, 2, 3), (1, 1, 1, 1))


def scripted(**draws: float):
    """Draws by name: accept0 is the acceptance draw at position 0."""
    return lambda position, purpose: draws[f"{purpose.name.lower()}{position}"]


def opening(law: Law, spec: SamplingSpec = PLAIN, seed: int = 5) -> Opening:
    return Opening(law, spec, seed, 0, 1)


def test_accepts_with_the_ratio_and_corrects_from_the_difference():
    """Row 0 accepts 0 for sure; row 1 has 0.1/0.25 for 0, and the difference leaves 2 and 3."""
    block = Block((0, 0), (EVEN, EVEN))

    verdicts = [
        judge_rejection(TARGET.__getitem__, block, 0, scripted(accept0=0.99, accept1=0.39, bonus2=0.3)),
        judge_rejection(TARGET.__getitem__, block, 0, scripted(accept0=0.99, accept1=0.41, correction1=0.24)),
        judge_rejection(TARGET.__getitem__, block, 0, scripted(accept0=0.99, accept1=0.41, correction1=0.26)),
    ]

    assert verdicts == [Verdict(2, 1), Verdict(1, 2), Verdict(1, 3)]


def test_point_mass_is_accepted_with_the_targets_probability():
    """A block without laws was not drawn: q is one."""
    block = Block((0,))

    assert judge_rejection(TARGET.__getitem__, block, 7, scripted(accept7=0.39, bonus8=0.05)) == Verdict(1, 0)
    assert judge_rejection(TARGET.__getitem__, block, 7, scripted(accept7=0.41, correction7=0.01)) == Verdict(0, 1)


def test_acceptance_probability():
    """min(1, p/q), and zero for what the target forbids."""
    assert [accept_probability(p, q) for p, q in ((0.1, 0.4), (0.4, 0.1), (0.0, 0.5))] == [0.25, 1.0, 0.0]


def test_zero_residual_falls_back_to_the_target():
    """Draft equal to target: nothing is left of the difference, so the target's own row stands in."""
    assert residual(TARGET[2], EVEN).tolist() == TARGET[2].tolist()


def test_ids_the_target_does_not_have_are_refused():
    """A draft padded wider than the target: no probability there, and the correction comes from the target's own tokens."""
    block = Block((9,), (SparseLaw((9, 0), (1, 1)),))

    assert judge_rejection(TARGET.__getitem__, block, 0, scripted(accept0=2**-52, correction0=0.49)) == Verdict(0, 1)


def test_equal_laws_are_always_accepted():
    """Draft equal to target refuses nothing, whatever the draw."""
    laws = [TARGET[2], TARGET[2]]

    assert judge_rejection(
        laws.__getitem__, Block((3,), (EVEN,)), 0, scripted(accept0=1 - 2**-52, bonus1=0.5)
    ) == Verdict(1, 2)


def test_target_greedy_accepts_its_best_only():
    """With a point mass for a target, either law is plain greedy decoding."""
    scores = np.array([[0.0, 2.0, 2.0], [1.0, 0.0, 0.0]])
    draft = SparseLaw((0, 1, 2), (5, 1, 1))
    for token, expected in ((1, Verdict(1, 0)), (2, Verdict(0, 1)), (0, Verdict(0, 1))):
        block = Block((token,), (draft,))

        assert judge(scores, opening(Law.REJECTION, GREEDY), block, 3) == expected
        assert judge(scores, opening(Law.SHARED_NOISE, GREEDY), block, 3) == expected


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ((), Verdict(0, 5)),
        ((5,), Verdict(1, 6)),
        ((4,), Verdict(0, 5)),
        ((5, 6), Verdict(2, 7)),
        ((5, 7), Verdict(1, 6)),
    ],
)
def test_shared_noise_outputs_the_targets_choices(block, expected):
    """The verdict is the target's own next tokens, as many as the block foresaw and one more."""
    assert judge_shared_noise([5, 6, 7].__getitem__, Block(block)) == expected


def test_judging_again_gives_the_same_verdict():
    """All draws are functions of seed, choice and position."""
    scores = np.random.default_rng(1).normal(0, 1, (3, 4))
    block = Block((0, 1), (EVEN, EVEN))
    for seed in range(50):
        session = opening(Law.REJECTION, seed=seed)

        assert judge(scores, session, block, 9) == judge(scores, session, block, 9)


def test_draws_have_purposes_of_their_own():
    """Acceptance, correction, bonus and draft at one position are four numbers."""
    draws = counter_uniforms(opening(Law.REJECTION))

    assert len({draws(4, purpose) for purpose in Purpose}) == 4


def test_position_is_that_of_the_judged_token():
    """Row j judges first_position + j: one block of two equals two empty ones."""
    scores, session = np.random.default_rng(3).normal(0, 1, (3, 6)), opening(Law.SHARED_NOISE)
    tokens = tuple(shared_noise_choice(scores[j], session.sampling, 5, 0, 20 + j) for j in range(3))

    assert judge(scores, session, Block(tokens[:2]), 20) == Verdict(2, tokens[2])
    assert [judge(scores[j : j + 1], session, EMPTY_BLOCK, 20 + j).added for j in range(3)] == list(tokens)


@pytest.mark.parametrize("law", Law)
def test_bad_row_counts_only_when_it_is_reached(law):
    """Plain decoding would not have computed a row behind a refusal."""
    scores = np.array([[-50.0, 50.0], [np.nan, 0.0]])

    assert judge(scores, opening(law), Block((0,)), 0) == Verdict(0, 1)
    with pytest.raises(BadLaw):
        judge(scores, opening(law), Block((1,)), 0)
