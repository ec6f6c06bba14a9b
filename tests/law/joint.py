"""Exact joint laws: of a few tokens of a table model, with samples held against it, and of one whole round of draft and
target."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.ledger import Ledger, Limits
from draft_service.engine import Drafted
from draft_service.proposers import model as proposing
from draft_service.proposers.base import Want
from draft_service.proposers.model import ModelProposer
from specwire.law.noise import Purpose
from specwire.law.sampling import law_of
from specwire.law.tasks import SessionId
from specwire.law.values import Law, Opening, SamplingSpec, Verdict
from specwire.lm.port import Feed
from specwire.lm.table import TableModel
from specwire.lm.table_config import TableConfig
from target_service import verify
from tests.law.enumeration import PRECISION, SMALLEST, Tables, largest_error, plain_law, rows_for
from tests.law.enumeration import _extend as extended

Tokens = tuple[int, ...]

LEAST_EXPECTED = 5.0
"""Cells expected less often than this are counted as one, since the chi-square law holds for large counts."""
SIGNIFICANT = 1e-6
"""A p-value under this is no accident."""


def joint_law(table: TableConfig, prompt: Tokens, spec: SamplingSpec, length: int) -> dict[Tokens, float]:
    """Probability of every continuation of this length under plain decoding; impossible ones are left out."""
    model = TableModel(table, 1)
    paths: dict[Tokens, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Tokens, float] = {}
        for text, weight in paths.items():
            scores = model.forward([Feed(0, 0, [*prompt, *text], 1)])[0].numpy()
            for token, share in enumerate(law_of(scores, spec)):
                if share > 0.0:
                    longer[*text, token] = weight * float(share)
        paths = longer
    return paths


def chi_square_p(samples: Iterable[Tokens], law: dict[Tokens, float]) -> float:
    """How likely counts as far from the law as these are. 0 when something impossible was sampled.

    Wilson and Hilferty's normal approximation, good to a few percent of the exponent down to 1e-12."""
    counts = Counter(samples)
    if not counts.keys() <= law.keys():
        return 0.0
    total = counts.total()
    cells = np.array([[counts[text], share * total] for text, share in law.items()])
    rare = cells[:, 1] < LEAST_EXPECTED
    if rare.any():
        cells = np.concatenate([cells[~rare], cells[rare].sum(axis=0, keepdims=True)])
    observed, expected = cells.T
    freedom = len(cells) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    spread = 2.0 / (9.0 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1.0 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2.0))


# ------------------------------------------------------------------ one round, every path


class _Needs(Exception):
    """A draw that is not fixed yet, and what was drafted before it was asked for."""

    def __init__(self, key: tuple[int, Purpose], drafted: Tokens) -> None:
        super().__init__(key)
        self.key = key
        self.state = (key, drafted)


class Round:
    """Draft one token, judge it: the product's proposer, draft block, ledger check and judge, with every draw in our hands."""

    def __init__(self, tables: Tables, spec: SamplingSpec, top_m: int) -> None:
        self._tables = tables
        self._opening = Opening(Law.REJECTION, spec, 0, 0, 1)
        self._proposer = ModelProposer(TableModel(TableConfig(vocab_size=tables.vocab), 1), top_m)
        self._ledger = Ledger(SessionId(1, 1), self._opening, (0,), Limits(8, 8, 8, tables.vocab), with_draft=True)
        self._fixed: dict[tuple[int, Purpose], float] = {}
        self._drafted: Tokens = ()

    def _draw(self, position: int, purpose: Purpose) -> float:
        if (position, purpose) not in self._fixed:
            raise _Needs((position, purpose), self._drafted)
        return self._fixed[position, purpose]

    def _play(self) -> Tokens:
        """The committed tokens."""
        self._drafted = ()
        scores = torch.from_numpy(self._tables.draft(()))
        proposal = self._proposer._draw_from_cut(scores, Want(self._opening, 0, 1))
        self._drafted = proposal.tokens
        block = self._ledger._sound(Drafted(list(proposal.tokens), list(proposal.laws)).block())
        verdict = verify.judge(
            torch.from_numpy(rows_for(self._tables, block)), [verify.JudgeItem(self._opening, block, 0)]
        )[0]
        assert isinstance(verdict, Verdict)
        return verdict.committed(block)

    def _at(self, fixed: dict[tuple[int, Purpose], float]) -> Tokens | tuple[tuple[int, Purpose], Tokens]:
        self._fixed = fixed
        try:
            return self._play()
        except _Needs as needs:
            return needs.state

    def texts(self) -> dict[Tokens, float]:
        """Probability of each committed text."""
        total: dict[Tokens, float] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(proposing, "uniform", lambda seed, choice, position, purpose: self._draw(position, purpose))
            patch.setattr(verify, "counter_uniforms", lambda opening: self._draw)
            self._sum({}, 1.0, total)
        return total

    def _sum(self, fixed: dict[tuple[int, Purpose], float], weight: float, total: dict[Tokens, float]) -> None:
        """Splits the next draw that is needed into cells, by bisection, in each of which one thing happens."""
        outcome = self._at(fixed)
        if outcome and isinstance(outcome[0], int):
            total[outcome] = total.get(outcome, 0.0) + weight
            return
        key: Any = outcome[0]
        start, last = 0.0, self._at({**fixed, key: 1.0 - SMALLEST})
        while start < 1.0 - SMALLEST:
            first = self._at({**fixed, key: start + SMALLEST})
            low, high = start, 1.0
            while first != last and high - low > PRECISION:
                middle = (low + high) / 2
                low, high = (middle, high) if self._at({**fixed, key: middle}) == first else (low, middle)
            end = 1.0 if first == last else high
            self._sum({**fixed, key: (start + end) / 2}, weight * (end - start), total)
            start = end


def round_error(tables: Tables, spec: SamplingSpec, top_m: int) -> float:
    """How far one round with a drafted token, and plain decoding after it, are from the target's law of two tokens."""
    expected = plain_law(tables, spec, 2)
    actual = dict.fromkeys(expected, 0.0)
    for text, weight in Round(tables, spec, top_m).texts().items():
        for whole, share in extended(tables, spec, text, weight, 2):
            actual[whole] += share
    return largest_error(actual, expected)
