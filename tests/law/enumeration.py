"""Sums every path of a speculative round exactly, for tests of losslessness.

A judge is a black box here: a function from draws to a verdict. Each draw it asks for splits (0, 1) into cells inside which
what happens next is the same; the cells are found by bisection, so a judge that misuses a draw is measured as it is, not as it
should be. The one assumption: along a draw, each outcome holds on one interval.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from specwire.law.accept import Uniforms
from specwire.law.noise import Floats, Purpose
from specwire.law.sampling import Row, cut_to_sparse, law_of
from specwire.law.values import Block, SamplingSpec, SparseLaw, Verdict

Key = tuple[int, Purpose]
Tokens = tuple[int, ...]
Run = Callable[[Uniforms], Verdict]
"""Draws -> verdict, for one block."""
Judge = Callable[[Row, Block], Run]
"""[k + 1, vocab] scores and a block, ready to be judged with any draws."""
SMALLEST = 2.0**-52
PRECISION = 2.0**-48
"""Of each cell's edge: 4e-15, far under the 1e-12 that is claimed."""


@dataclass(frozen=True)
class Tables:
    """A pair of models whose scores depend on every token before, 3 or 4 symbols."""

    vocab: int
    seed: int
    spread: float = 1.5

    def target(self, prefix: Tokens) -> Row:
        return self._row(1, prefix)

    def draft(self, prefix: Tokens) -> Row:
        return self._row(2, prefix)

    def _row(self, model: int, prefix: Tokens) -> Row:
        rng = np.random.default_rng([self.seed, model, len(prefix), *prefix])
        return rng.normal(0.0, self.spread, self.vocab)


class _NeedsDraw(Exception):
    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key


def _outcome(run: Run, fixed: dict[Key, float]) -> Key | Verdict:
    """The verdict, or the next draw that is needed to reach one."""

    def draws(position: int, purpose: Purpose) -> float:
        if (position, purpose) not in fixed:
            raise _NeedsDraw((position, purpose))
        return fixed[position, purpose]

    try:
        return run(draws)
    except _NeedsDraw as need:
        return need.key


def verdicts(run: Run, fixed: dict[Key, float] | None = None, weight: float = 1.0) -> Iterator[tuple[float, Verdict]]:
    """Every verdict of a judge with its probability."""
    fixed = fixed or {}
    outcome = _outcome(run, fixed)
    if isinstance(outcome, Verdict):
        yield weight, outcome
        return

    def at(u: float) -> Key | Verdict:
        return _outcome(run, {**fixed, outcome: u})

    start, last = 0.0, at(1.0 - SMALLEST)
    while start < 1.0 - SMALLEST:
        first = at(start + SMALLEST)
        low, high = start, 1.0
        while first != last and high - low > PRECISION:
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle) == first else (low, middle)
        end = 1.0 if first == last else high
        yield from verdicts(run, {**fixed, outcome: (start + end) / 2}, weight * (end - start))
        start = end


def plain_law(tables: Tables, spec: SamplingSpec, length: int) -> dict[Tokens, float]:
    """Probability of every text of this length under plain decoding."""
    return dict(_extend(tables, spec, (), 1.0, length))


def _extend(
    tables: Tables, spec: SamplingSpec, text: Tokens, weight: float, length: int
) -> Iterator[tuple[Tokens, float]]:
    if len(text) == length:
        yield text, weight
        return
    for token, share in enumerate(law_of(tables.target(text), spec)):
        yield from _extend(tables, spec, (*text, token), weight * float(share), length)


def drafted_blocks(tables: Tables, draft_spec: SamplingSpec, k: int, m: int) -> Iterator[tuple[float, Block]]:
    """Every block a draft can sample, with its probability."""
    paths: list[tuple[float, Tokens, tuple[SparseLaw, ...]]] = [(1.0, (), ())]
    for _ in range(k):
        longer = []
        for weight, tokens, laws in paths:
            law = cut_to_sparse(law_of(tables.draft(tokens), draft_spec), m)
            for token, share in zip(law.ids, law.weights, strict=True):
                longer.append((weight * share / sum(law.weights), (*tokens, token), (*laws, law)))
        paths = longer
    for weight, tokens, laws in paths:
        yield weight, Block(tokens, laws)


def fixed_blocks(vocab: int, k: int) -> Iterator[Block]:
    """Every block without a draft law: proposed without a draw."""
    for tokens in itertools.product(range(vocab), repeat=k):
        yield Block(tokens)


def rows_for(tables: Tables, block: Block) -> Row:
    """The target's scores for a block that follows an empty text. -> [k + 1, vocab]."""
    return np.stack([tables.target(block.tokens[:j]) for j in range(len(block) + 1)])


def speculative_law(
    tables: Tables, spec: SamplingSpec, judge: Judge, blocks: list[tuple[float, Block]], length: int
) -> dict[Tokens, float]:
    """Probability of every text: one judged round, then plain decoding up to `length`."""
    total = dict.fromkeys(itertools.product(range(tables.vocab), repeat=length), 0.0)
    for block_weight, block in blocks:
        for weight, verdict in verdicts(judge(rows_for(tables, block), block)):
            text = verdict.committed(block)
            for whole, share in _extend(tables, spec, text, block_weight * weight, length):
                total[whole] += share
    return total


def largest_error(actual: dict[Tokens, float], expected: dict[Tokens, float]) -> float:
    """Over all texts."""
    assert actual.keys() == expected.keys()
    return max(abs(actual[text] - expected[text]) for text in expected)


def chi_square_z(counts: Floats, expected: Floats) -> float:
    """How many standard deviations a chi-square lies over its mean (Wilson and Hilferty); 4.75 is about one in a million."""
    cells = expected > 0
    assert counts[~cells].sum() == 0
    freedom = int(cells.sum()) - 1
    statistic = float(((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum())
    spread = 2.0 / (9.0 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))
