"""Proof by enumeration: the law of the output is the target's, whatever the draft. For the reference and for the torch twin."""

from __future__ import annotations

import pytest
import torch

from specwire.law import accept
from specwire.law.accept import Uniforms
from specwire.law.noise import Purpose
from specwire.law.sampling import Row, law_of
from specwire.law.values import Block, Law, Opening, SamplingSpec, SparseLaw, Verdict
from target_service import verify
from tests.law.enumeration import (
    Judge,
    Run,
    Tables,
    drafted_blocks,
    fixed_blocks,
    largest_error,
    plain_law,
    rows_for,
    speculative_law,
    verdicts,
)

SPECS = {
    "plain": SamplingSpec(),
    "cold": SamplingSpec(temperature=0.4),
    "filtered": SamplingSpec(temperature=1.3, top_k=3, top_p=0.8, min_p=0.05),
}


def reference(spec: SamplingSpec) -> Judge:
    def judge(rows: Row, block: Block) -> Run:
        laws = [law_of(row, spec) for row in rows]
        return lambda draws: accept.judge_rejection(laws.__getitem__, block, 0, draws)

    return judge


def twin(spec: SamplingSpec, monkeypatch: pytest.MonkeyPatch) -> Judge:
    opening = Opening(Law.REJECTION, spec, seed=1, choice=0, prompt_length=1)

    def judge(rows: Row, block: Block) -> Run:
        scores, items = torch.from_numpy(rows), [verify.JudgeItem(opening, block, 0)]

        def run(draws: Uniforms) -> Verdict:
            monkeypatch.setattr(verify, "counter_uniforms", lambda opening: draws)
            verdict = verify.judge(scores, items)[0]
            assert isinstance(verdict, Verdict)
            return verdict

        return run

    return judge


@pytest.fixture(params=["reference", "twin"])
def judge_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    return reference if request.param == "reference" else lambda spec: twin(spec, monkeypatch)


@pytest.mark.parametrize(
    ("vocab", "k", "m", "name"),
    [(3, 1, 3, name) for name in SPECS]
    + [(4, 1, 2, name) for name in SPECS]
    + [(3, 2, 2, "plain"), (4, 2, 3, "filtered")],
)
def test_drafted_block_leaves_the_targets_law(judge_for, vocab, k, m, name):
    """Every drafted path and every verdict summed is the target's joint law, though the draft's law is cut and quantised."""
    tables, spec = Tables(vocab, seed=5), SPECS[name]
    blocks = list(drafted_blocks(tables, SamplingSpec(temperature=0.9), k, m))

    actual = speculative_law(tables, spec, judge_for(spec), blocks, k + 1)

    assert largest_error(actual, plain_law(tables, spec, k + 1)) < 1e-12


def test_three_drafted_tokens_leave_the_targets_law(judge_for):
    """The same for three tokens, where a refusal can fall in the middle."""
    tables, spec = Tables(3, seed=8), SamplingSpec(temperature=0.8)
    blocks = list(drafted_blocks(tables, SamplingSpec(), 3, 2))

    actual = speculative_law(tables, spec, judge_for(spec), blocks, 4)

    assert largest_error(actual, plain_law(tables, spec, 4)) < 1e-12


@pytest.mark.parametrize("k", [0, 1, 2])
def test_any_fixed_block_leaves_the_targets_law(judge_for, k):
    """A block proposed without draws (n-gram, best token, none) is a point mass: exact for each block on its own."""
    tables, spec = Tables(3, seed=2), SPECS["filtered"]
    expected = plain_law(tables, spec, k + 1)

    errors = [
        largest_error(speculative_law(tables, spec, judge_for(spec), [(1.0, block)], k + 1), expected)
        for block in fixed_blocks(3, k)
    ]

    assert max(errors) < 1e-12


def test_token_outside_its_declared_law_is_judged_as_a_point_mass(judge_for):
    """A draft that breaks its word cannot have drawn the token from that law, and the output still follows the target's."""
    tables, spec = Tables(3, seed=3), SamplingSpec()
    block = Block((2,), (SparseLaw((0, 1), (3, 1)),))

    actual = speculative_law(tables, spec, judge_for(spec), [(1.0, block)], 2)

    assert largest_error(actual, plain_law(tables, spec, 2)) < 1e-12


@pytest.mark.parametrize("name", SPECS)
def test_probabilities_of_verdicts_sum_to_one(judge_for, name):
    """The enumeration leaves no verdict out."""
    tables, judge = Tables(4, seed=11), judge_for(SPECS[name])

    totals = [
        sum(weight for weight, _ in verdicts(judge(rows_for(tables, block), block)))
        for _, block in drafted_blocks(tables, SamplingSpec(), 1, 3)
    ]

    assert totals == pytest.approx([1.0] * len(totals), abs=1e-13)


WRONG_RULES = {
    "ratio inverted": ("accept_probability", lambda target, draft: min(1.0, draft / max(target, 1e-300))),
    "correction drawn from the target": ("residual", lambda target, draft: target),
    "bonus from the wrong row": ("bonus_row", lambda block: 0),
    "acceptance at even odds": ("accepts", lambda probability, position, draws: draws(position, Purpose.ACCEPT) < 0.5),
    "judged with a law it was not drawn from": ("draft_law_at", lambda block, j: SparseLaw((0, 1, 2), (1, 1, 1))),
}


@pytest.mark.parametrize("mistake", WRONG_RULES)
def test_enumeration_catches_a_wrong_rule(judge_for, monkeypatch, mistake):
    """The proof would notice: each seeded mistake moves the law by far more than rounding."""
    monkeypatch.setattr(accept, *WRONG_RULES[mistake])
    tables, spec = Tables(3, seed=5), SamplingSpec()
    blocks = list(drafted_blocks(tables, SamplingSpec(temperature=0.9), 1, 3))

    actual = speculative_law(tables, spec, judge_for(spec), blocks, 2)

    assert largest_error(actual, plain_law(tables, spec, 2)) > 1e-3
