"""Judges a batch: the blocks of many sessions against the target's scores. The twin of `specwire/law/accept.py`.

Law. The verdict on a block is the reference's for the same scores: it depends on the item's own rows, opening, block and
position, never on what else is in the batch, on the device, or on how many rows there are. Items may differ in everything.

Rows are judged in order and nothing behind the first refusal counts. On the CPU rows behind it are not looked at; elsewhere all
rows are reduced in one pass, and those behind it are ignored. A reached row that is no law gives `BadLaw` for its item alone:
no token is made up for it, accepted tokens before it are not reported, and other items are judged as if it were not there.

Cost on the CPU, shared noise without filters: 0.15 to 0.25 ms per row of 49,152, on one of two shared cores of an AMD EPYC
(Zen 3, 2.4 GHz), by `python -m tests.law.measure_noise`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specwire.law.accept import counter_uniforms, judge_rejection, judge_shared_noise
from specwire.law.errors import BadLaw
from specwire.law.race import fast_law
from specwire.law.sampling import Row
from specwire.law.values import Block, Law, Opening, Verdict
from specwire.lm.sampling_torch import Draw, choose_row, choose_rows_on_device, host_array

Rows = torch.Tensor | Row
"""Scores of a batch, where they lie: a tensor on a device, or numpy on the host. [sum of rows, vocab]."""


@dataclass(frozen=True, slots=True)
class JudgeItem:
    """One session's part of a batch. Its rows are consecutive: one per drafted token and one for the bonus."""

    opening: Opening
    block: Block
    first_position: int
    """Position of the token that row 0 judges; the number of tokens before it."""

    @property
    def rows(self) -> int:
        """Rows of scores it needs."""
        return len(self.block) + 1

    @property
    def by_choice(self) -> bool:
        """True when the target's own choice decides: always, but for draws under `rejection`."""
        return self.opening.law is Law.SHARED_NOISE or self.opening.sampling.greedy

    def draw(self, j: int) -> Draw:
        """How the target chooses at row j."""
        return Draw(self.opening.sampling, self.opening.seed, self.opening.choice, self.first_position + j)


def judge(scores: torch.Tensor, items: Sequence[JudgeItem]) -> list[Verdict | BadLaw]:
    """One verdict per item, in order. [sum of rows, vocab]."""
    assert scores.ndim == 2
    assert scores.shape[0] == sum(item.rows for item in items)
    on_host = scores.device.type == "cpu"
    rows: Rows = host_array(scores) if on_host else scores
    ahead = {} if on_host else choose_ahead(scores, items)
    verdicts: list[Verdict | BadLaw] = []
    start = 0
    for item in items:
        try:
            verdicts.append(judge_item(rows, start, item, ahead))
        except BadLaw as bad:
            verdicts.append(bad)
        start += item.rows
    return verdicts


def judge_item(rows: Rows, start: int, item: JudgeItem, ahead: Mapping[int, int | BadLaw]) -> Verdict:
    """Judges the block whose rows begin at `start`; `ahead` holds choices already made, by row. Raises BadLaw."""
    spec = item.opening.sampling

    def host_row(j: int) -> Row:
        row = rows[start + j]
        return host_array(row) if isinstance(row, torch.Tensor) else row

    def target_choice(j: int) -> int:
        chosen = ahead[start + j] if ahead else choose_row(host_row(j), item.draw(j))
        if isinstance(chosen, BadLaw):
            raise chosen
        return chosen

    if item.by_choice:
        return judge_shared_noise(target_choice, item.block)
    draws = counter_uniforms(item.opening)
    return judge_rejection(lambda j: fast_law(host_row(j), spec), item.block, item.first_position, draws)


def choose_ahead(scores: torch.Tensor, items: Sequence[JudgeItem]) -> dict[int, int | BadLaw]:
    """The target's choice at every row of a batch that is judged by choice. [sum of rows, vocab]."""
    draws: dict[int, Draw] = {}
    start = 0
    for item in items:
        if item.by_choice:
            draws.update({start + j: item.draw(j) for j in range(item.rows)})
        start += item.rows
    rows = list(draws)
    if len(rows) < len(scores):
        scores = scores[torch.tensor(rows, dtype=torch.long, device=scores.device)]
    return dict(zip(rows, choose_rows_on_device(scores, list(draws.values())), strict=True))
