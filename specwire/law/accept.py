"""The acceptance laws. This is the reference; `target_service/verify.py` runs it over a batch.

Losslessness. Let p be the target's law at a position, given everything before it, and q the law the drafted token was
drawn from (Leviathan et al. 2023, algorithm 1).

    rejection      a drafted x stands with probability min(1, p(x)/q(x)); else one token is drawn from max(p - q, 0),
                   normalised.  P(x) = min(p(x), q(x)) + (1 - sum min(p, q)) * max(p(x) - q(x), 0) / sum max(p - q, 0)
                   = p(x), since 1 - sum min(p, q) = sum max(p - q, 0).

So each committed token follows the target's law given the tokens before it, whatever q is: cut, quantised or a point
mass. By induction the joint law is the target's, provided that no draw serves two decisions, that the bonus comes from
the row after the last accepted token, and that nobody drops a drafted token because of what it is. After the first
refusal nothing more is read, so the draws of later positions are still fresh when those positions are drafted again.

    shared_noise   the target's own choice at each row is the output; a drafted token stands when it is that choice.
                   Output is that of plain decoding token by token; all that is needed is that the noise is the same.
    greedy         either law with a point mass at every row: shared noise without the noise.

Position of a token = its index in prompt plus output. Row j of a block judges position first_position + j; a block of
k tokens has k + 1 rows, the last one for the bonus. All draws are functions of (seed, choice, position, purpose):
judging again gives the same verdict. Rows are asked for one at a time, and a row that is no law (`BadLaw`) matters only
when it is reached: plain decoding would not have computed a row behind a refusal either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from specwire.law.noise import Floats, Purpose, uniform
from specwire.law.sampling import Row, law_of, sample, shared_noise_choice
from specwire.law.values import Block, Law, Opening, SparseLaw, Verdict

Uniforms = Callable[[int, Purpose], float]
"""(position, purpose) -> (0, 1). The same arguments give the same number."""


def counter_uniforms(opening: Opening) -> Uniforms:
    """The draws of a session."""
    return partial(uniform, opening.seed, opening.choice)


def judge(rows: Row, opening: Opening, block: Block, first_position: int) -> Verdict:
    """Judges one block. [k + 1, vocab] scores of the target."""
    assert rows.ndim == 2
    assert len(rows) == len(block) + 1
    spec, seed, choice = opening.sampling, opening.seed, opening.choice
    if opening.law is Law.REJECTION:
        draws = counter_uniforms(opening)
        return judge_rejection(lambda j: law_of(rows[j], spec), block, first_position, draws)
    return judge_shared_noise(lambda j: shared_noise_choice(rows[j], spec, seed, choice, first_position + j), block)


def judge_shared_noise(target_choice: Callable[[int], int], block: Block) -> Verdict:
    """A drafted token stands when the target chooses it. `target_choice(j)` is the target's token at row j."""
    for j, token in enumerate(block.tokens):
        chosen = target_choice(j)
        if chosen != token:
            return Verdict(j, chosen)
    return Verdict(len(block), target_choice(bonus_row(block)))


def judge_rejection(target_law: Callable[[int], Floats], block: Block, first_position: int, draws: Uniforms) -> Verdict:
    """Accepts or corrects. `target_law(j)` is the target's law at row j, [vocab]."""
    for j, token in enumerate(block.tokens):
        target, draft, position = target_law(j), draft_law_at(block, j), first_position + j
        ratio = accept_probability(target_probability(target, token), draft_probability(draft, token))
        if not accepts(ratio, position, draws):
            return Verdict(j, sample(residual(target, draft), draws(position, Purpose.CORRECTION)))
    row = bonus_row(block)
    return Verdict(len(block), sample(target_law(row), draws(first_position + row, Purpose.BONUS)))


def accepts(probability: float, position: int, draws: Uniforms) -> bool:
    """The acceptance draw of a position: independent of the draft's draw, which has another purpose."""
    return draws(position, Purpose.ACCEPT) < probability


def accept_probability(target_probability: float, draft_probability: float) -> float:
    """min(1, p(x) / q(x))."""
    return min(1.0, target_probability / draft_probability)


def draft_law_at(block: Block, j: int) -> SparseLaw:
    """The law token j was drawn from. A block without laws was proposed without draws: point masses.

    A token outside its own declared law cannot have been drawn from it; as a point mass it is judged soundly all the same."""
    token = block.tokens[j]
    if block.laws and token in block.laws[j].ids:
        return block.laws[j]
    return SparseLaw((token,), (1,))


def target_probability(target: Floats, token: int) -> float:
    """Probability of one token under the target's law; a token it does not have has none. [vocab]."""
    return float(target[token]) if token < len(target) else 0.0


def draft_probability(draft: SparseLaw, token: int) -> float:
    """Probability of one token under a cut law."""
    return draft.weights[draft.ids.index(token)] / sum(draft.weights)


def residual(target: Floats, draft: SparseLaw) -> Floats:
    """max(p - q, 0), not normalised. [vocab] -> [vocab].

    When target and draft agree, nothing is left and a refusal is a matter of rounding: fall back to the target's law."""
    left = target.copy()
    ids, weights = np.array(draft.ids, dtype=np.int64), np.array(draft.weights, dtype=np.float64)
    known = ids < len(target)
    left[ids[known]] -= weights[known] / sum(draft.weights)
    np.maximum(left, 0.0, out=left)
    return left if left.sum() > 0.0 else target


def bonus_row(block: Block) -> int:
    """The row after the last drafted token."""
    return len(block)
